package rstream

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/vnicd/vnicd/guestdrv"
)

// Sentinel errors, for errors.Is. Methods of Conn and Listener wrap them in a *net.OpError. An expired deadline is
// os.ErrDeadlineExceeded, an operation after Close net.ErrClosed, as for the connections of package net.
var (
	// ErrProtocol: the peer has violated the protocol; the error's text says how. The connection has ended.
	ErrProtocol = errors.New("protocol violation by the peer")
	// ErrReset: the connection has ended without the peer's shutdown: the peer or its device has failed, or has closed
	// the connection while this end wrote. It is syscall.ECONNRESET.
	ErrReset error = syscall.ECONNRESET
	// ErrShutdown is returned by Write after CloseWrite. It is syscall.EPIPE.
	ErrShutdown error = syscall.EPIPE
	// ErrNoRoom is returned by Map if the peer has room for no more mappings. It is syscall.ENOMEM.
	ErrNoRoom error = syscall.ENOMEM
	// ErrNotMapped is returned by WriteAt where the peer has mapped nothing. It is syscall.ENXIO.
	ErrNotMapped error = syscall.ENXIO
	// ErrInvalid is wrapped by errors about arguments; it is guestdrv's.
	ErrInvalid = guestdrv.ErrInvalid
)

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
