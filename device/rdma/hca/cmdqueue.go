// Side: control

package hca

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// The command queue's goroutine. Commands run in order, except that commands whose
// answer waits for users of guest memory (EP-3) step aside and complete in any order.
// maxJobs bounds them: if that many wait, the next command is read when one of them
// completes.

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

// job is a command that was read and is not answered yet.
type job struct {
	chain virtq.Chain
	resp  [abi.SizeResp + maxReply]byte
	n     int // bytes of resp

	drain *translate.Drain
	since time.Time
	warn  time.Duration // age at which the next warning is logged
}

// commandLoop is the goroutine of the command queue.
type commandLoop struct {
	d      *Device
	q      *virtq.Queue
	wake   *eventfd.Waiter // kicks, and the last reader that a release waits for
	cancel context.CancelFunc
	done   chan struct{}

	req     []byte
	free    []*job
	waiting []*job // oldest first
	unsent  bool   // answers are in the used ring and not signalled yet
}

// startCommands starts the goroutine.
func (d *Device) startCommands(q *virtq.Queue) (c *commandLoop, err error) {
	c = &commandLoop{d: d, q: q, done: make(chan struct{}), req: make([]byte, abi.CmdMax)}
	if q.KickFD() >= 0 {
		c.wake, err = eventfd.Dup(q.KickFD())
	} else {
		c.wake, err = eventfd.New()
	}
	if err != nil {
		return nil, fmt.Errorf("hca: command queue: %w", err)
	}
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(context.Background())
	q.Space().Epochs().SetSignal(c.wake.Signal)
	go c.run(ctx)
	return c, nil
}

// stop ends the goroutine and waits for it. Commands that were read are answered
// first.
func (c *commandLoop) stop() {
	c.cancel()
	c.wake.Close()
	<-c.done
}

func (c *commandLoop) run(ctx context.Context) {
	defer close(c.done)
	defer c.finish()
	for {
		err := c.wake.Wait(func() bool { return c.round(ctx) })
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = c.wake.SetDeadline(time.Time{})
		}
		if err != nil || ctx.Err() != nil {
			return
		}
	}
}

// round executes and answers all commands that it can, and sets a deadline for the next
// round if no signal will announce it. It returns true when the queue stops.
func (c *commandLoop) round(ctx context.Context) (stopped bool) {
	for ctx.Err() == nil {
		err := c.serve(ctx)
		answered := c.answerDrained()
		c.signal()
		if answered && err == nil {
			continue // more may be ready to read now
		}
		var again time.Duration
		switch {
		case err != nil && !virtq.IsRepairable(err):
			c.d.log.Error("command queue broken; device stopped until reset", "error", err)
		case err != nil || c.q.KickFD() < 0:
			again = pollQueue
		case len(c.waiting) > 0:
			again = drainPatience // to log a late release
		}
		if again > 0 {
			_ = c.wake.SetDeadline(time.Now().Add(again))
		}
		return false
	}
	return true
}

// serve executes all available commands while jobs are free. Waiting commands are answered
// in between, because a guest can post commands without end.
func (c *commandLoop) serve(ctx context.Context) error {
	if c.q.Broken() != nil {
		return nil
	}
	for ctx.Err() == nil && len(c.waiting) < maxJobs {
		c.answerDrained()
		j := c.job()
		n, ok, err := c.popRequest(ctx, j)
		if err != nil || !ok {
			c.free = append(c.free, j)
			return err
		}
		if c.unsent && !instant(c.req[:n]) {
			c.signal()
		}
		j.n, j.drain = c.d.execute(ctx, c.req[:n], j.resp[:], j.chain.WritableLen())
		if j.drain != nil && !drainSoon(j.drain) {
			j.since, j.warn = time.Now(), drainPatience
			c.waiting = append(c.waiting, j)
			continue
		}
		if err := c.answer(j); err != nil {
			return err
		}
	}
	return nil
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
		_ = c.answer(j) // a broken queue fails at the next call
		return true
	})
	return answered
}

// finish answers the waiting commands when the queue stops: it may run again later, and
// the driver must see each command executed exactly once.
func (c *commandLoop) finish() {
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	for _, j := range c.waiting {
		if err := j.drain.Wait(ctx); err != nil {
			c.d.log.Error("guest memory is still in use", "held_by", j.drain.Held())
			(&abi.Resp{Status: abi.StatusIO}).Encode(j.resp[:])
			j.n = abi.SizeResp
		}
		_ = c.answer(j)
	}
	c.waiting = nil
	c.signal()
}

// withMemory runs f, which accesses the virtqueue and its buffers, in an epoch. If f
// meets a page that is absent on the host, the page is fetched and f runs again. If f
// fails with such a miss it must leave the queue unchanged.
func (c *commandLoop) withMemory(ctx context.Context, f func() error) error {
	return c.d.retryMisses(ctx, func() error {
		err := translate.Guard(func() error {
			e := c.q.Space().Epochs()
			t := e.Enter(commandSlot)
			defer e.Leave(commandSlot, t)
			return f()
		})
		if _, absent := hostMiss(err); absent {
			c.signal() // the fetch may take long
		}
		return err
	})
}

// retryMisses runs f until it meets no page that is absent on the host. The pages are
// fetched in between, outside of any epoch (PF-7). Not on loops.
func (d *Device) retryMisses(ctx context.Context, f func() error) error {
	for range fetchTries {
		err := f()
		m, ok := hostMiss(err)
		if !ok {
			return err
		}
		d.fetches.Add(1)
		fctx, cancel := context.WithTimeout(ctx, drainTimeout)
		ferr := d.data.space().Fetch(fctx, m, true)
		cancel()
		if ferr != nil {
			return fmt.Errorf("%w: %w", err, ferr)
		}
	}
	return refuse(abi.StatusIO, "guest memory keeps vanishing")
}

// popRequest pops a chain and copies the request in. It enables kicks before its last
// check for a request.
func (c *commandLoop) popRequest(ctx context.Context, j *job) (n int, ok bool, err error) {
	err = c.withMemory(ctx, func() (err error) {
		if ok, err = c.q.Pop(&j.chain); err == nil && !ok {
			if err = c.q.SetNotify(true); err == nil {
				ok, err = c.q.Pop(&j.chain)
			}
		}
		return err
	})
	if err != nil || !ok {
		return 0, false, err
	}
	fail := func(err error) (int, bool, error) {
		c.q.Fail(err)
		return 0, false, err
	}
	if l := j.chain.ReadableLen(); l > uint64(len(c.req)) {
		return fail(fmt.Errorf("request of %d bytes, at most %d are allowed", l, len(c.req)))
	}
	if j.chain.WritableLen() < abi.SizeResp {
		return fail(fmt.Errorf("response buffer of %d bytes, need %d", j.chain.WritableLen(), abi.SizeResp))
	}
	err = c.withMemory(ctx, func() error {
		var m translate.Miss
		if n, m = j.chain.ReadMessage(c.req); !m.OK() {
			return &faultError{what: "request buffer", miss: m}
		}
		return nil
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return 0, false, c.q.Unpop(&j.chain) // the queue will find it when it runs again
	case err != nil:
		return fail(err)
	}
	return n, true, nil
}

// answer returns a command to the driver, without signalling, and j to the free jobs. A stopping queue does not cancel
// it: the command has been executed.
func (c *commandLoop) answer(j *job) error {
	c.free = append(c.free, j)
	ctx := context.Background()
	n := 0
	err := c.withMemory(ctx, func() error {
		var m translate.Miss
		if n, m = j.chain.WriteMessage(j.resp[:min(j.n, int(min(j.chain.WritableLen(), maxReply+abi.SizeResp)))]); !m.OK() {
			return &faultError{what: "response buffer", miss: m}
		}
		return nil
	})
	if err == nil {
		err = c.withMemory(ctx, func() error { return c.q.Push(&j.chain, uint32(n)) })
	}
	if err != nil {
		c.q.Fail(err)
		return err
	}
	c.unsent = true
	return nil
}

// signal notifies the driver of the returned answers.
func (c *commandLoop) signal() {
	if !c.unsent {
		return
	}
	c.unsent = false
	if err := c.withMemory(context.Background(), c.q.Signal); err != nil {
		c.q.Fail(err)
	}
}
