// Side: both

package hca

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// limitError reports that a VM asked for more than its limits allow.
type limitError struct {
	what   string
	n, max uint64
}

func (e *limitError) Error() string {
	return fmt.Sprintf("%s: %d, the limit is %d", e.what, e.n, e.max)
}

// Unwrap returns the status that the guest sees.
func (e *limitError) Unwrap() error { return abi.StatusNoMemory }

// faultError reports that an address is not in the guest's memory.
type faultError struct {
	what string
	miss translate.Miss
}

func (e *faultError) Error() string { return fmt.Sprintf("%s: %v", e.what, e.miss) }

// Unwrap returns the status that the guest sees.
func (e *faultError) Unwrap() error { return abi.StatusFault }

// statusError is a refusal with a chosen status.
type statusError struct {
	status abi.Status
	msg    string
}

func (e *statusError) Error() string { return e.msg }
func (e *statusError) Unwrap() error { return e.status }

func refuse(s abi.Status, format string, args ...any) error {
	return &statusError{status: s, msg: fmt.Sprintf(format, args...)}
}

// statusOf returns the status that the guest sees for err: the abi.Status that it
// wraps, EINVAL if it wraps none.
func statusOf(err error) abi.Status {
	var s abi.Status
	switch {
	case err == nil:
		return abi.StatusOK
	case errors.As(err, &s):
		return s
	default:
		return abi.StatusInvalid
	}
}

// memoryError wraps translate's errors with the status that the guest sees.
func memoryError(err error) error {
	s := abi.StatusInvalid
	switch {
	case errors.Is(err, translate.ErrLimit):
		s = abi.StatusNoMemory
	case errors.Is(err, translate.ErrBusy):
		s = abi.StatusBusy
	case errors.Is(err, translate.ErrNoRegion):
		s = abi.StatusNotFound
	case errors.Is(err, translate.ErrNotMapped):
		s = abi.StatusFault
	}
	return &statusError{status: s, msg: err.Error()}
}

// hostMiss finds a host fault in err.
func hostMiss(err error) (translate.Miss, bool) {
	var f *faultError
	var q *virtq.MissError
	switch {
	case err == nil:
	case errors.As(err, &f):
		return f.miss, f.miss.Kind == translate.HostFault
	case errors.As(err, &q):
		return q.Miss, q.Miss.Kind == translate.HostFault
	}
	return translate.Miss{}, false
}
