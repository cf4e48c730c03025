package vnet

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// TestHugePageVanishes: a QEMU takes a huge page with its guest's rings back (a hole in the file), and no other is
// free, so that the next access raises SIGBUS. That device stops; the other guests of the loop go on (TR-2).
func TestHugePageVanishes(t *testing.T) {
	const page = 2 << 20
	testutil.HugePages(t, 1)
	// A file system with room for one page.
	dir := t.TempDir()
	must(t, unix.Mount("none", dir, "hugetlbfs", 0, "size=2M,pagesize=2M"))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	h := newHost(t, 1, true)
	a, b := h.vm(1, 1).boot(0, 2000, 8), h.vm(2, 1).boot(0, 2000, 8)
	c := h.vm(3, 1)
	cl, err := frontend.Dial(context.Background(), c.path)
	must(t, err)
	t.Cleanup(func() { cl.Close() })
	file := func(name string) (fd int) {
		fd, err := unix.Open(filepath.Join(dir, name), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
		must(t, err, unix.Ftruncate(fd, page))
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	fd := file("guest")
	must(t, cl.SetFeatures(virtio.FeatureVersion1),
		cl.SetMemTable([]vhostuser.Region{{GuestPA: 0, Size: page, UserAddr: 1 << 30}}, fd),
		cl.SetVringNum(0, 8), cl.SetVringAddr(vhostuser.VringAddr{Desc: 1 << 30, Avail: 1<<30 + 0x1000,
			Used: 1<<30 + 0x2000}), cl.SetVringKick(0, newEventfd(t)))
	testutil.Eventually(t, "start", func() bool { return c.dev.Describe().Pairs[0] == "rx" })
	must(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, page))
	must(t, unix.Fallocate(file("other"), 0, 0, page))
	for i := range 5 {
		a.send(0, buildFrame(c.mac, a.mac, 60, 0))
		f := buildFrame(b.mac, a.mac, 100, byte(i))
		a.send(0, f)
		if got := b.recv(0); !bytes.Equal(got, f) {
			t.Fatal("wrong frame")
		}
	}
	testutil.Eventually(t, "fault", func() bool { return strings.Contains(c.dev.Describe().Broken, "memory fault") })
}
