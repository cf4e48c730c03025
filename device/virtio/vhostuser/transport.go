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
	Body []byte // valid until the next Recv or Peek
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

// Transport sends and receives messages on a Unix stream socket. One goroutine may receive, and one send.
type Transport struct {
	c    *net.UnixConn
	oob  []byte
	body [maxPayload]byte
	old  [HeaderSize + maxPayload]byte // what Take removes from the socket
	out  []byte

	// Patience bounds how long Recv and Peek wait for the start of a message; 0 is for ever. Set it before the first.
	Patience time.Duration

	stopped atomic.Bool
}

// NewTransport takes over c.
func NewTransport(c *net.UnixConn) *Transport {
	return &Transport{c: c, oob: make([]byte, unix.CmsgSpace(maxRecvFDs*4))}
}

// Close closes the socket; a blocked Recv returns.
func (t *Transport) Close() error { return t.c.Close() }

// Stop makes receiving and sending, also blocked calls, fail with net.ErrClosed, while the peer sees no change yet. It
// may be called on any goroutine.
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

// Recv is Peek and Take: for receivers that need not outlive their process.
func (t *Transport) Recv(m *Message, check func(Header) error) error {
	err := t.Peek(m, check)
	if err == nil {
		if err = t.Take(m); err != nil {
			m.Close()
		}
	}
	return err
}

// Peek reads the next message into m, with copies of its descriptors, and leaves it in the socket until Take. check
// gets the header before the body is read. io.EOF means that the peer closed the connection between two messages. On
// an error m holds no descriptors.
func (t *Transport) Peek(m *Message, check func(Header) error) (err error) {
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
		k, err := t.peek(n, hdr[n:])
		switch {
		case err != nil:
			return fmt.Errorf("read header: %w", err)
		case k == 0 && n == 0:
			return io.EOF
		case k == 0:
			return protoErr("connection closed within a header, after %d bytes", n)
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
	if err := check(m.Header); err != nil {
		return err
	}
	if m.Size > maxPayload {
		return protoErr("%v: payload of %d bytes, want at most %d", m.Request, m.Size, maxPayload)
	}
	if err := t.until(t.c.SetReadDeadline, time.Now().Add(messageTimeout)); err != nil {
		return err
	}
	m.Body = t.body[:m.Size]
	for n := 0; n < len(m.Body); {
		k, err := t.peek(HeaderSize+n, m.Body[n:])
		if err != nil {
			return fmt.Errorf("read payload of %v: %w", m.Request, err)
		}
		if k == 0 {
			return protoErr("%v: connection closed within the payload of %d bytes", m.Request, m.Size)
		}
		n += k
	}
	return t.peekFDs(m)
}

// peek waits for data behind the first at bytes of the socket and reads it without taking it. 0 bytes: the connection's
// end. The socket's peek offset (SO_PEEK_OFF) is where it has stopped; see Begun.
func (t *Transport) peek(at int, b []byte) (n int, err error) {
	raw, err := t.c.SyscallConn()
	if err != nil {
		return 0, err
	}
	waited := raw.Read(func(s uintptr) bool {
		fd := int(s)
		if at == 0 { // from the beginning also if a message was begun: until this call ends it counts as begun
			if !isReady(fd, unix.POLLIN) {
				return false
			}
			if err = setPeekOff(fd, -1); err != nil {
				return true
			}
		}
		n, _, err = unix.Recvfrom(fd, b, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return false
		}
		if at == 0 && err == nil {
			err = setPeekOff(fd, n)
		}
		return true
	})
	if waited != nil {
		err = waited
	}
	return max(n, 0), err
}

func setPeekOff(fd, off int) error {
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, off)
}

// peekFDs adds copies of the message's descriptors to m, of which all the rest was read. It asks for them only if the
// message should have some: the kernel, as of 6.18, looks for descriptors in what follows if there are none where the
// peeked bytes are. So those of a message that should have none are found by Take.
func (t *Transport) peekFDs(m *Message) error {
	want := m.NumFDs(m.Body)
	if want == 0 {
		return nil
	}
	raw, err := t.c.SyscallConn()
	if err != nil {
		return err
	}
	var n, flags int
	cerr := raw.Control(func(s uintptr) {
		fd, b := int(s), [1]byte{}
		if err = setPeekOff(fd, -1); err == nil {
			_, n, flags, _, err = unix.Recvmsg(fd, b[:], t.oob, unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		}
		if err == nil {
			err = setPeekOff(fd, HeaderSize+len(m.Body))
		}
	})
	if err = errors.Join(cerr, err, m.collect(t.oob[:max(n, 0)])); err != nil {
		return err
	}
	return m.checkFDs(len(m.FDs), flags)
}

// checkFDs returns an error unless m has the right number of descriptors.
func (m *Message) checkFDs(n, flags int) error {
	want := m.NumFDs(m.Body)
	switch {
	case flags&unix.MSG_CTRUNC != 0:
		return protoErr("%v: more than %d file descriptors, want %d", m.Request, MaxTableRegions, want)
	case n == 1 && m.Request == ReqRemMemReg && m.Flags&FlagReply == 0:
		return nil // "for compatibility with existing incorrect implementations"
	case n != want:
		return protoErr("%v: %d file descriptors, want %d", m.Request, n, want)
	}
	return nil
}

// Begun reports whether the message at the head of the socket may have been peeked at, here or in another process, and
// not been taken. It reports true also for a socket that has not been peeked at yet.
func (t *Transport) Begun() (begun bool, err error) {
	raw, err := t.c.SyscallConn()
	if err != nil {
		return false, err
	}
	off := 0
	cerr := raw.Control(func(fd uintptr) { off, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEEK_OFF) })
	return off != 0, errors.Join(cerr, err)
}

// Take removes from the socket the message that the last Peek has read. It is one system call, which also resets the
// peek offset, unless the sender wrote the message in several parts, of which one before the last has descriptors. Only
// here a message's descriptors are counted for sure: if it has others than m, that is an error.
func (t *Transport) Take(m *Message) error {
	raw, err := t.c.SyscallConn()
	if err != nil {
		return err
	}
	var all Message
	defer all.Close()
	left, truncated := HeaderSize+len(m.Body), 0
	cerr := raw.Control(func(fd uintptr) {
		for left > 0 && err == nil {
			var n, oobn, flags int
			n, oobn, flags, _, err = unix.Recvmsg(int(fd), t.old[:left], t.oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
			switch {
			case err != nil:
			case n == 0:
				err = io.ErrUnexpectedEOF // cannot happen
			default:
				err = all.collect(t.oob[:oobn])
			}
			left -= max(n, 0)
			truncated |= flags
		}
	})
	if err = errors.Join(cerr, err); err != nil {
		return fmt.Errorf("taking %v out of the socket: %w", m.Request, t.stop(err))
	}
	return m.checkFDs(len(all.FDs), truncated)
}

// discard takes a message out of the socket that ends the connection. The peer of a socket that is closed with data in
// it gets an error in place of the connection's end.
func (t *Transport) discard() {
	if raw, err := t.c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _, _, _ = unix.Recvfrom(int(fd), t.old[:], unix.MSG_DONTWAIT) })
	}
}

// Pending reports whether a message or the connection's end can be received now.
func (t *Transport) Pending() bool {
	raw, err := t.c.SyscallConn()
	if err != nil {
		return true
	}
	pending := true
	_ = raw.Control(func(fd uintptr) { pending = isReady(int(fd), unix.POLLIN) })
	return pending
}

// isReady reports whether a descriptor has one of these events (poll(2)), or an error.
func isReady(fd int, events int16) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, 0)
	return n != 0 || err != nil && !errors.Is(err, unix.EINTR)
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
	t.out = h.message(t.out[:0], body)
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
