// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/translate"
)

// The parts of a context (context.go) that change on loops, and their encoding. The journal has them, too
// (journal.go).

// contextVersion is the version of the encoding. 2: connections that connection management made; 3: atomics that a
// killed process has executed. 4: states of QPs in words; the driver's nonce. 5: in the journal, MTT entries in parts.
// 6: whether the peer of a QP is a vnicd. 7: moderation of CQs' events.
const contextVersion = 7

const (
	// maxContext bounds a context, in bytes. Lists of pages make up nearly all of it.
	maxContext   = 1 << 30
	mostUnposted = 1 << 16 // completions of a poll that wait for the SQ's consumer index
	maxPast      = 1 << 16 // atomics of a QP that a killed process has executed
)

// Bounds of lists: what the limits of a device permit at most.
const (
	mostObjects = 1 << 24
	mostPages   = abi.CmdMax / 8 // a command names no more
	mostEntries = 1 << 32        // MTT entries of a region
)

type keyContext struct {
	state translate.KeyState
	runs  []translate.PageRun
}

// pagesContext has the MTT entries of a part of a pinned region, which begins at a multiple of partPages.
type pagesContext struct{ runs []translate.PageRun }

// partPages is the number of MTT entries in a part. A driver gives those of a large region by many commands, each of
// which then adds little to the journal.
const partPages = 4096

// window reports whether the key is a memory window.
func (k *keyContext) window() bool { return k.state.Dynamic && k.state.Kind != translate.FastRegion }

// qpState is the part of a QP's state that its engine changes.
type qpState struct {
	sqIndices, rqIndices indicesContext
	patience             uint32
	failing              bool
	events               uint32
	faults               [2]uint32 // number of guest faults of each side so far, for tokens
	unposted             []abi.WC
	transport            []byte       // roce.QP.Context
	version              uint32       // of transport
	past                 []pastAtomic // since version 3
}

// srqState is the part of a shared receive queue's state that its engine changes.
type srqState struct {
	limit   uint32
	indices indicesContext
	failed  bool
	events  uint32
}

// indicesContext are the indices of a workRing.
type indicesContext struct {
	next, done uint32
	stale      bool
}

func (k *keyContext) record(c *record.Codec) {
	s := &k.state
	record.Num(c, &s.Handle)
	c.Bool(&s.Dynamic)
	sp := &s.Spec
	record.Num(c, &sp.PD)
	record.Num(c, &sp.Access)
	record.Num(c, &sp.Flags)
	record.Num(c, &sp.PageShift)
	record.Num(c, &sp.IOVA)
	record.Num(c, &sp.Length)
	record.Num(c, &sp.Offset)
	record.Num(c, &sp.NPages)
	if !s.Dynamic {
		recordRuns(c, &k.runs)
		return
	}
	record.Num(c, &s.Kind)
	record.Num(c, &s.Capacity)
	record.Num(c, &s.Key)
	c.Bool(&s.Valid)
	record.Num(c, &s.QP)
	record.Num(c, &s.Base)
	record.List(c, &s.Pages, translate.MaxFastPages, "pages", func(pa *translate.PA) { record.Num(c, pa) })
}

func recordRuns(c *record.Codec, runs *[]translate.PageRun) {
	record.List(c, runs, mostEntries, "runs of pages", func(r *translate.PageRun) {
		record.Num(c, &r.N)
		record.Num(c, &r.PA)
	})
}

func (x *pagesContext) record(c *record.Codec) {
	recordRuns(c, &x.runs)
	if !c.Reading() || c.Err() != nil {
		return
	}
	n := uint64(0)
	for i := range x.runs {
		if n += x.runs[i].N; n > partPages || x.runs[i].N > partPages {
			c.Fail("part of a region with more than %d pages", partPages)
			return
		}
	}
}

func takeIndices(w *workRing) indicesContext { return indicesContext{w.next, w.done, w.stale} }

// put sets the indices of a new ring. What is posted is found by the next look at the producer index.
func (x *indicesContext) put(w *workRing) {
	w.next, w.done, w.have, w.stale = x.next&w.mask, x.done&w.mask, 0, x.stale
}

func (x *indicesContext) record(c *record.Codec) {
	record.Num(c, &x.next)
	record.Num(c, &x.done)
	c.Bool(&x.stale)
}

// state returns the state of q, except the transport's and the completions that wait; on its engine.
func (q *qp) state() qpState {
	x := qpState{
		sqIndices: takeIndices(&q.sq), patience: q.patience.Load(), failing: q.failing, events: q.asyn.bits.Load(),
		past: q.past,
	}
	if q.hasRQ {
		x.rqIndices = takeIndices(&q.rq)
	}
	for side := range x.faults {
		x.faults[side] = q.dev.faultCounts[q.index<<1|side]
	}
	return x
}

func (x *qpState) record(c *record.Codec) {
	if !c.Since(4) {
		x.recordNumbers(c)
		return
	}
	x.recordHead(c)
	c.Sub(&x.transport)
}

// recordHead is record without the transport's state, which follows.
func (x *qpState) recordHead(c *record.Codec) {
	sq, rq := &x.sqIndices, &x.rqIndices
	w := [...]uint64{
		record.Pair(sq.next, sq.done), record.Pair(rq.next, rq.done), record.Pair(x.patience, x.events),
		record.Pair(x.faults[0], x.faults[1]),
		record.Pack(&sq.stale, &rq.stale, &x.failing) | uint64(len(x.unposted))<<8 | uint64(len(x.past))<<32,
	}
	c.Words(w[:])
	if c.Reading() {
		record.Unpair(w[0], &sq.next, &sq.done)
		record.Unpair(w[1], &rq.next, &rq.done)
		record.Unpair(w[2], &x.patience, &x.events)
		record.Unpair(w[3], &x.faults[0], &x.faults[1])
		record.Unpack(w[4], &sq.stale, &rq.stale, &x.failing)
		n, past := int(w[4]>>8&0xffffff), int(w[4]>>32)
		if n > mostUnposted || past > maxPast {
			c.Fail("%d completions and %d executed atomics, at most %d and %d", n, past, mostUnposted, maxPast)
			return
		}
		x.unposted, x.past = make([]abi.WC, n), make([]pastAtomic, past)
	}
	x.version = c.Written()
	for i := range x.unposted {
		recordWC(c, &x.unposted[i])
	}
	for i := range x.past {
		w := [...]uint64{x.past[i].psn, x.past[i].old}
		c.Words(w[:])
		x.past[i] = pastAtomic{w[0], w[1]}
	}
}

func recordWC(c *record.Codec, w *abi.WC) {
	var b [abi.SizeWC]byte
	w.Encode(b[:])
	c.Fixed(b[:])
	if err := w.Decode(b[:]); c.Reading() && err != nil {
		c.Fail("completion: %v", err)
	}
}

// recordNumbers is record before version 4.
func (x *qpState) recordNumbers(c *record.Codec) {
	x.sqIndices.record(c)
	x.rqIndices.record(c)
	record.Num(c, &x.patience)
	c.Bool(&x.failing)
	record.Num(c, &x.events)
	record.Num(c, &x.faults[0])
	record.Num(c, &x.faults[1])
	record.List(c, &x.unposted, mostUnposted, "completions", func(w *abi.WC) { recordWC(c, w) })
	c.Blob(&x.transport, maxContext, "bytes of transport state")
	x.version = c.Written()
	if c.Since(3) {
		record.List(c, &x.past, maxPast, "executed atomics", func(p *pastAtomic) {
			record.Num(c, &p.psn)
			record.Num(c, &p.old)
		})
	}
}

// state returns the state of s; where no QP uses it.
func (s *srq) state() srqState {
	return srqState{limit: s.limit, indices: takeIndices(&s.wr), failed: s.failed.Load(), events: s.asyn.bits.Load()}
}

func (x *srqState) record(c *record.Codec) {
	record.Num(c, &x.limit)
	x.recordRest(c)
}

func (x *srqState) recordRest(c *record.Codec) {
	x.indices.record(c)
	c.Bool(&x.failed)
	record.Num(c, &x.events)
}
