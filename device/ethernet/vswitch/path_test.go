package vswitch

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// send sends a frame on a path.
func (b *bench) send(a *Attachment, f []byte, p *Path) {
	b.t.Helper()
	buf := b.pool.Get()
	if buf == nil || !buf.Append(f) {
		b.t.Fatal("no buffer")
	}
	b.loop.Do(func() { a.Send(b.loop, buf, p) })
	buf.Free()
}

// Paths against lookups (MT-5): after any change of the tables, a frame on a path goes where the tables say at that
// moment.
func TestPathModel(t *testing.T) {
	const age = 30
	b := newBench(t, Config{Age: age * time.Second, MaxEntries: 512, MaxPortEntries: 512, noHold: true, Storm: Unlimited})
	rng := rand.New(rand.NewPCG(1, 2))
	vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1000)}, Hairpin: true})
	var ports []*recPort
	attach := func() {
		ports = append(ports, b.port(PortConfig{Name: fmt.Sprint("p", len(ports)), Kind: KindVTEP + Kind(-rng.IntN(2))}))
	}
	for range 4 {
		attach()
	}
	const targets = 24
	paths := map[Address]*Path{}
	held, flooded, moved := 0, 0, uint64(0)
	for step := range 20000 {
		i := rng.IntN(len(ports))
		p := ports[i]
		m := Address{mac(rng.IntN(targets) + 1), []uint16{0, 0, 7}[rng.IntN(3)]}
		switch k := rng.IntN(100); {
		case k < 20: // an address appears or moves
			b.input(p.att, tagged(m.VLAN, buildFrame(mac(1000), m.MAC, "")), Source{Remote: Remote(rng.IntN(3))})
		case k < 22:
			b.advance(time.Duration(rng.IntN(20)) * time.Second)
			b.net.sweepSome(uint32(b.clock.Now()/int64(time.Second)), len(b.net.fdb.buckets))
		case k < 24:
			_ = b.net.SetStatic(m, p.att, Remote(rng.IntN(3)))
		case k < 27:
			b.net.RemoveStatic(m, p.att)
		case k < 28:
			b.net.Forget(m)
		case k < 29:
			b.net.FlushRemote(p.att, Remote(rng.IntN(3)))
		case k < 30 && step%7 == 0:
			p.att.Close()
			ports[i] = b.port(PortConfig{Name: fmt.Sprint("q", step), Kind: KindVTEP})
		default:
			for _, x := range append(ports, vm) {
				x.take()
			}
			if paths[m] == nil {
				paths[m] = &Path{}
			}
			path := paths[m]
			e, known := b.net.LookupIn(m)
			if path.holds(vm.att) {
				held++
			}
			before := path.Moves()
			f := tagged(m.VLAN, buildFrame(m.MAC, mac(1000), "x"))
			if rng.IntN(4) == 0 {
				got := false
				b.loop.Do(func() { got = vm.att.Resolve(b.loop, f, path) })
				if got != known {
					t.Fatalf("step %d: resolved %v, known %v", step, got, known)
				}
			}
			b.send(vm.att, f, path)
			if path.Known() != known {
				t.Fatalf("step %d: the path is known: %v, the address %v", step, path.Known(), known)
			}
			for _, x := range ports {
				got := x.take()
				want := !known || x.att.Config().Name == e.Port
				if len(got) > 1 || (len(got) == 1) != want {
					t.Fatalf("step %d: %v: port %s got %d frames, table %+v %v", step, m, x.att.Config().Name, len(got), e, known)
				}
				if known && want && got[0].to.Remote != e.Remote {
					t.Fatalf("step %d: to %v, table %+v", step, got[0].to, e)
				}
			}
			if !known {
				flooded++
			}
			moved += path.Moves() - before
		}
	}
	if held < 1000 || flooded < 100 || moved < 100 {
		t.Errorf("held %d, flooded %d, moved %d: the test covers too little", held, flooded, moved)
	}
}

// The MTU, rates and counters of both ports, captures and the closing of a port apply to frames on a path, too.
func TestPathChecks(t *testing.T) {
	b := newBench(t, Config{MTU: 1000})
	vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1)}, Rate: MinRate})
	far := b.port(PortConfig{Name: "far", Kind: KindTAP, MACs: []MAC{mac(2)}})
	f := buildFrame(mac(2), mac(1), "hello")
	var p Path
	b.send(vm.att, f, &p)
	if !p.Known() || p.Moves() != 0 || len(far.take()) != 1 {
		t.Fatal("the first frame did not arrive")
	}
	m := &seen{}
	if err := vm.att.SetMonitor(m); err != nil {
		t.Fatal(err)
	}
	b.send(vm.att, f, &p)
	vm.att.RemoveMonitor()
	b.send(vm.att, append(f, make([]byte, 1000)...), &p)
	if n := vm.att.Counters.Dropped(TooBig); n != 1 {
		t.Errorf("%d dropped as too big", n)
	}
	if x := vm.att.Counters.Totals(); m.n != 1 || x.InFrames != 3 || far.att.Counters.Totals().OutFrames != 2 {
		t.Errorf("%d seen, %+v", m.n, x)
	}
	for range 100000 {
		b.send(vm.att, f, &p)
	}
	if vm.att.Counters.Dropped(RateLimit) == 0 {
		t.Error("the rate is not limited")
	}
	far.att.Close()
	b.advance(time.Minute)
	far.take()
	b.send(vm.att, f, &p)
	if p.Known() || len(far.got) != 0 {
		t.Error("a closed port got a frame")
	}
	vm.att.Close()
	b.send(vm.att, f, &p)
	if vm.att.Counters.Dropped(PortClosed) != 1 {
		t.Error("a closed port sent")
	}
	var q Path
	b.loop.Do(func() {
		if vm.att.Resolve(b.loop, f, &q) {
			t.Error("a closed port has a path")
		}
	})
}

type seen struct{ n int }

func (s *seen) Frame(*loop.Loop, bool, []byte) { s.n++ }

// There is no path for addresses that the port may not use.
func TestPathSpoofed(t *testing.T) {
	b := newBench(t, Config{})
	vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1)}, IPs: []netip.Addr{addr("10.0.0.1")}})
	far := b.port(PortConfig{Name: "far", Kind: KindTAP, MACs: []MAC{mac(2)}})
	for name, f := range map[string][]byte{
		"MAC": roce(mac(2), mac(3), [4]byte{10, 0, 0, 1}),
		"IP":  roce(mac(2), mac(1), [4]byte{10, 0, 0, 9}),
	} {
		var p Path
		b.loop.Do(func() {
			if vm.att.Resolve(b.loop, f, &p) {
				t.Errorf("%s: resolved", name)
			}
		})
		b.send(vm.att, f, &p)
		b.send(vm.att, f, &p)
		if len(far.take()) != 0 || p.Known() {
			t.Errorf("%s: sent", name)
		}
	}
	var p Path
	b.loop.Do(func() {
		if !vm.att.Resolve(b.loop, roce(mac(2), mac(1), [4]byte{10, 0, 0, 1}), &p) {
			t.Error("not resolved with the port's own addresses")
		}
	})
}

// roce is the start of a RoCE v2 frame over IPv4.
func roce(dst, src MAC, from [4]byte) []byte {
	f := append(append(append([]byte{}, dst[:]...), src[:]...), 8, 0)
	p := make([]byte, 44)
	p[0], p[9] = 0x45, header.ProtoUDP
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
	copy(p[12:], from[:])
	copy(p[16:], []byte{10, 0, 0, 2})
	binary.BigEndian.PutUint16(p[22:], header.PortRoCE)
	return append(f, p...)
}

// choosy is the HCA of a VM that accepts RoCE from one IP address.
type choosy struct {
	from  byte
	asked int
	got   int
}

func (c *choosy) Up() bool                       { return true }
func (c *choosy) Paused() bool                   { return false }
func (c *choosy) Deliver(*loop.Loop, *frame.Buf) { c.got++ }
func (c *choosy) Wants(_ *loop.Loop, b *frame.Buf) bool {
	f := b.Bytes()
	c.asked++
	return f[14+15] == c.from
}

// Fewer addresses are learnt from RoCE frames than from others (MT-6).
func TestRoCELearning(t *testing.T) {
	b := newBench(t, Config{})
	tunnel := b.port(PortConfig{Name: "vtep", Kind: KindVTEP})
	vm, err := NewVMPort(b.net, VMPortConfig{Name: "vm", MAC: mac(1)})
	if err != nil {
		t.Fatal(err)
	}
	hca := &choosy{from: 5}
	vm.SetHCA(hca)
	in := func(f []byte, from Remote) { b.input(tunnel.att, f, Source{Remote: from}) }
	at := func(m MAC) Remote { e, _ := b.net.Lookup(m); return e.Remote }
	drops := func(what string, misplaced, unwanted uint64) {
		t.Helper()
		if m, u := tunnel.att.Counters.Dropped(Misplaced), tunnel.att.Counters.Dropped(Unwanted); m != misplaced ||
			u != unwanted {
			t.Errorf("%s: %d misplaced, %d unwanted, want %d and %d", what, m, u, misplaced, unwanted)
		}
	}
	in(roce(mac(1), mac(7), [4]byte{10, 0, 0, 9}), 1)
	if _, ok := b.net.Lookup(mac(7)); ok || hca.got != 0 {
		t.Error("the address of an unwanted frame was learnt, or the frame arrived")
	}
	drops("unwanted", 0, 1)
	in(roce(mac(1), mac(7), [4]byte{10, 0, 0, 5}), 1)
	if at(mac(7)) != 1 || hca.got != 1 || hca.asked != 2 {
		t.Errorf("a wanted frame: at %d, arrived %d, asked %d", at(mac(7)), hca.got, hca.asked)
	}
	in(roce(mac(1), mac(7), [4]byte{10, 0, 0, 9}), 1) // from the known place: for the HCA to check
	in(roce(mac(1), mac(7), [4]byte{10, 0, 0, 5}), 2)
	drops("from elsewhere", 1, 1)
	if at(mac(7)) != 1 || hca.got != 2 || hca.asked != 2 {
		t.Errorf("at %d, arrived %d, asked %d", at(mac(7)), hca.got, hca.asked)
	}
	in(buildFrame(mac(1), mac(7), "not RoCE"), 2)
	in(roce(mac(1), mac(7), [4]byte{10, 0, 0, 5}), 2)
	if at(mac(7)) != 2 || hca.got != 3 {
		t.Errorf("after the move: at %d, arrived %d", at(mac(7)), hca.got)
	}
	if err := b.net.SetStatic(Address{MAC: mac(7)}, tunnel.att, 3); err != nil {
		t.Fatal(err)
	}
	in(roce(mac(1), mac(7), [4]byte{10, 0, 0, 5}), 2)
	in(tagged(9, roce(mac(1), mac(7), [4]byte{10, 0, 0, 5})), 2)
	drops("static elsewhere", 3, 1)
	in(roce(mac(1), mac(7), [4]byte{10, 0, 0, 5}), 3)
	in(tagged(9, roce(mac(1), mac(7), [4]byte{10, 0, 0, 5})), 3)
	if hca.got != 5 {
		t.Errorf("from its static place: arrived %d", hca.got)
	}
	drops("static", 3, 1)
	// An expired address may be learnt anywhere.
	in(roce(mac(1), mac(8), [4]byte{10, 0, 0, 5}), 1)
	b.advance(DefaultAge + 2*time.Second)
	in(roce(mac(1), mac(8), [4]byte{10, 0, 0, 5}), 2)
	if at(mac(8)) != 2 {
		t.Error("an expired address stays")
	}
	vm.Close()
}

// BenchmarkSend compares a frame on a path with one that is looked up.
func BenchmarkSend(x *testing.B) {
	for _, how := range []string{"path", "lookup"} {
		x.Run(how, func(x *testing.B) {
			b := newBench(x, Config{})
			vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1)}})
			far := &sink{}
			if _, err := b.net.Attach(far, PortConfig{Name: "far", Kind: KindTAP, MACs: []MAC{mac(2)}}); err != nil {
				x.Fatal(err)
			}
			buf := b.pool.Get()
			buf.Append(roce(mac(2), mac(1), [4]byte{10, 0, 0, 1}))
			var p Path
			x.ReportAllocs()
			b.loop.Do(func() {
				for x.Loop() {
					if how == "path" {
						vm.att.Send(b.loop, buf, &p)
					} else {
						vm.att.Input(b.loop, buf, Source{})
					}
				}
			})
			buf.Free()
		})
	}
}

type sink struct{}

func (sink) Deliver(*loop.Loop, *frame.Buf, Destination) {}
