package worker

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is a connection between the daemon and a worker: messages of any length, in order. On the socket each is a
// sequence of packets (SOCK_SEQPACKET) of at most packetSize bytes, whose first byte is more or last.
//
// Send may be called by several goroutines, Receive by one.
type Conn struct {
	sock *net.UnixConn

	sending sync.Mutex
	out     []byte // sending

	in []byte

	// Streams are further connections of the daemon with this process, byte streams, as Config.Streams asks for. At the
	// daemon's end they stay open until the process has ended; Close does not close them.
	Streams []net.Conn
}

const (
	packetSize = 32 << 10
	more       = 1
	last       = 0
)

// MaxMessage is the length that Send permits.
const MaxMessage = 64 << 20

// sendTime is how long the other side may leave a full socket unread.
const sendTime = 10 * time.Second

// Errors of Conn. After one the connection is of no more use.
var (
	ErrTooLong = errors.New("worker: message is longer than permitted")
	errPacket  = errors.New("worker: a packet is none of a message's")
)

// pair makes a connection: our end, and the descriptor for the other process.
func pair() (*Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("worker: socketpair: %w", err)
	}
	ours, other := os.NewFile(uintptr(fds[0]), "worker"), os.NewFile(uintptr(fds[1]), "worker")
	defer ours.Close()
	// A name that is no file (unix(7), autobind). A socket has one at most, so the worker cannot make a file by bind(2).
	if err := unix.Bind(fds[1], &unix.SockaddrUnix{}); err != nil {
		other.Close()
		return nil, nil, fmt.Errorf("worker: bind: %w", err)
	}
	c, err := newConn(ours)
	if err != nil {
		other.Close()
		return nil, nil, err
	}
	return c, other, nil
}

// streams makes byte streams: our ends, and the descriptors for the other process. Also after an error the caller
// closes what it gets.
func streams(n int) (ours []net.Conn, others []*os.File, err error) {
	for range n {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return ours, others, fmt.Errorf("worker: socketpair: %w", err)
		}
		f := os.NewFile(uintptr(fds[0]), "worker")
		others = append(others, os.NewFile(uintptr(fds[1]), "worker"))
		c, err := net.FileConn(f) // has a duplicate
		_ = f.Close()
		if err != nil {
			return ours, others, fmt.Errorf("worker: stream: %w", err)
		}
		ours = append(ours, c)
	}
	return ours, others, nil
}

// newConn uses a duplicate of f.
func newConn(f *os.File) (*Conn, error) {
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("worker: connection: %w", err)
	}
	sock, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("worker: connection is a %T, want a unix socket", c)
	}
	return &Conn{sock: sock, out: make([]byte, packetSize), in: make([]byte, packetSize+1)}, nil
}

// Pair makes both ends of a connection within this process, for tests.
func Pair() (a, b *Conn, err error) {
	a, f, err := pair()
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	if b, err = newConn(f); err != nil {
		_ = a.Close()
	}
	return a, b, err
}

// Send sends a message. It fails if the other side reads nothing for a while.
func (c *Conn) Send(b []byte) error {
	if len(b) > MaxMessage {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLong, len(b), MaxMessage)
	}
	c.sending.Lock()
	defer c.sending.Unlock()
	for {
		n := copy(c.out[1:], b)
		b = b[n:]
		c.out[0] = last
		if len(b) > 0 {
			c.out[0] = more
		}
		if err := c.sock.SetWriteDeadline(time.Now().Add(sendTime)); err != nil {
			return fmt.Errorf("worker: send: %w", err)
		}
		if _, err := c.sock.Write(c.out[:n+1]); err != nil {
			return fmt.Errorf("worker: send: %w", err)
		}
		if len(b) == 0 {
			return nil
		}
	}
}

// Receive waits for a message of at most most bytes. The message is the caller's. io.EOF: the other side has closed.
func (c *Conn) Receive(most int) ([]byte, error) {
	var msg []byte
	for {
		n, err := c.sock.Read(c.in)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET):
			return nil, io.EOF // or an empty packet, which is none of ours either
		case err != nil:
			return nil, fmt.Errorf("worker: receive: %w", err)
		case n > packetSize || c.in[0] > more || c.in[0] == more && n != packetSize:
			return nil, errPacket
		case len(msg)+n-1 > most:
			return nil, fmt.Errorf("%w: more than %d bytes", ErrTooLong, most)
		}
		msg = append(msg, c.in[1:n]...)
		if c.in[0] == last {
			return msg, nil
		}
	}
}

// SetReadDeadline bounds the following calls of Receive; zero: they wait for ever.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.sock.SetReadDeadline(t) }

// Close ends Send and Receive at both ends. It may be called twice.
func (c *Conn) Close() error { return c.sock.Close() }

// gone reports whether an error of a Conn only says that the other side has closed it, or this side.
func gone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.EPIPE) ||
		errors.Is(err, unix.ECONNRESET)
}
