package translate

import (
	"fmt"
	"sync"
)

// Uplink is the attribute that accompanies every access of a device to a VM's memory and is checked where the access
// is made (PF-3). It concerns data: memory that work requests, remote keys and the buffers of a network card name. Work
// and completion rings, virtqueues, doorbells, commands and events are accessed under every attribute (RingRead and so
// on), so that the driver learns how its operations ended.
type Uplink uint32

// The attributes.
const (
	UplinkReadWrite Uplink = iota
	UplinkReadOnly         // the device must not change the VM's data
	UplinkBlocked          // the device must neither read nor change it
	numUplinks
)

var uplinkNames = [numUplinks]string{UplinkReadWrite: "rw", UplinkReadOnly: "ro", UplinkBlocked: "blocked"}

// String is the attribute's name in the configuration.
func (u Uplink) String() string {
	if u < numUplinks {
		return uplinkNames[u]
	}
	return fmt.Sprintf("attribute %d", uint32(u))
}

// ParseUplink is the inverse of String.
func ParseUplink(name string) (Uplink, error) {
	for u, n := range uplinkNames {
		if n == name {
			return Uplink(u), nil
		}
	}
	return 0, fmt.Errorf("want rw, ro or blocked, found %q: %w", name, ErrInvalid)
}

// MarshalText implements encoding.TextMarshaler.
func (u Uplink) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (u *Uplink) UnmarshalText(text []byte) (err error) {
	*u, err = ParseUplink(string(text))
	return err
}

// forbids reports whether u refuses an access.
func (u Uplink) forbids(write bool) bool { return u == UplinkBlocked || u != UplinkReadWrite && write }

// Attribute is the uplink attribute of one VM, or of one host application, attached or not: it holds for every Space
// that is bound to it. The data path does not use it: a Space has a copy. The zero value permits everything.
type Attribute struct {
	mu      sync.Mutex
	uplink  Uplink
	spaces  []*Space
	refused Denied // of Spaces that were released
}

// Denied counts accesses that the attribute forbade.
type Denied struct {
	Reads  uint64 `json:"reads"`
	Writes uint64 `json:"writes"`
}

func (r *Denied) add(s *Space) {
	r.Reads += s.refused[0].Load()
	r.Writes += s.refused[1].Load()
}

// Bind puts s under the attribute until Release. It precedes every access to s.
func (a *Attribute) Bind(s *Space) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spaces = append(a.spaces, s)
	s.setUplink(a.uplink)
}

// Release is the inverse of Bind.
func (a *Attribute) Release(s *Space) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, have := range a.spaces {
		if have == s {
			a.spaces = append(a.spaces[:i], a.spaces[i+1:]...)
			a.refused.add(s)
			return
		}
	}
}

// Uplink returns the attribute.
func (a *Attribute) Uplink() Uplink {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.uplink
}

// Refused returns the number of accesses that were refused so far.
func (a *Attribute) Refused() Denied {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.refused
	for _, s := range a.spaces {
		r.add(s)
	}
	return r
}

// Set changes the attribute. It holds for every access that begins after Set. Accesses under the previous one have
// ended when all releases that Set returns are done; there is one for each Space that is bound (EP-2, EP-3).
func (a *Attribute) Set(u Uplink) ([]*Drain, error) {
	if u >= numUplinks {
		return nil, fmt.Errorf("%v: %w", u, ErrInvalid)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.uplink = u
	drains := make([]*Drain, 0, len(a.spaces))
	for _, s := range a.spaces {
		s.setUplink(u)
		drains = append(drains, s.epochs.Flip())
	}
	return drains, nil
}

func (s *Space) setUplink(u Uplink) { s.changeUplink(^logging, uint32(u)) }

// changeUplink exchanges bits of the word.
func (s *Space) changeUplink(clear, set uint32) {
	for {
		was := s.uplink.Load()
		if s.uplink.CompareAndSwap(was, was&^clear|set) {
			break
		}
	}
	s.gen.Add(1)
}

// permit checks the attribute, and counts the access if it is refused.
func (s *Space) permit(write bool) MissKind {
	if !Uplink(s.uplink.Load() &^ logging).forbids(write) {
		return None
	}
	if write {
		s.refused[1].Add(1)
	} else {
		s.refused[0].Add(1)
	}
	return Blocked
}
