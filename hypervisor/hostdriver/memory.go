package hostdriver

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strings"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// file is what this package needs to know of a memory file.
type file struct {
	size      uint64
	block     uint64 // mmap granularity: the huge page size on hugetlbfs
	huge      uint64 // the file's preferred page size; 0: the normal one
	keepsSize bool   // sealed against shrinking
}

// inspect checks that fd can be shared guest memory.
func inspect(fd int) (file, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return file{}, fmt.Errorf("fstat of fd %d: %w", fd, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return file{}, fmt.Errorf("fd %d has file mode %#o, expected a memfd or a regular file: %w", fd, st.Mode, ErrFile)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return file{}, fmt.Errorf("fstatfs of fd %d: %w", fd, err)
	}
	f := file{size: uint64(st.Size), block: translate.PageSize}
	if fs.Type == unix.HUGETLBFS_MAGIC {
		f.block = uint64(fs.Bsize)
		if f.block < translate.PageSize || f.block&(f.block-1) != 0 {
			return file{}, fmt.Errorf("fd %d has pages of %#x bytes: %w", fd, f.block, ErrFile)
		}
	} else if st.Blksize == hugePage || transparentHuge() {
		f.huge = hugePage
	}
	// EINVAL where the file system has no seals.
	if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err == nil {
		f.keepsSize = seals&unix.F_SEAL_SHRINK != 0
	}
	return f, nil
}

// hugePage is the size of a transparent huge page.
const hugePage = 2 << 20

// transparentHuge reports whether this kernel makes huge pages for memory files on madvise, which QEMU calls. Where the
// kernel always makes them, fstat shows it.
func transparentHuge() bool {
	b, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	return err == nil && strings.Contains(string(b), "[advise]")
}

// region is a mapped Slot, divided into granules.
type region struct {
	Slot
	d     *Driver
	whole []byte // the mapping: may begin before the slot (huge pages)
	size  uint64 // of whole
	lead  uint64 // offset of the slot in whole
	base  uint64 // offset of whole in its first granule
	shift uint
	huge  bool // hugetlbfs: never swapped, so neither counted nor evicted

	// Guarded by Budget.mu.
	granules map[uint64]*granule // all granules that are not absent
	users    int                 // users of the mapping without the mutex
	gone     bool                // the slot is being removed
}

// maxGranules bounds the accounting: the number of granules that may be resident.
const maxGranules = 1 << 17

// minGranule is the smallest granule; a smaller one is not worth a system call.
const minGranule = 64 << 10

// newRegion maps the slot, with whole blocks around it.
func (d *Driver) newRegion(s Slot, f file) (*region, error) {
	lead := s.Offset & (f.block - 1)
	length := (lead + s.Size + f.block - 1) &^ (f.block - 1)
	const maxInt = uint64(^uint(0) >> 1)
	if length < s.Size || length > maxInt || s.Offset > maxInt {
		return nil, fmt.Errorf("offset %#x is too large: %w", s.Offset, translate.ErrInvalid)
	}
	b, err := unix.Mmap(s.FD, int64(s.Offset-lead), int(length), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("mmap of fd %d: %w", s.FD, err)
	}
	s.FD = -1
	r := &region{Slot: s, d: d, whole: b, size: length, lead: lead, huge: f.block > translate.PageSize,
		granules: make(map[uint64]*granule)}
	limit := d.opts.Budget.limit
	size := f.block
	if !r.huge {
		if size = minGranule; f.huge > size && (limit == 0 || f.huge <= limit/maxBatch) {
			size = f.huge
		}
		most := length
		if limit != 0 {
			most = min(most, limit)
		}
		for most/size > maxGranules {
			size *= 2
		}
	}
	r.shift = uint(bits.TrailingZeros64(size))
	r.base = (s.Offset - lead) & (size - 1)
	// Guest memory does not belong in a core dump of vnicd. Huge pages are optional.
	_ = unix.Madvise(b, unix.MADV_DONTDUMP)
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	if !r.huge {
		if err := lock(b); err != nil {
			d.opts.Budget.notLocked(d.log, err)
		}
	}
	return r, nil
}

// lock makes the kernel keep every mapped page of b until it is unmapped: pages brought in by populate stay, pages
// dropped by discard may be swapped. Nothing is pinned, and pages may be migrated. Unlike locking single pages, this
// does not split the mapping (vm.max_map_count), and the mapping does not change while loops and other VMs use the
// address space.
func lock(b []byte) error {
	// Before Linux 5.18 locked memory cannot be dropped page by page.
	if err := unix.Madvise(b, unix.MADV_DONTNEED_LOCKED); err != nil {
		return fmt.Errorf("this kernel does not know MADV_DONTNEED_LOCKED (Linux 5.18): %w", err)
	}
	err := lockOnFault(b)
	if err == nil {
		return nil
	}
	var lim unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim)
	return fmt.Errorf("mlock of %d bytes: %w; RLIMIT_MEMLOCK is %d: give vnicd CAP_IPC_LOCK, or a limit (systemd: LimitMEMLOCK) of twice the memory of all VMs", len(b), err, lim.Cur)
}

// counted reports whether the region's memory counts against the budget.
func (r *region) counted() bool { return !r.huge }

// end is the first PA behind the slot.
func (r *region) end() translate.PA { return translate.PA(r.GuestPA + r.Size) }

// granule returns the index of the granule with pa, which is in the slot.
func (r *region) granule(pa translate.PA) uint64 {
	return (uint64(pa) - r.GuestPA + r.lead + r.base) >> r.shift
}

// span returns the beginning and end of granule i in whole.
func (r *region) span(i uint64) (from, to uint64) {
	from, to = i<<r.shift, (i+1)<<r.shift
	return max(from, r.base) - r.base, min(to-r.base, r.size)
}

// bytes returns the memory of granule i.
func (r *region) bytes(i uint64) []byte {
	from, to := r.span(i)
	return r.whole[from:to:to]
}

// slot returns the part of granule i that is in the slot, and its PA.
func (r *region) slot(i uint64) (translate.PA, []byte) {
	from, to := r.span(i)
	from, to = max(from, r.lead), min(to, r.lead+r.Size)
	return translate.PA(r.GuestPA + from - r.lead), r.whole[from:to:to]
}

func (r *region) publish(i uint64) error {
	pa, b := r.slot(i)
	return r.d.space.Map(pa, b)
}

// withdraw is the reverse of publish.
func (r *region) withdraw(i uint64) {
	pa, b := r.slot(i)
	if err := r.d.space.Withdraw(pa, uint64(len(b))); err != nil {
		r.d.log.Error("withdrawn memory is not in the table", "err", err) // a bug
	}
}

// populate makes granule i resident and writable without raising SIGBUS: if memory is not available, it returns an
// error.
func (r *region) populate(i uint64) error {
	b := r.bytes(i)
	err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	for tries := 0; tries < 100 && (errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN)); tries++ {
		err = unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	}
	switch {
	case errors.Is(err, unix.EINVAL):
		err = touch(b) // Linux before 5.14
	case errors.Is(err, unix.EFAULT):
		err = fmt.Errorf("the file has no memory there (it shrank, or no huge page is left): %w", translate.ErrMemoryGone)
	case errors.Is(err, unix.EHWPOISON):
		err = fmt.Errorf("%w: %w", translate.ErrMemoryGone, err)
	}
	if err != nil {
		pa, b := r.slot(i)
		return fmt.Errorf("%v, %#x bytes cannot be made resident: %w", pa, len(b), err)
	}
	return nil
}

// discard removes granule i from our page table. The kernel may then swap it; its content stays in the file.
func (r *region) discard(i uint64) {
	b := r.bytes(i)
	err := unix.Madvise(b, unix.MADV_DONTNEED_LOCKED)
	if errors.Is(err, unix.EINVAL) {
		err = unix.Madvise(b, unix.MADV_DONTNEED) // not locked then, see lock
	}
	if err != nil {
		r.d.log.Error("memory cannot be released", "guest_pa", hclog.Fmt("%#x", r.GuestPA), "granule", i, "err", err)
	}
}

// touch replaces MADV_POPULATE_WRITE. The guest uses its memory meanwhile, so each page is touched by an atomic that
// changes nothing.
func touch(b []byte) error {
	s := translate.NewSpace(translate.HostGVMI)
	if err := s.Map(0, b); err != nil {
		return err
	}
	return translate.Guard(func() error {
		for off := 0; off < len(b); off += translate.PageSize {
			w, m := s.Uint32(translate.PA(off))
			if !m.OK() {
				return m.Err()
			}
			w.Or(0)
		}
		return nil
	})
}

func (r *region) munmap() {
	if err := unix.Munmap(r.whole); err != nil {
		r.d.log.Error("munmap", "guest_pa", hclog.Fmt("%#x", r.GuestPA), "err", err)
	}
	r.whole = nil
}
