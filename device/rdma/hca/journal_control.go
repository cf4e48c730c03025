// Side: control

package hca

import (
	"fmt"
	"math"
	"slices"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/journal"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// The control side's part of the journal (journal.go): the objects, and the commands that are under way. A command's
// effects and its answer become valid at once. A killed process's commands are executed again if they had no effect,
// and only answered if they had: each is executed once (CO-2).
//
//	popped --> executed --> answer in the used ring --> gone
//	recJob     recJob with the   recJob with the position
//	           answer, objects   in the used ring

// logSize bounds a shard's log, in bytes. Only what is used takes memory.
var logSize = 64 << 20

// controlJournal is the control side's shard. The command goroutine writes it; or a loop that this goroutine visits;
// or the connection's goroutine, while no command goroutine runs.
type controlJournal struct {
	file    *journal.Journal
	charged uint64 // to the VM's account; see chargeJournal
	log     *journal.Shard
	codec   record.Codec
	words   []int // free ones
	jobs    map[uint64]*jobRecord
	gone    []uint64 // jobs that are answered, but not yet removed from jobs
	queue   queueRecord
}

// queueRecord is the state of the command queue.
type queueRecord struct {
	popped  uint16 // position behind the last command that was popped
	stopped bool   // at position
	at      uint16
}

// jobRecord is a command under way.
type jobRecord struct {
	head   uint16 // of its chain
	stage  jobStage
	used   uint16 // jobPushed: position in the used ring
	answer []byte // jobExecuted and jobPushed, if it had an effect
}

type jobStage uint8

const (
	jobPopped jobStage = iota
	jobExecuted
	jobPushed
)

func (q *queueRecord) record(c *record.Codec) {
	record.Num(c, &q.popped)
	c.Bool(&q.stopped)
	record.Num(c, &q.at)
}

func (j *jobRecord) record(c *record.Codec) {
	record.Num(c, &j.head)
	record.Max(c, &j.stage, jobPushed, "stage of a command")
	record.Num(c, &j.used)
	c.Blob(&j.answer, abi.SizeResp+maxReply, "bytes of an answer")
}

// object names an object that a command has made, changed or destroyed. part: of recPages.
type object struct{ kind, n, part uint32 }

// touch records that the command has made, changed or destroyed an object.
func (c *cmd) touch(kind, n uint32) { c.touched = append(c.touched, object{kind: kind, n: n}) }

// touchPages records that the command has changed MTT entries of a pinned region, count of them from first on.
func (c *cmd) touchPages(handle uint32, first, count uint64) {
	for part := first / partPages; part*partPages < first+count; part++ {
		c.touched = append(c.touched, object{recPages, handle, uint32(part)})
	}
}

// Journal implements virtio.Survivor.
func (d *Device) Journal() (int, error) {
	if !d.cfg.Journal {
		return -1, nil
	}
	words := d.lim.CQs + 1 // one more, for a CQ that is being resized
	f, err := journal.New(journal.Config{Format: contextVersion, Words: words + len(d.data.qps),
		Shards: 1 + len(d.data.engines), Half: logSize})
	if err != nil {
		return -1, fmt.Errorf("hca: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closeJournal()
	d.journal = &controlJournal{file: f, log: f.Shard(0), jobs: map[uint64]*jobRecord{}}
	for i := range words {
		d.journal.words = append(d.journal.words, words-1-i)
	}
	for _, o := range d.tables.cqs {
		d.journal.giveWord(o)
	}
	j := d.journal
	if j.queue = (queueRecord{popped: d.position, stopped: true, at: d.position}); d.pastJobs != nil {
		j.queue = d.pastQueue
		for seq, r := range d.pastJobs {
			j.jobs[seq] = &r
		}
	}
	for _, o := range d.tables.qpList {
		j.giveStored(d, o.q)
		o.q.Stored(o.q.t.StoredBefore()) // engines do not run
	}
	d.data.journal.Store(f)
	for i, e := range d.data.engines {
		e.onLoop(func() { e.journal = newEngineJournal(f.Shard(i + 1)) })
	}
	d.renewJournal()
	d.chargeJournal()
	return f.FD(), nil
}

// chargeJournal charges the VM with what the journal has grown by. It is not refused: logSize bounds it, and it takes
// room from objects to come. The caller holds mu.
func (d *Device) chargeJournal() {
	if j := d.journal; j != nil {
		n := j.file.Memory()
		d.account.Take(translate.CostJournal, n-j.charged)
		j.charged = n
	}
}

// closeJournal ends the use of the journal; no command goroutine runs, and no engine.
func (d *Device) closeJournal() {
	if d.journal == nil {
		return
	}
	for _, e := range d.data.engines {
		e.onLoop(func() { e.journal = nil })
	}
	for _, o := range d.tables.cqs {
		o.q.setWord(nil)
	}
	for _, o := range d.tables.qpList {
		o.q.stored = nil
	}
	d.data.journal.Store(nil)
	d.account.Credit(translate.CostJournal, d.journal.charged)
	d.journal.file.Close()
	d.journal = nil
}

// giveWord assigns a word to a CQ, where no QP uses it, or on its owner's loop. There are enough.
func (j *controlJournal) giveWord(o *cqObject) {
	n := len(j.words) - 1
	o.word, j.words = j.words[n], j.words[:n]
	o.q.setWord(j.file.Word(o.word))
	o.q.save()
}

// giveStored assigns a QP the word for what it has stored, before the QP is used.
func (j *controlJournal) giveStored(d *Device, q *qp) {
	q.stored = j.file.Word(storedWord(d.lim.CQs+1+len(d.data.qps), q.index))
}

// storedWord is the number of a QP's word among all. They count from the end, since the limits of the process that
// reads them may be others.
func storedWord(words, index int) int { return words - 1 - index }

func (j *controlJournal) takeWord(o *cqObject) {
	if o.q.word != nil {
		o.q.setWord(nil)
		j.words = append(j.words, o.word)
	}
}

// swapWord assigns another word to a CQ that has another ring, and adds both. While the record is not valid, the old
// one names the old word, which still has the position in the old ring.
func (j *controlJournal) swapWord(d *Device, o *cqObject) {
	old := o.word
	j.giveWord(o)
	j.words = append(j.words, old)
	j.addCQ(d, o)
}

// journaled returns the journal; nil if there is none to be written.
func (d *Device) journaled() *controlJournal {
	if d.journal == nil || d.data.journal.Load() == nil {
		return nil
	}
	return d.journal
}

// renewJournal begins a new log with all objects. The caller holds mu.
func (d *Device) renewJournal() {
	j := d.journaled()
	if j == nil {
		return
	}
	j.log.Restart()
	t := &d.tables
	d.addObject(object{kind: recDevice})
	for i := range d.data.gids.snap.Load().all {
		d.addObject(object{kind: recGID, n: uint32(i)})
	}
	for _, e := range d.data.engines {
		d.addObject(object{kind: recBells, n: uint32(e.id)})
	}
	d.addObject(object{kind: recAHs})
	addAll(d, recPD, t.pds)
	addAll(d, recKey, t.mrs)
	addAll(d, recKey, t.mws)
	addAll(d, recCQ, t.cqs)
	addAll(d, recSRQObject, t.srqs)
	addAll(d, recQPObject, t.qpList)
	d.addObject(object{kind: recGroups})
	j.addQueue()
	for _, seq := range j.gone {
		delete(j.jobs, seq)
	}
	j.gone = j.gone[:0]
	for seq := range j.jobs {
		j.addJob(seq)
	}
	if !j.log.Commit() {
		d.data.loseJournal()
	}
}

// addAll adds the objects of a table.
func addAll[T any](d *Device, kind uint32, table map[uint32]T) {
	for n := range table {
		d.addObject(object{kind: kind, n: n})
	}
}

// commit makes what was added valid.
func (d *Device) commit(j *controlJournal) {
	point()
	if j.log.Long() || !j.log.Commit() {
		d.renewJournal()
	}
	point()
}

// put adds a record that f encodes.
func (j *controlJournal) put(kind, n uint32, f func(*record.Codec)) {
	c := j.codec.AppendTo(j.log.Begin(kind, uint64(n))).Of(contextVersion)
	f(c)
	j.log.End(c.Bytes())
}

func (j *controlJournal) remove(x object) { j.log.Add(recGone, uint64(x.kind)<<32|uint64(x.n), nil) }

// addObject adds the present state of an object, or that there is none. The caller holds mu.
func (d *Device) addObject(x object) {
	j, t := d.journal, &d.tables
	switch x.kind {
	case recDevice:
		p := deviceNumbers{d.generation.Load(), t.lastPD, t.lastCQ, t.lastSRQ, t.lastWindowPD}
		j.put(recDevice, 0, p.record)
		return
	case recGID:
		if g, ok := d.takeGID(x.n); ok {
			j.put(x.kind, x.n, g.record)
			return
		}
	case recBells:
		if b, ok := d.takeBells(d.data.engines[x.n]); ok {
			j.put(x.kind, x.n, b.record)
			return
		}
	case recAHs:
		if a := d.takeAHs(); a.entries > 0 {
			j.put(x.kind, x.n, a.record)
			return
		}
	case recPD:
		if t.pds[x.n] != nil {
			j.put(x.kind, x.n, func(*record.Codec) {})
			return
		}
	case recKey:
		b := j.log.Begin(x.kind, uint64(x.n)) // the stamp is older than the state, which an engine may change and record
		if s, err := d.data.vm.State(x.n); err == nil {
			k := keyContext{state: s}
			c := j.codec.AppendTo(b).Of(contextVersion)
			k.record(c)
			j.log.End(c.Bytes())
			if !s.Dynamic { // its present key may be equal to the handle
				d.addPages(x.n)
			}
			return
		}
	case recPages:
		d.addPart(x.n, x.part)
		return // parts go with their region
	case recCQ:
		if o := t.cqs[x.n]; o != nil {
			j.addCQ(d, o)
			return
		}
	case recSRQObject:
		if o := t.srqs[x.n]; o != nil {
			if o.owner != nil {
				o.owner.onLoop(func() {
					o.owner.commitNow()
					j.addSRQ(o)
				})
			} else {
				j.addSRQ(o)
			}
			return
		}
	case recQPObject:
		if o := t.qpList[x.n]; o != nil {
			o.q.engine.onLoop(func() {
				o.q.engine.commitNow()
				j.addQP(o)
			})
			return
		}
	case recGroups:
		g := d.takeGroups()
		j.put(recGroups, 0, func(c *record.Codec) { recordGroups(c, &g) })
		return
	}
	j.remove(x)
}

// addPages adds the MTT entries of a new region, if it is a pinned one and they are not absent.
func (d *Device) addPages(handle uint32) {
	reg, err := d.data.vm.Region(handle)
	if err != nil {
		return
	}
	page, part := uint64(0), uint64(0) // part: the first that was not added
	for run := range reg.Pages(0, math.MaxUint64) {
		if end := page + run.N; run.PA&abi.MTTAbsent == 0 {
			for part = max(part, page/partPages); part*partPages < end; part++ {
				d.addPart(handle, uint32(part))
			}
		}
		page += run.N
	}
}

// addPart adds a part of the MTT entries of a pinned region.
func (d *Device) addPart(handle, part uint32) {
	reg, err := d.data.vm.Region(handle)
	if err != nil {
		return
	}
	x := pagesContext{slices.Collect(reg.Pages(uint64(part)*partPages, partPages))}
	j := d.journal
	c := j.codec.AppendTo(j.log.Begin(recPages, uint64(handle)<<32|uint64(part))).Of(contextVersion)
	x.record(c)
	j.log.End(c.Bytes())
}

func (j *controlJournal) addCQ(d *Device, o *cqObject) {
	x := takeCQ(d.data, o.q)
	x.events = 0 // the word says whether there is one
	j.put(recCQ, x.n, func(c *record.Codec) {
		record.Num(c, &o.word)
		x.record(c)
	})
}

// addSRQ adds an SRQ; where no QP uses it.
func (j *controlJournal) addSRQ(o *srqObject) {
	x := takeSRQ(o)
	j.put(recSRQObject, x.n, x.record)
}

// addQP adds a QP; on its engine.
func (j *controlJournal) addQP(o *qpObject) {
	x := takeQP(o)
	j.put(recQPObject, x.n, x.record)
}

func (j *controlJournal) addQueue() { j.put(recQueue, 0, j.queue.record) }

func (j *controlJournal) addJob(seq uint64) {
	c := j.codec.AppendTo(j.log.Begin(recJob, seq)).Of(contextVersion)
	j.jobs[seq].record(c)
	j.log.End(c.Bytes())
}

// commandPopped records a command that was popped; position is behind it.
func (d *Device) commandPopped(x *job, position uint16) {
	d.mu.Lock()
	defer d.mu.Unlock()
	j := d.journaled()
	if j == nil {
		return
	}
	d.chargeJournal()
	for _, seq := range j.gone {
		delete(j.jobs, seq)
		j.log.Add(recGone, uint64(recJob)<<32|seq&0xffffffff, nil)
	}
	j.gone = j.gone[:0]
	j.queue.popped = position
	j.addQueue()
	j.jobs[x.seq] = &jobRecord{head: x.chain.Head()}
	j.addJob(x.seq)
	d.commit(j)
}

// commandExecuted records what a command has done, and its answer. The caller holds mu.
func (d *Device) commandExecuted(x *job, touched []object) {
	j := d.journaled()
	if j == nil || len(touched) == 0 {
		return
	}
	for _, o := range touched {
		d.addObject(o)
	}
	d.addObject(object{kind: recDevice})
	j.answered(x, x.resp[:x.n])
	d.commit(j)
}

// answered adds the answer of a command that had an effect.
func (j *controlJournal) answered(x *job, answer []byte) {
	if r := j.jobs[x.seq]; r != nil {
		r.stage, r.answer = jobExecuted, slices.Clone(answer)
		j.addJob(x.seq)
	}
}

// effect makes the effect of a command valid, and that it has succeeded: for a command that must not be executed
// twice, in the moment of its effect, on the loop where this happens. add adds the objects. The caller's goroutine,
// which holds mu, waits for the loop.
func (c *cmd) effect(add func(*controlJournal)) {
	j := c.d.journaled()
	if j == nil || c.job == nil {
		return
	}
	add(j)
	var answer [abi.SizeResp]byte
	(&abi.Resp{Status: abi.StatusOK}).Encode(answer[:])
	j.answered(c.job, answer[:])
	if !j.log.Commit() {
		c.d.data.loseJournal() // renewing takes visits of loops
	}
}

// commandPushing records where the answer of a command goes in the used ring.
func (d *Device) commandPushing(x *job, position uint16) {
	d.mu.Lock()
	defer d.mu.Unlock()
	j := d.journaled()
	if j == nil || j.jobs[x.seq] == nil {
		return
	}
	r := j.jobs[x.seq]
	r.stage, r.used = jobPushed, position
	j.addJob(x.seq)
	d.commit(j)
}

// commandsShown records that the driver sees all answers that were pushed.
func (d *Device) commandsShown() {
	d.mu.Lock()
	defer d.mu.Unlock()
	j := d.journaled()
	if j == nil {
		return
	}
	for seq, r := range j.jobs {
		if r.stage == jobPushed && !slices.Contains(j.gone, seq) {
			j.gone = append(j.gone, seq)
		}
	}
}

// commandUnpopped records that a command was returned to the queue.
func (d *Device) commandUnpopped(seq uint64, position uint16) {
	d.mu.Lock()
	defer d.mu.Unlock()
	j := d.journaled()
	if j == nil {
		return
	}
	delete(j.jobs, seq)
	j.queue.popped = position
	j.addQueue()
	j.log.Add(recGone, uint64(recJob)<<32|seq&0xffffffff, nil)
	d.commit(j)
}

// queueStarts records that the command queue starts, with the commands that a killed process had begun.
func (d *Device) queueStarts(q *virtq.Queue, past []pastJob) {
	d.queueIs(queueRecord{popped: q.Popped()}, past)
}

// queueStopped records that the command queue was stopped at a position, with no command under way.
func (d *Device) queueStopped(position uint16) {
	d.queueIs(queueRecord{popped: position, stopped: true, at: position}, nil)
}

func (d *Device) queueIs(q queueRecord, past []pastJob) {
	d.mu.Lock()
	defer d.mu.Unlock()
	j := d.journaled()
	if j == nil {
		return
	}
	j.queue, j.gone = q, j.gone[:0]
	clear(j.jobs)
	for i := range past {
		j.jobs[past[i].seq] = &past[i].jobRecord
	}
	d.renewJournal()
}

// wiped records that no object is left. The caller holds mu.
func (d *Device) wiped() {
	if d.journal == nil {
		return
	}
	j := d.journal
	j.words = j.words[:0]
	for i := range d.lim.CQs + 1 {
		j.words = append(j.words, d.lim.CQs-i)
	}
	d.renewJournal() // first: without objects, what engines have recorded does not matter
	for _, e := range d.data.engines {
		e.onLoop(func() { e.journal.clear() })
	}
}

// deviceNumbers are what decides about the numbers of objects to come, and the generation.
type deviceNumbers struct{ generation, lastPD, lastCQ, lastSRQ, lastWindowPD uint32 }

func (p *deviceNumbers) record(c *record.Codec) {
	for _, n := range []*uint32{&p.generation, &p.lastPD, &p.lastCQ, &p.lastSRQ, &p.lastWindowPD} {
		record.Num(c, n)
	}
}
