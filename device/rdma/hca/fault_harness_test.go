package hca

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// dregion is an on-demand region as a guest's driver keeps it: page i of it, once
// present, is page at[i] of the guest.
type dregion struct {
	g      *guest
	handle uint32
	key    uint32
	iova   uint64
	home   translate.PA // page i is loaded at home + i pages
	pages  int
	two    bool // serve answers with two commands, like drivers that do not know SetMTTResume
}

const demandAccess = abi.AccessLocalWrite | remoteAll

// demand registers a region of absent pages.
func (g *guest) demand(pd uint32, pages int, access uint32) *dregion {
	g.tb.Helper()
	r := &dregion{g: g, iova: 0x7f1200000000, home: g.alloc(pages * 4096), pages: pages}
	var resp abi.CreateMRResp
	req := abi.CreateMR{PDN: pd, Access: access, Flags: abi.MROnDemand, PageShift: 12, IOVA: r.iova,
		Length: uint64(pages) * 4096, NPages: uint64(pages)}
	if err := resp.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &req))); err != nil {
		g.tb.Fatal(err)
	}
	r.handle, r.key = resp.Handle, resp.LKey
	return r
}

func (r *dregion) bytes(off, n int) []byte { return r.g.at(r.home+translate.PA(off), n) }

// pas returns the addresses of n pages, with the given flag.
func (r *dregion) pas(first, n int, mark uint64) []uint64 {
	pas := make([]uint64, n)
	for i := range pas {
		pas[i] = uint64(r.home) + uint64(first+i)*4096 | mark
	}
	return pas
}

// set makes n pages present, with the given flag.
func (r *dregion) set(first, n int, mark uint64) {
	r.g.tb.Helper()
	r.g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.handle, Count: uint16(n), First: uint64(first)},
		r.pas(first, n, mark)...))
}

// setResume makes n pages present and answers the fault named by token, in one command.
func (r *dregion) setResume(want abi.Status, first, n int, token uint64) {
	r.g.tb.Helper()
	r.g.refused(want, abi.CmdSetMTT, enc(abi.SizeSetMTT,
		&abi.SetMTT{Handle: r.handle, Count: uint16(n), Flags: abi.SetMTTResume, First: uint64(first)},
		append(r.pas(first, n, 0), token)...))
}

// present reports whether page i is in the table.
func (r *dregion) present(i int) bool {
	_, ok := r.g.vm.Lookup(translate.Key(r.key), translate.VA(r.iova)+translate.VA(i)*4096)
	return ok
}

func (r *dregion) clear(first, n int) {
	r.g.tb.Helper()
	r.g.must(abi.CmdClearMTT, enc(abi.SizeClearMTT, &abi.ClearMTT{Handle: r.handle, First: uint64(first),
		Count: uint64(n)}))
}

// serve makes the pages of an event present and resumes the QP that waits.
func (r *dregion) serve(e abi.Event) {
	r.g.tb.Helper()
	first, last := (e.VA-r.iova)/4096, (e.VA+e.Length-1-r.iova)/4096
	if e.VA < r.iova || e.Length == 0 || e.Length > maxFaultLen || last >= uint64(r.pages) {
		r.g.tb.Fatalf("event %+v goes beyond the region", e)
	}
	if !r.two {
		r.setResume(abi.StatusOK, int(first), int(last-first)+1, uint64(e.Token))
		return
	}
	r.set(int(first), int(last-first)+1, 0)
	r.g.resumeFault(e.Token, abi.StatusOK)
}

func (g *guest) resumeFault(token uint32, s abi.Status) {
	g.tb.Helper()
	g.must(abi.CmdResumeFault, enc(abi.SizeResumeFault, &abi.ResumeFault{Token: token, Status: s}))
}

// faultQueue starts the asynchronous event queue with n buffers, at most 4.
func (g *guest) faultQueue(n int) *drvq {
	g.tb.Helper()
	d := g.eventQueue(abi.EventQueue, 4, abi.SizeEvent)
	if n > 0 {
		d.add(n)
	}
	return d
}

// awaitEvents collects n events and returns the buffers to the device.
func (d *drvq) awaitEvents(n int) []abi.Event {
	d.g.tb.Helper()
	var out []abi.Event
	d.g.w.until("events", func() bool {
		got := d.events()
		d.add(len(got))
		out = append(out, got...)
		return len(out) >= n
	})
	if len(out) > n {
		d.g.tb.Fatalf("%d events, want %d: %+v", len(out), n, out)
	}
	return out
}

// takeAway makes pages absent on the host, as the host's driver does.
func (g *guest) takeAway(pa translate.PA, n int) {
	g.tb.Helper()
	size := uint64(n+4095) &^ 4095
	if err := g.space.Withdraw(pa, size); err != nil {
		g.tb.Fatal(err)
	}
	if err := g.space.Epochs().Flip().Wait(context.Background()); err != nil {
		g.tb.Fatal(err)
	}
}

// bringBack serves one host fault.
func (g *guest) bringBack(f *translate.Fault) {
	const page = translate.PageSize
	pa := f.Miss.PA &^ (page - 1)
	err := g.space.Map(pa, g.mem[pa-memBase:][:page:page])
	if err != nil && !errors.Is(err, translate.ErrOverlap) {
		g.tb.Error(err)
	}
	g.space.Faults().Finish(f, nil)
}

// hostServe serves all pending host faults.
func (g *guest) hostServe() (n int) {
	for f := g.space.Faults().TryNext(); f != nil; f = g.space.Faults().TryNext() {
		g.bringBack(f)
		n++
	}
	return n
}

// hostDriver serves host faults in a goroutine until the test ends.
func (g *guest) hostDriver(tb testing.TB) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			f, err := g.space.Faults().Next(ctx)
			if err != nil {
				return
			}
			g.bringBack(f)
		}
	})
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); wg.Wait() }) }
	tb.Cleanup(stop)
	return stop
}

// restartFaultQueue replaces the asynchronous event queue by one with n buffers.
func (g *guest) restartFaultQueue(d *drvq, n int) *drvq {
	g.tb.Helper()
	g.StopQueue(d.index)
	return g.faultQueue(n)
}

var errAbsent = errors.New("no such memory")

// endFaults fails the host faults of memory that was removed, as its driver does.
func endFaults(s *translate.Space, out []*translate.Fault) {
	for _, f := range out {
		s.Faults().Finish(f, errAbsent)
	}
}

// bringAll makes all memory present.
func (g *guest) bringAll() {
	for pa := memBase; pa < memBase+memSize; pa += translate.PageSize {
		_ = g.space.Map(pa, g.mem[pa-memBase:][:translate.PageSize:translate.PageSize]) // present already
	}
	g.hostServe()
}
