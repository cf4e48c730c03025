package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// asVNICD makes the test binary act as vnicd.
const asVNICD = "VNICD_TEST_IS_VNICD"

// setting reads a key of the service's unit.
func setting(t *testing.T, unit, key string) string {
	t.Helper()
	m := regexp.MustCompile(`(?m)^` + key + `=(.*)$`).FindStringSubmatch(unit)
	if m == nil {
		t.Fatalf("the unit has no %s", key)
	}
	return m[1]
}

// TestUnitRestarts: the service manager never gives the daemon up, and the kernel does not choose it first when memory
// is short.
func TestUnitRestarts(t *testing.T) {
	text, err := os.ReadFile("../../packaging/vnicd.service")
	if err != nil {
		t.Fatal(err)
	}
	unit := string(text)
	before, _, _ := strings.Cut(unit, "[Service]")
	if setting(t, before, "StartLimitIntervalSec") != "0" { // a key of [Unit]
		t.Error("systemd gives up after some crashes")
	}
	if n, err := strconv.Atoi(setting(t, unit, "OOMScoreAdjust")); err != nil || n > -500 {
		t.Errorf("OOMScoreAdjust %d: guest memory counts as the daemon's", n)
	}
	if setting(t, unit, "Restart") != "on-failure" || setting(t, unit, "OOMPolicy") != "continue" {
		t.Error("the unit does not say what follows a crash")
	}
	// Long enough to bound the rate of restarts, and short beside the silence that connections may feel.
	if d, err := time.ParseDuration(setting(t, unit, "RestartSec")); err != nil || d < 100*time.Millisecond ||
		d > 200*time.Millisecond {
		t.Errorf("RestartSec is %v: %v", d, err)
	}
}

// The daemon serves TAP, tunnels and VMs as an ordinary user with no other rights than those of its unit file; without
// them it names what is missing.
func TestUnitCapabilities(t *testing.T) {
	nstest.Require(t, "setpriv", "util-linux")
	text, err := os.ReadFile("../../packaging/vnicd.service")
	if err != nil {
		t.Fatal(err)
	}
	unit := string(text)
	caps := setting(t, unit, "AmbientCapabilities")
	if caps != setting(t, unit, "CapabilityBoundingSet") || caps != "CAP_NET_ADMIN CAP_NET_BIND_SERVICE CAP_LINUX_IMMUTABLE CAP_BPF" ||
		setting(t, unit, "NoNewPrivileges") != "yes" {
		t.Fatalf("the unit's capabilities are %s", caps)
	}
	ns := nstest.Own(t, "unit")
	far := nstest.New(t, "far")
	nstest.Pair(ns, far, "under", 1500)
	ns.Addr("under", "192.0.2.1/24")
	far.Addr("under", "192.0.2.2/24")
	far.IP("link", "add", "vx", "type", "vxlan", "id", "100", "dstport", "4789", "local", "192.0.2.2", "remote",
		"192.0.2.1", "dev", "under")
	far.IP("link", "set", "vx", "up")
	far.Addr("vx", "10.0.0.2/24")

	// A directory and a binary that the user nobody can use.
	dir, err := os.MkdirTemp("/tmp", "vnicd-unit-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	const nobody = 65534
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	binary := build(t, dir)
	config := filepath.Join(dir, "vnicd.yaml")
	yaml := fmt.Sprintf("run-dir: %s/run\nvtep: {local: 192.0.2.1}\nevpn: {as: 65001, neighbours: [{address: 192.0.2.2, password: secret}]}\nnetworks: [{name: blue, vni: 100, peers: [192.0.2.2], tap: {name: unit0, addresses: [10.0.0.1/24]}}]\nvms: [{name: one, network: blue, mac: \"02:00:00:00:00:01\"}]\n", dir)
	if err := os.WriteFile(config, []byte(yaml), 0o644); err != nil {
		t.Fatal(err)
	}
	// As udev sets it up on hosts with systemd; elsewhere, in a mount namespace of the test.
	tun := filepath.Join(dir, "tun")
	if err := errors.Join(unix.Mknod(tun, unix.S_IFCHR, int(unix.Mkdev(10, 200))), os.Chmod(tun, 0o666)); err != nil {
		t.Fatal(err)
	}
	command := func(ctx context.Context, caps string) *exec.Cmd {
		c := exec.CommandContext(ctx, "unshare", "--mount", "sh", "-c", "mount --bind "+tun+` /dev/net/tun && exec "$@"`,
			"sh", "setpriv", "--reuid", strconv.Itoa(nobody), "--regid", strconv.Itoa(nobody), "--clear-groups",
			"--no-new-privs",
			"--bounding-set", "-all"+caps, "--inh-caps", "-all"+caps, "--ambient-caps", "-all"+caps, binary, "-c", config, "run")
		return c
	}
	plus := func(caps string) string {
		return strings.ToLower(strings.NewReplacer("CAP_", ",+", " ", "").Replace(caps))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if out, err := command(ctx, "").CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "CAP_NET_BIND_SERVICE") {
		t.Errorf("without capabilities: %v, %s", err, out)
	}
	least := plus(strings.TrimSuffix(caps, " CAP_BPF"))
	forced := "short-path: true\n" + yaml
	if err := os.WriteFile(config, []byte(forced), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := command(ctx, least).CombinedOutput(); err == nil || !strings.Contains(string(out), "short-path") ||
		!strings.Contains(string(out), "CAP_BPF") {
		t.Errorf("short-path: true where it is not possible: %v, %s", err, out)
	}
	if err := os.WriteFile(config, []byte(yaml), 0o644); err != nil {
		t.Fatal(err)
	}
	serve := func(caps string) (c *exec.Cmd, log *testlog.Log, ended chan error) {
		c, log, ended = command(ctx, caps), &testlog.Log{}, make(chan error, 1)
		c.Stdout, c.Stderr = log, log
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Process.Kill() }) // it may have ended
		go func() { ended <- c.Wait() }()
		testutil.Eventually(t, "the daemon is ready", func() bool {
			if len(ended) > 0 {
				t.Fatalf("the daemon ended with %v: %s", <-ended, log.String())
			}
			return strings.Contains(log.String(), "ready")
		})
		return c, log, ended
	}
	l := &lab{t: t, dir: dir, config: config}
	c, log, ended := serve(least)
	if out := l.ok("status"); !strings.Contains(out, "short path not possible") ||
		strings.Count(log.String(), "short path") != 1 {
		t.Errorf("without CAP_BPF: %s%s", out, log.String())
	}
	_ = c.Process.Signal(syscall.SIGTERM)
	if err := <-ended; err != nil {
		t.Error(err)
	}

	c, log, ended = serve(plus(caps))
	// The daemon has dropped CAP_BPF as far as possible, and narrowed its system calls, on every thread.
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", c.Process.Pid))
	if err != nil || len(threads) < 3 {
		t.Fatalf("threads %v, %v", threads, err)
	}
	want := fmt.Sprintf("%016x",
		1<<unix.CAP_NET_ADMIN|1<<unix.CAP_NET_BIND_SERVICE|1<<unix.CAP_LINUX_IMMUTABLE)
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range []string{"CapEff:\t" + want, "CapPrm:\t" + want, "CapAmb:\t" + want, "CapInh:\t" + want,
			"NoNewPrivs:\t1", "Seccomp:\t2"} {
			if !strings.Contains(string(status), l+"\n") {
				t.Errorf("%s has no %q:\n%s", thread, l, status)
			}
		}
	}
	// BGP's process has none of them, once it listens on its port; the one that starts it has what that needs.
	for pid, want := range map[int]string{bgpProcess(t, &daemonProcess{cmd: c}): strings.Repeat("0", 16),
		spawnerProcess(t, c.Process.Pid): fmt.Sprintf("%016x", 1<<unix.CAP_NET_BIND_SERVICE)} {
		testutil.Eventually(t, fmt.Sprintf("process %d has the capabilities %s", pid, want), func() bool {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			return err == nil && strings.Contains(string(status), "CapEff:\t"+want+"\n") &&
				strings.Contains(string(status), "CapPrm:\t"+want+"\n") &&
				strings.Contains(string(status), "CapAmb:\t"+strings.Repeat("0", 16)+"\n")
		})
	}
	ns.IP("link", "show", "unit0")
	if out := l.ok("status"); !strings.Contains(out, "vtep 192.0.2.1") || !strings.Contains(out, "vm one") {
		t.Errorf("status: %s", out)
	}

	// The rights left are enough for the short path, whose kernel state ends with the daemon.
	under, err := net.InterfaceByName("under")
	if err != nil {
		t.Fatal(err)
	}
	programs := func() int {
		q, err := link.QueryPrograms(link.QueryOptions{Target: under.Index, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			t.Fatal(err)
		}
		return len(q.Programs)
	}
	used := func() {
		t.Helper()
		testutil.Eventually(t, "the short path is taken", func() bool {
			upload(t, far, "10.0.0.2:7000", 1<<20)
			return programs() == 1 &&
				regexp.MustCompile(`short path on: [1-9]\d* entries, \d\d+ frames`).MatchString(l.ok("status"))
		})
	}
	used()
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the daemon ended with %v: %s", err, log.String())
	}
	if n := programs(); n != 0 {
		t.Errorf("%d programs outlive a daemon that was stopped", n)
	}
	c, _, ended = serve(plus(caps))
	used()
	_ = c.Process.Kill()
	<-ended
	testutil.Eventually(t, "the programs of a daemon that was killed are gone", func() bool { return programs() == 0 })
	c, _, ended = serve(plus(caps))
	used()
	_ = c.Process.Signal(syscall.SIGTERM)
	<-ended
}

// upload sends n bytes by TCP from the test's namespace to an address in another.
func upload(t *testing.T, to *nstest.NS, addr string, n int) {
	t.Helper()
	var ln net.Listener
	var err error
	to.Do(func() { ln, err = net.Listen("tcp", addr) })
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	got := make(chan int64, 1)
	go func() {
		var k int64
		if s, err := ln.Accept(); err == nil {
			k, _ = io.Copy(io.Discard, s)
			s.Close()
		}
		got <- k
	}()
	s, err := net.DialTimeout("tcp", addr, 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	_ = s.SetDeadline(time.Now().Add(time.Minute))
	if _, err := s.Write(make([]byte, n)); err != nil {
		t.Error(err)
	}
	s.Close()
	if k := <-got; k != int64(n) {
		t.Errorf("%d bytes of %d arrived", k, n)
	}
}

// Every command, at any depth, has a short and a long text, and appears in its parent's help, in the generated manual
// page and in shell completion.
func TestHelp(t *testing.T) {
	dir := t.TempDir()
	if err := WriteDocs("v1.2.3", dir); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) string {
		t.Helper()
		var out, errOut strings.Builder
		if code := Main("v1.2.3", args, &out, &errOut); code != exitOK {
			t.Errorf("vnicd %s: status %d: %s", strings.Join(args, " "), code, errOut.String())
		}
		return out.String()
	}
	a := &app{version: "v1.2.3", out: io.Discard, err: io.Discard}
	seen := 0
	var look func(above *cobra.Command, words []string)
	look = func(above *cobra.Command, words []string) {
		help, completed := run(append(words, "--help")...),
			run(append([]string{cobra.ShellCompRequestCmd}, append(words, "")...)...)
		for _, c := range above.Commands() {
			seen++
			if c.Short == "" || strings.HasSuffix(c.Short, ".") || c.Long == "" && above.Parent() == nil {
				t.Errorf("%s: short %q, long %q", c.CommandPath(), c.Short, c.Long)
			}
			for _, l := range strings.Split(c.Long, "\n") {
				if len(l) > 100 {
					t.Errorf("%s: a line of %d characters: %s", c.CommandPath(), len(l), l)
				}
			}
			if !regexp.MustCompile(`(?m)^  ` + c.Name() + ` +` + regexp.QuoteMeta(c.Short) + `$`).MatchString(help) {
				t.Errorf("the help of %s does not list it:\n%s", c.CommandPath(), help)
			}
			if !strings.Contains("\n"+completed, "\n"+c.Name()+"\t"+c.Short+"\n") {
				t.Errorf("%s is not completed:\n%s", c.CommandPath(), completed)
			}
			page := filepath.Join(dir, "usr/share/man/man8", strings.ReplaceAll(c.CommandPath(), " ", "-")+".8")
			if text, err := os.ReadFile(page); err != nil || !strings.Contains(string(text), "vnicd v1.2.3") {
				t.Errorf("%s: %v", page, err)
			}
			look(c, append(slices.Clone(words), c.Name()))
		}
	}
	look(a.rootCmd(), nil)
	if seen < 20 {
		t.Errorf("%d commands", seen)
	}
	// These scripts call the program itself.
	for _, f := range []string{"bash-completion/completions/vnicd", "zsh/vendor-completions/_vnicd",
		"fish/vendor_completions.d/vnicd.fish"} {
		if st, err := os.Stat(filepath.Join(dir, "usr/share", f)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", f, err)
		}
	}
}
