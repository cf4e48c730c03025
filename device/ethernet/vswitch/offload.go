package vswitch

import (
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Frames keep their senders' pending work (frame.Offload) until delivery. If a port does not accept it, the frame is
// completed in software at the last moment.

// SetOffloads sets what may be left undone in frames delivered to the port from now on; frames under way may still be
// of the earlier setting. Initially it is nothing. A port that accepts large frames, but not NeedCsum, still gets large
// frames: their checksums are part of segmentation.
func (a *Attachment) SetOffloads(n frame.Need) { a.offloads.Store(uint32(n)) }

// Accepts returns what may be left undone in a frame from this port that starts with f, located in at: the
// setting of the one port that it would be delivered to, or nothing if there is not exactly one. For senders that can
// choose a frame's form. Loop thread only.
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
		need &^= frame.NeedTrain // a capture would show only its first packet, and a rate would drop all of it
	}
	return need
}

// takes reports whether the port accepts a frame as it is.
func (a *Attachment) takes(b *frame.Buf) bool {
	need := b.Offload.Need
	if b.Offload.GSOSize != 0 {
		need &^= frame.NeedCsum
	}
	return need == 0 || need&^frame.Need(a.offloads.Load()) == 0
}

// Cut delivers a frame to the port again, segmented in software: for a port that got it whole and could not use it.
func (a *Attachment) Cut(l *loop.Loop, b *frame.Buf, to Destination) {
	a.segment(l, b, to, a.port.Deliver)
}

// finish completes a frame and delivers the result to the port.
func (a *Attachment) finish(l *loop.Loop, b *frame.Buf, to Destination) {
	if b.Offload.GSOSize != 0 {
		a.segment(l, b, to, a.output)
		return
	}
	if !b.Shared() {
		// The frame is not shared: only the caller has a reference, and waits for this call.
		gso.Complete(b)
		a.output(l, b, to)
		return
	}
	c := b.Pool().GetFor(b.Len())
	if c == nil {
		a.Counters.Drop(l, NoBuffer, 1)
		return
	}
	defer c.Free() // a port may fault in a guest's memory
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
