package cli

import (
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/lab/cluster"
)

// completed completes the last word of a command line, which ends with a blank if that is empty. It returns the
// completions, without descriptions, and what the shell may add: files, directories or nothing.
func completed(t *testing.T, line ...string) string {
	t.Helper()
	var out, errOut strings.Builder
	words := append([]string{cobra.ShellCompNoDescRequestCmd}, line...)
	if status := Main("test", words, &out, &errOut); status != exitOK {
		t.Errorf("%q: status %d", line, status)
	}
	// The scripts discard this line.
	if !regexp.MustCompile(`^Completion ended with directive: \w+\n$`).MatchString(errOut.String()) {
		t.Errorf("%q: %s", line, errOut.String())
	}
	text, directive, _ := strings.Cut(" "+strings.ReplaceAll(out.String(), "\n", " "), " :")
	more, known := map[string]string{"0 ": " FILES", "4 ": "", "16 ": " DIRECTORIES"}[directive]
	if !known {
		t.Errorf("%q: directive %q", line, directive)
	}
	return strings.TrimSpace(text + more)
}

const completionConfig = `control-group: root
run-dir: DIR
networks:
  - {name: blue, vni: 100, tap: {name: blue0}}
  - {name: red, vni: 200}
vms:
  - {name: one, network: blue, mac: "02:00:00:00:00:01"}
applications:
  - {name: app, network: red, mac: "02:00:00:00:00:a1"}
`

// completionFile writes a configuration; DIR in its text is a directory of its own.
func completionFile(t *testing.T, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "vnicd.yaml")
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(text, "DIR", filepath.Dir(path))), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

type completionCase struct{ line, want string }

func checkCompletion(t *testing.T, path string, list []completionCase) {
	t.Helper()
	for _, x := range list {
		if got := completed(t, append([]string{"-c", path}, strings.Split(x.line, " ")...)...); got != x.want {
			t.Errorf("vnicd %s: %q, want %q", x.line, got, x.want)
		}
	}
}

// Names are those of the running daemon, whatever has been added to it and removed from it.
func TestCompletionOfDaemon(t *testing.T) {
	defer func(d time.Duration) { completionTime = d }(completionTime)
	completionTime = time.Minute // the machine may be busy
	l := newLab(t)
	fragment(t, l.config, "app.yaml",
		"applications: [{name: app, network: blue, mac: \"02:00:00:00:00:a1\"}]\n")
	l.ok("reload")
	l.ok("network add green vni 200")
	l.ok("vm add two network green mac 02:00:00:00:00:02")
	fragment(t, l.config, "later.yaml", "networks: [{name: later, vni: 300}]\n")
	list := []completionCase{
		{"vm del ", "app one two"}, {"network del ", "blue green"}, {"attach ", "one two"},
		{"capture ", "app one two vtep vxlan 192.0.2.1"}, {"capture --network green ", "two vtep vxlan 192.0.2.1"},
	}
	checkCompletion(t, l.config, list)
	// A control socket that is named needs no configuration, and that for questions is enough.
	for _, socket := range []string{"vnicd.sock", "vnicd-status.sock"} {
		for _, path := range []string{completionFile(t, "vms: [{"), filepath.Join(l.dir, "none.yaml")} {
			for _, x := range list {
				at := strings.LastIndex(x.line, " ")
				checkCompletion(t, path, []completionCase{
					{x.line[:at] + " --control " + filepath.Join(l.dir, socket) + " ", x.want}})
			}
		}
	}
}

// servedLab answers those who ask for the state of a lab that has been claimed.
func servedLab(t *testing.T, name string, vms ...string) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "vnicd-lab", name, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			var request json.RawMessage
			_, _ = io.ReadFull(c, make([]byte, 1))
			_ = json.NewDecoder(c).Decode(&request)
			_ = json.NewEncoder(c).Encode(cluster.State{State: "up", VMs: vms})
			_ = c.Close()
		}
	}()
}

// Without a daemon the names are those of the configuration. With a mistake in that there are none.
func TestCompletion(t *testing.T) {
	path := completionFile(t, completionConfig)
	fragment(t, path, "two.yaml", "vms: [{name: two, network: red, mac: \"02:00:00:00:00:02\"}]\n")
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	for _, name := range []string{"lab2", "lab1"} {
		p, err := cluster.Claim(name)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
	}
	servedLab(t, "lab2", "vm1", "vm2", "vm3")
	list := []completionCase{
		{"status ", "app one two"}, {"status one ", ""}, {"status -j ", "app one two"},
		{"qemu-args ", "one two"}, {"qemu-args --lines ", "one two"}, {"qemu-args --memory ", ""},
		{"qemu-args --qemu ", "FILES"}, {"libvirt-xml ", "one two"}, {"top ", ""},
		{"vmm-args ", "cloud-hypervisor"}, {"vmm-args cloud-hypervisor ", "one two"}, {"vmm-args --binary ", "FILES"},
		{"cdi ", "app"}, {"cdi --output ", "FILES"},
		{"attach --qmp ", "FILES"}, {"attach --qmp x ", "one two"}, {"detach --qmp x ", "one two"},
		{"backend ", "hca net"}, {"backend net --vm ", "one two"}, {"backend net --socket-path=", "FILES"},
		{"capture ", "app blue0 one two vtep"}, {"capture --network ", "blue red"}, {"capture -w ", "FILES"},
		{"capture --network blue ", "blue0 one vtep"}, {"capture one ", ""},

		{"network ", "add add-peer add-tap del del-peer del-tap show"}, {"network show ", "blue red"},
		{"network add ", ""}, {"network add x ", "ageing learn-peers max-entries mtu multicast peer storm vni"},
		{"network add x vni ", ""}, {"network add --save x vni 1 learn-peers peer 192.0.2.2 ",
			"ageing max-entries mtu multicast peer storm"},
		{"network add x multicast ", "snoop flood"}, {"network del --save ", "blue red"},
		{"network add-peer ", "blue red"}, {"network add-peer blue ", ""}, {"network del-peer ", "blue red"},
		{"network add-tap ", "blue red"}, {"network add-tap blue ", ""}, {"network del-tap ", "blue red"},
		{"network add-tap blue b0 ", "address bridge offloads rate"}, {"network add-tap blue b0 offloads ", "on off"},

		{"vm show ", ""}, {"vm add ", ""}, {"vm add x network ", "blue red"}, {"vm add x qmp ", "FILES"},
		{"vm add x network blue hca ", "auto vhost-user ivshmem"}, {"vm add x dma ", "rw ro blocked"},
		{"vm add x config ", ""}, {"vm add x network blue mac 02:00:00:00:00:09 ip 10.0.0.1 storm 1 user u group g queues 1 ",
			"dma hca ip memory-budget memory-weight qmp rate"},
		{"vm del ", "app one two"}, {"vm move ", "app one two"}, {"vm move one ", "network"},
		{"vm move one network ", "blue red"}, {"vm move one network red ", ""}, {"vm quarantine ", "app one two"},
		{"vm quarantine --read-only ", "app one two"}, {"vm release ", "app one two"},

		{"port show ", "blue red"}, {"fdb show ", "blue red"}, {"neigh show ", "blue red"},
		{"fdb add 02:00:00:00:00:09 ", "network port vlan vtep"}, {"fdb add 02:00:00:00:00:09 network ", "blue red"},
		{"fdb add 02:00:00:00:00:09 network red port ", "app blue0 one two"}, {"fdb del ", ""},
		{"fdb del 02:00:00:00:00:09 ", "network vlan"}, {"neigh add 10.0.0.1 network red ", "mac vlan"},
		{"neigh del 10.0.0.1 network ", "blue red"}, {"connection show ", "app one two"},
		{"conn show ", "app one two"}, {"evpn routes ", "blue red"}, {"evpn clear 02:00:00:00:00:09 network ", "blue red"},

		{"run --log-level ", "trace debug info warn error"}, {"--config ", "FILES"}, {"status --control ", "FILES"},
		{"check ", ""}, {"upgrade --unit ", ""}, {"lab run -- ", "FILES"}, {"lab run -- x ", "FILES"},
		{"lab run --logs ", "DIRECTORIES"}, {"lab shell --kernel ", strings.Join(cluster.Kernels(), " ")}, {"lab shell ", ""},
		{"lab run --packages ", ""}, {"lab exec -- ", "FILES"}, {"lab exec --vm ", ""},
		{"lab exec --name lab2 --vm ", "vm1 vm2 vm3"}, {"lab shell --name lab1 --vm ", ""},
		{"lab exec --name ", "lab1 lab2"}, {"lab shell --name ", "lab1 lab2"},
		{"lab down ", "lab1 lab2"}, {"lab down lab1 ", ""}, {"lab list ", ""}, {"lab up ", ""},
		{"lab up --logs ", "DIRECTORIES"},
	}
	checkCompletion(t, path, list)

	// What accepts connections and does not answer is no daemon.
	silent, err := net.Listen("unix", filepath.Join(filepath.Dir(path), "vnicd.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	checkCompletion(t, path, []completionCase{{"vm del ", "app one two"}})

	names := regexp.MustCompile(`\b(app|one|two|blue0?|red)\b *`)
	for _, text := range []string{"", "vms: [{", completionConfig + "nonsense: 1\n"} {
		wrong := completionFile(t, text)
		if text == "" {
			wrong = filepath.Join(t.TempDir(), "none.yaml")
		}
		var nameless []completionCase
		for _, x := range list {
			nameless = append(nameless, completionCase{x.line, strings.TrimSpace(names.ReplaceAllString(x.want, ""))})
		}
		checkCompletion(t, wrong, nameless)
	}
}

// Every argument and flag that takes a name completes it, and names of files are completed only where a file is meant.
func TestEverythingCompletes(t *testing.T) {
	path := completionFile(t, completionConfig)
	argument := regexp.MustCompile(`^[-\w]+ (?:--qmp SOCKET )?\[?([A-Z]+)\b`)
	option := regexp.MustCompile(`--([-\w]+)(?: (\S+))?   +.*`)
	names := map[string]string{"VM": "one", "APPLICATION": "app", "NETWORK": "blue", "PORT": "blue0", "vm NAME": "one",
		"network NAME": "blue"}
	arguments, flags := 0, 0
	var look func(above *cobra.Command, words []string)
	look = func(above *cobra.Command, words []string) {
		for _, c := range above.Commands() {
			if c.Name() == "help" || c.Name() == "completion" {
				continue
			}
			line := append(slices.Clone(words), c.Name())
			got := strings.Fields(completed(t, append(line, "")...))
			if m := argument.FindStringSubmatch(c.Use); m != nil && c.Name() != "add" {
				kind := m[1]
				if kind == "NAME" {
					kind = above.Name() + " NAME"
				}
				if name, is := names[kind]; is {
					arguments++
					if !slices.Contains(got, name) {
						t.Errorf("%s completes %q, not %s", c.CommandPath(), got, name)
					}
				}
			}
			runs := slices.Contains([]string{"vnicd lab run", "vnicd lab exec"}, c.CommandPath())
			if slices.Contains(got, "FILES") != runs {
				t.Errorf("%s completes %q", c.CommandPath(), got)
			}
			for _, m := range option.FindAllStringSubmatch(c.Flags().FlagUsages(), -1) {
				flags++
				got := completed(t, append(line, "--"+m[1]+"=")...)
				file := slices.Contains([]string{"file", "path", "socket", "binary"}, m[2])
				name := names[strings.ToUpper(m[1])]
				if above.Name() == "lab" {
					name = "" // its VMs are not the daemon's
				}
				if file != (got == "FILES") || !strings.Contains(got, name) {
					t.Errorf("%s --%s %s completes %q", c.CommandPath(), m[1], m[2], got)
				}
			}
			look(c, line)
		}
	}
	look((&app{version: "test", out: io.Discard, err: io.Discard}).rootCmd(), []string{"-c", path})
	if arguments < 20 || flags < 50 {
		t.Errorf("%d arguments, %d flags", arguments, flags)
	}
}
