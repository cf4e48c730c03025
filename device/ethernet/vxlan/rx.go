package vxlan

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

const (
	rxBatch = 32
	// rxRounds bounds the batches received from a socket at a time, so that a flooded tunnel leaves time for the loop's
	// other ports.
	rxRounds = 4
)

// receiver is the receiving half of one loop.
//
// A message is one datagram or, if the kernel has coalesced some of a flow (UDP_GRO), several of equal size, of which
// the last may be shorter. It is received into a frame buffer and, beyond that buffer's end, into the message's spill.
// A single datagram stays in that frame buffer; one of several is copied out, or becomes part of a large frame
// (merge.go).
type receiver struct {
	vt    *VTEP
	l     *loop.Loop
	fd    int
	watch *loop.Watch

	have int // messages in the batch
	pos  int // current message
	off  int // offset of its next datagram

	msgs   [rxBatch]mmsghdr
	iovs   [rxBatch][2]unix.Iovec
	names  [rxBatch]rawAddr
	ctrls  [rxBatch]rxControl
	bufs   [rxBatch]*frame.Buf // nil where the pool was empty
	lost   [rxBatch][HeaderLen]byte
	spills [rxBatch][]byte // nil: messages are single datagrams
	head   int             // room in front of a spill, for the start of a datagram whose rest is in the spill

	msg    message
	merger merger
	cur    *frame.Buf // frame that is being delivered to a network, if not one in bufs

	resume *loop.Timer // continues a batch that a memory fault has interrupted

	// Sender of the message before, usually this one's too.
	lastAddr rawAddr
	lastIP   netip.Addr
}

// message describes the message at pos.
type message struct {
	n    int // bytes
	size int // of each datagram
	tos  uint8
	from netip.AddrPort
	vni  uint32 // of the first datagram

	reserved bool // from a port below 1024

	// The port and peer of the sender's datagram before, in this message or another of the batch; most datagrams repeat
	// them. port is nil if there was none.
	header [HeaderLen]byte
	port   *port
	peer   *peer
}

func newReceiver(vt *VTEP, l *loop.Loop, fd int) *receiver {
	r := &receiver{vt: vt, l: l, fd: fd, head: vt.cfg.Pool.Capacity()}
	iovs := 1
	// A single datagram may be as large, if a kernel inside this machine has left it unsegmented.
	if vt.cfg.Pool.Largest() >= frame.BigCapacity &&
		(!vt.cfg.Segmentation || unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO, 1) == nil) { // Linux 5.0
		iovs = 2
		// One mapping; only pages that are used become resident.
		slab := make([]byte, rxBatch*(r.head+gsoBytes))
		for i := range r.spills {
			r.spills[i] = slab[:r.head+gsoBytes]
			slab = slab[r.head+gsoBytes:]
			setIovec(&r.iovs[i][1], r.spills[i][r.head:])
		}
	}
	for i := range r.msgs {
		r.msgs[i].setIov(r.iovs[i][:iovs])
	}
	r.resume = l.NewTimer(func(int64) { r.batch() }, loop.Name("vxlan receive"), loop.OnFault(r.onFault))
	return r
}

func (r *receiver) start() (err error) {
	r.watch, err = r.l.Watch(r.fd, r.ready, loop.Name("vxlan receive"), loop.OnFault(r.onFault))
	return err
}

// ready receives a bounded number of batches.
func (r *receiver) ready() {
	for range rxRounds {
		r.batch() // the rest of a batch that a memory fault interrupted
		for i := range r.msgs {
			m := &r.msgs[i]
			if r.bufs[i] == nil {
				r.bufs[i] = r.vt.cfg.Pool.Get()
			}
			if b := r.bufs[i]; b != nil {
				setIovec(&r.iovs[i][0], b.Room())
			} else {
				// The message must leave the socket, or the loop would spin on it.
				setIovec(&r.iovs[i][0], r.lost[i][:])
			}
			m.setName(&r.names[i], uint32(len(r.names[i])))
			m.setControl(r.ctrls[i][:])
			m.hdr.Flags = 0
		}
		n, errno := recvmmsg(r.fd, r.msgs[:])
		if errno != 0 || n <= 0 {
			return // EAGAIN, or an ICMP error that the call has cleared
		}
		r.have, r.pos, r.off = n, 0, 0
		r.batch()
		if n < rxBatch {
			return
		}
	}
}

// batch processes the messages in hand. A memory fault may end it at any frame; when called again it continues after
// that frame.
func (r *receiver) batch() {
	r.drain()
	r.msg.port, r.msg.peer = nil, nil // tables may have changed since a fault
	for r.pos < r.have {
		if r.off == 0 && !r.open() {
			r.pos++
			continue
		}
		at := r.off
		if r.off += r.msg.size; r.off >= r.msg.n {
			r.pos++
			r.off = 0
			r.datagram(r.pos-1, at, r.msg.n)
		} else {
			r.datagram(r.pos, at, r.off)
		}
	}
	r.flush()
	for i := range r.have {
		r.done(i)
	}
	r.have, r.pos = 0, 0
}

// done drops our reference; the buffer is used again unless another holder keeps a reference.
func (r *receiver) done(i int) {
	b := r.bufs[i]
	switch {
	case b == nil:
	case b.Shared():
		b.Free()
		r.bufs[i] = nil
	default:
		b.Reset()
	}
}

// open starts with a message, and drops a malformed one as a whole.
func (r *receiver) open() bool {
	i, vt := r.pos, r.vt
	m, b := &r.msgs[i], r.bufs[i]
	if b == nil {
		vt.Counters.Drop(r.l, vswitch.NoBuffer, 1)
		return false
	}
	tos, size := r.ctrls[i].parse(uint64(m.hdr.Controllen))
	n := int(m.n)
	several := size > 0 && size < n
	if !several {
		size = n
	}
	if m.hdr.Flags&unix.MSG_TRUNC != 0 || size > b.Cap() && (several || r.spills[i] == nil) {
		vt.Counters.Drop(r.l, vswitch.Truncated, 1)
		return false
	}
	if r.names[i] != r.lastAddr {
		r.lastAddr, r.lastIP = r.names[i], r.names[i].addr()
	}
	if size <= HeaderLen && several || n == 0 {
		count := max(n, 1) / max(size, 1)
		vt.refuse(r.l, r.lastIP, 0, vswitch.BadHeader)
		vt.Counters.Drop(r.l, vswitch.BadHeader, count)
		return false
	}
	port := r.names[i].port()
	reserved := port < reservedPorts
	if r.lastIP != r.msg.from.Addr() || reserved != r.msg.reserved {
		r.msg.port = nil
	}
	r.msg.n, r.msg.size, r.msg.tos, r.msg.from = n, size, tos, netip.AddrPortFrom(r.lastIP, port)
	r.msg.reserved = reserved
	return true
}

// bytes returns a datagram of message i. If it spans the end of the frame buffer, its start is copied in front of the
// spill.
func (r *receiver) bytes(i, from, to int) []byte {
	room := r.bufs[i].Room()
	if to <= len(room) {
		return room[from:to]
	}
	spill := r.spills[i]
	if from < len(room) {
		copy(spill[r.head-(len(room)-from):r.head], room[from:])
	}
	shift := r.head - len(room)
	return spill[from+shift : to+shift]
}

func (r *receiver) datagram(i, from, to int) {
	vt, m, d := r.vt, &r.msg, r.bytes(i, from, to)
	vt.Counters.In(r.l, 1, len(d))
	if mon := vt.monitor.Load(); mon != nil {
		(*mon).Datagram(r.l, false, m.from, netip.AddrPortFrom(vt.cfg.Local, vt.cfg.Port), m.tos, nil, d)
	}
	if from == 0 {
		m.vni, _ = parseHeader(d)
	}
	if (m.port == nil || len(d) < HeaderLen || [HeaderLen]byte(d) != m.header) && !r.look(d) {
		return
	}
	p, x := m.port, m.peer
	f := d[HeaderLen:]
	if !decapECN(f, m.tos) {
		p.drop(r.l, vswitch.ECNDrop, 1)
		return
	}
	alone, fits := -1, len(d) <= r.bufs[i].Cap()
	if m.size == m.n {
		alone = i
	}
	several := alone < 0 || r.have > 1
	if several && fits && r.continues(f, p, x) {
		return
	}
	at := header.Locate(f)
	if several && fits && r.couple(f, at, p, x, alone) || r.unfinished(f, at, p, x) {
		return
	}
	if !fits {
		vt.Counters.Drop(r.l, vswitch.Truncated, 1)
		return
	}
	if several {
		r.merge(f, at, p, x, alone)
	} else {
		r.deliver(f, at, p, x, alone)
	}
}

// unfinished delivers a TCP frame that a kernel inside this machine has left unsegmented, for example one with a short
// path.
func (r *receiver) unfinished(f []byte, at *header.Layout, p *port, x *peer) bool {
	o, ok := gso.Unfinished(f, at, p.net.MTU()+vswitch.HeaderLen)
	if !ok {
		return false
	}
	r.flush() // so that it does not overtake others of its flow
	b := r.vt.cfg.Pool.GetFor(len(f))
	if b == nil {
		p.drop(r.l, vswitch.NoBuffer, 1)
		return true
	}
	b.Append(f)
	b.SetLayout(at)
	b.Offload = o
	r.input(b, p, x)
	return true
}

// look finds the network and the peer of a datagram; false: the datagram is dropped.
func (r *receiver) look(d []byte) bool {
	vt, m, addr := r.vt, &r.msg, r.msg.from.Addr()
	m.port, m.peer = nil, nil
	vni, ok := parseHeader(d)
	if !ok || vni != m.vni && vt.virtual.Load() {
		vt.refuse(r.l, addr, vni, vswitch.BadHeader)
		vt.Counters.Drop(r.l, vswitch.BadHeader, 1)
		return false
	}
	p := (*vt.nets.Load())[vni]
	if p == nil {
		vt.refuse(r.l, addr, vni, vswitch.UnknownVNI)
		vt.Counters.Drop(r.l, vswitch.UnknownVNI, 1)
		return false
	}
	x := p.peers.Load().byAddr[addr]
	if x == nil {
		if p.learn.Load() && vt.mayLearn(addr, m.reserved) {
			x = p.learnPeer(addr)
		}
		if x == nil {
			vt.refuse(r.l, addr, vni, vswitch.UnknownPeer)
			p.drop(r.l, vswitch.UnknownPeer, 1)
			return false
		}
	}
	if !vt.believes(x, m.reserved) {
		vt.refuse(r.l, addr, vni, vswitch.SourcePort)
		p.drop(r.l, vswitch.SourcePort, 1)
		return false
	}
	m.header, m.port, m.peer = [HeaderLen]byte(d), p, x
	return true
}

// deliver passes a frame to its network. A single datagram of a message is in a buffer already; others are copied.
func (r *receiver) deliver(f []byte, at *header.Layout, p *port, x *peer, alone int) {
	if alone >= 0 {
		b := r.bufs[alone]
		b.SetLen(HeaderLen + len(f))
		b.TrimFront(HeaderLen)
		b.SetLayout(at)
		p.att.Input(r.l, b, vswitch.Source{Remote: x.id})
		return
	}
	b := r.vt.cfg.Pool.Get()
	if b == nil {
		p.drop(r.l, vswitch.NoBuffer, 1)
		return
	}
	b.Append(f)
	b.SetLayout(at)
	r.input(b, p, x)
}

// input passes a frame to its network, and drops our reference.
func (r *receiver) input(b *frame.Buf, p *port, x *peer) {
	r.cur = b
	p.att.Input(r.l, b, vswitch.Source{Remote: x.id})
	r.cur = nil
	b.Free()
}

// onFault runs after a memory fault in another port's Deliver, in its VM's memory. That frame is lost; the rest of the
// batch is not.
func (r *receiver) onFault(loop.Fault) {
	if r.cur != nil {
		r.cur.Free()
		r.cur = nil
	}
	r.resume.Arm(r.l.Now()) // one step per fault: a nested call could fault again
}

func (r *receiver) stop() {
	if r.watch != nil {
		r.watch.Close()
	}
	unix.Close(r.fd)
	r.l.Visit(func() {
		r.resume.Stop()
		r.have, r.pos, r.off = 0, 0, 0
		r.merger.clear()
		for i, b := range r.bufs {
			if b != nil {
				b.Free()
				r.bufs[i] = nil
			}
		}
	})
}
