package virtq

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/translate"
)

// ErrBroken is what every method of a queue returns once its ring has been
// found to violate the virtio specification. errors.Is(err, ErrBroken) holds
// for the first report (a *RingError) as well as for all later ones.
var ErrBroken = errors.New("virtq: queue is broken")

// RingError says which word of a ring was wrong, what it held, and what would
// have been right. It wraps ErrBroken.
type RingError struct {
	Queue int    // queue index
	What  string // the field, e.g. "available index"
	Index uint32 // which element of What, where there are several
	Value uint64 // what the guest wrote
	Want  string // what would have been accepted
}

func (e *RingError) Error() string {
	return fmt.Sprintf("virtq: queue %d: %s [%d] = %#x, want %s", e.Queue, e.What, e.Index, e.Value, e.Want)
}

func (e *RingError) Unwrap() error { return ErrBroken }

// MissError reports that ring memory could not be reached. A miss of kind
// HostFault is for the host driver to repair and the operation may be repeated
// unchanged; every other kind breaks the queue (then ErrBroken is wrapped).
type MissError struct {
	Queue int
	What  string
	Miss  translate.Miss
}

func (e *MissError) Error() string {
	return fmt.Sprintf("virtq: queue %d: %s at PA %#x (%d bytes): %v", e.Queue, e.What, uint64(e.Miss.PA), e.Miss.Len,
		e.Miss.Kind)
}

func (e *MissError) Unwrap() error {
	if e.Miss.Kind == translate.HostFault {
		return nil
	}
	return ErrBroken
}

// Absent returns the miss of an error that the host driver can repair, after
// which the same call may be repeated; for every other error, and nil, a miss
// that is OK.
func Absent(err error) translate.Miss {
	if err == nil {
		return translate.Miss{}
	}
	var m *MissError
	if errors.As(err, &m) && m.Miss.Kind == translate.HostFault {
		return m.Miss
	}
	return translate.Miss{}
}
