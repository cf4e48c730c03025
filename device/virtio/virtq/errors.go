package virtq

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/translate"
)

// ErrBroken is returned by every method of a queue once its ring was found to violate the virtio specification.
// errors.Is(err, ErrBroken) holds for the first report (a *RingError) and for all later ones.
var ErrBroken = errors.New("virtq: queue is broken")

// RingError names the wrong word of a ring, its value, and the expected one. It wraps ErrBroken.
type RingError struct {
	Queue int    // queue index
	What  string // the field, e.g. "available index"
	Index uint32 // index into What, if it has several elements
	Value uint64 // value that the guest wrote
	Want  string // expected value
}

func (e *RingError) Error() string {
	return fmt.Sprintf("virtq: queue %d: %s [%d] = %#x, want %s", e.Queue, e.What, e.Index, e.Value, e.Want)
}

func (e *RingError) Unwrap() error { return ErrBroken }

// MissError reports that ring memory was not accessible. The host driver repairs a miss of kind HostFault, and the
// operation may be repeated unchanged; any other kind breaks the queue (then ErrBroken is wrapped).
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

// Absent returns the miss of an error that the host driver can repair, after which the same call may be repeated; for
// any other error, and nil, a miss that is OK.
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
