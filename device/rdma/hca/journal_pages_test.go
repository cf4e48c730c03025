package hca

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/journal"
	"github.com/vnicd/vnicd/translate"
)

// recorded returns the payloads of the control side's records in a guest's journal, in bytes.
func (g *guest) recorded() (n int) {
	g.tb.Helper()
	x, err := journal.Read(g.Device.journal.file.FD())
	if err != nil {
		g.tb.Fatal(err)
	}
	defer x.Close()
	for _, r := range x.Shards[0] {
		n += len(r.Payload)
	}
	return n
}

// The MTT entries of a large pinned region are in the journal part by part: a command adds the parts that it changes,
// and another process finds all of them.
func TestJournalPages(t *testing.T) {
	if Journaled || LocalPath {
		t.Skip("once is enough")
	}
	Journaled = true
	defer func() { Journaled = false }()
	w := newWorld(t, 1, 1, Limits{MRs: 8})
	g := w.guests[0]
	pd := g.pd()
	const pages = 5*partPages + 100
	create := func() (r abi.CreateMRResp) {
		t.Helper()
		if err := r.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd,
			Access: abi.AccessLocalWrite, PageShift: 12, Length: pages << 12, NPages: pages}))); err != nil {
			t.Fatal(err)
		}
		return r
	}
	set := func(handle uint32, first int, pas []uint64) {
		t.Helper()
		g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: handle, First: uint64(first),
			Count: uint16(len(pas))}, pas...))
	}
	twin := func(handle uint32) (runs []translate.PageRun) {
		t.Helper()
		x := w.twin(t, g)
		defer x.dropTwin()
		if err := x.Revive(g.Device.journal.file.FD()); err != nil {
			t.Fatal(err)
		}
		reg, err := x.vm.Region(handle)
		if err != nil {
			t.Fatal(err)
		}
		return slices.Collect(reg.Pages(0, math.MaxUint64))
	}
	same := func(when string, handle uint32) {
		t.Helper()
		reg, err := g.vm.Region(handle)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := twin(handle), slices.Collect(reg.Pages(0, math.MaxUint64)); !slices.Equal(got, want) {
			t.Errorf("%s: %d runs of pages, want %d", when, len(got), len(want))
		}
	}

	r := create()
	same("no page", r.Handle)
	pas := scattered(pages)
	set(r.Handle, 4*partPages-10, pas[:20]) // leaves parts out, and crosses a border
	same("two parts", r.Handle)
	for first := 0; first < pages; first += 8000 {
		set(r.Handle, first, pas[first:min(first+8000, pages)])
		same("more", r.Handle)
	}
	before := g.recorded()
	set(r.Handle, pages-10, pas[:10])
	if n := g.recorded() - before; n <= 0 || n > 8192 {
		t.Errorf("setting 10 of %d entries in the last part added %d bytes, want at most 8192", pages, n)
	}
	same("overwritten", r.Handle)
	g.must(abi.CmdClearMTT, enc(abi.SizeClearMTT, &abi.ClearMTT{Handle: r.Handle, First: partPages - 1,
		Count: 2*partPages + 2}))
	same("cleared", r.Handle)
	for first := 0; first < pages; first += 8000 { // long enough for the log to begin anew
		set(r.Handle, first, pas[first:min(first+8000, pages)])
	}
	same("again", r.Handle)

	g.must(abi.CmdDestroyMR, handle(r.Handle))
	r = create()
	same("another region", r.Handle)
}

// TestKeyIsHandle: a fast registration whose present key is equal to its handle, which happens once in 256 times, is no
// region with pages of its own. It is valid after two kills: each process writes the journal that the next one reads.
func TestKeyIsHandle(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	before := Journaled
	Journaled = true
	defer func() { Journaled = before }()
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	a, b := ga.qp(qpSpec{pd: ga.pd(), flags: abi.QPPrivileged}), gb.qp(qpSpec{pd: gb.pd()})
	a.connectRC(b)
	b.connectRC(a)
	key, list := ga.fast(1)
	mem, src := ga.alloc(4096), gb.alloc(4096)
	binary.LittleEndian.PutUint64(ga.at(list, 8), uint64(mem))
	s := a.wqe()
	setReg(s, 1, abi.SendSignaled, abi.RegWR{IOVA: 1 << 40, Length: 4096, PageList: uint64(list), NPages: 1, RKey: key,
		Access: abi.AccessLocalWrite | remoteAll})
	a.post()
	a.scq.await(1)
	for range 2 {
		ga.replace(ga.remains())
	}
	fill(gb.at(src, 4096), 1)
	s = b.wqe()
	s.SetRequest(2, abi.WRRDMAWrite, abi.SendSignaled)
	s.SetRDMA(1<<40, key)
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 4096, LKey: gb.mr(1, src, 4096, abi.AccessLocalWrite)}})
	b.post()
	if wc := b.scq.await(1)[0]; wc.Status != abi.WCSuccess || !bytes.Equal(ga.at(mem, 4096), gb.at(src, 4096)) {
		t.Errorf("%+v", wc)
	}
}
