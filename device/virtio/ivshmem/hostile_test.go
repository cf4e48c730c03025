package ivshmem

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

func dial(t testing.TB, r *rig) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.s.cfg.Path})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func descriptors(t testing.TB) int {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(es)
}

// within fails the test if f does not return. A test that waits for a lock that a hostile process holds is stuck.
func within(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("%s does not return", what)
	}
}

// accessible reports whether the device can access guest memory at pa.
func (d *device) accessible(pa uint64) (is bool) {
	d.locked(func() {
		if d.conn != nil {
			_, a := d.conn.Space().Host(translate.PA(pa), 8)
			is = a.OK()
		}
	})
	return is
}

// all reports whether all queues run, and whether none does.
func (d *device) all() (run, stand bool) {
	n := 0
	for i := range testQueues {
		if d.queue(i) != nil {
			n++
		}
	}
	return n == testQueues, n == 0
}

// The session of the VM's network card has guest memory and pauses; the device follows it before QEMU gets its reply.
func TestNetworkCard(t *testing.T) {
	r := newRig(t)
	path := filepath.Join(t.TempDir(), "net")
	srv, err := vhostuser.Listen(vhostuser.Config{Path: path, Follower: r.s}, &device{}, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	g := r.attach()
	defer g.detach()
	const low, high, size = 0, 1 << 32, 1 << 20
	memory := func(pa uint64) *frontend.Memory {
		m, err := frontend.NewMemory(frontend.Range{PA: translate.PA(pa), Size: size})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Close)
		return m
	}
	m, plugged := memory(low), memory(high)
	rings := uint64(low + size/2)
	g.start(rings)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for range 2 { // QEMU's network card reconnects, and the HCA's driver has not noticed
		if _, none := r.dev.all(); !none {
			t.Fatal("a queue runs, but the network card is not connected")
		}
		d, err := frontend.Open(ctx, frontend.Config{Path: path, Memory: m})
		if err != nil {
			t.Fatal(err)
		}
		if run, _ := r.dev.all(); !run {
			t.Fatal("a queue does not run, but those of the network card do")
		}
		for range 3 {
			for i := range testQueues {
				if run, _ := r.dev.all(); !run {
					t.Fatal("a queue stands, but the VM is not paused")
				}
				if err := d.StopQueue(i); err != nil {
					t.Fatal(err)
				}
			}
			if _, none := r.dev.all(); !none {
				t.Fatal("a queue runs in a paused VM")
			}
			for i := range testQueues {
				if err := d.StartQueue(i); err != nil {
					t.Fatal(err)
				}
			}
		}
		x := plugged.Regions()[0]
		if err := d.Client().AddMemReg(x, plugged.FD()); err != nil {
			t.Fatal(err)
		}
		g.start(high)
		if run, _ := r.dev.all(); !run {
			t.Fatal("a queue does not run in memory that was hot-plugged")
		}
		if err := d.Client().RemMemReg(x); err != nil {
			t.Fatal(err)
		}
		if _, none := r.dev.all(); !none || r.dev.accessible(high) {
			t.Fatal("the device has memory that was withdrawn")
		}
		g.start(rings)
		if err := d.Close(); err != nil { // waits for the back end
			t.Fatal(err)
		}
		if r.dev.accessible(low) {
			t.Fatal("the device has the memory of a network card that has gone")
		}
	}
}

// A machine that is reset has another driver in its memory: queues that stood then do not run again by themselves.
func TestMachineReset(t *testing.T) {
	r := newRig(t)
	path := filepath.Join(t.TempDir(), "net")
	srv, err := vhostuser.Listen(vhostuser.Config{Path: path, Follower: r.s, MachineReset: r.s.MachineReset}, &device{}, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	r.s.MachineReset() // without a QEMU
	g := r.attach()
	defer g.detach()
	m, err := frontend.NewMemory(frontend.Range{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	d, err := frontend.Open(ctx, frontend.Config{Path: path, Memory: m})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	g.start(1 << 19)
	r.s.MachineReset()
	if run, _ := r.dev.all(); !run {
		t.Fatal("a queue of a running driver has stopped")
	}
	if err := d.Client().ResetDevice(); err != nil { // its rings stop, so the HCA's do
		t.Fatal(err)
	}
	before := r.dev.countResets()
	if s := g.get32(offStatus); s != 0 || before < 2 || !rung(g.out[0]) {
		t.Errorf("device status %#x after %d resets, want 0 after 2, and an interrupt", s, before)
	}
	r.s.Run(true) // the next kernel's network card
	if _, none := r.dev.all(); !none {
		t.Fatal("a queue runs in the next kernel's memory")
	}
	g.start(1 << 19)
	if run, _ := r.dev.all(); !run {
		t.Error("the next driver's queues do not run")
	}
	r.s.Run(false)
}

// A driver that announces requests without waiting for answers: the newest one counts, the VM's network card waits for
// one at most, and the VM's account has the work.
func TestRequestFlood(t *testing.T) {
	r := newRig(t)
	r.addMemory(0)
	work := worktime.New(worktime.Config{Exact: true})
	r.s.mu.Lock()
	r.s.cfg.Work = work
	r.s.mu.Unlock()
	g := r.attach()
	defer g.detach()
	g.start(0)
	g.want(0, 0, 0)
	used, resets := work.Status().Messages, r.dev.countResets()
	stop := make(chan struct{})
	var flood sync.WaitGroup
	flood.Add(1)
	go func() {
		defer flood.Done()
		for i := uint32(0); ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			word(g.mem[offDriverStatus:]).Store([]uint32{0, chosen, driverOK}[i%3])
			word(g.mem[offRequest:]).Add(1)
			g.ring(0)
		}
	}()
	within(t, "a pause during the flood", func() {
		for range 50 {
			r.s.Run(true)
			r.s.Run(false)
			if _, none := r.dev.all(); !none {
				t.Error("a queue runs in a paused VM")
			}
		}
	})
	eventually(t, "the flood is obeyed", func() bool { return r.dev.countResets() > resets+10 })
	close(stop)
	flood.Wait()
	g.n = g.get32(offRequest)
	g.want(0, 0, 0)
	last := r.dev.countResets()
	g.ring(0) // without a request
	g.ring(0)
	g.want(1, 0, 0) // comes after those
	if n := r.dev.countResets(); n != last {
		t.Errorf("%d resets without a request", n-last)
	}
	if now := work.Status().Messages; now <= used {
		t.Errorf("the account has %v of work, as before the flood", now)
	}
}

// A process that opens the socket and never reads holds up nobody.
func TestSilentFrontEnd(t *testing.T) {
	r := newRig(t)
	before := 0
	for i := range 3 {
		c := dial(t, r)
		eventually(t, "the device is connected", r.dev.connected)
		within(t, "the VM's network card", func() {
			x := r.addMemory(uint64(i+1) << 20)
			r.s.Run(true)
			r.s.Run(false)
			r.s.RemoveMemory(x)
		})
		_ = c.Close()
		eventually(t, "the device is disconnected", func() bool { return !r.dev.connected() })
		for range 50 { // that go at once
			_ = dial(t, r).Close()
		}
		eventually(t, "a proper QEMU is served", func() bool {
			c := dial(t, r)
			_, _, err := receive(c)
			_ = c.Close()
			return err == nil
		})
		eventually(t, "the device is disconnected", func() bool { return !r.dev.connected() })
		eventually(t, "the session has ended", r.idle)
		g := r.attach()
		g.want(0, 0, 0)
		if n := descriptors(t) - len(r.mem); i == 0 {
			before = n
		} else if n != before {
			t.Errorf("%d descriptors after %d silent front ends, %d after the first one", n, i+1, before)
		}
		g.detach()
		eventually(t, "the session has ended", r.idle)
	}
}

// idle reports whether no QEMU is attached.
func (r *rig) idle() bool {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return r.s.now == nil
}

// The device's connection ends under way: QEMU's ends, too, and no next one is served; guest and network card go on.
func TestDeviceGone(t *testing.T) {
	r := newRig(t)
	r.addMemory(0)
	g := r.attach()
	defer g.detach()
	g.start(0)
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for _, f := range []func(){
		func() { r.s.Run(true); r.s.Run(false) },
		func() { word(g.mem[offRequest:]).Add(1); g.ring(0) },
	} {
		busy.Add(1)
		go func() {
			defer busy.Done()
			for {
				select {
				case <-stop:
					return
				default:
					f()
				}
			}
		}()
	}
	if err := r.srv.Close(); err != nil {
		t.Fatal(err)
	}
	within(t, "QEMU's connection", func() {
		if n, err := g.c.Read(make([]byte, 1)); n > 0 || err == nil {
			t.Error("it goes on")
		}
	})
	close(stop)
	busy.Wait()
	eventually(t, "the session has ended", r.idle)
	if r.dev.connected() {
		t.Error("the device is connected")
	}
}

// fragile is a device with a bug.
type fragile struct{ *device }

func (fragile) StartQueue(int, *virtq.Queue) error { panic("a bug") }

// A bug of the device ends one QEMU's attachment, and the next one is served.
func TestBug(t *testing.T) {
	d := &device{}
	r := newRigOf(t, d, fragile{d})
	s := r.s
	r.addMemory(0)
	for range 2 {
		s.Run(false)
		g := r.attach()
		g.start(0)
		s.Run(true)
		within(t, "QEMU's connection", func() {
			if n, err := g.c.Read(make([]byte, 1)); n > 0 || err == nil {
				t.Error("it goes on")
			}
		})
		g.detach()
		eventually(t, "the session has ended", r.idle)
		eventually(t, "the device is disconnected", func() bool { return !d.connected() })
	}
}

// slow is a device that takes its time to let go of guest memory.
type slow struct {
	*device
	leaves, may chan struct{}
}

func (s slow) Disconnected() {
	close(s.leaves)
	<-s.may
	s.device.Disconnected()
}

// A driver whose device ends is told so, but not before the device has let go of guest memory.
func TestEnded(t *testing.T) {
	for name, end := range map[string]func(r *rig, g *guest){
		"server": func(r *rig, _ *guest) { _ = r.s.Close() },
		"device": func(r *rig, _ *guest) { _ = r.srv.Close() },
		"QEMU":   func(_ *rig, g *guest) { _ = g.c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			d := slow{&device{}, make(chan struct{}), make(chan struct{})}
			r := newRigOf(t, d.device, d)
			r.addMemory(0)
			r.s.Run(true)
			g := r.attach()
			defer g.detach()
			g.start(0)
			done := make(chan struct{})
			go func() { defer close(done); end(r, g) }()
			<-d.leaves
			if n := g.get32(offAnswer); n == ended {
				t.Error("the driver is told while the device has its memory")
			}
			close(d.may)
			eventually(t, "the driver is told", func() bool { return g.get32(offAnswer) == ended })
			if d.connected() {
				t.Error("the device has the driver's memory")
			}
			<-done
		})
	}
}

// A bug in this package ends one QEMU's attachment, and not the process.
func TestContained(t *testing.T) {
	r := newRig(t)
	g := r.attach()
	g.want(0, 0, 0)
	le.PutUint64(g.mem[offDriverFeat:], virtio.FeatureVersion1)
	g.want(chosen, 0, chosen)
	g.setQueue(0, 0, 1<<14, 2<<14, 64)
	r.s.mu.Lock()
	out := r.s.now.out
	r.s.now.out = nil // what a bug would leave
	r.s.mu.Unlock()
	word(g.mem[offDriverStatus:]).Store(driverOK)
	word(g.mem[offRequest:]).Add(1)
	g.ring(0)
	eventually(t, "the session has ended", r.idle)
	for _, fd := range out {
		_ = unix.Close(fd)
	}
	g.detach()
	eventually(t, "the device is disconnected", func() bool { return !r.dev.connected() })
	g = r.attach()
	g.want(0, 0, 0)
	g.detach()
}

// A guest that writes the device's part does not change what the device writes there.
func TestOwnPart(t *testing.T) {
	r := newRig(t)
	g := r.attach()
	defer g.detach()
	before := g.get32(offGeneration)
	for n := uint32(1); n < 5; n++ {
		for i := range offRequest {
			g.mem[i] = 0xa5
		}
		g.want(0, 0, 0)
		if got := g.get32(offGeneration); got != before+2*n {
			t.Errorf("generation %d after %d changes, began at %d", got, n, before)
		}
	}
}

// QEMU shares BAR 2 as a part of guest memory, too, so rings may be there: over the registers, also the device's part.
func TestRingsInRegisters(t *testing.T) {
	r := newRig(t)
	r.addMemory(0)
	r.s.Run(true)
	g := r.attach()
	defer g.detach()
	x := vhostuser.Region{GuestPA: 1 << 32, Size: barSize, UserAddr: 1 << 40}
	r.s.mu.Lock()
	fd := r.s.now.bar.fd
	r.s.mu.Unlock()
	r.s.AddMemory(x, fd)
	for off := uint64(0); off < offQueue; off += 16 {
		g.want(0, 0, 0)
		g.want(chosen, 0, chosen&^virtio.StatusFeaturesOK) // without VERSION_1
		le.PutUint64(g.mem[offDriverFeat:], virtio.FeatureVersion1)
		g.want(chosen, 0, chosen)
		g.setQueue(0, x.GuestPA+off, x.GuestPA+off, x.GuestPA+off, maxSize)
		g.want(driverOK, 0, driverOK)
		q := r.dev.queue(0)
		if q == nil {
			t.Fatalf("a ring at offset %d of BAR 2 does not run", off)
		}
		le.PutUint64(g.mem[offDriverFeat:], 0)
	}
	r.s.RemoveMemory(x) // the guest moves the BAR
	if r.dev.queue(0) != nil {
		t.Error("a ring runs in a BAR that has moved")
	}
	g.want(0, 0, 0)
	g.start(0)
	if r.dev.queue(0) == nil {
		t.Error("a proper driver has no device afterwards")
	}
}

// fuzzRequests bounds the requests of one input.
const fuzzRequests = 16

// FuzzRegisters writes all of BAR 2 that has a meaning, request after request. Each is answered, and afterwards a
// proper driver finds a device.
func FuzzRegisters(f *testing.F) {
	r := newRig(f)
	r.addMemory(0)
	r.s.Run(true)
	g := r.attach()
	f.Cleanup(g.detach)
	image := make([]byte, offConfig+maxConfig)
	le.PutUint32(image[offDriverStatus:], driverOK)
	le.PutUint64(image[offDriverFeat:], virtio.FeatureVersion1|testFeature)
	for i := range MaxQueues {
		q := image[offQueue+i*queueLen:]
		le.PutUint64(q[8:], 1<<14)
		le.PutUint64(q[16:], 2<<14)
		le.PutUint16(q[24:], 64)
	}
	f.Add(image)
	le.PutUint32(image[offDriverStatus:], chosen)
	f.Add(append(image, image...))
	f.Add(make([]byte, 4))
	f.Fuzz(func(t *testing.T, data []byte) {
		g.t, r.t = t, t
		for n := 0; n < fuzzRequests && len(data) > 0; n++ {
			k := min(len(data), len(image))
			for i, b := range data[:k] {
				if i < offAnswer || i >= offAnswer+4 && i < offRequest || i >= offRequest+4 {
					g.mem[i] = b
				}
			}
			data = data[k:]
			g.ask(g.get32(offDriverStatus))
		}
		clear(g.mem[offQueue:driverEnd])
		g.start(0)
		if run, _ := r.dev.all(); !run {
			t.Error("a proper driver has no device afterwards")
		}
	})
}
