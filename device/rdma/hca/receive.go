// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

const (
	// frameOverhead is the largest overhead of a RoCE frame around its payload: Ethernet
	// with one tag, IPv6, UDP, BTH, the largest extension headers (AtomicETH), ICRC.
	frameOverhead = 18 + mtuOverhead
	// mtuOverhead is the part of it that counts towards the network's MTU. Linux's rxe
	// uses the same sum (iboe_get_mtu), so that both ends choose the same path MTU.
	mtuOverhead = 40 + 8 + wire.BTHLen + 4 + wire.AtomicLen + wire.ICRCLen
)

// portMTU is the largest path MTU that the tenant's network carries: 256..4096.
// It is 256 even if the network is too small for that: frames that do not fit are
// dropped, as on any link.
func (d *dataSide) portMTU() int {
	return abi.MTUBytes(max(abi.MTUFromBytes(d.mtu()-mtuOverhead), abi.MTU256))
}

// Deliver takes a RoCE frame that arrived for this VM (vswitch.HCAFace). It runs on
// any loop and b is only lent; the frame goes to the inbox of its QP's engine.
// Frames without a QP are dropped and counted there.
func (d *dataSide) Deliver(l *loop.Loop, b *frame.Buf) {
	if !d.Up() {
		return
	}
	if !d.link.Load() {
		d.rejected[rejectLink].Add(uint64(b.Segments()))
		return
	}
	if len(d.engines) == 1 {
		d.engines[0].enqueue(b)
		return
	}
	home := d.byLoop[l.ID()]
	if home == nil {
		home = d.engines[0]
	}
	var p wire.RoCE
	if err := wire.ParseRoCE(b.Bytes(), b.Layout(), &p); err != nil {
		home.enqueue(b) // it counts the error
		return
	}
	if p.BTH.DestQP == mcastQPN {
		for _, e := range d.engines {
			if d.groups.Load().hasMember(&p.DstIP, e) {
				e.enqueue(b)
			}
		}
		return
	}
	if q := d.qpFor(p.BTH.DestQP); q != nil {
		home = q.engine
	}
	home.enqueue(b)
}

// enqueue puts a frame into the engine's inbox; any thread. Trains use big buffers, which are few and shared by all
// VMs: half of those may wait in inboxes. Beyond that a train is split here.
func (e *engine) enqueue(b *frame.Buf) {
	pool := e.dev.pool
	if b.Offload.GSOSize == 0 || pool.KeepBig() {
		e.enqueueBuf(b)
		return
	}
	var s gso.Segmenter
	for s.Start(b); s.Left() > 0; {
		c := pool.GetFor(b.WireLen())
		if c == nil {
			e.inboxFull.Add(uint64(s.Left()))
			return
		}
		c.SetLen(s.Next(c.Room()))
		c.SetLayout(b.Layout())
		e.enqueueBuf(c)
		c.Free()
	}
}

func (e *engine) enqueueBuf(b *frame.Buf) {
	b.Ref()
	if !e.inbox.Put(b) {
		e.inboxFull.Add(uint64(b.Segments()))
		e.releaseBuf(b)
	}
}

// releaseBuf returns a buffer that was in the inbox.
func (e *engine) releaseBuf(b *frame.Buf) {
	if b.Offload.GSOSize != 0 {
		e.dev.pool.UnkeepBig()
	}
	b.Free()
}

// hasMember reports whether a group has members on an engine.
func (t *mcastTable) hasMember(gid *[16]byte, e *engine) bool {
	for _, q := range t.groups[*gid] {
		if q.engine == e {
			return true
		}
	}
	return false
}

// qpFor finds a QP by its number.
func (d *dataSide) qpFor(n uint32) *qp {
	if q := d.numbers[d.numberPlace(n)].Load(); q != nil && q.n == n {
		return q
	}
	return nil
}

// dispatch passes a parsed frame, whose ICRC is valid, to its QP or group (MT-6: a frame
// is for this VM's MAC, one of its GIDs, and one of its QPs, or it is dropped).
func (e *engine) dispatch(p *wire.RoCE) {
	d := e.dev
	vlan := p.VLAN
	if vlan == 0 {
		vlan = abi.NoVLAN // priority tag (802.1Q): no VLAN
	}
	if p.BTH.DestQP == mcastQPN {
		n := 0
		for _, q := range d.groups.Load().groups[p.DstIP] {
			if q.engine == e && !q.closed {
				e.receiveOn(q, p)
				n++
			}
		}
		if n == 0 {
			d.rejected[rejectGroup].Add(1)
		}
		return
	}
	q := d.qpFor(p.BTH.DestQP)
	switch {
	case q == nil || q.engine != e:
		d.rejected[rejectQPN].Add(1)
	case p.DMAC != header.MAC(d.mac):
		d.rejected[rejectMAC].Add(1)
	case !d.gids.has(&p.DstIP, p.V1, vlan):
		d.rejected[rejectGID].Add(1)
	case q.typ == roce.GSI && (e.frozen || !d.admitGSI(q, p)):
	default:
		e.receiveOn(q, p)
	}
}

func (e *engine) receiveOn(q *qp, p *wire.RoCE) {
	if e.frozen {
		q.t.ReceiveFrozen(e.loop.Now(), p)
		return
	}
	if len(q.kept) > 0 {
		if !q.keep() {
			e.keptDrops++
		}
		return
	}
	e.touch(q)
	e.current = q
	q.t.Receive(e.loop.Now(), p)
	e.current = nil
}

// transmit sends a frame of q into the network. A datagram to a group also goes to
// the members on this port, because the switch does not send it back to the port
// (IBTA 10.5). A sender that is a member receives its own datagram.
func (d *dataSide) transmit(q *qp, b *frame.Buf) {
	port := d.port.Load()
	if port == nil {
		return
	}
	if !d.link.Load() {
		d.rejected[rejectUnsent].Add(1)
		return
	}
	l := q.engine.loop
	if q.typ == roce.RC || q.typ == roce.UC {
		(*port).SendHCA(l, b, &q.path)
		return
	}
	if q.typ == roce.GSI {
		d.sentGSI(q, b)
	}
	if f := b.Bytes(); len(f) > 0 && f[0]&1 != 0 && len(d.groups.Load().groups) > 0 {
		d.Deliver(l, b)
	}
	(*port).InputHCA(l, b)
}

// receive handles a frame from the inbox.
func (e *engine) receive(b *frame.Buf) {
	if t, ok := e.enter(); ok {
		defer e.leave(t)
	} else if !e.answersFrozen() {
		return
	}
	if b.Offload.GSOSize != 0 {
		e.receiveTrain(b)
	} else {
		e.receiveFrame(b, nil)
	}
	e.packet = wire.RoCE{} // keep no reference to the buffer
}

// receiveTrain handles a train (gso.Train). It writes the first packet's headers in front of each of the others, over
// data that was received already. So it works on a copy if the frame has other readers.
func (e *engine) receiveTrain(b *frame.Buf) {
	if b.Shared() {
		c := e.dev.pool.GetFor(b.Len())
		if c == nil {
			e.inboxFull.Add(uint64(b.Segments()))
			return
		}
		defer c.Free()
		c.CopyFrom(b)
		b = c
	}
	f, head, size := b.Bytes(), int(b.Offload.Payload), int(b.Offload.GSOSize)
	n := copy(e.trainHeaders[:], f[:head])
	for at := head; at+size <= len(f); at += size {
		p := f[at-head : at+size : at+size]
		copy(p, e.trainHeaders[:n])
		e.receiveFrame(b, p)
	}
}

// receiveFrame handles a frame: b, or single if that is a packet of the train b.
func (e *engine) receiveFrame(b *frame.Buf, single []byte) {
	frame := single
	if single == nil {
		frame = b.Bytes()
	}
	p := &e.packet
	if err := wire.ParseRoCE(frame, b.Layout(), p); err != nil {
		e.dev.rejected[rejectHeader].Add(1)
		return
	}
	if !wire.CheckICRC(frame, p) {
		e.dev.rejected[rejectICRC].Add(1)
		return
	}
	e.receiving, e.trainPacket = b, single
	e.dispatch(p)
	e.receiving, e.trainPacket = nil, nil
}
