package hostdriver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/translate"
)

// twoFaces are the HCA and the NIC of one VM: two connections with the same memory.
func twoFaces(t *testing.T, b *Budget, name string, size uint64) (d [2]*Driver, s [2]*translate.Space, fd int) {
	t.Helper()
	fd = memfd(t, name, int64(size), 0, unix.F_SEAL_SHRINK)
	for i := range d {
		d[i], s[i] = newDriver(t, Options{Budget: b})
		own, err := unix.Dup(fd) // QEMU sends each its own descriptor
		if err != nil {
			t.Fatal(err)
		}
		err = d[i].AddSlot(Slot{GuestPA: 1 << 32, Size: size, UserAddr: 0x7f0000000000, FD: own})
		_ = unix.Close(own)
		if err != nil {
			t.Fatal(err)
		}
	}
	return d, s, fd
}

// Memory that both faces of a VM use is mapped, locked and counted once (PF-15). Each face has its own table.
func TestFacesShareMemory(t *testing.T) {
	const name, size = "vnicd-test-faces", 16 << 20
	b := NewBudget(MinBudget)
	d, s, fd := twoFaces(t, b, name, size)
	ctx := testContext(t)
	if n := mappings(t, name); n != 1 {
		t.Errorf("%d mappings", n)
	}
	const pa = 1 << 32
	for i, text := range []string{"written by the HCA", "written by the NIC"} {
		if err := access(ctx, s[i], i, pa, 18, func(m []byte) { copy(m, text) }); err != nil {
			t.Fatal(err)
		}
		if i == 0 && present(s[1], pa) {
			t.Error("a page is in the table of a face that has not asked for it")
		}
	}
	if u, st := smaps(t, name), b.Status(); u.n != 1 || u.locked != minGranule || st.Resident != minGranule {
		t.Errorf("%+v, %+v", u, st)
	}
	got := make([]byte, 18)
	if _, err := unix.Pread(fd, got, 0); err != nil || string(got) != "written by the NIC" {
		t.Errorf("%q, %v", got, err)
	}
	// Together they fill the whole budget, and no more.
	for i := range 3 * MinBudget / minGranule {
		if err := fetch(ctx, s[i%2], pa+translate.PA(i/2*minGranule), 1); err != nil {
			t.Fatal(err)
		}
		if err := audit(b, true); err != nil {
			t.Fatal(err)
		}
	}
	if u, st := smaps(t, name), b.Status(); u.rss > MinBudget || st.Resident > MinBudget || st.Evictions == 0 {
		t.Errorf("%+v, %+v", u, st)
	}
	// A hold of one face keeps the memory for both.
	h, err := d[0].Hold(ctx, pa+8<<20, 1)
	if err != nil {
		t.Fatal(err)
	}
	h2, err := d[1].Hold(ctx, pa+8<<20, 1)
	if err != nil || b.Status().Held != minGranule {
		t.Fatal(err, b.Status())
	}
	h.Release()
	if b.Status().Held != minGranule {
		t.Error("one face's release ended the other's hold")
	}
	for i := range 2 * MinBudget / minGranule {
		if err := fetch(ctx, s[0], pa+translate.PA(i*minGranule), 1); err != nil {
			t.Fatal(err)
		}
	}
	if !present(s[1], pa+8<<20) {
		t.Error("held memory is absent")
	}
	d[1].Close()
	h2.Release()
	if st := b.Status(); st.Held != 0 {
		t.Errorf("%+v", st)
	}
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
	if err := fetch(ctx, s[0], pa, size); err != nil {
		t.Errorf("after the other face has gone: %v", err)
	}
	d[0].Close()
	if n, st := mappings(t, name), b.Status(); n != 0 || st.Resident != 0 {
		t.Errorf("%d mappings, %+v", n, st)
	}
	if len(b.files) != 0 || len(b.mappings) != 0 {
		t.Errorf("left: %v, %v", b.files, b.mappings)
	}
}

// EP-3: memory that one face still uses is neither evicted nor unmapped, whichever face goes, and in which order. What
// only the face that goes has used is returned to the kernel.
func TestFaceLeaves(t *testing.T) {
	const name, size, pa = "vnicd-test-leaves", 8 << 20, translate.PA(1 << 32)
	b := NewBudget(0)
	d, s, _ := twoFaces(t, b, name, size)
	ctx := testContext(t)
	for i, at := range []translate.PA{0, 1 << 20, 2 << 20} { // the first face's, the second's, both's
		if i != 1 {
			if err := fetch(ctx, s[0], pa+at, 1); err != nil {
				t.Fatal(err)
			}
		}
		if i != 0 {
			if err := fetch(ctx, s[1], pa+at, 1); err != nil {
				t.Fatal(err)
			}
		}
	}
	tok := s[0].Epochs().Enter(translate.ByLoop(3))
	mem, miss := s[0].Host(pa, minGranule)
	both, miss2 := s[0].Host(pa+2<<20, minGranule)
	if !miss.OK() || !miss2.OK() {
		t.Fatal(miss.Err(), miss2.Err())
	}
	gone := make(chan struct{}, 2)
	go func() { d[0].Close(); gone <- struct{}{} }()
	testutil.Eventually(t, "the table is empty", func() bool { return !s[0].Contains(pa, 1) })
	// The other face may not take away what the first still uses: neither by an eviction nor by leaving.
	b.setTarget(minGranule)
	if more := b.shrink(); !more || b.Status().Evictions != 0 {
		t.Errorf("an eviction under a reader: %v, %+v", more, b.Status())
	}
	go func() { d[1].Close(); gone <- struct{}{} }()
	testutil.Eventually(t, "the other table is empty", func() bool { return !s[1].Contains(pa, 1) })
	if n := mappings(t, name); n != 1 {
		t.Fatalf("%d mappings under a reader", n)
	}
	mem[0], both[minGranule-1] = 1, 2 // would be a SIGSEGV
	if u := smaps(t, name); u.rss < 2*minGranule {
		t.Errorf("memory was released under a reader: %+v", u)
	}
	select {
	case <-gone:
		t.Fatal("a face has gone under a reader")
	default:
	}
	s[0].Epochs().Leave(3, tok)
	<-gone
	<-gone
	if n, st := mappings(t, name), b.Status(); n != 0 || st.Resident != 0 {
		t.Errorf("%d mappings, %+v", n, st)
	}
	// One face alone.
	d, s, _ = twoFaces(t, b, name, size)
	b.setTarget(0)
	for i, at := range []translate.PA{0, 1 << 20, 1 << 20, 2 << 20} {
		if err := fetch(ctx, s[i/2], pa+at, 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := d[0].RemoveSlot(1<<32, size, 0x7f0000000000); err != nil {
		t.Fatal(err)
	}
	if u, st := smaps(t, name), b.Status(); u.rss != 2*minGranule || st.Resident != 2*minGranule {
		t.Errorf("%+v, %+v; expected the memory that the other face has used", u, st)
	}
	if !present(s[1], pa+1<<20) || !present(s[1], pa+2<<20) || present(s[1], pa) {
		t.Error("the other face's table has changed")
	}
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
}

// Slots that differ, memory of different files, and VMs share nothing. A descriptor that forbids writing is refused
// even if another connection has the memory.
func TestWhatIsNotShared(t *testing.T) {
	const name = "vnicd-test-unshared"
	b := NewBudget(0)
	d, _ := newDriver(t, Options{Budget: b})
	e, _ := newDriver(t, Options{Budget: b})
	fd, fd2 := memfd(t, name, 8<<20, 0, 0), memfd(t, name, 8<<20, 0, 0)
	other, _ := newDriver(t, Options{Budget: NewBudget(0)})
	want := 0
	for i, c := range []struct {
		d      *Driver
		slot   Slot
		shares bool
	}{
		{d, Slot{Size: 4 << 20, FD: fd}, false},
		{e, Slot{Size: 4 << 20, FD: fd}, true},
		{e, Slot{Size: 2 << 20, FD: fd}, false},
		{e, Slot{Size: 4 << 20, FD: fd, Offset: 4096}, false},
		{e, Slot{Size: 4 << 20, FD: fd2}, false},
		{other, Slot{Size: 4 << 20, FD: fd}, false},
	} {
		c.slot.GuestPA, c.slot.UserAddr = uint64(i)<<30, uint64(i)<<30
		if err := c.d.AddSlot(c.slot); err != nil {
			t.Fatal(err)
		}
		if !c.shares {
			want++
		}
		if n := mappings(t, name); n != want {
			t.Errorf("slot %d: %d mappings, want %d", i, n, want)
		}
	}
	readOnly, err := unix.Open(fmt.Sprint("/proc/self/fd/", fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(readOnly)
	third, _ := newDriver(t, Options{Budget: b})
	if err := third.AddSlot(Slot{Size: 4 << 20, FD: readOnly}); !errors.Is(err, unix.EACCES) {
		t.Errorf("a read-only descriptor: %v", err)
	}
}

// A VM whose front end shares very many files costs a bounded number of descriptors; the rest of its memory works.
func TestKeptFiles(t *testing.T) {
	b := NewBudget(0)
	d, s := newDriver(t, Options{Budget: b})
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	before := open()
	ctx := testContext(t)
	for i := range uint64(2 * maxFiles) {
		fd, err := unix.MemfdCreate("vnicd-test-files", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		if err = unix.Ftruncate(fd, minGranule); err == nil {
			err = d.AddSlot(Slot{GuestPA: i << 20, UserAddr: i << 20, Size: minGranule, FD: fd})
		}
		_ = unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		if err := fetch(ctx, s, translate.PA(i<<20), 1); err != nil {
			t.Fatal(err)
		}
	}
	if n := open() - before; n != maxFiles {
		t.Errorf("%d descriptors, want %d", n, maxFiles)
	}
	if err := d.RemoveSlot(0, minGranule, 0); err != nil {
		t.Fatal(err)
	}
	if n := open() - before; n != maxFiles-1 {
		t.Errorf("%d descriptors after one slot was removed", n)
	}
	d.Close()
	if n := open() - before; n != 0 {
		t.Errorf("%d descriptors left", n)
	}
}

// Both faces add and remove the same slot again and again, while both have faults.
func TestFacesInTurmoil(t *testing.T) {
	const name, size, pa = "vnicd-test-turmoil", 4 << 20, translate.PA(1 << 32)
	b := NewBudget(MinBudget)
	d, s, fd := twoFaces(t, b, name, size)
	ctx := testContext(t)
	done := make(chan error, 2)
	for i := range d {
		go func() {
			for n := range 150 {
				at := pa + translate.PA((n*7+i)%(size/minGranule)*minGranule)
				if err := access(ctx, s[i], i, at, 8, func(m []byte) { copy(m, "unbroken") }); err != nil {
					done <- err
					return
				}
				if h, err := d[i].Hold(ctx, at, 8); err == nil && n%3 != 0 { // one in three ends with the slot
					h.Release()
				}
				if n%5 != 4 {
					continue
				}
				err := d[i].RemoveSlot(1<<32, size, 0x7f0000000000)
				if err == nil {
					err = d[i].AddSlot(Slot{GuestPA: 1 << 32, Size: size, UserAddr: 0x7f0000000000, FD: fd})
				}
				if err == nil {
					err = audit(b, false)
				}
				if err != nil && !errors.Is(err, context.Canceled) {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range d {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
	d[0].Close()
	d[1].Close()
	if st := b.Status(); st.Resident != 0 || st.Held != 0 {
		t.Errorf("%+v", st)
	}
}
