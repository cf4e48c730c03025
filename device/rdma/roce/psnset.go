package roce

// psnSetSpan is more than Linux rxe has in flight, 128 packets.
const psnSetSpan = 256

// psnSet is a set of PSNs whose responses are to be sent: the empty responses of executed FLUSHes and ATOMIC WRITEs, or
// READ responses that are sent again. An empty response (A19) has no content to remember, so it needs no responder
// resource: not every requester counts its FLUSHes against max_dest_rd_atomic (rxe does not, and repeats them with
// another address).
type psnSet struct {
	lo, hi uint64 // all members are in [lo, hi), which has at most psnSetSpan PSNs
	bits   [psnSetSpan / 64]uint64
}

// word returns the word of bits that holds psn, and its bit.
func (o *psnSet) word(psn uint64) (w *uint64, bit uint64) {
	return &o.bits[psn%psnSetSpan/64], 1 << (psn % 64)
}

// fits reports whether add would succeed.
func (o *psnSet) fits(psn uint64) bool {
	return o.lo == o.hi || max(o.hi, psn+1)-min(o.lo, psn) <= psnSetSpan
}

// add adds psn. It returns false if psn is too far from the other members.
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

// first returns the smallest member; ok is false if there is none.
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
