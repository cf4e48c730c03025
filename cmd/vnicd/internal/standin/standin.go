// Package standin lets a process represent a vhost-user device that another process serves. It relays each message
// between a front end on its own socket and the serving process, with descriptors, in both directions. Rings, guest
// memory and eventfds are shared directly.
package standin

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Front is the source of front ends: one connection, or a listening socket.
type Front struct {
	conn *net.UnixConn
	ln   *net.UnixListener
}

// Listen makes a socket. It replaces a socket without a listener, and leaves anything else at that path alone.
func Listen(path string) (*Front, error) {
	addr := &net.UnixAddr{Name: path, Net: "unix"}
	ln, err := net.ListenUnix("unix", addr)
	// A file that is not a socket refuses connections, too.
	if fi, serr := os.Lstat(path); errors.Is(err, syscall.EADDRINUSE) && serr == nil && fi.Mode().Type() == os.ModeSocket {
		if c, derr := net.DialUnix("unix", nil, addr); derr == nil {
			_ = c.Close()
		} else if errors.Is(derr, syscall.ECONNREFUSED) && os.Remove(path) == nil {
			ln, err = net.ListenUnix("unix", addr)
		}
	}
	if err != nil {
		return nil, err
	}
	return &Front{ln: ln}, nil
}

// Passed takes over a descriptor that this process was started with.
func Passed(fd int) (*Front, error) {
	listening, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d is not a socket: %w", fd, err)
	}
	file := os.NewFile(uintptr(fd), "front end")
	defer file.Close() // net makes its own copy
	f := &Front{}
	var ok bool
	if listening != 0 {
		var ln net.Listener
		ln, err = net.FileListener(file)
		f.ln, ok = ln.(*net.UnixListener)
	} else {
		var c net.Conn
		c, err = net.FileConn(file)
		f.conn, ok = c.(*net.UnixConn)
	}
	if err == nil && !ok {
		err = errors.New("it is not a unix socket")
	}
	if err != nil {
		return nil, fmt.Errorf("descriptor %d: %w", fd, err)
	}
	return f, nil
}

// Serve connects front ends, one after the other, to what dial returns, until ctx ends or, if Front is one connection,
// until it ends. It passes errors of a front end to failed.
func (f *Front) Serve(ctx context.Context, dial func(context.Context) (*net.UnixConn, error),
	failed func(error)) error {
	if f.conn != nil {
		return f.serve(ctx, f.conn, dial)
	}
	defer f.ln.Close()
	defer context.AfterFunc(ctx, func() { _ = f.ln.Close() })()
	for {
		c, err := f.ln.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if err := f.serve(ctx, c, dial); err != nil {
			failed(err)
		}
	}
}

func (f *Front) serve(ctx context.Context, c *net.UnixConn, dial func(context.Context) (*net.UnixConn, error)) error {
	defer c.Close()
	back, err := dial(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer back.Close()
	end := func() { _, _ = c.Close(), back.Close() }
	defer context.AfterFunc(ctx, end)()
	var wg sync.WaitGroup
	var errs [2]error
	for i, x := range [2][2]*net.UnixConn{{back, c}, {c, back}} {
		wg.Go(func() {
			defer end()
			for errs[i] == nil {
				errs[i] = pass(x[0], x[1])
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, syscall.EPIPE) &&
			!errors.Is(err, syscall.ECONNRESET) {
			return err
		}
	}
	return nil
}

// Dial connects to the device at path. While nothing listens there, it tries again until limit has passed.
func Dial(ctx context.Context, path string, limit time.Duration) (*net.UnixConn, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err == nil || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Bounds of a message (QEMU, docs/interop/vhost-user.rst, "Header": request, flags, size of the payload). The largest
// message that QEMU sends has a few hundred bytes and eight descriptors.
const (
	headerSize     = 12
	maxMessage     = 64 << 10
	maxDescriptors = 64
)

// pass relays one message. Descriptors belong to the message that they came with, so messages are not merged.
func pass(to, from *net.UnixConn) error {
	b, oob := make([]byte, headerSize, 512), make([]byte, syscall.CmsgSpace(4*maxDescriptors))
	n, oobn, flags, _, err := from.ReadMsgUnix(b, oob)
	if err != nil {
		return err
	}
	defer closeAll(oob[:oobn])
	if flags&syscall.MSG_CTRUNC != 0 {
		return errors.New("a message has too many descriptors")
	}
	if _, err := io.ReadFull(from, b[n:]); err != nil {
		return err
	}
	size := binary.LittleEndian.Uint32(b[8:])
	if size > maxMessage {
		return fmt.Errorf("a message of %d bytes", size)
	}
	b = append(b, make([]byte, size)...)
	if _, err := io.ReadFull(from, b[headerSize:]); err != nil {
		return err
	}
	if n, _, err = to.WriteMsgUnix(b, oob[:oobn], nil); err == nil && n < len(b) {
		_, err = to.Write(b[n:])
	}
	return err
}

// closeAll closes the descriptors that came with a message; the receiver has its own copies.
func closeAll(oob []byte) {
	msgs, _ := syscall.ParseSocketControlMessage(oob)
	for _, m := range msgs {
		fds, _ := syscall.ParseUnixRights(&m)
		for _, fd := range fds {
			_ = syscall.Close(fd)
		}
	}
}
