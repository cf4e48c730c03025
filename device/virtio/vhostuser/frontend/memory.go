package frontend

import (
	"errors"
	"fmt"
	"sort"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/translate"
)

// userBase makes user addresses out of guest addresses. They are labels used only between the two ends of the socket;
// they differ from guest addresses, so that a mix-up fails.
const userBase = 0x7e00_0000_0000

const pageSize = 4096

// ErrNoMemory is returned by Alloc when no free span is large enough.
var ErrNoMemory = errors.New("frontend: out of guest memory")

// Range is a piece of guest physical memory.
type Range struct {
	PA   translate.PA
	Size uint64
}

// region is the range as a region of a memory table, at the beginning of its file.
func (r Range) region() vhostuser.Region {
	return vhostuser.Region{GuestPA: uint64(r.PA), Size: r.Size, UserAddr: userBase + uint64(r.PA)}
}

// Memory is a guest memory of one or more ranges, all in one memfd of fixed size. Bytes and Uint32 are safe for any
// goroutine until Close; Alloc and Free lock.
type Memory struct {
	fd      int    // -1: none yet, or closed
	size    uint64 // of all ranges
	regions []region

	mu   sync.Mutex
	free []Range // sorted and disjoint
}

type region struct {
	vhostuser.Region
	data []byte
	used uint64 // end of all memory ever allocated; beyond it memory is zero and not resident
}

// NewMemory makes a zeroed memory with the given ranges (multiples of 4096, disjoint).
func NewMemory(ranges ...Range) (*Memory, error) {
	m, err := PlanMemory(ranges...)
	if err == nil {
		err = m.Make()
	}
	if err != nil {
		return nil, err
	}
	return m, nil
}

// PlanMemory is NewMemory without a file: Open gets one from the back end if that offers one, or makes it. Before that,
// there is nothing to allocate.
func PlanMemory(ranges ...Range) (*Memory, error) {
	m := &Memory{fd: -1}
	for _, r := range ranges {
		if r.Size == 0 || (uint64(r.PA)|r.Size)%pageSize != 0 {
			return nil, fmt.Errorf("frontend: range PA %#x size %#x, want multiples of %d", uint64(r.PA), r.Size, pageSize)
		}
		v := region{Region: r.region()}
		v.Offset = m.size
		m.regions = append(m.regions, v)
		m.size += r.Size
	}
	return m, nil
}

// Make gives planned memory a file of its own. After an error the memory is closed.
func (m *Memory) Make() error {
	fd, err := unix.MemfdCreate("vnicd-guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fmt.Errorf("frontend: memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, int64(m.size)); err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("frontend: memfd of %d bytes: %w", m.size, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("frontend: seal memfd: %w", err)
	}
	return m.use(fd)
}

// use maps the file, which it takes over. After an error the memory is closed.
func (m *Memory) use(fd int) error {
	m.fd = fd
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || uint64(st.Size) < m.size {
		m.Close()
		return fmt.Errorf("frontend: a memory file of %d bytes (%v), want %d", st.Size, err, m.size)
	}
	for i := range m.regions {
		r := &m.regions[i]
		var err error
		r.data, err = unix.Mmap(fd, int64(r.Offset), int(r.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			m.Close()
			return fmt.Errorf("frontend: map %d bytes: %w", r.Size, err)
		}
		m.free = append(m.free, Range{PA: translate.PA(r.GuestPA), Size: r.Size})
	}
	sort.Slice(m.free, func(i, j int) bool { return m.free[i].PA < m.free[j].PA })
	return nil
}

// Close unmaps the memory. Slices from Bytes become invalid.
func (m *Memory) Close() {
	for i := range m.regions {
		if m.regions[i].data != nil {
			_ = unix.Munmap(m.regions[i].data)
			m.regions[i].data = nil
		}
	}
	if m.fd >= 0 {
		_ = unix.Close(m.fd)
		m.fd = -1
	}
}

// FD is the memfd, which the memory still owns.
func (m *Memory) FD() int { return m.fd }

// Regions returns the memory's regions for a memory table.
func (m *Memory) Regions() []vhostuser.Region {
	out := make([]vhostuser.Region, len(m.regions))
	for i := range m.regions {
		out[i] = m.regions[i].Region
	}
	return out
}

// Bytes returns the n bytes of memory at pa, which must be in one range.
func (m *Memory) Bytes(pa translate.PA, n int) ([]byte, error) {
	for i := range m.regions {
		r := &m.regions[i]
		if uint64(pa) >= r.GuestPA && uint64(pa)-r.GuestPA <= r.Size && n >= 0 && uint64(n) <= r.Size-(uint64(pa)-r.GuestPA) {
			off := uint64(pa) - r.GuestPA
			return r.data[off : off+uint64(n) : off+uint64(n)], nil
		}
	}
	return nil, fmt.Errorf("frontend: %v, %d bytes: %v", pa, n, translate.BadAddress)
}

// UserAddr returns the user address of pa, for SET_VRING_ADDR.
func (m *Memory) UserAddr(pa translate.PA) uint64 { return userBase + uint64(pa) }

// Alloc returns n zeroed bytes of memory, aligned to align (a power of two). Free memory must not be written to.
func (m *Memory) Alloc(n, align int) (translate.PA, error) {
	if n <= 0 || align <= 0 || align&(align-1) != 0 {
		return 0, fmt.Errorf("frontend: alloc %d bytes aligned to %d", n, align)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, f := range m.free {
		pa := (f.PA + translate.PA(align) - 1) &^ (translate.PA(align) - 1)
		skip := uint64(pa - f.PA)
		if skip > f.Size || f.Size-skip < uint64(n) {
			continue
		}
		if err := m.zero(pa, n); err != nil {
			return 0, err
		}
		rest := Range{PA: pa + translate.PA(n), Size: f.Size - skip - uint64(n)}
		var put []Range
		if skip > 0 {
			put = append(put, Range{PA: f.PA, Size: skip})
		}
		if rest.Size > 0 {
			put = append(put, rest)
		}
		m.free = append(m.free[:i:i], append(put, m.free[i+1:]...)...)
		return pa, nil
	}
	return 0, fmt.Errorf("%w: %d bytes aligned to %d", ErrNoMemory, n, align)
}

// zero clears the used part of the n bytes at pa; unused memory stays sparse.
func (m *Memory) zero(pa translate.PA, n int) error {
	b, err := m.Bytes(pa, n)
	if err != nil {
		return err
	}
	for i := range m.regions {
		r := &m.regions[i]
		if off := uint64(pa) - r.GuestPA; uint64(pa) >= r.GuestPA && off < r.Size {
			if r.used > off {
				clear(b[:min(uint64(n), r.used-off)])
			}
			r.used = max(r.used, off+uint64(n))
		}
	}
	return nil
}

// Free frees the n bytes at pa that Alloc returned.
func (m *Memory) Free(pa translate.PA, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := sort.Search(len(m.free), func(i int) bool { return m.free[i].PA > pa })
	m.free = append(m.free[:i:i], append([]Range{{PA: pa, Size: uint64(n)}}, m.free[i:]...)...)
	// Join with the neighbours, but never across two ranges of the memory.
	for _, j := range []int{i, i - 1} {
		if j < 0 || j+1 >= len(m.free) {
			continue
		}
		a, b := m.free[j], m.free[j+1]
		if a.PA+translate.PA(a.Size) != b.PA || m.starts(b.PA) {
			continue
		}
		m.free[j].Size += b.Size
		m.free = append(m.free[:j+1], m.free[j+2:]...)
	}
}

func (m *Memory) starts(pa translate.PA) bool {
	for i := range m.regions {
		if m.regions[i].GuestPA == uint64(pa) {
			return true
		}
	}
	return false
}
