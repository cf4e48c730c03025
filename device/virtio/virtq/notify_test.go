package virtq

import (
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// cycle offers descriptor 0, and pops, pushes and signals it.
func cycle(t *testing.T, g *guest, q *Queue, idx uint16) {
	t.Helper()
	g.setDesc(g.desc, 0, uint64(bufArea), 4, 0, 0)
	g.offer(idx, 0)
	var c Chain
	if ok, err := q.Pop(&c); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if err := q.Push(&c, 0); err != nil {
		t.Fatal(err)
	}
	if err := q.Signal(); err != nil {
		t.Fatal(err)
	}
}

func TestInterruptFlags(t *testing.T) {
	g, call := newGuest(t, 4), newEvent(t)
	q := g.queue(func(c *Config) { c.Call = call.n })
	cycle(t, g, q, 0)
	if call.take(t) != 1 {
		t.Fatal("no interrupt")
	}
	g.put16(g.avail, availNoInterrupt)
	cycle(t, g, q, 1)
	if call.take(t) != 0 {
		t.Fatal("unwanted interrupt")
	}
	g.put16(g.avail, 0)
	if err := q.Signal(); err != nil || call.take(t) != 0 {
		t.Fatal("interrupt without a used chain", err)
	}
	q.Interrupt()
	if call.take(t) != 1 {
		t.Fatal("no forced interrupt")
	}
}

func TestInterruptEventIdx(t *testing.T) {
	g, call := newGuest(t, 4), newEvent(t)
	q := g.queue(func(c *Config) { c.Call, c.EventIdx, c.Base = call.n, true, 0xfffd })
	g.put16(g.avail+2, 0xfffd)
	g.put16(g.used+2, 0xfffd)
	usedEvent := g.avail + 4 + 2*4
	for i, step := range []struct {
		event uint16
		want  uint64
	}{
		{0x1234, 1}, // the first always interrupts: the driver's word may be old
		{0xfffe, 1}, // returns number 0xfffe
		{0x0001, 0}, // returns number 0xffff
		{0x0001, 0}, // returns number 0
		{0x0001, 1}, // returns number 1
		{0x0001, 0}, // the index is past it
	} {
		g.put16(usedEvent, step.event)
		cycle(t, g, q, 0xfffd+uint16(i))
		if n := call.take(t); n != step.want {
			t.Fatalf("step %d: %d interrupts, want %d", i, n, step.want)
		}
	}
}

func TestSetNotify(t *testing.T) {
	g := newGuest(t, 4)
	q := g.queue(nil)
	if err := q.SetNotify(false); err != nil || g.get16(g.used) != usedNoNotify {
		t.Fatal("flag not set", err)
	}
	cycle(t, g, q, 0)
	if g.get16(g.used) != usedNoNotify || g.usedIdx() != 1 {
		t.Fatal("Publish cleared the flag")
	}
	if err := q.SetNotify(true); err != nil || g.get16(g.used) != 0 || g.usedIdx() != 1 {
		t.Fatal("flag not cleared, or index changed", err)
	}

	g = newGuest(t, 4)
	q = g.queue(func(c *Config) { c.EventIdx = true })
	availEvent := g.used + 4 + 8*4
	g.put16(availEvent+2, 0xabcd) // after the ring: not the device's
	cycle(t, g, q, 0)
	cycle(t, g, q, 1)
	if err := q.SetNotify(true); err != nil || g.get16(availEvent) != 2 {
		t.Fatalf("available event %d, %v", g.get16(availEvent), err)
	}
	if err := q.SetNotify(false); err != nil || g.get16(availEvent) != 2 || g.get16(g.used) != 0 {
		t.Fatal("event index has no off switch", err)
	}
	if g.get16(availEvent+2) != 0xabcd {
		t.Fatal("bytes after the ring were changed")
	}
}

// TestNotifierExchange: files are exchanged while another goroutine signals; no signal may reach a descriptor that the
// notifier was not given.
func TestNotifierExchange(t *testing.T) {
	n := NewNotifier()
	n.Signal()
	a, b, other := newEvent(t), newEvent(t), newEvent(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for {
			select {
			case <-stop:
				return
			default:
				n.Signal()
			}
		}
	}()
	for i := range 2000 {
		fd := -1
		switch i % 3 {
		case 0:
			fd = a.fd
		case 1:
			fd = b.fd
		}
		if err := n.Set(fd); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
	if err := n.Set(a.fd); err != nil {
		t.Fatal(err)
	}
	a.take(t)
	n.Signal()
	if a.take(t) != 1 || other.take(t) != 0 {
		t.Fatal("a signal reached another descriptor")
	}
	n.Close()
	n.Close()
	if n.Set(a.fd) == nil {
		t.Fatal("closed notifier accepted a file")
	}
	n.Signal()
	if a.take(t) != 0 {
		t.Fatal("closed notifier signalled")
	}
}

func TestNotifierBadFD(t *testing.T) {
	n := NewNotifier()
	defer n.Close()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(fd); err != nil {
		t.Fatal(err)
	}
	if n.Set(fd) == nil {
		t.Fatal("Set accepted a closed descriptor")
	}
	n.Signal()
}
