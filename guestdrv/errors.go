package guestdrv

import (
	"context"
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// Sentinel errors, for errors.Is. A refusal by the device is a *CommandError, which matches its Status: see StatusBusy
// and its like. The failure of a work request is a *CompletionError, which matches its WCStatus. An operation whose
// context ends first fails with the context's error.
var (
	// ErrClosed is returned by operations on a closed device.
	ErrClosed = errors.New("device is closed")
	// ErrDisconnected is returned when vnicd closed the connection. The device has to be opened again.
	ErrDisconnected = errors.New("connection to vnicd lost")
	// ErrTimeout is returned for a command that the device did not answer within Config.Timeout. It also matches
	// context.DeadlineExceeded. The device remains usable, and may still execute the command.
	ErrTimeout = fmt.Errorf("command timed out: %w", context.DeadlineExceeded)
	// ErrNotVNICD is returned by Open if the device's configuration space lacks vnicd's magic number.
	ErrNotVNICD = errors.New("not a vnicd HCA")
	// ErrVersion is returned by Open if the device serves no version of the ABI that this package speaks (CO-6).
	ErrVersion = errors.New("unsupported device ABI version")
	// ErrNoMemory is returned when the driver's memory (Config.Memory) or its address handle table (Config.AHEntries) is
	// used up. A limit of the device is StatusNoMemory.
	ErrNoMemory = errors.New("driver memory exhausted")
	// ErrFull is returned by posting methods when the work queue has no free slot.
	ErrFull = errors.New("work queue is full")
	// ErrInvalid is wrapped by errors about arguments that the driver rejects itself.
	ErrInvalid = errors.New("invalid argument")
)

// Status is the device's reason to refuse a command. Each value is a sentinel error for errors.Is. Buffer.Close, which
// issues no command, uses StatusBusy, too.
type Status uint32

// The statuses, and the errno that they correspond to in a guest's kernel. vnicd's log has the reason of a refusal.
const (
	StatusInvalid     = Status(abi.StatusInvalid)     // EINVAL: malformed or contradictory request
	StatusNoMemory    = Status(abi.StatusNoMemory)    // ENOMEM: a limit of this application is reached
	StatusNotFound    = Status(abi.StatusNotFound)    // ENOENT: no such object
	StatusBusy        = Status(abi.StatusBusy)        // EBUSY: the object is in use
	StatusUnsupported = Status(abi.StatusUnsupported) // EOPNOTSUPP: unknown command or missing capability
	StatusFault       = Status(abi.StatusFault)       // EFAULT: address outside the driver's memory
	StatusPermission  = Status(abi.StatusPermission)  // EPERM: not permitted
	StatusIO          = Status(abi.StatusIO)          // EIO: the device failed
)

// Error describes the status.
func (s Status) Error() string { return abi.Status(s).Error() }

// CommandError reports that the device refused a command.
type CommandError struct {
	Command string // its name in vnicd_abi.h, such as CREATE_QP
	Status  Status
}

func (e *CommandError) Error() string { return fmt.Sprintf("%s: %v", e.Command, e.Status) }

// Unwrap returns the Status, so that errors.Is(err, StatusBusy) works.
func (e *CommandError) Unwrap() error { return e.Status }

// CompletionError reports a work request that did not succeed.
type CompletionError struct {
	ID     uint64 // of the work request
	QPN    uint32
	Status WCStatus
}

func (e *CompletionError) Error() string {
	return fmt.Sprintf("QP %d, work request %d: %v", e.QPN, e.ID, e.Status)
}

// Unwrap returns the WCStatus, so that errors.Is(err, WCRemAccessErr) works.
func (e *CompletionError) Unwrap() error { return e.Status }

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
