package vnet

import (
	"bytes"
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// shreds is a ring all of whose chains are the same indirect table of many small buffers.
type shreds struct {
	q      *virtq.Queue
	mem    []byte
	packed bool
	next   int
	bufs   []byte
}

const (
	shredWrites   = 2
	shredTable    = 16 << 10
	shredBuffers  = 48 << 10
	shredRingSize = 256
)

// newShreds makes a ring whose chains have descs buffers of size bytes. flags are those of the buffers; readable ones
// contain raw.
func newShreds(t testing.TB, index int, packed bool, flags uint16, descs, size int, raw []byte) *shreds {
	t.Helper()
	const base = translate.PA(1 << 30)
	s := &shreds{packed: packed}
	var err error
	if s.mem, err = unix.Mmap(-1, 0, shredBuffers+(descs*size+4095)&^4095, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(s.mem) })
	space := translate.NewSpace(1)
	if err := space.Map(base, s.mem); err != nil {
		t.Fatal(err)
	}
	s.bufs = s.mem[shredBuffers:][:descs*size]
	copy(s.bufs, raw)
	le := binary.LittleEndian
	for k := range descs {
		d := s.mem[shredTable+16*k:]
		le.PutUint64(d, uint64(base)+uint64(shredBuffers+k*size))
		le.PutUint32(d[8:], uint32(size))
		if packed {
			le.PutUint16(d[14:], flags)
		} else if le.PutUint16(d[12:], flags); k < descs-1 {
			le.PutUint16(d[12:], flags|1)
			le.PutUint16(d[14:], uint16(k+1))
		}
	}
	for i := range shredRingSize {
		d := s.mem[16*i:]
		le.PutUint64(d, uint64(base)+shredTable)
		le.PutUint32(d[8:], uint32(16*descs))
		if packed {
			le.PutUint16(d[12:], uint16(i))
		} else {
			le.PutUint16(d[12:], 4)
			le.PutUint16(s.mem[4096+4+2*i:], uint16(i))
		}
	}
	c := virtq.Config{Index: index, Size: shredRingSize, Desc: base, Avail: base + 4096, Used: base + 8192, Kick: -1,
		Packed: packed, Indirect: true}
	if packed {
		c.Base = 1 << 15
	}
	if s.q, err = virtq.New(space, c); err != nil {
		t.Fatal(err)
	}
	return s
}

// offer makes n more chains available; at most one round.
func (s *shreds) offer(n int) {
	le := binary.LittleEndian
	for range n {
		if s.packed {
			le.PutUint16(s.mem[16*s.next+14:], 4|1<<7)
		}
		s.next++
	}
	if !s.packed {
		le.PutUint16(s.mem[4096+2:], uint16(s.next))
	}
}

// shredHost is a host with three guests on one loop, which the test steps: a sends, b is what is tested, c is another.
type shredHost struct {
	*host
	devs [3]*Device
	macs [3]vswitch.MAC
}

func newShredHost(t *testing.T, features uint64) *shredHost {
	return newShredHostOn(newHost(t, 1, false), features)
}

func newShredHostOn(on *host, features uint64) *shredHost {
	h, t := &shredHost{host: on}, on.t
	for i := range h.devs {
		h.macs[i] = vswitch.MAC{2, 0, 0, 0, 0, byte(i)}
		port, err := vswitch.NewVMPort(h.net, vswitch.VMPortConfig{Name: string(rune('a' + i)), MAC: h.macs[i]})
		must(t, err)
		d, err := New(Config{Name: "vm", MAC: h.macs[i], Loops: h.loops, Pool: h.pool, Port: port})
		must(t, err)
		port.SetNet(d)
		must(t, d.SetFeatures(features))
		h.devs[i] = d
		t.Cleanup(func() {
			port.SetNet(nil)
			port.Close()
			d.Close()
		})
	}
	return h
}

func (h *shredHost) start(i, queue int, q *virtq.Queue) {
	h.t.Helper()
	if err := h.devs[i].StartQueue(queue, q); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { h.devs[i].StopQueue(queue) })
}

func (h *shredHost) dropped(i int, r vswitch.Reason) uint64 {
	return h.devs[i].cfg.Port.Attachment().Counters.Dropped(r)
}

// deliver gives guest i frames, all in one iteration of the loop.
func (h *shredHost) deliver(i, frames, size int) {
	h.t.Helper()
	h.loops[0].Do(func() {
		for range frames {
			b := h.pool.GetFor(size)
			b.Append(buildFrame(h.macs[i], h.macs[0], size, 1))
			h.devs[i].Deliver(h.loops[0], b)
			b.Free()
		}
	})
	h.loops[0].Step()
}

func eachRing(t *testing.T, f func(t *testing.T, packed bool)) {
	for name, features := range ringKinds {
		t.Run(name, func(t *testing.T) { f(t, features != 0) })
	}
}

// Receive buffers of 1024 one-byte descriptors, which the loop would read on the sender's turn: it reads no more of
// them than a bound, for each frame and for an iteration. The frames are dropped and counted for the guest; other
// guests get theirs.
func TestShreddedReceiveBuffers(t *testing.T) {
	eachRing(t, func(t *testing.T, packed bool) {
		for name, features := range map[string]uint64{"mergeable": FeatureMrgRxbuf, "alone": 0} {
			h := newShredHost(t, features)
			bad := newShreds(t, 0, packed, shredWrites, virtq.MaxChain, 1, nil)
			good := newShreds(t, 0, packed, shredWrites, 2, 1024, nil)
			tx := newLane(t, 1, 0, headerLen+1000, append(make([]byte, headerLen),
				buildFrame(vswitch.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, h.macs[0], 1000, 1)...))
			h.start(1, 0, bad.q)
			h.start(2, 0, good.q)
			h.start(0, 1, tx.q)
			bad.offer(shredRingSize)
			good.offer(shredRingSize)
			for i := range uint64(2) {
				before := bad.q.Walked()
				tx.offer(txBudget)
				h.loops[0].Step()
				walked := bad.q.Walked() - before
				if walked > passWalk || walked < frameWalk {
					t.Errorf("%s: %d descriptors read for %d frames, want at most %d", name, walked, txBudget, passWalk)
				}
				if n := h.dropped(1, vswitch.LongChain); n != (i+1)*txBudget {
					t.Errorf("%s: %d frames dropped, want %d", name, n, (i+1)*txBudget)
				}
			}
			if n := good.q.Walked(); n < 2*txBudget || n > 2*txBudget*3 {
				t.Errorf("%s: the other guest's ring: %d descriptors read", name, n)
			}
			if n := h.dropped(2, vswitch.LongChain); n != 0 || !bytes.HasPrefix(good.bufs[headerLen+6:], h.macs[0][:]) {
				t.Errorf("%s: the other guest lost frames: %d", name, n)
			}
			if err := bad.q.Broken(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// ticks is a clock that advances whenever it is read.
type ticks struct{ now int64 }

func (c *ticks) Now() int64 {
	c.now++
	return c.now
}

// What a receiver's buffers cost counts for the receiver, though the loop reads them in the sender's handler.
func TestShredsCountForReceiver(t *testing.T) {
	eachRing(t, func(t *testing.T, packed bool) {
		host := newHost(t, 0, false)
		l, err := loop.New(loop.Config{Clock: &ticks{}})
		must(t, err)
		t.Cleanup(l.Close)
		host.loops = []*loop.Loop{l}
		h := newShredHostOn(host, 0)
		bad := newShreds(t, 0, packed, shredWrites, virtq.MaxChain, 1, nil)
		tx := newLane(t, 1, 0, headerLen+1000, append(make([]byte, headerLen),
			buildFrame(h.macs[1], h.macs[0], 1000, 1)...))
		h.start(1, 0, bad.q)
		h.start(0, 1, tx.q)
		bad.offer(shredRingSize)
		const passes = 1000
		for range passes {
			tx.offer(txBudget)
			l.Step()
		}
		if n := h.dropped(1, vswitch.LongChain); n != passes*txBudget {
			t.Fatalf("%d frames dropped, want %d", n, passes*txBudget)
		}
		// A tick for each frame: when the receiver's time ends, and the sender's goes on. Passes since the last sample are
		// missing.
		if n := int64(h.devs[1].Describe().EngineTime); n < passes*txBudget/2 {
			t.Errorf("%d ticks count for the receiver of %d frames", n, passes*txBudget)
		}
	})
}

// Descriptors behind those that a frame needs are not read, and a chain that is read in part is returned like others.
func TestReceiveReadsWhatItNeeds(t *testing.T) {
	eachRing(t, func(t *testing.T, packed bool) {
		h := newShredHost(t, FeatureMrgRxbuf)
		rx := newShreds(t, 0, packed, shredWrites, 1000, 100, nil)
		h.start(1, 0, rx.q)
		rx.offer(10)
		before := rx.q.Walked()
		h.deliver(1, 3, 1000-headerLen)
		// The ring's descriptor of the table counts, too, with a split ring.
		if n := rx.q.Walked() - before; n != 3*10 && n != 3*11 {
			t.Errorf("%d descriptors read", n)
		}
		if want := buildFrame(h.macs[1], h.macs[0], 1000-headerLen, 1); !bytes.Equal(rx.bufs[headerLen:1000], want) {
			t.Error("wrong frame")
		}
		if rx.bufs[10] != 1 || rx.q.InFlight() != 0 {
			t.Errorf("%d buffers for the frame, %d in flight", rx.bufs[10], rx.q.InFlight())
		}
	})
}

// Small buffers within the bound of a frame are filled until the iteration's bound is reached; the next iteration has
// its own.
func TestReceiveWalkPerIteration(t *testing.T) {
	eachRing(t, func(t *testing.T, packed bool) {
		h := newShredHost(t, 0)
		rx := newShreds(t, 0, packed, shredWrites, 100, 1, nil)
		h.start(1, 0, rx.q)
		rx.offer(shredRingSize)
		delivered := uint64(0)
		for i := range 2 {
			h.deliver(1, 64, 60)
			d := h.dropped(1, vswitch.LongChain)
			got := uint64(i+1)*64 - d - delivered
			delivered += got
			if got < 50 || got > 60 {
				t.Errorf("iteration %d: %d frames delivered", i, got)
			}
		}
		if n := rx.q.Walked(); n > 2*passWalk {
			t.Errorf("%d descriptors read", n)
		}
	})
}

// A guest that sends frames in many pieces gets as much of the loop as one that sends them whole.
func TestShreddedTransmit(t *testing.T) {
	eachRing(t, func(t *testing.T, packed bool) {
		h := newShredHost(t, 0)
		raw := append(make([]byte, headerLen), buildFrame(h.macs[1], h.macs[0], virtq.MaxChain-headerLen, 1)...)
		tx := newShreds(t, 1, packed, 0, virtq.MaxChain, 1, raw)
		h.start(0, 1, tx.q)
		tx.offer(200)
		for range 5 {
			before := tx.q.Walked()
			h.loops[0].Step()
			if n := tx.q.Walked() - before; n > txBudget*descsPerFrame+virtq.MaxChain+1 || n < virtq.MaxChain {
				t.Errorf("%d descriptors read in an iteration", n)
			}
		}
		if n := h.devs[0].cfg.Port.Attachment().Counters.Totals().InFrames; n < 5 {
			t.Errorf("%d frames sent", n)
		}
	})
}
