package hca

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// shared returns what a guest's journal occupies in shared memory, in bytes.
func (g *guest) shared() int64 {
	g.tb.Helper()
	if g.Device.journal == nil {
		return 0
	}
	var st unix.Stat_t
	if err := unix.Fstat(g.Device.journal.file.FD(), &st); err != nil {
		g.tb.Fatal(err)
	}
	return st.Blocks * 512
}

// What a connected queue pair of four SGEs and 64 entries costs the host with a journal, in bytes (docs/limits.md). The
// journal is charged with what it takes of shared memory.
func TestJournalMemory(t *testing.T) {
	if Journaled || LocalPath {
		t.Skip("once is enough")
	}
	Journaled = true
	defer func() { Journaled = false }()
	for _, n := range []int{500, 2000} {
		g := pagedGuest(t, Limits{Memory: 1 << 30})
		pd := g.pd()
		qp := qpOf(abi.QPTypeRC, 4, 64, true)
		qp(g, pd, 0)
		idle, before := g.shared(), heap()
		charged := g.Describe().HostMemory.Used
		for i := range n {
			qp(g, pd, i+1)
		}
		grown, journal, s := heap()-before, g.shared(), g.Describe().HostMemory
		t.Logf("%d QPs: each %d bytes of heap, %d of shared memory, charged %d; the journal has %d KiB without them, "+
			"%d KiB are charged", n, grown/int64(n), (journal-idle)/int64(n), (s.Used-charged)/uint64(n), idle>>10,
			s.By["journal"]>>10)
		if c := int64(s.By["journal"]); c < journal || c > journal+64<<10 { // words that are not in use
			t.Errorf("%d bytes of shared memory are charged, the journal takes %d", c, journal)
		}
		if used := uint64(grown + journal - idle); s.Used-charged < used {
			t.Errorf("%d bytes are charged, %d are in use", s.Used-charged, used)
		}
		g.disconnect()
		g.checkEmpty()
	}
}
