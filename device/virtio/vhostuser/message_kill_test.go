package vhostuser_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

var everyKill = flag.Bool("every-kill", false, "TestMessagesOutliveKills kills at every step instead of a sample")

// mortal is a Keeper and a row of processes, each of which is killed at a step. At that step what the next one finds is
// copied, and the connection's goroutine ends. The socket, the pipe and the eventfds are the same open files in all.
type mortal struct {
	t    *testing.T
	path string
	next chan *testutil.Keeper // of a process that was killed
	done chan struct{}         // closed when no more are started
	logs *testlog.Log
	most uint64 // bytes that front ends may share, which are not trusted; 0: they are

	mu    sync.Mutex
	s     *testutil.Keeper // of the process that runs
	begun bool
	left  []int    // steps that this process and the next ones have; one that is not listed is not killed
	died  []string // at which steps
	heard []string // by the devices of all processes, of what is for network devices
}

// card is a lasting device that is one for networks as well.
type card struct {
	*lasting
	k *mortal
}

var _ virtio.NetDevice = card{}

func (c card) hear(format string, a ...any) {
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	c.k.heard = append(c.k.heard, fmt.Sprintf(format, a...))
}

func (c card) SendRARP(mac [6]byte) { c.hear("rarp %x", mac) }
func (c card) SetMTU(mtu uint16)    { c.hear("mtu %d", mtu) }

func (k *mortal) step(format string, a ...any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.s == nil || !k.begun || len(k.left) == 0 {
		return
	}
	if k.left[0]--; k.left[0] >= 0 {
		return
	}
	k.left = k.left[1:]
	k.died = append(k.died, fmt.Sprintf(format, a...))
	s := k.s.Copy(k.t)
	k.s = nil // what follows is the end of the goroutine, not of a process
	k.next <- s
	panic("killed")
}

// crossed is a step of a message. Before the first one the connection is not kept yet, and ends with its process.
func (k *mortal) crossed(step string) {
	k.mu.Lock()
	k.begun = true
	k.mu.Unlock()
	k.step("%s", step)
}

func (k *mortal) write(fd int, b []byte, off int64) (int, error) {
	k.step("before the state at %#x", off)
	if _, err := unix.Pwrite(fd, b[:len(b)/3], off); err != nil {
		return 0, err
	}
	k.step("torn state at %#x", off)
	return unix.Pwrite(fd, b, off)
}

// stepping is the Keeper of one process.
type stepping struct {
	*testutil.Keeper
	k *mortal
}

func (p stepping) Keep(name string, fd int) error {
	p.k.step("before keep %s", name)
	return p.Keeper.Keep(name, fd)
}

func (p stepping) Forget(name string) error {
	p.k.step("before forget %s", name)
	return p.Keeper.Forget(name)
}

// newMortal starts a process, and the next one whenever one was killed, until stop is called.
func newMortal(t *testing.T, most uint64, left ...int) (k *mortal, stop func()) {
	k = &mortal{t: t, path: filepath.Join(t.TempDir(), "s"), next: make(chan *testutil.Keeper, 1),
		done: make(chan struct{}), logs: &testlog.Log{}, most: most, left: left}
	undo := []func(){vhostuser.SetTrial(time.Hour, time.Millisecond), vhostuser.SetPwrite(k.write),
		vhostuser.SetCrossed(k.crossed)}
	s := testutil.NewKeeper(t)
	var wg sync.WaitGroup
	srv := k.start(s, nil)
	wg.Go(func() {
		for {
			select {
			case s = <-k.next:
			case <-k.done:
				_ = srv.Close()
				return
			}
			_ = srv.Close() // the rest of the process that was killed
			if _, err := unix.Pwrite(s.FD("hca/one/state"), []byte{0}, vhostuser.MarkOff); err != nil {
				t.Error(err)
			}
			srv = k.start(s, s.Pass())
		}
	})
	return k, func() {
		k.mu.Lock()
		k.left = nil
		k.mu.Unlock()
		close(k.done)
		wg.Wait()
		for _, f := range undo {
			f()
		}
		empty(s)
	}
}

func (k *mortal) start(s *testutil.Keeper, kept vhostuser.Kept) *vhostuser.Server {
	k.mu.Lock()
	k.s = s
	k.mu.Unlock()
	srv, err := vhostuser.Listen(vhostuser.Config{Path: k.path, KeepAs: "hca/one", Keeper: stepping{s, k}, Kept: kept,
		MaxMemory: k.most, Sealed: k.most > 0, Log: k.logs.Logger()}, card{newLasting(), k}, 9)
	if err != nil {
		k.t.Error(err)
	}
	return srv
}

// killedAt runs everything that a front end may do against processes that are killed after so many steps, and returns
// where they died. The front end gets the reply of each message once, and notices nothing else.
func killedAt(t *testing.T, features uint64, left ...int) (died []string) {
	k, stop := newMortal(t, 0, left...)
	m := memory(t, regions...)
	f, err := frontend.Open(testContext(t), frontend.Config{Path: k.path, Memory: m, NumQueues: 2,
		Features: echoFeature | features})
	defer func() {
		stop()
		if t.Failed() {
			t.Logf("killed after %v: at %q\n%s", left, k.died, k.logs)
		}
	}()
	if err != nil {
		t.Errorf("set-up: %v", err)
		return k.died
	}
	defer func() {
		k.mu.Lock()
		k.left = nil
		k.mu.Unlock()
		_ = f.Close()
	}()
	c := f.Client()
	more := vhostuser.Region{GuestPA: 1 << 40, Size: 1 << 20, UserAddr: 1 << 45}
	other := memory(t)
	table := m.Regions()
	files := []int{m.FD(), m.FD(), other.FD()}
	halves := slices.Clone(table) // the region that has the rings, in two parts
	half := halves[0]
	half.Size /= 2
	halves[0] = half
	half.GuestPA, half.UserAddr, half.Offset = half.GuestPA+half.Size, half.UserAddr+half.Size, half.Offset+half.Size
	halves = append(halves, half)
	start := func() (err error) {
		for i := range f.NumQueues() {
			err = errors.Join(err, f.StartQueue(i))
		}
		return err
	}
	serves := func(text string) error {
		note(t, f, text)
		for i := range f.NumQueues() {
			polled(t, f, m, i, text)
		}
		return nil
	}
	for n, do := range []func() error{
		func() error { return serves("set up") },
		func() error { changeAll(t, f, m); return nil },
		func() error { return serves("changed") },
		func() error { return c.SetMemTable(append(table, more), files...) },
		func() error { return serves("more memory") },
		func() error { return c.SetMemTable(table, files[:2]...) },
		func() error { return c.SetMemTable(halves, m.FD(), m.FD(), m.FD()) },
		func() error { return serves("the same memory in parts") },
		func() error { return c.SetMemTable(table, files[:2]...) },
		func() error { pause(t, f); return nil },
		start,
		func() error { return serves("resumed") },
		func() error { _, err := c.Do(vhostuser.ReqResetOwner, false, nil); return err },
		start,
		func() error { return serves("owned") },
		func() error { return c.ResetDevice() },
		func() error { noted(t, f, string(fresh()[40:45])); return nil },
		func() error { anew(t, f); return nil },
		func() error { return serves("reset") },
		func() error { return c.SetOwner() },
		func() error { return announce(c, k) },
		func() error { _, err := c.QueueNum(); return err }, // a second reply to anything would be here
		func() error { _, err := c.GetStatus(); return err },
		func() error { _, err := c.MaxMemSlots(); return err },
	} {
		if err := do(); err != nil || t.Failed() {
			t.Errorf("part %d: %v", n, err)
			break
		}
	}
	untold(t, f)
	k.mu.Lock()
	k.left = nil
	k.mu.Unlock()
	testutil.Eventually(t, "the next process", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.s != nil
	})
	k.mu.Lock()
	defer k.mu.Unlock()
	if n := len(k.s.Names()); n < countRuns || n > countRuns+2 { // the call eventfds before the present ones
		t.Errorf("kept: %q", k.s.Names())
	}
	return k.died
}

// announce sends the messages that are for network devices, and checks that the device got them, which may be twice.
func announce(c *frontend.Client, k *mortal) error {
	p, err := c.GetProtocolFeatures()
	if err != nil {
		return err
	}
	if err := c.SetProtocolFeatures(p &^ vhostuser.ProtoMemory); err != nil {
		return err
	}
	var want []string
	for i := range uint64(3) {
		mac, mtu := 0x665544332202+i<<40, 1500+i
		_, err := c.Do(vhostuser.ReqSendRARP, false, vhostuser.AppendU64(nil, mac))
		if err == nil {
			_, err = c.Do(vhostuser.ReqNetSetMTU, false, vhostuser.AppendU64(nil, mtu))
		}
		if err != nil {
			return err
		}
		want = append(want, fmt.Sprintf("rarp %x", vhostuser.AppendU64(nil, mac)[:6]), fmt.Sprintf("mtu %d", mtu))
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if got := slices.Compact(slices.Clone(k.heard)); !slices.Equal(got, want) {
		return fmt.Errorf("the device has got %q, want %q", k.heard, want)
	}
	return nil
}

// TestMessagesOutliveKills: a process may be killed between any two steps of any message, and so may the next one. A
// sample begins at a random step, so that in time all are met.
func TestMessagesOutliveKills(t *testing.T) {
	for name, features := range map[string]uint64{"split": 0, "packed": virtio.FeatureRingPacked} {
		t.Run(name, func(t *testing.T) {
			stride := 1
			switch {
			case features != 0:
				stride = 17
			case !*everyKill:
				stride = 7
			}
			n := rand.IntN(stride)
			for ; !t.Failed(); n += stride {
				if len(killedAt(t, features, n)) == 0 {
					break
				}
			}
			if n < 300 {
				t.Errorf("only %d steps", n)
			}
			for i := 0; !t.Failed() && i < n; i += 13 { // the next process is killed, too, and one more
				killedAt(t, features, i, i%11, i%17)
			}
		})
	}
}

// TestOpenOutlivesKills: so may one that opens a device with memory of the back end's (GET_MEMORY).
func TestOpenOutlivesKills(t *testing.T) {
	open := func(left ...int) (died []string) {
		k, stop := newMortal(t, untrustedMemory, left...)
		m, err := frontend.PlanMemory(frontend.Range{PA: 0x100000, Size: untrustedMemory})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		f, err := frontend.Open(testContext(t), frontend.Config{Path: k.path, Memory: m, NumQueues: 2,
			Features: echoFeature})
		if err != nil {
			t.Errorf("killed after %v: at %q: %v\n%s", left, k.died, err, k.logs)
			stop()
			return k.died
		}
		k.mu.Lock()
		k.left, died = nil, k.died
		k.mu.Unlock()
		for i := range f.NumQueues() {
			polled(t, f, m, i, "opened")
		}
		if _, err := f.Client().GetStatus(); err != nil { // a second reply to anything would be here
			t.Errorf("killed after %v: at %q: %v", left, k.died, err)
		}
		solid(t, "memory", m.FD(), 4096)
		_ = f.Close()
		stop()
		return died
	}
	given := 0
	for n := 0; !t.Failed(); n++ {
		died := open(n)
		if len(died) == 0 {
			break
		}
		if died[0] == "given" {
			given = n
		}
	}
	if given == 0 {
		t.Error("no process has ended after its reply with memory")
	}
	for i := range 5 { // the next ones end there, too
		open(given, i, 2*i)
	}
}

// TestSetUpRepeated: of a network card nothing is kept, and nothing need be. Whenever the process is killed while a
// front end sets it up, or later, the front end that connects again and says everything anew is served, as QEMU does.
func TestSetUpRepeated(t *testing.T) {
	var mu sync.Mutex
	left := 0
	defer vhostuser.SetCrossed(func(step string) {
		mu.Lock()
		defer mu.Unlock()
		if step == "replied" { // as before the next message
			return
		}
		if left--; left == 0 {
			panic("killed")
		}
	})()
	path := filepath.Join(t.TempDir(), "s")
	process := func(steps int) (end func()) {
		mu.Lock()
		left = steps
		mu.Unlock()
		dev := card{newLasting(), &mortal{}}
		dev.mute = true
		srv, err := vhostuser.Listen(vhostuser.Config{Path: path}, dev, 9)
		if err != nil {
			t.Fatal(err)
		}
		return func() { _ = srv.Close() }
	}
	for n, killed := 1, true; killed; n++ {
		m := memory(t, regions...)
		cfg := frontend.Config{Path: path, Memory: m, NumQueues: 2, Features: echoFeature}
		end := process(n)
		f, err := frontend.Open(testContext(t), cfg)
		if killed = err != nil; killed {
			end()
			end = process(0)
			f = open(t, cfg)
		} else if n < 70 {
			t.Fatalf("only %d steps", n)
		}
		for i := range f.NumQueues() {
			polled(t, f, m, i, "set up")
		}
		_ = f.Close()
		end()
	}
}
