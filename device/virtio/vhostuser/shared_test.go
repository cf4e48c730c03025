package vhostuser_test

import (
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// sparse makes a memory file of n bytes, which costs nothing.
func sparse(t *testing.T, n int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("vnicd-guest", unix.MFD_CLOEXEC)
	if err == nil {
		t.Cleanup(func() { unix.Close(fd) })
		err = unix.Ftruncate(fd, n)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// TestSparseMemory: a front end shares sparse files far beyond what its VM may share (TR-2). Requests beyond the limit
// are refused with both numbers, in whatever way they are made; its rings continue, and so do the other VMs, which can
// still share memory.
func TestSparseMemory(t *testing.T) {
	const most, tib = 1 << 40, 1 << 40
	log := &testlog.Log{}
	dev, b := newEcho(2), hostdriver.NewBudget(0)
	b.SetShared(most)
	path := filepath.Join(t.TempDir(), "s")
	first, err := vhostuser.Listen(vhostuser.Config{Path: path, Log: log.Logger(), Budget: b}, dev, 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = first.Close() })
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	c, rs := d.Client(), m.Regions()
	fd := sparse(t, 8*tib)
	lines := 0
	refused := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Fatalf("%s: not refused", what)
		}
		lines++
		testutil.Eventually(t, what, func() bool {
			return strings.Count(log.String(), "this VM may share 1099511627776 in all") == lines
		})
		roundTrip(t, d, m, 0, "after: "+what)
	}
	region := func(i, n uint64) vhostuser.Region {
		return vhostuser.Region{GuestPA: 1<<44 + i*tib, Size: n, UserAddr: 1<<45 + i*tib, Offset: i % 32 * (tib / 8)}
	}
	refused("one region", c.AddMemReg(region(0, 2*tib), fd))
	refused("one region that is too much beside others", c.AddMemReg(region(0, tib), fd))
	refused("a table", c.SetMemTable(append(rs, region(0, 2*tib)), append(fds(m.FD(), len(rs)), fd)...))
	refused("a table in parts", c.SetMemTable(append(rs, region(0, tib/2), region(1, tib/2)),
		append(fds(m.FD(), len(rs)), fd, fd)...))
	n := uint64(0)
	for ; n < vhostuser.MaxMemSlots && c.AddMemReg(region(n, tib/8), fd) == nil; n++ {
	}
	if n != 7 {
		t.Errorf("%d regions of 1/8 TiB accepted beside a small one, want 7", n)
	}
	twice := region(40, tib/8)
	twice.Offset = 0
	if err := c.AddMemReg(twice, fd); err == nil {
		t.Error("memory that is mapped already costs nothing, though it takes tables")
	}
	if have := b.Status().Mapped; have > most || have < most/8*7 {
		t.Errorf("%d bytes mapped", have)
	}
	// A second socket of the VM shares the same memory at no cost, and the limit.
	second := filepath.Join(t.TempDir(), "s")
	s, err := vhostuser.Listen(vhostuser.Config{Path: second, Budget: b}, newEcho(2), 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	d2 := open(t, frontend.Config{Path: second, Memory: m})
	roundTrip(t, d2, m, 0, "second socket")
	if err := d2.Client().AddMemReg(region(0, tib/8), fd); err != nil {
		t.Errorf("memory that the VM shares already: %v", err)
	}
	if err := d2.Client().AddMemReg(region(8, tib/4), fd); err == nil {
		t.Error("the second socket has a limit of its own")
	}
	// Another VM.
	other, _ := serve(t, newEcho(2))
	om := memory(t)
	od := open(t, frontend.Config{Path: other, Memory: om})
	if err := od.Client().AddMemReg(region(0, tib/8), fd); err != nil {
		t.Errorf("another VM: %v", err)
	}
	roundTrip(t, od, om, 0, "another VM")
	d.Close()
	d2.Close()
	testutil.Eventually(t, "release", func() bool { return b.Status().Mapped == 0 })
}

func fds(fd, n int) (out []int) {
	for range n {
		out = append(out, fd)
	}
	return out
}
