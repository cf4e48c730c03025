package frame

import (
	"fmt"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/frame/header"
)

// Buf is one frame buffer: a window [off, off+len) into fixed storage, what is still to be done to the frame, and a
// reference count.
type Buf struct {
	Offload Offload // read-only as the frame is
	layout  header.Layout

	data  []byte // headroom and capacity; never changes
	off   int
	n     int
	refs  atomic.Int32  // owners; 1 while free, so that taking and freeing a sole reference writes nothing shared
	free  bool          // in the free list; handed on with the buffer by the list's compare-and-swap
	next  atomic.Uint32 // free list link: index+1, 0 = end
	index uint32
	pool  *Pool
}

// Bytes returns the frame. The slice is valid as long as the caller's reference.
func (b *Buf) Bytes() []byte { return b.data[b.off : b.off+b.n : b.off+b.n] }

// Len returns the frame's length in bytes.
func (b *Buf) Len() int { return b.n }

// Room returns all storage from the frame's start to the buffer's end, whatever the length is now: what a receive
// call fills before SetLen. Only a sole owner may write to it.
func (b *Buf) Room() []byte { return b.data[b.off:] }

// Cap returns the largest length that SetLen takes.
func (b *Buf) Cap() int { return len(b.data) - b.off }

// Headroom returns how many bytes Prepend can still add.
func (b *Buf) Headroom() int { return b.off }

// SetLen makes the frame n bytes long, uncovering or hiding bytes at its end. It returns false, changing nothing,
// when n is negative or beyond Cap.
func (b *Buf) SetLen(n int) bool {
	if n < 0 || n > len(b.data)-b.off {
		return false
	}
	b.n = n
	b.layout.L3 = 0
	return true
}

// Prepend moves the frame's start n bytes forward and returns the new front, whose contents are undefined. It
// returns nil, changing nothing, when the headroom is too small or n is negative.
func (b *Buf) Prepend(n int) []byte {
	if n < 0 || n > b.off {
		return nil
	}
	b.off -= n
	b.n += n
	b.layout.L3 = 0
	return b.data[b.off : b.off+n : b.off+n]
}

// TrimFront removes n bytes from the frame's start; they become headroom. It returns false, changing nothing, when
// the frame is shorter than that or n is negative.
func (b *Buf) TrimFront(n int) bool {
	if n < 0 || n > b.n {
		return false
	}
	b.off += n
	b.n -= n
	b.layout.L3 = 0
	return true
}

// Append copies p behind the frame. It returns false, changing nothing, when p does not fit.
func (b *Buf) Append(p []byte) bool {
	end := b.off + b.n
	if len(p) > len(b.data)-end {
		return false
	}
	copy(b.data[end:], p)
	b.n += len(p)
	b.layout.L3 = 0
	return true
}

// Around returns the frame with so many bytes in front of it and behind it, whose contents are undefined and which do
// not become part of it. Only a sole owner may write to them. Nil if there is no such room.
func (b *Buf) Around(before, behind int) []byte {
	from, to := b.off-before, b.off+b.n+behind
	if from < 0 || to > len(b.data) {
		return nil
	}
	return b.data[from:to:to]
}

// Reset makes the buffer empty with full headroom again, as Get returns it.
func (b *Buf) Reset() {
	b.off, b.n = Headroom, 0
	b.Offload = Offload{}
	b.layout.L3 = 0
}

// Layout returns where the frame's headers are. The first call finds it; it holds until the frame's length or start
// changes. A frame enters a network located, so whoever shares it only reads.
func (b *Buf) Layout() *header.Layout {
	if b.layout.L3 == 0 {
		b.locate()
	}
	return &b.layout
}

func (b *Buf) locate() { b.layout.Locate(b.Bytes()) }

// SetLayout spares Layout the search: for a caller that has located these headers, or has written them.
func (b *Buf) SetLayout(l *header.Layout) { b.layout = *l }

// CopyFrom makes the empty buffer b a copy of a frame, with what is known of it. It returns false, changing nothing,
// if the frame does not fit.
func (b *Buf) CopyFrom(src *Buf) bool {
	if !b.Append(src.Bytes()) {
		return false
	}
	b.Offload, b.layout = src.Offload, src.layout
	return true
}

// Pool returns the pool to take further buffers from.
func (b *Buf) Pool() *Pool { return b.pool.home }

// Ref adds a reference; the caller must hold one already.
func (b *Buf) Ref() {
	if b.refs.Add(1) <= 1 || b.free {
		panic(fmt.Sprintf("frame: Ref on free buffer %d", b.index))
	}
}

// Free gives one reference back; with the last one the buffer returns to its pool. Freeing a free buffer panics:
// it is a bug that would otherwise show up as one frame's bytes inside another's.
func (b *Buf) Free() {
	if b.refs.Load() != 1 {
		switch n := b.refs.Add(-1); {
		case n > 0:
			return
		case n < 0:
			panic(fmt.Sprintf("frame: Free on free buffer %d", b.index))
		}
		b.refs.Store(1)
	}
	if b.free {
		panic(fmt.Sprintf("frame: Free on free buffer %d", b.index))
	}
	b.free = true
	b.pool.put(b)
}

// Shared tells whether somebody besides the caller holds a reference, so that the frame must not be changed.
func (b *Buf) Shared() bool { return b.refs.Load() > 1 }
