package hca

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/device/virtq"
	"github.com/vnicd/vnicd/translate"
)

// commandTable lists every command: the size of the request's fixed part, whether
// more may follow it (lists of PAs), and the size of the reply's payload. What is
// not here is refused with EOPNOTSUPP.
var commandTable = [...]struct {
	fixed int
	more  bool
	reply int
	run   func(*cmd) error
}{
	abi.CmdQueryDevice:  {0, false, abi.SizeDeviceAttr, queryDevice},
	abi.CmdQueryPort:    {0, false, abi.SizePortAttr, queryPort},
	abi.CmdSetGID:       {abi.SizeSetGID, false, 0, setGID},
	abi.CmdClearGID:     {abi.SizeClearGID, false, 0, clearGID},
	abi.CmdSetDoorbells: {abi.SizeSetDoorbells, false, 0, setDoorbells},
	abi.CmdSetAHTable:   {abi.SizeSetAHTable, true, 0, setAHTable},
	abi.CmdCreatePD:     {0, false, abi.SizeHandle, createPD},
	abi.CmdDestroyPD:    {abi.SizeHandle, false, 0, destroyPD},
	abi.CmdCreateCQ:     {abi.SizeCreateCQ, true, abi.SizeHandle, createCQ},
	abi.CmdResizeCQ:     {abi.SizeResizeCQ, true, 0, resizeCQ},
	abi.CmdDestroyCQ:    {abi.SizeHandle, false, 0, destroyCQ},
	abi.CmdCreateSRQ:    {abi.SizeCreateSRQ, true, abi.SizeHandle, createSRQ},
	abi.CmdModifySRQ:    {abi.SizeModifySRQ, true, 0, modifySRQ},
	abi.CmdQuerySRQ:     {abi.SizeHandle, false, abi.SizeSRQAttr, querySRQ},
	abi.CmdDestroySRQ:   {abi.SizeHandle, false, 0, destroySRQ},
	abi.CmdCreateQP:     {abi.SizeCreateQP, true, abi.SizeCreateQPResp, createQP},
	abi.CmdModifyQP:     {abi.SizeQPAttr, false, 0, modifyQP},
	abi.CmdQueryQP:      {abi.SizeHandle, false, abi.SizeQPAttr, queryQP},
	abi.CmdDestroyQP:    {abi.SizeHandle, false, 0, destroyQP},
	abi.CmdCreateMR:     {abi.SizeCreateMR, false, abi.SizeCreateMRResp, createMR},
	abi.CmdSetMTT:       {abi.SizeSetMTT, true, 0, setMTT},
	abi.CmdDestroyMR:    {abi.SizeHandle, false, 0, destroyMR},
	abi.CmdAttachMcast:  {abi.SizeMcast, false, 0, attachMcast},
	abi.CmdDetachMcast:  {abi.SizeMcast, false, 0, detachMcast},
	abi.CmdQueryStats:   {0, false, abi.SizeStats, queryStats},
}

const maxReply = 256 // the largest of the table, with room

// execute runs one request (header and payload) and writes the response to out,
// which holds abi.SizeResp + maxReply bytes. room is what the driver's buffers
// take. It returns the response's length.
func (d *Device) execute(ctx context.Context, req, out []byte, room uint64) int {
	n, op, err := d.dispatchCommand(ctx, req, out[abi.SizeResp:], room)
	s := statusOf(err)
	if err != nil {
		n = 0
		d.warn("command refused", "command", op, "status", s, "reason", err)
	}
	(&abi.Resp{Status: s, Length: uint32(n)}).Encode(out)
	return abi.SizeResp + n
}

func (d *Device) dispatchCommand(ctx context.Context, req, out []byte, room uint64) (n int, op abi.Opcode, err error) {
	var h abi.Req
	if err := h.Decode(req); err != nil {
		return 0, h.Opcode, err
	}
	op = h.Opcode
	in := req[abi.SizeReq:]
	if uint64(h.Length) != uint64(len(in)) {
		return 0, op, refuse(abi.StatusInvalid, "length says %d bytes of payload, there are %d", h.Length, len(in))
	}
	if int(op) >= len(commandTable) || commandTable[op].run == nil {
		return 0, op, opcodeError(op)
	}
	e := &commandTable[op]
	switch {
	case len(in) < e.fixed || !e.more && len(in) > e.fixed:
		return 0, op, refuse(abi.StatusInvalid, "payload of %d bytes, need %d", len(in), e.fixed)
	case room < uint64(abi.SizeResp+e.reply):
		return 0, op, refuse(abi.StatusInvalid, "room for a response of %d bytes, need %d", room, abi.SizeResp+e.reply)
	case d.broken.Load():
		return 0, op, refuse(abi.StatusIO, "the guest's memory vanished earlier")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	c := &cmd{d: d, t: &d.tables, ctx: ctx, op: op, in: in, out: out}
	// A command touches guest memory here and through Loop.Do; either way a page
	// that vanished ends here.
	err = translate.Guard(func() error { return e.run(c) })
	if errors.Is(err, translate.ErrMemoryGone) {
		err = &statusError{status: abi.StatusIO, msg: err.Error()}
	}
	return c.n, op, err
}

// commandLoop is the goroutine of the command queue.
type commandLoop struct {
	d      *Device
	q      *virtq.Queue
	stopFD int
	cancel context.CancelFunc
	done   chan struct{}
}

// startCommands starts the goroutine.
func (d *Device) startCommands(q *virtq.Queue) (*commandLoop, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("hca: eventfd: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &commandLoop{d: d, q: q, stopFD: fd, cancel: cancel, done: make(chan struct{})}
	go c.run(ctx)
	return c, nil
}

// stop ends the goroutine and waits for it. A command that waits for guest memory
// to drain gives up (its effect stands); others run to their end.
func (c *commandLoop) stop() {
	c.cancel()
	one := [8]byte{1}
	_, _ = unix.Write(c.stopFD, one[:])
	<-c.done
	unix.Close(c.stopFD)
}

// pollQueue is how often a queue is looked at whose driver does not kick, or whose
// memory is absent for the moment.
const pollQueue = 2 * time.Millisecond

func (c *commandLoop) run(ctx context.Context) {
	defer close(c.done)
	var (
		chain virtq.Chain
		kick  [8]byte
		req   = make([]byte, abi.CmdMax)
		resp  = make([]byte, abi.SizeResp+maxReply)
	)
	fds := []unix.PollFd{{Fd: int32(c.stopFD), Events: unix.POLLIN}, {Fd: int32(c.q.KickFD()), Events: unix.POLLIN}}
	for {
		err := c.serve(ctx, &chain, req, resp)
		if ctx.Err() != nil {
			return
		}
		timeout := -1
		switch {
		case err != nil && !virtq.IsRepairable(err):
			c.d.log.Error("command queue broken; the device waits for a reset", "error", err)
			fds[1].Fd = -1
		case err != nil || fds[1].Fd < 0:
			timeout = int(pollQueue / time.Millisecond)
		}
		if _, err := unix.Poll(fds, timeout); err != nil && err != unix.EINTR {
			c.d.log.Error("command queue: poll failed", "error", err)
			return
		}
		if fds[0].Revents != 0 {
			return
		}
		if fds[1].Revents&unix.POLLIN != 0 {
			_, _ = unix.Read(c.q.KickFD(), kick[:])
		} else if fds[1].Revents != 0 {
			fds[1].Fd = -1 // hang-up or a bad descriptor would make poll spin
		}
	}
}

// serve executes all commands that are there.
func (c *commandLoop) serve(ctx context.Context, chain *virtq.Chain, req, resp []byte) error {
	if c.q.Broken() != nil {
		return nil
	}
	for ctx.Err() == nil {
		n, ok, err := c.take(chain, req)
		if err != nil {
			return err
		}
		if !ok {
			return nil
		}
		room := chain.WritableLen()
		out := c.d.execute(ctx, req[:n], resp, room)
		if err := c.answer(chain, resp[:out]); err != nil {
			return err
		}
	}
	return nil
}

// inEpoch runs f, which touches the virtqueue.
func (c *commandLoop) inEpoch(f func() error) error {
	return translate.Guard(func() error {
		e := c.q.Space().Epochs()
		t := e.Enter(commandSlot)
		defer e.Leave(commandSlot, t)
		return f()
	})
}

// take pops a chain and copies the request in. It asks for kicks before it looks
// for the last time.
func (c *commandLoop) take(chain *virtq.Chain, req []byte) (n int, ok bool, err error) {
	err = c.inEpoch(func() (err error) {
		if ok, err = c.q.Pop(chain); err == nil && !ok {
			if err = c.q.SetNotify(true); err == nil {
				ok, err = c.q.Pop(chain)
			}
		}
		if err != nil || !ok {
			return err
		}
		if l := chain.ReadableLen(); l > uint64(len(req)) {
			err = fmt.Errorf("request of %d bytes, at most %d are allowed", l, len(req))
			c.q.Fail(err)
			return err
		}
		if chain.WritableLen() < abi.SizeResp {
			err = fmt.Errorf("no room for a response: %d bytes writable, need %d", chain.WritableLen(), abi.SizeResp)
			c.q.Fail(err)
			return err
		}
		var m translate.Miss
		if n, m = chain.ReadAll(req); !m.OK() {
			err = &faultError{what: "request buffer", miss: m}
			c.q.Fail(err)
		}
		return err
	})
	return n, ok && err == nil, err
}

func (c *commandLoop) answer(chain *virtq.Chain, resp []byte) error {
	return c.inEpoch(func() error {
		n, m := chain.WriteAll(resp[:min(len(resp), int(chain.WritableLen()))])
		if !m.OK() {
			err := &faultError{what: "response buffer", miss: m}
			c.q.Fail(err)
			return err
		}
		if err := c.q.Push(chain, uint32(n)); err != nil {
			return err
		}
		return c.q.Signal()
	})
}
