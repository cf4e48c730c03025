package virtq

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/vnicd/vnicd/translate"
)

// Flags of the split ring (virtio 1.2, 2.7.5, 2.7.6, 2.7.8).
const (
	descNext     = 1
	descWrite    = 2
	descIndirect = 4

	availNoInterrupt = 1
	usedNoNotify     = 1

	descSize     = 16
	usedElemSize = 8
)

// MaxSize is the largest split queue that virtio allows.
const MaxSize = 32768

// Config describes a ring that is about to start.
type Config struct {
	Index int // queue index, for messages
	Size  int // entries: a power of two, 1..MaxSize

	// Guest physical addresses of the three areas. Alignment 16, 2 and 4 as
	// virtio 1.2, 2.7 demands.
	Desc, Avail, Used translate.PA

	// Base is the first available entry to be consumed (SET_VRING_BASE).
	Base uint16

	EventIdx bool // VIRTIO_F_EVENT_IDX was negotiated
	Indirect bool // VIRTIO_F_INDIRECT_DESC was negotiated

	Kick int       // eventfd that the driver signals, -1 if it does not; stays the caller's
	Call *Notifier // to the driver; may be nil
	Err  *Notifier // told when the queue breaks; may be nil
}

// Queue is the device's side of one running split virtqueue. See the package
// comment for who may call what.
type Queue struct {
	space    *translate.Space
	idx      int
	size     uint16 // MaxSize fits
	mask     uint16
	desc     translate.Window
	avail    translate.Window
	used     translate.Window
	table    translate.Window // the indirect one of the chain that is walked
	eventIdx bool
	indirect bool
	kick     int
	call     *Notifier
	errfd    *Notifier

	lastAvail uint16 // next available entry to pop
	availSeen uint16 // available index as last read
	usedNext  uint16 // next used entry to fill
	usedPub   uint16 // used index as last published
	signalled uint16 // used index at the last interrupt decision
	everSig   bool   // signalled is meaningful
	usedFlags uint16

	ready     [ahead]taken // [pos, have) begin with lastAvail: read before their turn
	pos, have int

	broken atomic.Pointer[error]

	// Scratch: passing stack memory through Space would make it escape.
	raw  [descSize]byte
	elem [usedElemSize]byte
}

// New validates a ring's description and returns the queue. It does not touch
// the ring itself, so it needs neither an epoch nor resident memory; only the
// addresses are checked, for alignment and overflow.
func New(space *translate.Space, c Config) (*Queue, error) {
	if c.Size < 1 || c.Size > MaxSize || c.Size&(c.Size-1) != 0 {
		return nil, fmt.Errorf("virtq: queue %d: size %d, want a power of two from 1 to %d", c.Index, c.Size, MaxSize)
	}
	for _, a := range []struct {
		name  string
		pa    translate.PA
		align uint64
		n     uint64
	}{
		{"descriptor table", c.Desc, 16, DescBytes(c.Size)},
		{"available ring", c.Avail, 2, AvailBytes(c.Size)},
		{"used ring", c.Used, 4, UsedBytes(c.Size)},
	} {
		if uint64(a.pa)%a.align != 0 {
			return nil, fmt.Errorf("virtq: queue %d: %s at PA %#x, want a multiple of %d", c.Index, a.name, uint64(a.pa), a.align)
		}
		if _, ok := a.pa.Add(a.n); !ok {
			return nil, fmt.Errorf("virtq: queue %d: %s at PA %#x runs past the end of the address space", c.Index, a.name, uint64(a.pa))
		}
	}
	q := &Queue{
		space: space, idx: c.Index, size: uint16(c.Size), mask: uint16(c.Size - 1),
		desc:     space.Window(c.Desc, DescBytes(c.Size)),
		avail:    space.Window(c.Avail, AvailBytes(c.Size)),
		used:     space.Window(c.Used, UsedBytes(c.Size)),
		eventIdx: c.EventIdx, indirect: c.Indirect,
		kick: c.Kick, call: c.Call, errfd: c.Err,
		lastAvail: c.Base, availSeen: c.Base,
		// In a split ring that is being resumed, everything taken has been
		// returned, so both indices stand at the same place (vhost-user,
		// SET_VRING_BASE carries only the available one).
		usedNext: c.Base, usedPub: c.Base,
	}
	return q, nil
}

// DescBytes, AvailBytes and UsedBytes are the sizes of the three areas of a
// ring with size entries, event-idx words included (virtio 1.2, 2.7).
func DescBytes(size int) uint64 { return descSize * uint64(size) }

// AvailBytes is the size of the available ring; see DescBytes.
func AvailBytes(size int) uint64 { return 6 + 2*uint64(size) }

// UsedBytes is the size of the used ring; see DescBytes.
func UsedBytes(size int) uint64 { return 6 + usedElemSize*uint64(size) }

// Index is the queue's number within its device.
func (q *Queue) Index() int { return q.idx }

// Size is the number of ring entries.
func (q *Queue) Size() int { return int(q.size) }

// Space is the guest memory in which the ring and its buffers lie.
func (q *Queue) Space() *translate.Space { return q.space }

// KickFD is the eventfd by which the driver announces buffers, or -1 if it
// never does. It is valid until the device's StopQueue returns; the queue's
// user only reads from it and never closes it.
func (q *Queue) KickFD() int { return q.kick }

// Base is the next available entry, as GET_VRING_BASE reports it. Call it only
// when the queue is no longer in use.
func (q *Queue) Base() uint16 { return q.lastAvail }

// InFlight is the number of chains popped and not yet pushed.
func (q *Queue) InFlight() int { return int(q.lastAvail - q.usedNext) }

// Broken returns the error that broke the queue, or nil.
func (q *Queue) Broken() error {
	if p := q.broken.Load(); p != nil {
		return *p
	}
	return nil
}

// Fail marks the queue broken for a reason of the device's own (a chain that
// violates the device's protocol, a page that vanished) and tells the front end
// through the error eventfd. The first reason stays. Callable from anywhere.
func (q *Queue) Fail(err error) {
	if q.broken.CompareAndSwap(nil, &err) && q.errfd != nil {
		q.errfd.Signal()
	}
}

// breakRing reports a malformed ring.
func (q *Queue) breakRing(what string, index uint32, value uint64, want string) error {
	err := &RingError{Queue: q.idx, What: what, Index: index, Value: value, Want: want}
	q.Fail(err)
	return err
}

// missed turns a miss on ring memory into an error, and breaks the queue unless
// the host can repair it.
func (q *Queue) missed(what string, m translate.Miss) error {
	return q.judge(&MissError{Queue: q.idx, What: what, Miss: m})
}

// judge breaks the queue for an error that nobody can repair.
func (q *Queue) judge(err error) error {
	if Absent(err).Kind != translate.HostFault {
		q.Fail(err)
	}
	return err
}

var errStopped = fmt.Errorf("%w earlier", ErrBroken)

func (q *Queue) check() error {
	if q.broken.Load() != nil {
		return errStopped
	}
	return nil
}

// load16 reads the little-endian 16-bit word at off of an area. Go has no 16-bit
// atomics, so the aligned 32-bit word around it is loaded; it lies in the same
// page since pages are multiples of four.
func (q *Queue) load16(what string, area *translate.Window, off uint64) (uint16, error) {
	w, shift, m := area.Around(off)
	if !m.OK() {
		return 0, q.missed(what, m)
	}
	return uint16(le32(w.Load()) >> shift), nil
}

// Pending returns how many chains the driver has made available and Pop has not
// taken. It looks at the ring.
func (q *Queue) Pending() (int, error) {
	if err := q.check(); err != nil {
		return 0, err
	}
	v, err := q.load16("available index", &q.avail, 2)
	if err != nil {
		return 0, err
	}
	n := v - q.lastAvail
	if n > q.size {
		return 0, q.breakRing("available index", 0, uint64(v), fmt.Sprintf("at most %d past %#x", q.size, q.lastAvail))
	}
	// A driver cannot own a descriptor twice: what is in flight here is not
	// available again before it has been pushed.
	if int(n)+q.InFlight() > int(q.size) {
		return 0, q.breakRing("available index", 0, uint64(v), fmt.Sprintf("no more than %d chains with %d in flight", q.size, q.InFlight()))
	}
	q.availSeen = v
	return int(n), nil
}

// Pop takes the next available chain into c. It returns false without an error
// when there is none. On an error c holds nothing and the queue has not moved;
// unless the error is a repairable *MissError the queue is broken from then on.
func (q *Queue) Pop(c *Chain) (bool, error) {
	if q.pos == q.have {
		if ok, err := q.fetch(); !ok {
			return false, err
		}
	} else if err := q.check(); err != nil {
		return false, err
	}
	t := &q.ready[q.pos]
	if t.plain {
		c.take(q.space, t)
	} else {
		c.reset(q.space)
		if err := q.walk(c, t.head, t.desc); err != nil {
			c.reset(q.space)
			return false, err
		}
	}
	q.pos++
	q.lastAvail++
	return true, nil
}

// taken is the beginning of a chain: what the ring has at an available index.
type taken struct {
	head  uint16
	plain bool // the chain is this one buffer
	desc  descriptor
	buf   translate.Window // its first bytes, if it is plain
}

const (
	// ahead is how many chains are read at a time: what the driver wrote is in another processor's cache, and one
	// after the other each would be waited for.
	ahead = 16
	// firstBytes bounds how much of a buffer is looked up before its turn.
	firstBytes = 128 << 10
)

// fetch reads the beginnings of the next available chains, and asks for their first buffers. False: there are none.
// What is wrong with one that is not the next is found again, and reported, in its turn.
func (q *Queue) fetch() (ok bool, err error) {
	q.pos, q.have = 0, 0
	n := int(q.availSeen - q.lastAvail)
	if n == 0 {
		n, err = q.Pending()
	} else {
		err = q.check()
	}
	if n == 0 || err != nil {
		return false, err
	}
	ring, table := q.avail.Bytes(4+2*uint64(q.size)), q.desc.Bytes(descSize*uint64(q.size))
	for q.have < min(n, ahead) {
		if err = q.begin(q.lastAvail+uint16(q.have), &q.ready[q.have], ring, table); err != nil {
			break
		}
		q.have++
	}
	if q.have > 0 {
		return true, nil
	}
	return false, q.judge(err)
}

// begin reads an available ring entry and the first descriptor of its chain; ring and table are nil unless each is in one piece. An
// error is the caller's to judge: it may not be that chain's turn yet.
func (q *Queue) begin(at uint16, t *taken, ring, table []byte) error {
	slot := at & q.mask
	if ring != nil {
		t.head = binary.LittleEndian.Uint16(ring[4+2*int(slot):])
	} else {
		w, shift, m := q.avail.Around(4 + 2*uint64(slot))
		if !m.OK() {
			return &MissError{Queue: q.idx, What: "available ring entry", Miss: m}
		}
		t.head = uint16(le32(w.Load()) >> shift)
	}
	if t.head >= q.size {
		return &RingError{Queue: q.idx, What: "available ring entry", Index: uint32(slot), Value: uint64(t.head), Want: fmt.Sprintf("below %d", q.size)}
	}
	d := &t.desc
	if table != nil {
		d.decode(table[descSize*int(t.head):])
	} else if m := q.readDesc(&q.desc, uint32(t.head), d); !m.OK() {
		return &MissError{Queue: q.idx, What: "descriptor", Miss: m}
	}
	_, inside := d.addr.Add(uint64(d.len))
	if t.plain = d.flags&^descWrite == 0 && d.len > 0 && inside; t.plain {
		t.buf = q.space.Window(d.addr, min(uint64(d.len), firstBytes))
		t.buf.Prefetch(d.flags&descWrite != 0)
	} else {
		q.space.Prefetch(d.addr, d.flags&descWrite != 0)
	}
	return nil
}

// Unpop gives back the last n chains popped, as if they had not been: the
// device found that it cannot use them yet. None of them may have been pushed,
// and no chain popped before them may be pushed out of their order meanwhile.
func (q *Queue) Unpop(n int) error {
	if n < 0 || n > q.InFlight() {
		return fmt.Errorf("virtq: queue %d: cannot give back %d chains, %d are in flight", q.idx, n, q.InFlight())
	}
	q.lastAvail -= uint16(n)
	if q.pos -= n; q.pos < 0 {
		q.pos, q.have = 0, 0 // they are read anew
	}
	return nil
}

// Push stages c as used, with the number of bytes written to its writable part.
// The driver sees it after the next Publish or Signal. written is clamped to
// the chain's writable length, so a device's mistake cannot make a driver read
// stale memory as data.
func (q *Queue) Push(c *Chain, written uint32) error {
	if err := q.check(); err != nil {
		return err
	}
	if q.InFlight() == 0 {
		return fmt.Errorf("virtq: queue %d: a chain was pushed that was not popped", q.idx)
	}
	if uint64(written) > c.writeLen {
		written = uint32(c.writeLen)
	}
	binary.LittleEndian.PutUint64(q.elem[:], uint64(written)<<32|uint64(c.head))
	if m := q.used.Write8(4+usedElemSize*uint64(q.usedNext&q.mask), &q.elem); !m.OK() {
		return q.missed("used ring entry", m)
	}
	q.usedNext++
	return nil
}

// Publish makes all staged chains visible to the driver at once, without an
// interrupt.
func (q *Queue) Publish() error {
	if err := q.check(); err != nil {
		return err
	}
	if q.usedPub == q.usedNext {
		return nil
	}
	if err := q.storeUsed(q.usedNext); err != nil {
		return err
	}
	q.usedPub = q.usedNext
	return nil
}

// storeUsed writes flags and index of the used ring, both the device's, in one
// store that orders the entries before it and the reads of event words after it.
func (q *Queue) storeUsed(idx uint16) error {
	w, m := q.used.Uint32(0)
	if !m.OK() {
		return q.missed("used index", m)
	}
	w.Store(le32(uint32(q.usedFlags) | uint32(idx)<<16))
	return nil
}

// Signal publishes all staged chains and interrupts the driver if it asked for
// that (virtio 1.2, 2.7.7.2 and 2.7.10).
func (q *Queue) Signal() error {
	if err := q.Publish(); err != nil {
		return err
	}
	if q.everSig && q.signalled == q.usedPub {
		return nil
	}
	want := true
	if q.eventIdx {
		ev, err := q.load16("used event index", &q.avail, 4+2*uint64(q.size))
		if err != nil {
			return err
		}
		if q.everSig {
			// vring_need_event: did the index pass ev since the last decision?
			want = q.usedPub-ev-1 < q.usedPub-q.signalled
		}
	} else {
		fl, err := q.load16("available flags", &q.avail, 0)
		if err != nil {
			return err
		}
		want = fl&availNoInterrupt == 0
	}
	q.signalled, q.everSig = q.usedPub, true
	if want && q.call != nil {
		q.call.Signal()
	}
	return nil
}

// Interrupt signals the driver whether it asked for that or not.
func (q *Queue) Interrupt() {
	if q.call != nil {
		q.call.Signal()
	}
}

// SetNotify asks the driver to kick when it makes buffers available (on), or
// not to bother (off; a hint). After SetNotify(true) look once more with
// Pending: a chain that was made available just before is not announced.
func (q *Queue) SetNotify(on bool) error {
	if err := q.check(); err != nil {
		return err
	}
	if q.eventIdx {
		if !on {
			return nil // the driver kicks once per round of the index at most
		}
		return q.storeAvailEvent(q.lastAvail)
	}
	fl := uint16(0)
	if !on {
		fl = usedNoNotify
	}
	if fl == q.usedFlags {
		return nil
	}
	q.usedFlags = fl
	return q.storeUsed(q.usedPub)
}

// storeAvailEvent writes the word behind the used entries. The other half of
// its aligned word is not the device's, hence compare-and-swap; the bound keeps
// a guest that rewrites its half all the time from holding the loop.
func (q *Queue) storeAvailEvent(v uint16) error {
	w, _, m := q.used.Around(4 + usedElemSize*uint64(q.size))
	if !m.OK() {
		return q.missed("available event index", m)
	}
	for range 64 {
		old := w.Load()
		if w.CompareAndSwap(old, le32(le32(old)&0xffff0000|uint32(v))) {
			return nil
		}
	}
	return q.breakRing("available event index", 0, uint64(v), "a word that the driver leaves alone")
}

// IsRepairable tells whether err is a miss that the host can repair, after
// which the same call may be repeated.
func IsRepairable(err error) bool { return Absent(err).Fault() }

// Resume reads the used index and continues from it. A front end that lost its
// back end knows only that index and hands it over as the base; where the two
// differ, chains were taken and never returned, and they are taken again (the
// devices here return chains in the order in which they took them). Call it
// once, before the first Pop. It returns whether the base had to be changed.
func (q *Queue) Resume() (bool, error) {
	v, err := q.load16("used index", &q.used, 2)
	if err != nil {
		return false, err
	}
	changed := v != q.lastAvail
	q.lastAvail, q.availSeen, q.usedNext, q.usedPub = v, v, v, v
	q.pos, q.have = 0, 0
	return changed, nil
}
