package hostdriver

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/pressure"
	"github.com/vnicd/vnicd/translate"
)

// crowdChild in the environment, with a crowd as JSON, makes this test binary the process of that crowd.
const crowdChild = "VNICD_TEST_CROWD_CHILD"

// crowd is some VMs whose devices use all of the VMs' memory, on a host that has less: a memory cgroup with swap. No
// budget is configured. Each VM has two connections, as HCA and NIC are.
type crowd struct {
	Limit int           // bytes of the cgroup, for everything
	Guest int           // bytes of all VMs
	For   time.Duration // after each block of memory was written once
}

// crowdResult is what the child prints.
type crowdResult struct {
	Bytes     int64 // moved during For
	Took      time.Duration
	Parked    int64 // accesses that met an absent page
	Evictions uint64
	Refaults  uint64
	Delayed   uint64
	Swapped   uint64 // most of it, at one time
	Resident  uint64 // likewise
	Host      HostStatus
}

const (
	crowdVMs   = 3
	crowdBlock = 16 << 10 // bytes of an access
)

// HF-4, HF-2: a host with less memory than its VMs use, and no budget: everybody goes on with the right bytes, no
// operation ends with an error, and the kernel kills nobody.
func TestCrowdedHost(t *testing.T) {
	withSwap(t, 1<<30)
	r := runCrowd(t, crowd{Limit: 224 << 20, Guest: 560 << 20, For: 5 * time.Second})
	if r.Host.Shrinks == 0 || r.Swapped < 200<<20 {
		t.Errorf("no pressure: this proves nothing: %+v", r)
	}
}

// The table of throughput against oversubscription: what three VMs with two connections each move by accesses of
// 16 KiB, of which four of five are to a fifth of the memory, with no configured budget. 0.5 is what a host with enough
// memory does.
//
//	go test -run '^$' -bench Oversubscribed ./hypervisor/hostdriver
func BenchmarkOversubscribed(b *testing.B) {
	const limit = 256 << 20
	withSwap(b, 2<<30)
	for _, ratio := range []float64{0.5, 1, 1.25, 1.5, 2, 2.5, 3} {
		b.Run(strconv.FormatFloat(ratio, 'f', 2, 64), func(b *testing.B) {
			var r crowdResult
			for range b.N {
				r = runCrowd(b, crowd{Limit: limit, Guest: int(ratio * limit), For: 10 * time.Second})
			}
			s := r.Took.Seconds()
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(r.Bytes)/s/1e6, "MB/s")
			b.ReportMetric(float64(r.Parked)/s, "faults/s")
			b.ReportMetric(float64(r.Resident)/limit, "resident/limit")
			b.ReportMetric(float64(r.Swapped)/limit, "swapped/limit")
		})
	}
}

// runCrowd runs the crowd in a process and a cgroup of its own.
func runCrowd(t testing.TB, c crowd) (r crowdResult) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this makes a swap file and a memory cgroup and must be run by root (sudo go test ./hypervisor/...)")
	}
	in, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	dir := memoryCgroup(t, c.Limit)
	result := filepath.Join(t.TempDir(), "result")
	err = inCgroup(t, dir, crowdChild+"="+result+" "+string(in))
	if n := kills(t, dir); n != 0 {
		t.Errorf("the kernel killed %d processes", n)
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.ReadFile(result)
	if err == nil {
		err = json.Unmarshal(out, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// kills returns how many processes of the cgroup the kernel has killed for lack of memory.
func kills(t testing.TB, dir string) int {
	t.Helper()
	for _, file := range []string{"memory.oom_control", "memory.events"} { // version 1, version 2
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
				k, err := strconv.Atoi(strings.TrimSpace(n))
				if err != nil {
					t.Fatal(err)
				}
				return k
			}
		}
	}
	t.Fatal("the cgroup does not count what the kernel kills: ", dir)
	return 0
}

// crowdMain runs in the cgroup.
func crowdMain(arg string) int {
	result, in, _ := strings.Cut(arg, " ")
	var c crowd
	err := json.Unmarshal([]byte(in), &c)
	var r crowdResult
	if err == nil {
		r, err = c.run()
	}
	var out []byte
	if err == nil {
		out, err = json.Marshal(r)
	}
	if err == nil {
		err = os.WriteFile(result, out, 0o600)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Printf("%s\n", out)
	return 0
}

func (c crowd) run() (r crowdResult, err error) {
	const name = "vnicd-test-crowd"
	log := hclog.New(&hclog.LoggerOptions{Output: os.Stdout, Level: hclog.Info})
	reader := pressure.NewReader("/")
	host, err := NewHost(HostOptions{Read: reader.Read, Watch: reader.Stalls(), Limit: 0.1, Log: log})
	if err != nil {
		return r, err
	}
	defer host.Close()
	size := c.Guest / crowdVMs &^ (1<<20 - 1)
	noise := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(noise)
	var (
		wg, begun sync.WaitGroup
		stop      atomic.Bool
		measuring atomic.Bool
		moved     atomic.Int64
		parked    atomic.Int64
		failed    = make(chan error, 2*crowdVMs)
		vms       []*Budget
	)
	for vm := range crowdVMs {
		b := NewBudget(0)
		host.Add(b, 100)
		vms = append(vms, b)
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, int64(size))
		}
		if err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
		}
		if err != nil {
			return r, err
		}
		for face := range 2 {
			s := translate.NewSpace(translate.GVMI(vm + 1))
			d := New(s, log, Options{Budget: b})
			defer d.Close()
			if err := d.AddSlot(Slot{Size: uint64(size), FD: fd}); err != nil {
				return r, err
			}
			w := &crowdWorker{s: s, slot: face, first: face, noise: noise, blocks: size / crowdBlock,
				rnd: rand.New(rand.NewPCG(uint64(vm), uint64(face))), parked: &parked}
			begun.Add(1)
			wg.Go(func() {
				err := w.fill()
				begun.Done()
				for err == nil && !stop.Load() {
					if err = w.one(w.pick()); measuring.Load() {
						moved.Add(crowdBlock)
					}
				}
				if err != nil {
					failed <- fmt.Errorf("VM %d, face %d: %w", vm, face, err)
				}
			})
		}
	}
	begun.Wait()
	before := parked.Load()
	start := time.Now()
	measuring.Store(true)
	for time.Since(start) < c.For {
		time.Sleep(50 * time.Millisecond)
		u, err := readUsage(name)
		if err != nil {
			return r, err
		}
		r.Swapped, r.Resident = max(r.Swapped, u.swap), max(r.Resident, u.rss)
	}
	r.Bytes, r.Took, r.Parked = moved.Load(), time.Since(start), parked.Load()-before
	r.Host = host.Status()
	stop.Store(true)
	wg.Wait()
	close(failed)
	for e := range failed {
		err = errors.Join(err, e)
	}
	for _, b := range vms {
		st := b.Status()
		r.Evictions, r.Refaults, r.Delayed = r.Evictions+st.Evictions, r.Refaults+st.Refaults, r.Delayed+st.Delayed
		if st.FailedFaults != 0 || st.Unlocked != "" {
			err = errors.Join(err, fmt.Errorf("%+v", st))
		}
	}
	return r, err
}

// crowdWorker accesses every second block of a VM through one of its faces, and knows what each contains.
type crowdWorker struct {
	s          *translate.Space
	slot       int
	first      int
	blocks     int
	noise      []byte
	rnd        *rand.Rand
	parked     *atomic.Int64
	writes     []uint32 // of each block
	want, next [crowdBlock]byte
}

func (w *crowdWorker) contents(dst []byte, i int) {
	n := w.writes[i]
	binary.LittleEndian.PutUint64(dst, uint64(i)<<32|uint64(n))
	copy(dst[8:], w.noise[(i*8191+int(n)*127)%(len(w.noise)-crowdBlock):])
}

// fill writes every block once.
func (w *crowdWorker) fill() error {
	w.writes = make([]uint32, w.blocks)
	for i := w.first; i < w.blocks; i += 2 {
		if err := w.one(i); err != nil {
			return err
		}
	}
	return nil
}

// pick chooses a block: four of five times one of the fifth that is used often, which lies in pieces of 256 KiB
// all over the memory.
func (w *crowdWorker) pick() int {
	const piece = 16
	i := w.rnd.IntN(w.blocks/2) * 2
	if w.rnd.IntN(5) > 0 {
		i = i / piece / 5 * 5 * piece
		i += w.rnd.IntN(piece/2) * 2
	}
	return min(i+w.first, w.blocks-2+w.first)
}

// one reads a block, compares it and writes it.
func (w *crowdWorker) one(i int) (err error) {
	w.contents(w.want[:], i)
	fresh := w.writes[i] == 0
	w.writes[i]++
	w.contents(w.next[:], i)
	e := access(context.Background(), w.s, w.slot, translate.PA(i*crowdBlock), crowdBlock, func(mem []byte) {
		if !fresh && !bytes.Equal(mem, w.want[:]) {
			err = fmt.Errorf("block %d is not what was written %d times: %s", i, w.writes[i]-1, diff(mem, w.want[:]))
		}
		copy(mem, w.next[:])
	}, func() { w.parked.Add(1) })
	return errors.Join(err, e)
}
