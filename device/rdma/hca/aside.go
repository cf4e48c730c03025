// Side: control

package hca

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/translate"
)

// Commands that need host memory which is not there yet. A guest waits for the answers to CLEAR_MTT and DESTROY_MR
// before it frees pages (EP-3, TR-5), so no command may keep the goroutine waiting for the host's swap device. Such a
// command steps aside instead: a goroutine of its own waits for the memory, and the command then runs again, from the
// beginning, on the copy of its request. So it is validated again, takes effect at once or not at all, and only the
// command goroutine changes tables.
//
//	           request absent             memory absent                    response absent
//	popped --> stageRead --> executed --> stageRun --> executed --> ... --> stageAnswer --> answered
//	                                 \--> stageWarm (has taken effect) ------/
//
// The order of commands: each begins in the order of the queue. One that waits takes effect after those that overtook
// it. Drivers wait for the answer before they use an object, so only commands that are under way at once can be
// reordered. On one object they must do no harm: the second run finds what the table has by then. One pair needs more:
// a driver that has sent SET_MTT may send CLEAR_MTT for the same pages without waiting in between, and frees the pages
// afterwards. SET_MTT never waits before its effect, unless its request cannot be read; it is then refused as "later"
// if a CLEAR_MTT of the region overtook it (job.overtaken).

const (
	// maxAside bounds the commands that wait for host memory; the other places are for releases. Further ones are refused
	// with ENOMEM. Drivers have fewer commands under way.
	maxAside = maxJobs - 16
	// maxHolding bounds the goroutines that are in Conn.Hold at once: each may occupy a thread of the host.
	maxHolding = 16
	// maxOvertaken bounds job.overtaken; beyond it, any region may have been cleared.
	maxOvertaken = 16
)

// stage is where a job goes on when its host memory is there.
type stage uint8

const (
	stageRead   stage = iota // read the request
	stageRun                 // execute it, not for the first time
	stageWarm                // answer it
	stageAnswer              // write the response
)

// hostWait is host memory that a job waits for.
type hostWait struct {
	miss   translate.Miss      // a page to fetch, if there is nothing to hold
	ranges [][]translate.Range // to hold, each list by itself
	warm   bool                // only to make them present; failures do not matter

	// Results.
	holds []held // one for each list, charged already
	err   error
}

// do waits until the memory is there, or ctx ends. It runs on a goroutine of its own.
func (w *hostWait) do(ctx context.Context, conn virtio.Conn) {
	if len(w.ranges) == 0 {
		w.err = conn.Space().Fetch(ctx, w.miss, true)
		return
	}
	if w.warm {
		defer w.drop()
		for i := range w.ranges[0] { // one by one, so that little is held at a time
			release, err := conn.Hold(ctx, w.ranges[0][i:i+1])
			if err != nil {
				w.err = err
				return
			}
			release()
		}
		return
	}
	for i, ranges := range w.ranges {
		release, err := conn.Hold(ctx, ranges)
		if err != nil {
			w.err = err
			w.drop()
			return
		}
		w.holds[i].release = release
	}
}

// drop gives up what was to be held, or is.
func (w *hostWait) drop() { dropAll(w.holds) }

// failure is the status of a command whose wait failed (HF-2): "later", unless the memory does not exist.
func (w *hostWait) failure() error {
	s := abi.StatusNoMemory // the host has none, hostdriver.ErrBudget, or the queue stops
	switch {
	case errors.As(w.err, &s):
	case errors.Is(w.err, translate.ErrMiss), errors.Is(w.err, translate.ErrMemoryGone):
		s = abi.StatusFault
	}
	return &statusError{status: s, msg: w.err.Error()}
}

// waitError makes a command step aside. Nothing has changed, except if again is set.
type waitError struct {
	wait *hostWait
	// again continues the command in place of running it from the beginning; failed: the wait has failed.
	again func(c *cmd, failed error) error
}

func (e *waitError) Error() string { return "host memory is absent" }

// hold returns a hold of each list of ranges. At first the command steps aside for them, unless they cost more than the
// VM may use; when it runs again, they are there.
func (c *cmd) hold(ranges ...[]translate.Range) ([]held, error) {
	if w := c.waited; w != nil && slices.EqualFunc(w.ranges, ranges, slices.Equal) {
		c.waited = nil
		for i := range w.holds {
			w.holds[i].there()
		}
		return w.holds, nil
	}
	holds := make([]held, len(ranges))
	for i, x := range ranges {
		var err error
		if holds[i], err = newHeld(c.d.account, x); err != nil {
			dropAll(holds)
			return nil, err
		}
	}
	return nil, &waitError{wait: &hostWait{ranges: ranges, holds: holds}}
}

// arrivals are jobs whose wait has ended.
type arrivals struct {
	mu   sync.Mutex
	jobs []*job // guarded by mu
}

func (a *arrivals) add(j *job) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.jobs = append(a.jobs, j)
}

func (a *arrivals) take() []*job {
	a.mu.Lock()
	defer a.mu.Unlock()
	jobs := a.jobs
	a.jobs = nil
	return jobs
}

// stepAside makes j wait for w and go on at next.
func (c *commandLoop) stepAside(j *job, next stage, w *hostWait) {
	j.stage, j.wait = next, w
	j.since, j.warn = time.Now(), drainPatience
	if len(w.ranges) == 0 {
		c.d.fetches.Add(1)
	}
	c.aside = append(c.aside, j)
	c.wait(w, func() { c.arrived.add(j) })
}

// wait waits for w on a new goroutine, calls done there, and wakes the command goroutine.
func (c *commandLoop) wait(w *hostWait, done func()) {
	c.waits.Go(func() {
		if len(w.ranges) > 0 {
			c.holding <- struct{}{} // Hold ends with ctx, so this does, too
		}
		if err := translate.Contain(func() error { w.do(c.ctx, c.conn); return nil }); err != nil {
			w.err = err
			c.d.data.stopped(err, "stack", translate.StackOf(err))
		}
		if len(w.ranges) > 0 {
			<-c.holding
		}
		done()
		c.wake.Signal()
	})
}

// Reasons for which a command does not wait.
var (
	errManyWait = fmt.Errorf("%d commands wait for host memory already: %w", maxAside, abi.StatusNoMemory)
	errVanishes = fmt.Errorf("guest memory keeps vanishing: %w", abi.StatusIO)
)

// mayWait returns nil if j, which has not taken effect, may wait for host memory.
func (c *commandLoop) mayWait(j *job) error {
	switch j.tries++; {
	case j.tries > fetchTries:
		return errVanishes
	case len(c.aside) >= maxAside:
		return errManyWait
	}
	return nil
}

// continueArrived goes on with the jobs whose wait has ended, and reports whether there were any.
func (c *commandLoop) continueArrived() (any bool) {
	arrived := c.arrived.take()
	if c.ctx.Err() != nil {
		return false // the stop has ended these waits: finishAside goes on
	}
	for _, j := range arrived {
		any = true
		c.aside = slices.DeleteFunc(c.aside, func(x *job) bool { return x == j })
		w := j.wait
		j.wait = nil
		switch j.stage {
		case stageRead:
			if w.err != nil {
				c.refuse(j, w.failure())
			} else {
				c.begin(j)
			}
		case stageRun:
			j.waited = w
			c.run(j)
		case stageWarm:
			c.answer(j)
		case stageAnswer:
			if w.err != nil {
				c.drop(j, fmt.Errorf("response buffer: %w", w.err))
			} else {
				c.answer(j)
			}
		}
	}
	return any
}

// warnAside logs commands that wait for long.
func (c *commandLoop) warnAside() {
	for _, j := range c.aside {
		if t := time.Since(j.since); t >= j.warn {
			j.warn *= 2
			c.d.log.Warn("command waits for host memory", "since", t.Round(time.Millisecond))
		}
	}
}

// finishAside ends the jobs that wait when the queue stops; their waits have been cancelled. Those that have taken
// effect are answered, the others return to the queue or are refused, without effect.
func (c *commandLoop) finishAside() {
	c.waits.Wait()
	c.arrived.take()
	jobs := c.aside
	c.aside = nil
	// The queue can only take back the last chains that it gave out.
	for n := len(jobs); n > 0 && c.unpop(jobs); n = len(jobs) {
		jobs = slices.DeleteFunc(jobs, func(j *job) bool { return j.seq > c.popped })
	}
	for _, j := range jobs {
		w := j.wait
		j.wait = nil
		if w.err == nil {
			w.err = context.Canceled
		}
		switch j.stage {
		case stageRead:
			c.refuse(j, w.failure())
		case stageRun:
			j.waited = w
			c.run(j) // fails, or completes what has taken effect
		default:
			c.answer(j)
		}
	}
}

// unpop returns the chain that was popped last to the queue, if its request was never read.
func (c *commandLoop) unpop(jobs []*job) bool {
	i := slices.IndexFunc(jobs, func(j *job) bool { return j.seq == c.popped && j.stage == stageRead })
	if i < 0 {
		return false
	}
	if err := c.q.Unpop(&jobs[i].chain); err != nil {
		return false
	}
	c.d.commandUnpopped(jobs[i].seq, c.q.Popped())
	c.popped--
	return true
}
