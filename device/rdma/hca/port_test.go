package hca

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// buf returns a new buffer with the frame f.
func (w *world) buf(f []byte) *frame.Buf {
	b := w.pool.Get()
	if b == nil {
		w.tb.Fatal("out of buffers")
	}
	b.Append(f)
	return b
}

// deliver delivers a frame to a guest.
func (w *world) deliver(g *guest, f []byte) {
	b := w.buf(f)
	g.Deliver(w.loops[0], b)
	b.Free()
}

// wants calls Wants of a guest's device.
func (w *world) wants(g *guest, f []byte) bool {
	b := w.buf(f)
	defer b.Free()
	return g.data.Wants(w.loops[0], b)
}

// frames records the frames of the given traffic.
func (w *world) frames() (out [][]byte) {
	a, b := w.pair()
	w.losing(func(f []byte) bool { out = append(out, append([]byte(nil), f...)); return false })
	b.recv(1)
	for _, op := range []uint32{abi.WRSend, abi.WRRDMAWrite, abi.WRRDMARead} {
		s := a.wqe()
		s.SetRequest(1, op, abi.SendSignaled)
		a.post()
		a.scq.await(1)
	}
	w.lose = nil
	return out
}

// Invalid frames of all kinds: dropped and counted, each once, and the guest's
// memory is unchanged.
func TestHostileFrames(t *testing.T) {
	w := newWorld(t, 2, 2, Limits{})
	good := w.frames()
	r := rand.New(rand.NewPCG(1, 6))
	g := w.guests[1]
	drops := func() uint64 {
		s := g.Stats()
		return s.Value[abi.StatRxDropped] + s.Value[abi.StatICRCErrors]
	}
	for i := range 3000 {
		f := append([]byte(nil), good[r.IntN(len(good))]...)
		switch i % 4 {
		case 0: // noise
			f = f[:r.IntN(len(f)+1)]
			for j := range f {
				f[j] = byte(r.Uint32())
			}
		case 1: // cut short
			f = f[:r.IntN(len(f))]
		default: // flipped bits
			for range 1 + r.IntN(3) {
				f[r.IntN(len(f))] ^= 1 << r.UintN(8)
			}
		}
		before, mem := drops(), g.low()
		w.deliver(g, f)
		w.step(3)
		// A flip in a field that the ICRC leaves out (TTL, checksums, the source MAC)
		// makes a valid duplicate; other frames must be counted.
		if n := drops() - before; n > 1 {
			t.Fatalf("one frame was counted %d times", n)
		}
		if g.low() != mem && i%4 < 2 {
			t.Fatal("noise changed guest memory")
		}
	}
}

// low is a copy of the first 64 KiB of the guest's memory, without the engines' requests for wake-ups.
func (g *guest) low() string {
	m := bytes.Clone(g.mem[:1<<16])
	for _, e := range g.engines {
		clear(m[e.db.pages[0]-memBase+abi.DoorbellNeedWakeupOff:][:4])
	}
	return string(m)
}

// All destination fields of a frame are checked (MT-6).
func TestAddresses(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	good := w.frames()
	g := w.guests[1]
	e := g.engines[0]
	for name, x := range map[string]struct {
		why rejectReason
		mod func(f []byte)
	}{
		"another MAC":   {rejectMAC, func(f []byte) { f[5] ^= 1 }},
		"broadcast MAC": {rejectMAC, func(f []byte) { copy(f, []byte{255, 255, 255, 255, 255, 255}) }},
		"another IP": {rejectGID, func(f []byte) {
			f[33] ^= 8
			ipSum(f[14:34])
		}},
		"an unused QP":   {rejectQPN, func(f []byte) { f[14+20+8+7] ^= 77 }},
		"QP 0":           {rejectQPN, func(f []byte) { clear(f[14+20+8+5 : 14+20+8+8]) }},
		"a destroyed QP": {rejectQPN, func(f []byte) { f[14+20+8+5] ^= 1 }},
		"an empty group": {rejectGroup, func(f []byte) { f[14+20+8+5], f[14+20+8+6], f[14+20+8+7] = 255, 255, 255 }},
	} {
		f := append([]byte(nil), good[0]...)
		if [6]byte(f[:6]) != g.cfg.MAC {
			t.Fatal("the first frame is not guest 1's")
		}
		x.mod(f)
		if err := wire.SealICRC(f); err != nil {
			t.Fatal(err)
		}
		before := g.rejected[x.why].Load()
		w.deliver(g, f)
		w.step(2)
		if n := g.rejected[x.why].Load() - before; n != 1 {
			t.Errorf("%s: %d frames counted as %s, want 1", name, n, rejectNames[x.why])
		}
	}
	before := e.stats.RxPackets
	w.deliver(g, good[0])
	w.step(2)
	if e.stats.RxPackets != before+1 {
		t.Error("the unmodified frame did not reach its QP")
	}
	// A device that is down, or whose link is down, accepts no frame.
	g.up.Store(false)
	w.deliver(g, good[0])
	g.up.Store(true)
	g.SetLink(false)
	w.deliver(g, good[0])
	w.step(2)
	if e.stats.RxPackets != before+1 {
		t.Error("a device that is down took a frame")
	}
}

// ipSum recomputes the IPv4 header checksum.
func ipSum(h []byte) {
	h[10], h[11] = 0, 0
	s := uint32(0)
	for i := 0; i < 20; i += 2 {
		s += uint32(h[i])<<8 | uint32(h[i+1])
	}
	for s>>16 != 0 {
		s = s>>16 + s&0xffff
	}
	h[10], h[11] = byte(^s>>8), byte(^s)
}

// A full inbox drops, counts, and gives the buffers back.
func TestInboxOverflow(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	good := w.frames()
	g := w.guests[1]
	b := w.pool.Get()
	copy(b.Room(), good[0])
	b.SetLen(len(good[0]))
	for range inboxFrames + 10 {
		g.Deliver(w.loops[0], b)
	}
	b.Free()
	s := g.Stats()
	if n := g.engines[0].inboxFull.Load(); n != 10 || s.Value[abi.StatRxDropped] < 10 {
		t.Errorf("%d frames dropped, want 10", n)
	}
	w.step(inboxFrames/32 + 5)
	if n := w.pool.InUse(); n != 0 {
		t.Errorf("%d buffers are still in use", n)
	}
}
