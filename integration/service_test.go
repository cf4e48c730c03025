package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/integration/harness"
	"github.com/vnicd/vnicd/integration/lab"
)

// TestService installs the host's package on a clean machine and looks at the service there, under systemd: its user, its capabilities and
// its sandbox, restarts, activation by its socket, and what is left when it was purged.
func TestService(t *testing.T) {
	u := newUser(t, "networks: [{name: blue, vni: 100, tap: {name: blue0, addresses: [10.0.0.254/24]}}]\nvtep: {local: 192.0.2.1}\nvms:\n  - {name: vm1, network: blue, mac: \"02:00:00:00:00:01\"}\n")
	out, err := (&harness.Namespace{}).Shell(u.ctx, fmt.Sprintf("cd '%s' && make package BUILD='%s' 2>&1", u.l.Root, u.build))
	if err != nil {
		t.Fatalf("%v\n%s", err, tail(out, 4000))
	}
	for _, line := range []string{"sudo apt-get install ./build/vnicd_*.deb", "sudoedit /etc/vnicd/vnicd.yaml", "sudo systemctl enable --now vnicd", "sudo adduser $USER vnicd"} {
		u.run(t, line)
	}
	t.Run("service", func(t *testing.T) { testService(u, t) })
	t.Run("restart", func(t *testing.T) { testServiceRestart(u, t) })
	t.Run("activation", func(t *testing.T) { testActivation(u, t) })
	t.Run("purge", func(t *testing.T) { testPurge(u, t) })
}

// property reads a property of the service.
func (u *user) property(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(u.run(t, "systemctl show -P "+name+" vnicd.service"))
}

// testService: the daemon runs as its own user with the capabilities that the unit lists and no more, confined as the unit says.
func testService(u *user, t *testing.T) {
	pid := u.property(t, "MainPID")
	status := u.run(t, "cat /proc/"+pid+"/status")
	t.Logf("capabilities and confinement of the daemon:\n%s", strings.Join(regexp.MustCompile(`(?m)^(Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp):.*$`).FindAllString(status, -1), "\n"))
	want := fmt.Sprintf("%016x", 1<<unix.CAP_NET_ADMIN|1<<unix.CAP_NET_BIND_SERVICE)
	for _, l := range []string{"CapInh:\t" + want, "CapPrm:\t" + want, "CapEff:\t" + want, "CapBnd:\t" + want, "CapAmb:\t" + want, "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, l+"\n") {
			t.Errorf("the daemon has no %q:\n%s", l, status)
		}
	}
	if who := u.run(t, "stat -c %U:%G /proc/"+pid); who != "vnicd:vnicd\n" {
		t.Errorf("the daemon runs as %s", who)
	}
	// What it sees, from within its mounts.
	inside := func(line string) string {
		out, err := u.c.Run(u.ctx, "nsenter --target "+pid+" --mount sh -c '"+line+"'")
		return fmt.Sprint(out, err)
	}
	for line, want := range map[string]string{
		"touch /usr/x /etc/x /var/x 2>&1; true": "Read-only file system",
		"ls -A /home":                           "Permission denied|^<nil>$",
		"ls /tmp":                               "^<nil>$",
		"touch /run/vnicd/x && rm /run/vnicd/x": "^<nil>$",
	} {
		if got := inside(line); !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("in the daemon's mounts, `%s`: %s", line, got)
		}
	}
	if out := u.run(t, "systemd-analyze verify /usr/lib/systemd/system/vnicd.service /usr/lib/systemd/system/vnicd.socket 2>&1"); strings.Contains(out, "vnicd") {
		t.Errorf("systemd-analyze verify: %s", out)
	}
	security := u.run(t, "sudo systemd-analyze security --no-pager vnicd.service | tail -n 1")
	t.Log(strings.TrimSpace(security))
	exposure := regexp.MustCompile(`: ([\d.]+) `).FindStringSubmatch(security)
	if exposure == nil || must[float64](t)(strconv.ParseFloat(exposure[1], 64)) > 2.5 {
		t.Errorf("exposure: %s", security)
	}
	for _, f := range []string{"man -w vnicd", "man -w vnicd-run", "ls /usr/share/bash-completion/completions/vnicd /usr/share/zsh/vendor-completions/_vnicd"} {
		u.run(t, f)
	}
}

// testServiceRestart: the next daemon takes over what systemd kept, which is not more.
func testServiceRestart(u *user, t *testing.T) {
	kept := func() int { return must[int](t)(strconv.Atoi(u.property(t, "NFileDescriptorStore"))) }
	before, pid := kept(), u.property(t, "MainPID")
	for _, how := range []string{"sudo systemctl restart vnicd", "sudo systemctl kill -s KILL vnicd && sleep 0.3"} {
		u.run(t, how)
		eventually(u.ctx, t, "another daemon after "+how, func() bool {
			return u.property(t, "ActiveState") == "active" && u.property(t, "MainPID") != pid
		})
		pid = u.property(t, "MainPID")
		if now := kept(); now != before {
			t.Errorf("systemd keeps %d descriptors, %d before", now, before)
		}
	}
}

// testActivation: with the socket's unit, whoever asks the daemon starts it.
func testActivation(u *user, t *testing.T) {
	u.run(t, "sudo systemctl stop vnicd && sudo systemctl enable --now vnicd.socket")
	if s := u.property(t, "ActiveState"); s != "inactive" {
		t.Errorf("the stopped service is %s", s)
	}
	if out := u.run(t, "vnicd status"); !strings.Contains(out, "vm vm1") {
		t.Error(out)
	}
	if s := u.property(t, "ActiveState"); s != "active" {
		t.Errorf("the service is %s after somebody asked", s)
	}
}

// pids is a command that prints the processes whose name fits.
func pids(name string) string { return "grep -slx '" + name + "' /proc/[0-9]*/comm | cut -d/ -f3" }

// testPurge: nothing of the package stays but its user.
func testPurge(u *user, t *testing.T) {
	files := u.run(t, "dpkg -L vnicd | while read -r f; do [ -d $f ] || echo $f; done")
	if len(strings.Fields(files)) < 20 {
		t.Errorf("the package has: %s", files)
	}
	u.run(t, "sudo apt-get purge -qy vnicd")
	if left := u.run(t, "ls -d /etc/vnicd /run/vnicd "+strings.Join(strings.Fields(files), " ")+" 2>/dev/null; find / -xdev -newer /etc/new.yaml -iname '*vnicd*' -not -path '/proc/*' -not -path '/sys/*' -not -path '"+home+"/*' 2>/dev/null | grep -v /var/lib/dpkg/ ; true"); left != "" {
		t.Errorf("left behind:\n%s", left)
	}
	if out := u.run(t, pids("vnicd.*")+"; systemctl list-units --all 'vnicd*' --no-legend; ip -br link show blue0 2>/dev/null; true"); out != "" {
		t.Errorf("left behind: %s", out)
	}
}

// user is somebody on a clean machine.
type user struct {
	ctx   context.Context
	l     *lab.Lab
	ns    *harness.Namespace
	c     *harness.Container
	build string // has the packages: build/ in the user's directory
}

const home = "/home/alice"

func newUser(t *testing.T, configuration string) *user {
	t.Helper()
	l, ctx := newLabWithoutModule(t)
	u := &user{ctx: ctx, l: l, build: t.TempDir()}
	root := must[string](t)(l.Builder.Host(ctx))
	u.ns = must[*harness.Namespace](t)(harness.NewNamespace("vnicd-readme"))
	l.Add(func() { check(t, u.ns.Close()) })
	dir := filepath.Join(l.Dir, "host")
	check(t, os.Mkdir(dir, 0o755))
	u.c = must[*harness.Container](t)(harness.NewContainer(ctx, u.ns, root, dir, u.build+"="+home+"/vnicd/build"))
	l.Add(func() { check(t, u.c.Close()) })
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := u.c.Run(context.Background(), "systemctl status vnicd; journalctl -n 60 --no-pager; vnicd status; tail -n 20 /var/log/libvirt/qemu/* /home/alice/vnicd/*.log")
			t.Log(tail(out, 8000))
		}
	})
	must[string](t)(u.c.Run(ctx, `
set -e
ip link add ul type veth peer name wire && ip link set ul up && ip link set wire up && ip addr add 192.0.2.1/24 dev ul
useradd --shell /bin/bash alice
chown alice: `+home+` `+home+`/vnicd
echo 'alice ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/alice
printf '#!/bin/sh\ncp /etc/new.yaml "$1"\n' >/usr/local/bin/edit
chmod 755 /usr/local/bin/edit
cat >/etc/new.yaml <<'Y'
`+configuration+"\nY"))
	return u
}

// run runs a line of the user's shell, in the directory with the packages.
func (u *user) run(t *testing.T, line string) string {
	t.Helper()
	return must[string](t)(u.c.Run(u.ctx, u.as(line)))
}

func (u *user) as(line string) string {
	return "runuser -l alice -c '" + strings.ReplaceAll("cd vnicd && export EDITOR=edit USER=alice DEBIAN_FRONTEND=noninteractive && "+line, "'", `'\''`) + "'"
}
