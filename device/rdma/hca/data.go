// Side: data

package hca

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/journal"
	"github.com/vnicd/vnicd/translate"
)

var le = binary.LittleEndian

// DataPath selects optional parts of the data path. The peer sees valid RoCE whatever is selected.
type DataPath struct {
	// LocalCopy copies from memory to memory between two QPs of one loop. Without it they exchange frames.
	LocalCopy bool
	// ECN enables congestion control of RC by ECN marks and CNPs (IBTA A17.9). Without it loss is the only congestion
	// signal.
	ECN bool
	// SelectiveRepeat retransmits only lost packets if the peer of an RC QP is a vnicd. Without it, and to other peers, a
	// loss resends the whole window (go-back-N).
	SelectiveRepeat bool
}

// DefaultDataPath selects everything.
func DefaultDataPath() *DataPath { return &DataPath{LocalCopy: true, ECN: true, SelectiveRepeat: true} }

// dataSide is the part of a Device that loops use: engines, queue pairs, guest memory, and snapshots of the control
// side's decisions. It implements the HCA face of a vswitch.VMPort.
//
// The data side uses nothing that the control side declares, and never calls it (TestSides). Control makes the data
// side's objects and reaches them in one of three ways: before they are published, on their loop (Loop.Do), or through
// atomics.
type dataSide struct {
	// Set before the engines start.
	mac      [6]byte
	pool     *frame.Pool
	mtu      func() int // of the tenant's network (Ethernet payload)
	options  DataPath
	rdAtomic int    // outstanding READs and atomics of a QP, either side
	pace     *pacer // nil: no limit
	log      hclog.Logger
	engines  []*engine
	byLoop   [loop.MaxLoops]*engine
	async    *eventQueue
	ceqs     []*eventQueue

	// Set by control, read by loops.
	port       atomic.Pointer[Port]
	up         atomic.Bool // a driver runs the device; an engine clears it when it sets broken
	paused     atomic.Bool // the VM is paused with queue pairs: engines are frozen, and hold the peers (CO-3)
	link       atomic.Bool
	gids       gidTable
	ahs        atomic.Pointer[ahTable]
	groups     atomic.Pointer[mcastTable]
	faultDelay atomic.Int64         // smoothed time in which the guest's driver serves a fault, ns
	qps        []atomic.Pointer[qp] // by index
	numbers    []atomic.Pointer[qp] // the same, by the low bits of the QP number; the length is a power of two

	// Set by loops, read by control.
	journal    atomic.Pointer[journal.Journal] // nil: none, or it is of no use any more
	broken     atomic.Bool                     // see stopped; a reset clears it
	cqFailures atomic.Uint64
	meter      loop.Meter // the loops' time for this device
	rejected   rejectCounts
	conns      connections
	// faultCounts has an element for each side of each QP index (see guestFault's
	// token), which belongs to the engine of the QP that has the index.
	faultCounts []uint32

	// The guest's memory: set by the connection before any queue or object exists.
	mem atomic.Pointer[translate.Space]
	vm  *translate.VM
}

var _ interface {
	vswitch.HCAFace
	vswitch.Inspector
} = (*dataSide)(nil)

// init creates engines, event queues and tables for the given numbers of completion event queues and queue pairs.
func (d *dataSide) init(loops []*loop.Loop, ceqs, qps int) {
	for i, l := range loops {
		e := newEngine(d, i, l)
		d.engines = append(d.engines, e)
		d.byLoop[l.ID()] = e
	}
	d.async = d.newEventQueue(abi.EventQueue)
	for i := range ceqs {
		d.ceqs = append(d.ceqs, d.newEventQueue(abi.CEQQueue(i)))
	}
	d.qps = make([]atomic.Pointer[qp], qps+firstQPIndex)
	d.numbers = make([]atomic.Pointer[qp], qpPlaces(len(d.qps)))
	d.faultCounts = make([]uint32, 2*len(d.qps))
	d.conns.table = cm.NewTable(2 * qps)
	d.link.Store(true)
}

// Paused implements vswitch.HCAFace: the VM is paused, so the device takes RoCE frames, but its driver does not run.
func (d *dataSide) Paused() bool { return d.paused.Load() && !d.up.Load() }

// Up implements vswitch.HCAFace: it reports whether a driver runs the device, so that the HCA takes RoCE frames. A
// paused VM has a driver.
func (d *dataSide) Up() bool { return d.up.Load() || d.paused.Load() }

func (d *dataSide) space() *translate.Space { return d.mem.Load() }

// qpAt returns the QP at an index of the table, nil if there is none.
func (d *dataSide) qpAt(i int) *qp {
	if i < 0 || i >= len(d.qps) {
		return nil
	}
	return d.qps[i].Load()
}

// stopped stops the device until a reset: the guest's memory has vanished, or a control goroutine met a bug. Any
// thread.
func (d *dataSide) stopped(why error, args ...any) {
	if d.broken.Swap(true) {
		return
	}
	d.up.Store(false)
	if errors.Is(why, translate.ErrMemoryGone) {
		d.log.Error("guest memory disappeared; device stopped until reset", append([]any{"fault", why}, args...)...)
		return
	}
	d.log.Error("device stopped until reset by a bug in vnicd; please report it", append([]any{"error", why}, args...)...)
}

// publish lets loops find the QP, withdraw ends that.
func (d *dataSide) publish(q *qp) {
	d.qps[q.index].Store(q)
	d.numbers[d.numberPlace(q.n)].Store(q)
}

func (d *dataSide) withdraw(q *qp) {
	d.numbers[d.numberPlace(q.n)].Store(nil)
	d.qps[q.index].Store(nil)
}

// qpPlaces returns the length of numbers for n QPs: a power of two, at most two thirds of which are used, so that a
// free place is found at random.
func qpPlaces(n int) int { return 1 << bits.Len(uint(n*3/2)) }

// numberPlace returns the place of a QP number in numbers.
func (d *dataSide) numberPlace(n uint32) int { return int(n) & (len(d.numbers) - 1) }

// wakeAll wakes every engine to check device-wide state.
func (d *dataSide) wakeAll() {
	for _, e := range d.engines {
		e.wake()
	}
}
