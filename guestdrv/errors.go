package guestdrv

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

var (
	// ErrClosed is returned by operations on a closed device.
	ErrClosed = errors.New("device is closed")
	// ErrDisconnected is returned when vnicd closed the connection.
	ErrDisconnected = errors.New("connection to vnicd lost")
	// ErrTimeout is returned for a command that the device did not answer in time. The device is unusable afterwards.
	ErrTimeout = errors.New("command timed out")
	// ErrNotVNICD is returned by Open if the device's configuration space lacks vnicd's magic.
	ErrNotVNICD = errors.New("not a vnicd HCA")
	// ErrVersion is returned by Open if the device speaks another ABI version.
	ErrVersion = errors.New("unsupported device ABI version")
	// ErrNoMemory is returned when the driver's memory (Config.Memory) is used up.
	ErrNoMemory = errors.New("driver memory exhausted")
	// ErrFull is returned by posts when the work queue has no free slot.
	ErrFull = errors.New("work queue is full")
	// ErrInvalid is wrapped by errors about arguments.
	ErrInvalid = errors.New("invalid argument")
)

// CommandError says that the device refused a command. It wraps the abi.Status,
// so that errors.Is(err, abi.StatusBusy) works.
type CommandError struct {
	Op     abi.Opcode
	Status abi.Status
}

func (e *CommandError) Error() string { return fmt.Sprintf("%v: %v", e.Op, e.Status) }

// Unwrap returns the Status.
func (e *CommandError) Unwrap() error { return e.Status }

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
