package hca

import (
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
