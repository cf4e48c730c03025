package vhostuser_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// sealed serves a device to untrusted front ends.
func sealed(t *testing.T) (path string, dev *echo, log *testlog.Log) {
	t.Helper()
	dev, log = newEcho(2), &testlog.Log{}
	path = filepath.Join(t.TempDir(), "s")
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, Log: log.Logger(), MaxMemory: 64 << 20, Sealed: true}, dev, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return path, dev, log
}

// solid fails the test if pages can be taken out of the file.
func solid(t *testing.T, what string, fd int, page int64) {
	t.Helper()
	err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, page)
	if !errors.Is(err, unix.EPERM) {
		t.Errorf("%s: a hole can be punched: %v", what, err)
	}
	m, err := unix.Mmap(fd, 0, int(page), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(m) }()
	if err := unix.Ftruncate(fd, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("%s: the file can be truncated: %v", what, err)
	}
}

// TestNoHoles: an untrusted front end cannot take pages out of memory that the device uses, neither from a memfd nor
// from huge pages, where the device's next access would raise SIGBUS; memory that cannot be made safe is refused.
func TestNoHoles(t *testing.T) {
	path, _, log := sealed(t)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	roundTrip(t, d, m, 0, "before")
	solid(t, "memory of running rings", m.FD(), 4096)
	roundTrip(t, d, m, 0, "after")

	// Another file can be added, and is sealed at once; the same cannot.
	region := func(i uint64) vhostuser.Region {
		return vhostuser.Region{GuestPA: 1<<32 + i<<20, Size: 1 << 20, UserAddr: 1<<40 + i<<20}
	}
	more := memory(t)
	if err := d.Client().AddMemReg(region(0), more.FD()); err != nil {
		t.Fatal(err)
	}
	solid(t, "memory added under running rings", more.FD(), 4096)
	refused := func(what string, err error, want string) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: not refused", what)
		}
		testutil.Eventually(t, what, func() bool { return strings.Contains(log.String(), want) })
	}
	part := region(1)
	part.Size = 4096
	refused("part of a file in use", d.Client().AddMemReg(part, m.FD()), "sealed against new writable mappings")
	roundTrip(t, d, m, 0, "still alive")

	fd, err := unix.MemfdCreate("vnicd-guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		t.Cleanup(func() { unix.Close(fd) })
		if err = unix.Ftruncate(fd, 1<<20); err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	refused("a file that cannot be sealed", d.Client().AddMemReg(region(1), fd), "F_SEAL_SEAL")
}

// TestNoHolesInHugePages: as TestNoHoles, with memory in huge pages.
func TestNoHolesInHugePages(t *testing.T) {
	const page = 2 << 20
	testutil.HugePages(t, 1)
	path, dev, _ := sealed(t)
	fd, err := unix.MemfdCreate("vnicd-guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
	if err == nil {
		t.Cleanup(func() { unix.Close(fd) })
		if err = unix.Ftruncate(fd, page); err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	c, err := frontend.Dial(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := errors.Join(c.SetFeatures(virtio.FeatureVersion1),
		c.SetMemTable([]vhostuser.Region{{GuestPA: 0, Size: page, UserAddr: 1 << 30}}, fd), c.SetVringNum(0, 8),
		c.SetVringAddr(vhostuser.VringAddr{Desc: 1 << 30, Avail: 1<<30 + 0x1000, Used: 1<<30 + 0x2000}),
		c.SetVringKick(0, eventfd(t))); err != nil {
		t.Fatal(err)
	}
	dev.wait(t, "start", func() bool { return len(dev.running) == 1 })
	solid(t, "huge pages", fd, page)
}
