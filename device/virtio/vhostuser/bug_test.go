package vhostuser_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/device/virtio/virtq"
)

// faulty is a device with bugs.
type faulty struct {
	*echo
	starting, disconnecting atomic.Pointer[func()]
}

func (f *faulty) StartQueue(i int, q *virtq.Queue) error {
	if bug := f.starting.Swap(nil); bug != nil {
		(*bug)()
	}
	return f.echo.StartQueue(i, q)
}

func (f *faulty) Disconnected() {
	if bug := f.disconnecting.Load(); bug != nil {
		(*bug)()
	}
	f.echo.Disconnected()
}

// bugs are panics, each with a word that its log line has.
func bugs(t *testing.T) map[string]func() {
	fd, err := unix.MemfdCreate("hole", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	hole, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(hole) })
	var nothing *struct{ x int }
	return map[string]func(){
		"nil pointer dereference": func() { nothing.x = 1 },
		"fault":                   func() { hole[0] = 1 }, // memory that is gone, without a guard
		"index out of range":      func() { _ = hole[len(os.Args)+5000] },
	}
}

func listen(t *testing.T, dev *faulty) (path string, log *testlog.Log) {
	t.Helper()
	log = &testlog.Log{}
	path = filepath.Join(t.TempDir(), "s")
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, Log: log.Logger()}, dev, 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return path, log
}

// TestBugEndsConnection: a panic in a connection's goroutine ends that connection, with its stack in the log. The other
// devices go on, and the device serves the next front end (TR-6).
func TestBugEndsConnection(t *testing.T) {
	for word, bug := range bugs(t) {
		t.Run(word, func(t *testing.T) {
			dev := &faulty{echo: newEcho(1)}
			path, log := listen(t, dev)
			other, _ := serve(t, newEcho(1))
			om := memory(t)
			od := open(t, frontend.Config{Path: other, Memory: om})
			roundTrip(t, od, om, 0, "before")

			dev.starting.Store(&bug)
			if d, err := frontend.Open(testContext(t), frontend.Config{Path: path, Memory: memory(t), NumQueues: 1,
				QueueSize: 16}); err == nil {
				d.Close()
			}
			dev.wait(t, "disconnect", func() bool { return len(dev.log) > 0 && dev.log[len(dev.log)-1] == "disconnected" })
			testutil.Eventually(t, "log line", func() bool {
				s := log.String()
				return strings.Contains(s, "bug in vnicd") && strings.Contains(s, word) && strings.Contains(s, "bug_test.go")
			})
			roundTrip(t, od, om, 0, "after")
			m := memory(t)
			roundTrip(t, open(t, frontend.Config{Path: path, Memory: m}), m, 0, "next")
		})
	}
}

// TestBugInTeardown: a device that cannot be disconnected may still use its memory, so that it is not offered again;
// the other devices go on. In a process of its own, because that memory stays mapped.
func TestBugInTeardown(t *testing.T) {
	if os.Getenv(leaksEnv) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestBugInTeardown$")
		cmd.Env = append(os.Environ(), leaksEnv+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	dev := &faulty{echo: newEcho(1)}
	path, log := listen(t, dev)
	bug := func() { panic("cannot") }
	dev.disconnecting.Store(&bug)
	d := open(t, frontend.Config{Path: path, Memory: memory(t)})
	other, _ := serve(t, newEcho(1))
	om := memory(t)
	od := open(t, frontend.Config{Path: other, Memory: om})
	d.Close()
	testutil.Eventually(t, "log line", func() bool {
		return strings.Contains(log.String(), "not offered any more") && strings.Contains(log.String(), "bug_test.go")
	})
	roundTrip(t, od, om, 0, "after")
	c, err := frontend.Dial(testContext(t), path)
	if err == nil {
		defer c.Close()
		if _, err = c.GetFeatures(); err == nil {
			t.Error("a device that could not be disconnected is served again")
		}
	}
	testutil.Eventually(t, "reason", func() bool { return strings.Contains(log.String(), "restart vnicd") })
}
