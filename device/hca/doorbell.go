package hca

import (
	"math/bits"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/translate"
)

// doorbells is one lane's doorbell area in guest memory (struct vnicd_doorbells).
// A bit set means only "look at that SQ": spurious bits cost a look, bits of slots
// without a QP are ignored, and lost bits harm nobody but the guest that lost them.
type doorbells struct {
	space *translate.Space
	pages [abi.DoorbellPages]translate.PA
	words int // summary words that slots of this device can reach
}

const (
	dbPageShift   = 12
	slotsPerWord  = 64
	wordsPerSum   = 64
	slotsPerSum   = slotsPerWord * wordsPerSum
	dbPageOffMask = 1<<dbPageShift - 1
)

func (db *doorbells) word(off uint64) (*atomic.Uint64, translate.Miss) {
	return db.space.Uint64(db.pages[off>>dbPageShift] + translate.PA(off&dbPageOffMask))
}

// scan calls ring for every slot whose bit is set, clearing the bits, and reports
// whether there were any. Inside an epoch only. The work is bounded by the number
// of slots; the words are taken whole, so a guest that goes on ringing waits for
// the next scan.
func (db *doorbells) scan(ring func(slot int)) (any bool, m translate.Miss) {
	for s := range db.words {
		sum, m := db.word(abi.DoorbellSummaryOff + 8*uint64(s))
		if !m.OK() {
			return any, m
		}
		if sum.Load() == 0 {
			continue
		}
		any = true
		for set := sum.Swap(0); set != 0; set &= set - 1 {
			i := s*wordsPerSum + bits.TrailingZeros64(set)
			w, m := db.word(abi.DoorbellBitsOff + 8*uint64(i))
			if !m.OK() {
				return any, m
			}
			if w.Load() == 0 {
				continue
			}
			for b := w.Swap(0); b != 0; b &= b - 1 {
				ring(i*slotsPerWord + bits.TrailingZeros64(b))
			}
		}
	}
	return any, translate.Miss{}
}

// rung looks without taking anything.
func (db *doorbells) rung() bool {
	for s := range db.words {
		if sum, m := db.word(abi.DoorbellSummaryOff + 8*uint64(s)); m.OK() && sum.Load() != 0 {
			return true
		}
	}
	return false
}

// setWakeup writes the flag that asks the driver for a notification; it is a full barrier.
func (db *doorbells) setWakeup(on bool) translate.Miss {
	p, m := db.space.Uint32(db.pages[0] + abi.DoorbellNeedWakeupOff)
	if m.OK() {
		v := uint32(0)
		if on {
			v = 1
		}
		p.Store(v)
	}
	return m
}
