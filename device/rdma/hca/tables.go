// Side: control

package hca

import (
	crand "crypto/rand"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/translate"
)

// pd is a protection domain.
type pd struct {
	refs int // QPs, SRQs, MRs and MWs
}

// An object below belongs to a handle of the guest: the data side's queue, and the fields that only the control side
// needs.

// cqObject is a completion queue.
type cqObject struct {
	q     *cq
	owner *engine // its loop writes the completions; nil until the first QP uses it
	refs  int     // QPs
	ring  held
	arm   held
	cost  cost
	word  int         // in the journal, if there is one
	timer *loop.Timer // for moderation; nil: there was none yet
}

// moderate delays the CQ's events (abi.ModifyCQ).
func (o *cqObject) moderate(count, period uint16) {
	if count < 2 || period == 0 {
		o.q.moderate(nil)
		return
	}
	if o.timer == nil {
		o.timer = o.q.newModerationTimer()
	}
	o.q.moderate(&moderation{count, period, o.timer})
}

// drop ends what a CQ that no QP uses holds, and credits it.
func (o *cqObject) drop(a *translate.Account) {
	o.ring.drop()
	o.arm.drop()
	o.cost.credit(a)
}

// srqObject is a shared receive queue.
type srqObject struct {
	q     *srq
	pdn   uint32
	owner *engine // its loop fetches the requests; nil until the first QP uses it
	refs  int     // QPs
	cost  cost
}

// qpObject is a queue pair.
type qpObject struct {
	q     *qp
	uses  qpParts
	bells *engine // the engine of its doorbell: where it was created
	mcast int     // groups
	cost  cost
}

// lingering is a destroyed QP whose memory is still in use.
type lingering struct {
	q    *qp
	cost cost
}

// tables are the guest's objects, by number. Device.mu guards them; only the
// command goroutine and Reset change them.
type tables struct {
	conn virtio.Conn
	vm   *translate.VM

	pds  map[uint32]*pd
	cqs  map[uint32]*cqObject
	srqs map[uint32]*srqObject
	// mrs and mws map every region and window to its PD, for the PD's reference count.
	mrs, mws map[uint32]uint32

	lastPD, lastCQ, lastSRQ uint32
	lastWindowPD            uint32 // domains of QPs

	qps    int
	qpList map[uint32]*qpObject // by QP number
	free   []uint16             // indices, least recently used first
	nextQP int                  // lowest index never used
	random *rand.ChaCha8        // QP numbers
	last   []uint32             // by place in dataSide.numbers: the number that was there last

	nextLane int

	// Destroyed QPs with faults that the host's driver still holds: they count against
	// the limit of QPs, and are charged, until the driver releases them, also after a reset.
	lingering []lingering

	nonce driverNonce // in the doorbell area of engine 0
	// Memory held for the doorbell areas, by engine, and for the table of
	// address handles.
	dbHeld [abi.MaxEngines]held
	ahHeld held
	ahCost cost
}

func (t *tables) reset(d *Device) {
	conn, vm, random, last, linger := t.conn, t.vm, t.random, t.last, t.lingering
	for _, o := range t.qpList {
		linger = o.end(d.account, linger)
	}
	for _, o := range t.cqs {
		o.drop(d.account)
	}
	for _, o := range t.srqs {
		o.cost.credit(d.account)
	}
	for range t.pds {
		pdCost().credit(d.account)
	}
	dropAll(t.dbHeld[:])
	t.ahHeld.drop()
	t.ahCost.credit(d.account)
	d.account.Credit(translate.CostObjects, d.data.groups.Load().cost())
	if random == nil {
		var seed [32]byte
		_, _ = crand.Read(seed[:]) // never fails
		random, last = rand.NewChaCha8(seed), make([]uint32, len(d.data.numbers))
	}
	*t = tables{
		conn: conn, vm: vm, pds: map[uint32]*pd{}, cqs: map[uint32]*cqObject{}, srqs: map[uint32]*srqObject{},
		mrs: map[uint32]uint32{}, mws: map[uint32]uint32{}, qpList: map[uint32]*qpObject{},
		random: random, last: last, nextQP: firstQPIndex, lingering: linger,
	}
	d.data.gids.reset(d.lim.GIDs)
	d.data.groups.Store(newMcastTable())
}

// end credits a QP that was destroyed, or adds it to the list of those that are charged until their faults end.
func (o *qpObject) end(a *translate.Account, list []lingering) []lingering {
	if o.q.faulting() {
		return append(list, lingering{o.q, o.cost})
	}
	o.cost.credit(a)
	return list
}

// reap credits the destroyed QPs whose faults have ended.
func (t *tables) reap(a *translate.Account) {
	t.lingering = slices.DeleteFunc(t.lingering, func(x lingering) bool {
		if x.q.faulting() {
			return false
		}
		x.cost.credit(a)
		return true
	})
}

// Protection domains from here on have one member, a QP: they hold the type 2B memory windows that it bound.
const firstWindowPD = 1 << 31

// newID finds an unused number below firstWindowPD, never 0, that is not reused soon.
func newID[T any](m map[uint32]T, last *uint32) uint32 {
	for {
		*last = (*last + 1) % firstWindowPD
		if *last == 0 {
			continue
		}
		if _, used := m[*last]; !used {
			return *last
		}
	}
}

// numberQP returns the index and the number of a new QP.
func (c *cmd) numberQP(typ roce.Type) (index int, qpn uint32, err error) {
	switch {
	case c.as != nil:
		return c.as.index, c.as.n, nil
	case typ == roce.GSI:
		return gsiQPN, gsiQPN, nil
	}
	return c.t.allocQPIndex(c.d)
}

// allocQPIndex picks an index and a number for a QP.
func (t *tables) allocQPIndex(d *Device) (index int, qpn uint32, err error) {
	switch {
	case t.nextQP < len(d.data.qps):
		index = t.nextQP
		t.nextQP++
	case len(t.free) > 0:
		index = int(t.free[0])
		t.free = t.free[1:]
	default:
		return 0, 0, &limitError{what: "queue pairs", n: uint64(t.qps) + 1, max: uint64(d.lim.QPs)}
	}
	return index, t.newQPN(d.data), nil
}

// newQPN returns a random number whose place is free. It differs from the last number there, so that a packet or an
// event for a destroyed QP does not reach the next one. The loop ends, because a third of the places is free; each
// number is taken with a probability of at least 0.3.
func (t *tables) newQPN(d *dataSide) uint32 {
	for {
		n := uint32(t.random.Uint64()) & mcastQPN
		place := d.numberPlace(n)
		if n == 0 || n == mcastQPN || place == gsiQPN || d.numbers[place].Load() != nil || t.last[place] == n {
			continue
		}
		t.last[place] = n
		return n
	}
}

func (t *tables) freeQPIndex(i int) {
	if i >= firstQPIndex {
		t.free = append(t.free, uint16(i))
	}
}

// checkQPLimit enforces the limit of QPs.
func (t *tables) checkQPLimit(d *Device) error {
	t.reap(d.account)
	if n := t.qps + len(t.lingering); n >= d.lim.QPs {
		return &limitError{what: "queue pairs", n: uint64(n) + 1, max: uint64(d.lim.QPs)}
	}
	return nil
}

func notFound(what string, n uint32) error {
	return refuse(abi.StatusNotFound, "no %s %d", what, n)
}

func (t *tables) pd(n uint32) (*pd, error) {
	if p := t.pds[n]; p != nil {
		return p, nil
	}
	return nil, notFound("protection domain", n)
}

func (t *tables) cq(n uint32) (*cqObject, error) {
	if o := t.cqs[n]; o != nil {
		return o, nil
	}
	return nil, notFound("completion queue", n)
}

func (t *tables) srq(n uint32) (*srqObject, error) {
	if o := t.srqs[n]; o != nil {
		return o, nil
	}
	return nil, notFound("shared receive queue", n)
}

func (t *tables) qp(n uint32) (*qpObject, error) {
	if o := t.qpList[n]; o != nil {
		return o, nil
	}
	return nil, notFound("queue pair", n)
}

// cmd is a command being executed.
type cmd struct {
	d   *Device
	t   *tables
	op  abi.Opcode
	in  []byte // the request's payload, copied in
	out []byte // room for the reply's payload
	n   int    // bytes used of out

	drain   *translate.Drain // the answer waits for it (EP-3)
	warming *hostWait        // the answer waits for it
	cleared uint32           // handle of the region whose pages the command has made absent, if clears is set
	clears  bool

	waited    *hostWait // memory for which the command has stepped aside; nil: none, or it was taken over
	overtaken func(region uint32) bool

	as *identity // the object to make again (context.go); nil: a new one

	job     *job     // nil: a command that is replayed
	touched []object // what the command has made, changed or destroyed (journal_control.go)
}

// identity is what a new object gets from the tables, and one that is made again has already.
type identity struct {
	n      uint32 // handle, or QP number
	index  int    // of a QP
	engine *engine
	nonce  uint64 // of a doorbell area
}

// takeID returns an unused number, or the handle of an object that is made again.
func takeID[T any](c *cmd, m map[uint32]T, last *uint32) uint32 {
	if c.as != nil {
		return c.as.n
	}
	return newID(m, last)
}

// reply reserves n bytes of the reply.
func (c *cmd) reply(n int) []byte {
	c.n = n
	return c.out[:n]
}

// pages checks that the payload is a fixed part and exactly n PAs.
func (c *cmd) pages(fixed int, n ...uint32) ([]byte, error) {
	want := uint64(fixed)
	for _, x := range n {
		want += 8 * uint64(x)
	}
	if want != uint64(len(c.in)) {
		return nil, refuse(abi.StatusInvalid, "payload of %d bytes, %d pages need %d", len(c.in), n, want)
	}
	return c.in[fixed:], nil
}

// epoch runs f inside an epoch of the guest's memory. f must not block. If it fails as a page is absent on the host,
// the command returns that error without an effect, and runs again when the page is present (aside.go).
func (c *cmd) epoch(f func() error) error {
	return c.d.data.space().Epochs().Within(commandSlot, f)
}

// on is epoch on an engine's loop.
func (c *cmd) on(e *engine, f func() error) error { return e.on(f) }

// commandSlot is the epoch slot of control goroutines; loops use theirs.
const commandSlot = 15

// epochSlot names a slot for messages about waiting for it (EP-3).
func epochSlot(slot int) string {
	if slot == commandSlot {
		return "a command or the connection"
	}
	return fmt.Sprintf("loop %d", slot)
}

// opcodeError reports a command that is not in the table.
type opcodeError abi.Opcode

func (e opcodeError) Error() string { return fmt.Sprintf("unknown opcode %d", uint16(e)) }
func (e opcodeError) Unwrap() error { return abi.StatusUnsupported }
