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

	// Guarded by VM.mu.
	r      *Region
	pool   *demandPool
	live   int // groups that exist
	leaves int // of these, with entries
	place  int // in pool.regions
}

// Memory is charged in words of 8 bytes, like MTT entries. A group costs its share of the slots, and 512 words if it
// has entries. The share is an upper bound: there are at most 16 homes for each group (dropLocked), else four.
const (
	sparseSlotWords   = 4
	sparseGroupCharge = 16 * sparseSlotWords
	sparseTableCharge = (1<<sparseMinBits + sparseProbes) * sparseSlotWords
)

func (m *sparseMTT) chargeLocked() uint64 {
	if m.table.Load() == noGroups {
		return 0
	}
	return sparseTableCharge + uint64(m.live)*sparseGroupCharge + uint64(m.leaves)*mttGroupSize
}

// mttSpare keeps the entries of a group of the VM that was removed, for the next new group: otherwise pages that come
// and go one by one would allocate each time. Guarded by VM.mu.
type mttSpare struct {
	entries *mttEntries
	after   *Drain // entries are reusable when it is done, because readers may have them; nil: not begun
}

func (s *mttSpare) ready() bool { return s.after != nil && s.after.Done() }

// take returns unused entries, all absent.
func (s *mttSpare) take() *mttEntries {
	if !s.ready() {
		return new(mttEntries)
	}
	e := s.entries
	*s = mttSpare{}
	clear(e[:])
	return e
}

// put stores entries that were removed from a table, unless it has some that are reusable. The caller then begins a
// Drain for them.
func (s *mttSpare) put(e *mttEntries) {
	if !s.ready() {
		*s = mttSpare{entries: e}
	}
}

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
	made uint64 // demandPool.made when the group was; guarded by VM.mu
}

// existsLocked reports whether a page of the slot's group is present.
func (s *sparseSlot) existsLocked() bool {
	return s.entries.Load() != nil || s.run.Load()&^mttIdle != 0
}

const (
	// sparseProbes is so large that a table with four homes for each of millions of groups finds a place for all of them.
	sparseProbes  = 32
	sparseMinBits = 2
)

// noGroups is the table of regions that never had a present page. It is never written.
var noGroups = newSparseTable(sparseMinBits)

func newSparseMTT(r *Region, pool *demandPool) *sparseMTT {
	m := &sparseMTT{r: r, pool: pool}
	m.table.Store(noGroups)
	return m
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

// put stores group n with these entries, run and made, and reports whether it has a slot for it.
func (t *sparseTable) put(n uint64, entries *mttEntries, run, made uint64) bool {
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
		s.made = made
		s.tag.Store(n + 1)
		return true
	}
	return false
}

// makeLocked adds group n, which does not exist.
func (m *sparseMTT) makeLocked(n uint64, entries *mttEntries, run uint64) {
	if m.live == 0 {
		m.pool.listLocked(m)
	}
	m.live++
	m.pool.groups++
	m.pool.made++
	if t := m.table.Load(); t != noGroups && t.used < t.homes()/2 && t.put(n, entries, run, m.pool.made) {
		return
	}
	for {
		m.rebuildLocked()
		if m.table.Load().put(n, entries, run, m.pool.made) {
			return
		}
	}
}

// addEntriesLocked gives group n, which has none, these entries.
func (m *sparseMTT) addEntriesLocked(n uint64, t *mttEntries) {
	m.leaves++
	m.pool.leaves++
	if g := m.find(n); g != nil && g.run.Load()&^mttIdle != 0 {
		g.entries.Store(t)
		return
	}
	m.makeLocked(n, t, 0)
}

// dropLocked removes group n, which exists. Readers that still have it find it empty, or its former pages until the
// next release.
func (m *sparseMTT) dropLocked(n uint64) {
	g := m.find(n)
	g.run.Store(0)
	if e := g.entries.Swap(nil); e != nil {
		m.pool.spare.put(e)
		m.leaves--
		m.pool.leaves--
	}
	m.live--
	m.pool.groups--
	if m.live == 0 {
		m.pool.unlistLocked(m)
	}
	if homes := m.table.Load().homes(); homes > 1<<sparseMinBits && homes > 16*m.live {
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
			s := &old[i]
			if s.existsLocked() && !t.put(s.tag.Load()-1, s.entries.Load(), s.run.Load(), s.made) {
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
		if slots[i].existsLocked() {
			numbers = append(numbers, slots[i].tag.Load()-1)
		}
	}
	return numbers
}
