package tap

import (
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/loop"
)

// readBatch bounds the frames read at a time, so that a busy host leaves time for the loop's other ports; a large frame
// counts as one more per segmentsPerFrame segments.
const (
	readBatch        = 64
	segmentsPerFrame = 8
)

// ready reads frames from the interface into the network. The size of the next frame is not known; so where large ones
// may come, all are read into a big buffer, and small ones are copied out of it: there are few big buffers.
func (q *queue) ready() {
	t, l := q.t, q.loop
	for left := readBatch; left > 0; left-- {
		b := q.buffer()
		if b == nil {
			// The frame must leave the queue, or the loop would spin on it.
			var lost [vswitch.HeaderLen]byte
			if _, errno := read(q.fd, lost[:]); errno != 0 {
				return
			}
			t.att.Counters.Drop(l, vswitch.NoBuffer, 1)
			continue
		}
		if t.dev.header {
			b.Prepend(gso.HeaderLen)
		}
		room := b.Room()
		n, errno := read(q.fd, room)
		switch {
		case errno == unix.EINTR:
			b.Reset()
			continue
		case errno != 0: // EAGAIN; EBADFD if the interface was deleted
			b.Reset()
			q.gone(errno)
			return
		case n >= len(room) || !b.SetLen(n):
			b.Reset()
			t.att.Counters.Drop(l, vswitch.Truncated, 1)
			continue
		}
		if t.dev.header && !t.accept(b) {
			b.Reset()
			t.att.Counters.Drop(l, vswitch.BadHeader, 1)
			continue
		}
		if b.Cap() > t.cfg.Pool.Capacity() && b.Len() <= t.cfg.Pool.Capacity() {
			if q.small = t.cfg.Pool.Get(); q.small != nil {
				q.small.CopyFrom(b)
				b = q.small
			}
		}
		left -= b.Segments() / segmentsPerFrame
		t.att.Input(l, b, vswitch.Source{})
		q.done()
	}
}

// buffer sets cur to the buffer for the next frame, and returns it: a big one where large frames may come, if one is
// free; otherwise a small one, or nil if none is free.
func (q *queue) buffer() *frame.Buf {
	t, pool := q.t, q.t.cfg.Pool
	if t.dev.takes&frame.NeedGSO != 0 && (q.cur == nil || q.cur.Cap() < frame.BigCapacity) {
		if big := pool.GetFor(frame.BigCapacity); big != nil {
			if q.cur != nil {
				q.cur.Free()
			}
			q.cur = big
		}
	}
	if q.cur == nil {
		q.cur = pool.Get()
	}
	return q.cur
}

// accept removes the virtio header of a frame from the kernel. The header is right, but any program may have written
// the frame's own headers, so they are checked like a guest's.
func (t *TAP) accept(b *frame.Buf) bool {
	if b.Len() < gso.HeaderLen {
		return false
	}
	h := [gso.HeaderLen]byte(b.Bytes())
	b.TrimFront(gso.HeaderLen)
	if gso.Accept(h[:], b, t.dev.takes) != nil {
		return false
	}
	b.Offload.Valid = gso.DataValid(h[:])
	return true
}

// done drops our references; the receive buffer is used again unless a port kept a reference to it.
func (q *queue) done() {
	if q.small != nil {
		q.small.Free()
		q.small = nil
	}
	if q.cur.Shared() {
		q.cur.Free()
		q.cur = nil
	} else {
		q.cur.Reset()
	}
}

// gone stops reading if the interface was deleted: its descriptor would be ready for ever.
func (q *queue) gone(errno unix.Errno) {
	if errno != unix.EAGAIN {
		q.t.log.Error("host port disappeared", "interface", q.t.cfg.Name, "error", errno)
		q.watch.Close()
	}
}

// onFault runs after a memory fault in another port's Deliver, in its VM's memory: the frame is lost.
func (q *queue) onFault(loop.Fault) {
	if q.cur != nil {
		q.done()
	}
}

// Deliver implements vswitch.Port: it writes the frame to the interface, on any loop.
func (t *TAP) Deliver(l *loop.Loop, b *frame.Buf, _ vswitch.Destination) {
	for {
		switch t.write(l, b) {
		case 0:
		case unix.EINTR:
			continue
		case unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM:
			t.att.Counters.Drop(l, vswitch.QueueFull, b.Segments())
		case unix.EIO: // the interface is down
			t.att.Counters.Drop(l, vswitch.NotReady, b.Segments())
		default:
			t.att.Counters.Drop(l, vswitch.SendError, b.Segments())
		}
		return
	}
}

func (t *TAP) write(l *loop.Loop, b *frame.Buf) unix.Errno {
	fd := t.fds[l.ID()]
	if !t.dev.header {
		return write(fd, b.Bytes())
	}
	o := &t.out[l.ID()]
	gso.PutHeader(&o.header, b, true, 0)
	return o.write(fd, b.Bytes())
}
