package guestdrv

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// sharedMemory is the memory of the program's own that the device has.
type sharedMemory struct {
	mu     sync.Mutex
	next   translate.PA // behind the last one
	ranges []frontend.Range
}

const (
	sharedBase  = paBase << 1
	sharedAlign = 1 << 30 // as of the largest pages
)

// place returns where n bytes go: behind what was shared last, with a gap, so that a PA does not soon mean something
// else. From the end of all PAs on it is the first gap between those that are still shared.
func (s *sharedMemory) place(n uint64) (pa translate.PA, ok bool) {
	for _, pa := range []translate.PA{max(s.next, sharedBase), sharedBase} {
		for moved := true; moved; {
			moved = false
			for _, r := range s.ranges {
				if pa < behind(r) && uint64(r.PA) < uint64(pa)+n {
					pa, moved = behind(r), true
				}
			}
		}
		if pa < translate.MaxPA && n <= uint64(translate.MaxPA-pa) {
			return pa, true
		}
	}
	return 0, false
}

func behind(r frontend.Range) translate.PA {
	return (r.PA+translate.PA(r.Size))&^(sharedAlign-1) + 2*sharedAlign
}

// has reports whether the page at pa belongs to shared memory.
func (s *sharedMemory) has(pa uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.ranges, func(r frontend.Range) bool { return pa-uint64(r.PA) < r.Size })
}

// Share gives the device memory that the program has made itself: data, which is a shared mapping of f from offset on.
// Nothing is copied, and the result is used as a Buffer of Alloc is: it can be registered, as a whole or in parts, and
// a Pager can provide its pages (Buffer.Pager). Its VA is data's address.
//
// f is a memory file: memfd_create with MFD_ALLOW_SEALING. It must not have been shared before.
// Offset and length are multiples of its pages. Share adds F_SEAL_SHRINK, and vnicd F_SEAL_FUTURE_WRITE: nobody can
// take pages out of the file from then on, nor map it for writing again. vnicd counts the length as the application's
// `memory`, and takes 63 files at a time.
//
// Close takes the memory back from the device, and returns when that accesses it no more (EP-3). The mapping stays the
// program's, which may also unmap it before; f may be closed at any time. After a kill of vnicd the next one cannot
// continue a device with memory of the program's own: it ends with ErrDisconnected.
func (d *Device) Share(f *os.File, offset int64, data []byte) (*Buffer, error) {
	if err := d.users.enter(); err != nil {
		return nil, err
	}
	defer d.users.leave()
	fd := int(f.Fd())
	if err := sealable(fd, offset, len(data)); err != nil {
		return nil, fmt.Errorf("sharing %s: %w", f.Name(), err)
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	defer maps.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("sharing %s: %w", f.Name(), err)
	}
	va := addressOf(data)
	if err := mapped(maps, va, uint64(len(data)), &st, uint64(offset)); err != nil {
		return nil, fmt.Errorf("sharing %s: %w", f.Name(), err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
		return nil, fmt.Errorf("sharing %s: F_SEAL_SHRINK: %w", f.Name(), err)
	}
	s := &d.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	pa, ok := s.place(uint64(len(data)))
	if !ok {
		return nil, fmt.Errorf("sharing %d bytes of %s: no room among the device's addresses: %w", len(data), f.Name(),
			ErrNoMemory)
	}
	r := frontend.Range{PA: pa, Size: uint64(len(data))}
	if err := d.fe.AddMemory(r, fd, uint64(offset)); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) { // vnicd may take it later: nothing else gets its place
			s.next = behind(r)
			s.ranges = append(s.ranges, r)
		}
		return nil, fmt.Errorf("sharing %d bytes of %s: %w; vnicd's log has the reason, such as the application's `memory`",
			len(data), f.Name(), err)
	}
	s.next = behind(r)
	s.ranges = append(s.ranges, r)
	return &Buffer{pa: uint64(r.PA), va: va, data: data, giveBack: func() error { return d.unshare(r) }}, nil
}

// unshare takes memory back from the device.
func (d *Device) unshare(r frontend.Range) error {
	if d.users.enter() != nil {
		return nil // Device.Close has done so
	}
	defer d.users.leave()
	s := &d.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := d.fe.RemoveMemory(r); err != nil {
		return err
	}
	s.ranges = slices.DeleteFunc(s.ranges, func(o frontend.Range) bool { return o == r })
	return nil
}

// sealable checks that a file's bytes can be shared. vnicd checks that too, but says only in its log why it refuses,
// and ends the connection of a front end that offers another file.
func sealable(fd int, offset int64, n int) error {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return err
	}
	page := int64(pageSize)
	if fs.Type == unix.HUGETLBFS_MAGIC {
		page = fs.Bsize
	}
	if n <= 0 || offset < 0 || offset%page != 0 || int64(n)%page != 0 {
		return invalid("%d bytes at offset %d: expected multiples of %d", n, offset, page)
	}
	if end := offset + int64(n); end < offset || end > st.Size {
		return invalid("%d bytes at offset %d of a file of %d", n, offset, st.Size)
	}
	if mode, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err != nil || mode&unix.O_ACCMODE != unix.O_RDWR {
		return invalid("the file is not open for reading and writing")
	}
	const future = 0x10 // F_SEAL_FUTURE_WRITE
	switch seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); {
	case err != nil:
		return invalid("the file cannot be sealed, so that pages could be taken out of it under the device; expected " +
			"one of memfd_create with MFD_ALLOW_SEALING")
	case seals&unix.F_SEAL_SEAL != 0:
		return invalid("the file's seals are final (F_SEAL_SEAL); expected one of memfd_create with MFD_ALLOW_SEALING")
	case seals&(unix.F_SEAL_WRITE|future) != 0:
		return invalid("the file is sealed against writing, as one is that has been shared; share all of a file at once")
	}
	return nil
}

// mapped checks that the n bytes at va are mapped, readable, writable and shared, to the file from offset on. maps is
// the process's /proc/self/maps.
func mapped(maps io.Reader, va, n uint64, st *unix.Stat_t, offset uint64) error {
	file := fmt.Sprintf("%02x:%02x %d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	at, end := va, va+n
	for in := bufio.NewScanner(maps); at < end && in.Scan(); {
		f := strings.Fields(in.Text())
		if len(f) < 5 {
			continue
		}
		from, to, _ := strings.Cut(f[0], "-")
		first, err1 := strconv.ParseUint(from, 16, 64)
		last, err2 := strconv.ParseUint(to, 16, 64)
		start, err3 := strconv.ParseUint(f[2], 16, 64)
		if err1 != nil || err2 != nil || err3 != nil || at < first || at >= last {
			continue
		}
		switch {
		case f[3]+" "+f[4] != file || start+(at-first) != offset+(at-va):
			return invalid("the memory at %#x is not a mapping of the file's offset %#x", at, offset+(at-va))
		case !strings.HasPrefix(f[1], "rw") || !strings.HasSuffix(f[1], "s"):
			return invalid("the memory at %#x is mapped as %s; expected rw-s, a shared mapping", at, f[1])
		}
		at = last
	}
	if at < end {
		return invalid("the memory at %#x is not mapped", at)
	}
	return nil
}
