package hostdriver

import (
	"errors"
	"fmt"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// file is what matters of a memory file.
type file struct {
	size      uint64
	block     uint64 // mmap granularity: the huge page size on hugetlbfs
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
	}
	// EINVAL where the file system has no seals.
	if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err == nil {
		f.keepsSize = seals&unix.F_SEAL_SHRINK != 0
	}
	return f, nil
}

// mmap maps the slot, with whole blocks around it.
func (r *region) mmap(fd int, block uint64) error {
	if block == 0 || block&(block-1) != 0 {
		return fmt.Errorf("block size %#x: %w", block, ErrFile)
	}
	lead := r.Offset & (block - 1)
	length := (lead + r.Size + block - 1) &^ (block - 1)
	const maxInt = uint64(^uint(0) >> 1)
	if length < r.Size || length > maxInt || r.Offset > maxInt {
		return fmt.Errorf("offset %#x is too large: %w", r.Offset, translate.ErrInvalid)
	}
	b, err := unix.Mmap(fd, int64(r.Offset-lead), int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("mmap of fd %d: %w", fd, err)
	}
	r.whole = b
	r.host = b[lead : lead+r.Size : lead+r.Size]
	// Guest memory has no place in a core dump of ours; huge pages only help.
	_ = unix.Madvise(b, unix.MADV_DONTDUMP)
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return nil
}

// populateStep is what one system call makes resident, so that a signal or a
// memory limit is noticed in between.
const populateStep = 256 << 20

// populate makes the slot resident and writable, without ever raising SIGBUS:
// memory that cannot be had is an error.
func (r *region) populate() error {
	for off := 0; off < len(r.host); off += populateStep {
		part := r.host[off:min(off+populateStep, len(r.host))]
		err := unix.Madvise(part, unix.MADV_POPULATE_WRITE)
		for tries := 0; errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN); tries++ {
			if tries == 100 {
				break
			}
			err = unix.Madvise(part, unix.MADV_POPULATE_WRITE)
		}
		if errors.Is(err, unix.EINVAL) {
			err = touch(part) // Linux before 5.14
		}
		if err != nil {
			return fmt.Errorf("making bytes %#x..%#x resident: %w", off, off+len(part), err)
		}
	}
	return nil
}

// touch is populate by hand. The guest uses its memory meanwhile, so each page
// is touched by an atomic that changes nothing.
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

func (r *region) munmap(log hclog.Logger) {
	if err := unix.Munmap(r.whole); err != nil {
		log.Error("munmap", "guest_pa", hclog.Fmt("%#x", r.GuestPA), "err", err)
	}
	r.whole, r.host = nil, nil
}
