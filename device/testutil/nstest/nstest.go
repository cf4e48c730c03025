// Package nstest creates network namespaces for tests, with interfaces, routes and tunnels of the real kernel. They are
// removed when the test ends.
package nstest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
)

var serial atomic.Int32

// NS is a named network namespace of one test.
type NS struct {
	tb   testing.TB
	Name string
}

// New creates a namespace with loopback up. When the test ends it is deleted and processes in it are killed. Without
// root the test fails: a skipped network test would test nothing.
func New(tb testing.TB, hint string) *NS {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Fatal("this test creates network namespaces and must be run by root (sudo go test ./device/...)")
	}
	ns := &NS{tb: tb, Name: fmt.Sprintf("vnicd-%s-%d-%d", hint, os.Getpid(), serial.Add(1))}
	Run(tb, "ip", "netns", "add", ns.Name)
	tb.Cleanup(func() {
		out, _ := exec.Command("ip", "netns", "pids", ns.Name).Output()
		for _, pid := range strings.Fields(string(out)) {
			_ = exec.Command("kill", "-9", pid).Run() // may have exited already
		}
		if out, err := exec.Command("ip", "netns", "del", ns.Name).CombinedOutput(); err != nil {
			tb.Errorf("delete namespace %s: %v: %s", ns.Name, err, out)
		}
	})
	ns.IP("link", "set", "lo", "up")
	return ns
}

// Pair joins two namespaces by a veth pair, an interface of the same name on each side, up, with the given MTU.
func Pair(a, b *NS, dev string, mtu int) {
	a.tb.Helper()
	m := fmt.Sprint(mtu)
	a.IP("link", "add", dev, "mtu", m, "type", "veth", "peer", "name", dev, "mtu", m, "netns", b.Name)
	a.IP("link", "set", dev, "up")
	b.IP("link", "set", dev, "up")
	// The kernel deletes a namespace's interfaces some time after the namespace; until then the name would be taken for
	// the next test in a.
	a.tb.Cleanup(func() { _ = exec.Command("ip", "-n", a.Name, "link", "del", dev).Run() }) // may be deleted already
}

// IP runs ip in the namespace and fails the test if that fails.
func (ns *NS) IP(args ...string) string {
	ns.tb.Helper()
	return Run(ns.tb, "ip", append([]string{"-n", ns.Name}, args...)...)
}

// Addr adds an address that is usable at once, also if it is IPv6.
func (ns *NS) Addr(dev, addr string) {
	ns.tb.Helper()
	args := []string{"addr", "add", addr, "dev", dev}
	if strings.Contains(addr, ":") {
		args = append(args, "nodad")
	}
	ns.IP(args...)
}

// Command returns a command that runs in the namespace and is killed when the test process dies.
func (ns *NS) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", ns.Name, name}, args...)...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return c
}

// Exec runs a command in the namespace, at most 20 seconds, and returns its output.
func (ns *NS) Exec(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := ns.Command(ctx, name, args...).CombinedOutput()
	return string(out), err
}

// MustExec is Exec that fails the test on an error.
func (ns *NS) MustExec(name string, args ...string) string {
	ns.tb.Helper()
	out, err := ns.Exec(name, args...)
	if err != nil {
		ns.tb.Fatalf("%s: %s %s: %v\n%s", ns.Name, name, strings.Join(args, " "), err, out)
	}
	return out
}

// Start starts a command in the namespace; it is killed when the test ends.
func (ns *NS) Start(name string, args ...string) {
	ns.tb.Helper()
	c := ns.Command(context.Background(), name, args...)
	if err := c.Start(); err != nil {
		ns.tb.Fatalf("%s: start %s: %v", ns.Name, name, err)
	}
	ns.tb.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // may have exited already
		_ = c.Wait()
	})
}

// Do runs f on a thread in the namespace. Sockets and interfaces that f creates belong to it.
func (ns *NS) Do(f func()) {
	ns.tb.Helper()
	runtime.LockOSThread()
	old, err := netns.Get()
	if err != nil {
		ns.tb.Fatalf("nstest: current namespace: %v", err)
	}
	defer old.Close()
	to, err := netns.GetFromName(ns.Name)
	if err != nil {
		ns.tb.Fatalf("nstest: %s: %v", ns.Name, err)
	}
	defer to.Close()
	if err := netns.Set(to); err != nil {
		ns.tb.Fatalf("nstest: enter %s: %v", ns.Name, err)
	}
	defer func() {
		// On failure the thread stays locked, and ends with its goroutine.
		if err := netns.Set(old); err == nil {
			runtime.UnlockOSThread()
		}
	}()
	f()
}

// Ping waits until addr answers, and then requires answers to at least eight of the first ten requests, however late: a
// loaded machine is slow, and may lose one in a full buffer. opts are extra options, such as a size.
func (ns *NS) Ping(addr string, opts ...string) {
	ns.tb.Helper()
	testutil.Eventually(ns.tb, addr+" answers "+ns.Name, func() bool {
		_, err := ns.Exec("ping", "-c1", "-W1", addr)
		return err == nil
	})
	// With a deadline ping sends until it has ten answers; without one it would not wait for late answers.
	args := append([]string{"-c10", "-i0.02", "-w10"}, opts...)
	out := ns.MustExec("ping", append(args, addr)...)
	got := 0
	for seq := range 10 {
		if strings.Contains(out, fmt.Sprintf("icmp_seq=%d ", seq+1)) {
			got++
		}
	}
	if got < 8 {
		ns.tb.Fatalf("%s: ping %s:\n%s", ns.Name, addr, out)
	}
}

// Run runs a command on the host and fails the test if that fails.
func Run(tb testing.TB, name string, args ...string) string {
	tb.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		tb.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Require fails the test with the name of the Debian package to install if a program is missing.
func Require(tb testing.TB, program, pkg string) {
	tb.Helper()
	if _, err := exec.LookPath(program); err != nil {
		tb.Fatalf("this test needs %s: apt-get install %s", program, pkg)
	}
}

// OpenFDs returns the number of the process's open descriptors, for leak tests.
func OpenFDs(tb testing.TB) int {
	tb.Helper()
	d, err := unix.Open("/proc/self/fd", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		tb.Fatal(err)
	}
	unix.Close(d)
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(e) - 1 // the directory itself
}
