// Side: control

package hca

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/journal"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// Reviving: a device continues the state that the journal of a killed process describes (journal.go). The objects and
// their newest states make a context, which is continued as any other (context.go). Then what the killed process had
// committed and perhaps not done is done: consumer indices are published, completions are posted, and it is found out
// which noted atomics were executed. Doing any of this twice changes nothing, so this process may be killed
// meanwhile.

// past is what a journal says besides objects.
type past struct {
	cqs     map[uint32]*journal.Word // words, by CQ number
	words   []*journal.Word          // all
	outputs []pastOutput
	notes   []pastNote
	queue   queueRecord
	jobs    map[uint64]jobRecord
}

// pastOutput is a completion that was committed; see output.
type pastOutput struct {
	place     *journal.Word
	cqn, qpn  uint32
	solicited bool
	wc        abi.WC
}

// pastNote is a noted atomic; see loggedAtomic.
type pastNote struct {
	qpn                 uint32
	stamp, done         uint64
	psn, va, key, found uint64
}

// Revive implements virtio.Survivor.
func (d *Device) Revive(fd int) (err error) {
	d.driver.Lock()
	defer d.driver.Unlock()
	if d.data.vm == nil || d.commands != nil {
		return errRunning
	}
	defer func() {
		if err != nil {
			d.wipe()
			err = fmt.Errorf("hca: journal: %w", err)
		} else {
			d.pauses()
		}
	}()
	contents, err := journal.Read(fd)
	if err != nil {
		return err
	}
	defer contents.Close()
	if n := 1 + len(d.data.engines); len(contents.Shards) != n {
		return fmt.Errorf("%d shards, the device has %d: %w", len(contents.Shards), n, record.ErrInvalid)
	}
	if contents.Format == 0 || contents.Format > contextVersion {
		return fmt.Errorf("records of version %d, this vnicd knows 1 to %d: %w", contents.Format, contextVersion,
			record.ErrInvalid)
	}
	r := journalReader{format: contents.Format}
	if err := r.read(contents); err != nil {
		return err
	}
	if err := d.resume(&r.x); err != nil {
		return err
	}
	return d.finishPast(&r.past)
}

// journalReader makes a context of the contents of a journal. A newer record of an object replaces older ones.
type journalReader struct {
	format uint32
	x      deviceContext
	past   past

	gids  map[uint32]gidContext
	bells map[uint32]bellContext
	pds   map[uint32]bool
	keys  map[uint32]stamped[keyContext]
	parts map[uint32]map[uint32]pagesContext // of regions: by handle, then by part
	cqs   map[uint32]cqContext
	srqs  map[uint32]stamped[srqContext]
	qps   map[uint32]stamped[qpContext]
}

type stamped[T any] struct {
	stamp uint64
	v     T
}

func (r *journalReader) read(c *journal.Contents) error {
	r.past.words = c.Words
	r.past.cqs, r.past.jobs = map[uint32]*journal.Word{}, map[uint64]jobRecord{}
	r.gids, r.bells, r.pds = map[uint32]gidContext{}, map[uint32]bellContext{}, map[uint32]bool{}
	r.keys, r.cqs = map[uint32]stamped[keyContext]{}, map[uint32]cqContext{}
	r.parts = map[uint32]map[uint32]pagesContext{}
	r.srqs, r.qps = map[uint32]stamped[srqContext]{}, map[uint32]stamped[qpContext]{}
	for i := range c.Shards[0] {
		if err := r.control(&c.Shards[0][i], c.Words); err != nil {
			return err
		}
	}
	for _, shard := range c.Shards[1:] {
		var notes []pastNote
		var outputs []pastOutput
		for i := range shard {
			x := &shard[i]
			var err error
			switch x.Kind {
			case recTurn:
				outputs = nil
			case recCompletion:
				outputs, err = readOutput(outputs, x)
			case recAtomic:
				notes, err = readNote(notes, x)
			default:
				err = r.state(x)
			}
			if err != nil {
				return err
			}
		}
		r.past.outputs = append(r.past.outputs, outputs...)
		r.past.notes = append(r.past.notes, notes...)
	}
	// The state of a QP has the atomics that were executed before it.
	r.past.notes = slices.DeleteFunc(r.past.notes, func(n pastNote) bool {
		q, ok := r.qps[n.qpn]
		return !ok || n.stamp < q.stamp || n.done == noteVoid
	})
	r.assemble()
	return nil
}

// decode reads the payload of a record.
func (r *journalReader) decode(x *journal.Record, f func(*record.Codec)) error {
	c := record.Reader(x.Payload).Of(r.format)
	f(c)
	if err := c.End(); err != nil {
		return fmt.Errorf("record %d of %#x: %w", x.Kind, x.Key, err)
	}
	return nil
}

// control reads a record of the control side.
func (r *journalReader) control(x *journal.Record, words []*journal.Word) (err error) {
	n := uint32(x.Key)
	named := n // what the payload says
	switch x.Kind {
	case recDevice:
		var p deviceNumbers
		err = r.decode(x, p.record)
		r.x.generation, r.x.lastPD, r.x.lastCQ, r.x.lastSRQ, r.x.lastWindowPD = p.generation, p.lastPD, p.lastCQ, p.lastSRQ,
			p.lastWindowPD
	case recGID:
		var v gidContext
		err = r.decode(x, v.record)
		r.gids[n], named = v, uint32(v.index)
	case recBells:
		var v bellContext
		err = r.decode(x, v.record)
		r.bells[n], named = v, v.engine
	case recAHs:
		r.x.ahs = ahContext{}
		err = r.decode(x, r.x.ahs.record)
	case recPD:
		r.pds[n] = true
	case recKey:
		var v keyContext
		err = r.decode(x, v.record)
		r.keys[n], named = stamped[keyContext]{x.Stamp, v}, uint32(v.state.Handle)
		r.parts[n] = map[uint32]pagesContext{}
	case recPages:
		var v pagesContext
		err = r.decode(x, v.record)
		if parts := r.parts[uint32(x.Key>>32)]; parts != nil {
			parts[n] = v
		}
	case recCQ:
		var v cqContext
		word := 0
		err = r.decode(x, func(c *record.Codec) {
			record.Max(c, &word, len(words)-1, "word of a completion queue")
			v.record(c)
		})
		if err == nil {
			r.past.cqs[n] = words[word]
			w := words[word].Load()
			if v.prod, v.failed = uint32(w&cqProdMask), w&cqFailed != 0; v.failed && w&cqUntold != 0 {
				v.events |= 1 << abi.EventCQErr
			}
		}
		r.cqs[n], named = v, v.n
	case recSRQObject:
		var v srqContext
		err = r.decode(x, v.record)
		r.srqs[n], named = stamped[srqContext]{x.Stamp, v}, v.n
	case recQPObject:
		var v qpContext
		err = r.decode(x, v.record)
		r.qps[n], named = stamped[qpContext]{x.Stamp, v}, v.n
	case recGroups:
		err = r.decode(x, func(c *record.Codec) { recordGroups(c, &r.x.groups) })
	case recQueue:
		err = r.decode(x, r.past.queue.record)
	case recJob:
		var v jobRecord
		err = r.decode(x, v.record)
		v.answer = slices.Clone(v.answer) // which refers to the journal
		r.past.jobs[x.Key] = v
	case recGone:
		r.gone(uint32(x.Key>>32), n)
	default:
		err = fmt.Errorf("record of kind %d: %w", x.Kind, record.ErrInvalid)
	}
	if err == nil && named != n {
		err = fmt.Errorf("record %d of %#x describes %#x: %w", x.Kind, n, named, record.ErrInvalid)
	}
	return err
}

func (r *journalReader) gone(kind, n uint32) {
	switch kind {
	case recGID:
		delete(r.gids, n)
	case recBells:
		delete(r.bells, n)
	case recAHs:
		r.x.ahs = ahContext{}
	case recPD:
		delete(r.pds, n)
	case recKey:
		delete(r.keys, n)
		delete(r.parts, n)
	case recCQ:
		delete(r.cqs, n)
	case recSRQObject:
		delete(r.srqs, n)
	case recQPObject:
		delete(r.qps, n)
	case recJob:
		delete(r.past.jobs, uint64(n))
	}
}

// state reads a state that an engine has recorded. Those of objects that exist no more do not matter.
func (r *journalReader) state(x *journal.Record) error {
	n := uint32(x.Key)
	switch x.Kind {
	case recQP:
		var v qpState
		if err := r.decode(x, v.record); err != nil {
			return err
		}
		if q, ok := r.qps[n]; ok && x.Stamp > q.stamp {
			q.stamp, q.v.qpState = x.Stamp, v
			r.qps[n] = q
		}
	case recSRQ:
		var v srqState
		if err := r.decode(x, v.record); err != nil {
			return err
		}
		if q, ok := r.srqs[n]; ok && x.Stamp > q.stamp {
			q.stamp, q.v.srqState = x.Stamp, v
			r.srqs[n] = q
		}
	case recKey:
		var v keyContext
		if err := r.decode(x, v.record); err != nil {
			return err
		}
		named := v.state.Dynamic && uint32(v.state.Handle) == n
		if k, ok := r.keys[n]; ok && k.v.state.Dynamic && named && x.Stamp > k.stamp {
			r.keys[n] = stamped[keyContext]{x.Stamp, v}
		}
	default:
		return fmt.Errorf("record of kind %d: %w", x.Kind, record.ErrInvalid)
	}
	return nil
}

func readOutput(out []pastOutput, x *journal.Record) ([]pastOutput, error) {
	b := x.Payload
	if len(b) != outputLen {
		return nil, fmt.Errorf("completion of %d bytes: %w", len(b), record.ErrInvalid)
	}
	o := pastOutput{
		place: journal.WordOf(b, 0), cqn: le.Uint32(b[8:]), qpn: le.Uint32(b[12:]), solicited: le.Uint64(b[16:]) != 0,
	}
	if err := o.wc.Decode(b[24:]); err != nil {
		return nil, fmt.Errorf("completion: %w: %w", err, record.ErrInvalid)
	}
	return append(out, o), nil
}

func readNote(notes []pastNote, x *journal.Record) ([]pastNote, error) {
	b := x.Payload
	if len(b) != atomicNoteLen {
		return nil, fmt.Errorf("atomic of %d bytes: %w", len(b), record.ErrInvalid)
	}
	return append(notes, pastNote{qpn: uint32(x.Key), stamp: x.Stamp, done: le.Uint64(b), psn: le.Uint64(b[8:]),
		va: le.Uint64(b[16:]), key: le.Uint64(b[24:]), found: le.Uint64(b[32:])}), nil
}

// runs returns the MTT entries of a key, of which an earlier version has recorded some.
func (r *journalReader) runs(handle uint32, runs []translate.PageRun) []translate.PageRun {
	next := uint64(0) // page
	for _, part := range slices.Sorted(maps.Keys(r.parts[handle])) {
		if gap := uint64(part)*partPages - next; gap > 0 {
			runs = append(runs, translate.PageRun{N: gap, PA: abi.MTTAbsent})
		}
		next = uint64(part) * partPages
		for _, run := range r.parts[handle][part].runs {
			runs, next = append(runs, run), next+run.N
		}
	}
	return runs
}

// assemble makes the lists of the context, in the order of a context that was saved.
func (r *journalReader) assemble() {
	x := &r.x
	for _, n := range slices.Sorted(maps.Keys(r.gids)) {
		x.gids = append(x.gids, r.gids[n])
	}
	for _, n := range slices.Sorted(maps.Keys(r.bells)) {
		x.bells = append(x.bells, r.bells[n])
	}
	x.pds = slices.Sorted(maps.Keys(r.pds))
	for _, windows := range []bool{false, true} {
		for _, n := range slices.Sorted(maps.Keys(r.keys)) {
			if k := r.keys[n].v; k.window() == windows {
				if !k.state.Dynamic { // an earlier version may have recorded pages of others
					k.runs = r.runs(n, k.runs)
				}
				x.keys = append(x.keys, k)
			}
		}
	}
	for _, n := range slices.Sorted(maps.Keys(r.cqs)) {
		x.cqs = append(x.cqs, r.cqs[n])
	}
	for _, n := range slices.Sorted(maps.Keys(r.srqs)) {
		x.srqs = append(x.srqs, r.srqs[n].v)
	}
	for _, n := range slices.Sorted(maps.Keys(r.qps)) {
		x.qps = append(x.qps, r.qps[n].v)
	}
	x.position = r.past.queue.at
	if !r.past.queue.stopped {
		x.position = 0 // it goes on where the journal says
	}
}

// finishPast does what the killed process had committed.
func (d *Device) finishPast(p *past) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := &d.tables
	for n, o := range t.cqs {
		o.q.recall(p.cqs[n]) // what is posted here is not posted again if this process is killed
		if o.q.seq == 0 {
			return fmt.Errorf("completion queue %d has no sequence number: %w", n, record.ErrInvalid)
		}
	}
	defer func() {
		for _, o := range t.cqs {
			o.q.setWord(nil)
		}
	}()
	for _, e := range d.data.engines {
		err := e.visit(func() {
			_ = d.data.space().Epochs().Within(commandSlot, func() error { d.publishPast(e); return nil })
		})
		if err != nil {
			return err
		}
	}
	// The one of each CQ that was being posted comes first: its place in the ring is taken, and engines share CQs.
	slices.SortStableFunc(p.outputs, func(a, b pastOutput) int { return t.underWay(&b) - t.underWay(&a) })
	for i := range p.outputs {
		if err := d.showPast(&p.outputs[i]); err != nil {
			return err
		}
	}
	for i := range p.notes {
		if err := d.settleNote(&p.notes[i]); err != nil {
			return err
		}
	}
	for _, o := range t.qpList {
		if i := storedWord(len(p.words), o.q.index); i >= 0 {
			o.q.engine.onLoop(func() { o.q.t.Revived(p.words[i].Load()) })
		}
	}
	d.pastQueue, d.pastJobs = p.queue, p.jobs
	return nil
}

// publishPast publishes the indices of an engine's queues, and reads those of its CQs; inside an epoch, on its loop.
func (d *Device) publishPast(e *engine) {
	t := &d.tables
	for _, o := range t.cqs {
		if o.owner != nil && o.owner != e || o.owner == nil && e.id != 0 {
			continue
		}
		if v, m := o.q.r.index(abi.RingConsumerOff); m.OK() {
			o.q.cons = v
		}
		o.q.ceq.post(&o.q.comp, eventNow)
	}
	for _, o := range t.srqs {
		if o.owner == e || o.owner == nil && e.id == 0 {
			o.q.wr.stale = true
			o.q.publish()
		}
	}
	for _, o := range t.qpList {
		if q := o.q; q.engine == e && q.t.State() != roce.Reset {
			q.sq.stale = !q.sq.publish().OK() || len(q.unpostedCQEs) > 0
			if q.hasRQ {
				q.rq.stale = !q.rq.publish().OK()
			}
		}
	}
}

// underWay returns 1 for a completion that has the next place in its ring, and may be there already.
func (t *tables) underWay(p *pastOutput) int {
	if o, ok := t.cqs[p.cqn]; ok && p.place.Load() == o.q.seq {
		return 1
	}
	return 0
}

// showPast posts a completion, unless it is in the ring.
func (d *Device) showPast(p *pastOutput) (err error) {
	o, ok := d.tables.cqs[p.cqn]
	if !ok {
		return nil // destroyed, after all completions had been posted
	}
	e := d.data.engines[0]
	var q *qp
	if x := d.tables.qpList[p.qpn]; x != nil && p.qpn != 0 {
		q = x.q
	}
	if o.owner != nil {
		e = o.owner
	}
	if q != nil {
		e = q.engine
	}
	gone := e.visit(func() {
		_ = d.data.space().Epochs().Within(commandSlot, func() error {
			if q != nil && (q.sq.stale || len(q.unpostedCQEs) > 0) && p.place.Load() == 0 {
				q.unpostedCQEs, q.sq.stale = append(q.unpostedCQEs, p.wc), true
				return nil
			}
			o.q.show(&output{cq: o.q, solicited: p.solicited, wc: p.wc, place: p.place})
			return nil
		})
	})
	return gone
}

// settleNote finds out whether a noted atomic was executed, and tells its QP.
func (d *Device) settleNote(n *pastNote) error {
	o := d.tables.qpList[n.qpn]
	if o == nil {
		return nil
	}
	if n.done != noteDone {
		executed := false
		look := func() (m translate.Miss) {
			_ = d.data.space().Epochs().Within(commandSlot, func() error {
				var p *atomic.Uint64
				key, va := translate.Key(n.key), translate.VA(n.va)
				if p, m = d.data.vm.Uint64(key, o.q.pd, va, translate.RemoteAtomic); m.Kind == translate.BadPD {
					p, m = d.data.vm.Uint64(key, o.q.windowPD, va, translate.RemoteAtomic)
				}
				if m.OK() {
					executed = p.Load() != n.found
				}
				return nil
			})
			return m
		}
		m := look()
		for tries := 0; m.Kind == translate.HostFault && tries < fetchTries; tries++ {
			ctx, cancel := context.WithTimeout(context.Background(), restoreTime)
			err := d.data.space().Fetch(ctx, m, true)
			cancel()
			if err != nil {
				return err
			}
			m = look()
		}
		if !executed {
			return nil
		}
	}
	o.q.engine.onLoop(func() { o.q.past = append(o.q.past, pastAtomic{psn: n.psn, old: n.found}) })
	return nil
}

// pastJob is a command that a killed process had popped and not answered.
type pastJob struct {
	seq uint64
	jobRecord
}

// reopen makes the command queue go on where the killed process was. jobs are the commands under way, oldest first.
func (d *Device) reopen(q *virtq.Queue) (jobs []pastJob, err error) {
	past := d.pastJobs
	d.pastJobs = nil
	if past == nil || d.pastQueue.stopped {
		return nil, nil
	}
	for _, seq := range slices.Sorted(maps.Keys(past)) {
		// The used index says which answers the driver sees.
		if j := past[seq]; j.stage != jobPushed || int16(q.Base()-j.used) <= 0 {
			jobs = append(jobs, pastJob{seq, j})
		}
	}
	popped := d.pastQueue.popped
	if n := int(popped - q.Base()); n != len(jobs) {
		return nil, fmt.Errorf("%d commands under way, the queue has %d", len(jobs), n)
	}
	return jobs, q.Reopen(popped)
}

// resumePast executes and answers the commands that a killed process had begun; on the command goroutine.
func (c *commandLoop) resumePast() {
	for i := range c.past {
		p := &c.past[i]
		j := c.job()
		if err := c.withRing(func() error { return c.q.Retake(&j.chain, p.head) }); err != nil {
			c.q.Fail(err)
			return
		}
		j.seq = p.seq
		if c.check(j) != nil {
			return
		}
		if len(p.answer) == 0 {
			c.begin(j)
			continue
		}
		j.n = copy(j.resp[:], p.answer)
		c.answer(j)
	}
	c.signal()
}
