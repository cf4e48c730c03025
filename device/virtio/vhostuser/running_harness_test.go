package vhostuser_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/device/virtio/virtq"
)

// lasting is an echo device that has its state, the configuration space, in a memory file (virtio.Survivor).
type lasting struct {
	*echo
	journal int  // -1: none yet
	mute    bool // it has none
}

var _ virtio.Survivor = (*lasting)(nil)

func newLasting() *lasting { return &lasting{echo: newEcho(2), journal: -1} }

// fresh is the state of a new device.
func fresh() []byte { return bytes.Clone(newEcho(2).config[:]) }

func (l *lasting) record() {
	if l.journal >= 0 {
		_, _ = unix.Pwrite(l.journal, l.config[:], 0)
	}
}

func (l *lasting) WriteConfig(off uint32, src []byte) error {
	defer l.record()
	return l.echo.WriteConfig(off, src)
}

func (l *lasting) StartQueue(i int, q *virtq.Queue) error {
	if l.journal < 0 && !l.mute {
		return errors.New("no journal")
	}
	return l.echo.StartQueue(i, q)
}

func (l *lasting) Reset() {
	copy(l.config[:], fresh())
	l.record()
	l.echo.Reset()
}

func (l *lasting) Disconnected() {
	l.Reset()
	if l.journal >= 0 {
		_ = unix.Close(l.journal)
		l.journal = -1
	}
	l.echo.Disconnected()
}

func (l *lasting) Save(int) ([]byte, error) { return bytes.Clone(l.config[:]), nil }

func (l *lasting) Restore(state []byte) error {
	l.note("restore")
	return l.resume(state)
}

func (l *lasting) Revive(journal int) error {
	l.note("revive")
	state := make([]byte, len(l.config))
	if n, err := unix.Pread(journal, state, 0); err != nil || n < len(state) {
		return fmt.Errorf("journal of %d bytes: %w", n, err)
	}
	return l.resume(state)
}

func (l *lasting) resume(state []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.running) > 0 || l.features&echoFeature == 0 || l.journal >= 0 {
		return errors.New("called too early or too late")
	}
	if len(state) != len(l.config) || !bytes.Equal(state[:32], fresh()[:32]) {
		return errors.New("no state")
	}
	copy(l.config[:], state)
	return nil
}

func (l *lasting) Journal() (int, error) {
	l.note("journal")
	switch {
	case l.mute:
		return -1, nil
	case l.journal >= 0:
		return -1, errors.New("called twice")
	}
	fd, err := unix.MemfdCreate("vnicd-journal", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, err
	}
	l.journal = fd
	l.record()
	return fd, nil
}

// recorder is a Keeper that has a copy of what is kept after each step.
type recorder struct {
	*testutil.Keeper
	t     testing.TB
	mu    sync.Mutex
	steps []step
}

type step struct {
	what string
	kept *testutil.Keeper
}

func (r *recorder) step(format string, a ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.steps = append(r.steps, step{fmt.Sprintf(format, a...), r.Keeper.Copy(r.t)})
}

func (r *recorder) take() []step {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.steps
	r.steps = nil
	return s
}

func (r *recorder) Keep(name string, fd int) error {
	defer r.step("keep %s", name)
	return r.Keeper.Keep(name, fd)
}

func (r *recorder) Forget(name string) error {
	defer r.step("forget %s", name)
	return r.Keeper.Forget(name)
}

// write records a torn write, and the whole one.
func (r *recorder) write(fd int, b []byte, off int64) (int, error) {
	for _, k := range []int{len(b) / 3, len(b)} {
		if _, err := unix.Pwrite(fd, b[:k], off); err != nil {
			return 0, err
		}
		r.step("%d of %d bytes of the state at %#x", k, len(b), off)
	}
	return len(b), nil
}

// daemon is a process with one device, and its successors.
type daemon struct {
	t    *testing.T
	path string
	s    *testutil.Keeper
	via  vhostuser.Keeper // s, or what wraps it
	log  *testlog.Log
	c    *vhostuser.Continuity
	dev  *lasting
	mute bool   // the next devices have no journal
	most uint64 // bytes that front ends may share, which are not trusted; 0: they are
	srv  *vhostuser.Server
}

// counting is a Keeper that counts its messages.
type counting struct {
	*testutil.Keeper
	n atomic.Int64
}

func (c *counting) Keep(name string, fd int) error {
	c.n.Add(1)
	return c.Keeper.Keep(name, fd)
}

func (c *counting) Forget(name string) error {
	c.n.Add(1)
	return c.Keeper.Forget(name)
}

func newDaemon(t *testing.T) *daemon {
	t.Cleanup(vhostuser.SetTrial(time.Hour, time.Millisecond))
	s := testutil.NewKeeper(t)
	d := &daemon{t: t, path: filepath.Join(t.TempDir(), "s"), s: s, via: s}
	d.start(nil)
	return d
}

func (d *daemon) start(kept vhostuser.Kept) {
	d.t.Helper()
	d.listen(kept)
	if kept != nil {
		testutil.Eventually(d.t, "the connection is resumed", func() bool { return d.c.Status().Pending == 0 })
	}
}

func (d *daemon) listen(kept vhostuser.Kept) {
	d.t.Helper()
	d.log, d.c, d.dev = &testlog.Log{}, &vhostuser.Continuity{}, newLasting()
	d.dev.mute = d.mute
	srv, err := vhostuser.Listen(vhostuser.Config{Path: d.path, KeepAs: "hca/one", Keeper: d.via, Kept: kept,
		Continuity: d.c, Log: d.log.Logger(), MaxMemory: d.most, Sealed: d.most > 0}, d.dev, 9)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { _ = srv.Close() })
	d.srv = srv
}

// kill ends the process as SIGKILL does.
func (d *daemon) kill() {
	c := d.s.Copy(d.t)
	d.end()
	empty(d.s)
	d.s, d.via = c, c
	d.edit(nil)
}

// empty drops everything, so that front ends notice the end of their connections.
func empty(s *testutil.Keeper) {
	for _, name := range s.Names() {
		s.Drop(name)
	}
}

// end ends it in good order.
func (d *daemon) end() {
	d.s.End()
	_ = d.srv.Close()
}

// edit changes the kept state, and clears it of suspicion.
func (d *daemon) edit(f func(state map[string]any)) {
	d.t.Helper()
	fd := d.s.FD("hca/one/state")
	if _, err := unix.Pwrite(fd, []byte{0}, vhostuser.MarkOff); err != nil {
		d.t.Fatal(err)
	}
	if f == nil {
		return
	}
	b := make([]byte, vhostuser.MarkOff)
	if _, err := unix.Pread(fd, b, 0); err != nil {
		d.t.Fatal(err)
	}
	state, dec := map[string]any{}, json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	if err := dec.Decode(&state); err != nil {
		d.t.Fatal(err)
	}
	delete(state, "sum")
	f(state)
	b, err := json.Marshal(state)
	if err == nil {
		_, err = unix.Pwrite(fd, b, 0)
	}
	if err != nil {
		d.t.Fatal(err)
	}
}

// next starts the next process.
func (d *daemon) next() {
	d.t.Helper()
	d.start(d.s.Pass())
}

// called reports whether the device was called so.
func (d *daemon) called(what string) bool { return slices.Contains(d.dev.calls(), what) }

// count returns the number of descriptors that are kept for a driver that runs: connection, channel, memory, pipe,
// state; journal, and kick and call of two rings.
const (
	countIdle = 5
	countRuns = countIdle + 5
)

// untold fails the test if the driver was told.
func untold(t *testing.T, f *frontend.Device) {
	t.Helper()
	select {
	case <-f.ConfigChanged():
		t.Fatal("the driver was told")
	case <-f.Gone():
		t.Fatal("the connection has ended")
	default:
	}
}

func told(t *testing.T, f *frontend.Device) {
	t.Helper()
	select {
	case <-f.ConfigChanged():
	case <-f.Gone():
		t.Fatal("the connection has ended")
	case <-testContext(t).Done():
		t.Fatal("the driver was not told")
	}
}

// note writes a text to the device's state; noted checks it.
func note(t *testing.T, f *frontend.Device, text string) {
	t.Helper()
	if err := f.Client().SetConfig(40, []byte(text)); err != nil {
		t.Fatal(err)
	}
	noted(t, f, text)
}

func noted(t *testing.T, f *frontend.Device, text string) {
	t.Helper()
	b := make([]byte, len(text))
	if err := f.ReadConfig(b, 40); err != nil || string(b) != text {
		t.Fatalf("the device's state has %q, want %q: %v", b, text, err)
	}
}

// polled is roundTrip without interrupts.
func polled(t *testing.T, f *frontend.Device, m *frontend.Memory, i int, text string) {
	t.Helper()
	pa, err := m.Alloc(8192, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Free(pa, 8192)
	out, _ := m.Bytes(pa, len(text))
	in, _ := m.Bytes(pa+4096, len(text))
	copy(out, text)
	q := f.Queue(i)
	err = q.Add(1, []frontend.Buf{{PA: pa, Len: uint32(len(text))}}, []frontend.Buf{{PA: pa + 4096, Len: 4096}})
	if err != nil {
		t.Fatal(err)
	}
	q.Kick()
	testutil.Eventually(t, "the echo of "+text, q.Pending)
	if _, n, ok, err := q.Get(); !ok || err != nil || int(n) != len(text) || string(in) != text {
		t.Fatalf("%d bytes %q, %v, %v", n, in, ok, err)
	}
}

// anew does what a driver does that was told.
func anew(t *testing.T, f *frontend.Device) {
	t.Helper()
	c := f.Client()
	err := errors.Join(c.SetStatus(0), c.SetFeatures(f.Features()))
	for i := range f.NumQueues() {
		err = errors.Join(err, f.StartQueue(i))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func pause(t *testing.T, f *frontend.Device) {
	t.Helper()
	for i := range f.NumQueues() {
		if err := f.StopQueue(i); err != nil {
			t.Fatal(err)
		}
	}
}
