package vhostuser_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	eventfds "github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// TestMain fails if goroutines, descriptors or mappings of memfds are leaked.
func TestMain(m *testing.M) {
	// The runtime's poller opens its own descriptors with the first pipe.
	if r, w, err := os.Pipe(); err == nil {
		_ = r.Close()
		_ = w.Close()
	}
	_ = eventfds.Prepare() // has a descriptor from then on
	before := openFiles()
	code := m.Run()
	if code == 0 && os.Getenv(leaksEnv) == "" {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "leaked:", err)
			code = 1
		}
		if after := openFiles(); len(after) > len(before) {
			fmt.Fprintf(os.Stderr, "leaked file descriptors: had %v, have %v\n", before, after)
			code = 1
		}
		if n := guestMappings(); n != 0 {
			fmt.Fprintf(os.Stderr, "leaked %d mappings of guest memory\n", n)
			code = 1
		}
	}
	os.Exit(code)
}

// leaksEnv is set where a test leaks on purpose, in a process of its own.
const leaksEnv = "VNICD_TEST_LEAKS"

func openFiles() []string {
	var out []string
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	for _, e := range es {
		l, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && l != "anon_inode:[eventpoll]" && l != "/proc/self/fd" {
			out = append(out, e.Name()+"="+l)
		}
	}
	return slices.DeleteFunc(out, func(s string) bool {
		return filepath.Base(s) == "fd" // the directory being read
	})
}

func guestMappings() int {
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		panic(err)
	}
	n := 0
	for _, l := range strings.Split(string(b), "\n") {
		if strings.Contains(l, "memfd:vnicd-guest") {
			n++
		}
	}
	return n
}

// echo is a device whose queues copy readable buffers to writable ones. Each queue runs on its own goroutine, which
// StopQueue joins.
type echo struct {
	n      int
	config [64]byte

	mu        sync.Mutex
	cond      *sync.Cond
	log       []string // calls, in order
	conn      virtio.Conn
	features  uint64
	status    uint8
	running   map[int]*worker
	refuse    error // result of SetFeatures
	startFail error
	hold      chan struct{} // if not nil, Disconnected returns when it is closed
}

type worker struct {
	q    *virtq.Queue
	stop int // eventfd
	done chan struct{}
}

func newEcho(n int) *echo {
	e := &echo{n: n, running: map[int]*worker{}}
	e.cond = sync.NewCond(&e.mu)
	for i := range e.config {
		e.config[i] = byte(i)
	}
	return e
}

func (e *echo) note(format string, a ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.log = append(e.log, fmt.Sprintf(format, a...))
	e.cond.Broadcast()
}

// wait waits until cond holds; cond runs with the lock held.
func (e *echo) wait(t testing.TB, what string, cond func() bool) {
	t.Helper()
	late := time.AfterFunc(20*time.Second, e.cond.Broadcast)
	defer late.Stop()
	deadline := time.Now().Add(20 * time.Second)
	e.mu.Lock()
	defer e.mu.Unlock()
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("timeout waiting for %s; calls so far: %q", what, e.log)
		}
		e.cond.Wait()
	}
}

func (e *echo) calls() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.log)
}

// fail sets the errors of SetFeatures and StartQueue.
func (e *echo) fail(features, start error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refuse, e.startFail = features, start
}

func (e *echo) clearCalls() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.log = nil
}

const echoFeature = 1 << 5

func (e *echo) Features() uint64 { return echoFeature | virtio.FeatureRingPacked }
func (e *echo) NumQueues() int   { return e.n }
func (e *echo) ConfigSize() int  { return len(e.config) }

func (e *echo) Connected(c virtio.Conn) {
	e.mu.Lock()
	e.conn = c
	e.mu.Unlock()
	e.note("connected")
}

func (e *echo) Disconnected() {
	e.mu.Lock()
	e.conn = nil
	n := len(e.running)
	e.mu.Unlock()
	if n != 0 {
		e.note("DISCONNECTED WITH QUEUES RUNNING")
	}
	e.note("disconnected")
	if e.hold != nil {
		<-e.hold
	}
}

func (e *echo) SetFeatures(f uint64) error {
	e.mu.Lock()
	e.features = f
	err := e.refuse
	e.mu.Unlock()
	e.note("features %#x", f)
	return err
}

func (e *echo) SetStatus(s uint8) {
	e.mu.Lock()
	e.status = s
	e.mu.Unlock()
	e.note("status %d", s)
}

func (e *echo) ReadConfig(dst []byte, off uint32) error {
	copy(dst, e.config[off:])
	return nil
}

func (e *echo) WriteConfig(off uint32, src []byte) error {
	if off < 32 {
		return errors.New("read-only")
	}
	copy(e.config[off:], src)
	return nil
}

func (e *echo) Reset() { e.note("reset") }

func (e *echo) StartQueue(i int, q *virtq.Queue) error {
	e.mu.Lock()
	err := e.startFail
	e.mu.Unlock()
	if err != nil {
		return err
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return err
	}
	w := &worker{q: q, stop: fd, done: make(chan struct{})}
	go w.run(i)
	e.mu.Lock()
	e.running[i] = w
	e.mu.Unlock()
	e.note("start %d", i)
	return nil
}

func (e *echo) StopQueue(i int) {
	e.mu.Lock()
	w := e.running[i]
	delete(e.running, i)
	e.mu.Unlock()
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], 1)
	_, _ = unix.Write(w.stop, b[:])
	<-w.done
	_ = unix.Close(w.stop)
	e.note("stop %d", i)
}

func (w *worker) run(slot int) {
	defer close(w.done)
	var c virtq.Chain
	buf := make([]byte, 4096)
	for {
		var miss translate.Miss // of an absent page
		_ = translate.Guard(func() error {
			ep := w.q.Space().Epochs()
			t := ep.Enter(translate.ByLoop(slot))
			defer ep.Leave(slot, t)
			for miss.OK() {
				ok, err := w.q.Pop(&c)
				var m *virtq.MissError
				if errors.As(err, &m) && virtq.IsRepairable(err) {
					miss = m.Miss
				}
				if !ok || err != nil {
					break
				}
				n := 0
				if n, miss = c.ReadAll(buf); miss.OK() {
					n, miss = c.WriteAll(buf[:n])
				}
				if miss.Fault() {
					err = w.q.Unpop(&c)
				} else {
					err = w.q.Push(&c, uint32(n))
				}
				if err != nil {
					return err
				}
			}
			if err := w.q.Signal(); err != nil {
				return err
			}
			return w.q.SetNotify(true)
		})
		if miss.Fault() && w.q.Space().Fetch(context.Background(), miss, true) == nil {
			continue
		}
		more := false
		_ = translate.Guard(func() error {
			ep := w.q.Space().Epochs()
			t := ep.Enter(translate.ByLoop(slot))
			defer ep.Leave(slot, t)
			n, err := w.q.Pending()
			more = n > 0 && err == nil
			return err
		})
		if more {
			continue
		}
		fds := []unix.PollFd{{Fd: int32(w.stop), Events: unix.POLLIN}, {Fd: int32(w.q.KickFD()), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
			return
		}
		if fds[0].Revents != 0 {
			return
		}
		if fds[1].Revents != 0 {
			var b [8]byte
			_, _ = unix.Read(w.q.KickFD(), b[:])
		}
	}
}

// serve starts a server for dev in a fresh directory.
func serve(t testing.TB, dev virtio.Device) (path string, s *vhostuser.Server) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	s, err := vhostuser.Listen(vhostuser.Config{Path: path}, dev, 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return path, s
}

func memory(t testing.TB, ranges ...frontend.Range) *frontend.Memory {
	t.Helper()
	if len(ranges) == 0 {
		ranges = []frontend.Range{{PA: 0x100000, Size: 1 << 20}}
	}
	m, err := frontend.NewMemory(ranges...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func open(t testing.TB, cfg frontend.Config) *frontend.Device {
	t.Helper()
	d, err := frontend.Open(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// roundTrip sends text through queue i and checks the echo.
func roundTrip(t testing.TB, d *frontend.Device, m *frontend.Memory, i int, text string) {
	t.Helper()
	pa, err := m.Alloc(8192, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Free(pa, 8192)
	out, _ := m.Bytes(pa, 4096)
	in, _ := m.Bytes(pa+4096, 4096)
	copy(out, text)
	half := uint32(len(text) / 2)
	q := d.Queue(i)
	err = q.Add(42, []frontend.Buf{{PA: pa, Len: half}, {PA: pa + translate.PA(half), Len: uint32(len(text)) - half}},
		[]frontend.Buf{{PA: pa + 4096, Len: 4096}})
	if err != nil {
		t.Fatal(err)
	}
	q.Kick()
	if err := q.Wait(testContext(t)); err != nil {
		t.Fatal(err)
	}
	token, n, ok, err := q.Get()
	if !ok || err != nil || token != 42 || int(n) != len(text) || string(in[:n]) != text {
		t.Fatalf("queue %d: token %d, %d bytes %q, %v, %v", i, token, n, in[:n], ok, err)
	}
}
