package rstream

import "github.com/vnicd/vnicd/guestdrv"

// output is the direction to the peer. Data waits in a ring, the send buffer, until the peer's device has it; short
// data is sent inline and needs no place there. It goes to the buffer that the current target names. The peer
// announces buffers by writing to the entries of this end's target SGL in turns; the first one is part of its
// connData.
type output struct {
	size     int // of the send buffer
	head     int // offset in it for the next data
	used     int // bytes of it that have not completed
	posted   int // data messages, and WRITEs to mapped memory, that have not completed
	requests int // the most of them

	target sge // the rest of the buffer that is being filled
	next   int // entry of the target SGL that is taken next
	take   func(i int) sge

	seq      uint16 // data messages sent, and those of iomaps
	limit    uint16 // the last one for which the peer has granted credit
	credits  uint16 // the most that it grants beyond those that it has received
	writable bool   // neither closeWrite nor close has been called
}

const (
	// sglEntries is the length of this end's target SGL (RS_SGL_SIZE).
	sglEntries = 2
	// maxTransfer bounds a data message, so that the peer can begin with the first while later ones are on their way.
	maxTransfer = 64 << 10
	// lowWater is the free space that is worth a message, unless less is to be sent.
	lowWater = 2 << 10
)

// plan returns how many of n bytes can be sent now in one message: 0 if the caller must wait. Unless they are to be
// sent inline, they go to offset head of the send buffer.
func (o *output) plan(n int) (k int, inline bool, err error) {
	if o.target.length == 0 {
		if err := o.nextTarget(); err != nil {
			return 0, false, err
		}
	}
	if o.seq == o.limit || o.posted == o.requests || o.target.length == 0 {
		return 0, false, nil
	}
	n = int(min(int64(n), maxTransfer, int64(o.target.length)))
	k, inline = o.room(n)
	return k, inline, nil
}

// room returns how many of n bytes can be sent with what is left of the send buffer, as plan does.
func (o *output) room(n int) (k int, inline bool) {
	if n <= maxInline {
		return n, true
	}
	if o.size-o.used < min(n, lowWater) {
		return 0, false
	}
	return min(n, o.size-o.used, o.size-o.head), false
}

// planDirect is plan for a WRITE into memory that the peer has mapped, which takes no credit.
func (o *output) planDirect(n int) (k int, inline bool) {
	if o.posted == o.requests {
		return 0, false
	}
	return o.room(min(n, maxTransfer))
}

// ready reports whether a message without a place in the target can be sent now.
func (o *output) ready() bool { return o.seq != o.limit && o.posted < o.requests }

// message returns the WRITE of a message, which takes a credit.
func (o *output) message(to guestdrv.Remote, msg message) post {
	o.seq++
	o.posted++
	return post{to: to, msg: msg}
}

// direct returns the WRITE of n bytes, which planDirect has returned.
func (o *output) direct(to guestdrv.Remote, n int, inline bool) post {
	o.posted++
	p := post{to: to, silent: true}
	o.hold(&p, n, inline)
	return p
}

// hold takes n bytes of the send buffer until the completion, unless they are sent inline.
func (o *output) hold(p *post, n int, inline bool) {
	if inline {
		return
	}
	p.held = n
	o.used += n
	if o.head += n; o.head == o.size {
		o.head = 0
	}
}

// nextTarget takes the next buffer, if the peer has announced it.
func (o *output) nextTarget() error {
	t := o.take(o.next)
	if t.length == 0 {
		return nil
	}
	if !t.holds(uint64(t.length)) {
		return violation("buffer of %d bytes at %#x exceeds the address space", t.length, t.addr)
	}
	o.target = t
	o.next = (o.next + 1) % sglEntries
	return nil
}

// commit returns the WRITE of n bytes, which plan has returned.
func (o *output) commit(n int, inline bool) post {
	p := o.message(o.target.remote(0), newMessage(opData, uint32(n)))
	o.target.addr += uint64(n)
	o.target.length -= uint32(n)
	o.hold(&p, n, inline)
	return p
}

// completed handles the completion of a WRITE that held some bytes of the send buffer.
func (o *output) completed(held int) {
	o.posted--
	o.used -= held
}

// grant handles a credit update: the peer can receive the data messages up to number limit, modulo 65536.
func (o *output) grant(limit uint16) error {
	if left, had := limit-o.seq, o.limit-o.seq; left > o.credits || left < had {
		return violation("credit up to data message %d after %d of %d, expected at most %d more", limit, o.seq, o.limit,
			o.credits)
	}
	o.limit = limit
	return nil
}
