// Side: data

package hca

import (
	"slices"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/journal"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// The journal of an engine: what another process needs of its queue pairs if this process is killed at any
// instruction (CO-2). An engine changes the state of many QPs in the heap, and then commits: the new states of all
// that have changed, and the completions that follow from them, become valid in the journal by one store. Only then
// does anybody else see what follows:
//
//	frames in -> Receive -> [commit] -> completions, consumer indices -> Run -> responses, requests out
//
// A killed process returns to the last commit. What it did since then happens again, and nobody can tell:
//
//	responses      are sent by Run, and state only what was committed before it
//	requests       are sent again with the same PSNs; work requests are fetched again, as consumer indices were not moved
//	data           is written again, the same bytes; until a message is acknowledged its requester may repeat it
//	completions    are written after the commit that has them; the journal says which of them are in their ring
//	atomics        are noted before they are executed, with the value that they find (AtomicRemote)
//	fetched receives   are in the QP's state; the consumer index moves after the commit
//
// Receive, Run, Timer and answers to faults happen in one iteration of the loop; commits are between them, so a state
// is never half changed. The peer of a copy on the local path is committed before the QP whose requests it executed.

// Kinds of journal records. Shard 0 belongs to the control side, shard i+1 to engine i.
const (
	recTurn       = iota + 1 // engine: a commit begins; completions before it have been posted
	recQP                    // QP number: qpState
	recSRQ                   // SRQ: srqState
	recKey                   // key: keyContext, without pages of a region (recPages); engine: of a dynamic key
	recCompletion            // engine: a completion that is to be posted, see output
	recAtomic                // QP number: an atomic that is to be executed, see noteAtomic
	recDevice                // control, from here on
	recGID
	recBells
	recAHs
	recPD
	recCQ
	recQPObject
	recSRQObject
	recGroups
	recQueue
	recJob
	recGone  // the record names a kind and key that exist no more
	recPages // region and part: pagesContext; what a recKey of the region describes has no pages yet
)

// engineJournal belongs to the engine's loop.
type engineJournal struct {
	log   *journal.Shard
	codec record.Codec

	touched []*qp                      // their states may have changed since the last commit
	srqs    []*srq                     // likewise
	changed []translate.Key            // likewise, dynamic keys
	qps     []*qp                      // whose states are in the log
	keys    map[translate.Key]struct{} // likewise, dynamic keys
	renewed map[*srq]struct{}          // for renewJournal
	peers   []*engine                  // have executed requests of this one since then

	shown     []*qp    // committed: their consumer indices are to be published
	shownSRQs []*srq   // likewise
	outputs   []output // completions that are not posted yet, oldest first
	committed int      // so many of them are in the log
}

// output is a completion on its way to its CQ.
//
//	journal: place (8 bytes: 0, or the CQ's sequence number with which it is written into the ring), CQ number (4),
//	QP number if its consumer index of the SQ comes first, else 0 (4), solicited (4), 0 (4), abi.WC
type output struct {
	cq        *cq
	send      *qp // its SQ's consumer index is published first; nil: a receive completion
	solicited bool
	wc        abi.WC
	place     *journal.Word // in the journal
}

const outputLen = 24 + abi.SizeWC

const keyVariant = 0xff // the bits of a key that change with each registration

func newEngineJournal(s *journal.Shard) *engineJournal {
	return &engineJournal{log: s, keys: map[translate.Key]struct{}{}, renewed: map[*srq]struct{}{}}
}

// atStore is called around stores that another process or the guest can see, where a test ends the process; nil: no
// test does.
var atStore atomic.Pointer[func()]

func point() {
	if f := atStore.Load(); f != nil {
		(*f)()
	}
}

// dirty reports whether there is anything to commit.
func (j *engineJournal) dirty() bool {
	return len(j.touched)+len(j.srqs)+len(j.changed) > 0 || j.committed < len(j.outputs)
}

// pending reports whether there is anything to commit or to show.
func (j *engineJournal) pending() bool {
	return j.dirty() || len(j.shown)+len(j.shownSRQs)+len(j.outputs) > 0
}

// touch records that the state of q may change before the next commit.
func (e *engine) touch(q *qp) {
	if j := e.journal; j != nil && !q.touched {
		q.touched = true
		e.polled.Rouse()
		j.touched = append(j.touched, q)
	}
}

// touchSRQ is touch for a shared receive queue.
func (e *engine) touchSRQ(s *srq) {
	if j := e.journal; j != nil && !s.touched {
		s.touched = true
		e.polled.Rouse()
		j.srqs = append(j.srqs, s)
	}
}

// touchKey is touch for a key that a work request has changed.
func (e *engine) touchKey(k translate.Key) {
	if j := e.journal; j != nil {
		e.polled.Rouse()
		j.changed = append(j.changed, k)
	}
}

// Journaled implements roce.Adapter.
func (q *qp) Journaled() bool { return q.engine.journal != nil }

// complete passes q.wc on to a CQ. send: it belongs to a send request.
func (q *qp) complete(c *cq, wc *abi.WC, solicited, send bool) {
	j := q.engine.journal
	if j == nil {
		c.post(wc, solicited)
		return
	}
	o := output{cq: c, solicited: solicited, wc: *wc}
	if send {
		o.send = q
	}
	j.outputs = append(j.outputs, o)
	q.engine.touch(q)
}

// settle commits, and shows the guest what was committed; inside an epoch. What cannot be shown now is committed once
// more as a part of its QP.
func (e *engine) settle() {
	for range 3 {
		if !e.journal.pending() {
			return
		}
		e.commitNow()
		e.show()
	}
}

// commitNow commits what has changed, without access to guest memory: first where requests of this engine were
// executed.
func (e *engine) commitNow() {
	if j := e.journal; j != nil && (j.dirty() || len(j.peers) > 0) {
		e.commitPeers()
		e.commit()
	}
}

// settleNow is settle for a visit of the loop, if guest memory may be accessed.
func (e *engine) settleNow() {
	if e.journal == nil {
		return
	}
	if t, ok := e.enter(); ok {
		defer e.leave(t)
		e.settle()
	}
}

// commitPeers commits the engines that have executed requests of this one on the local path. They have peers of their
// own only if a memory fault has ended their poll.
func (e *engine) commitPeers() {
	peers := e.journal.peers
	e.journal.peers = peers[:0]
	for i, p := range peers {
		if peers[i] = nil; p != e && p.journal != nil {
			p.commitNow() // it shows what follows at its next poll
		}
	}
}

// commit makes the present states valid in the journal.
func (e *engine) commit() {
	j := e.journal
	point()
	switch {
	case e.dev.journal.Load() == nil: // nothing is recorded any more
		for i := range j.outputs {
			j.outputs[i].place = nil
		}
	case j.log.Long() || !e.commitChanges():
		e.renewJournal()
	}
	point()
	for _, q := range j.touched {
		q.t.Committed()
		if q.touched = false; !q.unshown {
			q.unshown = true
			j.shown = append(j.shown, q)
		}
	}
	for _, s := range j.srqs {
		if s.touched = false; !s.unshown {
			s.unshown = true
			j.shownSRQs = append(j.shownSRQs, s)
		}
	}
	j.committed = len(j.outputs)
	j.touched, j.srqs, j.changed = empty(j.touched), empty(j.srqs), j.changed[:0]
}

// commitChanges adds what has changed to the log. It returns false, and nothing is valid, if there is no room.
func (e *engine) commitChanges() bool {
	j := e.journal
	j.log.Add(recTurn, 0, nil)
	for _, q := range j.touched {
		e.recordQP(q)
	}
	for _, s := range j.srqs {
		j.addSRQ(s)
	}
	for _, k := range j.changed {
		if e.recordKey(k) { // the guest may name what does not exist
			j.keys[k&^keyVariant] = struct{}{}
		}
	}
	j.recordOutputs()
	point()
	return j.log.Commit()
}

// renewJournal begins a new log with everything that this log has, or is to have.
func (e *engine) renewJournal() {
	j := e.journal
	j.log.Restart()
	j.log.Add(recTurn, 0, nil)
	gone := func(q *qp) bool { return q.closed || q.engine != e }
	j.qps = slices.DeleteFunc(j.qps, gone)
	for _, q := range j.qps {
		e.recordQP(q)
	}
	for _, q := range j.touched {
		if !q.recorded {
			e.recordQP(q)
		}
	}
	for _, q := range j.qps {
		j.renewSRQ(q.srq)
	}
	for _, s := range j.srqs {
		j.renewSRQ(s)
	}
	clear(j.renewed)
	for _, k := range j.changed {
		j.keys[k&^keyVariant] = struct{}{}
	}
	for k := range j.keys {
		if !e.recordKey(k) {
			delete(j.keys, k)
		}
	}
	j.recordOutputs()
	point()
	if !j.log.Commit() {
		e.dev.loseJournal()
	}
}

// renewSRQ adds an SRQ to a new log, once.
func (j *engineJournal) renewSRQ(s *srq) {
	if _, ok := j.renewed[s]; s != nil && !ok {
		j.renewed[s] = struct{}{}
		j.addSRQ(s)
	}
}

// loseJournal says that the journal does not describe the device any more: it has become too large.
func (d *dataSide) loseJournal() {
	if j := d.journal.Swap(nil); j != nil {
		j.Void()
		d.log.Warn("the device's state has become too large for its journal: it would not survive a crash of vnicd")
	}
}

func (e *engine) recordQP(q *qp) {
	if q.closed || q.engine != e {
		return
	}
	j := e.journal
	if !q.recorded {
		q.recorded = true
		j.qps = append(j.qps, q)
	}
	j.addQP(q)
}

// addQP adds the state of q, a QP of the engine.
func (j *engineJournal) addQP(q *qp) {
	x := q.state()
	x.unposted = q.unpostedCQEs
	c := j.codec.AppendTo(j.log.Next(recQP, uint64(q.n))).Of(contextVersion)
	x.recordHead(c)
	at := c.Open()
	q.t.Journal(c, q.engine.loop.Now())
	c.Close(at)
	j.log.End(c.Bytes())
}

func (j *engineJournal) addSRQ(s *srq) {
	x := s.state()
	c := j.codec.AppendTo(j.log.Next(recSRQ, uint64(s.n))).Of(contextVersion)
	x.record(c)
	j.log.End(c.Bytes())
}

// recordKey adds the state of a dynamic key; false if it exists no more.
func (e *engine) recordKey(k translate.Key) bool {
	j := e.journal
	b := j.log.Begin(recKey, 0) // the stamp is older than the state, which others may change and record
	s, ok := e.dev.vm.DynamicState(k)
	if !ok {
		return false
	}
	x := keyContext{state: s}
	journal.SetKey(b, uint64(s.Handle))
	c := j.codec.AppendTo(b).Of(contextVersion)
	x.record(c)
	j.log.End(c.Bytes())
	return true
}

func (j *engineJournal) recordOutputs() {
	for i := range j.outputs {
		o := &j.outputs[i]
		assigned := uint64(0)
		if o.place != nil {
			assigned = o.place.Load()
		}
		b := j.log.Next(recCompletion, uint64(o.cq.n))
		b = le.AppendUint64(b, assigned)
		b = le.AppendUint32(b, o.cq.n)
		b = le.AppendUint32(b, o.sender())
		b = le.AppendUint64(b, uint64(boolBit(o.solicited)))
		b = append(b, make([]byte, abi.SizeWC)...)
		o.wc.Encode(b[len(b)-abi.SizeWC:])
		o.place = nil
		if p := j.log.End(b); p != nil {
			o.place = journal.WordOf(p, 0)
		}
	}
	j.committed = len(j.outputs)
}

func (o *output) sender() uint32 {
	if o.send == nil {
		return 0
	}
	return o.send.n
}

func boolBit(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// show publishes the consumer indices and posts the completions that were committed.
func (e *engine) show() {
	j := e.journal
	for _, s := range j.shownSRQs {
		s.unshown = false
		s.publish()
		point()
	}
	j.shownSRQs = empty(j.shownSRQs)
	for _, q := range j.shown {
		if q.unshown = false; q.closed || q.engine != e {
			continue
		}
		q.publishRecv()
		point()
		q.publishSend() // completions that waited for it are outputs of the next commit
	}
	j.shown = empty(j.shown)
	n := j.committed
	for i := range n {
		o := &j.outputs[i]
		switch q := o.send; {
		case q != nil && !q.closed && (q.sq.stale || len(q.unpostedCQEs) > 0):
			q.unpostedCQEs = append(q.unpostedCQEs, o.wc) // FetchSend bounds them
			e.touch(q)
		case o.place != nil:
			o.cq.show(o)
		default: // there is no journal any more
			o.cq.post(&o.wc, o.solicited)
		}
	}
	k := copy(j.outputs, j.outputs[n:])
	clear(j.outputs[k:])
	j.outputs, j.committed = j.outputs[:k], 0
}

// empty returns s without elements, and keeps its storage.
func empty[T any](s []T) []T {
	clear(s)
	return s[:0]
}

// publishRecv writes the RQ's consumer index, if it is stale. While its page is absent it stays stale.
func (q *qp) publishRecv() {
	if !q.rq.stale {
		return
	}
	switch m := q.rq.publish(); {
	case m.OK():
		q.rq.stale = false
	case m.Fault():
		q.waiters[roce.Responder].raiseHost(m, true, true) // its answer touches the QP
	default:
		q.fail("receive queue is not in guest memory")
	}
}

// publish is publishRecv for a shared receive queue.
func (s *srq) publish() {
	if s.wr.stale && s.wr.publish().OK() {
		s.wr.stale = false
	}
}

// forget removes a QP that leaves the engine.
func (j *engineJournal) forget(q *qp) {
	is := func(x *qp) bool { return x == q }
	for _, list := range [...]*[]*qp{&j.touched, &j.shown, &j.qps} {
		*list = slices.DeleteFunc(*list, is)
	}
	q.touched, q.unshown, q.recorded = false, false, false
}

// clear forgets everything; the objects are destroyed.
func (j *engineJournal) clear() {
	clear(j.keys)
	clear(j.renewed)
	j.qps = empty(j.qps)
	j.touched, j.srqs, j.changed, j.peers = empty(j.touched), empty(j.srqs), j.changed[:0], empty(j.peers)
	j.shown, j.shownSRQs = empty(j.shown), empty(j.shownSRQs)
	j.outputs, j.committed = empty(j.outputs), 0
	j.log.Restart()
	j.log.Commit()
}

// An atomic cannot be repeated, so it is noted before it is executed, with the value that it finds and the one that
// it stores; the note is marked when it has been. A process that finds an unmarked note compares the memory with it.
// Only if the process was killed between note and execution, a window of one instruction, and another processor of
// the guest changed the word at the same time, that comparison can be wrong. A compare and swap that stores nothing is
// noted, too: when it is repeated, a later atomic may have changed the word.
//
//	done (8 bytes: 0, 1: executed, 2: not executed), PSN (8), address (8), key (8), value found (8), value stored (8)
const (
	atomicNoteLen = 48
	noteOpen      = 0
	noteDone      = 1
	noteVoid      = 2

	// atomicTries bounds how often a word may change under an atomic that has been noted.
	atomicTries = 64
)

// pastAtomic is an atomic that a killed process has executed and not committed. A QP has them in the order of PSNs.
type pastAtomic struct{ psn, old uint64 }

// loggedAtomic executes the atomic with the expected PSN on p.
func (q *qp) loggedAtomic(p *atomic.Uint64, key translate.Key, va translate.VA, op roce.AtomicOp,
	compare, swapAdd uint64) uint64 {
	psn, log := q.t.Expected(), q.engine.journal.log
	for len(q.past) > 0 && q.past[0].psn <= psn {
		x := q.past[0]
		if q.past = q.past[1:]; x.psn == psn {
			return x.old
		}
	}
	for range atomicTries {
		old, done := p.Load(), uint64(noteOpen)
		next := swapAdd
		switch op {
		case roce.AtomicFetchAdd:
			next += old
		default:
			if old != compare {
				done, next = noteDone, old
			}
		}
		b := log.Begin(recAtomic, uint64(q.n))
		for _, v := range [...]uint64{done, psn, uint64(va), uint64(key), old, next} {
			b = le.AppendUint64(b, v)
		}
		note := log.End(b)
		point()
		if note == nil || !log.Commit() {
			break
		}
		point()
		if done == noteDone {
			return old
		}
		if p.CompareAndSwap(old, next) {
			point()
			journal.WordOf(note, 0).Store(noteDone)
			point()
			return old
		}
		journal.WordOf(note, 0).Store(noteVoid)
	}
	// The guest keeps changing the word, or the log is full: without a note.
	if op == roce.AtomicFetchAdd {
		return translate.FetchAdd(p, swapAdd)
	}
	return translate.CompareSwap(p, compare, swapAdd)
}
