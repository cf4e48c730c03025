package hostdriver

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/translate"
)

// TestNewFile: nobody without CAP_LINUX_IMMUTABLE can take pages out of a file that vnicd has made, close it to further
// mappings, or undo that; it can be mapped again, read and written.
func TestNewFile(t *testing.T) {
	const size = 1 << 20
	fd, err := NewFile(size)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if !IsSolid(fd) {
		t.Error("the file is not what it was made as")
	}
	m := mapAll(t, fd, size)
	m[4096] = 7
	testutil.AsUser(t, 64501, 64501, nil, func() {
		for what, f := range map[string]func() error{
			"a hole, by the descriptor": func() error {
				return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 8192)
			},
			"a hole, by the mapping":    func() error { return unix.Madvise(m[:8192], unix.MADV_REMOVE) },
			"truncated":                 func() error { return unix.Ftruncate(fd, 4096) },
			"longer":                    func() error { return unix.Ftruncate(fd, 2*size) },
			"closed to mappings":        func() error { return addSeal(fd, sealFutureWrite) },
			"closed to all writing":     func() error { return addSeal(fd, unix.F_SEAL_WRITE) },
			"given to another":          func() error { return unix.Fchown(fd, 1, 1) },
			"closed to some":            func() error { return unix.Fchmod(fd, 0) },
			"without its attribute":     func() error { return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, 0) },
			"opened again, for writing": func() error { return reopen(fd) },
		} {
			if err := f(); !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
	again := mapAll(t, fd, size)
	if again[4096]++; m[4096] != 8 {
		t.Error("the second mapping is of other memory")
	}
	if !IsSolid(fd) {
		t.Error("the file has changed")
	}
}

// TestIsSolid: other files are not taken for one of NewFile.
func TestIsSolid(t *testing.T) {
	for what, x := range map[string]struct{ seals, flags int }{
		"plain":                         {},
		"of fixed size":                 {seals: unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL},
		"immutable, may shrink":         {seals: unix.F_SEAL_SEAL, flags: immutable},
		"immutable, may be sealed":      {seals: unix.F_SEAL_SHRINK, flags: immutable},
		"immutable, closed to mappings": {seals: unix.F_SEAL_SHRINK | sealFutureWrite | unix.F_SEAL_SEAL, flags: immutable},
	} {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		err = errors.Join(unix.Ftruncate(fd, 4096), addSeal(fd, x.seals))
		if x.flags != 0 {
			err = errors.Join(err, unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, x.flags))
		}
		if err != nil || IsSolid(fd) {
			t.Errorf("%s: taken for one of NewFile, %v", what, err)
		}
	}
	if _, err := NewFile(0); !errors.Is(err, ErrFile) {
		t.Errorf("an empty file: %v", err)
	}
}

// TestSealSolid: a file that is safe already is not sealed, so another driver can map it.
func TestSealSolid(t *testing.T) {
	fd, err := NewFile(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for range 2 {
		d := New(translate.NewSpace(1), nil, Options{})
		err := d.AddSlot(Slot{GuestPA: 1 << 30, Size: 1 << 20, UserAddr: 1 << 40, FD: fd})
		if err == nil {
			err = d.Seal()
		}
		if err != nil || !IsSolid(fd) {
			t.Errorf("%v, solid %v", err, IsSolid(fd))
		}
		defer d.Close()
	}
}

func addSeal(fd, seals int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	return err
}

func reopen(fd int) error {
	again, err := unix.Open(fmt.Sprint("/proc/self/fd/", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(again)
	}
	return err
}

// mapAll maps a file until the end of the test.
func mapAll(t *testing.T, fd, size int) []byte {
	t.Helper()
	m, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(m) })
	return m
}
