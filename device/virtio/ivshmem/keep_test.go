package ivshmem

import (
	"bytes"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// lasting is a device whose state, its config space, another process can continue.
type lasting struct {
	*device
	broken  bool          // it does not continue any state
	hold    chan struct{} // if set, it continues once this is closed
	journal int
}

var _ virtio.Survivor = (*lasting)(nil)

func (l *lasting) Save(int) (state []byte, err error) {
	l.locked(func() { state = bytes.Clone(l.config[:]) })
	return state, nil
}

// configAt returns a byte of config space.
func (d *device) configAt(i int) (v byte) {
	d.locked(func() { v = d.config[i] })
	return v
}

func (l *lasting) Restore(state []byte) error {
	if l.hold != nil {
		<-l.hold
	}
	if l.broken || len(state) != len(l.config) {
		return errors.New("no state")
	}
	l.locked(func() { copy(l.config[:], state) })
	return nil
}

func (l *lasting) Revive(journal int) error {
	state := make([]byte, len(l.config))
	if n, err := unix.Pread(journal, state, 0); err != nil || n < len(state) {
		return errors.Join(errors.New("a short journal"), err)
	}
	return l.Restore(state)
}

func (l *lasting) Journal() (int, error) {
	fd, err := unix.MemfdCreate("journal", unix.MFD_CLOEXEC)
	if err == nil {
		_, err = unix.Pwrite(fd, l.config[:], 0)
	}
	l.journal = fd
	return fd, err
}

func (l *lasting) Disconnected() {
	if l.journal > 0 {
		_ = unix.Close(l.journal)
		l.journal = 0
	}
	l.device.Disconnected()
}

// process is a rig whose connections a keeper keeps, for the next one.
type process struct {
	*rig
	k      *testutil.Keeper
	path   string
	closed bool
}

func newProcess(t *testing.T) *process {
	return startProcess(t, filepath.Join(t.TempDir(), "hca"), testutil.NewKeeper(t), nil, &lasting{device: &device{}},
		testQueues)
}

func startProcess(t *testing.T, path string, k *testutil.Keeper, kept vhostuser.Kept, dev *lasting,
	queues int) *process {
	t.Helper()
	p := &process{rig: &rig{t: t, dev: dev.device}, k: k, path: path}
	var err error
	// Blameless: a process that is killed soon after its start is no reason to suspect the VM.
	cfg := vhostuser.Config{Path: path, Keeper: k, KeepAs: "hca/one", Kept: kept, Blameless: true}
	if p.srv, err = vhostuser.Offer(cfg, dev, 1); err != nil {
		t.Fatal(err)
	}
	if p.s, err = Listen(Config{Path: path, VirtioID: 38, Queues: queues, Device: p.srv, KeepAs: "ivshmem/one",
		Kept: kept}); err != nil {
		t.Fatal(err)
	}
	if left := kept.Drop(k); len(left) > 0 {
		t.Logf("dropped: %q", left)
	}
	t.Cleanup(func() {
		p.close()
		for _, fd := range p.mem {
			_ = unix.Close(fd)
		}
	})
	return p
}

func (p *process) close() {
	if p.closed {
		return
	}
	p.closed = true
	if err := errors.Join(p.s.Close(), p.srv.Close()); err != nil {
		p.t.Error(err)
	}
	if p.dev.connected() {
		p.t.Error("the device is connected after Close")
	}
}

// end ends the process, and returns what the next one finds. killed: without the process's doing.
func (p *process) end(killed bool) (*testutil.Keeper, vhostuser.Kept) {
	p.t.Helper()
	k := p.k
	if killed {
		k = p.k.Copy(p.t)
	}
	p.k.End()
	for _, r := range slices.Clone(p.s.regions) { // the network card's session ends first
		p.s.RemoveMemory(r.Region)
	}
	p.s.Run(false)
	p.close()
	return k, k.Pass()
}

// next starts the process after p.
func (p *process) next(killed bool, dev *lasting) *process {
	p.t.Helper()
	k, kept := p.end(killed)
	return startProcess(p.t.(*testing.T), p.path, k, kept, dev, testQueues)
}

// shareAgain reports p's memory to another process, as the network card's session does that it resumes.
func (p *process) shareAgain(next *process, x vhostuser.Region) {
	p.t.Helper()
	fd, err := unix.FcntlInt(uintptr(p.mem[0]), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	next.mem = append(next.mem, fd)
	next.s.AddMemory(x, fd)
}

// twice runs f for a process that ends in good order, and for one that is killed.
func twice(t *testing.T, f func(t *testing.T, killed bool)) {
	t.Run("handover", func(t *testing.T) { f(t, false) })
	t.Run("kill", func(t *testing.T) { f(t, true) })
}

// works checks that doorbells, interrupts and requests pass.
func (p *process) works(g *guest) {
	p.t.Helper()
	for i := range testQueues {
		q := p.dev.queue(i)
		if q == nil {
			p.t.Fatalf("queue %d does not run", i)
		}
		for rung(q.KickFD()) {
		}
		g.ring(1 + i)
		eventually(p.t, "the doorbell", func() bool { return rung(q.KickFD()) })
		rung(g.out[1+i])
		q.Interrupt()
		if !rung(g.out[1+i]) {
			p.t.Errorf("no interrupt of queue %d", i)
		}
	}
	g.want(driverOK, 0, driverOK)
}

func (p *process) runs() bool { return p.dev.queue(testQueues-1) != nil }

// The device goes on in the next process, and in the one after that, with QEMU none the wiser (CO-1, CO-2). When QEMU
// ends, nothing is kept any more.
func TestOutlives(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		p := newProcess(t)
		p.dev.config[7] = 99
		p.s.Run(true)
		x := p.addMemory(0)
		g := p.attach()
		g.start(1 << 12)
		p.works(g)
		for range 3 {
			for rung(g.out[0]) {
			}
			next := p.next(killed, &lasting{device: &device{}})
			eventually(t, "the device goes on", next.runs)
			eventually(t, "the driver is told to look", func() bool { return rung(g.out[0]) })
			q := next.dev.queue(0)
			p.shareAgain(next, x)
			next.s.Run(true)
			if next.dev.queue(0) != q || q.Size() != 64 {
				t.Error("the queue was started again")
			}
			next.works(g)
			if !next.s.Keeps() {
				t.Error("the session does not outlive this process")
			}
			if n := next.dev.countResets(); n > 0 || g.mem[offConfig+7] != 99 || g.get32(offGeneration)&1 != 0 {
				t.Errorf("%d resets, config %d, generation %d", n, g.mem[offConfig+7], g.get32(offGeneration))
			}
			p = next
		}
		p.s.Run(false)
		if p.runs() {
			t.Error("the queues run in a paused VM")
		}
		p.s.Run(true)
		p.works(g)
		g.want(0, 0, 0)
		g.start(1 << 12)
		p.works(g)
		g.detach()
		eventually(t, "nothing is kept", func() bool { return len(p.k.Names()) == 0 })
		p.attach().detach()
	})
}

// What the driver, the network card or QEMU does while no process serves is not lost.
func TestWhileAway(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		for _, x := range []struct {
			name string
			away func(g *guest)                  // between the processes
			then func(p *process, had func())    // had: the network card reports the memory that it had
			want func(p *process, g *guest) bool // comes true
		}{
			{"a request", func(g *guest) {
				g.n++
				word(g.mem[offDriverStatus:]).Store(0)
				word(g.mem[offRequest:]).Store(g.n)
				g.ring(0)
			}, func(p *process, had func()) { had(); p.s.Run(true) },
				func(p *process, g *guest) bool {
					return g.get32(offAnswer) == g.n && g.get32(offStatus) == 0 && !p.runs()
				}},
			{"the VM is paused", nil, func(p *process, had func()) { had(); p.s.Run(false) },
				func(p *process, g *guest) bool { return g.get32(offStatus) == driverOK && p.s.settled() && !p.runs() }},
			{"the machine is reset", nil, func(p *process, had func()) { had(); p.s.Run(false); p.s.MachineReset() },
				func(p *process, g *guest) bool { return g.get32(offStatus) == 0 && !p.runs() }},
			{"memory is withdrawn", nil, func(p *process, had func()) { p.addMemory(8 << 20); p.s.Run(true) },
				func(p *process, g *guest) bool { return p.s.settled() && !p.runs() }},
			{"QEMU ends", func(g *guest) { _ = g.c.Close() }, func(p *process, had func()) {},
				func(p *process, g *guest) bool { return len(p.k.Names()) == 0 && !p.dev.connected() }},
		} {
			t.Run(x.name, func(t *testing.T) {
				p := newProcess(t)
				p.s.Run(true)
				r := p.addMemory(0)
				g := p.attach()
				defer g.detach()
				g.start(1 << 12)
				k, kept := p.end(killed)
				if x.away != nil {
					x.away(g)
				}
				next := startProcess(t, p.path, k, kept, &lasting{device: &device{}}, testQueues)
				x.then(next, func() { p.shareAgain(next, r) })
				eventually(t, x.name, func() bool { return x.want(next, g) })
			})
		}
	})
}

// settled reports whether no session is being resumed.
func (s *Server) settled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now == nil || s.now.ready
}

// A device of a paused VM goes on when the VM does.
func TestPausedThroughout(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		p := newProcess(t)
		p.s.Run(true)
		x := p.addMemory(0)
		g := p.attach()
		defer g.detach()
		g.start(1 << 12)
		p.s.Run(false)
		next := p.next(killed, &lasting{device: &device{}})
		p.shareAgain(next, x)
		eventually(t, "resumed", next.s.settled)
		if next.runs() || g.get32(offStatus) != driverOK {
			t.Fatalf("the queues run: %v, status %#x", next.runs(), g.get32(offStatus))
		}
		next.s.Run(true)
		next.works(g)
	})
}

// A device that does not go on has no driver any more: the driver is told to look, and begins anew.
func TestBeginsAnew(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		p := newProcess(t)
		p.s.Run(true)
		x := p.addMemory(0)
		g := p.attach()
		defer g.detach()
		g.start(1 << 12)
		for rung(g.out[0]) {
		}
		next := p.next(killed, &lasting{device: &device{}, broken: true})
		eventually(t, "the driver is told to look", func() bool { return rung(g.out[0]) })
		if s := g.get32(offStatus); s != 0 || next.runs() {
			t.Errorf("status %#x, the queues run: %v", s, next.runs())
		}
		p.shareAgain(next, x)
		next.s.Run(true)
		g.start(1 << 12)
		next.works(g)
	})
}

// Parts that are missing, wrong, or of a device with another number of queues: QEMU's connection ends, the driver finds
// that its device has ended, and the next QEMU is served.
func TestNotResumed(t *testing.T) {
	for name, spoil := range map[string]func(k *testutil.Keeper) (queues int){
		"no connection": func(k *testutil.Keeper) int { k.Drop("ivshmem/one"); return testQueues },
		"no parts":      func(k *testutil.Keeper) int { k.Drop("ivshmem/one/parts"); return testQueues },
		"wrong parts": func(k *testutil.Keeper) int {
			k.Drop("ivshmem/one/parts")
			if dup, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0); err == nil {
				_ = k.Keep("ivshmem/one/parts", dup)
				_ = unix.Close(dup)
			}
			return testQueues
		},
		"no device":    func(k *testutil.Keeper) int { k.Drop("hca/one/state"); return testQueues },
		"other queues": func(k *testutil.Keeper) int { return testQueues - 1 },
	} {
		t.Run(name, func(t *testing.T) {
			p := newProcess(t)
			p.s.Run(true)
			p.addMemory(0)
			g := p.attach()
			defer g.detach()
			g.start(1 << 12)
			k, kept := p.end(false)
			for n, fd := range kept {
				_ = unix.Close(fd)
				delete(kept, n)
			}
			queues := spoil(k)
			next := startProcess(t, p.path, k, k.Pass(), &lasting{device: &device{}}, queues)
			if _, err := g.c.Read(make([]byte, 1)); err == nil && name != "no connection" {
				t.Error("QEMU's connection lives")
			}
			if name == "no device" || name == "other queues" {
				eventually(t, "the driver learns of it", func() bool { return g.get32(offAnswer) == ended })
			}
			eventually(t, "nothing is kept", func() bool { return len(next.k.Names()) == 0 })
			if queues == testQueues {
				next.attach().detach()
			}
		})
	}
}

// A device with a socket of its own, too, has one front end at a time, and goes on with the one that it had.
func TestEitherSocket(t *testing.T) {
	k, dir := testutil.NewKeeper(t), t.TempDir()
	serve := func(kept vhostuser.Kept) (*vhostuser.Server, *Server) {
		t.Helper()
		_, inner := kept["ivshmem/one"]
		cfg := vhostuser.Config{Path: filepath.Join(dir, "hca"), Keeper: k, KeepAs: "hca/one", Kept: kept, Inner: inner}
		srv, err := vhostuser.Listen(cfg, &lasting{device: &device{}}, 1)
		if err != nil {
			t.Fatal(err)
		}
		s, err := Listen(Config{Path: filepath.Join(dir, "ivshmem"), VirtioID: 38, Queues: testQueues, Device: srv,
			KeepAs: "ivshmem/one", Kept: kept})
		if err != nil {
			t.Fatal(err)
		}
		if left := kept.Drop(k); len(left) > 0 {
			t.Errorf("dropped: %q", left)
		}
		return srv, s
	}
	end := func(srv *vhostuser.Server, s *Server) vhostuser.Kept {
		t.Helper()
		k.End()
		if err := errors.Join(s.Close(), srv.Close()); err != nil {
			t.Error(err)
		}
		return k.Pass()
	}
	srv, s := serve(nil)
	c, err := frontend.Dial(t.Context(), filepath.Join(dir, "hca"))
	if err == nil {
		_, err = c.GetFeatures()
	}
	if err != nil {
		t.Fatal(err)
	}
	q, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(dir, "ivshmem")})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := q.Read(make([]byte, 8)); n > 0 || err == nil || s.Attached() {
		t.Errorf("a second front end: %d bytes, %v", n, err)
	}
	_ = q.Close()
	srv, s = serve(end(srv, s))
	if _, err := c.GetFeatures(); err != nil {
		t.Errorf("the front end in another process: %v", err)
	}
	_ = c.Close()
	eventually(t, "nothing is kept", func() bool { return len(k.Names()) == 0 })
	g := (&rig{t: t, s: s}).attach()
	g.want(0, 0, 0)
	srv, s = serve(end(srv, s))
	g.want(0, 0, 0)
	if !s.Attached() || !s.Keeps() {
		t.Errorf("attached: %v, kept: %v", s.Attached(), s.Keeps())
	}
	g.detach()
	eventually(t, "nothing is kept", func() bool { return len(k.Names()) == 0 })
	end(srv, s)
}

// A QEMU whose device cannot be connected is sent away.
func TestNoDevice(t *testing.T) {
	p := newProcess(t)
	if err := p.srv.Close(); err != nil {
		t.Fatal(err)
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: p.path})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}
