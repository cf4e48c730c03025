package virtq

import (
	"fmt"
	"math"
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

// Config describes a ring.
type Config struct {
	Index int // queue index, for messages
	Size  int // entries: 1..MaxSize, and a power of two unless Packed

	// Guest physical addresses of the three areas (see Areas): descriptors, driver area, device area.
	Desc, Avail, Used translate.PA

	// Base is the position of the first chain (SET_VRING_BASE): the index of an available entry, or, in a packed ring,
	// a place.
	Base uint16

	Packed   bool // VIRTIO_F_RING_PACKED was negotiated
	EventIdx bool // VIRTIO_F_EVENT_IDX was negotiated
	Indirect bool // VIRTIO_F_INDIRECT_DESC was negotiated

	Kick int       // eventfd that the driver signals, -1 if none; owned by the caller
	Call *Notifier // to the driver; may be nil
	Err  *Notifier // signalled when the queue breaks; may be nil
}

// Queue is the device's side of one running virtqueue. split.go and packed.go have the parts specific to a layout. See
// the package comment for the permitted callers.
//
// Positions are running indices of the available and used rings, or places in the packed ring.
type Queue struct {
	space     *translate.Space
	idx       int
	size      uint16 // also fits MaxSize
	mask      uint16 // split ring only
	desc      translate.RingWindow
	avail     translate.RingWindow
	used      translate.RingWindow
	table     translate.RingWindow // the indirect table being walked
	packed    bool
	eventIdx  bool
	indirect  bool
	onlyReads bool
	kick      int
	call      *Notifier
	errfd     *Notifier

	lastAvail uint16 // next to pop
	usedNext  uint16 // next used entry to write
	usedPub   uint16 // usedNext as last published to the driver
	round     int    // the three positions wrap around here
	fresh     int    // published since the last interrupt decision
	everSig   bool   // there has been an interrupt decision

	availSeen uint16 // split: available index as last read
	usedFlags uint16 // split
	staged    []used // packed: from usedPub on; has room for a whole ring
	event     uint32 // packed: the device event structure

	retake    int          // chains that Retake may pop again
	ready     [ahead]taken // chains read ahead: [pos, have), from lastAvail on
	pos, have int

	walked uint64 // descriptors read, see Walked
	part   part   // of the chain being popped

	broken atomic.Pointer[error]

	// Scratch: stack memory passed through Space would escape to the heap.
	raw  [descSize]byte
	elem [8]byte
}

// New validates a ring's description and returns the queue. It does not access the ring, so it needs neither an epoch
// nor resident memory; it checks the addresses' alignment and overflow.
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
		desc:   space.RingWindow(c.Desc, areas[0].Bytes),
		avail:  space.RingWindow(c.Avail, areas[1].Bytes),
		used:   space.RingWindow(c.Used, areas[2].Bytes),
		packed: c.Packed, eventIdx: c.EventIdx, indirect: c.Indirect,
		kick: c.Kick, call: c.Call, errfd: c.Err,
		// In a resumed ring, all taken chains have been returned, so the device reads and writes at the same place.
		lastAvail: c.Base, usedNext: c.Base, usedPub: c.Base, availSeen: c.Base,
		round: round, event: unknown,
	}
	if c.Packed {
		q.staged = make([]used, 0, c.Size)
	}
	return q, nil
}

// Area is one of the three memory areas of a queue.
type Area struct {
	Name         string
	Bytes, Align uint64
}

// Areas describes the areas of a queue with size entries, in the order of Config (virtio 1.2, 2.7 and 2.8.10.1). In a
// packed queue the second and third are the event suppression structures.
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

// Space is the guest memory of the ring and its buffers.
func (q *Queue) Space() *translate.Space { return q.space }

// KickFD is the eventfd by which the driver announces buffers, or -1. It is valid until the device's StopQueue returns;
// the queue's user may read it but must not close it.
func (q *Queue) KickFD() int { return q.kick }

// OnlyReads declares that the device never writes to buffers of this queue. Then WRITE in a packed ring's indirect
// tables is ignored: DPDK's driver (22.11 and later) leaves it set on the headers with which its tables begin.
func (q *Queue) OnlyReads() { q.onlyReads = true }

// Base is the position from which a later queue must continue, as GET_VRING_BASE reports it: chains that were popped
// and not pushed are taken again. Call it only when the queue is no longer in use.
func (q *Queue) Base() uint16 { return q.usedNext }

// InFlight is the number of ring entries popped and not yet pushed: chains, or, in a packed ring, their descriptors.
func (q *Queue) InFlight() int { return q.between(q.usedNext, q.lastAvail) }

// between returns how far b is after a.
func (q *Queue) between(a, b uint16) int {
	if q.packed {
		return q.distance(a, b)
	}
	return int(b - a)
}

// after returns the position after a chain of n entries at a.
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

// Fail marks the queue broken for a reason of the device's own (a chain that violates the device's protocol, a page
// that vanished) and notifies the front end through the error eventfd. The first reason is kept. Any goroutine may call
// it.
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

// judge breaks the queue unless the host can repair the error.
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

// load16 reads the little-endian 16-bit word at off of an area. Go has no 16-bit atomics, so the aligned 32-bit word
// around it is loaded; it is in the same page because page sizes are multiples of four.
func (q *Queue) load16(what string, area *translate.RingWindow, off uint64) (uint16, error) {
	w, shift, m := area.Around(off)
	if !m.OK() {
		return 0, q.missed(what, m)
	}
	return uint16(le32(w.Load()) >> shift), nil
}

// Pending returns a lower bound of the number of available chains that Pop has not taken: 0 only if there is none. It
// reads the ring.
func (q *Queue) Pending() (int, error) {
	if err := q.check(); err != nil {
		return 0, err
	}
	if q.packed {
		return q.pendingPacked()
	}
	return q.pendingSplit()
}

// part bounds how much of a chain is read.
type part struct {
	need uint64 // writable bytes after which the rest is not read
	most int    // descriptors
}

// Walked returns how many descriptors Pop and PopPart have read, those of indirect tables and empty ones included: a
// measure of their time, which the guest chooses.
func (q *Queue) Walked() uint64 { return q.walked }

// PopPart is Pop for a device that writes need bytes: descriptors behind these bytes are not read, as they are not
// needed, and at most most (1 or more) descriptors are read. A chain that has too few bytes in these is cut: Chain.Cut
// reports it, and it must be given back (Unpop).
func (q *Queue) PopPart(c *Chain, need uint64, most int) (bool, error) {
	q.part = part{need, most}
	return q.pop(c)
}

// Pop takes the next available chain into c. It returns false without an error if there is none. On an error c is empty
// and the queue has not advanced; unless the error is a repairable *MissError, the queue is broken from then on.
func (q *Queue) Pop(c *Chain) (bool, error) {
	q.part = part{math.MaxUint64, math.MaxInt}
	return q.pop(c)
}

func (q *Queue) pop(c *Chain) (bool, error) {
	if q.pos == q.have {
		if ok, err := q.fetch(); !ok {
			return false, err
		}
	} else if err := q.check(); err != nil {
		return false, err
	}
	if err := q.open(c, &q.ready[q.pos]); err != nil {
		return false, err
	}
	q.pos++
	c.at = q.lastAvail
	q.lastAvail = q.after(c.at, c.entries)
	return true, nil
}

// open fills c with the chain that starts with t. On an error c is empty.
func (q *Queue) open(c *Chain, t *taken) error {
	if t.plain {
		q.walked++
		c.take(q.space, t)
		return nil
	}
	c.reset(q.space)
	if err := q.walk(c, t); err != nil {
		c.reset(q.space)
		return err
	}
	return nil
}

// taken is the start of a chain: its ring entry and first descriptor.
type taken struct {
	head  uint16
	plain bool // the chain is this one buffer
	desc  descriptor
	buf   translate.Window // its first bytes, if it is plain
}

const (
	// ahead is how many chains are read at a time: the driver's writes are in another processor's cache, and separate
	// reads would each wait for it.
	ahead = 16
	// firstBytes bounds how much of a buffer is looked up in advance.
	firstBytes = 128 << 10
)

// fetch reads the starts of the next available chains, and prefetches their first buffers. False: there are none. An
// error in a later chain is found again, and reported, when that chain is the next.
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

// lookUp checks whether the chain is its first descriptor alone, and if so prefetches the buffer.
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

// Unpop gives back c and all chains popped after it, as if they had not been popped, because the device cannot use them
// yet. None of them may have been pushed, and chains popped before them must then be pushed in order.
func (q *Queue) Unpop(c *Chain) error {
	if n := q.between(c.at, q.lastAvail); n < 1 || n > q.InFlight() || c.again {
		return fmt.Errorf("virtq: queue %d: Unpop of a chain that is not in flight", q.idx)
	}
	q.lastAvail = c.at
	q.pos, q.have = 0, 0 // they are read again
	return nil
}

// Push stages c as used, with the number of bytes written to its writable part. The driver sees it after the next
// Publish or Signal. written is limited to the chain's writable length, so that a bug in the device cannot make a
// driver read stale memory as data.
func (q *Queue) Push(c *Chain, written uint32) error {
	if err := q.check(); err != nil {
		return err
	}
	if c.cut {
		return fmt.Errorf("virtq: queue %d: Push of a chain that was not read to its end", q.idx)
	}
	if q.InFlight() < int(c.entries) {
		return fmt.Errorf("virtq: queue %d: Push of a chain that was not popped", q.idx)
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

// Publish makes all staged chains visible to the driver at once, without an interrupt.
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

// Signal publishes all staged chains and interrupts the driver if it asked for that (virtio 1.2, 2.7.7.2, 2.7.10 and
// 2.8.14).
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

// passed reports whether the entry ev was published since the last interrupt decision; true if there was none yet.
func (q *Queue) passed(ev uint16) bool {
	n := q.between(ev, q.usedPub)
	if n == 0 {
		n = q.round
	}
	return n <= q.fresh || !q.everSig
}

// Interrupt signals the driver even if it did not ask for that.
func (q *Queue) Interrupt() {
	if q.call != nil {
		q.call.Signal()
	}
}

// SetNotify asks the driver to kick when it makes buffers available (on), or not to (off; a hint). After
// SetNotify(true) call Pending: a chain made available just before is not announced.
func (q *Queue) SetNotify(on bool) error {
	if err := q.check(); err != nil {
		return err
	}
	if q.packed {
		return q.notifyPacked(on)
	}
	return q.notifySplit(on)
}

// IsRepairable reports whether err is a miss that the host can repair, after which the same call may be repeated.
func IsRepairable(err error) bool { return Absent(err).Fault() }
