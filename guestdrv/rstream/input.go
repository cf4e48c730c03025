package rstream

// input is the direction from the peer. The receive buffer is a ring of two halves, which are announced to the peer in
// turns. The peer fills a half from its beginning to its end before it uses the other one.
//
//	buffer:  ┌── read ──┬── unread ──┬── open: announced, not written ──┐
//
// A half is announced again when as many bytes have been read as it has. Then the peer has filled it, and the entry of
// the peer's target SGL that announced it is free.
type input struct {
	buffer   sge // this end's receive buffer
	half     uint32
	read     uint32 // offset of the next byte to read
	unread   uint32
	open     uint32 // bytes that the peer may write
	freed    uint32 // bytes that have been read since, and are not announced
	announce uint32 // offset of the half that is announced next

	seq   uint16 // data messages received, and those of iomaps
	told  uint16 // seq at the last credit update
	limit uint16 // the last data message for which the peer has credit
	queue uint16

	sgl   sge    // the peer's target SGL; its length is a number of entries
	entry uint32 // of it, to be written next
}

// arrive handles a message that tells of n bytes of data.
func (in *input) arrive(n uint32) error {
	rest := in.open // of the half that is being filled
	if rest > in.half {
		rest -= in.half
	}
	if err := in.take(); err != nil {
		return err
	}
	switch {
	case n == 0:
		return violation("data message of 0 bytes")
	case n > rest:
		return violation("data message of %d bytes, but the announced buffer has %d", n, rest)
	}
	in.open -= n
	in.unread += n
	return nil
}

// take takes a credit for a message.
func (in *input) take() error {
	if in.seq == in.limit {
		return violation("message without credit: %d were granted in all", in.limit)
	}
	in.seq++
	return nil
}

// readable returns the part of the ring that can be read now: n bytes at off.
func (in *input) readable() (off, n uint32) {
	return in.read, min(in.unread, in.buffer.length-in.read)
}

// consumed frees n bytes that have been read, at most what readable returned.
func (in *input) consumed(n uint32) {
	in.unread -= n
	in.freed += n
	if in.read += n; in.read == in.buffer.length {
		in.read = 0
	}
}

// grant returns the update that the peer needs, if any: when a half can be announced again, and when half of the
// credits have been used. A credit is free as soon as its message has arrived, because messages need no place of their
// own: data is contiguous, and the receive request is posted again at once.
func (in *input) grant() (p post, ok bool) {
	announce := in.freed >= in.half
	if !announce && in.seq-in.told < in.queue/2 {
		return p, false
	}
	in.told, in.limit = in.seq, in.seq+in.queue
	p.msg = newMessage(opSGL, uint32(in.limit))
	if !announce {
		return p, true
	}
	p.entry = sge{addr: in.buffer.addr + uint64(in.announce), key: in.buffer.key, length: in.half}
	p.hasEntry = true
	p.to = in.sgl.remote(uint64(in.entry) * sgeLen)
	in.freed -= in.half
	in.open += in.half
	in.announce = in.half - in.announce
	if in.entry++; in.entry == in.sgl.length {
		in.entry = 0
	}
	return p, true
}
