package hca

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// drvcq is the driver's side of the command virtqueue: request i is in buffer i of
// each direction.
type drvcq struct {
	g                           *guest
	size                        uint16
	desc, avail, used, req, out translate.PA
	free                        []uint16
	put, got                    uint16
	kick, call                  int
	q                           *virtq.Queue
}

const cmdBuf = 256

// commandQueue starts the device's command queue with its goroutine.
func (g *guest) commandQueue(size uint16) *drvcq {
	g.tb.Helper()
	d := &drvcq{g: g, size: size, desc: g.alloc(int(size) * 32), avail: g.alloc(4096), used: g.alloc(4096),
		req: g.alloc(int(size) * cmdBuf), out: g.alloc(int(size) * cmdBuf)}
	var err error
	for _, fd := range []*int{&d.kick, &d.call} {
		if *fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
			g.tb.Fatal(err)
		}
		g.tb.Cleanup(func() { unix.Close(*fd) })
	}
	for i := range size / 2 {
		d.free = append(d.free, i)
	}
	call := virtq.NewNotifier()
	if err := call.Set(dup(g.tb, d.call)); err != nil {
		g.tb.Fatal(err)
	}
	g.tb.Cleanup(call.Close)
	d.q, err = virtq.New(g.space, virtq.Config{Index: abi.CommandQueue, Size: int(size), Desc: d.desc, Avail: d.avail,
		Used: d.used, Kick: d.kick, Call: call})
	if err != nil {
		g.tb.Fatal(err)
	}
	if err := g.StartQueue(abi.CommandQueue, d.q); err != nil {
		g.tb.Fatal(err)
	}
	g.setUpDriver() // a new driver: earlier objects are destroyed
	return d
}

func dup(tb testing.TB, fd int) int {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// submit issues a command and returns its number.
func (d *drvcq) submit(op abi.Opcode, payload []byte) uint16 {
	i := d.free[0]
	d.free = d.free[1:]
	b := d.g.at(d.req+translate.PA(int(i)*cmdBuf), cmdBuf)
	(&abi.Req{Opcode: op, Length: uint32(len(payload))}).Encode(b)
	n := abi.SizeReq + copy(b[abi.SizeReq:], payload)
	put := func(k int, pa translate.PA, n int, flags, next uint16) {
		b := d.g.at(d.desc+translate.PA(16*k), 16)
		binary.LittleEndian.PutUint64(b, uint64(pa))
		binary.LittleEndian.PutUint32(b[8:], uint32(n))
		binary.LittleEndian.PutUint16(b[12:], flags)
		binary.LittleEndian.PutUint16(b[14:], next)
	}
	put(int(2*i), d.req+translate.PA(int(i)*cmdBuf), n, 1, 2*i+1)
	put(int(2*i+1), d.out+translate.PA(int(i)*cmdBuf), cmdBuf, 2, 0)
	binary.LittleEndian.PutUint16(d.g.at(d.avail+4+2*translate.PA(d.put%d.size), 2), 2*i)
	d.put++
	d.g.u32(d.avail).Store(uint32(d.put) << 16)
	if d.g.u32(d.used).Load()&1 == 0 {
		_, _ = unix.Write(d.kick, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	return i
}

// done takes the available answers.
func (d *drvcq) done() (out []uint16) {
	for d.got != uint16(d.g.u32(d.used).Load()>>16) {
		i := uint16(binary.LittleEndian.Uint32(d.g.at(d.used+4+8*translate.PA(d.got%d.size), 8))) / 2
		out = append(out, i)
		d.free = append(d.free, i)
		d.got++
	}
	return out
}

func (d *drvcq) status(i uint16) abi.Status {
	var r abi.Resp
	if err := r.Decode(d.g.at(d.out+translate.PA(int(i)*cmdBuf), abi.SizeResp)); err != nil {
		d.g.tb.Fatal(err)
	}
	return r.Status
}

// await collects answers until there are n of them.
func (d *drvcq) await(n int) (out []uint16) {
	d.g.tb.Helper()
	for end := time.Now().Add(patienceHere); len(out) < n; {
		fds := []unix.PollFd{{Fd: int32(d.call), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, 50); err == nil && fds[0].Revents != 0 {
			var b [8]byte
			_, _ = unix.Read(d.call, b[:])
		}
		if out = append(out, d.done()...); time.Now().After(end) {
			d.g.tb.Fatalf("%d of %d commands answered", len(out), n)
		}
	}
	return out
}

// patienceHere is how long a test waits for asynchronous work.
const patienceHere = 60 * time.Second

func clearOf(r *dregion, first int) []byte {
	return enc(abi.SizeClearMTT, &abi.ClearMTT{Handle: r.handle, First: uint64(first), Count: 1})
}

// A release that does not drain delays its own answer and no other: later commands
// run, up to the bound of waiting commands, and other VMs are unaffected (EP-4,
// EP-5). When it drains, all are answered, in any order.
func TestCommandsWaitApart(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	g := w.guests[0]
	d := g.commandQueue(512)
	pages := 2 * maxJobs
	r := g.demand(g.pd(), pages, demandAccess)
	r.set(0, pages, 0)
	keys := []uint32{g.pd()}
	mr := g.mr(keys[0], r.home, 4096, demandAccess)

	tok := g.space.Epochs().Enter(translate.ByLoop(3)) // a loop uses the pages
	var slow []uint16
	for i := range maxJobs - 2 {
		slow = append(slow, d.submit(abi.CmdClearMTT, clearOf(r, i)))
	}
	slow = append(slow, d.submit(abi.CmdDestroyMR, handle(mr)))
	// Page 0 is absent already but not yet free, so a second request for it waits, too.
	slow = append(slow, d.submit(abi.CmdClearMTT, clearOf(r, 0)))
	for range 3 {
		q := d.submit(abi.CmdQueryPort, nil)
		if len(d.free) == 0 {
			t.Fatal("queue too small")
		}
		_ = q
	}
	// The maximum number waits: the queries run when one of them completes.
	time.Sleep(20 * time.Millisecond)
	if n := d.done(); len(n) != 0 {
		t.Fatalf("answered with %d releases pending: %v", len(slow), n)
	}
	w.guests[1].must(abi.CmdQueryPort, nil)
	w.guests[1].pd()
	g.space.Epochs().Leave(3, tok)
	got := d.await(len(slow) + 3)
	for _, i := range got {
		if s := d.status(i); s != abi.StatusOK {
			t.Errorf("command %d: %v", i, s)
		}
	}

	// Fewer than the bound: commands behind them are answered at once.
	tok = g.space.Epochs().Enter(translate.ByLoop(3))
	slow = slow[:0]
	for i := range 10 {
		slow = append(slow, d.submit(abi.CmdClearMTT, clearOf(r, maxJobs+i)))
	}
	for range 20 {
		q := d.submit(abi.CmdQueryPort, nil)
		if got := d.await(1); !slices.Equal(got, []uint16{q}) {
			t.Fatalf("answered: %v, want %d", got, q)
		}
	}
	g.space.Epochs().Leave(3, tok)
	got = d.await(len(slow))
	slices.Sort(got)
	slices.Sort(slow)
	if !slices.Equal(got, slow) {
		t.Errorf("answered: %v, want %v", got, slow)
	}
	if n := g.Stats().Value[abi.StatInvalidations]; n != uint64(maxJobs-1+10) {
		t.Errorf("%d invalidations", n)
	}
}

// A completed release is answered before the commands behind it, however many
// there are: a reclaiming guest waits for it, while its other processors go on.
func TestReleaseBetweenCommands(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	d := g.commandQueue(64)
	r := g.demand(g.pd(), 2, demandAccess)
	r.set(0, 2, 0)
	pa := g.alloc(4096)
	mr := g.mr(1, pa, 4096, demandAccess)
	tok := g.space.Epochs().Enter(translate.ByLoop(3))
	want := []uint16{1: d.submit(abi.CmdClearMTT, clearOf(r, 0))}
	inside, goOn := make(chan struct{}), make(chan struct{})
	stay := func() { close(inside); <-goOn }
	g.onMemory.Store(&stay)
	want[0] = d.submit(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: mr, Count: 1}, uint64(pa)))
	<-inside // the release waits, the command behind it is being executed
	want = append(want, d.submit(abi.CmdQueryPort, nil))
	g.space.Epochs().Leave(3, tok)
	close(goOn)
	if got := d.await(3); !slices.Equal(got, want) {
		t.Errorf("answered in the order %v, want %v", got, want)
	}
}

// The queue stops while releases drain: every command read is answered first, once.
func TestStopWithReleasesPending(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	d := g.commandQueue(64)
	r := g.demand(g.pd(), 8, demandAccess)
	r.set(0, 8, 0)
	tok := g.space.Epochs().Enter(translate.ByLoop(3))
	for i := range 8 {
		d.submit(abi.CmdClearMTT, clearOf(r, i))
	}
	q := d.submit(abi.CmdQueryPort, nil)
	if got := d.await(1); !slices.Equal(got, []uint16{q}) {
		t.Fatalf("answered: %v", got)
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		g.StopQueue(abi.CommandQueue)
	}()
	time.Sleep(5 * time.Millisecond)
	g.space.Epochs().Leave(3, tok)
	<-stopped
	if got := d.done(); len(got) != 8 || d.q.InFlight() != 0 {
		t.Errorf("%d answered, %d in flight", len(got), d.q.InFlight())
	}
}

// Command buffers that are absent on the host are fetched (PF-7) at every access:
// descriptors and rings, request, response.
func TestAbsentCommandBuffers(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	d := g.commandQueue(64)
	g.hostDriver(t)
	for i := range 30 {
		for k, x := range []struct {
			pa translate.PA
			n  int
		}{{d.req, 32 * cmdBuf}, {d.out, 32 * cmdBuf}, {d.desc, 64 * 16}, {d.avail, 4096}, {d.used, 4096}} {
			if i&(1<<k) != 0 {
				g.takeAway(x.pa, x.n)
			}
		}
		n := d.submit(abi.CmdCreatePD, nil)
		if got := d.await(1); !slices.Equal(got, []uint16{n}) || d.status(n) != abi.StatusOK {
			t.Fatalf("round %d: answered %v, %v", i, got, d.status(n))
		}
	}
	if s := g.Describe(); s.PDs != 30 || s.Stats["host_faults"] < 30 || s.Stats["host_faults"] != s.Faults.Host.Raised {
		t.Errorf("%d PDs after 30 commands, %d host faults, %d raised", s.PDs, s.Stats["host_faults"], s.Faults.Host.Raised)
	}
}

// A release that does not drain within a second is logged with the name of its
// holder.
func TestReleaseWatchdog(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	var log testlog.Log
	g.Device.log = log.Logger()
	d := g.commandQueue(64)
	r := g.demand(g.pd(), 1, demandAccess)
	r.set(0, 1, 0)
	tok := g.space.Epochs().Enter(translate.ByLoop(3))
	d.submit(abi.CmdClearMTT, clearOf(r, 0))
	for end := time.Now().Add(patienceHere); !strings.Contains(log.String(), "loop 3"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no warning in %q", log.String())
		}
	}
	g.space.Epochs().Leave(3, tok)
	d.await(1)
	if f := g.Describe().Faults; f.LongestDrain < drainPatience {
		t.Errorf("longest drain %v", f.LongestDrain)
	}
}

// BenchmarkClearMTT is the round trip of an invalidation, for which a guest's MMU
// notifier waits: kick to answer, 4 KiB page, with an idle loop and with a loop that
// enters and leaves the epoch all the time.
func BenchmarkClearMTT(b *testing.B) {
	for _, busy := range []bool{false, true} {
		name := "idle"
		if busy {
			name = "busy"
		}
		b.Run(name, func(b *testing.B) {
			w := newWorld(b, 1, 1, Limits{})
			g := w.guests[0]
			d := g.commandQueue(64)
			r := g.demand(g.pd(), 1, demandAccess)
			stop := make(chan struct{})
			done := make(chan struct{})
			go func() {
				defer close(done)
				for busy {
					select {
					case <-stop:
						return
					default:
					}
					e := g.space.Epochs()
					t := e.Enter(translate.ByLoop(0))
					for at := time.Now(); time.Since(at) < 5*time.Microsecond; {
					}
					e.Leave(0, t)
				}
			}()
			var took []time.Duration
			pas := []translate.PA{r.home}
			for b.Loop() {
				if err := g.vm.SetPages(r.handle, 0, pas); err != nil {
					b.Fatal(err)
				}
				at := time.Now()
				d.submit(abi.CmdClearMTT, clearOf(r, 0))
				d.await(1)
				took = append(took, time.Since(at))
			}
			close(stop)
			<-done
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2]), "p50-ns")
			b.ReportMetric(float64(took[len(took)*99/100]), "p99-ns")
		})
	}
}

// The answers to a RESUME_FAULT and to the command before it raise one interrupt;
// no other command's answer waits for the next command.
func TestResumeSharesInterrupt(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	for _, c := range []struct {
		op      abi.Opcode
		payload []byte
		want    uint64
	}{
		{abi.CmdResumeFault, enc(abi.SizeResumeFault, &abi.ResumeFault{Token: 1}), 2},
		{abi.CmdQueryPort, nil, 3},
	} {
		d := g.commandQueue(64)
		g.mu.Lock() // the first waits here until the others are posted
		d.submit(abi.CmdQueryPort, nil)
		d.submit(abi.CmdQueryPort, nil)
		d.submit(c.op, c.payload)
		g.mu.Unlock()
		for n, end := 0, time.Now().Add(patienceHere); n < 3; n += len(d.done()) {
			if time.Now().After(end) {
				t.Fatal("not answered")
			}
			time.Sleep(time.Millisecond)
		}
		g.StopQueue(abi.CommandQueue) // all answers have been signalled
		var b [8]byte
		if _, err := unix.Read(d.call, b[:]); err != nil {
			t.Fatal(err)
		}
		if n := binary.NativeEndian.Uint64(b[:]); n != c.want {
			t.Errorf("two commands and %v: %d interrupts, want %d", c.op, n, c.want)
		}
	}
}

// TestBugInCommand: a panic in the command goroutine, or in one that waits for host memory, stops that device until a
// reset, with its stack in the log, and nothing else (TR-6).
func TestBugInCommand(t *testing.T) {
	for name, inject := range map[string]func(g *guest, bug func()){
		"command": func(g *guest, bug func()) { g.onMemory.Store(&bug) },
		"wait": func(g *guest, bug func()) {
			block := func(context.Context) error { bug(); return nil }
			g.block.Store(&block)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1, 2, Limits{})
			g, log := w.guests[0], &testlog.Log{}
			g.dataSide.log = log.Logger()
			d := g.commandQueue(64)
			var nothing *struct{ x int }
			pa := g.alloc(4096)
			mr := g.mr(g.pd(), pa, 4096, demandAccess)
			inject(g, func() { nothing.x = 1 })
			if name == "command" {
				d.submit(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: mr, Count: 1}, uint64(pa)))
			} else {
				r := g.ring(64, 6)
				d.submit(abi.CmdCreateCQ, enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: r.desc, ArmPA: uint64(g.alloc(4))},
					r.pas...))
			}
			for end := time.Now().Add(patienceHere); !g.broken.Load(); time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("the device did not stop")
				}
			}
			g.StopQueue(abi.CommandQueue)
			if s := log.String(); g.Up() || !strings.Contains(s, "bug in vnicd") || !strings.Contains(s, "cmdqueue_test.go") {
				t.Errorf("up: %v; log:\n%s", g.Up(), s)
			}
			w.guests[1].must(abi.CmdQueryPort, nil)

			g.onMemory.Store(nil)
			g.block.Store(nil)
			g.Reset()
			d = g.commandQueue(64)
			q := d.submit(abi.CmdQueryPort, nil)
			if d.await(1); d.status(q) != abi.StatusOK {
				t.Errorf("after the reset: %v", d.status(q))
			}
		})
	}
}
