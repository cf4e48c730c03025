package vxlan

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/packet"
)

const (
	rxBatch = 32
	// rxRounds bounds one visit to a socket, so that a flooded tunnel leaves time for the loop's other ports.
	rxRounds = 4
)

// receiver is the receiving half of one loop.
type receiver struct {
	vt    *VTEP
	l     *engine.Loop
	fd    int
	watch *engine.Watch

	have, pos int // datagrams of the batch in hand: received, and looked at
	msgs      [rxBatch]mmsghdr
	iovs      [rxBatch]unix.Iovec
	names     [rxBatch]rawAddr
	ctrls     [rxBatch]control
	bufs      [rxBatch]*packet.Buf // nil where the pool was empty
	lost      [rxBatch][HeaderLen]byte

	resume *engine.Timer // continues a batch that a memory fault has cut short

	// The sender of the datagram before, most often this one's too.
	lastAddr rawAddr
	lastIP   netip.Addr
}

func newReceiver(vt *VTEP, l *engine.Loop, fd int) *receiver {
	r := &receiver{vt: vt, l: l, fd: fd}
	for i := range r.msgs {
		r.msgs[i].setIov(r.iovs[i : i+1])
	}
	r.resume = l.NewTimer(func(int64) { r.batch() }, engine.Name("vxlan receive"), engine.OnFault(r.onFault))
	return r
}

func (r *receiver) start() (err error) {
	r.watch, err = r.l.Watch(r.fd, r.ready, engine.Name("vxlan receive"), engine.OnFault(r.onFault))
	return err
}

// ready receives a bounded number of batches.
func (r *receiver) ready() {
	for range rxRounds {
		r.batch() // what a memory fault has left over
		for i := range r.msgs {
			m := &r.msgs[i]
			if r.bufs[i] == nil {
				r.bufs[i] = r.vt.cfg.Pool.Get()
			}
			if b := r.bufs[i]; b != nil {
				setIovec(&r.iovs[i], b.Room())
			} else {
				// The datagram must leave the socket all the same, or the loop would spin on it.
				setIovec(&r.iovs[i], r.lost[i][:])
			}
			m.setName(&r.names[i], uint32(len(r.names[i])))
			m.setControl(&r.ctrls[i], true)
			m.hdr.Flags = 0
		}
		n, errno := recvmmsg(r.fd, r.msgs[:])
		if errno != 0 || n <= 0 {
			return // EAGAIN, or an ICMP error that the call has cleared
		}
		r.have, r.pos = n, 0
		r.batch()
		if n < rxBatch {
			return
		}
	}
}

func (r *receiver) batch() {
	for r.pos < r.have {
		i := r.pos
		r.pos++
		r.datagram(i)
		r.done(i)
	}
}

// done takes our reference back: the buffer serves again if nobody else kept it.
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

func (r *receiver) datagram(i int) {
	m, b := &r.msgs[i], r.bufs[i]
	vt := r.vt
	if b == nil {
		vt.Counters.Drop(r.l, lfe.NoBuffer, 1)
		return
	}
	n := int(m.n)
	if m.hdr.Flags&unix.MSG_TRUNC != 0 || !b.SetLen(n) {
		vt.Counters.Drop(r.l, lfe.Truncated, 1)
		return
	}
	vt.Counters.In(r.l, n)
	if r.names[i] != r.lastAddr {
		r.lastAddr, r.lastIP = r.names[i], r.names[i].addr()
	}
	if mon := vt.monitor.Load(); mon != nil {
		(*mon).Datagram(r.l, false, netip.AddrPortFrom(r.lastIP, r.names[i].port()), netip.AddrPortFrom(vt.cfg.Local, vt.cfg.Port),
			r.ctrls[i].tos(uint64(m.hdr.Controllen)), nil, b.Bytes())
	}
	vni, ok := parseHeader(b.Bytes())
	if !ok {
		vt.Counters.Drop(r.l, lfe.BadHeader, 1)
		vt.refuse(r.l, r.lastIP, 0, lfe.BadHeader)
		return
	}
	p := (*vt.nets.Load())[vni]
	if p == nil {
		vt.Counters.Drop(r.l, lfe.UnknownVNI, 1)
		vt.refuse(r.l, r.lastIP, vni, lfe.UnknownVNI)
		return
	}
	x := p.peers.Load().byAddr[r.lastIP]
	if x == nil {
		if p.learn.Load() {
			x = p.learnPeer(r.lastIP)
		}
		if x == nil {
			p.drop(r.l, lfe.UnknownPeer, 1)
			vt.refuse(r.l, r.lastIP, vni, lfe.UnknownPeer)
			return
		}
	}
	b.TrimFront(HeaderLen)
	if !decapECN(b.Bytes(), r.ctrls[i].tos(uint64(m.hdr.Controllen))) {
		p.drop(r.l, lfe.ECNDrop, 1)
		return
	}
	p.att.Input(r.l, b, lfe.Source{Remote: x.id})
}

// onFault runs when a port that a frame went to hit a hole in its VM's memory. The frame is lost, the rest of the
// batch is not.
func (r *receiver) onFault(engine.Fault) {
	if r.pos > 0 {
		r.done(r.pos - 1)
	}
	r.resume.Arm(r.l.Now()) // one step per fault: this very function may be followed by the next one
}

func (r *receiver) stop() {
	if r.watch != nil {
		r.watch.Close()
	}
	unix.Close(r.fd)
	r.l.Do(func() {
		r.resume.Stop()
		r.have, r.pos = 0, 0
		for i, b := range r.bufs {
			if b != nil {
				b.Free()
				r.bufs[i] = nil
			}
		}
	})
}
