package frontend

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio/vhostuser"
)

// RefusedError is a back end's negative acknowledgement.
type RefusedError struct {
	Request vhostuser.Request
	Code    uint64
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("frontend: back end refused %v (code %d)", e.Request, e.Code)
}

// ErrClosed is returned when the back end closed the connection.
var ErrClosed = errors.New("frontend: connection closed by the back end")

// replyTimeout is long, because stopping a ring waits for the device.
const replyTimeout = 30 * time.Second

// Client sends single messages and waits for their replies. Any goroutine may call its methods; calls are serialised.
type Client struct {
	mu    sync.Mutex // one request and its reply at a time
	t     *vhostuser.Transport
	reply vhostuser.Message
	ack   bool                // REPLY_ACK was negotiated
	given bool                // GET_MEMORY was sent; see recv
	owed  []vhostuser.Request // not answered in time, oldest first: their replies still come before later ones
}

// maxOwed bounds how many replies a back end may owe before it is asked nothing more.
const maxOwed = 8

// Dial connects to a back end's socket.
func Dial(ctx context.Context, path string) (*Client, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("frontend: %w", err)
	}
	return NewClient(c.(*net.UnixConn)), nil
}

// NewClient takes over a connected socket.
func NewClient(c *net.UnixConn) *Client {
	t := vhostuser.NewTransport(c)
	t.Patience = replyTimeout
	return &Client{t: t}
}

// Close closes the connection. It may be called twice.
func (c *Client) Close() error { return c.t.Close() }

// SetPatience sets how long to wait for a reply; one that comes later is dropped. Call it before the first request.
func (c *Client) SetPatience(d time.Duration) { c.t.Patience = d }

// Finish tells the back end that no more messages follow; it then disconnects the device.
func (c *Client) Finish() error { return c.t.CloseWrite() }

// Do sends a request. If the request has a reply, or acknowledgements were negotiated, Do waits for it and returns a
// copy of the reply's payload.
func (c *Client) Do(req vhostuser.Request, hasReply bool, body []byte, fds ...int) ([]byte, error) {
	b, _, err := c.exchange(req, hasReply, body, fds...)
	return b, err
}

// exchange is Do. It also returns the descriptor of a reply that carries one, which the caller owns; -1: none.
func (c *Client) exchange(req vhostuser.Request, hasReply bool, body []byte, fds ...int) (b []byte, fd int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.owed) == maxOwed {
		return nil, -1, fmt.Errorf("frontend: %v: the back end owes %d replies, to %v first", req, maxOwed, c.owed[0])
	}
	h := vhostuser.Header{Request: req, Flags: vhostuser.FlagVersion}
	if c.ack && !hasReply {
		h.Flags |= vhostuser.FlagNeedReply
	}
	if err := c.t.Send(h, body, fds...); err != nil {
		return nil, -1, fmt.Errorf("frontend: %w", err)
	}
	c.given = c.given || req == vhostuser.ReqGetMemory
	if !hasReply && !c.ack {
		return nil, -1, nil
	}
	err = c.recv(req)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.owed = append(c.owed, req)
	}
	if errors.Is(err, io.EOF) {
		return nil, -1, fmt.Errorf("%w after %v", ErrClosed, req)
	}
	if err != nil {
		return nil, -1, fmt.Errorf("frontend: reply to %v: %w", req, err)
	}
	if hasReply {
		if fd = -1; len(c.reply.FDs) > 0 {
			fd = c.reply.TakeFD(0)
		}
		return append([]byte(nil), c.reply.Body...), fd, nil
	}
	code, err := vhostuser.ParseU64(c.reply.Body)
	if err != nil {
		return nil, -1, err
	}
	if code != 0 {
		return nil, -1, &RefusedError{Request: req, Code: code}
	}
	return nil, -1, nil
}

// recv receives the reply to req. Replies that are owed come before it and are dropped, and so is a second one to
// GET_MEMORY, by a back end that was killed meanwhile.
func (c *Client) recv(req vhostuser.Request) error {
	for {
		want := req
		if len(c.owed) > 0 {
			want = c.owed[0]
		}
		err := c.t.Recv(&c.reply, func(h vhostuser.Header) error {
			second := c.given && h.Request == vhostuser.ReqGetMemory
			if h.Request != want && !second || h.Flags&vhostuser.FlagReply == 0 {
				return fmt.Errorf("frontend: %v in reply to %v (flags %#x)", h.Request, want, h.Flags)
			}
			return nil
		})
		switch {
		case err != nil:
			return err
		case c.reply.Request != want: // GET_MEMORY's second
		case len(c.owed) > 0:
			c.owed = c.owed[1:]
		default:
			return nil
		}
		c.reply.Close()
	}
}

func (c *Client) getU64(req vhostuser.Request) (uint64, error) {
	b, err := c.Do(req, true, nil)
	if err != nil {
		return 0, err
	}
	return vhostuser.ParseU64(b)
}

func (c *Client) setU64(req vhostuser.Request, v uint64) error {
	_, err := c.Do(req, false, vhostuser.AppendU64(nil, v))
	return err
}

func (c *Client) setState(req vhostuser.Request, index int, num uint32) error {
	_, err := c.Do(req, false, vhostuser.VringState{Index: uint32(index), Num: num}.Append(nil))
	return err
}

func (c *Client) setFD(req vhostuser.Request, index, fd int) error {
	if fd < 0 {
		_, err := c.Do(req, false, vhostuser.VringFD{Index: uint32(index), NoFD: true}.Append(nil))
		return err
	}
	_, err := c.Do(req, false, vhostuser.VringFD{Index: uint32(index)}.Append(nil), fd)
	return err
}

// GetFeatures sends GET_FEATURES; the methods below likewise send the message of their name.
func (c *Client) GetFeatures() (uint64, error) { return c.getU64(vhostuser.ReqGetFeatures) }

// SetFeatures acknowledges virtio features.
func (c *Client) SetFeatures(f uint64) error { return c.setU64(vhostuser.ReqSetFeatures, f) }

// GetProtocolFeatures returns the offered protocol features.
func (c *Client) GetProtocolFeatures() (uint64, error) {
	return c.getU64(vhostuser.ReqGetProtocolFeatures)
}

// SetProtocolFeatures acknowledges protocol features; REPLY_ACK takes effect with the next message.
func (c *Client) SetProtocolFeatures(f uint64) error {
	if err := c.setU64(vhostuser.ReqSetProtocolFeatures, f); err != nil {
		return err
	}
	c.mu.Lock()
	c.ack = f&vhostuser.ProtoReplyAck != 0
	c.mu.Unlock()
	return nil
}

// SetOwner starts the session.
func (c *Client) SetOwner() error { _, err := c.Do(vhostuser.ReqSetOwner, false, nil); return err }

// QueueNum is GET_QUEUE_NUM.
func (c *Client) QueueNum() (uint64, error) { return c.getU64(vhostuser.ReqGetQueueNum) }

// MaxMemSlots is GET_MAX_MEM_SLOTS.
func (c *Client) MaxMemSlots() (uint64, error) { return c.getU64(vhostuser.ReqGetMaxMemSlots) }

// SetMemTable passes all of the guest's memory; fds[i] is region i's file.
func (c *Client) SetMemTable(t []vhostuser.Region, fds ...int) error {
	_, err := c.Do(vhostuser.ReqSetMemTable, false, vhostuser.AppendMemTable(nil, t), fds...)
	return err
}

// AddMemReg adds one region.
func (c *Client) AddMemReg(r vhostuser.Region, fd int) error {
	_, err := c.Do(vhostuser.ReqAddMemReg, false, vhostuser.AppendMemReg(nil, r), fd)
	return err
}

// RemMemReg removes one region.
func (c *Client) RemMemReg(r vhostuser.Region) error {
	_, err := c.Do(vhostuser.ReqRemMemReg, false, vhostuser.AppendMemReg(nil, r))
	return err
}

// SetLogBase names the log of written pages.
func (c *Client) SetLogBase(b vhostuser.LogBase, fd int) error {
	_, err := c.Do(vhostuser.ReqSetLogBase, true, b.Append(nil), fd)
	return err
}

// SaveState returns the device's own state; no ring may run.
func (c *Client) SaveState() ([]byte, error) {
	var state bytes.Buffer
	err := c.moveState(vhostuser.SaveState, func(f *os.File) error {
		_, err := state.ReadFrom(f)
		return err
	})
	return state.Bytes(), err
}

// LoadState gives the device the state that another one has saved.
func (c *Client) LoadState(state []byte) error {
	return c.moveState(vhostuser.LoadState, func(f *os.File) error {
		_, err := f.Write(state)
		return err
	})
}

// moveState transfers the device's state through a pipe, of which move gets this end.
func (c *Client) moveState(direction uint32, move func(*os.File) error) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	ours, theirs := r, w
	if direction == vhostuser.LoadState {
		ours, theirs = w, r
	}
	body := vhostuser.StateTransfer{Direction: direction}.Append(nil)
	reply, err := c.Do(vhostuser.ReqSetDeviceStateFD, true, body, int(theirs.Fd()))
	_ = theirs.Close()
	if err == nil {
		err = refusal(vhostuser.ReqSetDeviceStateFD, reply, vhostuser.StateNoFD)
	}
	if err == nil {
		err = ours.SetDeadline(time.Now().Add(replyTimeout))
	}
	if err == nil {
		err = move(ours)
	}
	err = errors.Join(err, ours.Close())
	if err != nil {
		return fmt.Errorf("frontend: the device's state: %w", err)
	}
	if reply, err = c.Do(vhostuser.ReqCheckDeviceState, true, nil); err == nil {
		err = refusal(vhostuser.ReqCheckDeviceState, reply, 0)
	}
	return err
}

// refusal returns an error unless a reply is a certain number.
func refusal(req vhostuser.Request, reply []byte, want uint64) error {
	code, err := vhostuser.ParseU64(reply)
	if err == nil && code != want {
		err = &RefusedError{Request: req, Code: code}
	}
	return err
}

// SetVringNum sets a ring's size.
func (c *Client) SetVringNum(i int, n uint32) error {
	return c.setState(vhostuser.ReqSetVringNum, i, n)
}

// SetVringBase sets the first available index, or the places of a packed ring.
func (c *Client) SetVringBase(i int, base uint32) error {
	return c.setState(vhostuser.ReqSetVringBase, i, base)
}

// SetVringEnable enables or disables a ring.
func (c *Client) SetVringEnable(i int, on bool) error {
	v := uint32(0)
	if on {
		v = 1
	}
	return c.setState(vhostuser.ReqSetVringEnable, i, v)
}

// SetVringAddr passes a ring's user addresses.
func (c *Client) SetVringAddr(a vhostuser.VringAddr) error {
	_, err := c.Do(vhostuser.ReqSetVringAddr, false, a.Append(nil))
	return err
}

// GetVringBase stops a ring and returns the base for SetVringBase.
func (c *Client) GetVringBase(i int) (uint32, error) {
	b, err := c.Do(vhostuser.ReqGetVringBase, true, vhostuser.VringState{Index: uint32(i)}.Append(nil))
	if err != nil {
		return 0, err
	}
	s, err := vhostuser.ParseVringState(b)
	if err != nil {
		return 0, err
	}
	if s.Index != uint32(i) {
		return 0, fmt.Errorf("frontend: GET_VRING_BASE of ring %d: reply for ring %d, index %#x", i, s.Index, s.Num)
	}
	return s.Num, nil
}

// SetVringKick, SetVringCall and SetVringErr pass an eventfd; -1 is none.
func (c *Client) SetVringKick(i, fd int) error { return c.setFD(vhostuser.ReqSetVringKick, i, fd) }

// SetVringCall passes the eventfd by which the device interrupts.
func (c *Client) SetVringCall(i, fd int) error { return c.setFD(vhostuser.ReqSetVringCall, i, fd) }

// SetVringErr passes the eventfd by which the device reports a broken ring.
func (c *Client) SetVringErr(i, fd int) error { return c.setFD(vhostuser.ReqSetVringErr, i, fd) }

// SetBackendReqFD passes the back end's end of its own channel.
func (c *Client) SetBackendReqFD(fd int) error {
	_, err := c.Do(vhostuser.ReqSetBackendReqFD, false, nil, fd)
	return err
}

// GetMemory is GET_MEMORY: it returns the descriptor of a memory file of that many bytes, which the caller owns. A back
// end gives one file, so call it once; after a refusal it may be called again.
func (c *Client) GetMemory(size uint64) (fd int, err error) {
	b, fd, err := c.exchange(vhostuser.ReqGetMemory, true, vhostuser.AppendU64(nil, size))
	if err == nil && (fd < 0 || len(b) == 0) {
		err = &RefusedError{Request: vhostuser.ReqGetMemory}
	}
	if err != nil && fd >= 0 {
		_ = unix.Close(fd)
	}
	return fd, err
}

// GetConfig reads len(dst) bytes of configuration space from off on.
func (c *Client) GetConfig(dst []byte, off uint32) error {
	body := vhostuser.ConfigSpace{Offset: off, Data: dst}.Append(nil)
	b, err := c.Do(vhostuser.ReqGetConfig, true, body)
	if err != nil {
		return err
	}
	if len(b) == 0 {
		return &RefusedError{Request: vhostuser.ReqGetConfig}
	}
	s, err := vhostuser.ParseConfigSpace(b)
	if err != nil {
		return err
	}
	if s.Offset != off || len(s.Data) != len(dst) {
		return fmt.Errorf("frontend: GET_CONFIG: asked for %d bytes at %d, got %d at %d", len(dst), off, len(s.Data),
			s.Offset)
	}
	copy(dst, s.Data)
	return nil
}

// SetConfig writes configuration space.
func (c *Client) SetConfig(off uint32, src []byte) error {
	_, err := c.Do(vhostuser.ReqSetConfig, false, vhostuser.ConfigSpace{Offset: off, Data: src}.Append(nil))
	return err
}

// SetStatus sets the virtio device status; 0 resets the device.
func (c *Client) SetStatus(s uint8) error { return c.setU64(vhostuser.ReqSetStatus, uint64(s)) }

// GetStatus reads the virtio device status.
func (c *Client) GetStatus() (uint8, error) {
	v, err := c.getU64(vhostuser.ReqGetStatus)
	return uint8(v), err
}

// ResetDevice is RESET_DEVICE.
func (c *Client) ResetDevice() error {
	_, err := c.Do(vhostuser.ReqResetDevice, false, nil)
	return err
}
