package roce

// owedSpan is more than what Linux rxe has in flight, 128 packets.
const psnSetSpan = 256

// owedSet is PSNs of FLUSHes and ATOMIC WRITEs that have been executed and whose responses are to be sent, for the first
// time or again. In those there is nothing (A19), hence nothing to remember, and they need no place among max_dest_rd_atomic
// answers: not every requester counts its FLUSHes (rxe does not, and repeats them with another address).
type psnSet struct {
	lo, hi uint64 // all are within [lo, hi), at most owedSpan of them
	bits   [psnSetSpan / 64]uint64
}

func (o *psnSet) word(psn uint64) (w *uint64, bit uint64) {
	return &o.bits[psn%psnSetSpan/64], 1 << (psn % 64)
}

// fits tells whether add would succeed.
func (o *psnSet) fits(psn uint64) bool {
	return o.lo == o.hi || max(o.hi, psn+1)-min(o.lo, psn) <= psnSetSpan
}

func (o *psnSet) add(psn uint64) bool {
	if !o.fits(psn) {
		return false
	}
	if o.lo == o.hi {
		o.lo, o.hi = psn, psn
	}
	o.lo, o.hi = min(o.lo, psn), max(o.hi, psn+1)
	w, bit := o.word(psn)
	*w |= bit
	return true
}

// next returns the first.
func (o *psnSet) first() (psn uint64, ok bool) {
	for ; o.lo < o.hi; o.lo++ {
		if w, bit := o.word(o.lo); *w&bit != 0 {
			return o.lo, true
		}
	}
	return 0, false
}

func (o *psnSet) empty() bool {
	_, ok := o.first()
	return !ok
}

func (o *psnSet) remove(psn uint64) {
	w, bit := o.word(psn)
	*w &^= bit
}
