package translate

import (
	"errors"
	"fmt"
)

// MissKind is the reason why an address could not be translated.
type MissKind uint8

// Kinds of misses. GuestFault and HostFault can be resolved by their driver (PF-7); all others are errors of the
// requester.
const (
	None       MissKind = iota // no miss
	BadKey                     // no such key, or it was deregistered
	BadPD                      // the key belongs to another protection domain
	BadAccess                  // the region does not grant what the access needs
	OutOfRange                 // the region does not span the access
	BadAddress                 // PA in no memory slot, or misaligned for an atomic
	GuestFault                 // stage one: the MTT entry is absent
	HostFault                  // stage two: the PA2MA entry is absent
	Blocked                    // the VM's uplink attribute forbids it (PF-3)
)

var missNames = [...]string{
	None:       "none",
	BadKey:     "no such memory key",
	BadPD:      "memory key of another protection domain",
	BadAccess:  "access right not granted",
	OutOfRange: "outside the memory region",
	BadAddress: "not an address of guest memory",
	GuestFault: "page absent in the guest",
	HostFault:  "page absent on the host",
	Blocked:    "forbidden by the uplink attribute",
}

// String names the kind in words.
func (k MissKind) String() string {
	if int(k) < len(missNames) {
		return missNames[k]
	}
	return fmt.Sprintf("miss kind %d", uint8(k))
}

// Miss describes a failed translation, by value so that the data path does not
// allocate. The zero Miss means success. Fields that do not apply are zero.
//
// It has at most four fields and 32 bytes so that the compiler keeps it in registers; otherwise each check for success
// goes through the stack and costs more than the translation.
type Miss struct {
	Kind MissKind
	Key  Key // stage one
	Where
	Len uint64 // bytes wanted from Where on; for a HostFault, those contiguous in PA
}

// Where is the first byte that did not translate.
type Where struct {
	VA VA // stage one
	PA PA // stage two
}

// OK reports success.
func (m Miss) OK() bool { return m.Kind == None }

// Fault reports whether a driver can resolve the miss, so that the access can be retried (PF-7). Every other miss is
// final.
func (m Miss) Fault() bool { return m.Kind == GuestFault || m.Kind == HostFault }

// ErrMiss matches every *MissError.
var ErrMiss = errors.New("translation miss")

// MissError is a Miss as an error, for control paths.
type MissError struct{ Miss Miss }

// Err returns nil for success and a *MissError otherwise.
func (m Miss) Err() error {
	if m.OK() {
		return nil
	}
	return &MissError{m}
}

// Error names the kind and the address.
func (e *MissError) Error() string {
	m := e.Miss
	switch {
	case m.Kind == BadAddress, m.Kind == HostFault, m.Kind == Blocked && m.Key == 0:
		return fmt.Sprintf("%v: %v, %d bytes", m.PA, m.Kind, m.Len)
	}
	return fmt.Sprintf("key %#x, %v: %v, %d bytes", uint32(m.Key), m.VA, m.Kind, m.Len)
}

// Is matches ErrMiss.
func (e *MissError) Is(target error) bool { return target == ErrMiss }
