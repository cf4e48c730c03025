package frame

import (
	"fmt"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/frame/header"
)

// Buf is one frame buffer: a window [off, off+len) into fixed storage, the frame's pending work, and a reference count.
type Buf struct {
	Offload Offload // read-only like the frame
	layout  header.Layout

	data  []byte // headroom and capacity; never changes
	off   int
	n     int
	refs  atomic.Int32  // owners; 1 while free, so that getting and freeing a sole reference writes nothing shared
	free  bool          // in the free list; passed on with the buffer by the list's compare-and-swap
	next  atomic.Uint32 // free list link: index+1, 0 = end
	index uint32
	pool  *Pool
}

// Bytes returns the frame. The slice is valid as long as the caller's reference.
func (b *Buf) Bytes() []byte { return b.data[b.off : b.off+b.n : b.off+b.n] }

// Len returns the frame's length in bytes.
func (b *Buf) Len() int { return b.n }

// Room returns all storage from the frame's start to the buffer's end, whatever the frame's length: a receive call
// fills it before SetLen. Only a sole owner may write to it.
func (b *Buf) Room() []byte { return b.data[b.off:] }

// Cap returns the largest length that SetLen accepts.
func (b *Buf) Cap() int { return len(b.data) - b.off }

// Headroom returns how many bytes Prepend can still add.
func (b *Buf) Headroom() int { return b.off }

// SetLen makes the frame n bytes long, exposing or hiding bytes at its end. It returns false, without effect, if n is
// negative or beyond Cap.
func (b *Buf) SetLen(n int) bool {
	if n < 0 || n > len(b.data)-b.off {
		return false
	}
	b.n = n
	b.layout.L3 = 0
	return true
}

// Prepend moves the frame's start n bytes forward and returns the new front, whose contents are undefined. It returns
// nil, without effect, if the headroom is too small or n is negative.
func (b *Buf) Prepend(n int) []byte {
	if n < 0 || n > b.off {
		return nil
	}
	b.off -= n
	b.n += n
	b.layout.L3 = 0
	return b.data[b.off : b.off+n : b.off+n]
}

// TrimFront removes n bytes from the frame's start; they become headroom. It returns false, without effect, if the
// frame is shorter than that or n is negative.
func (b *Buf) TrimFront(n int) bool {
	if n < 0 || n > b.n {
		return false
	}
	b.off += n
	b.n -= n
	b.layout.L3 = 0
	return true
}

// Append copies p to the frame's end. It returns false, without effect, if p does not fit.
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

// Around returns the frame with before bytes in front of it and behind bytes after it. Their contents are undefined,
// and they do not become part of the frame. Only a sole owner may write to them. Nil if there is no room.
func (b *Buf) Around(before, behind int) []byte {
	from, to := b.off-before, b.off+b.n+behind
	if from < 0 || to > len(b.data) {
		return nil
	}
	return b.data[from:to:to]
}

// Reset empties the buffer and restores the full headroom, as after Get.
func (b *Buf) Reset() {
	b.off, b.n = Headroom, 0
	b.Offload = Offload{}
	b.layout.L3 = 0
}

// Layout returns where the frame's headers are. The first call finds it; it holds until the frame's length or start
// changes. Frames are located before they are shared, so
// that other owners only read it.
func (b *Buf) Layout() *header.Layout {
	if b.layout.L3 == 0 {
		b.locate()
	}
	return &b.layout
}

func (b *Buf) locate() { b.layout.Locate(b.Bytes()) }

// SetLayout spares Layout the search: for a caller that has located these headers, or has written them.
func (b *Buf) SetLayout(l *header.Layout) { b.layout = *l }

// CopyFrom makes the empty buffer b a copy of a frame and its metadata. It returns false, changing nothing,
// if the frame does not fit.
func (b *Buf) CopyFrom(src *Buf) bool {
	if !b.Append(src.Bytes()) {
		return false
	}
	b.Offload, b.layout = src.Offload, src.layout
	return true
}

// Pool returns the pool for further buffers.
func (b *Buf) Pool() *Pool { return b.pool.home }

// Ref adds a reference; the caller must hold one already.
func (b *Buf) Ref() {
	if b.refs.Add(1) <= 1 || b.free {
		panic(fmt.Sprintf("frame: Ref on free buffer %d", b.index))
	}
}

// Free drops one reference; the last one returns the buffer to its pool. Freeing a free buffer panics: otherwise that
// bug would put one frame's bytes into another frame.
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

// Shared reports whether there are other references than the caller's, so that the frame must not be changed.
func (b *Buf) Shared() bool { return b.refs.Load() > 1 }
