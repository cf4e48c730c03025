package ivshmem

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/translate"
)

// host is a rig on a host to which a VM can come, with a guest at its device.
type host struct {
	*rig
	dev *lasting
	g   *guest
}

// newHost attaches a VM of which nothing has run here.
func newHost(t *testing.T) *host {
	t.Helper()
	l := &lasting{device: &device{}}
	h := &host{newRigOf(t, l.device, l), l, nil}
	h.g = h.attach()
	h.addMemory(0)
	t.Cleanup(h.g.detach)
	return h
}

// comes brings the VM of another host here, as QEMU does when it has stopped there: BAR 2 is copied, the VM starts.
func (h *host) comes(from *host) {
	h.t.Helper()
	for _, fd := range h.g.out {
		rung(fd)
	}
	copy(h.g.mem, from.g.mem)
	h.g.n = from.g.n
	h.s.Run(true)
}

func (h *host) works() {
	h.t.Helper()
	(&process{rig: h.rig}).works(h.g)
}

// The device goes on on another host, with its features, its queues where they were, and its own state, and can go back
// (CO-5).
func TestStateMoves(t *testing.T) {
	a := newHost(t)
	a.dev.locked(func() { a.dev.config[7] = 99 })
	a.s.Run(true)
	a.g.start(1 << 12)
	a.works()
	for i := range 3 {
		b := newHost(t)
		if _, err := a.s.now.dev.SaveState(); err == nil {
			t.Error("the state of a device that runs was saved")
		}
		a.s.Run(false)
		b.comes(a)
		for i, fd := range b.g.out {
			if !rung(fd) {
				t.Errorf("no interrupt of vector %d", i)
			}
		}
		b.works()
		if c := b.dev.configAt(7); c != 99 {
			t.Errorf("move %d: config space has %d", i, c)
		}
		b.dev.locked(func() {
			if b.dev.features&testFeature == 0 {
				t.Errorf("move %d: features %#x", i, b.dev.features)
			}
		})
		if got := b.g.mem[offConfig+7]; got != 99 {
			t.Errorf("the driver sees %d in config space", got)
		}
		a = b
	}
	// The migration is cancelled: the VM runs here again.
	q := a.dev.queue(0)
	a.s.Run(false)
	a.s.Run(true)
	a.works()
	if a.dev.queue(0) == q || a.dev.countResets() > 0 {
		t.Errorf("the queue has not begun anew, or the device has: %d resets", a.dev.countResets())
	}
	// The old state does not come back.
	a.g.want(0, 0, 0)
	resets := a.dev.countResets()
	a.s.Run(false)
	a.s.Run(true)
	if a.dev.queue(0) != nil || a.dev.countResets() != resets {
		t.Error("the device runs without a driver")
	}
}

// A request that was on its way when the VM stopped is handled where it arrives.
func TestRequestMoves(t *testing.T) {
	a, b := newHost(t), newHost(t)
	a.s.Run(true)
	a.g.start(1 << 12)
	a.s.Run(false)
	a.g.n++
	word(a.g.mem[offDriverStatus:]).Store(0)
	word(a.g.mem[offRequest:]).Store(a.g.n) // and vector 0 is not rung
	b.comes(a)
	eventually(t, "an answer", func() bool { return b.g.get32(offAnswer) == a.g.n })
	if b.dev.queue(0) != nil || b.g.get32(offStatus) != 0 {
		t.Errorf("status %#x after a reset", b.g.get32(offStatus))
	}
}

// Where no state comes that is right, the device begins anew, and the driver can tell (CO-7).
func TestStateRefused(t *testing.T) {
	for name, x := range map[string]struct {
		damage func(state []byte)
		broken bool
	}{
		"other version":     {damage: func(s []byte) { s[offStateVersion]++ }},
		"too long":          {damage: func(s []byte) { le.PutUint32(s[offStateLen:], maxState+1) }},
		"longest":           {damage: func(s []byte) { le.PutUint32(s[offStateLen:], maxState) }},
		"huge":              {damage: func(s []byte) { le.PutUint32(s[offStateLen:], 0xffffffff) }},
		"another byte":      {damage: func(s []byte) { s[stateHeader]++ }},
		"not running":       {damage: func(s []byte) { le.PutUint32(s[offStateStatus:], chosen) }},
		"unknown status":    {damage: func(s []byte) { le.PutUint32(s[offStateStatus:], driverOK|1<<9) }},
		"unknown feature":   {damage: func(s []byte) { le.PutUint64(s[offStateFeatures:], 1<<60) }},
		"refused feature":   {damage: func(s []byte) { s[offStateFeatures] |= badFeature }},
		"refused by device": {broken: true},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newHost(t), newHost(t)
			b.dev.broken = x.broken
			a.s.Run(true)
			a.g.start(1 << 12)
			a.s.Run(false)
			if x.damage != nil {
				x.damage(a.g.mem[regsSize:])
			}
			b.comes(a)
			if b.dev.queue(0) != nil || b.g.get32(offStatus) != 0 || !rung(b.g.out[0]) {
				t.Errorf("status %#x", b.g.get32(offStatus))
			}
			b.g.start(1 << 12)
			b.works()
		})
	}
	t.Run("queue", func(t *testing.T) { // the driver's part is the guest's
		a, b := newHost(t), newHost(t)
		a.s.Run(true)
		a.g.start(1 << 12)
		a.s.Run(false)
		a.g.setQueue(1, 1, 2, 4, 64)
		b.comes(a)
		if b.dev.queue(0) != nil || b.g.get32(offStatus) != 0 {
			t.Errorf("status %#x", b.g.get32(offStatus))
		}
	})
}

// A VM whose state did not come, as no vnicd ran on its host when it stopped there, has a driver that can tell.
func TestStateMissing(t *testing.T) {
	a, b := newHost(t), newHost(t)
	a.s.Run(true)
	a.g.start(1 << 12)
	before := b.g.get32(offGeneration)
	b.comes(a) // while a runs
	if b.dev.queue(0) != nil || b.g.get32(offStatus) != 0 || !rung(b.g.out[0]) || b.g.get32(offGeneration) == before {
		t.Errorf("status %#x, generation %d", b.g.get32(offStatus), b.g.get32(offGeneration))
	}
	b.g.start(1 << 12)
	b.works()
}

// The destination's vnicd ends before the VM runs there, also while QEMU copies BAR 2: the next one goes on.
func TestStateArrivesAtNextProcess(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		a := newHost(t)
		a.dev.locked(func() { a.dev.config[7] = 99 })
		a.s.Run(true)
		a.g.start(1 << 12)
		p := newProcess(t)
		x := p.addMemory(0)
		g := p.attach()
		copy(g.mem, a.g.mem)
		g.n = a.g.n
		next := p.next(killed, &lasting{device: &device{}})
		eventually(t, "the session goes on", func() bool {
			next.s.mu.Lock()
			defer next.s.mu.Unlock()
			return next.s.live() != nil
		})
		p.shareAgain(next, x)
		a.s.Run(false)
		copy(g.mem, a.g.mem)
		next.s.Run(true)
		next.works(g)
		if c := next.dev.configAt(7); c != 99 {
			t.Errorf("config space has %d", c)
		}
	})
}

// A device that a process has continued moves, too.
func TestStateMovesAfterProcess(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		p := newProcess(t)
		p.s.Run(true)
		x := p.addMemory(0)
		g := p.attach()
		g.start(1 << 12)
		next := p.next(killed, &lasting{device: &device{}})
		eventually(t, "the device goes on", next.runs)
		p.shareAgain(next, x)
		next.s.Run(true)
		next.works(g)
		next.s.Run(false)
		b := newHost(t)
		b.comes(&host{rig: next.rig, g: g})
		b.works()
	})
}

// A VM that stops while its device is being continued waits for it, and takes the state with it (CO-5).
func TestStateMovesWhileResumed(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		p := newProcess(t)
		p.dev.config[7] = 99
		p.s.Run(true)
		x := p.addMemory(0)
		g := p.attach()
		g.start(1 << 12)
		hold := make(chan struct{})
		next := p.next(killed, &lasting{device: &device{}, hold: hold})
		p.shareAgain(next, x)
		next.s.Run(true)
		time.AfterFunc(20*time.Millisecond, func() { close(hold) })
		next.s.Run(false)
		if next.runs() {
			t.Error("the queues run in a paused VM")
		}
		b := newHost(t)
		b.comes(&host{rig: next.rig, g: g})
		b.works()
		if c := b.dev.configAt(7); c != 99 {
			t.Errorf("config space has %d", c)
		}
	})
}

// A vnicd that ends, for an upgrade of all VMs, does not wait with such a VM: the next one goes on.
func TestEndsWhileResumed(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		p := newProcess(t)
		p.s.Run(true)
		p.addMemory(0)
		g := p.attach()
		defer g.detach()
		g.start(1 << 12)
		hold := make(chan struct{})
		next := p.next(killed, &lasting{device: &device{}, hold: hold})
		defer close(hold) // before next is closed
		next.s.standTimeout = time.Hour
		time.AfterFunc(20*time.Millisecond, next.k.End)
		next.s.Run(false)
		if next.s.settled() {
			t.Error("the session was resumed: nothing waited")
		}
	})
}

// A driver that is beginning, or has gone, while a process ends is none that came from elsewhere: it goes on.
func TestNoStateAfterProcess(t *testing.T) {
	for _, status := range []uint32{chosen, 0} {
		twice(t, func(t *testing.T, killed bool) {
			p := newProcess(t)
			p.s.Run(true)
			x := p.addMemory(0)
			g := p.attach()
			g.start(1 << 12)
			g.want(0, 0, 0)
			g.want(status, 0, status)
			next := p.next(killed, &lasting{device: &device{}})
			next.s.Run(true) // as a rule before the session goes on
			p.shareAgain(next, x)
			eventually(t, "the session goes on", func() bool {
				next.s.mu.Lock()
				defer next.s.mu.Unlock()
				return next.s.live() != nil
			})
			if got := g.get32(offStatus); got != status {
				t.Errorf("status %#x became %#x", status, got)
			}
			g.want(chosen, 0, chosen)
			for i := range testQueues {
				at := uint64(1<<12 + i*3<<14)
				g.setQueue(i, at, at+1<<14, at+2<<14, 64)
			}
			g.want(driverOK, 0, driverOK)
			next.works(g)
		})
	}
}

// A driver that puts state there itself, after it has spoken to the device, has no use of it.
func TestStateOfRunningDevice(t *testing.T) {
	a, b := newHost(t), newHost(t)
	a.dev.locked(func() { a.dev.config[7] = 99 })
	a.s.Run(true)
	a.g.start(1 << 12)
	a.s.Run(false)
	b.s.Run(true)
	b.g.start(1 << 12)
	b.s.Run(false)
	copy(b.g.mem[regsSize:], a.g.mem[regsSize:])
	b.s.Run(true)
	b.works()
	if c := b.dev.configAt(7); c != 0 || le.Uint64(b.g.mem[regsSize:]) != 0 {
		t.Errorf("config space has %d, state %#x", c, le.Uint64(b.g.mem[regsSize:]))
	}
}

// newLogFile makes the file of a log of that many bytes.
func newLogFile(t *testing.T, size uint64) int {
	t.Helper()
	file, err := unix.MemfdCreate("log", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(file, int64(size))
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(file), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(file) })
	return file
}

// isMarked reports whether a log says that a page was written to.
func isMarked(t *testing.T, file int, pa uint64) bool {
	t.Helper()
	b := make([]byte, 1)
	if _, err := unix.Pread(file, b, int64(pa/4096/8)); err != nil {
		t.Fatal(err)
	}
	return b[0]>>(pa/4096%8)&1 != 0
}

// While the front end of the network card wants a log, the device's writes are logged, and so is its state in BAR 2.
func TestStateLogged(t *testing.T) {
	h := newHost(t)
	h.s.Run(true)
	h.g.start(1 << 12)
	const barPA = 0x80000000
	fd, err := unix.FcntlInt(uintptr(h.s.now.bar.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	h.s.AddMemory(vhostuser.Region{GuestPA: barPA, Size: barSize, UserAddr: 0x7e0000000000}, fd)

	base := vhostuser.LogBase{Size: (barPA + barSize) / 4096 / 8}
	file := newLogFile(t, base.Size)
	marked := func(pa uint64) bool { return isMarked(t, file, pa) }
	h.s.Log(base, file)
	h.works()
	q := h.dev.queue(0)
	tok := q.Space().Epochs().Enter(translate.ByLoop(0))
	m := q.Space().Write(0x9000, []byte("data"))
	q.Space().Epochs().Leave(0, tok)
	if !m.OK() {
		t.Fatal(m)
	}
	h.s.Run(false)
	for _, x := range []struct {
		pa   uint64
		want bool
	}{{0x9000, true}, {0xa000, false}, {barPA, true}, {barPA + regsSize, true}, {barPA + barSize - 4096, false}} {
		if got := marked(x.pa); got != x.want {
			t.Errorf("%#x is marked: %v", x.pa, got)
		}
	}
	// The VM runs on. What was copied of the state is removed wherever it is.
	if _, err := unix.Pwrite(file, make([]byte, 4096), int64(barPA/4096/8)); err != nil {
		t.Fatal(err)
	}
	h.s.Run(true)
	if !marked(barPA+regsSize) || marked(barPA+barSize-4096) {
		t.Error("the removal of the state is not marked, or more is")
	}
	h.s.Log(vhostuser.LogBase{}, -1)
	h.works()
	if l := h.s.writes; l != nil {
		t.Error("there is a log")
	}
}

// A process that ends while the device's writes are logged: the next one logs what it writes, and says that anything
// may have been written before. A keeper has the log once, as the network card's.
func TestLogContinues(t *testing.T) {
	twice(t, func(t *testing.T, killed bool) {
		p := newProcess(t)
		p.s.Run(true)
		x := p.addMemory(0)
		g := p.attach()
		g.start(1 << 12)
		base := vhostuser.LogBase{Size: 4096}
		file := newLogFile(t, base.Size)
		if err := p.k.Keep("net/one/log", file); err != nil {
			t.Fatal(err)
		}
		p.s.Log(base, file)
		p.works(g)
		next := p.next(killed, &lasting{device: &device{}})
		eventually(t, "the device goes on", next.runs)
		p.shareAgain(next, x)
		next.s.Run(true)
		next.works(g)
		for _, want := range []bool{true, false} {
			if _, err := unix.Pwrite(file, make([]byte, base.Size), 0); err != nil {
				t.Fatal(err)
			}
			next.s.Log(base, file)
			next.works(g)
			next.s.Log(vhostuser.LogBase{}, -1)
			if got := isMarked(t, file, 0x9000); got != want {
				t.Errorf("a page that may have been written by the last process is marked: %v, want %v", got, want)
			}
		}
	})
}

// A state that is too long for BAR 2 stays where it is, as that of a BAR 2 of an older vnicd does.
func TestStateTooLong(t *testing.T) {
	b := &bar{fd: -1, mem: make([]byte, barSize)}
	_, err := b.put(&saved{state: make([]byte, maxState+1)})
	if err == nil || !strings.Contains(err.Error(), "has room for") {
		t.Error(err)
	}
	if n, err := b.put(&saved{state: make([]byte, maxState)}); err != nil || n != barSize-regsSize {
		t.Error(n, err)
	}
	if x, err := b.get(); err != nil || len(x.state) != maxState {
		t.Error(err)
	}
	if !b.drop() || b.drop() {
		t.Error("dropped never, or twice")
	}
	if x, err := b.get(); x != nil || err != nil {
		t.Error(x, err)
	}
	b.mem = b.mem[:regsSize]
	if _, err := b.put(&saved{}); err == nil {
		t.Error("no room, and no error")
	}
	if x, err := b.get(); x != nil || err != nil {
		t.Error(x, err)
	}
}
