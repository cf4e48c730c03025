package translate

import (
	"fmt"
	"slices"
	"sync"
)

// GVMTable is the GVM identifier table (PF-1): for each GVMI its PA2MA tables. A VM that attaches with several
// functions (HCA, NIC) has one Space for each. The data path does not use this table: a VM holds its Space.
type GVMTable struct {
	mu   sync.Mutex
	vms  map[GVMI][]*Space
	size int // maximum of Spaces over all VMs
	used int
}

// NewGVMTable returns an empty table for at most size Spaces.
func NewGVMTable(size int) *GVMTable {
	return &GVMTable{vms: make(map[GVMI][]*Space), size: size}
}

// Bind adds s under its GVMI.
func (t *GVMTable) Bind(s *Space) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.used >= t.size {
		return fmt.Errorf("GVM identifier table holds %d entries: %w", t.size, ErrLimit)
	}
	if slices.Contains(t.vms[s.gvmi], s) {
		return fmt.Errorf("GVMI %d: space is already bound: %w", s.gvmi, ErrInvalid)
	}
	t.vms[s.gvmi] = append(t.vms[s.gvmi], s)
	t.used++
	return nil
}

// Release removes s.
func (t *GVMTable) Release(s *Space) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.vms[s.gvmi], s)
	if i < 0 {
		return
	}
	if t.vms[s.gvmi] = slices.Delete(t.vms[s.gvmi], i, i+1); len(t.vms[s.gvmi]) == 0 {
		delete(t.vms, s.gvmi)
	}
	t.used--
}

// Spaces returns the Spaces bound under g, nil if there are none.
func (t *GVMTable) Spaces(g GVMI) []*Space {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.vms[g])
}
