package hca

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/device/virtq"
	"github.com/vnicd/vnicd/translate"
)

// The command queue's goroutine. Commands run one after the other, but those whose
// answer has to wait for users of guest memory (EP-3) step aside, and are
// answered in whatever order they come to their end. They are bounded by maxJobs:
// a guest that has that many waiting has its next ones read when one is through.

const (
	// maxJobs bounds the commands that were taken and not answered.
	maxJobs = 64
	// A batch on a loop lasts microseconds: a release is looked at so many times
	// at once, then every drainPoll at first, less and less often, down to pollQueue.
	drainSpins = 32
	drainPoll  = 5 * time.Microsecond
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
	stopFD int
	cancel context.CancelFunc
	done   chan struct{}

	req     []byte
	free    []*job
	waiting []*job // oldest first
}

// startCommands starts the goroutine.
func (d *Device) startCommands(q *virtq.Queue) (*commandLoop, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("hca: eventfd: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &commandLoop{d: d, q: q, stopFD: fd, cancel: cancel, done: make(chan struct{}), req: make([]byte, abi.CmdMax)}
	go c.run(ctx)
	return c, nil
}

// stop ends the goroutine and waits for it. Commands that were taken are answered
// first.
func (c *commandLoop) stop() {
	c.cancel()
	one := [8]byte{1}
	_, _ = unix.Write(c.stopFD, one[:])
	<-c.done
	unix.Close(c.stopFD)
}

func (c *commandLoop) run(ctx context.Context) {
	defer close(c.done)
	defer c.settle()
	fds := []unix.PollFd{{Fd: int32(c.stopFD), Events: unix.POLLIN}, {Fd: int32(c.q.KickFD()), Events: unix.POLLIN}}
	var kick [8]byte
	pause := drainPoll
	for ctx.Err() == nil {
		served, err := c.serve(ctx)
		answered := c.sweep()
		if ctx.Err() != nil {
			return
		}
		timeout := time.Duration(-1)
		full := len(c.waiting) == maxJobs
		switch {
		case err != nil && !virtq.IsRepairable(err):
			c.d.log.Error("command queue broken; the device waits for a reset", "error", err)
			fds[1].Fd = -1
		case err != nil || fds[1].Fd < 0:
			timeout = pollQueue
		}
		if len(c.waiting) > 0 {
			if served || answered {
				pause = drainPoll
			}
			timeout = pause
			pause = min(2*pause, pollQueue/4)
		} else if answered && err == nil {
			continue // there may be more to take now
		}
		if err := pollFor(fds, full, timeout); err != nil {
			c.d.log.Error("command queue: poll failed", "error", err)
			return
		}
		switch re := fds[1].Revents; {
		case re&unix.POLLIN != 0:
			_, _ = unix.Read(c.q.KickFD(), kick[:])
		case re != 0:
			fds[1].Fd = -1 // hang-up or a bad descriptor would make poll spin
		}
	}
}

// pollFor waits for the descriptors, at most for timeout unless that is negative.
// With full set, kicks are left for later.
func pollFor(fds []unix.PollFd, full bool, timeout time.Duration) error {
	n := len(fds)
	if full {
		n = 1
		fds[1].Revents = 0
	}
	var ts *unix.Timespec
	if timeout >= 0 {
		t := unix.NsecToTimespec(int64(timeout))
		ts = &t
	}
	if _, err := unix.Ppoll(fds[:n], ts, nil); err != nil && !errors.Is(err, unix.EINTR) {
		return err
	}
	return nil
}

// serve executes all commands that are there, as far as jobs last. Those that wait are
// answered in between, for there may be commands without end.
func (c *commandLoop) serve(ctx context.Context) (served bool, err error) {
	if c.q.Broken() != nil {
		return false, nil
	}
	for ctx.Err() == nil && len(c.waiting) < maxJobs {
		if c.sweep() {
			served = true
		}
		j := c.job()
		n, ok, err := c.take(ctx, j)
		if err != nil || !ok {
			c.free = append(c.free, j)
			return served, err
		}
		served = true
		j.n, j.drain = c.d.execute(ctx, c.req[:n], j.resp[:], j.chain.WritableLen())
		if j.drain != nil && !drainSoon(j.drain) {
			j.since, j.warn = time.Now(), drainPatience
			c.waiting = append(c.waiting, j)
			continue
		}
		if err := c.answer(j); err != nil {
			return served, err
		}
	}
	return served, nil
}

func (c *commandLoop) job() *job {
	if n := len(c.free); n > 0 {
		j := c.free[n-1]
		c.free = c.free[:n-1]
		return j
	}
	return new(job)
}

// drainSoon looks whether a release is through, for as long as a batch may take.
func drainSoon(d *translate.Drain) bool {
	for range drainSpins {
		if d.Done() {
			return true
		}
		runtime.Gosched()
	}
	return false
}

// sweep answers the commands whose release is through.
func (c *commandLoop) sweep() (answered bool) {
	c.waiting = slices.DeleteFunc(c.waiting, func(j *job) bool {
		if !j.drain.Done() {
			if t := time.Since(j.since); t >= j.warn {
				j.warn *= 2
				c.d.log.Warn("guest memory is still in use, its release waits", "since", t.Round(time.Millisecond), "held_by", j.drain.Held())
			}
			return false
		}
		answered = true
		_ = c.answer(j) // a queue that broke says so at the next call
		return true
	})
	return answered
}

// settle answers what still waits when the queue stops: it may run again later, and
// the driver must not see a command executed twice, or not at all.
func (c *commandLoop) settle() {
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
}

// touch runs f, which touches the virtqueue and its buffers, in an epoch; if it
// meets a page that is absent on the host, that is fetched, and f runs again. f
// leaves the queue as it was when it fails with such a miss.
func (c *commandLoop) touch(ctx context.Context, f func() error) error {
	return c.d.fetching(ctx, func() error {
		return translate.Guard(func() error {
			e := c.q.Space().Epochs()
			t := e.Enter(commandSlot)
			defer e.Leave(commandSlot, t)
			return f()
		})
	})
}

// fetching runs f until it meets no page that is absent on the host; those that it
// meets are fetched in between, outside of any epoch (PF-7). Not on loops.
func (d *Device) fetching(ctx context.Context, f func() error) error {
	for range fetchTries {
		err := f()
		m, ok := hostMiss(err)
		if !ok {
			return err
		}
		d.fetches.Add(1)
		fctx, cancel := context.WithTimeout(ctx, drainTimeout)
		ferr := d.space().Fetch(fctx, m, true)
		cancel()
		if ferr != nil {
			return fmt.Errorf("%w: %w", err, ferr)
		}
	}
	return refuse(abi.StatusIO, "guest memory keeps vanishing")
}

// hostMiss finds a host fault in err.
func hostMiss(err error) (translate.Miss, bool) {
	var f *faultError
	var q *virtq.MissError
	switch {
	case err == nil:
	case errors.As(err, &f):
		return f.miss, f.miss.Kind == translate.HostFault
	case errors.As(err, &q):
		return q.Miss, q.Miss.Kind == translate.HostFault
	}
	return translate.Miss{}, false
}

// take pops a chain and copies the request in. It asks for kicks before it looks
// for the last time.
func (c *commandLoop) take(ctx context.Context, j *job) (n int, ok bool, err error) {
	err = c.touch(ctx, func() (err error) {
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
	err = c.touch(ctx, func() error {
		var m translate.Miss
		if n, m = j.chain.ReadAll(c.req); !m.OK() {
			return &faultError{what: "request buffer", miss: m}
		}
		return nil
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return 0, false, c.q.Unpop(1) // it is there when the queue runs again
	case err != nil:
		return fail(err)
	}
	return n, true, nil
}

// answer returns a command to the driver, and j to those that are free. It is not
// given up when the queue stops: the command has been executed.
func (c *commandLoop) answer(j *job) error {
	c.free = append(c.free, j)
	ctx := context.Background()
	n := 0
	err := c.touch(ctx, func() error {
		var m translate.Miss
		if n, m = j.chain.WriteAll(j.resp[:min(j.n, int(min(j.chain.WritableLen(), maxReply+abi.SizeResp)))]); !m.OK() {
			return &faultError{what: "response buffer", miss: m}
		}
		return nil
	})
	if err == nil {
		err = c.touch(ctx, func() error { return c.q.Push(&j.chain, uint32(n)) })
	}
	if err == nil {
		err = c.touch(ctx, c.q.Signal)
	}
	if err != nil {
		c.q.Fail(err)
	}
	return err
}
