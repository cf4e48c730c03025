package vhostuser_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// TestWholeDevice sends QEMU's sequence, twice to one server.
func TestWholeDevice(t *testing.T) {
	for name, mod := range map[string]func(*frontend.Config){
		"all features": func(*frontend.Config) {},
		"no event-idx": func(c *frontend.Config) { c.Refuse = virtio.FeatureEventIdx },
		"no indirect":  func(c *frontend.Config) { c.Refuse = virtio.FeatureIndirectDesc },
		"tiny queues":  func(c *frontend.Config) { c.QueueSize = 4 },
		"packed":       func(c *frontend.Config) { c.Features |= virtio.FeatureRingPacked },
		"packed, odd":  func(c *frontend.Config) { c.Features |= virtio.FeatureRingPacked; c.QueueSize = 5 },
		"packed, no event-idx, no indirect": func(c *frontend.Config) {
			c.Features |= virtio.FeatureRingPacked
			c.Refuse, c.QueueSize = virtio.FeatureEventIdx|virtio.FeatureIndirectDesc, 3
		},
	} {
		t.Run(name, func(t *testing.T) {
			dev := newEcho(5)
			path, _ := serve(t, dev)
			for range 2 {
				dev.clearCalls()
				m := memory(t, frontend.Range{PA: 0, Size: 1 << 20}, frontend.Range{PA: 1 << 32, Size: 1 << 20})
				cfg := frontend.Config{Path: path, Memory: m, Features: echoFeature | 1<<7}
				mod(&cfg)
				d := open(t, cfg)
				if d.NumQueues() != 5 || d.Features()&echoFeature == 0 || d.Features()&(1<<7) != 0 {
					t.Fatalf("%d queues, features %#x", d.NumQueues(), d.Features())
				}
				for range 20 {
					for i := range 5 {
						roundTrip(t, d, m, i, strings.Repeat("vnicd ", 100))
					}
				}
				if err := d.Close(); err != nil {
					t.Fatal(err)
				}
				dev.wait(t, "disconnect", func() bool { return slices.Contains(dev.log, "disconnected") })
				calls := dev.calls()
				if calls[0] != "connected" || calls[len(calls)-1] != "disconnected" ||
					slices.Contains(calls, "DISCONNECTED WITH QUEUES RUNNING") {
					t.Fatalf("calls %q", calls)
				}
			}
		})
	}
}

// TestManyInFlight fills a queue and drains it, across the index's wrap-around.
func TestManyInFlight(t *testing.T) {
	for name, features := range ringKinds {
		t.Run(name, func(t *testing.T) { manyInFlight(t, features) })
	}
}

// ringKinds are the feature bits of each layout.
var ringKinds = map[string]uint64{"split": 0, "packed": virtio.FeatureRingPacked}

func manyInFlight(t *testing.T, features uint64) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: features, QueueSize: 64})
	q := d.Queue(0)
	pa, err := m.Alloc(64*16, 16)
	if err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	sent, got := 0, 0
	for got < 80000 {
		for sent < 80000 {
			err := q.Add(uint64(sent), nil, []frontend.Buf{{PA: pa, Len: 16}})
			if errors.Is(err, frontend.ErrFull) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			sent++
		}
		q.Kick()
		if err := q.Wait(ctx); err != nil {
			t.Fatalf("%v after %d of %d", err, got, sent)
		}
		for {
			token, _, ok, err := q.Get()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if token != uint64(got) {
				t.Fatalf("token %d, want %d", token, got)
			}
			got++
		}
	}
}

func TestConfigSpace(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	d := open(t, frontend.Config{Path: path, Memory: memory(t)})
	b := make([]byte, 10)
	if err := d.ReadConfig(b, 3); err != nil || b[0] != 3 || b[9] != 12 {
		t.Fatal(b, err)
	}
	c := d.Client()
	if err := c.SetConfig(40, []byte{0xaa, 0xbb}); err != nil {
		t.Fatal(err)
	}
	if err := d.ReadConfig(b[:3], 40); err != nil || b[0] != 0xaa || b[1] != 0xbb || b[2] != 42 {
		t.Fatal(b, err)
	}
	// The connection still works after refusals.
	var refused *frontend.RefusedError
	if err := c.SetConfig(0, []byte{1}); !errors.As(err, &refused) {
		t.Fatal(err)
	}
	if err := d.ReadConfig(make([]byte, 2), 63); !errors.As(err, &refused) {
		t.Fatal(err)
	}
	if err := d.ReadConfig(b[:1], 0); err != nil || b[0] != 0 {
		t.Fatal(b, err)
	}

	dev.mu.Lock()
	conn := dev.conn
	dev.mu.Unlock()
	conn.ConfigChanged()
	select {
	case <-d.ConfigChanged():
	case <-testContext(t).Done():
		t.Fatal("no notice of the change")
	}
	// While no ring runs QEMU's generic device does not handle the channel: the notice waits.
	if err := d.StopQueue(0); err != nil {
		t.Fatal(err)
	}
	conn.ConfigChanged()
	if err := d.ReadConfig(b[:1], 0); err != nil { // by now a notice would have been sent
		t.Fatal(err)
	}
	select {
	case <-d.ConfigChanged():
		t.Fatal("a notice without a running ring")
	case <-time.After(50 * time.Millisecond):
	}
	if err := d.StartQueue(0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-d.ConfigChanged():
	case <-testContext(t).Done():
		t.Fatal("no notice once a ring runs")
	}
	// The device never waits for notices to be read.
	for range 100000 {
		conn.ConfigChanged()
	}
	if err := d.ReadConfig(b[:1], 0); err != nil {
		t.Fatal(err)
	}
}

// TestStopAndResume: GET_VRING_BASE stops a ring, and the base resumes it.
func TestStopAndResume(t *testing.T) {
	for name, features := range ringKinds {
		t.Run(name, func(t *testing.T) { stopAndResume(t, features) })
	}
}

func stopAndResume(t *testing.T, features uint64) {
	dev := newEcho(2)
	path, _ := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: features, QueueSize: 8})
	for range 20 {
		roundTrip(t, d, m, 0, "before")
		if err := d.StopQueue(0); err != nil {
			t.Fatal(err)
		}
		dev.mu.Lock()
		_, on0 := dev.running[0]
		_, on1 := dev.running[1]
		dev.mu.Unlock()
		if on0 || !on1 {
			t.Fatal("wrong queue stopped")
		}
		// A chain offered meanwhile waits.
		pa, err := m.Alloc(16, 16)
		if err != nil {
			t.Fatal(err)
		}
		q := d.Queue(0)
		if err := q.Add(7, nil, []frontend.Buf{{PA: pa, Len: 16}}); err != nil {
			t.Fatal(err)
		}
		q.Kick()
		roundTrip(t, d, m, 1, "the other queue")
		if q.Pending() {
			t.Fatal("a stopped queue was served")
		}
		if err := d.StartQueue(0); err != nil {
			t.Fatal(err)
		}
		if err := q.Wait(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if token, _, ok, err := q.Get(); !ok || err != nil || token != 7 {
			t.Fatal(token, ok, err)
		}
	}
}

// TestPackedBase: the base of a packed ring is two places with their wrap counters. The position in the ring takes
// precedence: a front end that lost its back end sends an old base (QEMU does).
func TestPackedBase(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: virtio.FeatureRingPacked,
		Refuse: virtio.FeatureIndirectDesc, QueueSize: 5})
	c := d.Client()
	place := uint32(0x8000)
	for i := range 12 {
		roundTrip(t, d, m, 0, "three descriptors each")
		if place += 3; place&0x7fff >= 5 {
			place = place&0x8000 ^ 0x8000 | (place&0x7fff - 5)
		}
		base, err := c.GetVringBase(0)
		if err != nil || base != place|place<<16 {
			t.Fatalf("base %#x, want %#x twice: %v", base, place, err)
		}
		if err := d.StartQueue(0); err != nil {
			t.Fatal(err)
		}
		if i%2 != 0 {
			continue
		}
		// The same with the initial base.
		if _, err := c.GetVringBase(0); err != nil {
			t.Fatal(err)
		}
		q := d.Queue(0)
		desc, avail, used := q.Rings()
		if err := errors.Join(c.SetVringNum(0, 5), c.SetVringBase(0, 0x80008000),
			c.SetVringAddr(vhostuser.VringAddr{Desc: m.UserAddr(desc), Avail: m.UserAddr(avail), Used: m.UserAddr(used)}),
			c.SetVringKick(0, q.KickFD())); err != nil {
			t.Fatal(err)
		}
	}
}

// TestStatusReset: status 0 resets; memory and call descriptors are kept, as QEMU expects.
func TestStatusReset(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	c := d.Client()
	if s, err := c.GetStatus(); err != nil || s != 15 {
		t.Fatal(s, err)
	}
	for name, reset := range map[string]func() error{
		"status": func() error { return c.SetStatus(0) }, "device": c.ResetDevice,
	} {
		dev.clearCalls()
		if err := reset(); err != nil {
			t.Fatal(name, err)
		}
		if got := strings.Join(dev.calls(), ","); !strings.HasPrefix(got, "stop 0,reset") {
			t.Fatal(name, got)
		}
		if s, err := c.GetStatus(); err != nil || s != 0 {
			t.Fatal(s, err)
		}
		// FEATURES_OK without features is not set (virtio 1.2, 2.2.2).
		var refused *frontend.RefusedError
		if err := c.SetStatus(11); !errors.As(err, &refused) {
			t.Fatal(err)
		}
		if s, err := c.GetStatus(); err != nil || s != 3 {
			t.Fatal(s, err)
		}
		// The guest has new rings, in memory that is not passed again.
		if err := c.SetFeatures(d.Features()); err != nil {
			t.Fatal(err)
		}
		if err := c.SetStatus(11); err != nil {
			t.Fatal(err)
		}
		if err := d.StartQueue(0); err != nil {
			t.Fatal(err)
		}
		if err := c.SetStatus(15); err != nil {
			t.Fatal(err)
		}
		roundTrip(t, d, m, 0, "after the reset")
	}
}

// A reset of the machine is reported, unlike a pause, after which QEMU's network card has status 0, too.
func TestMachineReset(t *testing.T) {
	dev, path := newEcho(1), filepath.Join(t.TempDir(), "s")
	var resets atomic.Int32
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, MachineReset: func() { resets.Add(1) }}, dev, 9)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := open(t, frontend.Config{Path: path, Memory: memory(t)}).Client()
	for i, x := range []struct {
		do   func() error
		want int32
	}{
		{func() error { _, err := c.GetVringBase(0); return err }, 0}, {func() error { return c.SetStatus(0) }, 0},
		{c.ResetDevice, 1}, {c.ResetDevice, 2},
	} {
		if err := x.do(); err != nil {
			t.Fatal(err)
		}
		if _, err := c.GetStatus(); err != nil { // its answer follows what came before
			t.Fatal(err)
		}
		if resets.Load() != x.want {
			t.Errorf("step %d: %d resets are reported, want %d", i, resets.Load(), x.want)
		}
	}
}

func TestLegacyDriverIsNotStarted(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	c := d.Client()
	if err := c.ResetDevice(); err != nil {
		t.Fatal(err)
	}
	dev.clearCalls()
	if err := c.SetFeatures(d.Features() &^ virtio.FeatureVersion1); err != nil {
		t.Fatal(err)
	}
	if err := d.StartQueue(0); err != nil {
		t.Fatal(err)
	}
	if got := dev.calls(); len(got) != 0 {
		t.Fatal(got)
	}
	// The same driver may choose other features.
	if err := c.SetFeatures(d.Features()); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, d, m, 0, "modern")
}

func TestDeviceRefusals(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	m := memory(t)
	dev.fail(nil, errors.New("no"))
	var refused *frontend.RefusedError
	if _, err := frontend.Open(testContext(t), frontend.Config{Path: path, Memory: m}); !errors.As(err, &refused) ||
		refused.Request != vhostuser.ReqSetVringEnable {
		t.Fatal(err)
	}
	dev.fail(errors.New("not these"), nil)
	if _, err := frontend.Open(testContext(t), frontend.Config{Path: path, Memory: m}); !errors.As(err, &refused) ||
		refused.Request != vhostuser.ReqSetFeatures {
		t.Fatal(err)
	}
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	dev := newEcho(1)
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, Mode: 0o600}, dev, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 || st.Mode()&os.ModeSocket == 0 {
		t.Fatal(st, err)
	}
	if _, err := vhostuser.Listen(vhostuser.Config{Path: path}, dev, 1); !errors.Is(err, vhostuser.ErrInUse) {
		t.Fatalf("second server: %v", err)
	}
	s.Close()
	s.Close()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Fatal("socket left behind")
	}

	// A dead process's socket is replaced.
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	s2, err := vhostuser.Listen(vhostuser.Config{Path: path}, dev, 1)
	if err != nil {
		t.Fatal(err)
	}
	// Another server's socket at the path is not removed.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	s3, err := vhostuser.Listen(vhostuser.Config{Path: path}, dev, 1)
	if err != nil {
		t.Fatal(err)
	}
	s2.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Fatal("another server's socket was removed")
	}
	s3.Close()

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	for p, want := range map[string]string{
		file:                               "not a socket",
		filepath.Join(dir, "no", "s"):      "no such file",
		"/tmp/" + strings.Repeat("x", 200): "too long",
	} {
		if _, err := vhostuser.Listen(vhostuser.Config{Path: p}, dev, 1); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "data" {
		t.Fatal("the file was touched")
	}
	for _, n := range []int{0, 257} {
		if _, err := vhostuser.Listen(vhostuser.Config{Path: path}, newEcho(n), 1); err == nil {
			t.Errorf("%d queues accepted", n)
		}
	}
}

// TestCloseWhileConnected: the server closes first; the front end notices.
func TestCloseWhileConnected(t *testing.T) {
	dev := newEcho(2)
	path, s := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	roundTrip(t, d, m, 1, "hello")
	s.Close()
	if got := dev.calls(); got[len(got)-1] != "disconnected" {
		t.Fatal(got)
	}
	select {
	case <-d.Gone():
	case <-testContext(t).Done():
		t.Fatal("front end did not notice")
	}
	if _, err := d.Client().GetFeatures(); err == nil {
		t.Fatal("a closed connection replied")
	}
}

// TestCloseAfterDisconnect: a server that ends closes the connection after the device has let the memory go, not
// before: a front end takes the end of the connection for a proof of that (TR-5).
func TestCloseAfterDisconnect(t *testing.T) {
	dev := newEcho(1)
	dev.hold = make(chan struct{})
	path, s := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	roundTrip(t, d, m, 0, "hello")
	closed, asked := make(chan struct{}), make(chan error, 1)
	go func() {
		s.Close()
		close(closed)
	}()
	dev.wait(t, "the end of the device", func() bool { return slices.Contains(dev.log, "disconnected") })
	go func() { // asks a server that does not answer any more
		_, err := d.Client().GetFeatures()
		asked <- err
	}()
	var err error
	select {
	case <-d.Gone():
		t.Error("the back-end channel was closed before the device had ended")
	case err = <-asked:
		t.Errorf("the connection was closed before the device had ended: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	close(dev.hold)
	<-closed
	if err == nil {
		err = <-asked
	}
	if err == nil {
		t.Error("a closed connection replied")
	}
}

// TestSuccessor: a front end that connects while another is served waits a little, in case that is being torn down, and
// is then served.
func TestSuccessor(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	m, m2 := memory(t), memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	c, err := frontend.Dial(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if f, err := c.GetFeatures(); err != nil || f&virtio.FeatureVersion1 == 0 {
		t.Fatal(f, err)
	}
	// While c is served, another connection is closed.
	c2, err := frontend.Dial(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	defer c2.Close()
	if _, err := c2.GetFeatures(); err == nil {
		t.Fatal("two front ends at once")
	}
	c.Close()
	d2 := open(t, frontend.Config{Path: path, Memory: m2})
	roundTrip(t, d2, m2, 0, "successor")
}

// TestMasking: exchanging the call descriptor gives one interrupt to the new one, so that none is lost in between.
func TestMasking(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := d.Client().SetVringCall(0, fd); err != nil {
		t.Fatal(err)
	}
	var b [8]byte
	if n, err := unix.Read(fd, b[:]); n != 8 || err != nil {
		t.Fatal(n, err)
	}
	if err := d.Client().SetVringCall(0, -1); err != nil {
		t.Fatal(err)
	}
	if err := d.Client().SetVringCall(0, d.Queue(0).CallFD()); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, d, m, 0, "unmasked")
}

// TestQEMUOrder replays the messages of QEMU 11.1 for a network device over a guest's boot, a pause, a reset and the
// next boot (recorded with a Linux guest). Memory and error descriptors are sent only once.
func TestQEMUOrder(t *testing.T) {
	dev := newEcho(2)
	path, _ := serve(t, dev)
	m := memory(t)
	c, err := frontend.Dial(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	must := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	kicks, call, errfd := [2]int{eventfd(t), eventfd(t)}, eventfd(t), eventfd(t)
	r := m.Regions()[0]
	features, err := c.GetFeatures()
	features &^= virtio.FeatureRingPacked // unless configured (packed=on)
	must(err, c.SetProtocolFeatures(vhostuser.ProtoMQ|vhostuser.ProtoReplyAck|vhostuser.ProtoBackendReq|
		vhostuser.ProtoResetDevice|vhostuser.ProtoConfigureMemSlots|vhostuser.ProtoStatus))
	_, err = c.QueueNum()
	must(err, c.SetOwner())
	for i := range 2 {
		must(c.SetVringCall(i, call), c.SetVringErr(i, errfd))
	}
	enable := func(on bool) {
		t.Helper()
		must(c.SetVringEnable(0, on), c.SetVringEnable(1, on))
	}
	must(c.ResetDevice())
	enable(true)
	must(c.ResetDevice())
	enable(true)
	enable(true)
	addStatus := func(bits uint8) {
		t.Helper()
		s, err := c.GetStatus()
		must(err, c.SetStatus(s|bits))
	}
	base := [2]uint32{}
	start := func(first bool) {
		t.Helper()
		dev.clearCalls()
		enable(true)
		must(c.SetFeatures(features))
		addStatus(virtio.StatusFeaturesOK)
		if first {
			must(c.AddMemReg(r, m.FD()))
		}
		for i := range 2 {
			at := r.UserAddr + uint64(i)<<14
			must(c.SetVringNum(i, 256), c.SetVringBase(i, base[i]),
				c.SetVringAddr(vhostuser.VringAddr{Index: uint32(i), Desc: at, Avail: at + 0x1000, Used: at + 0x2000}),
				c.SetVringKick(i, kicks[i]), c.SetVringCall(i, call))
		}
		addStatus(virtio.StatusAcknowledge | virtio.StatusDriver | virtio.StatusDriverOK)
		calls := dev.calls()
		if !slices.Contains(calls, "start 0") || !slices.Contains(calls, "start 1") || calls[len(calls)-1] != "status 15" {
			t.Fatalf("%q", calls)
		}
	}
	stop := func() {
		t.Helper()
		for i := range base {
			var err error
			base[i], err = c.GetVringBase(i)
			must(err)
		}
		must(c.SetStatus(0))
	}
	start(true)
	stop() // paused
	start(false)
	stop() // the guest reboots
	for range 4 {
		must(c.ResetDevice())
		enable(false)
		enable(true)
	}
	start(false)
	// The first error descriptor still works.
	avail, err := m.Bytes(translate.PA(r.GuestPA+0x1002), 2)
	must(err)
	avail[1] = 0x7f
	_, err = unix.Write(kicks[0], []byte{1, 0, 0, 0, 0, 0, 0, 0})
	must(err)
	fds := []unix.PollFd{{Fd: int32(errfd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 20000); n != 1 || err != nil {
		t.Fatal("no error reported", n, err)
	}
}
