package vhostuser_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

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
				if s := d.c.Status(); s.Revived != 1 || s.Continued+s.Lost != 0 || s.Silence != 0 {
					t.Errorf("counted: %+v", s)
				}
				if got := d.s.Names(); len(got) != countRuns {
					t.Errorf("kept: %q", got)
				}
			}
			// In good order, and killed again.
			d.end()
			d.next()
			if s := d.c.Status(); s.Revived+s.Lost != 0 || s.Continued != 1 || !d.called("restore") {
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
	if s := d.c.Status(); s.Revived+s.Lost != 0 {
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
			takeOver := []step{{"", d.s.Copy(t)}, {"", d.s.Copy(t)}}
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
			if got := d.s.Names(); len(got) < countIdle || len(got) > countIdle+3 { // calls of both rings, the new journal
				t.Errorf("kept: %q", got)
			}
			if s := d.c.Status(); s.Revived+s.Continued > 0 || s.Lost != 1 {
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
		if s["untold"] = true; s["running"].(map[string]any)["idle"] != true {
			t.Errorf("described: %v", s["running"])
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
