// Side: data

package hca

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// Page faults (PF-7). A side of a QP that meets an absent page waits outside of any
// epoch, and looks the page up again when the fault is served. There are two kinds of
// faults, each with its own driver, counters and times:
//
//	host   translate's FaultQueue -> host driver -> Fault.Done, on its goroutine
//	guest  asynchronous event queue -> VNICD_EVENT_PAGE_FAULT -> the guest's
//	       driver -> SET_MTT with the token, or RESUME_FAULT, on the command goroutine
//
// Either answer becomes a bit in the waiter's answer node, which goes to the engine of
// the waiting QP only (PF-16). A waiter has at most one fault in each queue, and all
// state of it lies in the waiter: nothing is allocated, no list can overflow, and no
// fault is lost while the guest's driver has no buffers posted.

// Bits of an answer node.
const (
	answerHost        = 1 << iota // from the host's driver: try again
	answerHostFailed              // from the host's driver: no such memory
	answerGuest                   // from the guest's driver: try again
	answerGuestFailed             // from the guest's driver: no such address (PF-13)
)

// maxFaultLen bounds the bytes that one page fault event asks for.
const maxFaultLen = 1 << 20

// faultWaiter records the faults that one side of a QP, requester or responder, has raised.
// The miss that the side waits for now is recorded in the transport (roce.QP.Waits). Fields
// not marked otherwise belong to the QP's loop.
type faultWaiter struct {
	q    *qp
	side roce.Side

	host    translate.Fault
	ring    bool // host is about a work ring
	guest   guestFault
	answers eventNode // answers on their way to the loop
}

// guestFault is a fault on its way to the guest's driver and back.
//
//	idle --ask--> raised --event posted--> posted --SET_MTT, RESUME_FAULT--> answered --loop--> idle
//
// state holds the state and, above it, the token of this fault, so that a
// command can check and change both at once.
type guestFault struct {
	state atomic.Uint64
	node  eventNode // in the asynchronous event queue

	// Set before raised, constant until idle.
	miss   translate.Miss
	key    translate.Key // the key in the event: never a window's
	va     translate.VA
	length uint64
	access translate.Access
	since  int64 // ns
}

const (
	faultIdle = iota
	faultRaised
	faultPosted
	faultAnswered
	faultStateMask = 3
	tokenShift     = 32
)

// A token is the QP's index (16 bits) and side (1 bit), and a count of the faults
// of that index and side (15 bits), which successive QPs of the index continue.
const (
	tokenSideShift  = 16
	tokenCountShift = 17
)

func (s *faultWaiter) init(q *qp, which roce.Side) {
	s.q, s.side = q, which
	s.guest.node.init(q.n, nodeFault)
	s.guest.node.fault = &s.guest
	s.answers.init(q.n, nodeAnswers)
	s.answers.wake = s.onAnswer
	s.host.Done = s.hostDone
}

// hostDone is called when the host's driver has served the fault; any goroutine.
func (s *faultWaiter) hostDone(_ *translate.Fault, err error) {
	if err == nil {
		s.q.engine.postAnswer(&s.answers, answerHost)
		return
	}
	s.q.dev.warn("guest memory unavailable", "qp", s.q.n, "reason", err)
	s.q.engine.postAnswer(&s.answers, answerHostFailed)
}

// waits returns the miss that the transport waits for; its Kind is None if it does not wait.
func (s *faultWaiter) waits() translate.Miss {
	m, queue := s.q.t.Waits(s.side)
	if queue {
		return s.host.Miss
	}
	return m
}

// raiseHost raises a host fault, unless one is outstanding.
func (s *faultWaiter) raiseHost(m translate.Miss, write, ring bool) {
	if s.host.Waiting() {
		return
	}
	s.host.Miss, s.host.Write, s.ring = m, write, ring
	s.q.counts().hostFaults++
	s.q.engine.space.Faults().Raise(&s.host)
}

// raiseGuest raises a guest fault, unless one is outstanding.
func (s *faultWaiter) raiseGuest(m translate.Miss, need translate.Access) {
	g, q := &s.guest, s.q
	if g.state.Load()&faultStateMask != faultIdle {
		return
	}
	n := min(max(m.Len, 1), maxFaultLen)
	if r, err := q.dev.vm.Region(uint32(m.Key)); err == nil {
		if left := r.Length() - uint64(m.VA-r.IOVA()); n > left {
			n = max(left, 1)
		}
	}
	g.miss, g.length, g.access, g.since = m, n, need, q.engine.loop.Now()
	g.key, g.va = q.dev.vm.Beneath(m.Key, m.VA)
	count := &q.dev.faultCounts[q.index<<1|int(s.side)]
	*count++
	token := uint32(q.index) | uint32(s.side)<<tokenSideShift | *count<<tokenCountShift
	g.state.Store(uint64(token)<<tokenShift | faultRaised)
	q.counts().guestFaults++
	q.dev.async.post(&g.node, 1<<abi.EventPageFault)
}

// onAnswer resumes the side after its fault was served; called by the engine, inside an epoch.
func (s *faultWaiter) onAnswer(bits uint32) {
	q := s.q
	if q.closed {
		return
	}
	q.engine.touch(q)
	ok := true
	waits, queue := q.t.Waits(s.side)
	if bits&(answerGuest|answerGuestFailed) != 0 {
		// The answer applies to the miss of the event. If the transport waits for another
		// miss by now, it tries again.
		ok = bits&answerGuest != 0 || !sameMiss(&s.guest.miss, &waits)
		s.guest.state.Store(faultIdle)
	}
	if bits&answerHostFailed != 0 && !s.host.Waiting() {
		if s.ring && queue || sameMiss(&s.host.Miss, &waits) {
			ok = false
		}
		switch {
		case !s.ring:
		case s.side == roce.Responder && q.srq != nil:
			q.srq.fail(s.host.Miss)
		case s.side == roce.Requester && q.sq.stale:
			q.fail("the memory of its send queue is gone")
			q.postUnposted()
		}
	}
	if s.side == roce.Requester && !q.Journaled() && !q.publishSend() { // the journal's show publishes
		return // raised again
	}
	s.resume(ok)
}

// sameMiss reports whether two misses concern the same byte of the same level.
func sameMiss(a, b *translate.Miss) bool {
	return a.Kind == b.Kind && a.Key == b.Key && a.Where == b.Where
}

func (s *faultWaiter) resume(ok bool) {
	q := s.q
	q.engine.current = q
	q.t.Resume(q.engine.loop.Now(), s.side, ok)
	q.engine.current = nil
	if s.side == roce.Responder {
		if !ok && len(q.kept) > 0 { // the packet that needed the memory would only fault again
			q.dropKept(1)
			q.engine.keptDrops++
		}
		q.redeliver()
	}
}

// Fault implements roce.Adapter.
func (q *qp) Fault(which roce.Side, m translate.Miss, need translate.Access) {
	s := &q.waiters[which]
	if which == roce.Responder {
		q.lastFault = m.Kind
	}
	if m.Kind == translate.HostFault {
		s.raiseHost(m, need.Writes(), false)
	} else {
		s.raiseGuest(m, need)
	}
}

// FaultDelay implements roce.Adapter: the smoothed time of faults of the kind that the
// responder waits for or met last.
func (q *qp) FaultDelay() int64 {
	if q.lastFault == translate.GuestFault {
		return q.dev.faultDelay.Load()
	}
	return int64(q.engine.space.Faults().Estimate())
}

// ringFault raises a fault on a work ring on behalf of side which.
func (q *qp) ringFault(which roce.Side, m translate.Miss) roce.Fetch {
	q.waiters[which].raiseHost(m, true, true)
	return roce.FetchFault
}

// faulting reports whether a fault of q is with the host's driver; any thread.
func (q *qp) faulting() bool { return q.waiters[0].host.Waiting() || q.waiters[1].host.Waiting() }

// event returns the event for the guest's driver. It is called on the engine of the
// event queue, while the fault is raised.
func (g *guestFault) event(qpn uint32) abi.Event {
	return abi.Event{
		Type: abi.EventPageFault, Handle: qpn, VA: uint64(g.va), Length: g.length, Key: uint32(g.key),
		Access: uint32(g.access), Token: uint32(g.state.Load() >> tokenShift),
	}
}

// posting makes the fault answerable, just before the driver can see it. unposted
// reverts that if the event could not be written; it fails if an answer came
// already, from a driver that guessed the token.
func (g *guestFault) posting() {
	g.state.Store(g.state.Load()&^faultStateMask | faultPosted)
}

func (g *guestFault) unposted() bool {
	w := g.state.Load()
	return w&faultStateMask == faultPosted && g.state.CompareAndSwap(w, w&^faultStateMask|faultRaised)
}
