package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// Users and groups that need not exist.
const (
	daemonUser  = 64241
	vmsGroup    = 64242 // the daemon's, which QEMU must join
	qemuUser    = 64243
	adminGroup  = 64244
	statusGroup = 64245
	someUser    = 64246
)

// dial connects to a socket as a user.
func dial(t *testing.T, path string, uid, gid int, groups ...int) error {
	t.Helper()
	var err error
	testutil.AsUser(t, uid, gid, groups, func() {
		var c net.Conn
		if c, err = net.Dial("unix", path); err == nil {
			_ = c.Close()
		}
	})
	return err
}

// unprivileged runs vnicd as an ordinary user, as the package's unit does. It returns the directory of the sockets.
func unprivileged(t *testing.T, keys string) (dir string, log *testlog.Log) {
	t.Helper()
	top, err := os.MkdirTemp("/tmp", "vnicd-trust-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(top) })
	dir = filepath.Join(top, "run")
	config := filepath.Join(top, "vnicd.yaml")
	yaml := fmt.Sprintf("run-dir: %s\n%snetworks: [{name: blue, vni: 100}]\n", dir, keys)
	if err := errors.Join(os.Chmod(top, 0o755), os.Chown(top, daemonUser, vmsGroup),
		os.WriteFile(config, []byte(yaml), 0o644)); err != nil {
		t.Fatal(err)
	}
	log = &testlog.Log{}
	c := exec.Command("sh", "-c", `umask 0007; exec "$@"`, "sh", build(t, top), "-c", config, "run")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: daemonUser, Gid: vmsGroup}}
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		_ = c.Wait()
	})
	testutil.Eventually(t, "the daemon is ready", func() bool {
		if c.Process.Signal(syscall.Signal(0)) != nil {
			t.Fatalf("the daemon ended: %s", log.String())
		}
		return strings.Contains(log.String(), "ready")
	})
	return dir, log
}

const vmOne = "vms: [{name: one, network: blue, mac: \"02:00:00:00:00:01\"}]\n"

// TestQEMUIsNoOperator: the group that QEMU must join to open its VM's sockets does not open the control sockets.
func TestQEMUIsNoOperator(t *testing.T) {
	dir, _ := unprivileged(t, vmOne)
	for _, name := range []string{"one.net", "one.hca"} {
		if err := dial(t, filepath.Join(dir, name), qemuUser, vmsGroup); err != nil {
			t.Errorf("a QEMU at its VM's socket: %v", err)
		}
	}
	for _, name := range []string{"vnicd.sock", "vnicd-status.sock"} {
		if err := dial(t, filepath.Join(dir, name), qemuUser, vmsGroup); !errors.Is(err, unix.EACCES) {
			t.Errorf("a QEMU at %s: %v, want permission denied", name, err)
		}
	}
	control := filepath.Join(dir, "vnicd.sock")
	if status, _, err := request(t, control, "DELETE", "/v1/vms/one", qemuUser, vmsGroup); err == nil {
		t.Errorf("a QEMU removes a VM: status %d", status)
	}
}

// request sends a request as a user. The kernel tells the daemon who connected, not who writes.
func request(t *testing.T, path, method, url string, uid, gid int, groups ...int) (status int, text string, err error) {
	t.Helper()
	var c net.Conn
	testutil.AsUser(t, uid, gid, groups, func() { c, err = net.Dial("unix", path) })
	if err != nil {
		return 0, "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	req, err := http.NewRequest(method, "http://vnicd"+url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Close = true
	if err := req.Write(c); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// TestControlRights: the status socket answers questions and refuses every other request of the API, with what is
// missing; the control socket does everything. Each is open to its group alone.
func TestControlRights(t *testing.T) {
	dir, _ := unprivileged(t, fmt.Sprintf("control-group: %d\nstatus-group: %d\n%s", adminGroup, statusGroup, vmOne))
	full, ask := filepath.Join(dir, "vnicd.sock"), filepath.Join(dir, "vnicd-status.sock")
	for _, x := range []struct {
		path          string
		gid, other    int
		groups, never []int
	}{{full, adminGroup, vmsGroup, []int{adminGroup}, []int{statusGroup}},
		{ask, statusGroup, vmsGroup, []int{statusGroup}, []int{adminGroup}}} {
		for gid, groups := range map[int][]int{x.gid: nil, someUser: x.groups} {
			if err := dial(t, x.path, someUser, gid, groups...); err != nil {
				t.Errorf("%s as a member of its group: %v", x.path, err)
			}
		}
		for gid, groups := range map[int][]int{x.other: nil, someUser: x.never} {
			if err := dial(t, x.path, someUser, gid, groups...); !errors.Is(err, unix.EACCES) {
				t.Errorf("%s as a stranger: %v", x.path, err)
			}
		}
	}

	questions := map[string]bool{"status": true, "ports": true, "fdb": true, "neighbours": true, "routes": true,
		"evpn": true, "evpn/routes": true, "connections": true, "vms/{vm}/capabilities": true}
	source, err := os.ReadFile("../daemon/api.go")
	if err != nil {
		t.Fatal(err)
	}
	routes := regexp.MustCompile(`"(GET|POST|PUT|DELETE|PATCH) /v1/([^"]*)"`).FindAllStringSubmatch(string(source), -1)
	if len(routes) < 20 {
		t.Fatalf("%d routes in api.go", len(routes))
	}
	seen := 0
	for _, r := range routes {
		method, name := r[1], r[2]
		if strings.HasSuffix(name, "/") { // a pattern that is composed
			name += "peers/{key}"
		}
		url := "/v1/" + regexp.MustCompile(`\{\w+\}`).ReplaceAllString(name, "one")
		status, text, err := request(t, ask, method, url, someUser, statusGroup)
		if err != nil {
			t.Fatal(err)
		}
		if question := method == "GET" && questions[name]; question {
			seen++
			if status == http.StatusForbidden {
				t.Errorf("%s %s: %d %s", method, url, status, text)
			}
			continue
		}
		for _, want := range []string{"full control is needed", full, fmt.Sprintf("group %d", adminGroup),
			fmt.Sprintf("usermod -aG %d", adminGroup)} {
			if status != http.StatusForbidden || !strings.Contains(text, want) {
				t.Errorf("%s %s: %d %s, want 403 with %q", method, url, status, text, want)
			}
		}
	}
	if seen != len(questions) {
		t.Errorf("%d questions of %d", seen, len(questions))
	}
	if status, text, err := request(t, full, "DELETE", "/v1/vms/one", someUser, adminGroup); err != nil || status != 200 {
		t.Errorf("an operator removes a VM: %d %s %v", status, text, err)
	}

	// The command line uses the socket that it can open.
	vnicd := func(gid uint32, args ...string) (string, error) {
		c := exec.Command(filepath.Join(filepath.Dir(dir), "vnicd"), append([]string{"-c", filepath.Dir(dir) + "/vnicd.yaml"},
			args...)...)
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: someUser, Gid: gid}}
		out, err := c.CombinedOutput()
		return string(out), err
	}
	for _, gid := range []uint32{adminGroup, statusGroup} {
		if out, err := vnicd(gid, "status"); err != nil || !strings.Contains(out, "blue") {
			t.Errorf("vnicd status as group %d: %s %v", gid, out, err)
		}
	}
	if out, err := vnicd(adminGroup, "network", "add", "red", "vni", "7"); err != nil {
		t.Errorf("vnicd network add as an operator: %s %v", out, err)
	}
	if out, err := vnicd(statusGroup, "network", "del", "red"); err == nil || !strings.Contains(out,
		fmt.Sprintf("full control is needed. Use %s, as root or as a member of the group %d", full, adminGroup)) {
		t.Errorf("vnicd network del by status alone: %s %v", out, err)
	}
	out, err := vnicd(vmsGroup, "status")
	for _, want := range []string{"no permission for " + full, fmt.Sprint(adminGroup), ask, fmt.Sprint(statusGroup),
		fmt.Sprintf("usermod -aG %d", statusGroup)} {
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("vnicd status without any right, no %q: %s %v", want, out, err)
		}
	}
}

// TestVMOwners: a VM's user and group may open its sockets, and nobody else, not even who may open those of other VMs.
// A process that gets past the file's permissions is refused by its credentials, with a log line.
func TestVMOwners(t *testing.T) {
	dir, log := unprivileged(t, fmt.Sprintf(`vms:
  - {name: one, network: blue, mac: "02:00:00:00:00:01", user: %d}
  - {name: two, network: blue, mac: "02:00:00:00:00:02", user: %d, group: %d}
  - {name: any, network: blue, mac: "02:00:00:00:00:03"}
applications: [{name: app, network: blue, mac: "02:00:00:00:00:04", user: %[1]d, socket-mode: 0o666}]
`, qemuUser, someUser, adminGroup))
	for _, x := range []struct {
		socket   string
		uid, gid int
		groups   []int
		opens    bool
	}{
		{"one.net", qemuUser, 1, nil, true}, {"one.hca", qemuUser, 1, nil, true}, {"app.hca", qemuUser, 1, nil, true},
		{"one.net", someUser, vmsGroup, nil, false}, {"one.hca", someUser, vmsGroup, nil, false},
		{"app.hca", someUser, vmsGroup, nil, false},
		{"two.net", someUser, 1, nil, true}, {"two.hca", qemuUser, 1, []int{adminGroup}, true},
		{"two.hca", qemuUser, vmsGroup, nil, false}, {"any.hca", qemuUser, vmsGroup, nil, true},
		{"any.hca", qemuUser, 1, nil, false}, {"one.hca", 0, 0, nil, true},
	} {
		err := dial(t, filepath.Join(dir, x.socket), x.uid, x.gid, x.groups...)
		if x.opens && err != nil || !x.opens && !errors.Is(err, unix.EACCES) {
			t.Errorf("%+v: %v", x, err)
		}
	}
	// Somebody has changed the permissions.
	for _, name := range []string{"one.net", "one.hca", "two.net", "app.hca"} {
		path := filepath.Join(dir, name)
		if err := os.Chmod(path, 0o666); err != nil {
			t.Fatal(err)
		}
		var c net.Conn
		var err error
		testutil.AsUser(t, 64299, 64298, nil, func() { c, err = net.Dial("unix", path) })
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s serves a stranger: %v", name, err)
		}
		c.Close()
		testutil.Eventually(t, "the log names the stranger at "+name, func() bool {
			for line := range strings.Lines(log.String()) {
				if strings.Contains(line, "front end refused") && strings.Contains(line, path) &&
					strings.Contains(line, fmt.Sprintf("uid=64299 gid=64298 pid=%d", os.Getpid())) &&
					strings.Contains(line, "expected=\"root") {
					return true
				}
			}
			return false
		})
	}
}
