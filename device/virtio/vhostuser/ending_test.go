package vhostuser_test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// A message that a process refuses while it ends stays in the socket: the next process handles it.
func TestRefusedWhileEnding(t *testing.T) {
	s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
	_, die := process(t, s, nil, path)
	d := open(t, frontend.Config{Path: path, Memory: memory(t, regions...), Features: echoFeature})
	s.End()
	const unknown = 999
	var sent sync.WaitGroup
	sent.Go(func() { _, _ = d.Client().Do(unknown, true, make([]byte, 8)) })
	queued := func() int {
		n, err := unix.IoctlGetInt(s.FD("hca/one"), unix.TIOCINQ)
		if err != nil {
			t.Error(err)
		}
		return n
	}
	for i := 0; i < 1000 && queued() == 0; i++ { // for ever if the process takes it
		time.Sleep(time.Millisecond)
	}
	die() // the session has ended
	if n, want := queued(), vhostuser.HeaderSize+8; n != want {
		t.Errorf("%d bytes are left for the next process, want %d", n, want)
		empty(s) // ends the connection
		sent.Wait()
		return
	}
	_, die = process(t, s, s.Pass(), path)
	select {
	case <-d.Gone(): // refused by this one, which goes on
	case <-testContext(t).Done():
		t.Error("the next process has not refused the message")
	}
	sent.Wait()
	die()
}

// stateless is a device that another process continues, and has nothing to continue.
type stateless struct{ *echo }

func (stateless) Save(int) ([]byte, error) { return nil, nil }
func (stateless) Restore([]byte) error     { return nil }

// An orderly end at any step of a message, also of GET_MEMORY, whose reply has descriptors: the front end gets one
// reply to each, from this process or the next.
func TestEndsAtSteps(t *testing.T) {
	for n, reached := 0, true; reached && !t.Failed(); n++ {
		reached = endsAt(t, n)
	}
}

func endsAt(t *testing.T, at int) (reached bool) {
	n := at
	s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
	var mu sync.Mutex
	var srv *vhostuser.Server
	var next sync.WaitGroup
	var logs testlog.Log
	listen := func(kept vhostuser.Kept) {
		x, err := vhostuser.Listen(vhostuser.Config{Path: path, KeepAs: "hca/one", Keeper: s, Kept: kept,
			MaxMemory: untrustedMemory, Sealed: true, Log: logs.Logger()}, stateless{newEcho(2)}, 9)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		srv = x
	}
	given := false
	defer vhostuser.SetCrossed(func(step string) {
		mu.Lock()
		defer mu.Unlock()
		given = given || step == "given"
		if n--; n != -1 {
			return
		}
		reached = true
		s.End()
		ended := make(chan struct{})
		old := srv
		next.Go(func() {
			close(ended)
			_ = old.Close()
			listen(s.Pass())
		})
		<-ended
		time.Sleep(20 * time.Millisecond) // it has called Stop, probably
	})()
	listen(nil)
	defer func() {
		next.Wait()
		_ = srv.Close()
		empty(s)
	}()
	m, err := frontend.PlanMemory(frontend.Range{PA: 0x100000, Size: untrustedMemory})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	f, err := frontend.Open(testContext(t), frontend.Config{Path: path, Memory: m, NumQueues: 2, Features: echoFeature})
	if err != nil {
		t.Errorf("after %d steps: %v\n%s", at, err, &logs)
		return false
	}
	defer func() { _ = f.Close() }()
	for i := range f.NumQueues() {
		polled(t, f, m, i, "opened")
	}
	if _, err := f.Client().GetStatus(); err != nil { // a second reply to anything would be here
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !given {
		t.Error("no reply with memory")
	}
	return reached
}

// ender is a Keeper whose process is told to end at one of its calls.
type ender struct {
	*testutil.Keeper
	left    atomic.Int64  // calls before that one
	reached chan struct{} // closed at that call
	told    chan struct{} // the call goes on once this is closed
}

func (e *ender) step() {
	if e.left.Add(-1) == -1 {
		e.End()
		close(e.reached)
		<-e.told
	}
}

// Keep is called after the process was told.
func (e *ender) Keep(name string, fd int) error {
	e.step()
	return e.Keeper.Keep(name, fd)
}

// Forget is called after the process was told.
func (e *ender) Forget(name string) error {
	e.step()
	return e.Keeper.Forget(name)
}

// Ending is called before the process is told.
func (e *ender) Ending() bool {
	defer e.step()
	return e.Keeper.Ending()
}

// TestEndsWhileResuming: a process that is told to end at any step at which it continues a device leaves it to the next
// one, whether the device has a journal or not (CO-1).
func TestEndsWhileResuming(t *testing.T) {
	for name, mute := range map[string]bool{"journal": false, "no journal": true} {
		t.Run(name, func(t *testing.T) {
			d, m := newDaemon(t), memory(t, regions...)
			_ = d.srv.Close()
			d.mute = mute
			d.start(nil)
			f := open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
			note(t, f, "noted")
			n := 0
			for ; d.endsWhileResuming(n); n++ {
				d.via = d.s
				d.next()
				what := fmt.Sprint("told to end at step ", n)
				polled(t, f, m, 0, what)
				polled(t, f, m, 1, what)
				noted(t, f, "noted")
				untold(t, f)
				want := countRuns
				if mute {
					want = countIdle
				}
				if got := d.s.Names(); len(got) != want {
					t.Errorf("%s: kept: %q", what, got)
				}
				if t.Failed() {
					t.Fatalf("%s\n%s", what, d.log)
				}
			}
			if n < 3 {
				t.Errorf("only %d steps", n)
			}
		})
	}
}

// endsWhileResuming hands the device over to a process that is told to end at step n, and reports whether there is such
// a step.
func (d *daemon) endsWhileResuming(n int) bool {
	d.t.Helper()
	d.end()
	e := &ender{Keeper: d.s, reached: make(chan struct{}), told: make(chan struct{})}
	e.left.Store(int64(n))
	d.via = e
	d.listen(d.s.Pass())
	reached := false
	testutil.Eventually(d.t, "the connection is resumed, or step "+fmt.Sprint(n), func() bool {
		select {
		case <-e.reached:
			reached = true
		default:
		}
		return reached || d.c.Status().Pending == 0
	})
	if !reached {
		e.left.Store(-1)
		close(e.told)
		return false
	}
	closed := make(chan error, 1)
	go func() { closed <- d.srv.Close() }()
	testutil.Eventually(d.t, "the server closes", func() bool {
		_, err := os.Stat(d.path)
		return os.IsNotExist(err)
	})
	close(e.told)
	if err := <-closed; err != nil {
		d.t.Error(err)
	}
	return true
}
