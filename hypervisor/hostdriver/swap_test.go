package hostdriver

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// swapChild in the environment makes this test binary the process that TestSwap runs in a memory cgroup.
const swapChild = "VNICD_TEST_SWAP_CHILD"

const (
	swapSize   = 512 << 20 // guest memory
	swapBudget = 64 << 20  // of these, for the device
	swapLimit  = 224 << 20 // of the cgroup: guest memory and the Go runtime
	swapFile   = 1 << 30
)

// PF-14, PF-15: a host with less memory than its VM. The device writes and reads all of the VM's memory at random
// through a small budget while the kernel swaps memory that is not held. Every byte is right, and the device's resident
// memory never exceeds the budget.
func TestSwap(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes a swap file and a memory cgroup and must be run by root (sudo go test ./hypervisor/...)")
	}
	withSwap(t, swapFile)
	if err := inCgroup(t, memoryCgroup(t, swapLimit), swapChild+"=1"); err != nil {
		t.Fatal(err)
	}
}

// withSwap gives the host a swap file until the test ends.
func withSwap(t testing.TB, size int64) {
	t.Helper()
	dir := t.TempDir()
	swap := filepath.Join(dir, "swap")
	f, err := os.OpenFile(swap, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	_ = f.Close()
	if err != nil {
		t.Fatalf("no room for a swap file in %s (set TMPDIR): %v", dir, err)
	}
	if out, err := exec.Command("mkswap", swap).CombinedOutput(); err != nil {
		t.Fatalf("mkswap (apt-get install util-linux): %v: %s", err, out)
	}
	if out, err := exec.Command("swapon", swap).CombinedOutput(); err != nil {
		t.Fatalf("swapon %s: %v: %s (the file system has to allow swap files: set TMPDIR)", swap, err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("swapoff", swap).CombinedOutput(); err != nil {
			t.Errorf("swapoff: %v: %s", err, out)
		}
	})
}

// inCgroup runs this test binary in a cgroup, with env in its environment, logs what it prints (a benchmark: only after
// an error), and returns how it ended.
func inCgroup(t testing.TB, cgroup, env string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", `echo $$ > "$0/cgroup.procs" && exec "$1"`, cgroup, self)
	cmd.Env = append(os.Environ(), env, "GOMEMLIMIT=80MiB")
	out, err := cmd.CombinedOutput()
	if _, bench := t.(*testing.B); !bench || err != nil {
		t.Logf("%s", out)
	}
	return err
}

// memoryCgroup makes a cgroup with limit bytes of memory and unlimited swap.
func memoryCgroup(t testing.TB, limit int) (dir string) {
	t.Helper()
	const v1, v2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
	name := fmt.Sprintf("vnicd-test-%d", os.Getpid())
	dir, file := filepath.Join(v1, name), "memory.limit_in_bytes"
	if _, err := os.Stat(filepath.Join(v1, "memory.limit_in_bytes")); err != nil {
		dir, file = filepath.Join(v2, name), "memory.max"
		if b, err := os.ReadFile(filepath.Join(v2, "cgroup.subtree_control")); err != nil ||
			!bytes.Contains(b, []byte("memory")) {
			t.Skipf("no memory cgroups: neither %s nor the controller in %s/cgroup.subtree_control", v1, v2)
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal("memory cgroup: ", err)
	}
	t.Cleanup(func() {
		err := os.Remove(dir)
		for i := 0; i < 100 && err != nil; i++ { // the last process is still ending
			time.Sleep(20 * time.Millisecond)
			err = os.Remove(dir)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, file), fmt.Append(nil, limit), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// swapMain runs in the cgroup.
func swapMain() int {
	if err := swapRun(); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func swapRun() error {
	const (
		name    = "vnicd-test-swap"
		workers = 4
		block   = 32 << 10 // bytes that one operation touches
		blocks  = swapSize / block
		random  = 800 // operations of each worker after one per block
	)
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	if err := unix.Ftruncate(fd, swapSize); err != nil {
		return err
	}
	b := NewBudget(swapBudget)
	s := translate.NewSpace(1)
	d := New(s, hclog.New(&hclog.LoggerOptions{Output: os.Stdout, Level: hclog.Error}), Options{Budget: b})
	defer d.Close()
	if err := d.AddSlot(Slot{Size: swapSize, FD: fd}); err != nil {
		return err
	}
	noise := make([]byte, 1<<20)
	rnd := rand.NewChaCha8([32]byte{1})
	_, _ = rnd.Read(noise)
	// contents of block i after the given number of writes: a unique number, then noise.
	contents := func(dst []byte, i, writes int) {
		binary.LittleEndian.PutUint64(dst, uint64(i)<<32|uint64(writes))
		copy(dst[8:], noise[(i*8191+writes*127)%(len(noise)-block):])
	}
	var (
		wg     sync.WaitGroup
		failed atomic.Pointer[error]
		parked atomic.Uint64
		fail   = func(err error) { failed.CompareAndSwap(nil, &err) }
		writes = make([]int, blocks) // each entry belongs to one worker
	)
	for w := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(3, uint64(w)))
			want, next := make([]byte, block), make([]byte, block)
			for n := 0; n < blocks/workers+random && failed.Load() == nil; n++ {
				i := n*workers + w
				if i >= blocks {
					i = rnd.IntN(blocks/workers)*workers + w
				}
				contents(want, i, writes[i])
				contents(next, i, writes[i]+1)
				err := access(context.Background(), s, w, translate.PA(i*block), block, func(mem []byte) {
					if writes[i] > 0 && !bytes.Equal(mem, want) {
						fail(fmt.Errorf("block %d is not what was written %d times: %s", i, writes[i], diff(mem, want)))
					}
					copy(mem, next)
				}, func() { parked.Add(1) })
				if err != nil {
					fail(err)
					return
				}
				writes[i]++
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	var most usage
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-time.After(50 * time.Millisecond):
		}
		b.mu.Lock()
		u, err := readUsage(name)
		b.mu.Unlock()
		switch {
		case err != nil:
			return err
		case u.rss > swapBudget || u.locked > swapBudget || !u.lockedFlag:
			fail(fmt.Errorf("budget %d: %+v", swapBudget, u))
		}
		most.rss, most.swap = max(most.rss, u.rss), max(most.swap, u.swap)
	}
	if err := failed.Load(); err != nil {
		return *err
	}
	st := d.Status()
	fmt.Printf("resident %d MiB at most, swapped %d MiB at most, parked %d times; faults: %d, mean %v, 99%% within %v; %d evictions, %d second chances\n",
		most.rss>>20, most.swap>>20, parked.Load(), st.HostFaults, st.FaultTime.Mean(), st.FaultTime.Quantile(0.99),
		st.Evictions, st.Refaults)
	if most.swap < swapSize/4 {
		return fmt.Errorf("%d bytes of %d were in swap: this proves nothing", most.swap, swapSize)
	}
	if st.Resident > swapBudget || st.Evictions < swapSize/minGranule || st.FailedFaults != 0 || st.Unlocked != "" {
		return fmt.Errorf("%+v", st)
	}
	// The guest sees the same bytes.
	got, want := make([]byte, block), make([]byte, block)
	for i, n := range writes {
		contents(want, i, n)
		if _, err := unix.Pread(fd, got, int64(i*block)); err != nil || !bytes.Equal(got, want) {
			return fmt.Errorf("block %d of the file, written %d times, differs, %v", i, n, err)
		}
	}
	return nil
}

// diff describes the wrong pages of got and their first bytes.
func diff(got, want []byte) (s string) {
	for off := 0; off < len(got); off += 4096 {
		if g := got[off : off+4096]; !bytes.Equal(g, want[off:off+4096]) {
			s += fmt.Sprintf(" page %d: %x, want %x", off/4096, g[:16], want[off:off+16])
		}
	}
	return s
}
