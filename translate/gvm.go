package translate

import (
	"errors"
	"fmt"
	"sync"
)

// Uplink is the attribute that accompanies every machine access of a VM and is
// checked where the access is made (PF-3). 0 permits everything.
type Uplink uint32

// Attribute bits.
const (
	UplinkReadOnly Uplink = 1 << 0 // the device must not change the VM's memory
	UplinkBlocked  Uplink = 1 << 1 // the device must not touch the VM's memory

	uplinkKnown = UplinkReadOnly | UplinkBlocked
)

// Errors of GVMTable.
var (
	ErrUnknownGVMI = errors.New("no such GVMI")
	ErrHostGVMI    = errors.New("GVMI 0 has no uplink attribute")
)

// GVMTable is the GVM identifier table (PF-1): for each GVMI its PA2MA tables
// and its uplink attribute. A VM that attaches with several functions (HCA,
// NIC) has one Space for each, all under the same attribute. The data path does not use this table: a VM holds its
// Space, which holds the attribute.
type GVMTable struct {
	mu   sync.Mutex
	vms  map[GVMI]*gvmEntry
	size int // maximum of Spaces over all VMs
	used int
}

type gvmEntry struct {
	uplink Uplink
	spaces []*Space
}

// NewGVMTable returns an empty table for at most size Spaces.
func NewGVMTable(size int) *GVMTable {
	return &GVMTable{vms: make(map[GVMI]*gvmEntry), size: size}
}

// Bind adds s under its GVMI and sets that GVMI's attribute in it.
func (t *GVMTable) Bind(s *Space) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.used >= t.size {
		return fmt.Errorf("GVM identifier table holds %d entries: %w", t.size, ErrLimit)
	}
	e := t.vms[s.gvmi]
	if e == nil {
		e = new(gvmEntry)
		t.vms[s.gvmi] = e
	}
	for _, have := range e.spaces {
		if have == s {
			return fmt.Errorf("GVMI %d: space is already bound: %w", s.gvmi, ErrInvalid)
		}
	}
	e.spaces = append(e.spaces, s)
	t.used++
	s.setUplink(e.uplink)
	return nil
}

// Release removes s. With the last Space of a GVMI its attribute is removed too.
func (t *GVMTable) Release(s *Space) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.vms[s.gvmi]
	if e == nil {
		return
	}
	for i, have := range e.spaces {
		if have == s {
			e.spaces = append(e.spaces[:i], e.spaces[i+1:]...)
			t.used--
			break
		}
	}
	if len(e.spaces) == 0 {
		delete(t.vms, s.gvmi)
	}
}

// Spaces returns the Spaces bound under g, nil if there are none.
func (t *GVMTable) Spaces(g GVMI) []*Space {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.vms[g]; e != nil {
		return append([]*Space(nil), e.spaces...)
	}
	return nil
}

// Uplink returns g's attribute.
func (t *GVMTable) Uplink(g GVMI) (Uplink, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.vms[g]; e != nil {
		return e.uplink, nil
	}
	return 0, fmt.Errorf("GVMI %d: %w", g, ErrUnknownGVMI)
}

// SetUplink changes g's attribute. It applies to every access that starts after SetUplink returns; to wait for earlier
// ones, drain the epochs of Spaces(g). For host applications the attribute stage is off (PF-4).
func (t *GVMTable) SetUplink(g GVMI, u Uplink) error {
	switch {
	case g == HostGVMI:
		return ErrHostGVMI
	case u&^uplinkKnown != 0:
		return fmt.Errorf("uplink attribute %#x has unknown bits %#x: %w", uint32(u), uint32(u&^uplinkKnown), ErrInvalid)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.vms[g]
	if e == nil {
		return fmt.Errorf("GVMI %d: %w", g, ErrUnknownGVMI)
	}
	e.uplink = u
	for _, s := range e.spaces {
		s.setUplink(u)
	}
	return nil
}

func (s *Space) setUplink(u Uplink) {
	s.uplink.Store(uint32(u))
	s.gen.Add(1)
}
