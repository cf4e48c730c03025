package rdmacm

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/guestdrv"
)

// Sentinel errors, for errors.Is. A rejection is a *RejectError, which matches its Reason.
var (
	// ErrClosed is returned by operations on a closed Manager, Listener, Request or Conn.
	ErrClosed = errors.New("closed")
	// ErrTimeout: the peer did not answer within the retries of Config, or gave up before the Request was accepted.
	ErrTimeout = errors.New("the peer does not answer")
	// ErrPeerDisconnected: the peer has ended the connection.
	ErrPeerDisconnected = errors.New("the peer has disconnected")
	// ErrInUse is returned by Listen for a port that has a listener.
	ErrInUse = errors.New("port in use")
	// ErrTooMany is returned when Config.MaxConnections is reached.
	ErrTooMany = errors.New("too many connections")
	// ErrInvalid is wrapped by errors about arguments; it is guestdrv's.
	ErrInvalid = guestdrv.ErrInvalid
)

// Reason is why a request or reply was rejected (IBTA 12.6.7.2). Each value is a sentinel error for errors.Is.
type Reason uint16

// The reasons that this package sends or that programs are likely to meet.
const (
	RejectNoQP          Reason = 1  // the message names no usable queue pair
	RejectNoResources   Reason = 3  // the listener's backlog or the connection table is full
	RejectTimeout       Reason = 4  // the sender has given up waiting
	RejectUnsupported   Reason = 5  // request not supported
	RejectCommID        Reason = 6  // unknown communication ID
	RejectServiceID     Reason = 8  // nobody listens on the port
	RejectTransport     Reason = 9  // not RC
	RejectStale         Reason = 10 // the peer has an earlier connection with these IDs or this queue pair
	RejectGID           Reason = 12 // the path is not between the addresses of the packet
	RejectMTU           Reason = 26 // path MTU not supported
	RejectConsumer      Reason = 28 // the peer's program refuses; Linux also says so for its own reasons
	RejectDuplicateID   Reason = 30 // the communication ID is in use
	RejectVendorOptions Reason = 35
)

var reasonNames = map[Reason]string{
	RejectNoQP: "no queue pair", RejectNoResources: "no resources", RejectTimeout: "timeout",
	RejectUnsupported: "request not supported", RejectCommID: "invalid communication ID",
	RejectServiceID: "nobody listens on the port", RejectTransport: "invalid transport service type",
	RejectStale: "stale connection", RejectGID: "invalid GID", RejectMTU: "invalid path MTU",
	RejectConsumer: "refused by the peer's program", RejectDuplicateID: "duplicate communication ID",
	RejectVendorOptions: "vendor option not supported",
}

// Error describes the reason.
func (r Reason) Error() string {
	if s := reasonNames[r]; s != "" {
		return s
	}
	return fmt.Sprintf("reason %d", uint16(r))
}

// RejectError reports that the peer rejected the connection.
type RejectError struct {
	Reason Reason
	// PrivateData is what the peer's program said; its length is that of the message's field, and zero bytes follow the
	// program's data.
	PrivateData []byte
}

func (e *RejectError) Error() string { return "connection rejected: " + e.Reason.Error() }

// Unwrap returns the Reason, so that errors.Is(err, RejectServiceID) works.
func (e *RejectError) Unwrap() error { return e.Reason }

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
