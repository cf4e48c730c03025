package guestdrv

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/device/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// commander issues commands: up to cmdSlots at once, each with a request and a
// response buffer of its own. A goroutine waits for answers.
type commander struct {
	d     *Device
	slots chan *cmdSlot // free ones
	all   [cmdSlots]*cmdSlot

	// call is a duplicate of the queue's eventfd, so that answers are waited for
	// without mu.
	call *os.File

	mu sync.Mutex
	q  *frontend.Queue // guarded by mu
}

const (
	cmdSlots    = 8
	cmdRespSize = pageSize
)

type cmdSlot struct {
	n    int
	req  *Buffer
	resp *Buffer
	done chan uint32 // bytes that the device wrote
}

// encoder and decoder are the two halves of the structures in package abi.
type encoder interface{ Encode([]byte) }
type decoder interface{ Decode([]byte) error }

func newCommander(d *Device) (*commander, error) {
	c := &commander{d: d, q: d.fe.Queue(abi.CommandQueue), slots: make(chan *cmdSlot, cmdSlots)}
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
	fd, err := unix.FcntlInt(uintptr(c.q.CallFD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicating the command queue's eventfd: %w", err)
	}
	c.call = os.NewFile(uintptr(fd), "command queue call")
	d.wg.Go(c.run)
	return c, nil
}

// wait returns true when an answer is there, false once call was closed.
func (c *commander) wait() bool {
	var b [8]byte
	for {
		c.mu.Lock()
		c.q.EnableCall(true)
		pending := c.q.Pending()
		c.mu.Unlock()
		if pending {
			return true
		}
		if _, err := c.call.Read(b[:]); err != nil {
			return false
		}
	}
}

func (c *commander) run() {
	for c.wait() {
		for {
			c.mu.Lock()
			token, n, ok, err := c.q.Get()
			c.mu.Unlock()
			if err != nil {
				c.d.fail(err)
				return
			}
			if !ok {
				break
			}
			c.all[token].done <- n // the queue returns a token only once per Add
		}
	}
}

// submit hands slot s, whose request is n bytes long, to the device.
func (c *commander) submit(s *cmdSlot, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.q.Add(uint64(s.n), []frontend.Buf{{PA: translate.PA(s.req.PA()), Len: uint32(n)}},
		[]frontend.Buf{{PA: translate.PA(s.resp.PA()), Len: cmdRespSize}})
	if err == nil {
		c.q.Kick()
	}
	return err
}

// do issues a command: fixed is encoded into size bytes, words follow it as a
// page list. It returns the response's payload in resp, if that is not nil.
func (d *Device) do(op abi.Opcode, fixed encoder, size int, resp decoder, words ...uint64) error {
	if err := d.users.enter(); err != nil {
		return fmt.Errorf("%v: %w", op, err)
	}
	defer d.users.leave()
	n := size + 8*len(words)
	if abi.SizeReq+n > abi.CmdMax {
		return invalid("%v with %d words is longer than %d bytes", op, len(words), abi.CmdMax)
	}
	if err := d.closing(); err != nil {
		return fmt.Errorf("%v: %w", op, err)
	}
	timeout := time.NewTimer(d.cfg.Timeout)
	defer timeout.Stop()
	var s *cmdSlot
	select {
	case s = <-d.cmds.slots:
	case <-d.ctx.Done():
		return fmt.Errorf("%v: %w", op, d.closing())
	case <-d.fe.Gone():
		return fmt.Errorf("%v: %w", op, d.closing())
	case <-timeout.C:
		return fmt.Errorf("%v: %w", op, ErrTimeout)
	}
	b := s.req.Bytes()
	(&abi.Req{Opcode: op, Length: uint32(n)}).Encode(b)
	if fixed != nil {
		fixed.Encode(b[abi.SizeReq:])
	}
	abi.PutPAs(b[abi.SizeReq+size:], words)
	if err := d.cmds.submit(s, abi.SizeReq+n); err != nil {
		d.cmds.slots <- s
		return fmt.Errorf("%v: %w", op, err)
	}
	var written uint32
	select {
	case written = <-s.done:
	case <-d.ctx.Done():
		return fmt.Errorf("%v: %w", op, d.closing())
	case <-d.fe.Gone():
		return fmt.Errorf("%v: %w", op, d.closing())
	case <-timeout.C:
		// The slot is lost: its buffers may still be written to.
		d.fail(ErrTimeout)
		return fmt.Errorf("%v: %w", op, ErrTimeout)
	}
	defer func() { d.cmds.slots <- s }()
	return parseResponse(op, s.resp.Bytes(), written, resp)
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
