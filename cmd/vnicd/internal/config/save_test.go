package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const saved = "# Written by `vnicd vm add --save`; `vnicd vm del v3 --save` removes it.\n" + `vms:
  - name: v3
    ips: [10.0.0.3, 'fd00::3']
    mac: "02:00:00:00:00:03"
    network: blue
    queues: 2
`

func v3() map[string]any {
	return map[string]any{"network": "blue", "mac": "02:00:00:00:00:03", "queues": 2,
		"ips": []string{"10.0.0.3", "fd00::3"}}
}

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// names lists a directory, hidden files too.
func names(t *testing.T, dir string) (names string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range list {
		names += e.Name() + " "
	}
	return names
}

// A saved VM is in a file of its own, which the daemon reads as it reads the main file, whatever the umask.
func TestSave(t *testing.T) {
	const somebody = 65534
	main := tree(t, oneNetwork, nil)
	if err := errors.Join(os.Chmod(main, 0o640), os.Chown(main, 0, somebody)); err != nil {
		t.Fatal(err)
	}
	defer syscall.Umask(syscall.Umask(0o077))
	path, undo, err := Save(main, KindVM, "v3", v3())
	if err != nil {
		t.Fatal(err)
	}
	dir := FragmentDir(main)
	if got := content(t, path); path != dir+"/vm-v3.yaml" || got != saved {
		t.Errorf("%s:\n%s\nwant:\n%s", path, got, saved)
	}
	if list := names(t, dir); list != "vm-v3.yaml " {
		t.Errorf("%s has %s", dir, list)
	}
	for path, want := range map[string]os.FileMode{dir: os.ModeDir | 0o755, path: 0o640} {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if sys := st.Sys().(*syscall.Stat_t); st.Mode() != want || sys.Uid != 0 || path != dir && sys.Gid != somebody {
			t.Errorf("%s: %v of %d:%d, want %v", path, st.Mode(), sys.Uid, sys.Gid, want)
		}
	}
	c, err := Load(main)
	if err != nil {
		t.Fatal(err)
	}
	if v, err := c.VM("v3"); err != nil || v.Queues != 2 || len(v.IPs) != 2 || v.At != (Place{path, 3, "vms[0]"}) {
		t.Errorf("%+v, %v", v, err)
	}
	if _, _, err := Save(main, KindVM, "v3", v3()); err == nil || !strings.Contains(err.Error(),
		`VM name "v3" is already used in line 3`) {
		t.Errorf("saved again: %v", err)
	}
	if err := undo(); err != nil || names(t, dir) != "" {
		t.Errorf("undone: %v, %s", err, names(t, dir))
	}
	// Texts that YAML could take for something else.
	for _, name := range []string{"on", "null", "12", "1e3", "v~"} {
		path, _, err := Save(main, KindNetwork, name, map[string]any{"vni": 1000})
		if name == "v~" {
			if err == nil || !strings.Contains(err.Error(), `network name "v~" must be 1 to 32 letters`) {
				t.Errorf("%s: %v", path, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if c, err := Load(main); err != nil || c.Network(name) == nil {
			t.Errorf("%s: %v:\n%s", name, err, content(t, path))
		}
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}

// asNobody calls f with the rights of the user nobody for files.
func asNobody(f func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = unix.Setfsuid(65534)
	defer unix.Setfsuid(0)
	f()
}

// Nothing is written, changed or left where something cannot be saved, and the error says why.
func TestSaveRefused(t *testing.T) {
	byHand := map[string]string{"vm-v3.yaml": "# mine\n"}
	for _, tc := range []struct {
		name, main string
		fragments  map[string]string
		vm         string
		keys       map[string]any
		want       string
	}{
		{"defined in the main file", oneNetwork + vmText("v3", 1), nil, "v3", v3(),
			`vnicd.d/vm-v3.yaml:3: VM name "v3" is already used in vnicd.yaml:3`},
		{"defined in another fragment", oneNetwork, map[string]string{"x.yaml": vmText("v3", 1)}, "v3", v3(),
			`vnicd.d/vm-v3.yaml:3: VM name "v3" is already used in vnicd.d/x.yaml:2`},
		{"an application of that name", oneNetwork, map[string]string{"x.yaml": strings.Replace(vmText("v3", 1), "vms",
			"applications", 1)}, "v3", v3(), `VM name "v3" is already used in vnicd.d/x.yaml:2`},
		{"a mac in use", oneNetwork + vmText("a", 3), nil, "v3", v3(), `mac 02:00:00:00:00:03 is already used`},
		{"no network", oneNetwork, nil, "v3", map[string]any{"network": "red", "mac": "02:00:00:00:00:03"},
			`network "red", which is not defined`},
		{"an unknown key", oneNetwork, nil, "v3", map[string]any{"colour": "red"}, `unknown key "colour" in a VM`},
		{"somebody's file", oneNetwork, byHand, "v3", v3(),
			"the file exists, and is not replaced: see what it has, or remove it"},
		{"mistakes elsewhere", oneNetwork + "engines: 99\n", nil, "v3", v3(), "vnicd.yaml:2: engines must be"},
		{"a path as name", oneNetwork, nil, "../v3", v3(), `vm name "../v3" must be 1 to 32 letters`},
		{"a hidden file", oneNetwork, nil, ".v3", v3(), `vm name ".v3" must be 1 to 32 letters`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			main := tree(t, tc.main, tc.fragments)
			dir := FragmentDir(main)
			before := names(t, dir)
			_, _, err := Save(main, KindVM, tc.vm, tc.keys)
			if err == nil {
				t.Fatal("saved")
			}
			if got := strings.ReplaceAll(err.Error(), filepath.Dir(main)+"/", ""); !strings.Contains(got, tc.want) {
				t.Errorf("got:\n%s\nwant:\n%s", got, tc.want)
			}
			if after := names(t, dir); after != before {
				t.Errorf("there were %s, there are %s", before, after)
			}
			for name, text := range tc.fragments {
				if got := content(t, filepath.Join(dir, name)); got != text {
					t.Errorf("%s is now %q", name, got)
				}
			}
		})
	}
	t.Run("no rights", func(t *testing.T) {
		main := tree(t, oneNetwork, map[string]string{})
		if err := os.Chmod(filepath.Dir(filepath.Dir(main)), 0o755); err != nil {
			t.Fatal(err)
		}
		asNobody(func() {
			if _, _, err := Save(main, KindVM, "v3", v3()); err == nil || !strings.Contains(err.Error(), "permission denied") ||
				!strings.Contains(err.Error(), "run it as root") {
				t.Errorf("without rights: %v", err)
			}
		})
		if list := names(t, FragmentDir(main)); list != "" {
			t.Errorf("left: %s", list)
		}
	})
	t.Run("too many files", func(t *testing.T) {
		main := tree(t, oneNetwork, map[string]string{})
		for i := range maxFragments {
			if err := os.WriteFile(fmt.Sprintf("%s/%d.yaml", FragmentDir(main), i), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := Save(main, KindVM, "v3", v3()); err == nil ||
			!strings.Contains(err.Error(), "more than 4096 entries") {
			t.Errorf("one file more: %v", err)
		}
		if _, err := Load(main); err != nil {
			t.Error(err)
		}
	})
}

// A saved fragment can be taken away, taken back, and removed.
func TestForget(t *testing.T) {
	main := tree(t, oneNetwork, nil)
	path, _, err := Save(main, KindVM, "v3", v3())
	if err != nil {
		t.Fatal(err)
	}
	has := func() bool {
		c, err := Load(main)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.VM("v3")
		return err == nil
	}
	r, err := Forget(main, KindVM, "v3")
	if err != nil || r.Path != path || has() {
		t.Fatalf("%+v, %v", r, err)
	}
	if err := r.Undo(); err != nil || !has() || content(t, path) != saved {
		t.Fatalf("undone: %v", err)
	}
	if r, err = Forget(main, KindVM, "v3"); err != nil {
		t.Fatal(err)
	}
	if err := r.Commit(); err != nil || has() || names(t, FragmentDir(main)) != "" {
		t.Errorf("%v, left: %s", err, names(t, FragmentDir(main)))
	}
	// What no file has needs no removal.
	if r, err := Forget(main, KindVM, "v3"); err != nil || r.Path != "" || r.Undo() != nil || r.Commit() != nil {
		t.Errorf("%+v, %v", r, err)
	}
}

// What somebody wrote is not removed.
func TestForgetRefused(t *testing.T) {
	const elsewhere = "which `vnicd vm add --save` has not written: remove it there, then run `vnicd reload`"
	const extended = "has not been written by `vnicd vm add --save`, or has been extended since"
	network := KindNetwork.header() + "; and more\nnetworks:\n  - {name: red, vni: 200}\n"
	for _, tc := range []struct {
		name, main string
		fragments  map[string]string
		kind       Kind
		forget     string
		want       string
	}{
		{"the main file", oneNetwork + vmText("v3", 1), nil, KindVM, "v3",
			`vm "v3" is defined in vnicd.yaml:3, ` + elsewhere},
		{"another fragment", oneNetwork, map[string]string{"x.yaml": saved}, KindVM, "v3",
			`vm "v3" is defined in vnicd.d/x.yaml:3, ` + elsewhere},
		{"an application", oneNetwork + strings.Replace(vmText("v3", 1), "vms", "applications", 1), nil, KindVM, "v3",
			elsewhere},
		{"a file of that name", oneNetwork, map[string]string{"vm-v3.yaml": vmText("v3", 3)}, KindVM, "v3", extended},
		{"with another VM", oneNetwork, map[string]string{"vm-v3.yaml": saved + vmText("v4", 4)[5:]}, KindVM, "v3", extended},
		{"with another key", oneNetwork, map[string]string{"vm-v3.yaml": saved + "engines: 2\n"}, KindVM, "v3", extended},
		{"a network with VMs", oneNetwork, map[string]string{"network-red.yaml": network,
			"x.yaml": strings.Replace(vmText("a", 1), "blue", "red", 1)}, KindNetwork, "red",
			"without network \"red\" the configuration would have mistakes:\nvnicd.d/x.yaml:2: VM \"a\" is in network \"red\", which is not"},
		{"mistakes elsewhere", oneNetwork + "engines: 99\n", map[string]string{"vm-v3.yaml": saved}, KindVM, "v3",
			"vnicd.yaml:2: engines must be"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			main := tree(t, tc.main, tc.fragments)
			_, err := Forget(main, tc.kind, tc.forget)
			if err == nil {
				t.Fatal("forgotten")
			}
			if got := strings.ReplaceAll(err.Error(), filepath.Dir(main)+"/", ""); !strings.Contains(got, tc.want) {
				t.Errorf("got:\n%s\nwant:\n%s", got, tc.want)
			}
			for name, text := range tc.fragments {
				if got := content(t, filepath.Join(FragmentDir(main), name)); got != text {
					t.Errorf("%s is now %q", name, got)
				}
			}
		})
	}
	main := tree(t, oneNetwork, map[string]string{"network-red.yaml": network})
	if r, err := Forget(main, KindNetwork, "red"); err != nil || r.Commit() != nil {
		t.Errorf("a network without VMs: %v", err)
	}
}
