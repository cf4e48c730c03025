package vnet

import (
	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/gso"
	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/packet"
	"github.com/vnicd/vnicd/device/virtq"
	"github.com/vnicd/vnicd/translate"
)

// headerLen is struct virtio_net_hdr_v1, the same in both directions and
// whatever was negotiated beside VERSION_1 (virtio 1.2, 5.1.6).
const headerLen = gso.HeaderLen

// Poll implements engine.Poller: the guest's frames, a bounded number of them.
func (p *pair) Poll(int64) bool {
	q := p.tx
	if q == nil || q.Broken() != nil || p.txWait.waiting {
		return false
	}
	ep := q.Space().Epochs()
	t := ep.Enter(p.loop.ID())
	defer ep.Leave(p.loop.ID(), t)
	in := p.d.cfg.Port.Begin(p.loop)
	defer in.End()
	n := 0
	for n < txBudget {
		cost := p.transmit(q, &in)
		if cost == 0 {
			break
		}
		n += cost
	}
	p.release()
	return n > 0
}

// Prepare implements engine.Poller.
func (p *pair) Prepare() bool {
	q := p.tx
	if q == nil || q.Broken() != nil || p.txWait.waiting {
		return false
	}
	ep := q.Space().Epochs()
	t := ep.Enter(p.loop.ID())
	defer ep.Leave(p.loop.ID(), t)
	err := q.SetNotify(true)
	n := 0
	if err == nil {
		n, err = q.Pending()
	}
	if err != nil {
		p.broke(q, err)
		return false
	}
	return n > 0
}

// Resume implements engine.Poller.
func (p *pair) Resume() {
	if q := p.tx; q != nil && q.Broken() == nil {
		p.inEpoch(q, func() error { return q.SetNotify(false) })
	}
}

// transmit takes one chain, sends its frame and returns what that was worth in
// frames. 0: there was none, or the queue is broken or waits.
func (p *pair) transmit(q *virtq.Queue, in *lfe.Batch) (cost int) {
	ok, err := q.Pop(&p.txc)
	if m := virtq.Absent(err); m.Fault() {
		if p.txSkip && m.PA == p.txWait.fault.Miss.PA {
			p.txSkip = false
			p.broke(q, m.Err()) // of the ring itself, or an indirect table: no chain can be skipped
			return 0
		}
		p.txWait.raise(q.Space(), m, false)
		return 0
	}
	if err != nil {
		p.broke(q, err)
		return 0
	}
	if !ok {
		return 0
	}
	p.txOpen = true
	p.txCost = 1
	if m := p.send(q, in); m.Fault() {
		p.txOpen = false
		p.unpop(q, 1)
		p.txWait.raise(q.Space(), m, false)
		return 0
	}
	p.done(q)
	return p.txCost
}

// send copies the frame in and lets it into the network. Whatever is wrong with
// it is the guest's loss alone: dropped and counted. Only the miss of an absent
// page is returned: then nothing has happened yet.
func (p *pair) send(q *virtq.Queue, in *lfe.Batch) (m translate.Miss) {
	c := &p.txc
	n := c.ReadableLen()
	if p.txSkip {
		p.txSkip = false
		p.d.drop(p.loop, lfe.Unreachable)
		return m
	}
	switch {
	case n < headerLen+lfe.HeaderLen || c.WritableLen() != 0:
		p.d.drop(p.loop, lfe.ShortFrame)
		return m
	case n-headerLen > uint64(p.d.cfg.Pool.Largest()):
		p.d.drop(p.loop, lfe.TooBig)
		return m
	}
	b := p.buffer(int(n - headerLen))
	if b == nil {
		p.d.drop(p.loop, lfe.NoBuffer)
		return m
	}
	// Header and frame are copied in one go, the header into the headroom; it
	// is looked at in the copy and then trimmed off.
	if !b.SetLen(int(n-headerLen)) || b.Prepend(headerLen) == nil {
		p.d.drop(p.loop, lfe.TooBig)
		return m
	}
	if _, m := c.ReadAll(b.Bytes()); !m.OK() {
		if m.Fault() {
			return m
		}
		p.d.drop(p.loop, lfe.Unreachable)
		p.broke(q, m.Err())
		return translate.Miss{}
	}
	h := [headerLen]byte(b.Bytes())
	b.TrimFront(headerLen)
	var err error
	if b.Offload, err = gso.Accept(h[:], b.Bytes(), p.txTakes); err != nil {
		p.d.drop(p.loop, lfe.BadHeader)
		return m
	}
	// Cutting it up, where that has to be, is work like that for a few frames.
	p.txCost += b.Segments() / segmentsPerFrame
	in.Input(b)
	return m
}

// buffer sets cur to an empty buffer for n bytes and returns it: the one of the frame before, if nobody else has kept that; nil if
// there is none.
func (p *pair) buffer(n int) *packet.Buf {
	pool := p.d.cfg.Pool
	if b := p.cur; b != nil && !b.Shared() {
		// Small frames do not occupy the few big buffers.
		if b.Reset(); n <= pool.Capacity() && b.Cap() == pool.Capacity() {
			return b
		}
	}
	p.release()
	p.cur = pool.GetFor(n)
	return p.cur
}

func (p *pair) release() {
	if b := p.cur; b != nil {
		p.cur = nil
		b.Free()
	}
}

// done gives the chain back.
func (p *pair) done(q *virtq.Queue) {
	p.txOpen = false
	if err := q.Push(&p.txc, 0); err != nil {
		p.broke(q, err)
		return
	}
	p.txDirty = true
}

// txFault cleans up after a memory fault cut Poll short. If the hole was in
// another VM's memory, on the frame's way, this VM's frame counts as sent.
func (p *pair) txFault(f engine.Fault) {
	p.release()
	open := p.txOpen
	p.txOpen = false
	if !f.Foreign {
		p.d.fault(f)
		return
	}
	if q := p.tx; open && q != nil {
		p.inEpoch(q, func() error { p.done(q); return nil })
	}
}
