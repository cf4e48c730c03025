package vnet

import (
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/translate"
)

// Absent pages (PF-17). A queue that meets an absent page waits for the host driver, alone: the other queues of the
// device and of the loop continue. Transmit leaves its chain in the ring; receive keeps a bounded number of frames. The
// ring memory stays resident while a queue runs.

// heldFrames and heldBytes bound the frames that a waiting receive queue keeps.
const (
	heldFrames = 64
	heldBytes  = 1 << 20
)

// waiter is one queue that may wait. The loop owns it, except for the fault.
type waiter struct {
	fault   translate.Fault
	waiting bool
	resume  func(ok bool) // ok: the page is present now
}

// served is the host driver's answer in the pair's mailbox.
type served struct {
	w  *waiter
	ok bool
}

func (w *waiter) init(p *pair, resume func(ok bool)) {
	w.resume = resume
	w.fault.Done = func(_ *translate.Fault, err error) {
		// There is room: each waiter has at most one fault under way, and one that a stopped queue left in the mailbox.
		p.wakeups.Put(served{w, err == nil})
	}
}

// raise makes the queue wait for m. If the fault of an earlier queue is still under way, its end wakes this one.
func (w *waiter) raise(s *translate.Space, m translate.Miss, write bool) {
	w.waiting = true
	if !w.fault.Waiting() {
		w.fault.Miss, w.fault.Write = m, write
		s.Faults().Raise(&w.fault)
	}
}

// wakeup runs on the pair's loop when a fault has been served.
func (p *pair) wakeup(s served) {
	if s.w.waiting {
		s.w.waiting = false
		s.w.resume(s.ok)
	}
}

// hold keeps a frame until the receive queue resumes.
func (p *pair) hold(b *frame.Buf) {
	if len(p.held) == heldFrames || p.heldBytes+b.Len() > heldBytes {
		p.d.drop(p.loop, vswitch.QueueFull)
		return
	}
	b.Ref()
	p.held = append(p.held, b)
	p.heldBytes += b.Len()
}

// resumeRx delivers the held frames. If the page cannot be restored, the frame that needed it is dropped.
func (p *pair) resumeRx(ok bool) {
	if !ok && len(p.held) > 0 {
		p.d.drop(p.loop, vswitch.Unreachable)
		p.unhold().Free()
	}
	for len(p.held) > 0 {
		b := p.held[0]
		q := p.rx
		if q == nil || q.Broken() != nil {
			p.d.drop(p.loop, vswitch.NotReady)
		} else if !p.deliver(q, b) {
			return
		}
		p.unhold().Free()
	}
}

// unhold removes the oldest frame from the list; the caller gets the reference.
func (p *pair) unhold() *frame.Buf {
	b := p.held[0]
	p.heldBytes -= b.Len()
	p.held = append(p.held[:0], p.held[1:]...)
	return b
}

// dropHeld drops the held frames when a receive queue stops.
func (p *pair) dropHeld() {
	p.rxWait.waiting = false
	for _, b := range p.held {
		p.d.drop(p.loop, vswitch.NotReady)
		b.Free()
	}
	p.held, p.heldBytes = p.held[:0], 0
}

// resumeTx lets Poll continue. If the page cannot be restored, the chain that needed it is returned unsent; if the
// chain cannot be read, the queue is broken.
func (p *pair) resumeTx(ok bool) { p.txSkip = !ok }
