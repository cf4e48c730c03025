// Side: control

package hca

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// The command queue's goroutine. Commands begin in order. Commands whose answer waits for users of guest memory (EP-3),
// and those that need host memory (aside.go), step aside and complete in any order. maxJobs bounds them: if that many
// wait, the next command is read when one of them completes.

const (
	// maxJobs bounds the commands that were read and not answered.
	maxJobs = 64
	// A batch on a loop lasts microseconds: a release is polled this many times at once,
	// which takes some 10 microseconds.
	drainSpins = 64
	// drainPatience is the time after which an unfinished release is logged.
	drainPatience = time.Second
	// pollQueue is the polling interval of a queue whose driver does not kick.
	pollQueue = 2 * time.Millisecond
	// fetchTries bounds how often one access may find its page absent again.
	fetchTries = 1000
)

// job is a command that was popped and is not answered yet.
type job struct {
	chain virtq.Chain
	seq   uint64 // number of the chain, in the order of the queue
	room  uint64 // bytes of the response buffer
	req   []byte // a copy of the request; until the job steps aside, in commandLoop.req
	resp  [abi.SizeResp + maxReply]byte
	n     int // bytes of resp

	drain *translate.Drain
	since time.Time
	warn  time.Duration // age at which the next warning is logged

	admitted bool // it has waited for its share of processor time, or need not (paced.go)

	// Waiting for host memory (aside.go).
	stage  stage
	wait   *hostWait
	tries  int
	waited *hostWait               // whose memory the next run takes over
	again  func(*cmd, error) error // the next run; nil: from the beginning

	overtaken []uint32 // regions of which a later CLEAR_MTT has removed pages before the request was read
	cleared   uint32   // the region of which this command has removed pages, if clears is set
	clears    bool
}

// respond encodes a response with n bytes of payload, which are in place.
func (j *job) respond(s abi.Status, n int) {
	(&abi.Resp{Status: s, Length: uint32(n)}).Encode(j.resp[:])
	j.n = abi.SizeResp + n
}

// wasOvertaken reports whether a later command may have removed pages of the region already.
func (j *job) wasOvertaken(region uint32) bool {
	return len(j.overtaken) >= maxOvertaken || slices.Contains(j.overtaken, region)
}

// commandLoop is the goroutine of the command queue.
type commandLoop struct {
	d      *Device
	q      *virtq.Queue
	conn   virtio.Conn
	wake   *eventfd.Waiter // kicks, the last reader that a release waits for, and the end of waits for host memory
	ctx    context.Context // ends when the queue is stopped
	cancel context.CancelFunc
	done   chan struct{}

	req     []byte // of the command that is being executed for the first time
	free    []*job
	waiting []*job // for releases, oldest first
	paced   pacedJobs
	aside   []*job    // for host memory
	popped  uint64    // job.seq of the last chain
	past    []pastJob // of a killed process (revive.go)
	unsent  bool      // answers are in the used ring and not signalled yet
	// stopping is set while the last commands are answered: it bounds the time that this may take.
	stopping context.Context

	waits   sync.WaitGroup // goroutines that wait for host memory
	holding chan struct{}  // has a token of each that is in Conn.Hold
	arrived arrivals

	// While memory of the queue itself is fetched, no chain can be popped.
	popWait *hostWait
	popErr  error       // the miss
	popDone atomic.Bool // popWait has ended

	reported bool // the queue's failure has been logged
}

// newCommands makes what serves the queue, which start begins; past are commands that a killed process had popped.
func (d *Device) newCommands(q *virtq.Queue, past []pastJob) (c *commandLoop, err error) {
	c = &commandLoop{d: d, q: q, conn: d.conn, past: past, done: make(chan struct{}), req: make([]byte, abi.CmdMax),
		holding: make(chan struct{}, maxHolding)}
	if q.KickFD() >= 0 {
		c.wake, err = eventfd.Dup(q.KickFD())
	} else {
		c.wake, err = eventfd.New()
	}
	if err != nil {
		return nil, fmt.Errorf("hca: command queue: %w", err)
	}
	for i := range past {
		c.popped = max(c.popped, past[i].seq)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	q.Space().Epochs().SetSignal(c.wake.Signal)
	return c, nil
}

// start starts the goroutine.
func (c *commandLoop) start() { go c.loop() }

// stop ends the goroutine and waits for it, and for those that wait for host memory. Commands that were popped are
// answered or returned to the queue first.
func (c *commandLoop) stop() {
	c.cancel()
	c.wake.Close()
	<-c.done
}

func (c *commandLoop) loop() {
	defer close(c.done)
	err := translate.Contain(func() error { c.resumePast(); c.rounds(); return nil })
	if err == nil {
		err = translate.Contain(func() error { c.finish(); return nil })
	}
	if err != nil {
		c.crash(err)
	}
}

// crash stops the device after a panic (TR-6), until a reset. Commands under way get no answer.
func (c *commandLoop) crash(err error) {
	c.d.data.stopped(err, "stack", translate.StackOf(err))
	c.q.Fail(err)
	c.cancel()
	c.waits.Wait()
}

// rounds serves the queue until it is stopped.
func (c *commandLoop) rounds() {
	for {
		err := c.wake.Wait(c.round)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = c.wake.SetDeadline(time.Time{})
		}
		if err != nil || c.ctx.Err() != nil {
			return
		}
	}
}

// round executes and answers all commands that it can, and sets a deadline for the next
// round if no signal will announce it. It returns true when the queue stops.
func (c *commandLoop) round() (stopped bool) {
	w := c.d.cfg.Work.Start(worktime.Commands)
	defer w.Stop() // also after a panic
	for c.ctx.Err() == nil {
		err := c.serve(&w)
		progress := c.complete()
		c.signal()
		if progress && err == nil {
			continue // more may be ready to read now
		}
		if err == nil {
			err = c.q.Broken()
		}
		var again time.Duration
		switch {
		case err != nil && !virtq.IsRepairable(err):
			if !c.reported {
				c.reported = true
				c.d.log.Error("command queue broken; device stopped until reset", "error", err)
			}
		case err != nil || c.q.KickFD() < 0:
			again = pollQueue
		case len(c.waiting)+len(c.aside) > 0:
			again = drainPatience // to log what is late
		}
		if again > 0 {
			_ = c.wake.SetDeadline(time.Now().Add(again))
		}
		w.Stop() // what is charged now counts for the delay
		c.wakeForPaced()
		return false
	}
	return true
}

// serve executes all available commands while jobs are free. Waiting commands are completed
// in between, and the work is charged, because a guest can post commands without end.
func (c *commandLoop) serve(w *worktime.Watch) error {
	for n := 1; c.ctx.Err() == nil && len(c.waiting)+len(c.aside) < maxJobs; n++ {
		if n%chargeEvery == 0 {
			w.Lap()
		}
		c.complete()
		if err := c.q.Broken(); err != nil {
			return err
		}
		if j := c.admit(); j != nil {
			c.begin(j)
			continue
		}
		if len(c.paced.jobs) >= maxPaced {
			return nil
		}
		j := c.job()
		if ok, err := c.pop(j); err != nil || !ok {
			c.free = append(c.free, j)
			return err
		}
		c.begin(j)
	}
	return nil
}

// complete goes on with all commands whose release or wait has ended, and reports whether there were any.
func (c *commandLoop) complete() bool {
	drained := c.answerDrained()
	return c.continueArrived() || drained
}

// begin reads and executes the command of a chain that was popped.
func (c *commandLoop) begin(j *job) {
	n := 0
	err := c.inEpoch(func() error {
		var m translate.Miss
		if n, m = j.chain.ReadMessage(c.req); !m.OK() {
			return &faultError{what: "request buffer", miss: m}
		}
		return nil
	})
	if m, absent := hostMiss(err); absent {
		c.signal() // the fetch may take long
		if err = c.mayWait(j); err == nil {
			c.stepAside(j, stageRead, &hostWait{miss: m})
		} else {
			c.refuse(j, err)
		}
		return
	}
	if err != nil {
		c.drop(j, err)
		return
	}
	if !j.admitted && c.exceeds(c.req[:n]) {
		c.pace(j)
		return
	}
	j.admitted = true
	j.req = c.req[:n]
	if c.unsent && !instant(j.req) {
		c.signal()
	}
	c.run(j)
}

// run executes j. Its answer is returned, or it waits.
func (c *commandLoop) run(j *job) {
	next, w := c.d.execute(j)
	if w != nil && next == stageRun {
		if err := c.mayWait(j); err != nil { // it fails, or completes what has taken effect
			w.drop()
			j.waited = &hostWait{err: err}
			next, w = c.d.execute(j)
		}
	}
	if j.clears {
		j.clears = false
		c.overtake(j)
	}
	if w != nil {
		if next == stageRun || len(c.aside) < maxAside {
			if next == stageRun {
				j.req = slices.Clone(j.req)
			}
			c.stepAside(j, next, w)
			return
		}
		w.drop() // its pages are left to page faults
	}
	switch {
	case j.drain != nil && !drainSoon(j.drain):
		j.since, j.warn = time.Now(), drainPatience
		c.waiting = append(c.waiting, j)
	default:
		c.answer(j)
	}
}

// overtake records in jobs whose request is not read yet that j, a later command, has removed pages.
func (c *commandLoop) overtake(j *job) {
	for _, x := range slices.Concat(c.aside, c.paced.jobs) {
		if x.stage == stageRead && x.seq < j.seq && !x.wasOvertaken(j.cleared) {
			x.overtaken = append(x.overtaken, j.cleared)
		}
	}
}

// refuse answers j, which has had no effect, with the status of err.
func (c *commandLoop) refuse(j *job, err error) {
	c.d.data.warn("command refused", "status", statusOf(err), "reason", err)
	j.respond(statusOf(err), 0)
	c.answer(j)
}

// drop gives a job up, and breaks the queue.
func (c *commandLoop) drop(j *job, err error) {
	c.q.Fail(err)
	c.recycle(j)
}

// recycle makes j a free job.
func (c *commandLoop) recycle(j *job) {
	*j = job{chain: j.chain} // its segments are reused
	c.free = append(c.free, j)
}

// instant reports whether a request neither waits nor takes long. The answer to the
// previous command, such as the SET_MTT of the same fault, is then delayed until this
// one is answered, so that both raise one interrupt.
func instant(req []byte) bool {
	var h abi.Req
	return h.Decode(req) == nil && h.Opcode == abi.CmdResumeFault
}

func (c *commandLoop) job() *job {
	if n := len(c.free); n > 0 {
		j := c.free[n-1]
		c.free = c.free[:n-1]
		return j
	}
	return new(job)
}

// drainSoon polls a release for as long as a batch may take and reports whether it
// completed. It does not yield: Gosched would wake another thread each time.
func drainSoon(d *translate.Drain) bool {
	for range drainSpins {
		if d.Done() {
			return true
		}
	}
	return false
}

// answerDrained answers the commands whose release has completed.
func (c *commandLoop) answerDrained() (answered bool) {
	c.warnAside()
	c.waiting = slices.DeleteFunc(c.waiting, func(j *job) bool {
		if !j.drain.DoneOrSignal() {
			if t := time.Since(j.since); t >= j.warn {
				j.warn *= 2
				c.d.log.Warn("release waits: guest memory still in use", "since", t.Round(time.Millisecond), "held_by",
					j.drain.Held())
			}
			return false
		}
		answered = true
		c.answer(j)
		return true
	})
	return answered
}

// finish answers the commands under way when the queue stops: it may run again later, and
// the driver must see each command executed exactly once.
func (c *commandLoop) finish() {
	w := c.d.cfg.Work.Start(worktime.Commands)
	defer w.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	c.stopping = ctx
	c.finishPaced()
	c.finishAside()
	for _, j := range c.waiting {
		if err := j.drain.Wait(ctx); err != nil {
			c.d.log.Error("guest memory is still in use", "held_by", j.drain.Held())
			j.respond(abi.StatusIO, 0)
		}
		c.answer(j)
	}
	c.waiting = nil
	c.signal()
}

// inEpoch runs f, which accesses the virtqueue and its buffers, in an epoch. If f fails as a page is absent on the
// host, it must leave the queue unchanged.
func (c *commandLoop) inEpoch(f func() error) error {
	return c.q.Space().Epochs().Within(commandSlot, f)
}

// withRing is inEpoch for the used ring, which the transport holds while the queue runs. If a page of it is absent all
// the same, it is fetched and f runs again.
func (c *commandLoop) withRing(f func() error) error { return c.fetching(context.Background(), f) }

// fetching is inEpoch, and waits for pages that are absent.
func (c *commandLoop) fetching(ctx context.Context, f func() error) error {
	for range fetchTries {
		err := c.inEpoch(f)
		m, absent := hostMiss(err)
		if !absent {
			return err
		}
		c.d.fetches.Add(1)
		fctx, cancel := context.WithTimeout(ctx, drainTimeout)
		ferr := c.q.Space().Fetch(fctx, m, true)
		cancel()
		if ferr != nil {
			return fmt.Errorf("%w: %w", err, ferr)
		}
	}
	return errVanishes
}

// pop pops a chain, whose request can then be read. It enables kicks before its last check for a chain. While pages of
// the queue itself or of a table of indirect descriptors are fetched, nothing can be popped.
func (c *commandLoop) pop(j *job) (ok bool, err error) {
	if w := c.popWait; w != nil {
		if !c.popDone.Load() {
			return false, nil
		}
		if c.popWait = nil; w.err != nil {
			return false, fmt.Errorf("%w: %w", c.popErr, w.err)
		}
	}
	err = c.inEpoch(func() (err error) {
		if ok, err = c.q.Pop(&j.chain); err == nil && !ok {
			if err = c.q.SetNotify(true); err == nil {
				ok, err = c.q.Pop(&j.chain)
			}
		}
		return err
	})
	if m, absent := hostMiss(err); absent {
		c.signal() // the fetch may take long
		c.d.fetches.Add(1)
		c.popWait, c.popErr = &hostWait{miss: m}, err
		c.popDone.Store(false)
		c.wait(c.popWait, func() { c.popDone.Store(true) })
		return false, nil
	}
	if err != nil || !ok {
		return false, err
	}
	c.popped++
	j.seq = c.popped
	c.d.commandPopped(j, c.q.Popped())
	return true, c.check(j)
}

// check checks the buffers of a command that was popped. An error breaks the queue.
func (c *commandLoop) check(j *job) (err error) {
	j.room = j.chain.WritableLen()
	switch l := j.chain.ReadableLen(); {
	case l > uint64(len(c.req)):
		err = fmt.Errorf("request of %d bytes, at most %d are allowed", l, len(c.req))
	case j.room < abi.SizeResp:
		err = fmt.Errorf("response buffer of %d bytes, need %d", j.room, abi.SizeResp)
	}
	if err != nil {
		c.q.Fail(err)
	}
	return err
}

// answer returns a command to the driver, without signalling. A stopping queue does not cancel it: the command has been
// executed.
func (c *commandLoop) answer(j *job) {
	n := 0
	write := func() error {
		var m translate.Miss
		if n, m = j.chain.WriteMessage(j.resp[:min(j.n, int(min(j.room, maxReply+abi.SizeResp)))]); !m.OK() {
			return &faultError{what: "response buffer", miss: m}
		}
		return nil
	}
	err := c.inEpoch(write)
	if m, absent := hostMiss(err); absent {
		if c.stopping == nil {
			c.signal() // the fetch may take long
			c.stepAside(j, stageAnswer, &hostWait{miss: m})
			return
		}
		err = c.fetching(c.stopping, write)
	}
	if err == nil {
		c.d.commandPushing(j, c.q.Base())
		err = c.withRing(func() error { return c.q.Push(&j.chain, uint32(n)) })
	}
	if err != nil {
		c.drop(j, err)
		return
	}
	c.unsent = true
	c.recycle(j)
}

// signal notifies the driver of the returned answers.
func (c *commandLoop) signal() {
	if !c.unsent {
		return
	}
	c.unsent = false
	if err := c.withRing(c.q.Signal); err != nil {
		c.q.Fail(err)
		return
	}
	c.d.commandsShown()
}
