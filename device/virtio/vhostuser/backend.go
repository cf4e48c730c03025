package vhostuser

import (
	"errors"
	"fmt"
	"sync"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
)

// backend is the channel for the back end's own messages. Sending never waits, because notices may come from a loop.
//
// It sends only while rings run. QEMU's generic device handles the channel only between the start and the stop of the
// rings, and aborts on a message outside of that (as of 11.1); a notice waits for the next start.
type backend struct {
	offered bool // the device has a configuration space

	mu      sync.Mutex
	live    bool
	fd      int // valid if open
	open    bool
	closed  bool
	pending bool // a change that was not reported yet
	held    bool // nothing is reported until release
}

// hold keeps notices back until release: requests of the front end may wait that stop the rings.
func (b *backend) hold() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held = true
}

func (b *backend) release(log hclog.Logger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held = false
	b.tellLocked(log)
}

// set takes over fd, a connected stream socket.
func (b *backend) set(fd int, log hclog.Logger) error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err == nil {
		var typ int
		typ, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		if err == nil && (domain != unix.AF_UNIX || typ != unix.SOCK_STREAM) {
			err = fmt.Errorf("domain %d type %d", domain, typ)
		}
	}
	if err != nil {
		_ = unix.Close(fd)
		return protoErr("back-end channel is no Unix stream socket: %v", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open {
		_ = unix.Close(b.fd)
	}
	b.fd, b.open = fd, true
	b.tellLocked(log)
	return nil
}

// setLive records that a ring was started, or is about to be stopped.
func (b *backend) setLive(live bool, log hclog.Logger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.live = live
	b.tellLocked(log)
}

// isLive returns the value of the last setLive.
func (b *backend) isLive() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.live
}

// isPending reports whether a change has not been reported yet.
func (b *backend) isPending() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pending
}

func (b *backend) configChanged(log hclog.Logger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || !b.offered {
		return
	}
	b.pending = true
	b.tellLocked(log)
}

// tellLocked sends a pending notice, if it may.
func (b *backend) tellLocked(log hclog.Logger) {
	if !b.pending || !b.open || !b.live || b.held {
		return
	}
	msg := Header{Request: BackendConfigChange, Flags: FlagVersion}.Append(nil)
	err := unix.Sendto(b.fd, msg, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
	switch {
	case err == nil:
		b.pending = false
	case errors.Is(err, unix.EAGAIN):
		// The front end has not read earlier notices; when it does, it reads the configuration and finds this change,
		// too.
		b.pending = false
	default:
		log.Warn("back-end channel failed", "error", err)
		_ = unix.Close(b.fd)
		b.open = false
	}
}

func (b *backend) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.open {
		_ = unix.Close(b.fd)
		b.open = false
	}
}
