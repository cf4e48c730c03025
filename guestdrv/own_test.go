package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

// newMemfd makes a memory file.
func newMemfd(tb testing.TB, size int64, flags int) *os.File {
	tb.Helper()
	fd, err := unix.MemfdCreate("own", unix.MFD_CLOEXEC|flags)
	if err != nil {
		tb.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "own")
	tb.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		tb.Fatal(err)
	}
	return f
}

// mapFile maps part of a file.
func mapFile(tb testing.TB, f *os.File, offset int64, n, flags int) []byte {
	tb.Helper()
	b, err := unix.Mmap(int(f.Fd()), offset, n, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// ownMemory makes n bytes of the program's own.
func ownMemory(tb testing.TB, n int) (*os.File, []byte) {
	tb.Helper()
	f := newMemfd(tb, int64(n), unix.MFD_ALLOW_SEALING)
	return f, mapFile(tb, f, 0, n, unix.MAP_SHARED)
}

func postOwn(tb testing.TB, e *end, wr *guestdrv.SendWR) {
	tb.Helper()
	if err := e.qp.PostSend(wr); err != nil {
		tb.Fatal(err)
	}
}

// Memory that a program has made itself is read and written in place, at its own address, and not any more when it is
// taken back.
func TestShare(t *testing.T) {
	r := newRig(t, rigConfig{untrusted: true})
	ha, hb := r.hosts[0], r.hosts[1]
	f := newMemfd(t, 64*page, unix.MFD_ALLOW_SEALING)
	data := mapFile(t, f, 16*page, 32*page, unix.MAP_SHARED)
	fill(data, 7)
	own, err := hb.Share(f, 16*page, data)
	if err != nil {
		t.Fatal(err)
	}
	if &own.Bytes()[0] != &data[0] || own.Len() != len(data) {
		t.Fatal("the buffer is another one than the mapping")
	}
	_ = f.Close() // which nobody needs any more
	mr, err := hb.pd.RegisterRange(bg, own, 100, 20*page, allAccess)
	if err != nil {
		t.Fatal(err)
	}
	if err := own.Close(); !errors.Is(err, guestdrv.StatusBusy) {
		t.Errorf("closed with a region: %v", err)
	}
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	buf, local := ha.region(t, 20*page, guestdrv.AccessLocalWrite)
	postOwn(t, a, guestdrv.NewRead(1, mr.Remote(0), local.SGE(0, 20*page)).With(guestdrv.SendSignaled))
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
	if !bytes.Equal(buf.Bytes(), data[100:100+20*page]) {
		t.Error("READ: data differ")
	}
	fill(buf.Bytes(), 8)
	postOwn(t, a, guestdrv.NewWrite(2, mr.Remote(0), local.SGE(0, 20*page)).With(guestdrv.SendSignaled))
	expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(buf.Bytes(), data[100:100+20*page]) {
		t.Error("WRITE: data differ")
	}

	if err := mr.Close(); err != nil {
		t.Fatal(err)
	}
	pas := []uint64{own.PA()}
	if err := own.Close(); err != nil {
		t.Fatal(err)
	}
	if err := own.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
	if _, err := hb.pd.Register(bg, own, allAccess); !errors.Is(err, guestdrv.ErrInvalid) {
		t.Errorf("registered after Close: %v", err)
	}
	// Whoever kept the PA reaches nothing, nor what is shared next.
	f2, next := ownMemory(t, page)
	fill(next, 9)
	want := bytes.Clone(next)
	if _, err := hb.Share(f2, 0, next); err != nil {
		t.Fatal(err)
	}
	old, err := hb.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: 1 << 40, Length: page, PageShift: 12, PAs: pas,
		Access: allAccess})
	if err != nil {
		if !errors.Is(err, guestdrv.StatusFault) && !errors.Is(err, guestdrv.StatusInvalid) {
			t.Errorf("registering memory that was taken back: %v", err)
		}
		return
	}
	postOwn(t, a, guestdrv.NewWrite(3, old.Remote(0), local.SGE(0, page)).With(guestdrv.SendSignaled))
	if wc := await(t, a.scq, 1)[0]; wc.Status == guestdrv.WCSuccess {
		t.Error("WRITE to memory that was taken back succeeded")
	}
	if !bytes.Equal(next, want) {
		t.Error("it was written to other memory")
	}
}

// A Pager provides pages of a program's own memory.
func TestShareOnDemand(t *testing.T) {
	r := newRig(t, rigConfig{untrusted: true})
	ha, hb := r.hosts[0], r.hosts[1]
	const pages = 32
	f, data := ownMemory(t, pages*page)
	own, err := hb.Share(f, 0, data)
	if err != nil {
		t.Fatal(err)
	}
	const base = 1 << 40
	far, err := hb.pd.RegisterOnDemand(bg, base, pages*page, allAccess, guestdrv.PagerFunc(
		func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
			pas[0] = own.PA() + f.VA - base
			return nil
		}))
	if err != nil {
		t.Fatal(err)
	}
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	buf, local := ha.region(t, pages*page, guestdrv.AccessLocalWrite)
	fill(buf.Bytes(), 3)
	postOwn(t, a, guestdrv.NewWrite(1, far.Remote(0), local.SGE(0, pages*page)).With(guestdrv.SendSignaled))
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(buf.Bytes(), data) {
		t.Error("data differ")
	}
}

// Huge pages are shared as others are; offset and length are multiples of theirs.
func TestShareHugePages(t *testing.T) {
	const huge = 2 << 20
	testutil.HugePages(t, 3)
	r := newRig(t, rigConfig{untrusted: true})
	ha, hb := r.hosts[0], r.hosts[1]
	f := newMemfd(t, 3*huge, unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
	data := mapFile(t, f, huge, 2*huge, unix.MAP_SHARED)
	for _, c := range []struct {
		offset int64
		data   []byte
	}{{huge + page, data[page:]}, {huge, data[:huge+page]}} {
		_, err := hb.Share(f, c.offset, c.data)
		if !errors.Is(err, guestdrv.ErrInvalid) || !strings.Contains(err.Error(), "multiples of 2097152") {
			t.Errorf("%d bytes at offset %d: %v", len(c.data), c.offset, err)
		}
	}
	own, err := hb.Share(f, huge, data)
	if err != nil {
		t.Fatal(err)
	}
	mr, err := hb.pd.Register(bg, own, allAccess)
	if err != nil {
		t.Fatal(err)
	}
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	buf, local := ha.region(t, 64*page, guestdrv.AccessLocalWrite)
	for i, at := range []int{0, huge - 32*page - 5, 2*huge - 64*page} { // also from one huge page to the next
		fill(buf.Bytes(), uint64(i))
		postOwn(t, a, guestdrv.NewWrite(1, mr.Remote(at), local.SGE(0, 64*page)).With(guestdrv.SendSignaled))
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		if !bytes.Equal(buf.Bytes(), data[at:at+64*page]) {
			t.Errorf("WRITE at %d: data differ", at)
		}
	}
	if err := errors.Join(mr.Close(), own.Close()); err != nil {
		t.Fatal(err)
	}
}

// Memory is shared and taken back any number of times, in as many files as a device has at a time, and up to the
// application's memory.
func TestShareOften(t *testing.T) {
	const own = 1 << 20
	cfg := rigConfig{hosts: 1, untrusted: true}
	cfg.driver.Memory = 24 << 20
	cfg.memory = cfg.driver.Memory + 200*own
	h := newRig(t, cfg).hosts[0]
	for range 300 {
		f, data := ownMemory(t, own)
		b, err := h.Share(f, 0, data)
		if err == nil {
			err = b.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	var all []*guestdrv.Buffer
	for {
		f, data := ownMemory(t, own)
		b, err := h.Share(f, 0, data)
		if err != nil {
			break
		}
		all = append(all, b)
	}
	if len(all) != 63 { // 64 files with that of the driver's memory
		t.Errorf("%d regions", len(all))
	}
	for _, b := range all {
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if n := h.SharedRanges(); n != 0 {
		t.Errorf("%d pieces are shared after all were taken back", n)
	}
	f, data := ownMemory(t, 201*own)
	if _, err := h.Share(f, 0, data); err == nil || !strings.Contains(err.Error(), "`memory`") {
		t.Errorf("more than the application's memory: %v", err)
	}
	if err := h.Err(); err != nil {
		t.Errorf("the device: %v", err)
	}
}

// What cannot be shared is refused with the reason, and costs nothing.
func TestShareErrors(t *testing.T) {
	h := newRig(t, rigConfig{hosts: 1, untrusted: true}).hosts[0]
	const n = 4 * page
	good, data := ownMemory(t, n)
	share := func(flags int) (*os.File, []byte) {
		f := newMemfd(t, n, flags)
		return f, mapFile(t, f, 0, n, unix.MAP_SHARED)
	}
	final, finalData := share(0)
	sealed, sealedData := share(unix.MFD_ALLOW_SEALING)
	if _, err := unix.FcntlInt(sealed.Fd(), unix.F_ADD_SEALS, 0x10); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, n), 0o600); err != nil {
		t.Fatal(err)
	}
	regular, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer regular.Close()
	regularData := mapFile(t, regular, 0, n, unix.MAP_SHARED)
	readOnly, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", good.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer readOnly.Close()
	heap := make([]byte, 2*n)
	for _, c := range []struct {
		what   string
		f      *os.File
		offset int64
		data   []byte
		want   string
	}{
		{"no memory file", regular, 0, regularData, "cannot be sealed"},
		{"final seals", final, 0, finalData, "F_SEAL_SEAL"},
		{"sealed against writing", sealed, 0, sealedData, "share all of a file at once"},
		{"read-only", readOnly, 0, data, "not open for reading and writing"},
		{"no page", good, 0, data[:100], "multiples of 4096"},
		{"nothing", good, 0, nil, "multiples of 4096"},
		{"unaligned", good, 100, data[:page], "multiples of 4096"},
		{"negative", good, -page, data[:page], "multiples of 4096"},
		{"beyond the end", good, page, data, "of a file of 16384"},
		{"another offset", good, page, data[:page], "not a mapping of the file's offset 0x1000"},
		{"another file", good, 0, regularData, "not a mapping"},
		{"the heap", good, 0, heap[:n], "not a mapping"},
		{"private", good, 0, mapFile(t, good, 0, n, unix.MAP_PRIVATE), "rw-p"},
	} {
		_, err := h.Share(c.f, c.offset, c.data)
		if !errors.Is(err, guestdrv.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.what, err, c.want)
		}
	}
	// The file is as it was.
	if seals, err := unix.FcntlInt(good.Fd(), unix.F_GET_SEALS, 0); err != nil || seals != 0 {
		t.Errorf("seals %#x, %v", seals, err)
	}
	b, err := h.Share(good, 0, data)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Share(good, 0, data); err == nil || !strings.Contains(err.Error(), "share all of a file at once") {
		t.Errorf("shared twice: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Errorf("closed after the device: %v", err)
	}
	if _, err := h.Share(good, 0, data); !errors.Is(err, guestdrv.ErrClosed) {
		t.Errorf("shared after Close: %v", err)
	}
}
