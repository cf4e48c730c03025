package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/deviceplugin"
)

const twoNames = `networks: [{name: blue, vni: 100}]
vms: [{name: vm1, network: blue, mac: "02:00:00:00:00:01"}]
applications:
  - {name: two, network: blue, mac: "02:00:00:00:00:a2"}
  - {name: 1st.app_x-y, network: blue, mac: "02:00:00:00:00:a1"}
`

// checkedCDI decodes a file as a runtime does that knows the versions up to 0.5.0 of the specification: unknown fields,
// and names that this version does not permit, are errors.
func checkedCDI(t *testing.T, text string) *cdiSpec {
	t.Helper()
	var s cdiSpec
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil || d.More() {
		t.Fatalf("%v in\n%s", err, text)
	}
	if !slices.Contains([]string{"0.3.0", "0.4.0", "0.5.0"}, s.Version) || len(s.Devices) == 0 {
		t.Errorf("version %q, %d devices", s.Version, len(s.Devices))
	}
	// "Kind" and "CDI Devices" of SPEC.md. Before 0.6.0 the class has no dots, before 0.5.0 no name begins with a digit.
	vendor, class, _ := strings.Cut(s.Kind, "/")
	label := `[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?`
	if !regexp.MustCompile(`^`+label+`(\.`+label+`)+$`).MatchString(vendor) ||
		!regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?$`).MatchString(class) {
		t.Errorf("kind %q", s.Kind)
	}
	name := regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$`)
	seen := map[string]bool{}
	for _, x := range s.Devices {
		if !name.MatchString(x.Name) || seen[x.Name] {
			t.Errorf("device %q", x.Name)
		}
		seen[x.Name] = true
		for _, e := range x.Edits.Env {
			if k, v, is := strings.Cut(e, "="); !is || k == "" || v == "" {
				t.Errorf("%s: environment %q", x.Name, e)
			}
		}
		for _, m := range x.Edits.Mounts {
			if !filepath.IsAbs(m.HostPath) || !filepath.IsAbs(m.ContainerPath) {
				t.Errorf("%s: mount %+v", x.Name, m)
			}
		}
	}
	return &s
}

// One device for each application, none for VMs: its directory, read-only, and the socket's path.
func TestCDIFile(t *testing.T) {
	status, out, errText := alone(t, twoNames, "cdi")
	if status != 0 || errText != "" {
		t.Fatal(errText)
	}
	s := checkedCDI(t, out)
	var names []string
	for _, d := range s.Devices {
		names = append(names, d.Name)
		e := d.Edits
		if len(e.Mounts) != 1 || filepath.Base(e.Mounts[0].HostPath) != d.Name+".app" ||
			e.Mounts[0].ContainerPath != "/run/vnicd" || !slices.Contains(e.Mounts[0].Options, "ro") ||
			!slices.Contains(e.Mounts[0].Options, "bind") || !slices.Equal(e.Env, []string{"VNICD_SOCKET=/run/vnicd/hca"}) {
			t.Errorf("%+v", d)
		}
	}
	if !slices.Equal(names, []string{"1st.app_x-y", "two"}) || s.Kind != "vnicd.io/application" {
		t.Errorf("%s %q", s.Kind, names)
	}
	if _, out, _ = alone(t, twoNames, "cdi", "two", "two"); len(checkedCDI(t, out).Devices) != 1 {
		t.Errorf("by name:\n%s", out)
	}
}

func TestCDIErrors(t *testing.T) {
	badName := strings.ReplaceAll(twoNames, "name: two", "name: two_")
	for _, c := range []struct {
		yaml, line, want string
		status           int
	}{
		{oneVM, "cdi", "there are no applications", 1},
		{twoNames, "cdi vm1", `no application "vm1"; there are: 1st.app_x-y, two`, 2},
		{twoNames, "cdi -o /nowhere/vnicd.conf", "must end with .json", 2},
		{twoNames + "nonsense: 1\n", "cdi", "nonsense", 2},
		{badName, "cdi", `application "two_" is left out`, 0},
		{badName, "cdi two_", "no application has a name that CDI permits", 1},
	} {
		status, out, errText := alone(t, c.yaml, strings.Fields(c.line)...)
		if status != c.status || !strings.Contains(errText, c.want) {
			t.Errorf("vnicd %s: %d %s, want %d with %q", c.line, status, errText, c.status, c.want)
		}
		if status == 0 && len(checkedCDI(t, out).Devices) != 1 {
			t.Errorf("vnicd %s:\n%s", c.line, out)
		}
	}
}

// --output makes the directory, replaces the file, and leaves nothing else. A mistake leaves the file as it was.
func TestCDIOutput(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cdi", "vnicd.json")
	_, printed, _ := alone(t, twoNames, "cdi")
	for range 2 {
		if status, out, errText := alone(t, twoNames, "cdi", "--output", path); status != 0 || out != "" {
			t.Fatal(out, errText)
		}
		if err := os.Chmod(path, 0); err != nil {
			t.Fatal(err)
		}
	}
	if status, _, errText := alone(t, twoNames, "cdi", "-o", path); status != 0 {
		t.Fatal(errText)
	}
	if status, _, _ := alone(t, oneVM, "cdi", "-o", path); status != 1 {
		t.Error("no application is no error")
	}
	text, err := os.ReadFile(path)
	if err != nil || len(checkedCDI(t, string(text)).Devices) != 2 || len(text) < len(printed)/2 {
		t.Errorf("%v\n%s", err, text)
	}
	list, _ := os.ReadDir(filepath.Dir(path))
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o644 || len(list) != 1 {
		t.Errorf("%v %v %v", st.Mode(), err, list)
	}
}

// The running daemon's applications count, not those of a file that it has not read; and their directories have the
// sockets, also that of an application that was added later.
func TestCDIOfDaemon(t *testing.T) {
	l := newLab(t)
	dir := func(name string) string { return filepath.Join(l.dir, name+".app") }
	fragment(t, l.config, "a.yaml", "applications: [{name: a, network: blue, mac: \"02:00:00:00:00:a1\"}]\n")
	l.ok("reload")
	fragment(t, l.config, "b.yaml", "applications: [{name: b, network: blue, mac: \"02:00:00:00:00:a2\"}]\n")
	list := func() (names []string) {
		t.Helper()
		var o, e bytes.Buffer
		if status := Main("test", []string{"-c", l.config, "cdi"}, &o, &e); status != 0 {
			t.Fatal(e.String())
		}
		for _, d := range checkedCDI(t, o.String()).Devices {
			names = append(names, d.Name)
			if at := d.Edits.Mounts[0].HostPath; at != dir(d.Name) {
				t.Errorf("directory %s", at)
			}
			named, err := os.Lstat(filepath.Join(l.dir, d.Name+".hca"))
			also, err2 := os.Lstat(filepath.Join(dir(d.Name), "hca"))
			if err != nil || err2 != nil || !os.SameFile(named, also) {
				t.Errorf("%s: %v, %v", d.Name, err, err2)
			}
		}
		return names
	}
	if got := list(); !slices.Equal(got, []string{"a"}) {
		t.Errorf("%q before the reload", got)
	}
	// An application that has changed has a new socket, in the directory that containers have.
	mounted, err := os.OpenRoot(dir("a"))
	if err != nil {
		t.Fatal(err)
	}
	defer mounted.Close()
	before, err := mounted.Lstat("hca")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(l.config[:len(l.config)-len(".yaml")]+".d", "a.yaml")); err != nil {
		t.Fatal(err)
	}
	fragment(t, l.config, "a.yaml", "applications: [{name: a, network: blue, mac: \"02:00:00:00:00:a3\"}]\n")
	l.ok("reload")
	if got := list(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("%q after it", got)
	}
	if now, err := mounted.Lstat("hca"); err != nil || !before.ModTime().Before(now.ModTime()) {
		t.Errorf("socket %v, now %v, %v", before, now, err)
	}
}

// Applications that stay, with the directories that the daemon has made; VMs and those that go are not offered.
func TestApplicationsOf(t *testing.T) {
	s := &daemon.Status{VMs: []daemon.VMStatus{
		{Name: "vm1", Network: "blue", NetSocket: "/run/vnicd/vm1.net"},
		{Name: "a", Network: "blue", AppDir: "/run/vnicd/a.app"},
		{Name: "b", Network: "green", AppDir: "/run/vnicd/b.app", Going: true},
	}}
	l, err := applicationsOf(s)
	if want := []deviceplugin.Application{{Name: "a", Network: "blue", Dir: "/run/vnicd/a.app"}}; err != nil ||
		!slices.Equal(l, want) {
		t.Errorf("%v, %v", l, err)
	}
	s.VMs[1].AppDir = ""
	if _, err := applicationsOf(s); err == nil || !strings.Contains(err.Error(), "upgrade it") {
		t.Errorf("without directories: %v", err)
	}
}

func TestDevicePluginElsewhere(t *testing.T) {
	status, _, errText := alone(t, twoNames, "device-plugin", "--kubelet-dir", "/nonexistent")
	if status != 1 || !strings.Contains(errText, "is this a node of a cluster?") {
		t.Errorf("%d %s", status, errText)
	}
}
