package cli

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/cpuguy83/go-md2man/v2/md2man"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

// configPage is vnicd.yaml(5) in Markdown. Arguments: version, fragmentsHelp, keys, configExample.
const configPage = `%% "VNICD.YAML" "5" "" "vnicd %s" "vnicd"
# NAME
vnicd.yaml - configuration of vnicd

# SYNOPSIS
**/etc/vnicd/vnicd.yaml**, **/etc/vnicd/vnicd.d/\*.yaml**

# DESCRIPTION
**vnicd(8)** reads a YAML file, **/etc/vnicd/vnicd.yaml** unless **--config** names another, and its fragments. All of
them are one configuration, of which the daemon and every command read the whole. Unknown keys are errors.
**vnicd check** reports every mistake with its file and line; **vnicd reload** applies changed files to the running
daemon. A file with mistakes is never skipped: the daemon does not start with it, and a reload changes nothing.

%s

An entry of a list stands in one file as a whole. A fragment and the directory must belong to root or to the main
file's owner, and nobody may be able to write to them who may not write to the main file.

# KEYS
Each key is written with the sections and lists that contain it: **vtep.port** is the key **port** of the section
**vtep**, and **vms[].mac** the key **mac** of each entry of the list **vms**. Defaults are in brackets.

%s
# EXAMPLE
Two VMs in a tenant network that also spans the host 192.0.2.2. This host has an address in it, too.

~~~
%s~~~

# FILES
**/etc/vnicd/vnicd.yaml**
: The main file.

**/etc/vnicd/vnicd.d/\*.yaml**
: Its fragments. **vnicd network add --save** and **vnicd vm add --save** write such files.

**/run/vnicd**
: The sockets, unless **run-dir** names another directory.

**/usr/share/vnicd/vnicd.schema.json**
: A JSON Schema of the configuration, by which editors complete and check it.

**/usr/share/doc/vnicd/configuration.md**
: The same keys, and more about some of them.

# SEE ALSO
**vnicd(8)**, **vnicd-check(8)**, **vnicd-reload(8)**, **vnicd-run(8)**, **vnicd-schema(8)**
`

const configExample = `vtep:
  local: 192.0.2.1
networks:
  - name: blue
    vni: 100
    peers: [192.0.2.2]
    tap:
      name: blue0
      addresses: [10.0.0.254/24]
vms:
  - name: vm1
    network: blue
    mac: "02:00:00:00:00:01"
    ips: [10.0.0.1]
  - name: vm2
    network: blue
    mac: "02:00:00:00:00:02"
    rate: 10G
`

// plainRoff makes groff print characters as ASCII has them, not as hyphens and accents, so that keys and examples can
// be copied.
var plainRoff = strings.NewReplacer(`\-`, `\-`, "-", `\-`, "^", `\(ha`, "~", `\(ti`)

// configManual returns vnicd.yaml(5). Its keys are those of docs/configuration.md and of the schema.
func configManual(version string) []byte {
	var keys strings.Builder
	for _, s := range config.Sections {
		fmt.Fprintf(&keys, "### %s\n", s.Title)
		for _, k := range s.Keys {
			text := strings.ReplaceAll(k.Plain(), "] (", `] \(`) // which would be a link
			fmt.Fprintf(&keys, "**%s**\n: %s\n\n", k.Key, text)
		}
	}
	page := md2man.Render(fmt.Appendf(nil, configPage, version, fragmentsHelp, keys.String(), configExample))
	page = regexp.MustCompile(`\n\n+`).ReplaceAll(page, []byte("\n")) // an empty line in roff is one in the page
	return []byte(plainRoff.Replace(string(page)))
}
