package vnet

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// TestFramesBetweenVMs: every kind of driver with every frame size, on one loop and across loops.
func TestFramesBetweenVMs(t *testing.T) {
	for _, loops := range []int{1, 2} {
		for name, g := range map[string]struct {
			features uint64
			rxSize   int
		}{
			"big buffers":       {0, 12000},
			"mergeable, pages":  {FeatureMrgRxbuf, 4096},
			"mergeable, small":  {FeatureMrgRxbuf, 300},
			"mergeable, tiny":   {FeatureMrgRxbuf, 1526},
			"mergeable, header": {FeatureMrgRxbuf, 2048},
		} {
			t.Run(fmt.Sprintf("%d loops, %s", loops, name), func(t *testing.T) {
				bothRings(t, loops, func(t *testing.T, h *host) {
					a := h.vm(1, 1).boot(0, 12000, 4)
					b := h.vm(2, 1).boot(g.features, g.rxSize, 100)
					for i, n := range []int{14, 15, 60, 64, 288, 289, 1514, 1526, 4096, mtu + 14} {
						if n+headerLen > maxMerge*g.rxSize {
							continue
						}
						f := buildFrame(b.mac, a.mac, n, byte(i))
						a.send(0, f)
						if got := b.recv(0); !bytes.Equal(got, f) {
							t.Fatalf("%d bytes: got %d bytes %x", n, len(got), got[:min(len(got), 40)])
						}
						back := buildFrame(a.mac, b.mac, n, byte(i+100))
						b.send(0, back)
						if got := a.recv(0); !bytes.Equal(got, back) {
							t.Fatalf("%d bytes back: got %d bytes", n, len(got))
						}
					}
				})
			})
		}
	}
}

// The engines' time counts for the VM that sends and for the one that receives, also in the sender's handler.
func TestEngineTime(t *testing.T) {
	h := newHost(t, 1, true)
	a, b := h.vm(1, 1).boot(0, 12000, 4), h.vm(2, 1).boot(0, 12000, 100)
	for n, before := 0, b.dev.Describe().EngineTime; ; n++ { // a sample is due within 127 passes
		a.send(0, buildFrame(b.mac, a.mac, mtu, byte(n)))
		b.recv(0)
		if n >= 200 && a.dev.Describe().EngineTime > 0 && b.dev.Describe().EngineTime > before {
			return
		}
		if n == 100000 {
			t.Fatalf("after %d frames: %v for the sender, %v for the receiver", n, a.dev.Describe().EngineTime,
				b.dev.Describe().EngineTime)
		}
	}
}

// TestBadFrames: bad frames are dropped and counted, without other effects.
func TestBadFrames(t *testing.T) {
	h := newHost(t, 1, true)
	a := h.vm(1, 1).boot(0, 12000, 4)
	b := h.vm(2, 1).boot(0, 12000, 4)
	good := buildFrame(b.mac, a.mac, 100, 1)
	with := func(i int, v byte) []byte {
		raw := append(make([]byte, headerLen), good...)
		raw[i] = v
		return raw
	}
	for _, tc := range []struct {
		name string
		raw  []byte
		why  vswitch.Reason
	}{
		{"no header", make([]byte, 5), vswitch.ShortFrame},
		{"header alone", make([]byte, headerLen), vswitch.ShortFrame},
		{"truncated Ethernet header", make([]byte, headerLen+13), vswitch.ShortFrame},
		{"checksum offload", with(0, 1), vswitch.BadHeader},
		{"segmentation offload", with(1, 1), vswitch.BadHeader},
		{"longer than the MTU", append(make([]byte, headerLen), buildFrame(b.mac, a.mac, mtu+15, 1)...), vswitch.TooBig},
		{"longer than any buffer", make([]byte, 11000), vswitch.TooBig},
		{"foreign source", append(make([]byte, headerLen), buildFrame(b.mac, b.mac, 60, 1)...), vswitch.Spoofed},
	} {
		before := a.dropped(tc.why)
		a.sendRaw(0, tc.raw)
		a.send(0, good) // in order: once it arrives, the bad one has been handled
		if got := b.recv(0); !bytes.Equal(got, good) {
			t.Fatalf("%s: got %x", tc.name, got)
		}
		if n := a.dropped(tc.why) - before; n != 1 {
			t.Errorf("%s: counted %d times as %v; all drops: %v", tc.name, n, tc.why,
				a.port.Attachment().Counters.Totals().Drops)
		}
	}
	if s := a.dev.Describe(); s.Broken != "" || s.Pairs[0] != "rx+tx" || !s.Connected {
		t.Errorf("%+v", s)
	}
}

// TestNoReceiveBuffers: frames are dropped and counted while there are no buffers.
func TestNoReceiveBuffers(t *testing.T) { bothRings(t, 1, noReceiveBuffers) }

func noReceiveBuffers(t *testing.T, h *host) {
	a := h.vm(1, 1).boot(0, 2000, 4)
	b := h.vm(2, 1).boot(FeatureMrgRxbuf, 1000, 2)
	fits, large := buildFrame(b.mac, a.mac, 900, 1), buildFrame(b.mac, a.mac, 2500, 2)
	for range 3 {
		a.send(0, large) // needs three buffers, there are two
	}
	a.send(0, fits)
	if got := b.recv(0); !bytes.Equal(got, fits) {
		t.Fatal("wrong frame")
	}
	if n := b.dropped(vswitch.QueueFull); n != 3 {
		t.Fatalf("%d drops", n)
	}
	b.post(0, b.alloc(1000))
	b.fe.Queue(0).Kick()
	a.send(0, large)
	if got := b.recv(0); !bytes.Equal(got, large) {
		t.Fatal("wrong frame")
	}
	// A driver without MRG_RXBUF whose buffers are too small for the frame.
	c := h.vm(3, 1).boot(0, 1000, 2)
	large = buildFrame(c.mac, a.mac, 2500, 2)
	a.send(0, large)
	fits = buildFrame(c.mac, a.mac, 900, 1)
	a.send(0, fits)
	if got := c.recv(0); !bytes.Equal(got, fits) || c.dropped(vswitch.Truncated) != 1 {
		t.Fatal("wrong frame or count", c.dropped(vswitch.Truncated))
	}
}

// TestBrokenQueues: an error of a guest stops only its own queue, is reported with its cause, and is cleared by a
// reset. Other VMs are not affected.
func TestBrokenQueues(t *testing.T) { bothRings(t, 1, brokenQueues) }

func brokenQueues(t *testing.T, h *host) {
	a, b := h.vm(1, 1).boot(0, 2000, 8), h.vm(2, 1).boot(0, 2000, 8)
	for name, tc := range map[string]struct {
		spoil func(c *vm)
		want  string
	}{
		"receive buffer without room": {func(c *vm) {
			_ = c.fe.Queue(0).Add(0, nil, []frontend.Buf{{PA: 0x200000, Len: 11}})
			c.fe.Queue(0).Kick()
			a.send(0, buildFrame(c.mac, a.mac, 60, 0))
		}, "0 readable and 11 writable"},
		"readable receive buffer": {func(c *vm) {
			_ = c.fe.Queue(0).Add(0, []frontend.Buf{{PA: 0x200000, Len: 1}}, []frontend.Buf{{PA: 0x200000, Len: 2000}})
			c.fe.Queue(0).Kick()
			a.send(0, buildFrame(c.mac, a.mac, 60, 0))
		}, "1 readable and 2000 writable"},
		"receive buffer outside memory": {func(c *vm) {
			_ = c.fe.Queue(0).Add(0, nil, []frontend.Buf{{PA: 1 << 40, Len: 2000}})
			c.fe.Queue(0).Kick()
			a.send(0, buildFrame(c.mac, a.mac, 60, 0))
		}, "not an address of guest memory"},
		"frame outside memory": {func(c *vm) {
			_ = c.fe.Queue(1).Add(0, []frontend.Buf{{PA: 1 << 40, Len: 100}}, nil)
			c.fe.Queue(1).Kick()
		}, "not an address of guest memory"},
		"malformed ring": {func(c *vm) {
			desc, avail, _ := c.fe.Queue(1).Rings()
			if h.rings == 0 {
				c.bytes(avail+2, 2)[1] = 0x55
			} else {
				c.bytes(desc+14, 1)[0] = 0x85 // available, INDIRECT and NEXT
			}
			c.fe.Queue(1).Notify()
		}, map[uint64]string{0: "available index", FeatureRingPacked: "INDIRECT without NEXT"}[h.rings]},
	} {
		t.Run(name, func(t *testing.T) {
			h.t = t
			c := h.vm(3, 1).boot(0, 2000, 0)
			tc.spoil(c)
			testutil.Eventually(t, "broken", func() bool { return strings.Contains(c.dev.Describe().Broken, tc.want) })
			f := buildFrame(b.mac, a.mac, 99, 7)
			a.send(0, f)
			if got := b.recv(0); !bytes.Equal(got, f) {
				t.Fatal("other VMs are affected")
			}
			if err := c.fe.Close(); err != nil {
				t.Fatal(err)
			}
			c.boot(0, 2000, 8)
			f = buildFrame(c.mac, a.mac, 99, 7)
			a.send(0, f)
			if got := c.recv(0); !bytes.Equal(got, f) || c.dev.Describe().Broken != "" {
				t.Fatal("the queue does not work after a restart")
			}
		})
	}
	h.t = t
}

// TestMemoryVanishes: a guest's memory file is truncated while another guest sends to it; that device stops, the sender
// and the daemon continue.
func TestMemoryVanishes(t *testing.T) {
	h := newHost(t, 1, true)
	a, b := h.vm(1, 1).boot(0, 2000, 8), h.vm(2, 1).boot(0, 2000, 8)
	c := h.vm(3, 1)
	cl, fd := rawClient(t, c.path)
	kick := newEventfd(t)
	for i := range 2 {
		must(t, cl.SetVringNum(i, 8),
			cl.SetVringAddr(vhostuser.VringAddr{Index: uint32(i), Desc: 1<<30 + uint64(i)<<14,
				Avail: 1<<30 + uint64(i)<<14 + 0x1000, Used: 1<<30 + uint64(i)<<14 + 0x2000}), cl.SetVringKick(i, kick))
	}
	_, err := cl.GetFeatures()
	must(t, err)
	must(t, unix.Ftruncate(fd, 0))
	a.send(0, buildFrame(c.mac, a.mac, 60, 0))
	testutil.Eventually(t, "fault", func() bool { return strings.Contains(c.dev.Describe().Broken, "memory fault") })
	for i := range 5 {
		f := buildFrame(b.mac, a.mac, 100, byte(i))
		a.send(0, f)
		a.send(0, buildFrame(c.mac, a.mac, 60, 0))
		if got := b.recv(0); !bytes.Equal(got, f) {
			t.Fatal("wrong frame")
		}
	}
	cl.Close()
	testutil.Eventually(t, "teardown", func() bool { return !c.dev.Describe().Connected })
	if s := c.dev.Describe(); s.Pairs[0] != "stopped" {
		t.Fatalf("%+v", s)
	}
}

func rawClient(t *testing.T, path string) (*frontend.Client, int) {
	t.Helper()
	cl, err := frontend.Dial(context.Background(), path)
	must(t, err)
	t.Cleanup(func() { cl.Close() })
	fd, err := unix.MemfdCreate("vnicd-guest", unix.MFD_CLOEXEC)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	must(t, unix.Ftruncate(fd, 1<<20),
		cl.SetProtocolFeatures(vhostuser.ProtoReplyAck|vhostuser.ProtoMTU|vhostuser.ProtoRARP|vhostuser.ProtoMQ),
		cl.SetFeatures(virtio.FeatureVersion1),
		cl.SetMemTable([]vhostuser.Region{{GuestPA: 0, Size: 1 << 20, UserAddr: 1 << 30}}, fd))
	return cl, fd
}

func newEventfd(t *testing.T) int {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestNetMessages: RARP, MTU and the number of queues.
func TestNetMessages(t *testing.T) {
	h := newHost(t, 2, true)
	a := h.vm(1, 1).boot(0, 2000, 8)
	c := h.vm(2, 3)
	cl, _ := rawClient(t, c.path)
	if n, err := cl.QueueNum(); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	if f, err := cl.GetProtocolFeatures(); err != nil || f&vhostuser.ProtoConfig != 0 {
		t.Fatalf("protocol features %#x, %v", f, err)
	}
	setMTU := func(v uint64) error {
		_, err := cl.Do(vhostuser.ReqNetSetMTU, false, vhostuser.AppendU64(nil, v))
		return err
	}
	// An MTU beyond the network's is accepted.
	must(t, setMTU(mtu), setMTU(68), setMTU(mtu+1))
	_, err := cl.Do(vhostuser.ReqSendRARP, false, append(c.mac[:], 0, 0))
	must(t, err)
	got := a.recv(0)
	if len(got) != 60 || !bytes.Equal(got[:6], bytes.Repeat([]byte{0xff}, 6)) || !bytes.Equal(got[6:12], c.mac[:]) ||
		binary.BigEndian.Uint16(got[12:]) != 0x8035 || !bytes.Equal(got[22:28], c.mac[:]) ||
		!bytes.Equal(got[32:38], c.mac[:]) {
		t.Fatalf("%x", got)
	}
}

// TestMultiqueue: flows spread over the pairs, each in order.
func TestMultiqueue(t *testing.T) { bothRings(t, 2, multiqueue) }

func multiqueue(t *testing.T, h *host) {
	a := h.vm(1, 2).boot(FeatureMQ, 2000, 60)
	b := h.vm(2, 2).boot(FeatureMQ|FeatureMrgRxbuf, 2000, 100)
	if b.fe.Features()&FeatureMQ == 0 || b.fe.NumQueues() != 4 {
		t.Fatal("no multiqueue")
	}
	// Few frames per round, so that none is dropped for lack of buffers.
	const flows, rounds = 16, 50
	next := [flows]uint32{}
	used := [2]int{}
	for n := range uint32(rounds) {
		for flow := range flows {
			f := buildFrame(b.mac, a.mac, 14, 0)
			f[12], f[13] = 8, 0
			f = append(f, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x30, byte(flow), 0x40, 0, 0, 0,
				0, 0)
			f = binary.BigEndian.AppendUint32(append(f, byte(flow)), n)
			a.send(flow%2, f)
		}
		for got := 0; got < flows; {
			progress := false
			for p := range 2 {
				for {
					f, err := b.take(p)
					if errors.Is(err, errNone) {
						break
					}
					must(t, err)
					flow, seq := f[42], binary.BigEndian.Uint32(f[43:])
					if seq != next[flow] {
						t.Fatalf("flow %d: number %d, want %d", flow, seq, next[flow])
					}
					next[flow]++
					used[p]++
					got++
					progress = true
				}
			}
			if !progress {
				testutil.Eventually(t, "frames", func() bool { return b.fe.Queue(0).Pending() || b.fe.Queue(2).Pending() })
			}
		}
	}
	if used[0] == 0 || used[1] == 0 {
		t.Fatal("all flows are on one pair", used)
	}
	// With one pair stopped, all flows use the other.
	must(t, b.fe.StopQueue(2))
	f := buildFrame(b.mac, a.mac, 60, 3)
	a.send(0, f)
	a.send(1, f)
	b.recv(0)
	b.recv(0)
}

// TestPolledTransmit: a driver without a kick descriptor is polled.
func TestPolledTransmit(t *testing.T) {
	h := newHost(t, 1, true)
	a, b := h.vm(1, 1).boot(0, 2000, 8), h.vm(2, 1).boot(0, 2000, 8)
	must(t, a.fe.Client().SetVringKick(1, -1))
	for i := range 5 {
		f := buildFrame(b.mac, a.mac, 100, byte(i))
		raw := append(make([]byte, headerLen), f...)
		a.sendRaw(0, raw)
		if got := b.recv(0); !bytes.Equal(got, f) {
			t.Fatal("wrong frame")
		}
	}
}

// TestRestartUnderTraffic: rings stop and start while frames arrive.
func TestRestartUnderTraffic(t *testing.T) { bothRings(t, 2, restartUnderTraffic) }

func restartUnderTraffic(t *testing.T, h *host) {
	a, b := h.vm(1, 1).boot(0, 2000, 8), h.vm(2, 1).boot(FeatureMrgRxbuf, 2000, 32)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := rand.New(rand.NewPCG(1, 1))
		for {
			select {
			case <-stop:
				return
			default:
				a.send(0, buildFrame(b.mac, a.mac, 60+r.IntN(1400), byte(r.Uint32())))
			}
		}
	}()
	for i := range 100 {
		must(t, b.fe.StopQueue(i%2))
		for {
			if _, err := b.take(0); errors.Is(err, errNone) {
				break
			} else {
				must(t, err)
			}
		}
		must(t, b.fe.StartQueue(i%2))
	}
	close(stop)
	<-done
	// Frames still under way come first, and may leave no buffer for this one: then it is dropped and counted, and must
	// be sent again.
	f := buildFrame(b.mac, a.mac, 2000-headerLen, 9)
	for arrived := false; !arrived; {
		before := b.dropped(vswitch.QueueFull)
		a.send(0, f)
		testutil.Eventually(t, "frame or drop", func() bool {
			got, err := b.take(0)
			arrived = arrived || bytes.Equal(got, f)
			return arrived || errors.Is(err, errNone) && b.dropped(vswitch.QueueFull) > before
		})
	}
}

func TestNewRefusals(t *testing.T) {
	h := newHost(t, 1, false)
	for name, c := range map[string]Config{
		"pairs":   {Pairs: MaxPairs + 1, Loops: h.loops, Pool: h.pool},
		"nothing": {},
	} {
		if _, err := New(c); err == nil {
			t.Error(name)
		}
	}
}

func TestFlowHash(t *testing.T) {
	hash := func(f []byte) uint32 { return flowHash(f, header.Locate(f)) }
	udp := func(port byte, frag byte) []byte {
		f := buildFrame(vswitch.MAC{1}, vswitch.MAC{2}, 14, 0)
		f[12], f[13] = 8, 0
		return append(f, 0x45, 0, 0, 0, 0, 0, frag, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, port, 0, 7, 0, 0, 0, 0)
	}
	if hash(udp(1, 0x40)) == hash(udp(2, 0x40)) {
		t.Error("the hash ignores ports")
	}
	if hash(udp(1, 0x20)) != hash(udp(2, 0x20)) {
		t.Error("fragments have different hashes")
	}
	for n := range 60 { // any length must work
		hash(udp(1, 0x40)[:min(n, 42)])
		v6 := make([]byte, n)
		if n > 13 {
			v6[12], v6[13] = 0x86, 0xdd
		}
		hash(v6)
	}
}

// benchSend measures one frame from guest to guest on one loop, including the driver's work.
func benchSend(b *testing.B, rings uint64, size int) {
	h := newHost(b, 1, false)
	h.rings = rings
	l := h.loops[0]
	src := h.vm(1, 1).boot(FeatureMrgRxbuf, 2048, 16)
	dst := h.vm(2, 1).boot(FeatureMrgRxbuf, 2048, 100)
	raw := append(make([]byte, headerLen), buildFrame(dst.mac, src.mac, size, 1)...)
	pa := src.alloc(len(raw))
	copy(src.bytes(pa, len(raw)), raw)
	out := []frontend.Buf{{PA: pa, Len: uint32(len(raw))}}
	in := make([]frontend.Buf, 1)
	tx, rx := src.fe.Queue(1), dst.fe.Queue(0)
	const batch = 32
	cycle := func() {
		for range batch {
			if err := tx.Add(1, out, nil); err != nil {
				b.Fatal(err)
			}
		}
		tx.Kick()
		l.Step()
		for range batch {
			stepUntil(b, l, tx)
			tok, n := stepUntil(b, l, rx)
			if int(n) != size+headerLen {
				b.Fatal(n)
			}
			in[0] = frontend.Buf{PA: translate.PA(tok), Len: 2048}
			if err := rx.Add(tok, nil, in); err != nil {
				b.Fatal(err)
			}
		}
		rx.Kick()
	}
	for range 8 { // until each buffer was used, and its page is resident
		cycle()
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i += batch {
		cycle()
	}
}

// stepUntil returns the next chain that the device has returned, after further steps of the loop if a buffer's page is
// absent.
func stepUntil(b *testing.B, l *loop.Loop, q *frontend.Queue) (tok uint64, n uint32) {
	for deadline := (time.Time{}); ; l.Step() {
		tok, n, ok, err := q.Get()
		if err != nil {
			b.Fatal(err)
		}
		if ok {
			return tok, n
		}
		if now := time.Now(); deadline.IsZero() {
			deadline = now.Add(20 * time.Second)
		} else if now.After(deadline) {
			b.Fatal("timeout")
		}
	}
}

// allocatesNothing checks a benchmark's allocations; one that failed has none.
func allocatesNothing(t *testing.T, f func(*testing.B)) {
	t.Helper()
	if r := testing.Benchmark(f); r.N == 0 || r.AllocsPerOp() != 0 {
		t.Errorf("%d rounds, %d allocations each", r.N, r.AllocsPerOp())
	}
}

func BenchmarkSend(b *testing.B) {
	for name, rings := range ringKinds {
		for _, n := range []int{64, 1514} {
			b.Run(fmt.Sprint(name, "-", n), func(b *testing.B) { benchSend(b, rings, n) })
		}
	}
}

func TestDataPathAllocatesNothing(t *testing.T) {
	for _, rings := range ringKinds {
		allocatesNothing(t, func(b *testing.B) { benchSend(b, rings, 64) })
	}
}

var _ interface {
	Deliver(*loop.Loop, *frame.Buf)
} = (*Device)(nil)

// vanishing is a port whose owner's memory is gone. Delivering a frame to it takes another guest's memory away, too.
type vanishing struct {
	owner *loop.Owner
	hole  []byte
	also  int // a memory file
}

func (v *vanishing) Deliver(l *loop.Loop, _ *frame.Buf) {
	_ = unix.Ftruncate(v.also, 0)
	l.Blame(v.owner)
	v.hole[0] = 1
}

// TestMemoryVanishesTwice: a frame meets memory of another guest that is gone, and meanwhile the sender's own memory
// vanishes, too. The sender's chain is returned under the loop's guard, so that its device stops and nothing else.
func TestMemoryVanishesTwice(t *testing.T) {
	h := newHost(t, 1, true)
	a, b := h.vm(1, 1).boot(0, 2000, 8), h.vm(2, 1).boot(0, 2000, 8)
	c := h.vm(3, 1).boot(0, 2000, 8)
	file, err := unix.MemfdCreate("hole", unix.MFD_CLOEXEC)
	must(t, err)
	defer unix.Close(file)
	hole, err := unix.Mmap(file, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	defer func() { _ = unix.Munmap(hole) }()

	// The sender has a file that can be truncated.
	s := h.vm(4, 1)
	cl, fd := rawClient(t, s.path)
	kick := newEventfd(t)
	mem, err := unix.Mmap(fd, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	defer func() { _ = unix.Munmap(mem) }()
	const desc, avail, used, buf = 0x4000, 0x5000, 0x6000, 0x8000
	raw := append(make([]byte, headerLen), buildFrame(c.mac, s.mac, 60, 0)...)
	copy(mem[buf:], raw)
	binary.LittleEndian.PutUint64(mem[desc:], buf)
	binary.LittleEndian.PutUint32(mem[desc+8:], uint32(len(raw)))
	binary.LittleEndian.PutUint16(mem[avail+2:], 1)

	told := make(chan struct{}, 1)
	c.port.SetNet(&vanishing{hole: hole, also: fd, owner: loop.NewOwner(func(loop.Fault) { told <- struct{}{} })})
	must(t, cl.SetVringNum(1, 8),
		cl.SetVringAddr(vhostuser.VringAddr{Index: 1, Desc: 1<<30 + desc, Avail: 1<<30 + avail, Used: 1<<30 + used}),
		cl.SetVringKick(1, kick))
	<-told
	testutil.Eventually(t, "fault", func() bool { return strings.Contains(s.dev.Describe().Broken, "memory fault") })
	c.port.SetNet(c.dev)
	for i := range 5 {
		f := buildFrame(b.mac, a.mac, 100, byte(i))
		a.send(0, f)
		if got := b.recv(0); !bytes.Equal(got, f) {
			t.Fatal("wrong frame")
		}
	}
}

// TestFrontEndBlocksEventfd: a front end makes the eventfd of its interrupts blocking and fills it. Frames for its
// guest raise interrupts, which block nobody: the other guests of the loop go on (TR-2).
func TestFrontEndBlocksEventfd(t *testing.T) {
	h := newHost(t, 1, true)
	a, b := h.vm(1, 1).boot(0, 2000, 8), h.vm(2, 1).boot(0, 2000, 8)
	c := h.vm(3, 1)
	cl, fd := rawClient(t, c.path)
	kick, call := newEventfd(t), newEventfd(t)
	mem, err := unix.Mmap(fd, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	defer func() { _ = unix.Munmap(mem) }()
	const desc, avail, used, buf = 0x4000, 0x5000, 0x6000, 0x8000
	for i := range 8 {
		binary.LittleEndian.PutUint64(mem[desc+16*i:], buf+2048*uint64(i))
		binary.LittleEndian.PutUint32(mem[desc+16*i+8:], 2048)
		binary.LittleEndian.PutUint16(mem[desc+16*i+12:], 2) // VIRTQ_DESC_F_WRITE
		binary.LittleEndian.PutUint16(mem[avail+4+2*i:], uint16(i))
	}
	binary.LittleEndian.PutUint16(mem[avail+2:], 8)
	must(t, cl.SetVringNum(0, 8), cl.SetVringCall(0, call),
		cl.SetVringAddr(vhostuser.VringAddr{Index: 0, Desc: 1<<30 + desc, Avail: 1<<30 + avail, Used: 1<<30 + used}),
		cl.SetVringKick(0, kick))
	testutil.Eventually(t, "start", func() bool { return c.dev.Describe().Pairs[0] == "rx" })
	must(t, unix.SetNonblock(call, false)) // vnicd had set it; the flag is that of the open file, which both have
	_, err = unix.Write(call, []byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	must(t, err)
	passed := make(chan struct{})
	go func() {
		defer close(passed)
		for i := range 5 {
			a.send(0, buildFrame(c.mac, a.mac, 60, 0))
			f := buildFrame(b.mac, a.mac, 100, byte(i))
			a.send(0, f)
			wait(t, b.fe.Queue(0))
			if got, err := b.take(0); err != nil || !bytes.Equal(got, f) {
				t.Error("wrong frame", err)
			}
		}
	}()
	select {
	case <-passed:
	case <-time.After(10 * time.Second):
		t.Error("the loop is blocked")
		_, _ = unix.Read(call, make([]byte, 8)) // so that it goes on
		<-passed
	}
	testutil.Eventually(t, "the hostile guest has its frames, too", func() bool {
		return binary.LittleEndian.Uint16(mem[used+2:]) == 5
	})
}
