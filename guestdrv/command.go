package guestdrv

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// commander issues commands: at most cmdSlots at once, each with its own request and response buffer. The device begins
// commands in the order of submission and answers them in any order.
//
// A slot belongs to its caller from slot() until the answer is taken. A caller that stops waiting abandons the slot:
// the device keeps it, and reapLocked returns it to the free slots when the answer arrives. Posted commands are
// abandoned from the beginning.
//
// Interrupts are enabled only while awaited is not zero. Answers to posted commands wait for the next reap, which takes
// place after postedDelay at the latest: an answer may be a refusal.
type commander struct {
	mu       sync.Mutex
	q        *frontend.Queue // guarded by mu, but for Await
	awaited  int             // callers that wait for an answer or a free slot, and late answers; guarded by mu
	posted   int             // posted commands whose answers have not been taken; guarded by mu
	watching bool            // reapPosted is scheduled; guarded by mu
	d        *Device
	slots    chan *cmdSlot // free slots
	pairs    chan struct{} // limits batches that are collecting slots
	all      [cmdSlots]*cmdSlot
}

const (
	cmdSlots    = 16
	cmdRespSize = pageSize
	postedDelay = 10 * time.Millisecond
)

type cmdSlot struct {
	n    int
	req  *Buffer
	resp *Buffer
	op   abi.Opcode
	size int         // of the request
	done chan uint32 // bytes that the device wrote

	abandoned bool // no caller waits; guarded by commander.mu once submitted
	late      bool // abandoned while a caller waited: counted in commander.awaited; guarded by commander.mu
	onLate    lateFunc
}

// lateFunc receives the answer to a command that no caller waits for. It is called with commander.mu held, so it must
// neither block nor issue a command. The payload is only valid during the call.
type lateFunc func(payload []byte, err error)

// encoder and decoder are the two halves of the structures in package abi.
type encoder interface{ Encode([]byte) }
type decoder interface{ Decode([]byte) error }

// decode decodes what the device wrote. A later device may use fields that are reserved here: they are ignored (CO-6).
func decode(x decoder, b []byte) error {
	if err := x.Decode(b); !errors.Is(err, abi.ErrReserved) {
		return err
	}
	return nil
}

func newCommander(d *Device) (*commander, error) {
	c := &commander{q: d.fe.Queue(abi.CommandQueue), d: d, slots: make(chan *cmdSlot, cmdSlots),
		pairs: make(chan struct{}, cmdSlots/2)}
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

// returned reports whether an awaited answer may have arrived. If not, an interrupt follows the next one.
func (c *commander) returned() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.awaited > 0 && c.q.Returned()
}

// await adds n to the number of awaited answers. The first enables interrupts, the last disables them.
func (c *commander) await(n int) {
	if n == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.awaited
	c.addAwaitedLocked(n)
	if before == 0 {
		// Answers that arrived while interrupts were disabled raise none.
		for more := true; more; more = c.q.Returned() {
			if c.reapLocked() != nil {
				return
			}
		}
	}
}

func (c *commander) addAwaitedLocked(n int) {
	if c.awaited += n; c.awaited == 0 {
		c.q.EnableCall(false)
	}
}

// reapLocked takes all answers that have arrived.
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
		if !s.abandoned {
			s.done <- n
			continue
		}
		if s.onLate != nil {
			s.onLate(parseResponse(s.op, s.resp.Bytes(), n))
		}
		if s.late {
			c.addAwaitedLocked(-1)
		} else {
			c.posted--
		}
		s.abandoned, s.late, s.onLate = false, false, nil
		c.slots <- s
	}
}

// watchLocked schedules reapPosted if there are posted commands.
func (c *commander) watchLocked() {
	if c.posted == 0 || c.watching {
		return
	}
	c.watching = true
	time.AfterFunc(postedDelay, func() { c.d.late.add(c.reapPosted) })
}

// reapPosted takes the answers to posted commands.
func (c *commander) reapPosted() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watching = false
	if c.reapLocked() == nil && c.d.Err() == nil {
		c.watchLocked()
	}
}

// abandon leaves a slot to the device, unless its answer has arrived.
func (c *commander) abandon(s *cmdSlot) (written uint32, answered bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case written = <-s.done:
		return written, true
	default:
	}
	s.abandoned, s.late = true, true
	c.addAwaitedLocked(1) // interrupts stay on until the answer arrives: it may release memory
	return 0, false
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
	for _, s := range slots {
		if s.abandoned {
			c.posted++
		}
	}
	c.watchLocked()
	c.q.Kick()
	return nil
}

// slot waits for a free slot.
func (c *commander) slot(ctx context.Context, op abi.Opcode, timeout *time.Timer) (*cmdSlot, error) {
	d := c.d
	err := d.Err()
	if err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
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
	case <-ctx.Done():
		return nil, fmt.Errorf("%v: %w", op, context.Cause(ctx))
	case <-timeout.C:
		timeout.Reset(0) // for later waits with the same timer
		return nil, fmt.Errorf("%v: %w", op, ErrTimeout)
	case <-d.done:
	}
	return nil, fmt.Errorf("%v: %w", op, d.Err())
}

// request is a command: fixed is encoded into size bytes, words follow it as a list of pages.
type request struct {
	op     abi.Opcode
	fixed  encoder
	size   int
	words  []uint64
	onLate lateFunc // or nil
}

// prepare writes a request into its slot.
func (s *cmdSlot) prepare(r *request, posted bool) {
	n := r.size + 8*len(r.words)
	b := s.req.Bytes()
	(&abi.Req{Opcode: r.op, Length: uint32(n)}).Encode(b)
	if r.fixed != nil {
		r.fixed.Encode(b[abi.SizeReq:])
	}
	abi.PutPAs(b[abi.SizeReq+r.size:], r.words)
	s.op, s.size, s.onLate, s.abandoned = r.op, abi.SizeReq+n, r.onLate, posted
}

// finish waits for the answer to a submitted slot, decodes the payload into resp unless that is nil, and frees the
// slot. If abandoned is true the answer is outstanding and goes to the request's onLate.
func (c *commander) finish(ctx context.Context, s *cmdSlot, timeout *time.Timer, resp decoder) (abandoned bool,
	err error) {
	d := c.d
	op := s.op
	var written uint32
	answered := false
	select {
	case written = <-s.done:
		answered = true
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timeout.C:
		err = ErrTimeout
		timeout.Reset(0) // for the next command of the batch
	case <-d.done:
		if err = d.Err(); d.ctx.Err() != nil || d.gone() {
			return false, fmt.Errorf("%v: %w", op, err)
		}
		// The device is connected and may still use the memory of the command.
	}
	if !answered {
		if written, answered = c.abandon(s); !answered {
			return true, fmt.Errorf("%v: %w", op, err)
		}
	}
	defer func() { s.onLate = nil; c.slots <- s }()
	return false, decodeResponse(op, s.resp.Bytes(), written, resp)
}

// call issues a command and waits for its answer, whose payload is decoded into resp unless that is nil. If abandoned
// is true, ctx ended, Config.Timeout passed or the device violated the protocol first: the device may execute the
// command later, and r.onLate receives the answer.
func (d *Device) call(ctx context.Context, r request, resp decoder) (abandoned bool, err error) {
	b, err := d.begin(ctx, r)
	if err != nil {
		return false, err
	}
	defer b.end()
	return b.wait(ctx, 0, resp)
}

// do is call for commands that leave nothing to undo.
func (d *Device) do(ctx context.Context, op abi.Opcode, fixed encoder, size int, resp decoder, words ...uint64) error {
	_, err := d.call(ctx, request{op: op, fixed: fixed, size: size, words: words}, resp)
	return err
}

// onHandle is do for commands whose request is a handle.
func (d *Device) onHandle(ctx context.Context, op abi.Opcode, handle uint32, resp decoder) error {
	return d.do(ctx, op, &abi.Handle{Handle: handle}, abi.SizeHandle, resp)
}

// batch is a group of commands that were begun together.
type batch struct {
	d       *Device
	slots   [maxBatch]*cmdSlot
	awaited int // answers; 0: posted
	timeout *time.Timer
}

const maxBatch = 2

// begin submits commands next to each other in the order of all commands. The caller then waits for each and ends the
// batch.
func (d *Device) begin(ctx context.Context, reqs ...request) (*batch, error) {
	return d.batch(ctx, len(reqs), reqs)
}

// post submits commands without waiting for their answers, which go to each request's onLate.
func (d *Device) post(ctx context.Context, reqs ...request) error {
	b, err := d.batch(ctx, 0, reqs)
	if err == nil {
		b.end()
	}
	return err
}

func (d *Device) batch(ctx context.Context, awaited int, reqs []request) (*batch, error) {
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
	if err := b.submit(ctx, reqs); err != nil {
		b.end()
		return nil, err
	}
	return b, nil
}

func (b *batch) submit(ctx context.Context, reqs []request) (err error) {
	c := b.d.cmds
	if len(reqs) > 1 {
		// A batch that has one slot and waits for another must not be blocked by batches that do the same.
		select {
		case c.pairs <- struct{}{}:
		case <-ctx.Done():
			return fmt.Errorf("%v: %w", reqs[0].op, context.Cause(ctx))
		case <-b.timeout.C:
			b.timeout.Reset(0)
			return fmt.Errorf("%v: %w", reqs[0].op, ErrTimeout)
		case <-b.d.done:
			return fmt.Errorf("%v: %w", reqs[0].op, b.d.Err())
		}
		defer func() { <-c.pairs }()
	}
	slots := b.slots[:len(reqs)]
	for i := range reqs {
		if slots[i], err = c.slot(ctx, reqs[i].op, b.timeout); err != nil {
			break
		}
		slots[i].prepare(&reqs[i], b.awaited == 0)
	}
	if err == nil {
		if err = c.submit(slots...); err == nil {
			return nil
		}
		err = fmt.Errorf("%v: %w", reqs[0].op, err)
	}
	for _, s := range slots {
		if s != nil {
			s.abandoned, s.onLate = false, nil
			c.slots <- s
		}
	}
	return err
}

// wait waits for the answer to command i, once.
func (b *batch) wait(ctx context.Context, i int, resp decoder) (abandoned bool, err error) {
	return b.d.cmds.finish(ctx, b.slots[i], b.timeout, resp)
}

// end is called when the caller has waited for all commands.
func (b *batch) end() {
	b.d.cmds.await(-b.awaited)
	b.timeout.Stop()
	b.d.users.leave()
}

// decodeResponse checks the n bytes that the device wrote and decodes the payload into resp, unless that is nil.
func decodeResponse(op abi.Opcode, b []byte, n uint32, resp decoder) error {
	payload, err := parseResponse(op, b, n)
	if err != nil || resp == nil {
		return err
	}
	if err := decode(resp, payload); err != nil {
		return fmt.Errorf("%v: malformed response: %w", op, err)
	}
	return nil
}

// parseResponse checks the n bytes that the device wrote, a header and, on success, a payload, and returns the payload.
func parseResponse(op abi.Opcode, b []byte, n uint32) ([]byte, error) {
	if uint64(n) > uint64(len(b)) {
		return nil, fmt.Errorf("%v: response of %d bytes in a buffer of %d", op, n, len(b))
	}
	b = b[:n]
	var h abi.Resp
	if err := decode(&h, b); err != nil {
		return nil, fmt.Errorf("%v: malformed response: %w", op, err)
	}
	if h.Status != abi.StatusOK {
		return nil, &CommandError{Command: op.String(), Status: Status(h.Status)}
	}
	b = b[abi.SizeResp:]
	if uint64(h.Length) > uint64(len(b)) {
		return nil, fmt.Errorf("%v: response announces %d bytes of payload and has %d", op, h.Length, len(b))
	}
	return b[:h.Length], nil
}
