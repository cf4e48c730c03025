package hostdriver

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// file is what this package needs to know of a memory file.
type file struct {
	size      uint64
	block     uint64 // mmap granularity: the huge page size on hugetlbfs
	huge      uint64 // the file's preferred page size; 0: the normal one
	keepsSize bool   // sealed against shrinking
	closed    bool   // sealed against new writable mappings
	solid     bool   // nobody can take pages out of it, see NewFile
	dev, ino  uint64 // its identity, while something maps it
	writable  bool   // the descriptor permits writing
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
	f := file{size: uint64(st.Size), block: translate.PageSize, dev: st.Dev, ino: st.Ino}
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
		f.closed = seals&(unix.F_SEAL_WRITE|sealFutureWrite) != 0
	}
	f.solid = IsSolid(fd)
	if mode, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err == nil {
		f.writable = mode&unix.O_ACCMODE == unix.O_RDWR
	}
	return f, nil
}

// NewFile makes a zeroed memory file of that many bytes from which nobody can take pages, for a front end that is not
// trusted. Unlike one that Seal has sealed it can be mapped again, so the next process can continue the connection
// (CO-1, CO-2). It is a memfd of fixed size with the attribute "immutable" (chattr +i, Linux 6.0): that forbids holes,
// by whatever mapping or descriptor, and concerns neither writing nor mapping by a descriptor that permits writing. The
// file gets it before anybody else has the file: a call that is under way meanwhile could still make a hole.
// Only CAP_LINUX_IMMUTABLE can set or clear it. The caller owns the descriptor.
func NewFile(size uint64) (fd int, err error) {
	if size == 0 || size > math.MaxInt64 {
		return -1, fmt.Errorf("memory file of %#x bytes: %w", size, ErrFile)
	}
	if fd, err = unix.MemfdCreate("vnicd-memory", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return -1, fmt.Errorf("memory file: %w", err)
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		// The last one so that nobody adds F_SEAL_WRITE.
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("memory file of %#x bytes: %w", size, err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, immutable); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("memory file cannot be made immutable (CAP_LINUX_IMMUTABLE, Linux 6.0): %w", err)
	}
	return fd, nil
}

// SealedFile makes a memory file with a content that cannot change any more. The name is for those who look at the
// process's descriptors. The caller owns the descriptor.
func SealedFile(name string, content []byte) (fd int, err error) {
	if fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return -1, fmt.Errorf("memory file %s: %w", name, err)
	}
	for n := 0; err == nil && len(content) > 0; content = content[n:] {
		if n, err = unix.Write(fd, content); errors.Is(err, unix.EINTR) {
			n, err = 0, nil
		}
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS,
			unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE|unix.F_SEAL_SEAL)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("memory file %s: %w", name, err)
	}
	return fd, nil
}

// IsSolid reports whether a file is one of NewFile, of this process or another.
func IsSolid(fd int) bool {
	const want = unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL
	if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || seals&(want|sealFutureWrite) != want {
		return false
	}
	flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
	return err == nil && flags&immutable != 0
}

// immutable is FS_IMMUTABLE_FL.
const immutable = 0x10

// sealFutureWrite is F_SEAL_FUTURE_WRITE (Linux 5.1).
const sealFutureWrite = 0x10

// Seal makes sure that nobody takes pages out of the memory files of all slots. A file of fixed size can still get
// holes (fallocate, MADV_REMOVE). Then an access waits while the hole is being made, has a page cleared, of up to a
// gigabyte, or, on hugetlbfs, raises SIGBUS as the page may be another's by now. F_SEAL_WRITE and F_SEAL_FUTURE_WRITE
// forbid holes; the first is not possible while the memory is mapped, and the second forbids new writable mappings. So
// it is set after mapping, and a file cannot be mapped again: not by later slots, nor by another connection or process.
// Files of NewFile need no seal.
func (d *Driver) Seal() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := d.opts.Budget
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range d.regions {
		f := r.m.file
		switch {
		case f == nil:
			return fmt.Errorf("the memory is in more than %d files: %w", maxFiles, ErrFile)
		case f.sealed:
			continue
		}
		if _, err := unix.FcntlInt(uintptr(f.fd), unix.F_ADD_SEALS, sealFutureWrite); err != nil {
			return fmt.Errorf("memory file cannot be sealed against holes (F_SEAL_FUTURE_WRITE): %w: %w", err, ErrFile)
		}
		f.sealed = true
	}
	return nil
}

// hugePage is the size of a transparent huge page.
const hugePage = 2 << 20

// transparentHuge reports whether this kernel makes huge pages for memory files on madvise, which QEMU calls. Where the
// kernel always makes them, fstat shows it.
func transparentHuge() bool {
	b, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	return err == nil && strings.Contains(string(b), "[advise]")
}
