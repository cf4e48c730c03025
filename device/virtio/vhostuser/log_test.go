package vhostuser_test

import (
	"bytes"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// pageLog is a front end's log of written pages.
type pageLog struct {
	t    *testing.T
	fd   int
	base vhostuser.LogBase
	mem  []byte // the whole file
}

// newPageLog makes a log of that many pages, behind a page of its file that is not the log's.
func newPageLog(t *testing.T, pages int) *pageLog {
	t.Helper()
	l := &pageLog{t: t, base: vhostuser.LogBase{Size: uint64(pages+63) / 64 * 8, Offset: 4096}}
	fd, err := unix.MemfdCreate("log", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, int64(l.base.Offset+l.base.Size))
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err == nil {
		l.mem, err = unix.Mmap(fd, 0, int(l.base.Offset+l.base.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.fd = fd
	t.Cleanup(func() { _, _ = unix.Munmap(l.mem), unix.Close(fd) })
	return l
}

// take returns the pages that are marked, by number, and clears them. The device must not be marking others.
func (l *pageLog) take() (pages []int) {
	l.t.Helper()
	if !bytes.Equal(l.mem[:l.base.Offset], make([]byte, l.base.Offset)) {
		l.t.Fatal("marked outside of the log")
	}
	for i, b := range l.mem[l.base.Offset:] {
		for k := range 8 {
			if b>>k&1 != 0 {
				pages = append(pages, i*8+k)
			}
		}
	}
	clear(l.mem[l.base.Offset:])
	return pages
}

func pageOf(pa translate.PA) int { return int(pa / translate.PageSize) }

// regionPages returns the numbers of all pages of the test's regions.
func regionPages() (all []int) {
	for _, r := range logRegions {
		for p := uint64(r.PA) / translate.PageSize; p < (uint64(r.PA)+uint64(r.Size))/translate.PageSize; p++ {
			all = append(all, int(p))
		}
	}
	return all
}

var logRegions = []frontend.Range{{PA: 0x100000, Size: 1 << 20}, {PA: 0x300000, Size: 0x7000}}

const logPages = 0x307

func serveLog(t *testing.T, path string, migrates bool) {
	t.Helper()
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, Migrates: migrates}, newEcho(2), 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
}

// writer is a front end whose device writes into a page of its own.
type writer struct {
	t   *testing.T
	d   *frontend.Device
	m   *frontend.Memory
	c   *frontend.Client
	in  translate.PA // page that the device writes
	out translate.PA
}

func newWriter(t *testing.T, path string) *writer {
	t.Helper()
	m := memory(t, logRegions...)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	pa, err := m.Alloc(2*translate.PageSize, translate.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	return &writer{t: t, d: d, m: m, c: d.Client(), out: pa, in: pa + translate.PageSize}
}

// write has the device write through queue i.
func (w *writer) write(i int) {
	w.t.Helper()
	q := w.d.Queue(i)
	if err := q.Add(1, []frontend.Buf{{PA: w.out, Len: 64}}, []frontend.Buf{{PA: w.in, Len: 64}}); err != nil {
		w.t.Fatal(err)
	}
	q.Kick()
	if err := q.Wait(testContext(w.t)); err != nil {
		w.t.Fatal(err)
	}
	if _, n, ok, err := q.Get(); !ok || err != nil || n != 64 {
		w.t.Fatalf("%d bytes, %v, %v", n, ok, err)
	}
}

// stop stops ring i; restart starts it again.
func (w *writer) stop(i int) {
	w.t.Helper()
	if _, err := w.c.GetVringBase(i); err != nil {
		w.t.Fatal(err)
	}
}

func (w *writer) restart(i int) {
	w.t.Helper()
	if err := w.d.StartQueue(i); err != nil {
		w.t.Fatal(err)
	}
}

func (w *writer) setLog(l *pageLog) {
	w.t.Helper()
	if err := w.c.SetLogBase(l.base, l.fd); err != nil {
		w.t.Fatal(err)
	}
}

func (w *writer) want(logged bool) {
	w.t.Helper()
	f := w.d.Features()
	if logged {
		f |= vhostuser.FeatureLogAll
	}
	if err := w.c.SetFeatures(f); err != nil {
		w.t.Fatal(err)
	}
}

// written are the pages that one write changes: the buffer and the used ring of queue i, at most two pages.
func (w *writer) check(i int, l *pageLog) {
	w.t.Helper()
	_, _, used := w.d.Queue(i).Rings()
	got := l.take()
	if !slices.Contains(got, pageOf(w.in)) || !slices.Contains(got, pageOf(used)) || slices.Contains(got, pageOf(w.out)) ||
		len(got) > 4 {
		w.t.Errorf("marked %v, want %v and %v", got, pageOf(w.in), pageOf(used))
	}
}

// What the device writes while the front end wants a log is in it when the ring has stopped, and soon before; nothing
// else is (CO-5).
func TestDirtyLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	serveLog(t, path, true)
	w := newWriter(t, path)
	w.write(0)
	l := newPageLog(t, logPages)
	w.setLog(l)
	w.write(0)
	w.stop(0)
	if got := l.take(); len(got) > 0 {
		t.Errorf("marked before that was wanted: %v", got)
	}
	w.restart(0)
	w.want(true)
	for range 3 {
		w.write(1)
		testutil.Eventually(t, "the buffer is marked", func() bool {
			p := pageOf(w.in)
			return l.mem[int(l.base.Offset)+p/8]>>(p%8)&1 != 0
		})
		w.write(0)
		w.stop(0)
		w.check(0, l)
		w.restart(0)
	}
	w.stop(0)
	l.take()
	// Another log, as after a change of memory: the old one has what was written until then.
	w.write(1)
	next := newPageLog(t, logPages)
	w.setLog(next)
	w.check(1, l)
	if got := next.take(); len(got) > 0 {
		t.Errorf("the new log begins with %v", got)
	}
	w.write(1)
	w.stop(1)
	w.check(1, next)
	w.want(false)
	w.restart(1)
	w.write(1)
	w.stop(1)
	if got := append(l.take(), next.take()...); len(got) > 0 {
		t.Errorf("marked when that is not wanted any more: %v", got)
	}
}

// A front end that wants a log before it has named one, as one that connects anew does, finds all of the memory in it.
func TestDirtyLogLate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	serveLog(t, path, true)
	w := newWriter(t, path)
	w.want(true)
	w.write(0)
	l := newPageLog(t, logPages)
	w.setLog(l)
	if got := l.take(); !slices.Equal(got, regionPages()) {
		t.Errorf("%d pages are marked", len(got))
	}
}

// The next process goes on with the log, and marks all of the memory, because the previous one may have been killed.
func TestDirtyLogOutlivesProcess(t *testing.T) {
	s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
	cfg := vhostuser.Config{Path: path, KeepAs: "hca/one", Migrates: true}
	_, die := processOf(t, s, nil, cfg)
	w := newWriter(t, path)
	l := newPageLog(t, logPages)
	w.setLog(l)
	w.want(true)
	for range 2 {
		die()
		l.take()
		_, die = processOf(t, s, s.Pass(), cfg)
		if _, err := w.c.GetFeatures(); err != nil { // it has adopted the connection
			t.Fatal(err)
		}
		if got := l.take(); !slices.Equal(got, regionPages()) {
			t.Errorf("%d pages are marked", len(got))
		}
		for i := range w.d.NumQueues() {
			w.stop(i)
		}
		w.want(true)
		for i := range w.d.NumQueues() {
			w.restart(i)
		}
		w.write(0)
		w.stop(0)
		w.check(0, l)
		w.restart(0)
	}
	w.want(false)
	die()
	_, _ = processOf(t, s, s.Pass(), cfg)
	if _, err := w.c.GetFeatures(); err != nil {
		t.Fatal(err)
	}
	if got := l.take(); len(got) > 0 {
		t.Errorf("marked when that is not wanted: %d pages", len(got))
	}
}

// Logs that cannot be one end the connection, and devices that do not offer a log have no such message.
func TestDirtyLogRefused(t *testing.T) {
	plain, err := unix.MemfdCreate("log", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(plain, 1<<20)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(plain)
	good := newPageLog(t, logPages)
	for name, x := range map[string]struct {
		base vhostuser.LogBase
		fd   int
		not  bool
	}{
		"empty":       {vhostuser.LogBase{Offset: 4096}, good.fd, false},
		"odd size":    {vhostuser.LogBase{Size: 12, Offset: 4096}, good.fd, false},
		"odd offset":  {vhostuser.LogBase{Size: 8, Offset: 8}, good.fd, false},
		"too large":   {vhostuser.LogBase{Size: 1 << 31}, good.fd, false},
		"beyond":      {vhostuser.LogBase{Size: good.base.Size + 8, Offset: 4096}, good.fd, false},
		"far beyond":  {vhostuser.LogBase{Size: 8, Offset: 1 << 63}, good.fd, false},
		"not sealed":  {vhostuser.LogBase{Size: 8}, plain, false},
		"not offered": {good.base, good.fd, true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			serveLog(t, path, !x.not)
			w := newWriter(t, path)
			if err := w.c.SetLogBase(x.base, x.fd); err == nil {
				t.Error("accepted")
			}
			<-w.d.Gone()
		})
	}
}
