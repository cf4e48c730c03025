package vhostuser

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A message gets exactly one reply, whenever this process is killed (CO-2): QEMU waits for it, and takes a second one
// for the reply to its next message.
//
//	peek ─▶ effect ─▶ state file ─▶ reply into the pipe ─▶ take ─▶ reply out of the pipe into the socket
//
// Until it is taken, the message is in the socket, with its descriptors; the pipe (NAME/replies) is with the keeper.
// Taking is one system call, and so is moving the reply: a kill is before or after it. The next process learns from
// the socket itself whether the message was taken: the kernel has the peek offset there, and moves it back as data is
// taken (socket(7), SO_PEEK_OFF). If the message was not taken, what is in the pipe is dropped, and the message is
// handled again, on the state as far as it was stored (session.again); if it was, what is in the pipe is sent. A reply
// with a descriptor goes another way: see give.

// crossed is called between these steps; changed by tests.
var crossed = func(step string) {}

// openPipe makes the pipe for replies. Its one descriptor is for both ends, and does not block.
func openPipe() (fd int, err error) {
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return -1, fmt.Errorf("pipe for replies: %w", err)
	}
	fd, err = unix.Open("/proc/self/fd/"+strconv.Itoa(ends[0]), unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	_, _ = unix.Close(ends[0]), unix.Close(ends[1])
	if err != nil {
		return -1, fmt.Errorf("pipe for replies: %w", err)
	}
	return fd, nil
}

// adoptPipe takes over the previous process's pipe.
func (se *session) adoptPipe(kept Kept) (err error) {
	fd, ok := kept.Take(se.kept.replies())
	if !ok { // an older vnicd's connection
		if se.pipe, err = openPipe(); err == nil {
			se.kept.keep(se.kept.replies(), se.pipe)
		}
		return err
	}
	se.pipe = fd
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return fmt.Errorf("the pipe for replies has mode %#o (%v)", st.Mode, err)
	}
	return nil
}

// catchUp finishes the message that the previous process was handling.
func (se *session) catchUp() (err error) {
	if se.again, err = se.t.Begun(); err != nil || !se.again {
		return errors.Join(err, se.t.sendFrom(se.pipe))
	}
	return empty(se.pipe)
}

// empty drops what is in a pipe.
func empty(pipe int) (err error) {
	for b := make([]byte, unix.PathMax); err == nil; {
		_, err = unix.Read(pipe, b)
	}
	if !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("pipe for replies: %w", err)
	}
	return nil
}

// conclude takes m, whose effect is stored, out of the socket, and replies if the front end waits for that.
func (se *session) conclude(m *Message, reply []byte, waits bool) error {
	crossed("handled")
	if se.t.stopped.Load() { // the next process handles it again: what has failed may have failed because of that
		return net.ErrClosed
	}
	if waits {
		b := Header{Request: m.Request, Flags: FlagVersion | FlagReply}.message(nil, reply)
		if n, err := unix.Write(se.pipe, b); err != nil || n < len(b) {
			return fmt.Errorf("pipe for replies: %d of %d bytes: %w", n, len(b), err)
		}
		crossed("reply in the pipe")
	}
	if err := se.t.Take(m); err != nil {
		return err
	}
	se.again = false
	crossed("taken")
	if !waits {
		return nil
	}
	if err := se.t.sendFrom(se.pipe); err != nil {
		return fmt.Errorf("reply to %v: %w", m.Request, err)
	}
	crossed("replied")
	return nil
}

// give replies with the descriptor that was added to m, and takes m out of the socket afterwards. The pipe holds no
// descriptors, so this is the one reply that comes twice if this process is killed between the two steps: the next one
// handles the message again. Front ends that send such messages ignore the second (frontend.Client).
func (se *session) give(m *Message, reply []byte) error {
	defer m.Close()
	crossed("handled")
	if se.t.stopped.Load() {
		return net.ErrClosed
	}
	if err := se.t.Send(Header{Request: m.Request, Flags: FlagVersion | FlagReply}, reply, m.FDs...); err != nil {
		return err
	}
	crossed("given")
	m.Close() // it came without descriptors
	if err := se.t.Take(m); err != nil {
		return err
	}
	se.again = false
	crossed("taken")
	return nil
}

// sendFrom moves all that is in a pipe to the socket. If the peer does not read, it fails after a timeout.
func (t *Transport) sendFrom(pipe int) error {
	raw, err := t.c.SyscallConn()
	if err == nil {
		err = t.until(t.c.SetWriteDeadline, time.Now().Add(messageTimeout))
	}
	if err != nil {
		return err
	}
	waited := raw.Write(func(fd uintptr) bool {
		for {
			var left int
			if left, err = unix.IoctlGetInt(pipe, unix.TIOCINQ); err != nil || left == 0 {
				return true
			}
			if !isReady(int(fd), unix.POLLOUT) { // first: splice(2) waits for room in kernels from 6.5 to 6.6
				return false
			}
			if _, err = unix.Splice(pipe, nil, int(fd), nil, left, unix.SPLICE_F_NONBLOCK); err != nil {
				return !errors.Is(err, unix.EAGAIN)
			}
		}
	})
	if waited != nil {
		err = waited
	}
	return t.stop(err)
}
