package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "write the generated documents in place of comparing them")

const root = "../../../.."

// The published schema and the tables of keys are those of this source.
func TestDocuments(t *testing.T) {
	schema, err := JSONSchema()
	if err != nil {
		t.Fatal(err)
	}
	compare := func(path string, make func(before string) string) {
		t.Helper()
		path = filepath.Join(root, path)
		before, err := os.ReadFile(path)
		if err != nil && !*update {
			t.Fatal(err)
		}
		want := make(string(before))
		if *update {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		} else if string(before) != want {
			t.Errorf("%s is out of date: go test ./cmd/vnicd/internal/config -run TestDocuments -update", path)
		}
	}
	compare("docs/vnicd.schema.json", func(string) string { return string(schema) })
	compare("docs/configuration.md", func(before string) string {
		m := regexp.MustCompile(`(?s)^(.*\n<!-- Made [^>]*-->\n).*(<!-- End -->\n.*)$`).FindStringSubmatch(before)
		if m == nil {
			t.Fatal("docs/configuration.md does not say where the keys begin and end")
		}
		var b strings.Builder
		for _, s := range Sections {
			fmt.Fprintf(&b, "\n%s:\n\n%s", s.Title, s.Table())
		}
		return m[1] + b.String() + "\n" + m[2]
	})
}

// validator checks YAML texts against the schema as an editor does, formats included.
type validator struct {
	*testing.T
	schema *jsonschema.Schema
}

func newValidator(t *testing.T) *validator {
	t.Helper()
	text, err := JSONSchema()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("vnicd.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("vnicd.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return &validator{t, s}
}

func (v *validator) check(text string) error {
	v.Helper()
	var value any
	if err := yaml.Unmarshal([]byte(text), &value); err != nil {
		v.Fatalf("%v in\n%s", err, text)
	}
	plain, err := json.Marshal(value)
	if err != nil {
		v.Fatal(err)
	}
	if value, err = jsonschema.UnmarshalJSON(bytes.NewReader(plain)); err != nil {
		v.Fatal(err)
	}
	return v.schema.Validate(value)
}

// leaves calls f with each key of a schema that has a value of its own, or a list of them.
func (s *Schema) leaves(path string, f func(path string, s *Schema)) {
	switch {
	case s.Items != nil && s.Items.Properties != nil:
		s.Items.leaves(path+"[]", f)
	case s.Properties != nil:
		for _, k := range slices.Sorted(maps.Keys(s.Properties)) {
			s.Properties[k].leaves(join(path, k), f)
		}
	default:
		f(path, s)
	}
}

// Every key of the schema is described, and every description is of a key. What is described has a type and excludes
// other keys.
func TestSchemaDescriptions(t *testing.T) {
	left := descriptions()
	s := newParser().top(&Config{}).schema().described("", descriptions())
	n := 0
	s.leaves("", func(path string, s *Schema) {
		n++
		delete(left, path)
		if s.Description == "" {
			t.Errorf("docs.go does not describe %s", path)
		}
		if strings.Contains(s.Description, "](") {
			t.Errorf("%s: a link in %q", path, s.Description)
		}
		if s.Type == nil && s.Enum == nil && s.AnyOf == nil {
			t.Errorf("%s has no type", path)
		}
	})
	if n < 110 {
		t.Errorf("%d keys", n)
	}
	delete(left, "applications[]") // lists and mappings may be described, too
	delete(left, "vms[].limits")
	for path := range left {
		t.Errorf("docs.go describes %s, which is no key", path)
	}
	if text, _ := JSONSchema(); bytes.Count(text, []byte(`"additionalProperties": false`)) !=
		bytes.Count(text, []byte(`"properties"`)) {
		t.Error("a mapping may have other keys")
	}
}

// Values has the words that a key takes, and none for other keys.
func TestValues(t *testing.T) {
	for _, x := range []struct{ path, want string }{
		{"log-level", "trace debug info warn error"}, {"vms[].hca", "auto vhost-user ivshmem"}, {"engines", ""},
		{"vtep.peer-ports", "auto reserved any"}, {"networks[].tap.rate", ""},
	} {
		if got := strings.Join(Values(x.path), " "); got != x.want {
			t.Errorf("%s: %q, want %q", x.path, got, x.want)
		}
	}
}

// with returns a configuration in which the key at path has a value, and the place of the key in messages. What the key
// needs beside it is there; dir has key files.
func with(t *testing.T, dir, path, value string) (text, key string) {
	t.Helper()
	tree := map[string]any{}
	set := func(path string, value any) {
		at, parts := tree, strings.Split(path, ".")
		for _, part := range parts[:len(parts)-1] {
			name, list := strings.CutSuffix(part, "[]")
			if at[name] == nil && list {
				at[name] = []any{map[string]any{}}
			} else if at[name] == nil {
				at[name] = map[string]any{}
			}
			if list {
				at = at[name].([]any)[0].(map[string]any)
			} else {
				at = at[name].(map[string]any)
			}
		}
		at[parts[len(parts)-1]] = value
	}
	section, _, _ := strings.Cut(path, ".")
	for _, x := range []struct{ sections, path, value string }{
		{"networks[] vms[] applications[]", "networks[].name", "n"},
		{"networks[] vms[] applications[]", "networks[].vni", "1"},
		{"vms[]", "vms[].name", "v"}, {"vms[]", "vms[].network", "n"}, {"vms[]", "vms[].mac", `"02:00:00:00:00:01"`},
		{"applications[]", "applications[].name", "a"}, {"applications[]", "applications[].network", "n"},
		{"applications[]", "applications[].mac", `"02:00:00:00:00:02"`}, {"engine-cpus", "engines", "3"},
		{"underlay evpn networks[]", "vtep.local", "10.9.0.1"}, {"evpn networks[]", "evpn.as", "65001"},
		{"evpn networks[]", "evpn.neighbours[].address", "192.0.2.9"}, {"underlay", "underlay.protect", "wireguard"},
		{"underlay", "underlay.private-key-file", dir + "/key"}, {"underlay", "underlay.peers[].vtep", "10.9.0.2"},
		{"underlay", "underlay.peers[].endpoint", `"192.0.2.2:51820"`},
		{"underlay", "underlay.peers[].public-key", strings.Repeat("A", 42) + "E="},
	} {
		if slices.Contains(strings.Fields(x.sections), section) {
			set(x.path, node(t, x.value))
		}
	}
	if strings.Contains(path, "tap.") {
		set("networks[].tap.name", node(t, "t"))
	}
	set(path, node(t, value))
	b, err := yaml.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	return string(b), strings.ReplaceAll(path, "[]", "[0]")
}

// node parses a value.
func node(t *testing.T, value string) *yaml.Node {
	t.Helper()
	var v yaml.Node
	if err := yaml.Unmarshal([]byte("x: "+value), &v); err != nil {
		t.Fatal(err)
	}
	return v.Content[0].Content[1]
}

// mistaken reports whether vnicd finds a mistake in the value of a key.
func mistaken(t *testing.T, text, key string) bool {
	t.Helper()
	_, err := Parse("x.yaml", []byte(text))
	var e *Errors
	if err != nil && !errors.As(err, &e) {
		t.Fatal(err)
	}
	return err != nil && slices.ContainsFunc(e.List(), func(x Error) bool { return strings.HasPrefix(x.Key, key) })
}

// samples are values of a key that vnicd accepts, and that it refuses.
type samples struct{ good, bad []string }

// textSamples are those of keys with texts, by their path with the keys of applications as VMs'. dir has key files.
func textSamples(dir string) map[string]samples {
	var (
		anything  = samples{good: []string{"some-text"}}
		paths     = samples{[]string{"/run/x"}, []string{"run/x"}}
		sockets   = samples{paths.good, []string{"run/x", "/" + strings.Repeat("x", 107)}}
		names     = samples{[]string{"a", "A-1.b_2"}, []string{"-a", "a b", "a/b", strings.Repeat("a", 33)}}
		devices   = samples{[]string{"tap0", "a.1"}, []string{"a name", strings.Repeat("a", 16)}}
		ids       = samples{[]string{"root", "0", "1000"}, []string{"-1", "2147483648"}}
		address   = samples{[]string{"192.0.2.1", `"2001:db8::1"`}, []string{"192.0.2", "x", "192.0.2.1/24", `"2001:db8::g"`}}
		addresses = samples{[]string{`[192.0.2.1, "2001:db8::1"]`, "[]", ""}, []string{"[x]", "192.0.2.1", "[[192.0.2.1]]"}}
		sizes     = samples{[]string{"256MiB", "1GiB", "2 TiB", "8192KiB"},
			[]string{"256", "256MB", "-1GiB", "1.5GiB", "MiB"}}
		rates = samples{[]string{"10G", "64k", "100000", "1000G"}, []string{"10g", "63999", "fast", "1T", "10 G"}}
		parts = samples{[]string{"10%", "1%", "100%"}, []string{"10", "0%", "101%", "1.5%"}}
	)
	return map[string]samples{
		"host": anything, "run-dir": paths, "control": sockets, "status": sockets, "control-group": ids, "status-group": ids,
		"engine-cpus":           {[]string{"2-3,8", `"0,1,1023"`}, []string{"-1", "2-", "a", "1;2"}},
		"spin":                  {[]string{"20us", "1ms", "0", "1s", "1.5ms"}, []string{"20", "fast", "us", "1 ms"}},
		"memory-pressure.limit": parts,
		"monitoring.listen": {[]string{`"127.0.0.1:9469"`, `"[::1]:80"`, "/run/x"},
			[]string{"9469", "localhost", "run/x"}},
		"monitoring.web-config":     {paths.good, []string{"run/x"}},
		"monitoring.names":          {[]string{"[a.example, b]", "[]", ""}, []string{`["a:80"]`, "a.example", "[-]"}},
		"vtep.local":                address,
		"vtep.dscp":                 {[]string{"ef", "af31", "cs7", "be", "0", "63"}, []string{"af99", "64", "-1", "EF1"}},
		"underlay.private-key-file": {[]string{dir + "/key"}, []string{"key"}},
		"underlay.interface":        devices,
		"underlay.peers[].vtep":     {[]string{"10.9.0.2"}, address.bad},
		"underlay.peers[].endpoint": {[]string{`"192.0.2.2:51820"`, `"[2001:db8::2]:1"`},
			[]string{"192.0.2.2", `"192.0.2.2:x"`}},
		"underlay.peers[].public-key": {[]string{strings.Repeat("B", 42) + "E="},
			[]string{"x", strings.Repeat("B", 43)}},
		"underlay.peers[].preshared-key-file": {[]string{dir + "/psk"}, []string{"psk"}},
		"underlay.peers[].keepalive":          {[]string{"25s", "0"}, []string{"25", "soon"}},
		"evpn.router-id":                      {[]string{"192.0.2.1"}, []string{`"2001:db8::1"`, "1"}},
		"evpn.listen":                         addresses,
		"evpn.hold-time":                      {[]string{"3s", "90s"}, []string{"0", "90"}},
		"evpn.restart-time":                   {[]string{"0", "2m"}, []string{"120"}},
		"evpn.neighbours[].address":           address,
		"evpn.neighbours[].password": {[]string{"secret", strings.Repeat("x", 80)},
			[]string{strings.Repeat("x", 81)}},
		"evpn.neighbours[].local-address": {address.good[:1], address.bad},
		"evpn.neighbours[].next-hops": {[]string{`[192.0.2.1, 192.0.2.0/24, "2001:db8::1"]`, "[]", ""},
			[]string{"[1]", "[x]", "192.0.2.1"}},
		"networks[].name":     names,
		"networks[].peers":    {[]string{"[192.0.2.1, 192.0.2.2]", "[]", ""}, addresses.bad},
		"networks[].ageing":   {[]string{"1s", "300s", "5m", "1h30m"}, []string{"0", "300", "1 m"}},
		"networks[].tap.name": devices,
		"networks[].tap.addresses": {[]string{`[10.0.0.1/24, "fd00::1/64"]`, "[]", ""},
			[]string{"[10.0.0.1]", "[x]", "10.0.0.1/24", "{}"}},
		"networks[].tap.bridge": anything,
		"networks[].tap.rate":   rates,
		"networks[].route-targets": {[]string{`["65001:1", "192.0.2.1:7"]`, "[]", ""},
			[]string{"[65001]", "[x]", `["a:1"]`}},
		"vms[].name": names, "vms[].network": {[]string{"n"}, names.bad}, "vms[].qmp": sockets,
		"vms[].user": ids, "vms[].group": ids,
		"vms[].mac": {[]string{`"02:00:00:00:00:0a"`, "0A-00-00-00-00-01", "0200.0000.0001"},
			[]string{`"01:00:00:00:00:01"`, `"02:00:00:00:01"`, "x", `"02:00:00:00:00:00:00:01"`}},
		"vms[].ips": addresses, "vms[].rate": rates, "vms[].memory-budget": sizes, "vms[].memory": sizes,
		"vms[].limits.host-memory": sizes, "vms[].limits.memory": sizes, "vms[].limits.control-time": parts,
	}
}

// samplesOf returns the ends of a number's range and what lies beyond, a key's words, or the text's samples, with
// values of other types.
func samplesOf(t *testing.T, texts map[string]samples, path string, s *Schema) (x samples) {
	t.Helper()
	known := false
	switch {
	case s.Enum != nil:
		for _, e := range s.Enum {
			x.good = append(x.good, fmt.Sprint(e))
		}
		x.bad = []string{"nonsense", "7"}
	case slices.Equal(s.Type, types{"integer"}):
		x.good = []string{fmt.Sprint(*s.Minimum), fmt.Sprint(*s.Maximum)}
		x.bad = []string{fmt.Sprint(*s.Minimum - 1), fmt.Sprint(*s.Maximum + 1), "x", "1.5"}
	default:
		if x, known = texts[strings.Replace(path, "applications[]", "vms[]", 1)]; !known {
			t.Errorf("no samples for %s", path)
		}
		x = samples{slices.Clone(x.good), slices.Clone(x.bad)}
	}
	if x.bad = append(x.bad, "{}", "{a: 1}"); s.Items == nil {
		x.bad = append(x.bad, "[]", "[1]", "")
	}
	return x
}

// The schema and the parser agree about each key's values.
func TestSchemaAgrees(t *testing.T) {
	dir, _ := keyFiles(t)
	texts := textSamples(dir)
	v := newValidator(t)
	n := 0
	newParser().top(&Config{}).schema().leaves("", func(path string, s *Schema) {
		x := samplesOf(t, texts, path, s)
		for i, value := range append(slices.Clone(x.good), x.bad...) {
			n++
			text, key := with(t, dir, path, value)
			want := i < len(x.good)
			if schema, parser := v.check(text) == nil, !mistaken(t, text, key); schema != want || parser != want {
				t.Errorf("%s %q: accepted by the schema: %v, by vnicd: %v, want %v\n%s", path, value, schema, parser, want, text)
			}
		}
	})
	t.Logf("%d values", n)
}

// Mistakes that are not in a value: keys that do not exist, or are missing, and other shapes.
func TestSchemaRefuses(t *testing.T) {
	v := newValidator(t)
	for _, text := range []string{"engine: 1", "local-copy: false", "vtep: {local: 192.0.2.1, mtu: 1}", "vtep: 192.0.2.1",
		"[]", "networks: {blue: {vni: 1}}", "networks: [blue]", "networks: [{name: a}]", "networks: [{vni: 1}]",
		"networks: [{name: a, vni: 1, vlan: 3}]", "networks: [{name: a, vni: 1, tap: {bridge: b}}]",
		"vms: [{name: v, network: n}]", "vms: [{name: v, mac: \"02:00:00:00:00:01\"}]", vm("socket-mode: 0o600"),
		vm("limits: {cpu: 1}"), vm("limits: [1]"), app("queues: 1"), app("hca: ivshmem"), app("qmp: /x"),
		"evpn: {as: 1, neighbours: [{as: 1}]}", "underlay: {protect: wireguard, peers: [{vtep: 10.0.0.1}]}",
		"monitoring: {listen: /x, port: 1}", "debug: [local-copy]", "memory-pressure: off"} {
		if v.check(text) == nil {
			t.Errorf("the schema accepts\n%s", text)
		}
		if _, err := Parse("x", []byte(text)); err == nil {
			t.Errorf("vnicd accepts\n%s", text)
		}
	}
	for _, text := range []string{good, "engine-cpus: 3", vm("queues: 1"), app("memory: 1GiB"), saved, "networks:",
		"# nothing", "vtep: {port: 4789}"} {
		if err := v.check(text); err != nil {
			t.Errorf("%v:\n%s", err, text)
		}
	}
}

// The examples of the documents and the packaged file are accepted by the schema, and by vnicd.
func TestSchemaExamples(t *testing.T) {
	dir, _ := keyFiles(t)
	v := newValidator(t)
	block := regexp.MustCompile("(?s)```yaml\n(.*?)```")
	example := strings.NewReplacer("mX1y…=", strings.Repeat("B", 42)+"E=", "Q0nP…=", strings.Repeat("C", 42)+"E=",
		"/etc/vnicd/wireguard.key", dir+"/key", "libvirt-qemu", "root", "group: lab", "group: root", "group: rdma",
		"group: root")
	n := 0
	for path, whole := range map[string]bool{"docs/attach.md": true, "docs/configuration.md": false,
		"guestdrv/README.md": false, "cmd/vnicd/packaging/vnicd.yaml": true} {
		text, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		blocks := [][]string{{"", string(text)}}
		if filepath.Ext(path) == ".md" {
			blocks = block.FindAllStringSubmatch(string(text), -1)
		} else {
			// With its commented examples in place of its empty lists.
			uncomment := strings.NewReplacer("\n#  ", "\n  ", "\n# applications:", "\napplications:", ": []", ":")
			blocks = append(blocks, []string{"", uncomment.Replace(string(text))})
		}
		for _, b := range blocks {
			n++
			text := example.Replace(b[1])
			if err := v.check(text); err != nil {
				t.Errorf("%s: %v:\n%s", path, err, text)
			}
			if _, err := Parse("x", []byte(text)); err != nil && (whole || !strings.Contains(err.Error(), "is not defined")) {
				t.Errorf("%s: %v:\n%s", path, err, text)
			}
		}
	}
	if n < 7 {
		t.Errorf("%d examples", n)
	}
}
