package vnet

import (
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// headerLen is the size of struct virtio_net_hdr_v1, the same in both directions and independent of other features,
// given VERSION_1 (virtio 1.2, 5.1.6).
const headerLen = gso.HeaderLen

// Poll implements loop.Poller: it sends a bounded number of the guest's frames.
func (p *pair) Poll(int64) bool {
	q := p.tx
	if q == nil || q.Broken() != nil || p.txWait.waiting {
		return false
	}
	ep := q.Space().Epochs()
	t := ep.Enter(p.loop.Guarded())
	defer ep.Leave(p.loop.ID(), t)
	p.returnSent(q)
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

// Prepare implements loop.Poller.
func (p *pair) Prepare() bool {
	q := p.tx
	if q == nil || q.Broken() != nil || p.txWait.waiting {
		return false
	}
	ep := q.Space().Epochs()
	t := ep.Enter(p.loop.Guarded())
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

// Resume implements loop.Poller.
func (p *pair) Resume() {
	if q := p.tx; q != nil && q.Broken() == nil {
		p.inEpoch(q, func() error { return q.SetNotify(false) })
	}
}

// transmit takes one chain, sends its frame and returns its cost in frames. 0: there was none, or the queue is broken
// or waits.
func (p *pair) transmit(q *virtq.Queue, in *vswitch.Batch) (cost int) {
	begin := q.Walked()
	ok, err := q.Pop(&p.txc)
	if err != nil {
		p.unreadable(q, err)
		return 0
	}
	if !ok {
		return 0
	}
	p.txOpen = true
	p.txCost = 1 + int(q.Walked()-begin)/descsPerFrame
	if !p.send(q, in) {
		p.txOpen = false
		return 0
	}
	p.done(q)
	return p.txCost
}

// unreadable stops or suspends a queue whose next chain cannot be taken.
func (p *pair) unreadable(q *virtq.Queue, err error) {
	m := virtq.Absent(err)
	switch {
	case !m.Fault():
		p.broke(q, err)
	case p.txSkip && m.PA == p.txWait.fault.Miss.PA:
		p.txSkip = false
		p.broke(q, m.Err()) // the ring itself, or an indirect table: no chain can be skipped
	default:
		p.txWait.raise(q.Space(), m, false)
	}
}

// send copies the frame in and passes it to the network. A malformed frame is dropped and counted. False: a page is
// absent; the chain is back in the ring, and the queue waits.
func (p *pair) send(q *virtq.Queue, in *vswitch.Batch) bool {
	c := &p.txc
	n := c.ReadableLen()
	why := vswitch.NoBuffer
	switch {
	case p.txSkip:
		p.txSkip = false
		why = vswitch.Unreachable
	case n < headerLen+vswitch.HeaderLen || c.WritableLen() != 0:
		why = vswitch.ShortFrame
	case n-headerLen > uint64(p.d.cfg.Pool.Largest()):
		why = vswitch.TooBig
	default:
		b := p.buffer(int(n - headerLen))
		if b == nil {
			break
		}
		if m := p.copyIn(c, b, int(n-headerLen)); m.Fault() {
			p.unpop(q, c)
			p.txWait.raise(q.Space(), m, false)
			return false
		} else if m.Kind == translate.Blocked {
			why = vswitch.Forbidden
			break
		} else if !m.OK() {
			p.d.drop(p.loop, vswitch.Unreachable)
			p.broke(q, m.Err())
			return true
		}
		if gso.Accept(p.txHeader[:], b, p.txTakes) != nil {
			why = vswitch.BadHeader
			break
		}
		// Its segmentation, where necessary, costs as much as a few frames.
		p.txCost += b.Segments() / segmentsPerFrame
		in.Input(b)
		return true
	}
	p.d.drop(p.loop, why)
	return true
}

// copyIn copies a frame of n bytes into b, and its virtio header into the pair: both are read only from the copies.
func (p *pair) copyIn(c *virtq.Chain, b *frame.Buf, n int) translate.Miss {
	b.SetLen(n)                                    // buffer has ensured the room
	if src := c.Piece(headerLen + n); src != nil { // the usual case
		p.txHeader = [headerLen]byte(src)
		copy(b.Bytes(), src[headerLen:])
		return translate.Miss{}
	}
	if _, m := c.ReadAt(p.txHeader[:], 0); !m.OK() {
		return m
	}
	_, m := c.ReadAt(b.Bytes(), headerLen)
	return m
}

// buffer sets cur to an empty buffer for n bytes and returns it: the previous frame's, unless that is still referenced;
// nil if there is none.
func (p *pair) buffer(n int) *frame.Buf {
	pool := p.d.cfg.Pool
	if b := p.cur; b != nil && !b.Shared() {
		// Small frames must not occupy the few big buffers.
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

// done returns the chain.
func (p *pair) done(q *virtq.Queue) {
	p.txOpen = false
	if err := q.Push(&p.txc, 0); err != nil {
		p.broke(q, err)
		return
	}
	p.txDirty = true
	p.hook.Arm()
}

// txFault cleans up after a memory fault interrupted Poll. If the fault was in another VM's memory, this VM's frame
// counts as sent; its chain is returned by flush, because a fault handler accesses no guest memory.
func (p *pair) txFault(f loop.Fault) {
	p.release()
	if f.Foreign {
		if p.txSent = p.txOpen; p.txSent {
			p.hook.Arm()
		}
	} else {
		p.d.fault(f)
	}
	p.txOpen = false
}

// returnSent returns the chain of a frame that another VM's fault interrupted, inside an epoch.
func (p *pair) returnSent(q *virtq.Queue) {
	if p.txSent {
		p.txSent = false
		p.done(q)
	}
}
