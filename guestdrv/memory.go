package guestdrv

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

const (
	pageShift = 12
	pageSize  = 1 << pageShift

	// paBase is where the memory begins in the driver's physical address space.
	// Any page multiple would do; one that is no valid offset into the memfd and
	// no mapped VA makes mix-ups fail at once.
	paBase translate.PA = 1 << 40
)

// memory is the driver's "guest memory": a sealed memfd, handed out in pages.
type memory struct {
	*frontend.Memory
	size uint64
}

func newMemory(size uint64) (*memory, error) {
	size = (size + pageSize - 1) &^ (pageSize - 1)
	m, err := frontend.NewMemory(frontend.Range{PA: paBase, Size: size})
	if err != nil {
		return nil, fmt.Errorf("%d bytes of memory: %w", size, err)
	}
	return &memory{m, size}, nil
}

// alloc takes n bytes, rounded up to pages, contiguous in VA and PA, zeroed, and
// aligned to align (a power of two, at least a page) in PA.
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
	return &Buffer{mem: m, pa: uint64(pa), size: int(size), data: data[:n:n], va: addressOf(data)}, nil
}

// has tells whether the page at pa is the driver's.
func (m *memory) has(pa uint64) bool { return pa-uint64(paBase) < m.size }

// Buffer is memory that both this process and the device can reach: whole pages,
// contiguous in VA and in PA. It must not be used after Free or Device.Close.
type Buffer struct {
	mem  *memory
	pa   uint64
	va   uint64
	size int
	data []byte
}

// Bytes returns the buffer's memory.
func (b *Buffer) Bytes() []byte { return b.data }

// Len is the buffer's length in bytes.
func (b *Buffer) Len() int { return len(b.data) }

// Addr is the buffer's VA, as work requests name it.
func (b *Buffer) Addr() uint64 { return b.va }

// PA is the buffer's physical address.
func (b *Buffer) PA() uint64 { return b.pa }

// Load64 reads the word at off, a multiple of 8, for programs that watch memory which
// peers write: later reads of what was written before it see that.
func (b *Buffer) Load64(off int) uint64 { return atomic64(b.data, off).Load() }

// pagePAs returns the PAs of the buffer's 4 KiB pages.
func (b *Buffer) pagePAs() []uint64 {
	pas := make([]uint64, (len(b.data)+pageSize-1)>>pageShift)
	for i := range pas {
		pas[i] = b.pa + uint64(i)<<pageShift
	}
	return pas
}

// Free gives the memory back. Nothing, a registered region least of all, may use it any more.
func (b *Buffer) Free() {
	if b.data != nil {
		b.data = nil
		b.mem.Free(translate.PA(b.pa), b.size)
	}
}
