package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/integration/rig"
	"github.com/vnicd/vnicd/lab"
)

// TestService installs the host's package on a clean machine, from a signed apt tree, and checks the service under
// systemd: its user, capabilities and sandbox, restarts, socket activation, and what remains after purging it.
// TestREADME installs the package's file, and runs the same steps with two VMs.
func TestService(t *testing.T) {
	_, configuration := readme(t)
	u := newUser(t, configuration)
	u.installByApt(t)
	for _, c := range []string{"sudoedit /etc/vnicd/vnicd.yaml", "sudo systemctl enable --now vnicd",
		"sudo usermod -aG vnicd,vnicd-status $USER"} {
		readmeSteps[c](u, t, c)
	}
	u.look(t)
}

// look checks the service, and removes it at the end.
func (u *user) look(t *testing.T) {
	t.Run("service", func(t *testing.T) { testService(u, t) })
	t.Run("restart", func(t *testing.T) { testServiceRestart(u, t) })
	t.Run("activation", func(t *testing.T) { testActivation(u, t) })
	t.Run("purge", func(t *testing.T) { testPurge(u, t) })
}

// ringsOfVM is the number of the rings of a VM's network card and, with one engine, of its HCA.
const ringsOfVM = 2 + 4

// property returns a property of the service.
func (u *user) property(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(u.run(t, "systemctl show -P "+name+" vnicd.service"))
}

// programs runs the demo's programs between the two VMs, if there are any.
func (u *user) programs(t *testing.T) {
	t.Helper()
	for _, m := range u.vms {
		check(t, lab.WaitRDMA(u.ctx, m, lab.Device))
	}
	if len(u.vms) == 0 {
		return
	}
	run(u.ctx, t, u.vms["vm1"], "ping -c 3 -W 10 10.0.0.2")
	a, b := must[lab.End](t)(lab.NewEnd(u.ctx, u.vms["vm1"], lab.Device, "10.0.0.1")),
		must[lab.End](t)(lab.NewEnd(u.ctx, u.vms["vm2"], lab.Device, "10.0.0.2"))
	must[string](t)(lab.Pingpong(u.ctx, b, a, "ibv_rc_pingpong", "-c", "-n 500"))
	for _, x := range [][]string{{"ib_write_bw", "-s 65536", "-n 500"}, {"ib_read_bw", "-s 65536", "-n 500"},
		{"ib_send_lat", "-s 2", "-n 500"}} {
		t.Log(x[0], lab.Rows(must[string](t)(lab.Perftest(u.ctx, b, a, x[0], x[1:]...))))
	}
}

// testBackends: management software finds the back end by its description and starts a process for each device; vm1
// then uses these.
func testBackends(u *user, t *testing.T) {
	var description struct{ Type, Binary string }
	check(t, json.Unmarshal([]byte(u.run(t, "cat /usr/share/qemu/vhost-user/50-vnicd-net.json")), &description))
	var capabilities struct{ Type string }
	check(t, json.Unmarshal([]byte(u.run(t, description.Binary+" --what-is-this --print-capabilities")), &capabilities))
	if description.Type != "net" || capabilities.Type != "net" {
		t.Errorf("description %+v but capabilities %+v", description, capabilities)
	}
	u.stopQEMU(t, "vm1")
	args := strings.TrimSpace(u.run(t, "vnicd qemu-args vm1"))
	for _, device := range []string{"net", "hca"} {
		u.start(t, fmt.Sprintf("/usr/libexec/vnicd/vnicd-%[1]s --vm=vm1 --socket-path=%[1]s.sock >%[1]s.log 2>&1", device))
		u.run(t, "until [ -S "+device+".sock ]; do sleep 0.1; done")
		args = strings.Replace(args, "/run/vnicd/vm1."+device, device+".sock", 1)
	}
	if strings.Contains(args, "/run/vnicd") {
		t.Fatal(args)
	}
	u.startQEMU(t, "vm1", "qemu-system-x86_64 "+u.machineArgs("vm1")+" "+args)
	u.installModule(t, "vm1")
	run(u.ctx, t, u.vms["vm1"], "modprobe -a vnicd rdma_ucm")
	check(t, lab.WaitRDMA(u.ctx, u.vms["vm1"], lab.Device))
	run(u.ctx, t, u.vms["vm1"], "ping -c 3 10.0.0.254")
}

// testService: the daemon runs as its own user with exactly the capabilities that the unit lists, confined as the unit
// says, and serves the demo's programs.
func testService(u *user, t *testing.T) {
	pid := u.property(t, "MainPID")
	status := u.run(t, "cat /proc/"+pid+"/status")
	t.Logf("capabilities and confinement of the daemon:\n%s",
		strings.Join(regexp.MustCompile(`(?m)^(Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp):.*$`).FindAllString(status, -1),
			"\n"))
	const keeps = 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_LINUX_IMMUTABLE
	want, bound := fmt.Sprintf("%016x", keeps), fmt.Sprintf("%016x", keeps|1<<unix.CAP_BPF)
	for _, l := range []string{"CapInh:\t" + want, "CapPrm:\t" + want, "CapEff:\t" + want, "CapBnd:\t" + bound,
		"CapAmb:\t" + want, "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, l+"\n") {
			t.Errorf("the daemon has no %q:\n%s", l, status)
		}
	}
	if who := u.run(t, "stat -c %U:%G /proc/"+pid); who != "vnicd:vnicd\n" {
		t.Errorf("the daemon runs as %s", who)
	}
	if out := u.run(t, "vnicd status"); !strings.Contains(out, "short path on") {
		t.Errorf("the short path is off under the unit: %s", out)
	}
	// The file system as the daemon sees it.
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
	// The user belongs to the groups vnicd and vnicd-status.
	for line, want := range map[string]string{
		"stat -c %U:%G:%a /run/vnicd/vnicd.sock":                               "vnicd:vnicd-admin:660",
		"stat -c %U:%G:%a /run/vnicd/vnicd-status.sock":                        "vnicd:vnicd-status:660",
		"stat -c %U:%G:%a /run/vnicd/vm1.hca":                                  "vnicd:vnicd:660",
		"vnicd reload 2>&1; true":                                              "full control is needed.*vnicd-admin",
		"vnicd capture vm1 -n 1 -w - 2>&1; true":                               "full control is needed.*vnicd-admin",
		"sudo runuser -u vnicd -- vnicd reload 2>&1":                           "",
		"sudo runuser -u libvirt-qemu -g vnicd -- vnicd vm del vm1 2>&1; true": "no permission for /run/vnicd/vnicd.sock",
		"sudo runuser -u libvirt-qemu -g vnicd -- vnicd status vm1 2>&1; true": "no permission for /run/vnicd/vnicd.sock",
	} {
		if got := u.run(t, line); !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("`%s`: %s, want %s", line, got, want)
		}
	}
	// Root saves a VM in the configuration, which the daemon then reads; a user without rights cannot.
	for _, step := range []struct{ line, want string }{
		{"vnicd vm add --save saved network blue mac 02:00:00:00:0f:01 2>&1; true", "permission denied.*run it as root"},
		{"sudo vnicd vm add --save saved network blue mac 02:00:00:00:0f:01 2>&1", "^$"},
		{"stat -c %U:%G:%a /etc/vnicd/vnicd.d/vm-saved.yaml /run/vnicd/saved.hca", "root:root:644\nvnicd:vnicd:660"},
		{"sudo vnicd reload 2>&1; vnicd check", "VMs, 1 fragments in /etc/vnicd/vnicd.d"},
		{"sudo vnicd vm del --save saved 2>&1; sudo vnicd reload 2>&1; ls -A /etc/vnicd/vnicd.d", "^$"},
	} {
		if got := u.run(t, step.line); !regexp.MustCompile(step.want).MatchString(got) {
			t.Errorf("`%s`: %s, want %s", step.line, got, step.want)
		}
	}
	if out := u.run(t,
		"systemd-analyze verify /usr/lib/systemd/system/vnicd.service /usr/lib/systemd/system/vnicd.socket /usr/lib/systemd/system/vnicd-status.socket 2>&1"); strings.Contains(out, "vnicd") {
		t.Errorf("systemd-analyze verify: %s", out)
	}
	security := u.run(t, "sudo systemd-analyze security --no-pager vnicd.service | tail -n 1")
	t.Log(strings.TrimSpace(security))
	exposure := regexp.MustCompile(`: ([\d.]+) `).FindStringSubmatch(security)
	if exposure == nil || must[float64](t)(strconv.ParseFloat(exposure[1], 64)) > 2.5 {
		t.Errorf("exposure: %s", security)
	}
	for _, f := range []string{"man -w vnicd", "man -w vnicd-run", "man -w 5 vnicd.yaml",
		"ls /usr/share/bash-completion/completions/vnicd /usr/share/zsh/vendor-completions/_vnicd"} {
		u.run(t, f)
	}
	u.programs(t)
}

// testDashboard checks the page while the two VMs transfer data.
func testDashboard(u *user, t *testing.T) {
	b := must[*rig.Browser](t)(rig.NewBrowser(u.ctx, u.ns))
	defer b.Close()
	a, z := must[lab.End](t)(lab.NewEnd(u.ctx, u.vms["vm1"], lab.Device, "10.0.0.1")),
		must[lab.End](t)(lab.NewEnd(u.ctx, u.vms["vm2"], lab.Device, "10.0.0.2"))
	stop := rig.Traffic(u.ctx, z, a)
	check(t, errors.Join(b.Window(u.ctx, 1280, 900, false),
		rig.WatchPage(u.ctx, b, "http://127.0.0.1:9469/", "vm1", "vm2")))
	if *screenshots != "" {
		check(t, b.Screenshot(u.ctx, filepath.Join(*screenshots, "readme.png")))
	}
	check(t, stop())
}

// testServiceRestart: with both VMs running, the next daemon takes over the descriptors that systemd kept.
func testServiceRestart(u *user, t *testing.T) {
	kept := func() int { return must[int](t)(strconv.Atoi(u.property(t, "NFileDescriptorStore"))) }
	before, pid := kept(), u.property(t, "MainPID")
	if before < 4*len(u.vms) {
		t.Errorf("systemd keeps %d descriptors of %d VMs", before, len(u.vms))
	}
	// While QEMU exchanges call eventfds, each ring keeps its last one, too; the next daemon does not.
	spares := ringsOfVM * len(u.vms)
	for _, how := range []string{"sudo systemctl restart vnicd", "sudo systemctl kill -s KILL vnicd && sleep 0.3"} {
		u.run(t, how)
		eventually(u.ctx, t, "another daemon after "+how, func() bool {
			return u.property(t, "ActiveState") == "active" && u.property(t, "MainPID") != pid
		})
		pid = u.property(t, "MainPID")
		u.programs(t)
		now := kept()
		if now > before || now < before-spares {
			t.Errorf("systemd keeps %d descriptors, %d before, want at most %d less", now, before, spares)
		}
		before, spares = now, 0
	}
	testUpgrade(u, t)
	if now := kept(); now != before {
		t.Errorf("systemd keeps %d descriptors, %d before", now, before)
	}
	quietKernels(u.ctx, t, slices.Collect(maps.Values(u.vms))...)
}

// testUpgrade: `vnicd upgrade` replaces the daemon, and a program that does not come up by the one that ran. So does
// the package.
func testUpgrade(u *user, t *testing.T) {
	pid := u.property(t, "MainPID")
	another := func(what string) {
		t.Helper()
		now := u.property(t, "MainPID")
		if state := u.property(t, "ActiveState"); state != "active" || now == pid {
			t.Errorf("%s: the service is %s, process %s, before %s", what, state, now, pid)
		}
		pid = now
		u.programs(t)
	}
	program := func() string { return strings.TrimSpace(u.run(t, "sudo readlink /proc/"+pid+"/exe")) }
	t.Log(u.run(t, "sudo vnicd upgrade"))
	another("upgrade")
	// A user who loses patience, or the terminal, does not lose the way back.
	out := u.run(t, "sudo sh -c 'cp -p /usr/bin/vnicd /var/tmp/new && cp /bin/false /usr/bin/false.new && "+
		"mv /usr/bin/false.new /usr/bin/vnicd && rm /var/lib/vnicd/previous/vnicd; "+
		"/var/tmp/new upgrade 2>&1 & until [ -e /var/lib/vnicd/previous/vnicd ]; do sleep 0.05; done; "+
		"kill -HUP $!; kill -INT $!; kill $!; wait $!; echo status $?'")
	if !strings.Contains(out, "runs again") || !strings.Contains(out, "status 1") {
		t.Errorf("upgrade to a program that fails: %s", out)
	}
	u.run(t, "sudo mv /var/tmp/new /usr/bin/vnicd")
	another("failed upgrade")
	if p := program(); p != "/var/lib/vnicd/previous/vnicd" {
		t.Errorf("after a failed upgrade %s runs", p)
	}
	out = u.run(t, "sudo apt-get install --reinstall -y "+u.pkg+" 2>&1")
	if !strings.Contains(out, "is now") {
		t.Errorf("the package has not replaced the daemon: %s", out)
	}
	another("reinstallation")
	if p := program(); p != "/usr/bin/vnicd" {
		t.Errorf("after an upgrade %s runs", p)
	}
}

// testActivation: with the socket's unit, connecting to the control socket starts the daemon.
func testActivation(u *user, t *testing.T) {
	u.run(t, "sudo systemctl stop vnicd && sudo systemctl enable --now vnicd.socket")
	if s := u.property(t, "ActiveState"); s != "inactive" {
		t.Errorf("the stopped service is %s", s)
	}
	if out := u.run(t, "vnicd status"); !strings.Contains(out, "vm vm1") {
		t.Error(out)
	}
	if s := u.property(t, "ActiveState"); s != "active" {
		t.Errorf("the service is %s after a request", s)
	}
	u.programs(t)
}

// pids returns a command that prints the processes whose name matches.
func pids(name string) string { return "grep -slx '" + name + "' /proc/[0-9]*/comm | cut -d/ -f3" }

// testPurge: only the package's user remains.
func testPurge(u *user, t *testing.T) {
	if len(u.vms) > 0 {
		must[string](t)(u.c.Run(u.ctx, "virsh -q destroy vm2"))
		u.stopQEMU(t, "vm1")
		u.run(t, "kill $("+pids("vnicd-...")+") && until [ -z \"$("+pids("vnicd-...")+")\" ]; do sleep 0.1; done")
	}
	files := u.run(t, "dpkg -L vnicd | while read -r f; do [ -d $f ] || echo $f; done")
	if len(strings.Fields(files)) < 20 {
		t.Errorf("the package has: %s", files)
	}
	u.run(t, "sudo apt-get purge -qy vnicd")
	if left := u.run(t, "ls -d /etc/vnicd /run/vnicd "+strings.Join(strings.Fields(files), " ")+
		" 2>/dev/null; find / -xdev -newer /etc/new.yaml -iname '*vnicd*' -not -path '/proc/*' -not -path '/sys/*' -not -path '"+home+"/*' 2>/dev/null | grep -vE '^(/var/lib/(dpkg|apt)|/etc/apt)/' ; true"); left != "" {
		t.Errorf("left behind:\n%s", left)
	}
	if out := u.run(t, pids("vnicd.*")+
		"; systemctl list-units --all 'vnicd*' --no-legend; ip -br link show blue0 2>/dev/null; true"); out != "" {
		t.Errorf("left behind: %s", out)
	}
}
