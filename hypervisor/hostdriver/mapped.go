package hostdriver

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrMapped: a slot would exceed what its VM, or all VMs together, may have mapped.
var ErrMapped = errors.New("too much memory is mapped")

// Bounds of all VMs together. A front end chooses the sizes of its memory files, and sparse files cost it nothing; here
// they cost address space, which a process has 2^47 bytes of, memory map entries, of which the kernel permits it 65530
// (vm.max_map_count), and 8 MiB of tables for each TiB (translate.Space). What is left is for the process itself.
const (
	maxMapped   = 1 << 45
	maxMappings = 1 << 15
)

// minShared is the least that a VM may share unless it is configured.
const minShared = 64 << 30

// DefaultShared returns how much memory a VM may share unless it is configured: twice the host's, which leaves room for
// memory that is swapped, or that is still to be plugged in.
func DefaultShared() uint64 {
	var s unix.Sysinfo_t
	if unix.Sysinfo(&s) != nil {
		return minShared
	}
	return min(max(2*uint64(s.Totalram)*uint64(s.Unit), minShared), maxMapped)
}

// addressSpace is the account of what this process has mapped for all VMs.
var addressSpace = &mappedTotal{bytes: maxMapped, mappings: maxMappings}

// mappedTotal bounds mappings, whoever makes them.
type mappedTotal struct {
	bytes    uint64 // bounds
	mappings int

	mu        sync.Mutex
	used      uint64
	usedCount int
}

// charge reserves a mapping of n bytes.
func (t *mappedTotal) charge(n uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n > t.bytes-t.used {
		return fmt.Errorf("%w: %d bytes beside the %d of all VMs, which may be %d in all", ErrMapped, n, t.used, t.bytes)
	}
	if t.usedCount >= t.mappings {
		return fmt.Errorf("%w: all VMs have %d memory slots, which is the most", ErrMapped, t.usedCount)
	}
	t.used += n
	t.usedCount++
	return nil
}

func (t *mappedTotal) release(n uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.used -= n
	t.usedCount--
}

// SetShared bounds the bytes that the VM may share; 0: only the bound of all VMs applies. Call it before the first
// Driver uses the budget.
func (b *Budget) SetShared(limit uint64) { b.shared = limit }

// chargeMapping reserves a mapping of n bytes, whole pages of its file, for the VM. Connections that share a mapping
// are charged once.
func (b *Budget) chargeMapping(n uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shared != 0 && n > b.shared-min(b.mapped, b.shared) {
		return fmt.Errorf("%w: %d bytes beside %d: this VM may share %d in all", ErrMapped, n, b.mapped, b.shared)
	}
	if err := b.space.charge(n); err != nil {
		return err
	}
	b.mapped += n
	return nil
}

func (b *Budget) releaseMapping(n uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mapped -= n
	b.space.release(n)
}

// CheckShared returns ErrMapped if the connection may not have slots of n bytes in all, so that a front end can be
// refused before its present memory is removed.
func (d *Driver) CheckShared(n uint64) error { return d.opts.Budget.checkShared(n, 0) }

// checkShared bounds the slots of one connection, whether or not they share mappings: its tables grow with them.
func (b *Budget) checkShared(n, have uint64) error {
	limit := b.space.bytes
	if b.shared != 0 {
		limit = min(limit, b.shared)
	}
	if n > limit-min(have, limit) {
		return fmt.Errorf("%w: %d bytes beside %d: this VM may share %d in all", ErrMapped, n, have, limit)
	}
	return nil
}
