package rstream

import "github.com/vnicd/vnicd/guestdrv"

// stream is the protocol of one connection: what may be sent, where it goes in the peer's memory, what has been
// received, and what the peer must be told. It has no I/O, no clock and no goroutine. Its caller posts the WRITEs that
// output.commit and next return, in order, and calls complete and receive with their completions and with the peer's
// messages. Everything that a peer says is checked here.
//
// The ends of the two directions:
//
//	open ──closeWrite──► SHUTDOWN is sent ──its SHUTDOWN or DISCONNECT──► over
//	  │ ╲                                                                   ▲
//	  │  ╲──its SHUTDOWN──► it sends no data ──closeWrite: DISCONNECT───────┤
//	  └─────────────────close: DISCONNECT, or its DISCONNECT────────────────┘
type stream struct {
	in     input
	out    output
	iomaps iomaps

	slots    int     // control messages that may be posted
	pending  control // to be sent as soon as a slot is free
	finished bool    // the peer sends no more data
	gone     bool    // the peer has disconnected
	left     bool    // DISCONNECT has been posted
}

// controlSlots is the number of control messages and credit updates under way (RS_QP_CTRL_SIZE). They need no credits:
// both ends have receive requests for those of the peer beside those for data.
const controlSlots = 4

// control is a control message that waits for a slot.
type control int

const (
	controlNone control = iota
	sendShutdown
	sendDisconnect
)

// post is a WRITE with immediate data, whose payload the caller knows or which is an entry of the peer's SGL.
type post struct {
	to       guestdrv.Remote
	msg      message
	entry    sge
	hasEntry bool // the payload is entry, in the byte order of the peer's SGL
	silent   bool // without immediate data: the peer is not told
	held     int  // bytes of the send buffer that the completion frees
}

// newStream returns the protocol's state at one end. buffer is its receive buffer, of an even length; queue the
// number of data messages that it can receive. sendBuffer and sendQueue are the bytes and data messages under way to
// the peer. take returns entry 0 or 1 of this end's target SGL, and clears the entry's length; read returns one of the
// maps entries of its table of iomaps.
func newStream(buffer sge, queue uint16, sendBuffer, sendQueue, maps int, take func(i int) sge,
	read func(i int) iomap) *stream {
	half := buffer.length / 2
	return &stream{
		slots: controlSlots,
		in: input{buffer: buffer, half: half, open: half, freed: half, announce: half, queue: queue, limit: queue,
			entry: 1},
		out:    output{size: sendBuffer, requests: sendQueue, writable: true, take: take},
		iomaps: iomaps{table: make([]iomap, maps), read: read},
	}
}

// hello returns what this end says when the connection is made. sgl is its target SGL.
func (s *stream) hello(sgl sge) *connData {
	sgl.length = sglEntries
	first := s.in.buffer
	first.length = s.in.half
	return &connData{credits: s.in.queue, sgl: sgl, buffer: first, iomaps: len(s.iomaps.table)}
}

// connect begins with what the peer said.
func (s *stream) connect(peer *connData) {
	s.in.sgl = peer.sgl
	s.iomaps.theirs = sge{addr: peer.sgl.addr + uint64(peer.sgl.length)*sgeLen, key: peer.sgl.key,
		length: uint32(peer.iomaps)}
	s.out.target, s.out.credits, s.out.limit, s.out.next = peer.buffer, peer.credits, peer.credits, 1
}

// over reports whether nothing more is sent.
func (s *stream) over() bool { return s.gone || s.left }

// next returns the control message or credit update that is to be posted now; ok is false if there is none.
func (s *stream) next() (p post, ok bool) {
	switch {
	case s.over() || s.slots == 0:
		return p, false
	case s.pending == controlNone:
		p, ok = s.in.grant()
	case s.pending == sendShutdown:
		p.msg, ok = newMessage(opControl, controlShutdown), true
	case s.pending == sendDisconnect:
		p.msg, ok = newMessage(opControl, controlDisconnect), true
		s.left = true
	}
	if ok {
		s.slots--
	}
	if p.msg.op() == opControl {
		s.pending = controlNone
	}
	return p, ok
}

// closeWrite ends the direction to the peer.
func (s *stream) closeWrite() {
	if !s.out.writable || s.over() {
		return
	}
	s.out.writable = false
	s.pending = sendShutdown
	if s.finished {
		s.pending = sendDisconnect
	}
}

// close ends both directions.
func (s *stream) close() {
	s.out.writable = false
	if !s.over() {
		s.pending = sendDisconnect
	}
}

// idle reports whether all that was to be sent has reached the peer's device.
func (s *stream) idle() bool {
	return s.out.posted == 0 && s.slots == controlSlots && (s.pending == controlNone || s.over())
}

// receive handles a message of the peer.
func (s *stream) receive(m message) error {
	if s.gone {
		return nil // rsockets may send a credit update behind DISCONNECT
	}
	switch m.op() {
	case opData:
		if s.finished {
			return violation("%d bytes of data after SHUTDOWN", m.data())
		}
		return s.in.arrive(m.data())
	case opSGL:
		return s.out.grant(uint16(m.data())) // rsockets send the sum of two 16-bit numbers and mean its low 16 bits
	case opControl:
		return s.control(m.data())
	case opIOMap:
		if err := s.in.take(); err != nil {
			return err
		}
		return s.iomaps.arrive(m.data())
	default:
		return violation("%v", m.op())
	}
}

func (s *stream) control(code uint32) error {
	switch code {
	case controlKeepalive:
	case controlDisconnect:
		s.finished, s.gone = true, true
	case controlShutdown:
		s.finished = true
		switch {
		case s.pending == sendShutdown:
			s.pending = sendDisconnect
		case !s.out.writable && s.pending == controlNone: // the peer has received SHUTDOWN
			s.gone = true
		}
	default:
		return violation("control code %d, expected 0 to 2", code)
	}
	return nil
}

// completed handles the completion of a control message or credit update.
func (s *stream) completed() { s.slots++ }
