package vswitch

import (
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Frames keep what their senders have left undone (frame.Offload) on their whole way. Only where one leaves through a
// port that does not take it so, it is finished in software.

// SetOffloads says what may be left undone in frames that the port is given, from now on; frames on their way may still
// be as they were agreed on before. At first it is nothing. A port that does not take NeedCsum gets frames to be cut
// all the same, if it takes those: their checksums are a part of that.
func (a *Attachment) SetOffloads(n frame.Need) { a.offloads.Store(uint32(n)) }

// Accepts returns what may be left undone in a frame from this port that begins with f, located in at: that of the
// one port that it would go to now, nothing if it is not one. For those who can choose in which form a frame comes.
// Loop thread only.
func (a *Attachment) Accepts(l *loop.Loop, f []byte, at *header.Layout) frame.Need {
	n := a.net
	r := n.enter(l)
	defer r.leave()
	out, _ := n.lookup(macKey(f), vlanKey(at.VLAN), uint32(l.Now()/int64(time.Second)))
	if out == nil {
		return 0
	}
	need := frame.Need(out.offloads.Load())
	if !a.unseen() || !out.unseen() || a.limits.in.unit != 0 || out.limits.out.unit != 0 {
		need &^= frame.NeedTrain // a capture would show its first packet only, and what exceeds a rate would be all of it
	}
	return need
}

// takes tells whether the port takes a frame as it is.
func (a *Attachment) takes(b *frame.Buf) bool {
	need := b.Offload.Need
	if b.Offload.GSOSize != 0 {
		need &^= frame.NeedCsum
	}
	return need == 0 || need&^frame.Need(a.offloads.Load()) == 0
}

// Cut delivers a frame to the port a second time, in segments cut in software: for a port that was given it whole and
// finds that it cannot use it so.
func (a *Attachment) Cut(l *loop.Loop, b *frame.Buf, to Destination) {
	a.segment(l, b, to, a.port.Deliver)
}

// finish does what is left to be done to a frame and gives the result to the port.
func (a *Attachment) finish(l *loop.Loop, b *frame.Buf, to Destination) {
	if b.Offload.GSOSize != 0 {
		a.segment(l, b, to, a.output)
		return
	}
	if !b.Shared() {
		// Nobody else sees it: the one reference is that of whoever brought it here, who waits for us.
		gso.Complete(b)
		a.output(l, b, to)
		return
	}
	c := b.Pool().GetFor(b.Len())
	if c == nil {
		a.Counters.Drop(l, NoBuffer, 1)
		return
	}
	defer c.Free() // a port may run into a hole in a guest's memory
	c.CopyFrom(b)
	gso.Complete(c)
	a.output(l, c, to)
}

func (a *Attachment) segment(l *loop.Loop, b *frame.Buf, to Destination,
	output func(*loop.Loop, *frame.Buf, Destination)) {
	var (
		s gso.Segmenter
		c *frame.Buf
	)
	defer func() {
		if c != nil {
			c.Free()
		}
	}()
	for s.Start(b); s.Left() > 0; {
		if c == nil {
			c = b.Pool().GetFor(b.WireLen())
		}
		if c == nil {
			a.Counters.Drop(l, NoBuffer, s.Left())
			return
		}
		c.SetLen(s.Next(c.Room()))
		c.SetLayout(b.Layout())
		output(l, c, to)
		if c.Shared() {
			c.Free()
			c = nil
		} else {
			c.Reset()
		}
	}
}
