package vnet

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// rawGuest is a guest without vhost-user, whose pages the test withdraws and restores, as the host driver does. Rings
// are in the first pages, which stay.
type rawGuest struct {
	t      *testing.T
	mem    []byte
	space  *translate.Space
	packed bool
}

const (
	rawSize  = 8       // entries of a ring
	rawBuf   = 0x10000 // buffers, a page each
	rawPages = 64      // of the guest
	rawRing  = 0x1000  // bytes for each ring
	page     = translate.PageSize
)

func newRawGuest(t *testing.T, gvmi translate.GVMI, rings uint64) *rawGuest {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, rawPages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	g := &rawGuest{t: t, mem: mem, space: translate.NewSpace(gvmi), packed: rings != 0}
	if err := g.space.Map(0, mem); err != nil {
		t.Fatal(err)
	}
	return g
}

func rawArea(queue int) translate.PA { return translate.PA(queue * rawRing) }

func (g *rawGuest) start(d *Device, queue int) {
	g.t.Helper()
	a := rawArea(queue)
	c := virtq.Config{Index: queue, Size: rawSize, Desc: a, Avail: a + 0x400, Used: a + 0x800, Packed: g.packed, Kick: -1}
	if g.packed {
		c.Base = 0x8000
	}
	q, err := virtq.New(g.space, c)
	if err != nil {
		g.t.Fatal(err)
	}
	if err := d.StartQueue(queue, q); err != nil {
		g.t.Fatal(err)
	}
}

// offer makes page number n (of the buffers) available as chain number idx. A packed ring is used for one round only.
func (g *rawGuest) offer(queue int, idx uint16, n int, length uint32, writable bool) {
	a, slot := rawArea(queue), int(idx)%rawSize
	d := g.mem[int(a)+16*slot:]
	binary.LittleEndian.PutUint64(d, uint64(rawBuf+n*page))
	binary.LittleEndian.PutUint32(d[8:], length)
	flags := uint32(0)
	if writable {
		flags = 2
	}
	tail, _ := g.space.RingUint32(a + translate.PA(16*slot+12))
	if g.packed {
		tail.Store(uint32(slot) | (flags|0x80)<<16)
		return
	}
	tail.Store(flags)
	binary.LittleEndian.PutUint16(g.mem[int(a)+0x404+2*slot:], uint16(slot))
	w, _ := g.space.RingUint32(a + 0x400) // flags and index in one store, which orders the writes before it
	w.Store(uint32(idx+1) << 16)
}

func (g *rawGuest) used(queue int) (n uint16) {
	if g.packed {
		for w, _ := g.space.RingUint32(rawArea(queue) + 12); w.Load()>>16&0x8080 == 0x8080 && n < rawSize; n++ {
			w, _ = g.space.RingUint32(rawArea(queue) + translate.PA(16*(n+1)+12))
		}
		return n
	}
	w, _ := g.space.RingUint32(rawArea(queue) + 0x800)
	return uint16(w.Load() >> 16)
}

func (g *rawGuest) buf(n int) []byte { return g.mem[rawBuf+n*page:][:page] }

func (g *rawGuest) withdraw(n int) {
	g.t.Helper()
	if err := g.space.Withdraw(translate.PA(rawBuf+n*page), page); err != nil {
		g.t.Fatal(err)
	}
}

// serve waits for a fault and ends it: with the page restored, or with err.
func (g *rawGuest) serve(n int, write bool, err error) {
	g.t.Helper()
	var f *translate.Fault
	testutil.Eventually(g.t, "a host fault", func() bool { f = g.space.Faults().TryNext(); return f != nil })
	if pa := translate.PA(rawBuf + n*page); f.Miss.Kind != translate.HostFault || f.Miss.PA&^(page-1) != pa ||
		f.Write != write {
		g.t.Errorf("fault %v, write %v; expected page %v, write %v", f.Miss.Err(), f.Write, pa, write)
	}
	if err == nil {
		if err := g.space.Map(translate.PA(rawBuf+n*page), g.buf(n)); err != nil {
			g.t.Fatal(err)
		}
	}
	g.space.Faults().Finish(f, err)
}

// A queue whose buffer is absent waits, alone, and loses nothing (PF-17).
func TestAbsentBuffers(t *testing.T) { bothRings(t, 1, absentBuffers) }

func absentBuffers(t *testing.T, h *host) {
	a, b, other := h.vm(1, 1), h.vm(2, 1), h.vm(3, 1).boot(0, 12000, 4)
	ga, gb := newRawGuest(t, 1, h.rings), newRawGuest(t, 2, h.rings)
	ga.start(a.dev, 1)
	gb.start(b.dev, 0)
	defer a.dev.StopQueue(1)
	defer b.dev.StopQueue(0)

	send := func(idx uint16, f []byte) {
		copy(ga.buf(int(idx)), append(make([]byte, headerLen), f...))
		ga.offer(1, idx, int(idx), uint32(headerLen+len(f)), false)
		h.loops[0].Wake()
	}
	fr := func(i int) []byte { return buildFrame(b.mac, a.mac, 200, byte(i)) }
	for i := range uint16(5) {
		gb.offer(0, i, int(i), page, true)
	}
	check := func(idx uint16) {
		t.Helper()
		testutil.Eventually(t, "the frame", func() bool { return gb.used(0) > idx })
		if got := gb.buf(int(idx))[headerLen:][:200]; !bytes.Equal(got, fr(int(idx))) {
			t.Errorf("frame %d: %x", idx, got[:20])
		}
	}
	send(0, fr(0))
	check(0)

	// Transmit: the second chain's page is absent. The third chain, whose page is present, waits for it; another VM is
	// not affected.
	ga.withdraw(1)
	send(1, fr(1))
	send(2, fr(2))
	otherFrame := buildFrame(other.mac, other.mac, 60, 9)
	testutil.Eventually(t, "the fault", func() bool { return ga.space.Faults().Stats().Waiting == 1 })
	if n := ga.used(1); n != 1 {
		t.Errorf("%d chains returned, expected 1", n)
	}
	// Receive: the buffer for frame 1 is absent, too.
	gb.withdraw(1)
	ga.serve(1, false, nil)
	gb.serve(1, true, nil)
	check(1)
	check(2)
	testutil.Eventually(t, "chains", func() bool { return ga.used(1) == 3 })
	other.send(0, otherFrame)

	// A page that cannot be restored loses only the frame that needed it.
	ga.withdraw(3)
	copy(ga.buf(3), append(make([]byte, headerLen), fr(3)...))
	send(3, fr(3))
	ga.serve(3, false, errors.New("no memory"))
	testutil.Eventually(t, "the chain", func() bool { return ga.used(1) == 4 })
	if n := a.dropped(vswitch.Unreachable); n != 1 {
		t.Errorf("%d frames unreachable, expected 1", n)
	}
	gb.withdraw(3)
	send(4, fr(4))
	gb.serve(3, true, errors.New("no memory"))
	testutil.Eventually(t, "the drop", func() bool { return b.dropped(vswitch.Unreachable) == 1 })
	if n := gb.used(0); n != 3 {
		t.Errorf("%d buffers returned, expected 3", n)
	}
}

// A waiting receive queue keeps a bounded number of frames; stopping it frees them, and an answer to the fault after
// that is harmless.
func TestAbsentReceiveIsBounded(t *testing.T) { bothRings(t, 1, absentReceiveIsBounded) }

func absentReceiveIsBounded(t *testing.T, h *host) {
	a, b := h.vm(1, 1), h.vm(2, 1)
	gb := newRawGuest(t, 2, h.rings)
	gb.start(b.dev, 0)
	gb.offer(0, 0, 0, page, true)
	gb.withdraw(0)
	const sent = heldFrames + 10
	for i := range sent {
		h.loops[0].Do(func() {
			buf := h.pool.Get()
			defer buf.Free()
			buf.Append(buildFrame(b.mac, a.mac, 100, byte(i)))
			a.port.InputNet(h.loops[0], buf)
		})
	}
	testutil.Eventually(t, "drops", func() bool { return b.dropped(vswitch.QueueFull) == sent-heldFrames })
	if n := h.pool.InUse(); n != heldFrames {
		t.Errorf("%d buffers in use, expected %d", n, heldFrames)
	}
	b.dev.StopQueue(0)
	if n := h.pool.InUse(); n != 0 {
		t.Errorf("%d buffers in use after the stop", n)
	}
	gb.start(b.dev, 0)
	gb.serve(0, true, nil)
	h.loops[0].Do(func() {})
	b.dev.StopQueue(0)
}

// If descriptors cannot be restored, the queue breaks; it does not ask for them for ever.
func TestAbsentRingIsBroken(t *testing.T) { bothRings(t, 1, absentRingIsBroken) }

func absentRingIsBroken(t *testing.T, h *host) {
	a := h.vm(1, 1)
	g := newRawGuest(t, 1, h.rings)
	g.start(a.dev, 1)
	defer a.dev.StopQueue(1)
	g.offer(1, 0, 0, headerLen+60, false)
	if err := g.space.Withdraw(rawArea(1), page); err != nil {
		t.Fatal(err)
	}
	h.loops[0].Wake()
	faults := 0
	testutil.Eventually(t, "the queue's end", func() bool {
		if f := g.space.Faults().TryNext(); f != nil {
			faults++
			g.space.Faults().Finish(f, errors.New("no memory"))
		}
		return a.dev.Describe().Broken != ""
	})
	// One for the descriptors, and one for the check before the loop sleeps.
	if faults > 2 {
		t.Errorf("%d faults for memory that is gone", faults)
	}
}
