package vhostuser

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Message is one message with its descriptors. The receiver owns them; Close closes those that were not taken.
type Message struct {
	Header
	Body []byte // valid until the next Recv
	FDs  []int  // -1 once taken
}

// TakeFD passes descriptor i to the caller, who must close it.
func (m *Message) TakeFD(i int) int {
	fd := m.FDs[i]
	m.FDs[i] = -1
	return fd
}

// Close closes the descriptors that were not taken. It may be called twice.
func (m *Message) Close() {
	for i, fd := range m.FDs {
		if fd >= 0 {
			_ = unix.Close(fd)
			m.FDs[i] = -1
		}
	}
	m.FDs = m.FDs[:0]
}

// A message follows its header at once, because both are one sendmsg. A peer that sends half a message is broken, and
// must not hold the device for ever.
const messageTimeout = 10 * time.Second

// maxRecvFDs is one more than any message may carry, so that too many are detected.
const maxRecvFDs = MaxTableRegions + 1

// Transport sends and receives messages on a Unix stream socket. One goroutine may call Recv, and one Send.
type Transport struct {
	c    *net.UnixConn
	oob  []byte
	body [maxPayload]byte
	out  []byte

	// Patience bounds how long Recv waits for the start of a message; 0 is for ever. Set it before the first Recv.
	Patience time.Duration

	stopped atomic.Bool
}

// NewTransport takes over c.
func NewTransport(c *net.UnixConn) *Transport {
	return &Transport{c: c, oob: make([]byte, unix.CmsgSpace(maxRecvFDs*4))}
}

// Close closes the socket; a blocked Recv returns.
func (t *Transport) Close() error { return t.c.Close() }

// Stop makes Recv and Send, also blocked ones, fail with net.ErrClosed, while the peer sees no change yet. It may be
// called on any goroutine.
func (t *Transport) Stop() {
	t.stopped.Store(true)
	_ = t.c.SetDeadline(time.Unix(1, 0))
}

// until sets a deadline with set, unless Stop has set the last one.
func (t *Transport) until(set func(time.Time) error, deadline time.Time) error {
	err := set(deadline)
	if t.stopped.Load() {
		return net.ErrClosed
	}
	return err
}

// stop returns net.ErrClosed in place of err after Stop, which causes other errors.
func (t *Transport) stop(err error) error {
	if err != nil && t.stopped.Load() {
		return net.ErrClosed
	}
	return err
}

// CloseWrite tells the peer that no more messages follow.
func (t *Transport) CloseWrite() error { return t.c.CloseWrite() }

// Recv reads the next message into m. check gets header and number of descriptors before the body is read. io.EOF means
// that the peer closed the connection between two messages. On an error m holds no descriptors.
func (t *Transport) Recv(m *Message, check func(h Header, fds int) error) (err error) {
	m.Close()
	m.Body = nil
	defer func() {
		if err != nil {
			m.Close()
			err = t.stop(err)
		}
	}()
	var (
		hdr      [HeaderSize]byte
		deadline time.Time
	)
	if t.Patience > 0 {
		deadline = time.Now().Add(t.Patience)
	}
	if err := t.until(t.c.SetReadDeadline, deadline); err != nil {
		return err
	}
	for n := 0; n < HeaderSize; {
		k, oobn, flags, _, err := t.c.ReadMsgUnix(hdr[n:], t.oob)
		if perr := m.collect(t.oob[:oobn]); perr != nil {
			return perr
		}
		switch {
		case k == 0 && (err == nil || errors.Is(err, io.EOF)):
			if n == 0 {
				return io.EOF
			}
			return protoErr("connection closed within a header, after %d bytes", n)
		case err != nil:
			return fmt.Errorf("read header: %w", err)
		case flags&unix.MSG_CTRUNC != 0 || len(m.FDs) > maxRecvFDs:
			return protoErr("more than %d file descriptors in one message", maxRecvFDs-1)
		}
		if n += k; n < HeaderSize {
			if err := t.until(t.c.SetReadDeadline, time.Now().Add(messageTimeout)); err != nil {
				return err
			}
		}
	}
	if m.Header, err = ParseHeader(hdr[:]); err != nil {
		return err
	}
	if err := check(m.Header, len(m.FDs)); err != nil {
		return err
	}
	if m.Size > maxPayload {
		return protoErr("%v: payload of %d bytes, want at most %d", m.Request, m.Size, maxPayload)
	}
	if m.Size == 0 {
		return nil
	}
	if err := t.until(t.c.SetReadDeadline, time.Now().Add(messageTimeout)); err != nil {
		return err
	}
	m.Body = t.body[:m.Size]
	if _, err := io.ReadFull(t.c, m.Body); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return protoErr("%v: connection closed within the payload of %d bytes", m.Request, m.Size)
		}
		return fmt.Errorf("read payload of %v: %w", m.Request, err)
	}
	return nil
}

// Pending reports whether a message or the connection's end can be received now.
func (t *Transport) Pending() bool {
	raw, err := t.c.SyscallConn()
	if err != nil {
		return true
	}
	pending := true
	_ = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		pending = !errors.Is(err, unix.EAGAIN)
	})
	return pending
}

// collect stores the descriptors of a control message.
func (m *Message) collect(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return protoErr("control message: %v", err)
	}
	for i := range msgs {
		if msgs[i].Header.Level != unix.SOL_SOCKET || msgs[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return protoErr("file descriptors: %v", err)
		}
		m.FDs = append(m.FDs, fds...)
	}
	return nil
}

// Send writes one whole message. The caller still owns the descriptors. If the peer does not read, Send fails after a
// timeout.
func (t *Transport) Send(h Header, body []byte, fds ...int) error {
	h.Size = uint32(len(body))
	t.out = append(h.Append(t.out[:0]), body...)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if err := t.until(t.c.SetWriteDeadline, time.Now().Add(messageTimeout)); err != nil {
		return err
	}
	n, _, err := t.c.WriteMsgUnix(t.out, oob, nil)
	if err == nil && n < len(t.out) {
		_, err = t.c.Write(t.out[n:])
	}
	if err != nil {
		return fmt.Errorf("sending %v: %w", h.Request, t.stop(err))
	}
	return nil
}

// checkEventFD checks that fd is an eventfd and makes it non-blocking. Loops read and write it, and some kinds of file
// block regardless of their flags (a FUSE file, a terminal): with those a front end could stop other VMs on the loop.
func checkEventFD(fd int) error {
	link, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return fmt.Errorf("cannot tell what the file descriptor is: %w", err)
	}
	if link != "anon_inode:[eventfd]" {
		return protoErr("file descriptor is %q, want an eventfd", link)
	}
	return unix.SetNonblock(fd, true)
}
