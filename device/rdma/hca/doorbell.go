// Side: data

package hca

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// doorbells is one engine's doorbell area in guest memory (struct vnicd_doorbells).
// A set bit means only "check that SQ": spurious bits cost one check, bits of slots
// without a QP are ignored, and lost bits harm only the guest that lost them.
//
// While the slots with a QP lie in few words of bits, these words are scanned directly
// and the summary bits stay set: so the summary's cache line stays with the driver's
// processor. Bits are cleared only after their work was done, because clearing, too,
// waits for a cache line.
//
// The engine's loop owns the fields.
type doorbells struct {
	space *translate.Space
	pages [abi.DoorbellPages]translate.PA
	words int // summary words that slots of this device can reach

	qps   int     // QPs that have a slot here
	users []uint8 // QPs by word of bits
	used  []int   // words that have QPs, in no order
	seen  []int   // words in which scan found bits, not cleared yet
}

const (
	dbPageShift   = 12
	slotsPerWord  = 64
	wordsPerSum   = 64
	slotsPerSum   = slotsPerWord * wordsPerSum
	dbPageOffMask = 1<<dbPageShift - 1
	// fewWords is the largest number of words that are scanned directly.
	fewWords = 4
)

func newDoorbells(space *translate.Space, slots int) doorbells {
	words := (slots + slotsPerWord - 1) / slotsPerWord
	return doorbells{
		space: space, words: (slots + slotsPerSum - 1) / slotsPerSum,
		users: make([]uint8, words), used: make([]int, 0, words),
		seen: make([]int, 0, (slots+slotsPerSum-1)/slotsPerSum*wordsPerSum), // all words of a summary
	}
}

// join notes that slot has a QP from now on; leave is its inverse.
func (db *doorbells) join(slot int) {
	db.qps++
	i := slot / slotsPerWord
	if db.users[i]++; db.users[i] == 1 {
		db.used = append(db.used, i)
	}
}

func (db *doorbells) leave(slot int) {
	db.qps--
	i := slot / slotsPerWord
	if db.users[i]--; db.users[i] == 0 {
		at := slices.Index(db.used, i)
		db.used = slices.Delete(db.used, at, at+1)
	}
}

func (db *doorbells) word(off uint64) (*atomic.Uint64, translate.Miss) {
	return db.space.RingUint64(db.pages[off>>dbPageShift] + translate.PA(off&dbPageOffMask))
}

func (db *doorbells) bits(i int) (*atomic.Uint64, translate.Miss) {
	return db.word(abi.DoorbellBitsOff + 8*uint64(i))
}

func (db *doorbells) summary(i int) (*atomic.Uint64, translate.Miss) {
	return db.word(abi.DoorbellSummaryOff + 8*uint64(i))
}

// scan calls ring for every slot whose bit is set, and reports whether there were any; clear must follow.
// Both run inside an epoch. The work is bounded by the number of slots.
func (db *doorbells) scan(ring func(slot int)) (any bool, m translate.Miss) {
	if len(db.used) <= fewWords {
		for _, i := range db.used {
			if m := db.scanWord(i, ring); !m.OK() {
				return any, m
			}
		}
		return len(db.seen) > 0, translate.Miss{}
	}
	for s := range db.words {
		sum, m := db.summary(s)
		if !m.OK() {
			return any, m
		}
		if sum.Load() == 0 {
			continue
		}
		any = true
		for set := sum.Swap(0); set != 0; set &= set - 1 {
			if m := db.scanWord(s*wordsPerSum+bits.TrailingZeros64(set), ring); !m.OK() {
				return any, m
			}
		}
	}
	return any, translate.Miss{}
}

// scanWord calls ring for the bits of word i.
func (db *doorbells) scanWord(i int, ring func(slot int)) translate.Miss {
	w, m := db.bits(i)
	if !m.OK() {
		return m
	}
	if set := w.Load(); set != 0 {
		db.seen = append(db.seen, i)
		forEachBit(i, set, ring)
	}
	return translate.Miss{}
}

// clear clears the words in which scan found bits, and calls ring for each bit: the doorbell may have been rung again
// after its work was done. A guest that keeps ringing waits for the next scan.
func (db *doorbells) clear(ring func(slot int)) {
	for _, i := range db.seen {
		if w, m := db.bits(i); m.OK() {
			forEachBit(i, w.Swap(0), ring)
		}
	}
	db.seen = db.seen[:0]
}

// forEachBit calls ring for the slots of set, which are bits of word i.
func forEachBit(i int, set uint64, ring func(slot int)) {
	for ; set != 0; set &= set - 1 {
		ring(i*slotsPerWord + bits.TrailingZeros64(set))
	}
}

// anySet reports whether a doorbell is set, without clearing it.
func (db *doorbells) anySet() bool {
	if len(db.used) <= fewWords {
		for _, i := range db.used {
			if w, m := db.bits(i); m.OK() && w.Load() != 0 {
				return true
			}
		}
		return false
	}
	for s := range db.words {
		if sum, m := db.summary(s); m.OK() && sum.Load() != 0 {
			return true
		}
	}
	return false
}

// setWakeup writes the flag that asks the driver for a notification; it is a full barrier.
func (db *doorbells) setWakeup(on bool) translate.Miss {
	p, m := db.space.RingUint32(db.pages[0] + abi.DoorbellNeedWakeupOff)
	if m.OK() {
		v := uint32(0)
		if on {
			v = 1
		}
		p.Store(v)
	}
	return m
}
