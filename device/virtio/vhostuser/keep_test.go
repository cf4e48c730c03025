package vhostuser_test

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// process starts a server that keeps its connection, and returns a function that ends it as a crash would.
func process(t *testing.T, s *testutil.Keeper, kept vhostuser.Kept, path string) (*echo, func()) {
	t.Helper()
	return processOf(t, s, kept, vhostuser.Config{Path: path, KeepAs: "hca/one"})
}

func processOf(t *testing.T, s *testutil.Keeper, kept vhostuser.Kept, cfg vhostuser.Config) (*echo, func()) {
	t.Helper()
	dev := newEcho(2)
	cfg.Keeper, cfg.Kept = s, kept
	srv, err := vhostuser.Listen(cfg, dev, 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = srv.Close() })
	return dev, func() {
		s.End()
		_ = srv.Close()
	}
}

var regions = []frontend.Range{{PA: 0x100000, Size: 1 << 20}, {PA: 1 << 32, Size: 1 << 20}}

// memoryOf returns the name of the only memory file that is kept.
func memoryOf(t *testing.T, s *testutil.Keeper) string {
	t.Helper()
	var found []string
	for _, n := range s.Names() {
		if strings.HasPrefix(n, "hca/one/memory/") {
			found = append(found, n)
		}
	}
	if len(found) != 1 {
		t.Fatalf("memory files that are kept: %q", found)
	}
	return found[0]
}

// A connection outlives the process that served it: the next one has the memory, tells the driver, and serves its rings
// once they are described again. This is done twice.
func TestConnectionOutlivesProcess(t *testing.T) {
	s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
	_, die := process(t, s, nil, path)
	m := memory(t, regions...)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	roundTrip(t, d, m, 1, "before")
	// Both regions are in one file, which is stored once, as systemd does in any case.
	want := []string{"hca/one", "hca/one/channel", memoryOf(t, s), "hca/one/replies", "hca/one/state"}
	if got := s.Names(); !slices.Equal(got, want) {
		t.Fatalf("kept: %q", got)
	}
	for range 2 {
		die()
		select {
		case <-d.Gone():
			t.Fatal("the front end noticed")
		default:
		}
		var dev *echo
		dev, die = process(t, s, s.Pass(), path)
		select {
		case <-d.ConfigChanged():
		case <-testContext(t).Done():
			t.Fatal("the driver was not told")
		}
		if got := s.Names(); !slices.Equal(got, want) {
			t.Fatalf("kept by the next process: %q", got)
		}
		c := d.Client()
		for i := range d.NumQueues() {
			if _, err := c.GetVringBase(i); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.SetFeatures(d.Features()); err != nil {
			t.Fatal(err)
		}
		for i := range d.NumQueues() {
			if err := d.StartQueue(i); err != nil {
				t.Fatal(err)
			}
			roundTrip(t, d, m, i, "after")
		}
		if calls := dev.calls(); calls[0] != "connected" {
			t.Errorf("calls %q", calls)
		}
		select {
		case <-d.ConfigChanged():
			t.Error("the driver was told twice")
		default:
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "nothing is kept of a gone front end", func() bool { return len(s.Names()) == 0 })
}

// A VM with two devices gives both the same memory file, which a keeper such as systemd stores only once. Both outlive
// the process, and one goes on if the other was removed.
func TestDevicesShareMemory(t *testing.T) {
	s, dir := testutil.NewKeeper(t), t.TempDir()
	names := []string{"one", "two"}
	start := func(name string, kept vhostuser.Kept) func() {
		_, die := processOf(t, s, kept, vhostuser.Config{Path: filepath.Join(dir, name), KeepAs: "hca/" + name})
		return die
	}
	m := memory(t, regions...)
	dies, drivers := map[string]func(){}, map[string]*frontend.Device{}
	for _, n := range names {
		dies[n] = start(n, nil)
		drivers[n] = open(t, frontend.Config{Path: filepath.Join(dir, n), Memory: m, Features: echoFeature})
		roundTrip(t, drivers[n], m, 0, "before")
	}
	again := func(names ...string) {
		t.Helper()
		for _, n := range names {
			dies[n]()
		}
		kept := s.Pass()
		for _, n := range names {
			dies[n] = start(n, kept)
		}
		for _, n := range names {
			select {
			case <-drivers[n].ConfigChanged():
			case <-drivers[n].Gone():
				t.Fatalf("device %s was lost", n)
			case <-testContext(t).Done():
				t.Fatal("the driver was not told")
			}
		}
	}
	again("one", "two")
	if err := drivers["one"].Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "nothing is kept of the first device", func() bool {
		return !slices.ContainsFunc(s.Names(), func(n string) bool { return strings.HasPrefix(n, "hca/one") })
	})
	again("two")
}

// A front end that adds and removes memory in a loop waits for what that makes the server send to its Keeper: TestPace
// says how long.
func TestMemoryChangesArePaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	cfg := vhostuser.Config{Path: path, KeepAs: "hca/one", Keeper: testutil.NewKeeper(t)}
	srv, err := vhostuser.Listen(cfg, newEcho(2), 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = srv.Close() })
	var mu sync.Mutex
	var slept time.Duration
	srv.PaceBy(func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return time.Unix(1000, 0).Add(slept)
	}, func(d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		slept += d
	})
	c := open(t, frontend.Config{Path: path, Memory: memory(t), Features: echoFeature}).Client()
	fd := memory(t).FD()
	r := vhostuser.Region{GuestPA: 1 << 40, Size: 1 << 20, UserAddr: 1 << 45}
	for range (vhostuser.PaceBurst + vhostuser.PaceRate) / 2 {
		if err := errors.Join(c.AddMemReg(r, fd), c.RemMemReg(r)); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if slept < time.Second || slept > 2*time.Second {
		t.Errorf("%d messages and a few beyond the burst waited %v, want a second", vhostuser.PaceRate, slept)
	}
}

// A driver whose rings are stopped, as those of a paused VM, must not be notified (QEMU would abort). It is told when
// they start. Requests sent while no process ran are handled before the notice.
func TestRingsStopped(t *testing.T) {
	for _, when := range []string{"before", "meanwhile", "at the next"} {
		t.Run(when, func(t *testing.T) {
			s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
			_, die := process(t, s, nil, path)
			m := memory(t, regions...)
			d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
			stopped := make(chan error, 1)
			stop := func() {
				var err error
				for i := range d.NumQueues() {
					_, e := d.Client().GetVringBase(i)
					err = errors.Join(err, e)
				}
				stopped <- err
			}
			switch when {
			case "before":
				stop()
				die()
			case "at the next":
				die()
				_, die = process(t, s, s.Pass(), path)
				<-d.ConfigChanged() // the rings run, so it is told
				stop()
				die()
			default:
				die()
				go stop()
				time.Sleep(20 * time.Millisecond) // so that the requests are there first; otherwise the test shows less
			}
			process(t, s, s.Pass(), path)
			if err := <-stopped; err != nil {
				t.Fatal(err)
			}
			if err := d.ReadConfig(make([]byte, 4), 0); err != nil {
				t.Fatal(err)
			}
			select {
			case <-d.ConfigChanged():
				t.Error("the driver was told after its rings stopped")
			default:
			}
			if err := d.Client().SetFeatures(d.Features()); err != nil {
				t.Fatal(err)
			}
			for i := range d.NumQueues() {
				if err := d.StartQueue(i); err != nil {
					t.Fatal(err)
				}
			}
			select {
			case <-d.ConfigChanged():
			case <-testContext(t).Done():
				t.Fatal("the driver was not told")
			}
			roundTrip(t, d, m, 1, "after")
		})
	}
}

// A file stays while a region is in it, whichever came first, and is forgotten with the last one.
func TestFileOfRegions(t *testing.T) {
	s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
	process(t, s, nil, path)
	m := memory(t, regions...)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	name := memoryOf(t, s)
	for i, r := range m.Regions() {
		if err := d.Client().RemMemReg(r); err != nil {
			t.Fatal(err)
		}
		testutil.Eventually(t, "the file is kept while it is needed", func() bool {
			return slices.Contains(s.Names(), name) == (i+1 < len(regions))
		})
	}
}

// A state that was written before files had names of their own is continued.
func TestOldMemoryNames(t *testing.T) {
	s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
	_, die := process(t, s, nil, path)
	m := memory(t, regions[0])
	d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	die()
	name := memoryOf(t, s)
	fd, err := unix.Dup(s.FD(name))
	if err != nil {
		t.Fatal(err)
	}
	state := s.FD("hca/one/state")
	b := make([]byte, 4096)
	n, err := unix.Pread(state, b, 0)
	if err != nil {
		t.Fatal(err)
	}
	old := strings.Replace(string(b[:n]), `,"file":"`+strings.TrimPrefix(name, "hca/one/memory/")+`"`, "", 1)
	if old == string(b[:n]) {
		t.Fatalf("no file in the state: %s", b[:n])
	}
	_, rest, _ := strings.Cut(old, `",`) // without the sum
	old = "{" + rest
	if _, err := unix.Pwrite(state, []byte(old), 0); err != nil {
		t.Fatal(err)
	}
	s.Drop(name)
	if err := s.Keep("hca/one/memory/100000", fd); err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(fd)
	process(t, s, s.Pass(), path)
	select {
	case <-d.ConfigChanged():
	case <-testContext(t).Done():
		t.Fatal("the driver was not told")
	}
	if now := memoryOf(t, s); now != name {
		t.Errorf("the file is kept as %s, want %s", now, name)
	}
}

// A connection with missing parts cannot be continued: it ends, and nothing of it is kept.
func TestKeptInParts(t *testing.T) {
	for _, missing := range []string{"hca/one", "hca/one/state", "hca/one/memory"} {
		t.Run(strings.ReplaceAll(missing, "/", "-"), func(t *testing.T) {
			s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
			_, die := process(t, s, nil, path)
			m := memory(t, regions...)
			d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
			die()
			if missing == "hca/one/memory" {
				s.Drop(memoryOf(t, s))
			} else {
				s.Drop(missing)
			}
			process(t, s, s.Pass(), path)
			select {
			case <-d.Gone():
			case <-testContext(t).Done():
				t.Fatal("the connection was not closed")
			}
			testutil.Eventually(t, "nothing is kept", func() bool { return len(s.Names()) == 0 })
		})
	}
}
