package frontend

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// ErrFull is returned by Add when the ring has no descriptors left.
var ErrFull = errors.New("frontend: queue is full")

// Buf is a buffer of guest memory.
type Buf struct {
	PA  translate.PA
	Len uint32
}

// Queue is the driver's side of one virtqueue, split (virtio 1.2, 2.7) or packed. One goroutine at a time may use it.
type Queue struct {
	mem   *Memory
	index int
	size  uint16

	base    translate.PA // of the whole allocation
	bytes   int
	desc    []byte         // size*16
	avail   []byte         // flags, index, ring
	ring    []byte         // used elements
	aIdx    *atomic.Uint32 // avail.flags | avail.idx<<16
	aEvent  *atomic.Uint32 // used_event, and padding
	uIdx    *atomic.Uint32 // used.flags | used.idx<<16
	uEvent  *atomic.Uint32 // avail_event, and padding
	descPA  translate.PA
	availPA translate.PA
	usedPA  translate.PA
	tables  translate.PA // indirect tables, one per descriptor; 0: none
	tabMem  []byte

	eventIdx bool
	packed   *packedRing // nil: split
	free     []uint16    // free descriptors, or ids
	chains   []chain     // by head, or id
	links    []uint16    // descriptor -> next one: the device could overwrite the ring's own copy
	next     uint16      // avail index, or place, staged chains included
	kicked   uint16      // value of next at the last kick decision
	seen     uint16      // next used entry, or place
	flags    uint16      // avail.flags

	kickFD int
	call   *eventfd.Waiter
}

type chain struct {
	token uint64
	n     uint16 // descriptors, 0: free
}

// maxIndirect is the size of an indirect table of this driver.
const maxIndirect = 16

func newQueue(m *Memory, index, size int, packed, eventIdx, indirect bool) (_ *Queue, err error) {
	q := &Queue{mem: m, index: index, size: uint16(size), eventIdx: eventIdx, kickFD: -1}
	areas := virtq.Areas(size, packed)
	dn, an, un := int(areas[0].Bytes), int(areas[1].Bytes), int(areas[2].Bytes)
	aOff := dn
	uOff := aOff + (an+2+3)&^3 // the word with used_event is written only by the driver
	end := uOff + (un+2+3)&^3
	q.bytes = end
	tOff := 0
	if indirect {
		tOff = (end + 15) &^ 15
		q.bytes = tOff + size*maxIndirect*16
	}
	if q.base, err = m.Alloc(q.bytes, pageSize); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			q.close()
		}
	}()
	all, err := m.Bytes(q.base, q.bytes)
	if err != nil {
		return nil, err
	}
	q.descPA, q.availPA, q.usedPA = q.base, q.base+translate.PA(aOff), q.base+translate.PA(uOff)
	q.desc, q.avail, q.ring = all[:dn], all[aOff:aOff+an], all[uOff:uOff+un]
	if indirect {
		q.tables, q.tabMem = q.base+translate.PA(tOff), all[tOff:]
	}
	words := []struct {
		p  **atomic.Uint32
		pa translate.PA
	}{
		{&q.aIdx, q.availPA}, {&q.uIdx, q.usedPA}, // in a packed ring, the event structures
		{&q.aEvent, q.availPA + 4 + 2*translate.PA(size)}, {&q.uEvent, q.usedPA + 4 + 8*translate.PA(size)},
	}
	if packed {
		words = words[:2]
		if err = q.initPacked(); err != nil {
			return nil, err
		}
	}
	for _, w := range words {
		// In a queue of one entry, used_event is in the upper half of a word.
		if *w.p, err = m.Uint32(w.pa &^ 3); err != nil {
			return nil, err
		}
	}
	q.chains = make([]chain, size)
	q.links = make([]uint16, size)
	q.free = make([]uint16, size)
	for i := range q.free {
		q.free[i] = uint16(size - 1 - i)
	}
	// A poller of an eventfd wakes for every read and write, so only the device uses it.
	if q.kickFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("frontend: eventfd: %w", err)
	}
	if q.call, err = eventfd.New(); err != nil {
		return nil, fmt.Errorf("frontend: %w", err)
	}
	return q, nil
}

func (q *Queue) close() {
	if q.kickFD >= 0 {
		_ = unix.Close(q.kickFD)
	}
	if q.call != nil {
		q.call.Close()
	}
	q.mem.Free(q.base, q.bytes)
}

// Index is the queue's number.
func (q *Queue) Index() int { return q.index }

// Size is the number of descriptors.
func (q *Queue) Size() int { return int(q.size) }

// Rings returns the addresses of the three areas, for tests that corrupt them.
func (q *Queue) Rings() (desc, avail, used translate.PA) { return q.descPA, q.availPA, q.usedPA }

// KickFD is the eventfd that the driver signals. The queue still owns it.
func (q *Queue) KickFD() int { return q.kickFD }

// CallFD is the eventfd that the device signals. The queue still owns it.
func (q *Queue) CallFD() int { return q.call.FD() }

func putDesc(b []byte, buf Buf, flags, next uint16) {
	binary.LittleEndian.PutUint64(b[0:8], uint64(buf.PA))
	binary.LittleEndian.PutUint32(b[8:12], buf.Len)
	binary.LittleEndian.PutUint16(b[12:14], flags)
	binary.LittleEndian.PutUint16(b[14:16], next)
}

// Descriptor flags.
const (
	flagNext     = 1
	flagWrite    = 2
	flagIndirect = 4
)

// Add stages a chain: the device reads out and writes in. It sees the chain after Kick. Get returns token. ErrFull if
// there is no room.
func (q *Queue) Add(token uint64, out, in []Buf) error {
	n := len(out) + len(in)
	if n == 0 || n > int(q.size) {
		return fmt.Errorf("frontend: queue %d: a chain of %d buffers, want 1 to %d", q.index, n, q.size)
	}
	if q.packed != nil {
		return q.addPacked(token, out, in, n)
	}
	if q.tables != 0 && n > 1 && n <= maxIndirect {
		if len(q.free) == 0 {
			return ErrFull
		}
		head := q.take()
		t := int(head) * maxIndirect * 16
		for i := range n {
			b, fl := pick(out, in, i)
			if i < n-1 {
				fl |= flagNext
			}
			putDesc(q.tabMem[t+i*16:], b, fl, uint16(i+1))
		}
		putDesc(q.desc[int(head)*16:], Buf{PA: q.tables + translate.PA(t), Len: uint32(n * 16)}, flagIndirect, 0)
		q.publish(head, token, 1)
		return nil
	}
	if len(q.free) < n {
		return ErrFull
	}
	head := q.take()
	cur := head
	for i := range n {
		b, fl := pick(out, in, i)
		var next uint16
		if i < n-1 {
			next = q.take()
			q.links[cur] = next
			fl |= flagNext
		}
		putDesc(q.desc[int(cur)*16:], b, fl, next)
		cur = next
	}
	q.publish(head, token, uint16(n))
	return nil
}

func pick(out, in []Buf, i int) (Buf, uint16) {
	if i < len(out) {
		return out[i], 0
	}
	return in[i-len(out)], flagWrite
}

func (q *Queue) take() uint16 {
	d := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	return d
}

func (q *Queue) publish(head uint16, token uint64, n uint16) {
	q.chains[head] = chain{token: token, n: n}
	binary.LittleEndian.PutUint16(q.avail[4+2*int(q.next&(q.size-1)):], head)
	q.next++
}

// Kick makes the staged chains available and notifies the device if it asked for that (2.7.13). It reports whether it
// did.
func (q *Queue) Kick() bool {
	if q.next == q.kicked {
		return false
	}
	if q.packed != nil {
		if want := q.kickPacked(); !want {
			return false
		}
		q.Notify()
		return true
	}
	q.aIdx.Store(le32(uint32(q.flags) | uint32(q.next)<<16))
	old := q.kicked
	q.kicked = q.next
	if q.eventIdx {
		ev := uint16(le32(q.uEvent.Load()))
		if q.next-ev-1 >= q.next-old {
			return false
		}
	} else if le32(q.uIdx.Load())&1 != 0 { // VIRTQ_USED_F_NO_NOTIFY
		return false
	}
	q.Notify()
	return true
}

// Notify signals the kick eventfd, even if the device did not ask for that.
func (q *Queue) Notify() {
	eventfd.Add(q.kickFD)
}

// Pending reports whether the device has returned chains that Get has not taken.
func (q *Queue) Pending() bool {
	if q.packed != nil {
		_, ok := q.used()
		return ok
	}
	return uint16(le32(q.uIdx.Load())>>16) != q.seen
}

// Get takes the next chain that the device has returned: its token and the number of bytes that the device wrote. ok is
// false if there is none.
func (q *Queue) Get() (token uint64, written uint32, ok bool, err error) {
	if q.packed != nil {
		return q.getPacked()
	}
	if !q.Pending() {
		return 0, 0, false, nil
	}
	e := q.ring[4+8*int(q.seen&(q.size-1)):]
	id := binary.LittleEndian.Uint32(e[0:4])
	written = binary.LittleEndian.Uint32(e[4:8])
	if id >= uint32(q.size) || q.chains[id].n == 0 {
		return 0, 0, false, fmt.Errorf("frontend: queue %d: device returned chain %d, which it did not have", q.index, id)
	}
	c := q.chains[id]
	q.chains[id] = chain{}
	d := uint16(id)
	for range c.n {
		q.free = append(q.free, d)
		d = q.links[d]
	}
	q.seen++
	return c.token, written, true, nil
}

// EnableCall asks the device for interrupts, or not to interrupt (off; a hint). After EnableCall(true) call Pending
// once more.
func (q *Queue) EnableCall(on bool) {
	if q.packed != nil {
		q.aIdx.Store(le32(q.event(on)))
		return
	}
	if q.eventIdx {
		ev := q.seen
		if !on {
			ev-- // as far away as possible
		}
		// used_event is the first half of its word unless an odd number of entries precedes it, as only with size 1.
		if q.size == 1 {
			old := le32(q.aEvent.Load())
			q.aEvent.Store(le32(old&0xffff | uint32(ev)<<16))
		} else {
			q.aEvent.Store(le32(uint32(ev)))
		}
		return
	}
	q.flags = 0
	if !on {
		q.flags = 1 // VIRTQ_AVAIL_F_NO_INTERRUPT
	}
	q.aIdx.Store(le32(uint32(q.flags) | uint32(q.kicked)<<16))
}

// resumeAt returns the position at which the device has to continue, as known to the driver: the used index, or, as
// VMMs send it, both places of a packed ring.
func (q *Queue) resumeAt() uint32 {
	if q.packed != nil {
		return uint32(q.seen) | uint32(q.seen)<<16
	}
	return le32(q.uIdx.Load()) >> 16
}

// stoppedAt checks the base at which the device has stopped.
func (q *Queue) stoppedAt(base uint32) error {
	if q.packed != nil {
		if base>>16 != base&0xffff || q.distance(q.seen, uint16(base)) > q.distance(q.seen, q.kicked) {
			return fmt.Errorf("frontend: queue %d stopped at %#x, with %#x available and %#x seen", q.index, base, q.kicked,
				q.seen)
		}
		return nil
	}
	if used := q.resumeAt(); base != used && base != uint32(q.kicked) {
		return fmt.Errorf("frontend: queue %d stopped at %#x, with %#x available and %#x used", q.index, base, q.kicked, used)
	}
	return nil
}

// Await calls look, and calls it again after every signal of the device until it returns true; then Await returns true.
// It returns false once the queue is closed. Unlike other methods it may run concurrently with them: look takes the
// lock that they share.
func (q *Queue) Await(look func() bool) bool { return q.call.Wait(look) == nil }

// Returned is a condition for Await: it enables interrupts and reports whether Get has a chain.
func (q *Queue) Returned() bool {
	q.EnableCall(true)
	return q.Pending()
}

// Wait sleeps until the device has returned a chain or ctx ends.
func (q *Queue) Wait(ctx context.Context) error {
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = q.call.SetDeadline(time.Unix(1, 0))
		close(ended)
	})
	defer func() {
		if !stop() {
			<-ended
			_ = q.call.SetDeadline(time.Time{})
		}
	}()
	if q.Returned() {
		return nil
	}
	if err := q.call.Wait(q.Returned); err != nil {
		if cerr := ctx.Err(); cerr != nil {
			return cerr
		}
		return fmt.Errorf("frontend: queue %d: wait for the device: %w", q.index, err)
	}
	return nil
}
