package guestdrv

import (
	"fmt"
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// commander issues commands: up to cmdSlots at once, each with a request and a
// response buffer of its own. The device begins them in the order of submission
// and answers in any. A goroutine waits for answers while somebody wants one; those that
// nobody waits for (post) are taken at the next occasion, without an interrupt.
type commander struct {
	mu      sync.Mutex
	q       *frontend.Queue // guarded by mu, but for Await
	d       *Device
	awaited int           // answers, or free slots, that somebody waits for; guarded by mu
	slots   chan *cmdSlot // free ones
	pairs   chan struct{} // batches that gather their slots
	all     [cmdSlots]*cmdSlot
}

const (
	cmdSlots    = 16
	cmdRespSize = pageSize
)

type cmdSlot struct {
	n    int
	req  *Buffer
	resp *Buffer
	op   abi.Opcode
	size int         // of the request
	done chan uint32 // bytes that the device wrote

	// Of a command that nobody waits for.
	posted  bool
	refused func() // called if it fails, unless nil; must not block
}

// encoder and decoder are the two halves of the structures in package abi.
type encoder interface{ Encode([]byte) }
type decoder interface{ Decode([]byte) error }

func newCommander(d *Device) (*commander, error) {
	c := &commander{q: d.fe.Queue(abi.CommandQueue), d: d, slots: make(chan *cmdSlot, cmdSlots), pairs: make(chan struct{}, cmdSlots/2)}
	for i := range cmdSlots {
		s := &cmdSlot{n: i, done: make(chan uint32, 1)}
		var err error
		if s.req, err = d.mem.alloc(abi.CmdMax, pageSize); err == nil {
			s.resp, err = d.mem.alloc(cmdRespSize, pageSize)
		}
		if err != nil {
			return nil, fmt.Errorf("command buffers: %w", err)
		}
		c.all[i] = s
		c.slots <- s
	}
	d.wg.Go(c.run)
	return c, nil
}

func (c *commander) run() {
	for c.q.Await(c.returned) {
		c.mu.Lock()
		err := c.reapLocked()
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// returned tells whether there is an answer to what somebody waits for; if not, an
// interrupt will say when to look again.
func (c *commander) returned() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.awaited > 0 && c.q.Returned()
}

// await changes the number of answers that are waited for: with the first, the device
// is asked for interrupts, with the last to spare them.
func (c *commander) await(n int) {
	if n == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.awaited
	c.awaited += n
	switch {
	case c.awaited == 0:
		c.q.EnableCall(false)
	case before == 0:
		// What has been returned already would bring no interrupt.
		for more := true; more; more = c.q.Returned() {
			if c.reapLocked() != nil {
				return
			}
		}
	}
}

// reapLocked takes all answers that are there.
func (c *commander) reapLocked() error {
	for {
		token, n, ok, err := c.q.Get()
		if err != nil {
			c.d.fail(err)
		}
		if err != nil || !ok {
			return err
		}
		// The queue returns a token only once per Add, so nothing here blocks.
		s := c.all[token]
		if !s.posted {
			s.done <- n
			continue
		}
		if err := parseResponse(s.op, s.resp.Bytes(), n, nil); err != nil && s.refused != nil {
			s.refused()
		}
		c.slots <- s
	}
}

// submit hands prepared slots to the device, in order.
func (c *commander) submit(slots ...*cmdSlot) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range slots {
		if err := c.q.Add(uint64(s.n), []frontend.Buf{{PA: translate.PA(s.req.PA()), Len: uint32(s.size)}},
			[]frontend.Buf{{PA: translate.PA(s.resp.PA()), Len: cmdRespSize}}); err != nil {
			return err
		}
	}
	c.q.Kick()
	return nil
}

// slot waits for a free slot.
func (c *commander) slot(op abi.Opcode, timeout *time.Timer) (*cmdSlot, error) {
	d := c.d
	if err := d.closing(); err != nil {
		return nil, fmt.Errorf("%v: %w", op, err)
	}
	select {
	case s := <-c.slots:
		return s, nil
	default:
	}
	c.await(1)
	defer c.await(-1)
	select {
	case s := <-c.slots:
		return s, nil
	case <-d.ctx.Done():
	case <-d.fe.Gone():
	case <-timeout.C:
		return nil, fmt.Errorf("%v: %w", op, ErrTimeout)
	}
	return nil, fmt.Errorf("%v: %w", op, d.closing())
}

// request is a command: fixed is encoded into size bytes, words follow it as a page
// list.
type request struct {
	op    abi.Opcode
	fixed encoder
	size  int
	words []uint64

	refused func() // of a posted command: see cmdSlot
}

// prepare writes a request.
func (s *cmdSlot) prepare(r *request) {
	n := r.size + 8*len(r.words)
	b := s.req.Bytes()
	(&abi.Req{Opcode: r.op, Length: uint32(n)}).Encode(b)
	if r.fixed != nil {
		r.fixed.Encode(b[abi.SizeReq:])
	}
	abi.PutPAs(b[abi.SizeReq+r.size:], r.words)
	s.op, s.size, s.refused = r.op, abi.SizeReq+n, r.refused
}

// finish waits for the answer to a submitted slot, puts the payload into resp, if
// that is not nil, and frees the slot.
func (c *commander) finish(s *cmdSlot, timeout *time.Timer, resp decoder) error {
	d := c.d
	select {
	case written := <-s.done:
		defer func() { c.slots <- s }()
		return parseResponse(s.op, s.resp.Bytes(), written, resp)
	case <-d.ctx.Done():
	case <-d.fe.Gone():
	case <-timeout.C:
		// The slot is lost: its buffers may still be written to.
		d.fail(ErrTimeout)
		timeout.Reset(0) // for the next of the batch
		return fmt.Errorf("%v: %w", s.op, ErrTimeout)
	}
	return fmt.Errorf("%v: %w", s.op, d.closing())
}

// do issues a command and waits for its answer: fixed is encoded into size bytes,
// words follow it as a page list. The response's payload is put into resp, if that
// is not nil.
func (d *Device) do(op abi.Opcode, fixed encoder, size int, resp decoder, words ...uint64) error {
	b, err := d.begin(request{op: op, fixed: fixed, size: size, words: words})
	if err != nil {
		return err
	}
	defer b.end()
	return b.wait(0, resp)
}

// batch is commands that were begun together.
type batch struct {
	d       *Device
	slots   [maxBatch]*cmdSlot
	awaited int // answers; 0: posted
	timeout *time.Timer
}

const maxBatch = 2

// begin is do in two halves: when it returns, the commands are in their place among
// all others, next to each other. The caller then waits for each, and ends the batch.
func (d *Device) begin(reqs ...request) (*batch, error) { return d.batch(len(reqs), reqs) }

// post is begin of commands for whose answers nobody waits. A request's refused is
// called, on any goroutine, if the device refuses it.
func (d *Device) post(reqs ...request) error {
	b, err := d.batch(0, reqs)
	if err == nil {
		b.end()
	}
	return err
}

func (d *Device) batch(awaited int, reqs []request) (*batch, error) {
	for i := range reqs {
		if r := &reqs[i]; abi.SizeReq+r.size+8*len(r.words) > abi.CmdMax {
			return nil, invalid("%v with %d words is longer than %d bytes", r.op, len(r.words), abi.CmdMax)
		}
	}
	if err := d.users.enter(); err != nil {
		return nil, fmt.Errorf("%v: %w", reqs[0].op, err)
	}
	b := &batch{d: d, awaited: awaited, timeout: time.NewTimer(d.cfg.Timeout)}
	d.cmds.await(awaited)
	if err := b.submit(reqs); err != nil {
		b.end()
		return nil, err
	}
	return b, nil
}

func (b *batch) submit(reqs []request) (err error) {
	c := b.d.cmds
	if len(reqs) > 1 {
		// Whoever holds a slot and waits for another must not find them all with
		// others that do the same.
		c.pairs <- struct{}{}
		defer func() { <-c.pairs }()
	}
	slots := b.slots[:len(reqs)]
	for i := range reqs {
		if slots[i], err = c.slot(reqs[i].op, b.timeout); err != nil {
			break
		}
		slots[i].prepare(&reqs[i])
		slots[i].posted = b.awaited == 0
	}
	if err == nil {
		if err = c.submit(slots...); err == nil {
			return nil
		}
		err = fmt.Errorf("%v: %w", reqs[0].op, err)
	}
	for _, s := range slots {
		if s != nil {
			c.slots <- s
		}
	}
	return err
}

// wait waits for the answer to command i, once.
func (b *batch) wait(i int, resp decoder) error { return b.d.cmds.finish(b.slots[i], b.timeout, resp) }

// end is called when nobody waits any more.
func (b *batch) end() {
	b.d.cmds.await(-b.awaited)
	b.timeout.Stop()
	b.d.users.leave()
}

// parseResponse judges what the device wrote: a header and, on success, a payload.
func parseResponse(op abi.Opcode, b []byte, written uint32, resp decoder) error {
	if uint64(written) > uint64(len(b)) {
		return fmt.Errorf("%v: response of %d bytes in a buffer of %d", op, written, len(b))
	}
	b = b[:written]
	var h abi.Resp
	if err := h.Decode(b); err != nil {
		return fmt.Errorf("%v: response: %w", op, err)
	}
	if h.Status != abi.StatusOK {
		return &CommandError{Op: op, Status: h.Status}
	}
	b = b[abi.SizeResp:]
	if uint64(h.Length) > uint64(len(b)) {
		return fmt.Errorf("%v: response says %d bytes of payload, %d are there", op, h.Length, len(b))
	}
	if resp == nil {
		return nil
	}
	if err := resp.Decode(b[:h.Length]); err != nil {
		return fmt.Errorf("%v: response: %w", op, err)
	}
	return nil
}

// onHandle is do for commands whose request is a handle.
func (d *Device) onHandle(op abi.Opcode, handle uint32, resp decoder) error {
	return d.do(op, &abi.Handle{Handle: handle}, abi.SizeHandle, resp)
}
