package virtq

import (
	"fmt"
	"sync/atomic"

	"github.com/vnicd/vnicd/translate"
)

// Flags of descriptors, the same in both layouts (virtio 1.2, 2.7.5 and 2.8).
const (
	descNext     = 1
	descWrite    = 2
	descIndirect = 4

	descSize = 16
)

// MaxSize is the largest queue that virtio allows.
const MaxSize = 32768

// Config describes a ring that is about to start.
type Config struct {
	Index int // queue index, for messages
	Size  int // entries: 1..MaxSize, and a power of two unless Packed

	// Guest physical addresses of the three areas (see Areas): the descriptors, what the driver writes
	// beside them, and what the device writes.
	Desc, Avail, Used translate.PA

	// Base is where the first chain is to be taken (SET_VRING_BASE): the index of an available entry, or, in a packed
	// ring, a place.
	Base uint16

	Packed   bool // VIRTIO_F_RING_PACKED was negotiated
	EventIdx bool // VIRTIO_F_EVENT_IDX was negotiated
	Indirect bool // VIRTIO_F_INDIRECT_DESC was negotiated

	Kick int       // eventfd that the driver signals, -1 if it does not; stays the caller's
	Call *Notifier // to the driver; may be nil
	Err  *Notifier // told when the queue breaks; may be nil
}

// Queue is the device's side of one running virtqueue. What the two layouts have in common is here; split.go and
// packed.go are what they have not. See the package comment for who may call what.
//
// Where the device stands is said by running indices of the available and used rings, or by places in the packed ring.
type Queue struct {
	space     *translate.Space
	idx       int
	size      uint16 // MaxSize fits
	mask      uint16 // of a split ring
	desc      translate.Window
	avail     translate.Window
	used      translate.Window
	table     translate.Window // the indirect one of the chain that is walked
	packed    bool
	eventIdx  bool
	indirect  bool
	onlyReads bool
	kick      int
	call      *Notifier
	errfd     *Notifier

	lastAvail uint16 // next to pop
	usedNext  uint16 // next used entry to fill
	usedPub   uint16 // what the driver sees: usedNext as last published
	round     int    // where the three begin again
	fresh     int    // published since the last interrupt decision
	everSig   bool   // there has been one

	availSeen uint16 // split: available index as last read
	usedFlags uint16 // split
	staged    []used // packed: from usedPub on; there is room for as many as fit the ring
	event     uint32 // packed: the device event structure

	ready     [ahead]taken // [pos, have) begin with lastAvail: read before their turn
	pos, have int

	broken atomic.Pointer[error]

	// Scratch: passing stack memory through Space would make it escape.
	raw  [descSize]byte
	elem [8]byte
}

// New validates a ring's description and returns the queue. It does not touch
// the ring itself, so it needs neither an epoch nor resident memory; only the
// addresses are checked, for alignment and overflow.
func New(space *translate.Space, c Config) (*Queue, error) {
	switch {
	case c.Size < 1 || c.Size > MaxSize:
		return nil, fmt.Errorf("virtq: queue %d: size %d, want 1 to %d", c.Index, c.Size, MaxSize)
	case !c.Packed && c.Size&(c.Size-1) != 0:
		return nil, fmt.Errorf("virtq: queue %d: size %d, want a power of two from 1 to %d", c.Index, c.Size, MaxSize)
	case c.Packed && int(c.Base&^wrapBit) >= c.Size:
		return nil, fmt.Errorf("virtq: queue %d: base %#x lies beyond %d descriptors", c.Index, c.Base, c.Size)
	}
	areas, round := Areas(c.Size, c.Packed), 1<<16
	if c.Packed {
		round = 2 * c.Size
	}
	for i, pa := range [3]translate.PA{c.Desc, c.Avail, c.Used} {
		a := &areas[i]
		if uint64(pa)%a.Align != 0 {
			return nil, fmt.Errorf("virtq: queue %d: %s at PA %#x, want a multiple of %d", c.Index, a.Name, uint64(pa), a.Align)
		}
		if _, ok := pa.Add(a.Bytes); !ok {
			return nil, fmt.Errorf("virtq: queue %d: %s at PA %#x runs past the end of the address space", c.Index, a.Name,
				uint64(pa))
		}
	}
	q := &Queue{
		space: space, idx: c.Index, size: uint16(c.Size), mask: uint16(c.Size - 1),
		desc:   space.Window(c.Desc, areas[0].Bytes),
		avail:  space.Window(c.Avail, areas[1].Bytes),
		used:   space.Window(c.Used, areas[2].Bytes),
		packed: c.Packed, eventIdx: c.EventIdx, indirect: c.Indirect,
		kick: c.Kick, call: c.Call, errfd: c.Err,
		// In a ring that is being resumed, everything taken has been returned, so
		// the device reads and writes at the same place.
		lastAvail: c.Base, usedNext: c.Base, usedPub: c.Base, availSeen: c.Base,
		round: round, event: unknown,
	}
	if c.Packed {
		q.staged = make([]used, 0, c.Size)
	}
	return q, nil
}

// Area is one of the three stretches of memory that a queue consists of.
type Area struct {
	Name         string
	Bytes, Align uint64
}

// Areas describes the areas of a queue with size entries, in the order of Config (virtio 1.2, 2.7 and 2.8.10.1). In a
// packed queue the two behind the descriptors are the event suppression structures.
func Areas(size int, packed bool) [3]Area {
	desc := descSize * uint64(size)
	if packed {
		return [3]Area{{"descriptor ring", desc, 16}, {"driver event structure", 4, 4}, {"device event structure", 4, 4}}
	}
	n := uint64(size)
	return [3]Area{{"descriptor table", desc, 16}, {"available ring", 6 + 2*n, 2}, {"used ring", 6 + usedElemSize*n, 4}}
}

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

// OnlyReads says that the device writes into no buffer of this queue. Then WRITE in a packed ring's indirect tables is
// not believed: DPDK's driver (22.11, and later ones) leaves it set on the headers with which its tables begin.
func (q *Queue) OnlyReads() { q.onlyReads = true }

// Base is where a queue that takes this one up has to begin, as GET_VRING_BASE reports it: what was popped and not
// pushed is taken again. Call it only when the queue is no longer in use.
func (q *Queue) Base() uint16 { return q.usedNext }

// InFlight is how much of the ring was popped and not yet pushed: chains, or, in a packed ring, their descriptors.
func (q *Queue) InFlight() int { return q.between(q.usedNext, q.lastAvail) }

// between is how far b lies behind a.
func (q *Queue) between(a, b uint16) int {
	if q.packed {
		return q.distance(a, b)
	}
	return int(b - a)
}

// after is what lies one chain of n entries behind a.
func (q *Queue) after(a, n uint16) uint16 {
	if q.packed {
		return q.forward(a, int(n))
	}
	return a + 1
}

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

// Pending returns how many chains the driver has made available at least, and Pop has not
// taken: 0 if there is none. It looks at the ring.
func (q *Queue) Pending() (int, error) {
	if err := q.check(); err != nil {
		return 0, err
	}
	if q.packed {
		return q.pendingPacked()
	}
	return q.pendingSplit()
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
		if err := q.walk(c, t); err != nil {
			c.reset(q.space)
			return false, err
		}
	}
	q.pos++
	c.at = q.lastAvail
	q.lastAvail = q.after(c.at, c.entries)
	return true, nil
}

// taken is the beginning of a chain: what the ring has at its place.
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
	if err := q.check(); err != nil {
		return false, err
	}
	if q.packed {
		err = q.fetchPacked()
	} else {
		err = q.fetchSplit()
	}
	if q.have > 0 || err == nil {
		return q.have > 0, nil
	}
	return false, q.judge(err)
}

// lookUp tells whether the chain is its first descriptor alone, and has the processor fetch the buffer.
func (t *taken) lookUp(s *translate.Space) {
	d := &t.desc
	_, inside := d.addr.Add(uint64(d.len))
	if t.plain = d.flags&^descWrite == 0 && d.len > 0 && inside; t.plain {
		t.buf = s.Window(d.addr, min(uint64(d.len), firstBytes))
		t.buf.Prefetch(d.flags&descWrite != 0)
	} else {
		s.Prefetch(d.addr, d.flags&descWrite != 0)
	}
}

// Unpop gives back c and all that was popped after it, as if they had not been: the
// device found that it cannot use them yet. None of them may have been pushed,
// and no chain popped before them may be pushed out of their order meanwhile.
func (q *Queue) Unpop(c *Chain) error {
	if n := q.between(c.at, q.lastAvail); n < 1 || n > q.InFlight() {
		return fmt.Errorf("virtq: queue %d: a chain is given back that is not in flight", q.idx)
	}
	q.lastAvail = c.at
	q.pos, q.have = 0, 0 // they are read anew
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
	if q.InFlight() < int(c.entries) {
		return fmt.Errorf("virtq: queue %d: a chain was pushed that was not popped", q.idx)
	}
	if uint64(written) > c.writeLen {
		written = uint32(c.writeLen)
	}
	if q.packed {
		q.staged = append(q.staged, used{q.usedNext, c.head, c.entries, written})
	} else if m := q.useSplit(c, written); !m.OK() {
		return q.missed("used ring entry", m)
	}
	q.usedNext = q.after(q.usedNext, c.entries)
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
	if q.packed {
		if m := q.showPacked(); !m.OK() {
			return q.missed("used descriptor", m)
		}
	} else if err := q.storeUsed(q.usedNext); err != nil {
		return err
	}
	q.fresh += q.between(q.usedPub, q.usedNext)
	q.usedPub = q.usedNext
	return nil
}

// Signal publishes all staged chains and interrupts the driver if it asked for
// that (virtio 1.2, 2.7.7.2, 2.7.10 and 2.8.14).
func (q *Queue) Signal() error {
	if err := q.Publish(); err != nil {
		return err
	}
	if q.everSig && q.fresh == 0 {
		return nil
	}
	var want bool
	var err error
	if q.packed {
		want, err = q.wantedPacked()
	} else {
		want, err = q.wantedSplit()
	}
	if err != nil {
		return err
	}
	q.fresh, q.everSig = 0, true
	if want && q.call != nil {
		q.call.Signal()
	}
	return nil
}

// passed tells whether what was published since the last decision includes the entry ev; nobody knows before the first.
func (q *Queue) passed(ev uint16) bool {
	n := q.between(ev, q.usedPub)
	if n == 0 {
		n = q.round
	}
	return n <= q.fresh || !q.everSig
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
	if q.packed {
		return q.notifyPacked(on)
	}
	return q.notifySplit(on)
}

// IsRepairable tells whether err is a miss that the host can repair, after
// which the same call may be repeated.
func IsRepairable(err error) bool { return Absent(err).Fault() }
