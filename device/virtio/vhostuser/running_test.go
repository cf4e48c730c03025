package vhostuser_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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

func (l *lasting) Save() ([]byte, error) { return bytes.Clone(l.config[:]), nil }

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

// copyKeeper returns what the next process would find if this one were killed now: what it writes later is not in it.
func copyKeeper(t testing.TB, s *testutil.Keeper) *testutil.Keeper {
	c := testutil.NewKeeper(t)
	for _, name := range s.Names() {
		fd, dup := s.FD(name), -1
		if strings.HasSuffix(name, "/state") || strings.Contains(name, "/journal/") {
			f, err := unix.MemfdCreate("copy", unix.MFD_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			dup = f
			b := make([]byte, 1<<16)
			n, err := unix.Pread(fd, b, 0)
			if err == nil {
				_, err = unix.Pwrite(f, b[:n], 0)
			}
			if err != nil {
				t.Fatal(err)
			}
			fd = f
		}
		if err := c.Keep(name, fd); err != nil {
			t.Fatal(err)
		}
		if dup >= 0 {
			_ = unix.Close(dup)
		}
	}
	return c
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
	r.steps = append(r.steps, step{fmt.Sprintf(format, a...), copyKeeper(r.t, r.Keeper)})
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
	mute bool // the next devices have no journal
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
	d.log, d.c, d.dev = &testlog.Log{}, &vhostuser.Continuity{}, newLasting()
	d.dev.mute = d.mute
	srv, err := vhostuser.Listen(vhostuser.Config{Path: d.path, KeepAs: "hca/one", Keeper: d.via, Kept: kept,
		Continuity: d.c, Log: d.log.Logger()}, d.dev, 9)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { _ = srv.Close() })
	d.srv = srv
	if kept != nil {
		testutil.Eventually(d.t, "the connection is resumed", func() bool { return d.c.Status().Pending == 0 })
	}
}

// kill ends the process as SIGKILL does.
func (d *daemon) kill() {
	c := copyKeeper(d.t, d.s)
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

// count returns the number of descriptors that are kept for a driver that runs: connection, channel, memory, state;
// journal, and kick and call of two rings.
const (
	countIdle = 4
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

// TestKilled: a device with a journal goes on after each of several kills; neither rings nor driver notice (CO-2). At
// the end nothing is kept.
func TestKilled(t *testing.T) {
	for name, features := range map[string]uint64{"split": 0, "packed": virtio.FeatureRingPacked} {
		t.Run(name, func(t *testing.T) {
			d, m := newDaemon(t), memory(t, regions...)
			f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature | features})
			for n := range 4 {
				note(t, f, strconv.Itoa(n))
				roundTrip(t, f, m, n&1, "before")
				d.kill()
				d.next()
				for i := range f.NumQueues() {
					roundTrip(t, f, m, i, "after")
				}
				noted(t, f, strconv.Itoa(n))
				untold(t, f)
				if !d.called("revive") || d.called("restore") {
					t.Errorf("calls %q", d.dev.calls())
				}
				if s := d.c.Status(); s.Revived != 1 || s.Continued != 0 || s.Silence != 0 {
					t.Errorf("counted: %+v", s)
				}
				if got := d.s.Names(); len(got) != countRuns {
					t.Errorf("kept: %q", got)
				}
			}
			// In good order, and killed again.
			d.end()
			d.next()
			if s := d.c.Status(); s.Revived != 0 || s.Continued != 1 || !d.called("restore") {
				t.Errorf("counted: %+v", s)
			}
			roundTrip(t, f, m, 0, "handed over")
			if got := d.s.Names(); len(got) != countRuns {
				t.Errorf("kept: %q", got)
			}
			d.kill()
			d.next()
			roundTrip(t, f, m, 1, "killed again")
			noted(t, f, "3")
			untold(t, f)
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			testutil.Eventually(t, "nothing is kept of a gone front end", func() bool { return len(d.s.Names()) == 0 })
		})
	}
}

// TestKilledWhilePaused: the rings are stopped, and the device goes on when they start.
func TestKilledWhilePaused(t *testing.T) {
	d, m := newDaemon(t), memory(t, regions...)
	f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
	note(t, f, "paused")
	for range 2 {
		roundTrip(t, f, m, 0, "before")
		pause(t, f)
		for range 2 {
			d.kill()
			d.next()
			if !d.called("revive") || d.called("start 0") {
				t.Fatalf("calls %q", d.dev.calls())
			}
		}
		for i := range f.NumQueues() {
			if err := f.StartQueue(i); err != nil {
				t.Fatal(err)
			}
			roundTrip(t, f, m, i, "after")
		}
		noted(t, f, "paused")
		untold(t, f)
		if got := d.s.Names(); len(got) != countRuns {
			t.Errorf("kept: %q", got)
		}
	}
}

// TestKilledAfterReset: a device without a driver is as new in the next process, and a driver finds it so.
func TestKilledAfterReset(t *testing.T) {
	d, m := newDaemon(t), memory(t, regions...)
	f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
	note(t, f, "driver")
	if err := f.Client().ResetDevice(); err != nil {
		t.Fatal(err)
	}
	d.kill()
	d.next()
	noted(t, f, string(fresh()[40:46]))
	anew(t, f)
	roundTrip(t, f, m, 0, "after")
	untold(t, f)
	if s := d.c.Status(); s.Revived != 0 {
		t.Errorf("counted: %+v", s)
	}
}

// record makes the next processes record what is kept in s.
func (d *daemon) record(s *testutil.Keeper) *recorder {
	r := &recorder{Keeper: s, t: d.t}
	d.s, d.via = s, r
	d.t.Cleanup(vhostuser.SetPwrite(r.write))
	return r
}

// try starts a process from each step, calls check, and ends it.
func (d *daemon) try(phase string, steps []step, f *frontend.Device, check func(t *testing.T, what string)) {
	d.t.Helper()
	if len(steps) == 0 {
		d.t.Errorf("%s: no steps", phase)
	}
	for n, s := range steps {
		what := fmt.Sprintf("%s, step %d: %s", phase, n, s.what)
		if names := s.kept.Names(); slices.Contains(names, "hca/one") && slices.Contains(names, "hca/one/state") {
			d.s, d.via = s.kept, s.kept
			d.edit(nil)
			d.next()
			if _, err := f.Client().GetFeatures(); err != nil {
				d.t.Fatalf("%s: %v", what, err)
			}
			check(d.t, what)
			d.end()
			if d.t.Failed() {
				d.t.Fatalf("%s\nkept %q\n%s", what, s.kept.Names(), d.log)
			}
		}
		empty(s.kept)
	}
}

// changeAll changes whatever a front end may change while rings run, and restores it.
func changeAll(t *testing.T, f *frontend.Device, m *frontend.Memory) {
	t.Helper()
	c, q := f.Client(), f.Queue(1)
	more := vhostuser.Region{GuestPA: 1 << 40, Size: 1 << 20, UserAddr: 1 << 45}
	fd := memory(t).FD()
	for n, change := range []func() error{
		func() error { return c.SetVringCall(0, eventfd(t)) },
		func() error { return c.SetVringCall(0, eventfd(t)) },
		func() error { return c.SetVringCall(1, -1) },
		func() error { return c.SetVringCall(0, f.Queue(0).CallFD()) },
		func() error { return c.SetVringCall(1, q.CallFD()) },
		func() error { return c.SetVringErr(0, eventfd(t)) },
		func() error { return c.SetVringErr(0, eventfd(t)) },
		func() error { return c.SetVringErr(0, -1) },
		func() error { return c.SetVringEnable(1, false) },
		func() error { return c.SetVringEnable(1, true) },
		func() error { return c.SetVringKick(1, eventfd(t)) },
		func() error { return c.SetVringKick(1, q.KickFD()) },
		func() error { return c.SetVringNum(1, uint32(q.Size())) },
		func() error { return c.SetFeatures(f.Features()) },
		func() error {
			return c.SetStatus(virtio.StatusAcknowledge | virtio.StatusDriver | virtio.StatusFeaturesOK)
		},
		func() error { return c.AddMemReg(more, fd) },
		func() error { return c.RemMemReg(more) },
	} {
		if err := change(); err != nil {
			t.Fatalf("change %d: %v", n, err)
		}
	}
}

// TestKilledAtEveryStep: a process may be killed between any two messages to its keeper, and while it writes a state;
// the next one continues the device from what is kept then. So may the next one, while it takes over.
func TestKilledAtEveryStep(t *testing.T) {
	for name, features := range map[string]uint64{"split": 0, "packed": virtio.FeatureRingPacked} {
		t.Run(name, func(t *testing.T) {
			d, m := newDaemon(t), memory(t, regions...)
			_ = d.srv.Close()
			r := d.record(d.s)
			d.start(nil)
			f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature | features})
			setUp := r.take()
			note(t, f, "noted")
			polled(t, f, m, 0, "at first")
			r.step("the driver runs")
			running := r.take()
			takeOver := []step{{"", copyKeeper(t, d.s)}, {"", copyKeeper(t, d.s)}}
			end := func() {
				d.end()
				empty(d.s)
			}
			end()

			// The second process: how it takes over, and what the front end changes.
			r = d.record(takeOver[0].kept)
			d.next()
			polled(t, f, m, 1, "taken over")
			revived := r.take()
			changeAll(t, f, m)
			changed := r.take()
			pause(t, f)
			paused := r.take()
			for i := range f.NumQueues() {
				if err := f.StartQueue(i); err != nil {
					t.Fatal(err)
				}
			}
			resumed := r.take()
			if err := f.Client().ResetDevice(); err != nil {
				t.Fatal(err)
			}
			reset := r.take()
			end()
			// Another one ends in good order, and the next takes over.
			d.s, d.via = takeOver[1].kept, takeOver[1].kept
			d.next()
			d.end()
			r = d.record(d.s)
			d.next()
			polled(t, f, m, 1, "handed over")
			handed := r.take()
			end()

			goesOn := func(t *testing.T, what string) {
				t.Helper()
				polled(t, f, m, 0, what)
				noted(t, f, "noted")
				untold(t, f)
				if n := len(d.s.Names()); n < countRuns-1 || n > countRuns+1 { // one for each change at most
					t.Errorf("kept: %q", d.s.Names())
				}
			}
			both := func(t *testing.T, what string) {
				t.Helper()
				goesOn(t, what)
				polled(t, f, m, 1, what)
				if n := len(d.s.Names()); n != countRuns {
					t.Errorf("kept: %q", d.s.Names())
				}
			}
			d.try("running", running[len(running)-1:], f, both)
			d.try("taking over", revived, f, both)
			d.try("handed over", handed, f, both)
			d.try("changes", changed, f, goesOn)
			again := func(t *testing.T, what string) {
				t.Helper()
				for i := range f.NumQueues() {
					// The position of a ring that is stopped is an old one: other steps have used it meanwhile.
					_, err := f.Client().GetVringBase(i)
					if err = errors.Join(err, f.StartQueue(i)); err != nil {
						t.Fatalf("%s: %v", what, err)
					}
				}
				both(t, what)
			}
			d.try("pause", paused, f, again)
			d.try("resumption", resumed, f, again)
			d.try("reset", reset, f, func(t *testing.T, what string) {
				anew(t, f)
				polled(t, f, m, 0, what)
				noted(t, f, string(fresh()[40:45]))
				untold(t, f)
			})
			d.try("set-up", setUp, f, func(*testing.T, string) {})
			select { // some of these devices had to begin anew
			case <-f.ConfigChanged():
			default:
			}
		})
	}
}

// TestDamagedRunning: what a killed process kept is checked. If it cannot be continued, the driver has to begin anew,
// with a reason in the log, and nothing is left over. A kill before the driver was told changes nothing.
func TestDamagedRunning(t *testing.T) {
	type state = map[string]any
	ring := func(s state, i int) state { return s["running"].(state)["rings"].([]any)[i].(state) }
	running := func(f func(s state)) func(d *daemon) {
		return func(d *daemon) { d.edit(func(s state) { f(s["running"].(state)) }) }
	}
	rings := func(f func(r state)) func(d *daemon) {
		return func(d *daemon) { d.edit(func(s state) { f(ring(s, 1)) }) }
	}
	drop := func(prefix string) func(d *daemon) {
		return func(d *daemon) {
			names := d.s.Names()
			i := slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(n, "hca/one/"+prefix) })
			d.s.Drop(names[i])
		}
	}
	for name, damage := range map[string]func(d *daemon){
		"no kick":        drop("kick"),
		"no call":        drop("call"),
		"no journal":     drop("journal"),
		"no description": func(d *daemon) { d.edit(func(s state) { delete(s, "running") }) },
		"empty":          func(d *daemon) { d.edit(func(s state) { s["running"] = state{} }) },
		"epoch":          running(func(s state) { s["epoch"] = 1 }),
		"few rings":      running(func(s state) { s["rings"] = s["rings"].([]any)[:1] }),
		"many rings":     running(func(s state) { s["rings"] = append(s["rings"].([]any), s["rings"].([]any)...) }),
		"features":       running(func(s state) { s["features"] = uint64(1) << 62 }),
		"no features":    running(func(s state) { s["features"] = 0 }),
		"status":         running(func(s state) { s["status"] = 255 }),
		"size":           rings(func(r state) { r["num"] = 77 }),
		"huge":           rings(func(r state) { r["num"] = 1 << 20 }),
		"no files":       rings(func(r state) { delete(r, "files") }),
		"outside":        rings(func(r state) { r["addr"].(state)["Desc"] = 1 << 60 }),
		"no kick, says":  rings(func(r state) { r["kick"] = false }),
		"a memory file": func(d *daemon) {
			name := strings.TrimPrefix(memoryOf(d.t, d.s), "hca/one/")
			d.edit(func(s state) { ring(s, 0)["files"].([]any)[0] = name })
		},
		"the journal": func(d *daemon) {
			d.edit(func(s state) {
				ring(s, 0)["files"].([]any)[0] = fmt.Sprintf("journal/%x", s["running"].(state)["epoch"])
			})
		},
		"no eventfd": func(d *daemon) {
			drop("call")(d)
			d.edit(func(s state) { ring(s, 0)["files"].([]any)[1] = "call/x" })
			if err := d.s.Keep("hca/one/call/x", sparse(d.t, 4096)); err != nil {
				d.t.Fatal(err)
			}
		},
		"another journal": func(d *daemon) {
			i := slices.IndexFunc(d.s.Names(), func(n string) bool { return strings.HasPrefix(n, "hca/one/journal/") })
			name := d.s.Names()[i]
			d.s.Drop(name)
			if err := d.s.Keep(name, sparse(d.t, 4096)); err != nil {
				d.t.Fatal(err)
			}
		},
		"an older vnicd's": func(d *daemon) {
			d.edit(func(s state) { delete(s, "running") })
			drop("journal")(d)
			drop("call")(d)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, m := newDaemon(t), memory(t, regions...)
			f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
			note(t, f, "noted")
			d.kill()
			damage(d)
			d.next()
			told(t, f)
			noted(t, f, string(fresh()[40:45]))
			described := name != "no description" && name != "an older vnicd's"
			if log := d.log.String(); strings.Contains(log, "reason=") != described {
				t.Errorf("log: %s", log)
			}
			if got := d.s.Names(); len(got) != countIdle {
				t.Errorf("kept: %q", got)
			}
			if s := d.c.Status(); s.Revived+s.Continued > 0 {
				t.Errorf("counted: %+v", s)
			}
			anew(t, f)
			roundTrip(t, f, m, 1, "anew")
			note(t, f, "again")
			if got := d.s.Names(); len(got) != countRuns {
				t.Errorf("kept: %q", got)
			}
			d.kill()
			d.next()
			roundTrip(t, f, m, 0, "after")
			noted(t, f, "again")
			untold(t, f)
		})
	}
}

// TestUntoldWhenKilled: a driver whose device has lost its state while its VM was paused is told when the rings start,
// also if that process is killed meanwhile.
func TestUntoldWhenKilled(t *testing.T) {
	d, m := newDaemon(t), memory(t, regions...)
	f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
	pause(t, f)
	d.kill()
	d.edit(func(s map[string]any) { delete(s, "running") })
	for range 2 {
		d.next()
		untold(t, f)
		d.kill()
	}
	d.edit(func(s map[string]any) {
		if s["untold"] = true; s["running"] != nil {
			t.Error("the rings are described again before they run")
		}
	})
	d.next()
	if err := f.Client().SetFeatures(f.Features()); err != nil {
		t.Fatal(err)
	}
	for i := range f.NumQueues() {
		if err := f.StartQueue(i); err != nil {
			t.Fatal(err)
		}
	}
	told(t, f)
	// As if it had been killed just before.
	d.kill()
	d.edit(func(s map[string]any) {
		if s["untold"] != nil {
			t.Error("told, but it is not noted")
		}
		s["untold"] = true
	})
	d.next()
	told(t, f)
	roundTrip(t, f, m, 0, "after")
}

// TestGuiltyJournal: a device's state that ends two processes is not continued again, but the VM keeps the device. Only
// after another crash it is dropped.
func TestGuiltyJournal(t *testing.T) {
	d, m := newDaemon(t), memory(t, regions...)
	f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
	note(t, f, "noted")
	crash := func(mark byte) {
		t.Helper()
		d.kill()
		if _, err := unix.Pwrite(d.s.FD("hca/one/state"), []byte{mark}, vhostuser.MarkOff); err != nil {
			t.Fatal(err)
		}
		d.next()
	}
	crash(together)
	noted(t, f, "noted")
	untold(t, f)
	crash(alone)
	told(t, f)
	if d.called("revive") || len(d.s.Names()) != countIdle {
		t.Errorf("calls %q, kept %q", d.dev.calls(), d.s.Names())
	}
	crash(alone + 1)
	select {
	case <-f.Gone():
	case <-testContext(t).Done():
		t.Fatal("the connection was not closed")
	}
	testutil.Eventually(t, "nothing is kept", func() bool { return len(d.s.Names()) == 0 })
}

// TestNoJournal: a device without a journal is handed over, and begins anew after a kill.
func TestNoJournal(t *testing.T) {
	d, m := newDaemon(t), memory(t, regions...)
	_ = d.srv.Close()
	d.mute = true
	d.start(nil)
	f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
	note(t, f, "noted")
	if got := d.s.Names(); len(got) != countIdle {
		t.Errorf("kept: %q", got)
	}
	for _, mute := range []bool{true, false, true} {
		d.end()
		d.mute = mute
		d.next()
		roundTrip(t, f, m, 0, "handed over")
		noted(t, f, "noted")
		untold(t, f)
		want := countRuns
		if mute {
			want = countIdle
		}
		if got := d.s.Names(); len(got) != want {
			t.Errorf("kept: %q", got)
		}
	}
	d.kill()
	d.next()
	told(t, f)
}

// TestCallsOfMaskedInterrupts: a front end that exchanges two call eventfds all the time, as QEMU does for masked
// interrupts, costs the keeper nothing.
func TestCallsOfMaskedInterrupts(t *testing.T) {
	d, m := newDaemon(t), memory(t)
	_ = d.srv.Close()
	r := &counting{Keeper: d.s}
	d.via = r
	d.start(nil)
	f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
	exchange := func(fd int) {
		t.Helper()
		if err := f.Client().SetVringCall(0, fd); err != nil {
			t.Fatal(err)
		}
	}
	masked := eventfd(t)
	exchange(masked)
	before := r.n.Load()
	for range 1000 {
		exchange(f.Queue(0).CallFD())
		exchange(masked)
	}
	exchange(f.Queue(0).CallFD())
	if n := r.n.Load() - before; n != 0 {
		t.Errorf("%d messages", n)
	}
	d.kill()
	d.next()
	roundTrip(t, f, m, 0, "exchanged")
}

// TestCallsArePaced: a front end that makes new call eventfds all the time waits, as for memory.
func TestCallsArePaced(t *testing.T) {
	d, m := newDaemon(t), memory(t)
	var mu sync.Mutex
	var slept time.Duration
	d.srv.PaceBy(func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return time.Unix(1000, 0).Add(slept)
	}, func(d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		slept += d
	})
	f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
	for range (vhostuser.PaceBurst + vhostuser.PaceRate) / 2 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		err = f.Client().SetVringCall(0, fd)
		_ = unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if slept < time.Second || slept > 2*time.Second {
		t.Errorf("%d messages and a few beyond the burst waited %v, want a second", vhostuser.PaceRate, slept)
	}
}
