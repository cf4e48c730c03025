package cli

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// The package's files agree with the daemon's defaults about who may open which control socket.
func TestPackagedGroups(t *testing.T) {
	read := func(name string) string {
		t.Helper()
		text, err := os.ReadFile("../../packaging/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for file, want := range map[string][2]string{"vnicd.socket": {"control", config.DefaultControlGroup},
		"vnicd-status.socket": {"status", config.DefaultStatusGroup}} {
		unit := read(file)
		if name, group, mode := setting(t, unit, "FileDescriptorName"), setting(t, unit, "SocketGroup"),
			setting(t, unit, "SocketMode"); name != want[0] || group != want[1] || mode != "0660" {
			t.Errorf("%s passes %q to group %s with mode %s, want %q", file, name, group, mode, want)
		}
		if !strings.Contains(read("vnicd.sysusers"), "\ng "+want[1]+" -\n") {
			t.Errorf("no group %s is made", want[1])
		}
	}
	unit := read("vnicd.service")
	want := config.DefaultControlGroup + " " + config.DefaultStatusGroup
	if groups := setting(t, unit, "SupplementaryGroups"); groups != want {
		t.Errorf("the daemon cannot give its sockets away as a member of %q", groups)
	}
	if setting(t, read("vnicd-status.socket"), "Service") != "vnicd.service" ||
		setting(t, read("vnicd.socket"), "Wants") != "vnicd-status.socket" {
		t.Error("the sockets do not start together")
	}
}

// Sockets that systemd passes give the rights of their names, and stay systemd's when the daemon ends.
func TestActivation(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "vnicd.yaml")
	yaml := fmt.Sprintf("run-dir: %s/run\nnetworks: [{name: blue, vni: 100}]\n%s", dir, vmOne)
	if err := os.WriteFile(file, []byte(yaml), 0o644); err != nil {
		t.Fatal(err)
	}
	paths := map[string]string{"control": filepath.Join(dir, "c"), "status": filepath.Join(dir, "s")}
	// As systemd does: descriptors from 3 on, with names, for the process with this number.
	c := exec.Command("sh", "-c", `LISTEN_PID=$$ exec "$@"`, "sh", os.Args[0], "-c", file, "run")
	c.Env = append(os.Environ(), asVNICD+"=1", "LISTEN_FDS=2", "LISTEN_FDNAMES=status:control")
	for _, name := range []string{"status", "control"} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: paths[name], Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		f, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		c.ExtraFiles = append(c.ExtraFiles, f)
	}
	log := &testlog.Log{}
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill() }) // it may have ended
	testutil.Eventually(t, "the daemon is ready", func() bool { return strings.Contains(log.String(), "ready") })
	for name, want := range map[string]int{"status": http.StatusForbidden, "control": http.StatusOK} {
		if status, text, err := request(t, paths[name], "GET", "/v1/status", 0, 0); err != nil || status != http.StatusOK {
			t.Errorf("a question at %s: %d %s %v", name, status, text, err)
		}
		if status, text, err := request(t, paths[name], "DELETE", "/v1/vms/one", 0, 0); err != nil || status != want {
			t.Errorf("a change at %s: %d %s %v, want %d", name, status, text, err, want)
		}
	}
	if made, _ := filepath.Glob(dir + "/run/*.sock"); len(made) != 0 {
		t.Errorf("the daemon made sockets of its own: %v", made)
	}
	_ = c.Process.Signal(syscall.SIGTERM)
	if err := c.Wait(); err != nil {
		t.Errorf("%v: %s", err, log.String())
	}
	for _, path := range paths {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("the daemon removed systemd's socket: %v", err)
		}
	}
}
