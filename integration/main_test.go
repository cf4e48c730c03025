package integration

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// guestCmdline enables checks of the guest kernels. Debian's kernels have SLUB's and the page allocator's checks and
// KFENCE; KASAN and lockdep are in those of `make test-debug`.
var guestCmdline = flag.String("guest-cmdline", "",
	"arguments to append to the kernel command line of every guest, such as \"slub_debug=FZPU page_poison=1 kfence.sample_interval=20\"")

// TestMain fails the run if the tests leave namespaces, interfaces or processes behind. It ignores those of other runs
// on the machine.
func TestMain(m *testing.M) {
	before := interfaces()
	code := m.Run()
	var left []string
	for what := range interfaces() {
		if !before[what] && strings.Contains(what, "vnicd") {
			left = append(left, what)
		}
	}
	pid := os.Getpid()
	left = append(left, lines("namespace", fmt.Sprintf("ip netns list | cut -d' ' -f1 | grep -e '-%d-' || true", pid))...)
	left = append(left, lines("process", fmt.Sprintf("pgrep -a -P %d | grep -v pgrep | grep -E 'qemu|vnicd' || true",
		pid))...)
	for _, what := range left {
		fmt.Fprintf(os.Stderr, "left behind by the tests: %s\n", what)
		code = 1
	}
	os.Exit(code)
}

// interfaces returns the TAP and VXLAN interfaces outside of namespaces.
func interfaces() map[string]bool {
	found := map[string]bool{}
	for _, l := range lines("interface", "ip -o link show type tun; ip -o link show type vxlan") {
		found[l] = true
	}
	return found
}

func lines(what, shell string) (found []string) {
	out, err := (&harness.Namespace{}).Shell(context.Background(), shell)
	if err != nil {
		return []string{err.Error()}
	}
	for l := range strings.Lines(out) {
		found = append(found, what+" "+strings.TrimSpace(l))
	}
	return found
}

// testTimeout bounds one top-level test under TCG on a busy machine. Page fault stress takes many times -odp.duration;
// -programs.all runs a hundred programs more; the tests of continuity have events.
func testTimeout() time.Duration {
	d := 25*time.Minute + 60**odpDuration
	if *allPrograms {
		d += 25 * time.Minute
	}
	d += time.Duration(*kills+*handovers)*30*time.Second + time.Duration(*pauses)*(*longest+30*time.Second)
	return harness.Patience(d)
}

func newLab(t *testing.T) (*lab.Lab, context.Context) {
	t.Helper()
	return makeLab(t, true)
}

// newLabWithoutModule is for tests whose guests use no RDMA.
func newLabWithoutModule(t *testing.T) (*lab.Lab, context.Context) {
	t.Helper()
	return makeLab(t, false)
}

func makeLab(t *testing.T, module bool) (*lab.Lab, context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout())
	t.Cleanup(cancel)
	// A test that ends itself tells more than one that `go test -timeout` ends.
	if end, ok := t.Deadline(); ok {
		ctx, cancel = context.WithDeadline(ctx, end.Add(-min(2*time.Minute, time.Until(end)/10)))
		t.Cleanup(cancel)
	}
	l, err := lab.New(ctx, os.Stderr, module)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Run)
	l.Settings = ways.Config
	l.KernelArgs = append(strings.Fields(*guestCmdline), harness.KernelArgs()...)
	l.Complain = func(vm, what string) { t.Errorf("at the end of %s:\n%s", vm, what) }
	return l, ctx
}

func must[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// run runs a shell line in a guest and fails the test if it fails.
func run(ctx context.Context, t *testing.T, m *qemu.Machine, line string) string {
	t.Helper()
	out, err := m.Run(ctx, line)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// quietKernels fails the test if a guest's kernel log reports a defect.
func quietKernels(ctx context.Context, t *testing.T, ms ...*qemu.Machine) {
	t.Helper()
	for _, m := range ms {
		bad, err := harness.KernelComplaints(ctx, m)
		if err != nil {
			t.Error(err)
		} else if len(bad) > 0 {
			t.Errorf("kernel log of %s:\n%s", m.Name(), strings.Join(bad, "\n"))
		}
	}
}

// dumpOnFailure logs the hosts' status and logs and the guests' kernel logs of a failed test.
func dumpOnFailure(t *testing.T, hosts []*lab.Host, ms *[]*qemu.Machine) {
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		for _, h := range hosts {
			s, _ := h.CLI(ctx, "status")
			c, _ := h.CLI(ctx, "connection", "show")
			for _, vm := range []string{"vm1", "vm2"} {
				if v, err := h.CLI(ctx, "status", vm); err == nil {
					s += "\n" + tail(v, 20000)
				}
			}
			t.Logf("host %s:\n%s\n%s\n%s", h.Name, s, tail(c, 2000), tail(h.Log(), 4000))
		}
		for _, m := range *ms {
			select {
			case <-m.Done():
				t.Logf("QEMU of %s has ended: %v", m.Name(), m.Wait(ctx))
			default:
			}
			if r, err := m.Shell(ctx, "dmesg | tail -30; rdma -dd resource show qp; rdma -dd resource show cq"); err == nil {
				t.Logf("last lines of the kernel log of %s, and its objects:\n%s", m.Name(), tail(r.Stdout, 8000))
			}
		}
	})
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// both runs f and g concurrently.
func both(f, g func() error) error {
	var wg sync.WaitGroup
	var e1, e2 error
	wg.Add(2)
	go func() { defer wg.Done(); e1 = f() }()
	go func() { defer wg.Done(); e2 = g() }()
	wg.Wait()
	return errors.Join(e1, e2)
}

// eventually waits for a condition, generously.
func eventually(ctx context.Context, t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(harness.Patience(3 * time.Minute))
	for !cond() {
		if time.Now().After(deadline) || ctx.Err() != nil {
			t.Fatalf("timed out waiting for: %s", what)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
