package translate

import (
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
)

// sparseMTT holds the groups of a demand region by number. It is a hash table: its size follows the present pages, and
// a lookup in 2^57 bytes of address space costs as much as in a small region.
//
// Readers take no lock and never retry: a group is in one of the sparseProbes slots from its home on, before the first
// slot that was never used. A slot belongs to one group number for ever, whether that group exists or not, so a reader
// that found the number finds no other group in it. When no slot is left within reach, or half of them are used, the
// writer (under VM.mu) copies existing groups to a new table, which replaces the old one. Readers of the old one are in
// an epoch that every later release waits for.
//
// The multiplier that determines the home is drawn at random for each table, so that no guest can choose numbers that
// collide.
type sparseMTT struct {
	table atomic.Pointer[sparseTable]
	live  int // groups that exist; guarded by VM.mu
	spare *mttSpare
}

// mttSpare keeps the entries, all absent, of the VM's group that was emptied last, for the next new group: otherwise
// pages that come and go one by one would allocate each time. Guarded by VM.mu.
type mttSpare struct {
	entries *mttEntries
	after   *Drain // entries are reusable when it is done, because readers may have them; nil: not begun
}

// take returns unused entries, all absent.
func (s *mttSpare) take() *mttEntries {
	if s.after == nil || !s.after.Done() {
		return new(mttEntries)
	}
	e := s.entries
	*s = mttSpare{}
	return e
}

// put stores entries that were removed from a table. The caller then begins a Drain for them.
func (s *mttSpare) put(e *mttEntries) { *s = mttSpare{entries: e} }

func (s *mttSpare) begun(d *Drain) {
	if s.entries != nil && s.after == nil {
		s.after = d
	}
}

type sparseTable struct {
	mul   uint64
	shift uint8 // 64 - log2 of the number of homes
	slots []sparseSlot
	used  int // slots with a number; guarded by VM.mu
}

// sparseSlot has 32 bytes, so that a lookup reads one cache line of it.
type sparseSlot struct {
	tag atomic.Uint64 // group number + 1; 0: never used. Changes once.
	mttGroup
	_ uint64
}

const (
	sparseProbes  = 16
	sparseMinBits = 2
)

func newSparseMTT(spare *mttSpare) *sparseMTT {
	t := &sparseMTT{spare: spare}
	t.table.Store(newSparseTable(sparseMinBits))
	return t
}

func newSparseTable(homeBits int) *sparseTable {
	return &sparseTable{
		mul:   rand.Uint64() | 1,
		shift: uint8(64 - homeBits),
		slots: make([]sparseSlot, 1<<homeBits+sparseProbes),
	}
}

// homes returns the number of slots at which a search can begin.
func (t *sparseTable) homes() int { return len(t.slots) - sparseProbes }

// reach returns the slots that may contain group n.
func (t *sparseTable) reach(n uint64) []sparseSlot {
	return t.slots[n*t.mul>>(t.shift&63):][:sparseProbes]
}

// find returns group n, or nil. It may also return a group that no longer exists, which is empty.
func (m *sparseMTT) find(n uint64) *mttGroup {
	reach := m.table.Load().reach(n)
	for i := range reach {
		switch reach[i].tag.Load() {
		case n + 1:
			return &reach[i].mttGroup
		case 0:
			return nil
		}
	}
	return nil
}

// put stores group n with these entries and run, and returns it; nil if it has no slot for it.
func (t *sparseTable) put(n uint64, entries *mttEntries, run uint64) *mttGroup {
	reach := t.reach(n)
	for i := range reach {
		s := &reach[i]
		switch s.tag.Load() {
		case 0:
			t.used++
		case n + 1:
		default:
			continue
		}
		s.entries.Store(entries)
		s.run.Store(run)
		s.tag.Store(n + 1)
		return &s.mttGroup
	}
	return nil
}

// makeLocked returns group n, which does not exist, with all entries absent.
func (m *sparseMTT) makeLocked(n uint64) *mttGroup {
	m.live++
	entries := m.spare.take()
	if t := m.table.Load(); t.used < t.homes()/2 {
		if g := t.put(n, entries, 0); g != nil {
			return g
		}
	}
	for {
		m.rebuildLocked()
		if g := m.table.Load().put(n, entries, 0); g != nil {
			return g
		}
	}
}

// dropLocked removes group n, which exists and is empty.
func (m *sparseMTT) dropLocked(n uint64) {
	m.spare.put(m.find(n).entries.Swap(nil))
	m.live--
	if homes := m.table.Load().homes(); homes > 1<<sparseMinBits && m.live < homes/32 {
		m.rebuildLocked()
	}
}

// rebuildLocked copies existing groups to a new table with four to eight homes per group.
func (m *sparseMTT) rebuildLocked() {
	old := m.table.Load().slots
	homeBits := max(sparseMinBits, bits.Len(uint(4*m.live)))
build:
	for try := 1; ; try++ {
		t := newSparseTable(homeBits + try/4) // more room, in case many multipliers fail
		for i := range old {
			if e := old[i].entries.Load(); e != nil && t.put(old[i].tag.Load()-1, e, old[i].run.Load()) == nil {
				continue build
			}
		}
		m.table.Store(t)
		return
	}
}

// numbersLocked returns the numbers of the existing groups.
func (m *sparseMTT) numbersLocked() []uint64 {
	numbers := make([]uint64, 0, m.live)
	slots := m.table.Load().slots
	for i := range slots {
		if slots[i].entries.Load() != nil {
			numbers = append(numbers, slots[i].tag.Load()-1)
		}
	}
	return numbers
}
