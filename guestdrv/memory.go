package guestdrv

import (
	"errors"
	"fmt"
	"sync"

	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

const (
	pageShift = 12
	pageSize  = 1 << pageShift

	// paBase is the PA of the memory's first byte. Any multiple of the page size would do. This one is neither a valid
	// offset into the memfd nor a mapped VA, so that confusing the three fails at once.
	paBase translate.PA = 1 << 40
)

// memory replaces guest memory: a memfd of fixed size, allocated in pages. Open makes it, or gets it from vnicd.
type memory struct {
	*frontend.Memory
	size uint64
}

func newMemory(size uint64) (*memory, error) {
	size = (size + pageSize - 1) &^ (pageSize - 1)
	m, err := frontend.PlanMemory(frontend.Range{PA: paBase, Size: size})
	if err != nil {
		return nil, fmt.Errorf("%d bytes of memory: %w", size, err)
	}
	return &memory{m, size}, nil
}

// alloc allocates n bytes, rounded up to pages, contiguous in VA and PA, zeroed, and aligned to align (a power of two,
// at least a page) in PA.
func (m *memory) alloc(n, align uint64) (*Buffer, error) {
	size := (n + pageSize - 1) &^ (pageSize - 1)
	pa, err := m.Alloc(int(size), int(align))
	if errors.Is(err, frontend.ErrNoMemory) {
		return nil, fmt.Errorf("%w: no %d contiguous bytes", ErrNoMemory, size)
	}
	if err != nil {
		return nil, err
	}
	data, err := m.Bytes(pa, int(size))
	if err != nil {
		return nil, err
	}
	return &Buffer{pa: uint64(pa), va: addressOf(data), data: data[:n:n], giveBack: func() error {
		m.Free(pa, int(size))
		return nil
	}}, nil
}

// has reports whether the page at pa belongs to the memory.
func (m *memory) has(pa uint64) bool { return pa-uint64(paBase) < m.size }

// Buffer is memory that both this process and the device can access, of Device.Alloc or Device.Share: whole pages,
// contiguous in VA and in PA. It must not be used after its Close or Device.Close.
type Buffer struct {
	pa       uint64
	va       uint64
	data     []byte // nil: it was given back
	giveBack func() error

	mu      sync.Mutex
	regions int // registered by PD.Register and RegisterRange; guarded by mu
}

// Bytes returns the buffer's memory.
func (b *Buffer) Bytes() []byte { return b.data }

// Len returns the buffer's length in bytes.
func (b *Buffer) Len() int { return len(b.data) }

// Addr returns the VA of the first byte, as work requests use it: its address in this process.
func (b *Buffer) Addr() uint64 { return b.va }

// PA returns the physical address of the first byte, as page lists use it: its place in the driver's memory.
func (b *Buffer) PA() uint64 { return b.pa }

// Load64 reads the 8 bytes at off, a multiple of 8, in the order of this machine. A program that polls memory written
// by a peer uses it: the peer's earlier writes are visible to later reads.
func (b *Buffer) Load64(off int) uint64 { return atomic64(b.data, off).Load() }

// pagePAs returns the PAs of the buffer's 4 KiB pages.
func (b *Buffer) pagePAs() []uint64 {
	pas := make([]uint64, (len(b.data)+pageSize-1)>>pageShift)
	for i := range pas {
		pas[i] = b.pa + uint64(i)<<pageShift
	}
	return pas
}

// Close releases the memory for the next Alloc, or takes it back from the device if it is of Share. It fails with
// StatusBusy while regions that PD.Register or RegisterRange made in the buffer exist: the device could write to
// what Alloc returns next. Pages that the device was given by their PAs (PD.RegisterPages, MR.SetPages, a Pager,
// DMALKey) or by FastMR.Map are not known to the buffer: it must not be closed before the device has stopped using
// them.
func (b *Buffer) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.regions > 0 {
		return fmt.Errorf("buffer of %d bytes with %d registered regions: %w", len(b.data), b.regions, StatusBusy)
	}
	return b.give()
}

// use makes Close fail until release, and returns the buffer's length.
func (b *Buffer) use() (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.data == nil {
		return 0, invalid("the buffer is closed")
	}
	b.regions++
	return len(b.data), nil
}

func (b *Buffer) release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.regions--
}

// free is Close for the driver's own buffers, which are of Alloc.
func (b *Buffer) free() { _ = b.give() }

// give gives the memory back, once.
func (b *Buffer) give() error {
	if b.data == nil {
		return nil
	}
	if err := b.giveBack(); err != nil {
		return err
	}
	b.data = nil
	return nil
}
