package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// tree writes a main file and fragments, and returns the main file's path. An empty text makes no file.
func tree(t *testing.T, main string, fragments map[string]string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "vnicd.yaml")
	dir := filepath.Join(filepath.Dir(path), "vnicd.d")
	if fragments != nil {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	files := map[string]string{path: main}
	for name, text := range fragments {
		files[filepath.Join(dir, name)] = text
	}
	for path, text := range files {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// mistakes loads a configuration with mistakes, and returns them without the path of the directory.
func mistakes(t *testing.T, path string) string {
	t.Helper()
	_, err := Load(path)
	var e *Errors
	if !errors.As(err, &e) {
		t.Fatalf("error %v, want *Errors", err)
	}
	return strings.ReplaceAll(err.Error(), filepath.Dir(path)+"/", "")
}

const oneNetwork = "networks: [{name: blue, vni: 100}]\n"

func vmText(name string, number int) string {
	return fmt.Sprintf("vms:\n  - {name: %s, network: blue, mac: \"02:00:00:00:00:%02x\"}\n", name, number)
}

// Lists are joined in the order of the files' names, sections are merged, and a later value overrides an earlier one.
func TestFragments(t *testing.T) {
	path := tree(t, "engines: 1\nvtep: {local: 192.0.2.1, port: 4790}\nmonitoring: {listen: /run/m, names: [a.example]}\n"+
		oneNetwork, map[string]string{
		"50-z.yaml":       vmText("z", 3),
		"10-a.yaml":       vmText("a", 1) + "networks: [{name: red, vni: 200}]\n",
		"10-a.yaml.bak":   vmText("a", 1),
		".hidden.yaml":    vmText("hidden", 9),
		"README":          "engines: 8",
		"20-comment.yaml": "# engines: 8\n",
		"30-b.yaml": "engines: 2\nvtep: {port: 4791, dscp: ef}\nmonitoring: {names: [b.example]}\n" +
			"applications:\n  - {name: b, network: red, mac: \"02:00:00:00:00:02\"}\n",
		"60-last.yaml": "engines: 3\nlog-level: warn\nvms:\n",
	})
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	var vms []string
	for _, v := range c.VMs {
		vms = append(vms, v.Name)
	}
	if want := []string{"a", "z", "b"}; !slices.Equal(vms, want) { // by list first, as in one file
		t.Errorf("VMs %v, want %v", vms, want)
	}
	if len(c.Networks) != 2 || c.Networks[0].Name != "blue" || c.Networks[1].Name != "red" {
		t.Errorf("networks %+v", c.Networks)
	}
	if c.Engines != 3 || c.LogLevel != "warn" || c.VTEP.Port != 4791 || c.VTEP.DSCP != 46 ||
		c.VTEP.Local.String() != "192.0.2.1" {
		t.Errorf("engines %d, log level %s, vtep %+v", c.Engines, c.LogLevel, c.VTEP)
	}
	if want := []string{"a.example", "b.example"}; !slices.Equal(c.Monitoring.Names, want) {
		t.Errorf("names %v, want %v", c.Monitoring.Names, want)
	}
	var files []string
	for _, f := range c.Files {
		files = append(files, filepath.Base(f))
	}
	if want := []string{"vnicd.yaml", "10-a.yaml", "20-comment.yaml", "30-b.yaml", "50-z.yaml",
		"60-last.yaml"}; !slices.Equal(files, want) {
		t.Errorf("files %v, want %v", files, want)
	}
	var overrides []string
	for _, o := range c.Overrides {
		overrides = append(overrides, fmt.Sprintf("%s %s:%d %s:%d", o.Is.Key, filepath.Base(o.Was.File), o.Was.Line,
			filepath.Base(o.Is.File), o.Is.Line))
	}
	if want := []string{"engines vnicd.yaml:1 30-b.yaml:1", "vtep.port vnicd.yaml:2 30-b.yaml:2",
		"engines 30-b.yaml:1 60-last.yaml:1"}; !slices.Equal(sorted(overrides), sorted(want)) {
		t.Errorf("overrides %q, want %q", overrides, want)
	}
	if v := c.VMs[1]; filepath.Base(v.At.File) != "50-z.yaml" || v.At.Line != 2 || v.At.Key != "vms[0]" {
		t.Errorf("VM z is at %v, %s", v.At, v.At.Key)
	}
}

func sorted(s []string) []string { return slices.Sorted(slices.Values(s)) }

// A file without fragments, or with an empty directory, is as before; a main file may leave everything to them.
func TestFewFragments(t *testing.T) {
	for _, fragments := range []map[string]string{nil, {}, {"a.yaml": ""}, {"a.yaml": "# nothing\n"}} {
		c, err := Load(tree(t, oneNetwork, fragments))
		if err != nil || len(c.Networks) != 1 || len(c.Files) != 1+len(fragments) {
			t.Errorf("%v: %+v, %v", fragments, c, err)
		}
	}
	if c, err := Load(tree(t, "", map[string]string{"a.yaml": oneNetwork})); err != nil || len(c.Networks) != 1 {
		t.Errorf("an empty main file: %+v, %v", c, err)
	}
	if got := mistakes(t, tree(t, "", map[string]string{"a.yaml": "# nothing\n"})); !strings.Contains(got,
		"vnicd.yaml: the file is empty") {
		t.Error(got)
	}
}

// An anchor's node in two places: what is joined to one of them is not in the other.
func TestFragmentsAliases(t *testing.T) {
	c, err := Load(tree(t, "monitoring: {listen: /run/m, names: &x [a.example]}\nnetworks: []\nvms: &v []\napplications: *v\n",
		map[string]string{"a.yaml": oneNetwork + vmText("a", 1) + "monitoring: {names: &y [b.example, c.example]}\n",
			"b.yaml": vmText("b", 2)}))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.VMs) != 2 || c.VMs[0].Application != nil || c.VMs[1].Application != nil || len(c.Monitoring.Names) != 3 {
		t.Errorf("VMs %+v, names %v", c.VMs, c.Monitoring.Names)
	}
}

// Each mistake names its file and line; if two places are in conflict, both.
func TestFragmentMistakes(t *testing.T) {
	for _, tc := range []struct {
		name, main string
		fragments  map[string]string
		want       string
	}{
		{"a VM twice", oneNetwork + vmText("a", 1), map[string]string{"x.yaml": "# again\n" + vmText("a", 2)},
			`vnicd.d/x.yaml:3: VM name "a" is already used in vnicd.yaml:3`},
		{"an application with a VM's name", oneNetwork, map[string]string{"x.yaml": vmText("a", 1),
			"y.yaml": strings.Replace(vmText("a", 2), "vms", "applications", 1)},
			`vnicd.d/y.yaml:2: application name "a" is already used in vnicd.d/x.yaml:2`},
		{"a network twice", oneNetwork, map[string]string{"x.yaml": "networks: [{name: blue, vni: 101}]"},
			`vnicd.d/x.yaml:1: network name "blue" is already used in vnicd.yaml:1`},
		{"a vni twice", oneNetwork, map[string]string{"x.yaml": "networks: [{name: red, vni: 100}]"},
			`vnicd.d/x.yaml:1: vni 100 is already used by the network in vnicd.yaml:1; each network needs its own`},
		{"a mac twice", oneNetwork, map[string]string{"x.yaml": vmText("a", 1), "y.yaml": vmText("b", 1)},
			`vnicd.d/y.yaml:2: mac 02:00:00:00:00:01 is already used in network "blue" by the VM in vnicd.d/x.yaml:2`},
		{"in one fragment", oneNetwork, map[string]string{"x.yaml": vmText("a", 1) + vmText("b", 2)[5:] + vmText("a", 3)[5:]},
			`vnicd.d/x.yaml:4: VM name "a" is already used in line 2`},
		{"an unknown network", oneNetwork, map[string]string{"x.yaml": strings.Replace(vmText("a", 1), "blue", "red", 1)},
			`vnicd.d/x.yaml:2: VM "a" is in network "red", which is not defined; defined: blue`},
		{"an unknown key", oneNetwork, map[string]string{"x.yaml": "engine: 1"},
			`vnicd.d/x.yaml:1: unknown key "engine" in the configuration; known: applications,`},
		{"a key twice", oneNetwork, map[string]string{"x.yaml": "engines: 1\nengines: 2"},
			`vnicd.d/x.yaml:2: key "engines" is there twice in the configuration`},
		{"a key twice, and once more", oneNetwork + "engines: 1\n", map[string]string{"x.yaml": "engines: 1\nengines: 2"},
			`vnicd.d/x.yaml:2: key "engines" is there twice in the configuration`},
		{"a section's key twice", "vtep: {local: 192.0.2.1}\n", map[string]string{"x.yaml": "vtep: {port: 1, port: 2}"},
			`vnicd.d/x.yaml:1: key "port" is there twice in vtep`},
		{"the same in the main file", "vtep: {local: 192.0.2.1, port: 1, port: 2}\n",
			map[string]string{"x.yaml": "vtep: {port: 1}"},
			`vnicd.yaml:1: key "port" is there twice in vtep`},
		{"a value that is overridden", "engines: 99\n", map[string]string{"x.yaml": "engines: 2"},
			`vnicd.yaml:1: engines must be a number from 1 to 8, found "99"`},
		{"a list and a value", oneNetwork, map[string]string{"x.yaml": "networks: blue"},
			`vnicd.d/x.yaml:1: networks must be a list, found "blue"`},
		{"a section and a value", "debug: {local-copy: off}", map[string]string{"x.yaml": "debug: off"},
			`vnicd.d/x.yaml:1: debug must be a mapping of keys, found "off"`},
		{"no mapping", oneNetwork, map[string]string{"x.yaml": "- {name: a}"},
			`vnicd.d/x.yaml:1: the configuration must be a mapping of keys, found a list`},
		{"a section that is nowhere complete", "vtep: {port: 1}", map[string]string{"x.yaml": "vtep: {dscp: 0}"},
			"vnicd.yaml:1: vtep needs `local`"},
		{"what only the whole shows", "engines: 2\n", map[string]string{"x.yaml": "engine-cpus: 1-3\n"},
			`vnicd.d/x.yaml:1: engine-cpus must name one processor for each of the 2 engines, found 3`},
		{"two documents", oneNetwork, map[string]string{"x.yaml": "engines: 1\n---\nengines: 2"},
			`vnicd.d/x.yaml: the file must hold one YAML document`},
		{"another suffix", oneNetwork, map[string]string{"x.yml": vmText("a", 1)},
			`vnicd.d/x.yml: is not read: the name must end in .yaml; rename it, or move it away`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := mistakes(t, tree(t, tc.main, tc.fragments)); !strings.HasPrefix(got, tc.want) ||
				strings.Contains(got, "\n") {
				t.Errorf("got:\n%s\nwant only:\n%s", got, tc.want)
			}
		})
	}
	// The mistakes of all files at once, in the order of the files; what a broken file may define is not missed.
	got := mistakes(t, tree(t, "buffers: 1\n"+vmText("a", 1)+"engines: 0\n", map[string]string{"x.yaml": "networks: [",
		"w.yaml": "spin: 1h"}))
	lines := strings.Split(got, "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[0], "vnicd.yaml:1: buffers") ||
		!strings.HasPrefix(lines[1], "vnicd.yaml:4: engines") || !strings.HasPrefix(lines[2], "vnicd.d/w.yaml:1: spin") ||
		!strings.HasPrefix(lines[3], "vnicd.d/x.yaml:1: not YAML") {
		t.Errorf("got:\n%s", got)
	}
}

// Files that are no regular ones, or that somebody may write to who may not write to the main file, are refused, each
// with the reason. Nothing blocks.
func TestFragmentFiles(t *testing.T) {
	const somebody = 65534
	for _, tc := range []struct {
		name   string
		change func(main, dir, file string) error
		want   string // "": accepted
	}{
		{"as it is", func(_, _, _ string) error { return nil }, ""},
		{"a symbolic link", func(_, dir, file string) error {
			return errors.Join(os.Rename(file, dir+"/target"), os.Symlink("target", file))
		}, ""},
		{"a link to nowhere", func(_, dir, file string) error { return os.Symlink("nowhere", dir+"/y.yaml") },
			"vnicd.d/y.yaml: cannot be read: no such file or directory"},
		{"a fifo", func(_, _, file string) error { return errors.Join(os.Remove(file), syscall.Mkfifo(file, 0o644)) },
			"vnicd.d/x.yaml: must be a regular file, found prw-r--r--"},
		{"a device", func(_, _, file string) error { return errors.Join(os.Remove(file), os.Symlink("/dev/null", file)) },
			"vnicd.d/x.yaml: must be a regular file, found Dcrw-rw-rw-"},
		{"a directory", func(_, _, file string) error { return errors.Join(os.Remove(file), os.Mkdir(file, 0o755)) },
			"vnicd.d/x.yaml: must be a regular file, found drwxr-xr-x"},
		{"no directory", func(_, dir, _ string) error {
			return errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o644))
		}, "vnicd.d: must be a directory, found -rw-r--r--"},
		{"another owner", func(_, _, file string) error { return os.Chown(file, somebody, -1) },
			"vnicd.d/x.yaml: must belong to root or to the owner of the main file, user 0, found user 65534"},
		{"the owner of the main file", func(main, _, file string) error {
			return errors.Join(os.Chown(file, somebody, -1), os.Chown(main, somebody, -1))
		}, ""},
		{"root, not the owner of the main file", func(main, _, _ string) error { return os.Chown(main, somebody, -1) }, ""},
		{"a group", func(_, _, file string) error {
			return errors.Join(os.Chown(file, -1, somebody), os.Chmod(file, 0o664))
		}, "vnicd.d/x.yaml: the group 65534 may write to it, but not to the main file: chmod g-w it"},
		{"the group of the main file", func(main, _, file string) error {
			return errors.Join(os.Chown(file, -1, somebody), os.Chmod(file, 0o660), os.Chown(main, -1, somebody),
				os.Chmod(main, 0o660))
		}, ""},
		{"another group than that of the main file", func(main, _, file string) error {
			return errors.Join(os.Chown(file, -1, somebody), os.Chmod(file, 0o660), os.Chmod(main, 0o660))
		}, "vnicd.d/x.yaml: the group 65534 may write to it, but not to the main file: chmod g-w it"},
		{"everybody", func(main, _, file string) error { return errors.Join(os.Chmod(file, 0o666), os.Chmod(main, 0o664)) },
			"vnicd.d/x.yaml: everybody may write to it, but not to the main file: chmod o-w it"},
		{"everybody's directory", func(_, dir, _ string) error { return os.Chmod(dir, 0o777) },
			"vnicd.d: everybody may write to it, but not to the main file: chmod o-w it"},
		{"another owner's directory", func(_, dir, _ string) error { return os.Chown(dir, somebody, -1) },
			"vnicd.d: must belong to root or to the owner of the main file, user 0, found user 65534"},
		{"a large file", func(_, _, file string) error { return os.Truncate(file, maxFileSize+1) },
			"vnicd.d/x.yaml: must have at most 4194304 bytes, found more"},
		{"much in all", func(_, dir, _ string) (err error) {
			for i := range maxTotalSize / maxFileSize {
				err = errors.Join(err, os.WriteFile(fmt.Sprintf("%s/y%d.yaml", dir, i),
					[]byte("#"+strings.Repeat(" ", maxFileSize-1)), 0o644))
			}
			return err
		}, "vnicd.d/y3.yaml: with this file the configuration has more than 16777216 bytes"},
		{"many", func(_, dir, _ string) (err error) {
			for i := range maxFragments { // one more with x.yaml
				err = errors.Join(err, os.WriteFile(fmt.Sprintf("%s/y%d.yaml", dir, i), nil, 0o644))
			}
			return err
		}, "vnicd.d: has more than 4096 entries"},
		{"no main file", func(main, _, _ string) error { return os.Remove(main) },
			"vnicd.yaml: cannot be read: no such file or directory"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			main := tree(t, oneNetwork, map[string]string{"x.yaml": vmText("a", 1)})
			dir := FragmentDir(main)
			if err := tc.change(main, dir, filepath.Join(dir, "x.yaml")); err != nil {
				t.Fatal(err)
			}
			if tc.want == "" {
				if c, err := Load(main); err != nil || len(c.VMs) != 1 {
					t.Errorf("%+v, %v", c, err)
				}
			} else if got := mistakes(t, main); got != tc.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, tc.want)
			}
		})
	}
}

// Whatever is in two files, parsing ends with a configuration or with mistakes.
func FuzzFragments(f *testing.F) {
	f.Add(good, vmText("c", 3))
	f.Add("vtep: &x {local: *x}\na: &y {a: *y}", "vtep: {local: 1}\na: &y {a: *y}")
	f.Add("networks: &n [*n]", "networks: &n [*n, {peers: *n}]\nvms: *n")
	f.Fuzz(func(t *testing.T, main, fragment string) {
		c, err := parse("a", []source{{"a", []byte(main)}, {"b", []byte(fragment)}}, Errors{Files: []string{"a", "b"}})
		var e *Errors
		if (c == nil) == (err == nil) || err != nil && (!errors.As(err, &e) || err.Error() == "") {
			t.Fatalf("config %v with error %v", c, err)
		}
		if err == nil {
			return
		}
		for _, x := range e.List() {
			if x.File != "a" && x.File != "b" || x.Line < 0 {
				t.Fatalf("a mistake at %+v", x.Place)
			}
		}
	})
}
