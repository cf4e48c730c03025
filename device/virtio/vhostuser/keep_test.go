package vhostuser_test

import (
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

// store is a Keeper in memory. Once frozen, as after the process's death, it ignores Forget.
type store struct {
	t  *testing.T
	mu sync.Mutex
	vhostuser.Kept
	frozen bool
}

func newStore(t *testing.T) *store {
	s := &store{t: t, Kept: vhostuser.Kept{}}
	t.Cleanup(func() {
		for _, fd := range s.Kept {
			_ = unix.Close(fd)
		}
	})
	return s
}

func (s *store) Keep(name string, fd int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, twice := s.Kept[name]; twice {
		s.t.Errorf("%s was kept twice", name)
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	s.Kept[name] = dup
	return err
}

func (s *store) Forget(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if fd, ok := s.Kept[name]; ok && !s.frozen {
		delete(s.Kept, name)
		return unix.Close(fd)
	}
	return nil
}

func (s *store) names() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.Kept {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// passed returns copies of the descriptors for the next process.
func (s *store) passed() vhostuser.Kept {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frozen = false
	kept := vhostuser.Kept{}
	for name, fd := range s.Kept {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			s.t.Fatal(err)
		}
		kept[name] = dup
	}
	return kept
}

func (s *store) freeze() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frozen = true
}

// process starts a server that keeps its connection, and returns a function that ends it as a crash would.
func process(t *testing.T, s *store, kept vhostuser.Kept, path string) (*echo, func()) {
	t.Helper()
	return processOf(t, s, kept, vhostuser.Config{Path: path, KeepAs: "hca/one"})
}

func processOf(t *testing.T, s *store, kept vhostuser.Kept, cfg vhostuser.Config) (*echo, func()) {
	t.Helper()
	dev := newEcho(2)
	cfg.Keeper, cfg.Kept = s, kept
	srv, err := vhostuser.Listen(cfg, dev, 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = srv.Close() })
	return dev, func() {
		s.freeze()
		_ = srv.Close()
	}
}

var regions = []frontend.Range{{PA: 0x100000, Size: 1 << 20}, {PA: 1 << 32, Size: 1 << 20}}

// A connection outlives the process that served it: the next one has the memory, tells the driver, and serves its rings
// once they are described again. This is done twice.
func TestConnectionOutlivesProcess(t *testing.T) {
	s, path := newStore(t), filepath.Join(t.TempDir(), "s")
	_, die := process(t, s, nil, path)
	m := memory(t, regions...)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	roundTrip(t, d, m, 1, "before")
	want := []string{"hca/one", "hca/one/channel", "hca/one/memory/100000", "hca/one/memory/100000000", "hca/one/state"}
	if got := s.names(); !slices.Equal(got, want) {
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
		dev, die = process(t, s, s.passed(), path)
		select {
		case <-d.ConfigChanged():
		case <-testContext(t).Done():
			t.Fatal("the driver was not told")
		}
		if got := s.names(); !slices.Equal(got, want) {
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
	testutil.Eventually(t, "nothing is kept of a gone front end", func() bool { return len(s.names()) == 0 })
}

// Requests sent while no process ran are handled before the notice; a driver that has stopped its rings meanwhile must
// not be notified (QEMU would abort).
func TestRingsStoppedMeanwhile(t *testing.T) {
	s, path := newStore(t), filepath.Join(t.TempDir(), "s")
	_, die := process(t, s, nil, path)
	m := memory(t, regions...)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	die()
	stopped := make(chan error, 1)
	go func() {
		_, err := d.Client().GetVringBase(0)
		stopped <- err
	}()
	time.Sleep(20 * time.Millisecond) // so that the request is there first; otherwise the test shows less
	process(t, s, s.passed(), path)
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
}

// A connection with missing parts cannot be continued: it ends, and nothing of it is kept.
func TestKeptInParts(t *testing.T) {
	for _, missing := range []string{"hca/one", "hca/one/state", "hca/one/memory/100000"} {
		t.Run(strings.ReplaceAll(missing, "/", "-"), func(t *testing.T) {
			s, path := newStore(t), filepath.Join(t.TempDir(), "s")
			_, die := process(t, s, nil, path)
			m := memory(t, regions...)
			d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
			die()
			s.frozen = false
			if err := s.Forget(missing); err != nil {
				t.Fatal(err)
			}
			process(t, s, s.passed(), path)
			select {
			case <-d.Gone():
			case <-testContext(t).Done():
				t.Fatal("the connection was not closed")
			}
			testutil.Eventually(t, "nothing is kept", func() bool { return len(s.names()) == 0 })
		})
	}
}
