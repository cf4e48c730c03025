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

// The command queue's goroutine. Commands run one after the other, but those whose
// answer has to wait for users of guest memory (EP-3) step aside, and are
// answered in whatever order they come to their end. They are bounded by maxJobs:
// a guest that has that many waiting has its next ones read when one is through.

const (
	// maxJobs bounds the commands that were taken and not answered.
	maxJobs = 64
	// A batch on a loop lasts microseconds: a release is looked at so many times at once,
	// which takes some 10 microseconds.
	drainSpins = 64
	// drainPatience is when a release is first complained of.
	drainPatience = time.Second
	// pollQueue is how often a queue is looked at whose driver does not kick.
	pollQueue = 2 * time.Millisecond
	// fetchTries bounds how often one access may find its page gone again.
	fetchTries = 1000
)

// job is a command that was taken and is not answered yet.
type job struct {
	chain virtq.Chain
	resp  [abi.SizeResp + maxReply]byte
	n     int // bytes of resp

	drain *translate.Drain
	since time.Time
	warn  time.Duration // since then, when to complain
}

// commandLoop is the goroutine of the command queue.
type commandLoop struct {
	d      *Device
	q      *virtq.Queue
	wake   *eventfd.Waiter // kicks, and readers of guest memory for whom a release waits
	cancel context.CancelFunc
	done   chan struct{}

	req     []byte
	free    []*job
	waiting []*job // oldest first
	unsent  bool   // answers were returned and not signalled yet
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

// stop ends the goroutine and waits for it. Commands that were taken are answered
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

// round executes and answers what it can, and sets a deadline for the next round
// where no signal can be relied on. It returns true when the queue stops.
func (c *commandLoop) round(ctx context.Context) (stopped bool) {
	for ctx.Err() == nil {
		err := c.serve(ctx)
		answered := c.answerDrained()
		c.signal()
		if answered && err == nil {
			continue // there may be more to take now
		}
		var again time.Duration
		switch {
		case err != nil && !virtq.IsRepairable(err):
			c.d.log.Error("command queue broken; device stopped until reset", "error", err)
		case err != nil || c.q.KickFD() < 0:
			again = pollQueue
		case len(c.waiting) > 0:
			again = drainPatience // to complain, if need be
		}
		if again > 0 {
			_ = c.wake.SetDeadline(time.Now().Add(again))
		}
		return false
	}
	return true
}

// serve executes all commands that are there, as far as jobs last. Those that wait are
// answered in between, for there may be commands without end.
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

// instant tells whether a request neither waits for anything nor takes long: the
// answer to the command before it, such as the SET_MTT of the same fault, may wait for
// it, so that both are one interrupt.
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

// drainSoon looks whether a release is through, for as long as a batch may take. It does
// not yield in between: Gosched would have another thread woken up each time.
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
		_ = c.answer(j) // a queue that broke says so at the next call
		return true
	})
	return answered
}

// finish answers the commands that still wait when the queue stops: it may run again later, and
// the driver must not see a command executed twice, or not at all.
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

// withMemory runs f, which touches the virtqueue and its buffers, in an epoch; if it
// meets a page that is absent on the host, that is fetched, and f runs again. f
// leaves the queue as it was when it fails with such a miss.
func (c *commandLoop) withMemory(ctx context.Context, f func() error) error {
	return c.d.retryMisses(ctx, func() error {
		err := translate.Guard(func() error {
			e := c.q.Space().Epochs()
			t := e.Enter(commandSlot)
			defer e.Leave(commandSlot, t)
			return f()
		})
		if _, absent := hostMiss(err); absent {
			c.signal() // fetching may take long
		}
		return err
	})
}

// retryMisses runs f until it meets no page that is absent on the host; those that it
// meets are fetched in between, outside of any epoch (PF-7). Not on loops.
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

// popRequest pops a chain and copies the request in. It asks for kicks before it looks
// for the last time.
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
		return fail(fmt.Errorf("no room for a response: %d bytes writable, need %d", j.chain.WritableLen(), abi.SizeResp))
	}
	err = c.withMemory(ctx, func() error {
		var m translate.Miss
		if n, m = j.chain.ReadAll(c.req); !m.OK() {
			return &faultError{what: "request buffer", miss: m}
		}
		return nil
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return 0, false, c.q.Unpop(&j.chain) // it is there when the queue runs again
	case err != nil:
		return fail(err)
	}
	return n, true, nil
}

// answer returns a command to the driver, who is yet to be signalled, and j to those that are free. It is not
// given up when the queue stops: the command has been executed.
func (c *commandLoop) answer(j *job) error {
	c.free = append(c.free, j)
	ctx := context.Background()
	n := 0
	err := c.withMemory(ctx, func() error {
		var m translate.Miss
		if n, m = j.chain.WriteAll(j.resp[:min(j.n, int(min(j.chain.WritableLen(), maxReply+abi.SizeResp)))]); !m.OK() {
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

// signal tells the driver of the answers that were returned.
func (c *commandLoop) signal() {
	if !c.unsent {
		return
	}
	c.unsent = false
	if err := c.withMemory(context.Background(), c.q.Signal); err != nil {
		c.q.Fail(err)
	}
}
