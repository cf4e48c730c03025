package vswitch

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// The fuzzing engine's own goroutines may end slightly after the run.
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}

// bench is a network with a clock, buffers and a loop that is not started.
type bench struct {
	t     testing.TB
	net   *Network
	loop  *loop.Loop
	clock *loop.ManualClock
	pool  *frame.Pool
}

func newBench(t testing.TB, c Config) *bench {
	t.Helper()
	b := &bench{t: t, clock: loop.NewManualClock(int64(time.Hour))}
	var err error
	if b.loop, err = loop.New(loop.Config{Clock: b.clock}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.loop.Close)
	if b.pool, err = frame.NewPool(frame.Config{Count: 64}); err != nil {
		t.Fatal(err)
	}
	c.Clock = b.clock
	if c.VNI == 0 {
		c.VNI, c.Name = 7, "seven"
	}
	if b.net, err = NewNetwork(c); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := b.pool.InUse(); n != 0 {
			t.Errorf("%d buffers leaked", n)
		}
	})
	return b
}

// recPort records the frames delivered to it.
type recPort struct {
	att *Attachment
	got []record
}

type record struct {
	frame string
	to    Destination
}

func (p *recPort) Deliver(_ *loop.Loop, b *frame.Buf, to Destination) {
	p.got = append(p.got, record{string(b.Bytes()), to})
}

func (p *recPort) take() []record {
	g := p.got
	p.got = nil
	return g
}

func (b *bench) port(pc PortConfig) *recPort {
	b.t.Helper()
	p := &recPort{}
	pc.Attached = func(a *Attachment) { p.att = a }
	if _, err := b.net.Attach(p, pc); err != nil {
		b.t.Fatal(err)
	}
	return p
}

func mac(n int) MAC { return MAC{2, 0, 0, byte(n >> 16), byte(n >> 8), byte(n)} }

func buildFrame(dst, src MAC, payload string) []byte {
	f := append(append(append([]byte{}, dst[:]...), src[:]...), 0x88, 0xb5)
	return append(f, payload...)
}

var broadcast = MAC{255, 255, 255, 255, 255, 255}

// input sends a frame from a port, and advances the clock by a tick.
func (b *bench) input(a *Attachment, f []byte, from Source) {
	b.t.Helper()
	buf := b.pool.Get()
	if buf == nil || !buf.Append(f) {
		b.t.Fatal("no buffer")
	}
	b.loop.Do(func() { a.Input(b.loop, buf, from) })
	buf.Free()
}

func (b *bench) advance(d time.Duration) { b.clock.Advance(d); b.loop.Step() }

func TestConfig(t *testing.T) {
	for _, c := range []Config{{}, {VNI: MaxVNI + 1}, {VNI: 1, MTU: 100}, {VNI: 1, MTU: 70000}, {VNI: 1, MaxEntries: -1},
		{VNI: 1, MaxEntries: MaxMaxEntries + 1}, {VNI: 1, MaxEntries: 10, MaxPortEntries: 11}, {VNI: 1, MaxPorts: -1},
		{VNI: 1, MaxPorts: 1 << 15}, {VNI: 1, Age: time.Millisecond}, {VNI: 1, Age: -1}} {
		if _, err := NewNetwork(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}

func TestMTU(t *testing.T) {
	b := newBench(t, Config{})
	if b.net.MTU() != DefaultMTU {
		t.Errorf("MTU %d", b.net.MTU())
	}
	var told []int
	cancel := b.net.OnMTU(func(mtu int) { told = append(told, mtu) })
	b.net.SetUnderlayMTU(1450)
	b.net.SetUnderlayMTU(1450)
	b.net.SetUnderlayMTU(9000)
	cancel()
	cancel()
	b.net.SetUnderlayMTU(1450)
	if !slices.Equal(told, []int{1450, 9000}) {
		t.Errorf("OnMTU called with %v", told)
	}
	if b.net.MTU() != 1450 {
		t.Errorf("MTU %d after the underlay is known", b.net.MTU())
	}
	fixed := newBench(t, Config{VNI: 1, MTU: 1400})
	fixed.net.SetUnderlayMTU(1450)
	if fixed.net.MTU() != 1400 {
		t.Errorf("configured MTU 1400 became %d", fixed.net.MTU())
	}
	p, q := b.port(PortConfig{Kind: KindTAP}), b.port(PortConfig{Kind: KindTAP})
	tagged := func(n int) []byte {
		f := buildFrame(broadcast, mac(1), strings.Repeat("x", n+4))
		f[12], f[13], f[16], f[17] = 0x81, 0, 8, 0
		return f
	}
	b.input(p.att, buildFrame(broadcast, mac(1), strings.Repeat("x", 1450)), Source{})
	b.input(p.att, tagged(1450), Source{})
	if n := len(q.take()); n != 2 {
		t.Errorf("%d of 2 full frames arrived", n)
	}
	b.input(p.att, buildFrame(broadcast, mac(1), strings.Repeat("x", 1451)), Source{})
	b.input(p.att, tagged(1451), Source{})
	if n := len(q.take()); n != 0 || p.att.Counters.Dropped(TooBig) != 2 {
		t.Errorf("%d oversized frames arrived, %d dropped", n, p.att.Counters.Dropped(TooBig))
	}
}

func TestForwarding(t *testing.T) {
	b := newBench(t, Config{})
	p1, p2, p3 := b.port(PortConfig{Name: "p1", Kind: KindTAP}), b.port(PortConfig{Name: "p2", Kind: KindTAP}),
		b.port(PortConfig{Name: "p3", Kind: KindTAP})
	check := func(what string, want1, want2, want3 int) {
		t.Helper()
		if a, c, d := len(p1.take()), len(p2.take()), len(p3.take()); a != want1 || c != want2 || d != want3 {
			t.Errorf("%s: %d %d %d frames, want %d %d %d", what, a, c, d, want1, want2, want3)
		}
	}
	b.input(p1.att, buildFrame(mac(2), mac(1), ""), Source{})
	check("unknown floods", 0, 1, 1)
	b.input(p2.att, buildFrame(mac(1), mac(2), ""), Source{})
	check("answer is learnt", 1, 0, 0)
	b.input(p1.att, buildFrame(mac(2), mac(1), ""), Source{})
	check("both known", 0, 1, 0)
	b.input(p1.att, buildFrame(broadcast, mac(1), ""), Source{})
	check("broadcast", 0, 1, 1)
	b.input(p1.att, buildFrame(MAC{0x33, 0x33, 0, 0, 0, 1}, mac(1), ""), Source{})
	check("multicast", 0, 1, 1)
	b.input(p1.att, buildFrame(mac(1), mac(1), ""), Source{})
	check("to itself", 0, 0, 0)
	if p1.att.Counters.Dropped(SplitHorizon) != 1 {
		t.Error("frame to its own port is not counted")
	}
	b.input(p3.att, buildFrame(mac(9), mac(1), ""), Source{})
	check("mac 1 moves to p3", 1, 1, 0)
	b.input(p2.att, buildFrame(mac(1), mac(2), ""), Source{})
	check("follows the move", 0, 0, 1)
	if st := b.net.Status(); st.Moves != 1 || st.Entries != 2 {
		t.Errorf("moves %d entries %d", st.Moves, st.Entries)
	}

	for _, c := range []struct {
		r Reason
		f []byte
	}{
		{ShortFrame, nil}, {ShortFrame, buildFrame(mac(1), mac(2), "")[:13]},
		{BadSource, buildFrame(mac(1), broadcast, "")}, {BadSource, buildFrame(mac(1), MAC{}, "")},
		{Reserved, buildFrame(MAC{1, 0x80, 0xc2, 0, 0, 0}, mac(2), "")},
		{Reserved, buildFrame(MAC{1, 0x80, 0xc2, 0, 0, 15}, mac(2), "")},
	} {
		before := p2.att.Counters.Dropped(c.r)
		b.input(p2.att, c.f, Source{})
		check(c.r.String(), 0, 0, 0)
		if p2.att.Counters.Dropped(c.r) != before+1 {
			t.Errorf("%v is not counted", c.r)
		}
	}
	b.input(p2.att, buildFrame(MAC{1, 0x80, 0xc2, 0, 0, 16}, mac(2), ""), Source{})
	check("first group behind the reserved ones", 1, 0, 1)
}

func TestAgeing(t *testing.T) {
	b := newBench(t, Config{Age: 10 * time.Second})
	p1, p2, p3 := b.port(PortConfig{Kind: KindTAP}), b.port(PortConfig{Kind: KindTAP}), b.port(PortConfig{Kind: KindTAP})
	b.input(p2.att, buildFrame(broadcast, mac(2), ""), Source{})
	for range 5 { // refreshed by its own frames
		b.advance(8 * time.Second)
		b.input(p2.att, buildFrame(broadcast, mac(2), ""), Source{})
	}
	p1.take()
	p3.take()
	b.advance(10 * time.Second)
	b.input(p1.att, buildFrame(mac(2), mac(1), ""), Source{})
	if len(p3.take()) != 0 {
		t.Error("flooded before its age")
	}
	b.advance(2 * time.Second)
	b.input(p1.att, buildFrame(mac(2), mac(1), ""), Source{})
	if len(p3.take()) != 1 {
		t.Error("not flooded after its age")
	}
	if _, ok := b.net.Lookup(mac(2)); ok {
		t.Error("an expired entry is listed")
	}
	for range 30 { // until the sweep has covered the table
		b.advance(time.Second)
		b.input(p1.att, buildFrame(broadcast, mac(1), ""), Source{})
	}
	if n := b.net.entries.Load(); n != 1 {
		t.Errorf("%d entries are left in the table, want 1", n)
	}
	if n := p2.att.entries.Load(); n != 0 {
		t.Errorf("port has %d entries", n)
	}
}

// Split horizon and head-end replication: no frame passes from tunnel to tunnel, floods are marked as such, unicasts
// name their remote.
func TestSplitHorizon(t *testing.T) {
	b := newBench(t, Config{})
	v1, v2 := b.port(PortConfig{Kind: KindVTEP}), b.port(PortConfig{Kind: KindVTEP})
	vm := b.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(1)}})
	b.input(vm.att, buildFrame(broadcast, mac(1), ""), Source{})
	if g := v1.take(); len(g) != 1 || !g[0].to.Flood || g[0].to.Remote != 0 {
		t.Errorf("v1 got %+v", g)
	}
	if g := v2.take(); len(g) != 1 {
		t.Errorf("v2 got %+v", g)
	}
	b.input(v1.att, buildFrame(broadcast, mac(5), ""), Source{Remote: 3})
	if len(v1.take())+len(v2.take()) != 0 || len(vm.take()) != 1 {
		t.Error("flood from a tunnel")
	}
	b.input(v2.att, buildFrame(mac(5), mac(6), ""), Source{Remote: 1})
	b.input(v1.att, buildFrame(mac(5), mac(7), ""), Source{Remote: 2})
	b.input(v1.att, buildFrame(mac(99), mac(7), ""), Source{Remote: 2})
	if len(v1.take())+len(v2.take()) != 0 || len(vm.take()) != 1 {
		t.Error("unicast from a tunnel into a tunnel")
	}
	if v2.att.Counters.Dropped(SplitHorizon) != 1 || v1.att.Counters.Dropped(SplitHorizon) != 1 {
		t.Error("not counted")
	}
	b.input(vm.att, buildFrame(mac(5), mac(1), ""), Source{})
	if g := v1.take(); len(g) != 1 || g[0].to != (Destination{Remote: 3}) {
		t.Errorf("unicast to remote 3: %+v", g)
	}
	b.input(v1.att, buildFrame(broadcast, mac(5), "here"), Source{Remote: 4}) // moved within the same tunnel
	b.input(vm.att, buildFrame(mac(5), mac(1), ""), Source{})
	if g := v1.take(); len(g) != 1 || g[0].to.Remote != 4 {
		t.Errorf("after the move: %+v", g)
	}
	b.net.FlushRemote(v1.att, 4)
	if _, ok := b.net.Lookup(mac(5)); ok {
		t.Error("FlushRemote left an entry")
	}
	if _, ok := b.net.Lookup(mac(7)); !ok {
		t.Error("FlushRemote removed another remote's entry")
	}
}

func TestAntiSpoofAndStatic(t *testing.T) {
	b := newBench(t, Config{})
	vm1 := b.port(PortConfig{Name: "vm1", Kind: KindVM, MACs: []MAC{mac(1)}})
	vm2 := b.port(PortConfig{Name: "vm2", Kind: KindVM, MACs: []MAC{mac(2), mac(3)}})
	tap := b.port(PortConfig{Name: "tap", Kind: KindTAP})
	b.input(vm2.att, buildFrame(broadcast, mac(1), ""), Source{})
	if vm2.att.Counters.Dropped(Spoofed) != 1 || len(vm1.take())+len(tap.take()) != 0 {
		t.Error("a VM sent with another's address")
	}
	b.input(tap.att, buildFrame(broadcast, mac(1), ""), Source{})
	if tap.att.Counters.Dropped(StaticMoved) != 1 || len(vm1.take())+len(vm2.take()) != 0 {
		t.Error("the TAP sent with a VM's address")
	}
	b.input(vm2.att, buildFrame(mac(1), mac(3), ""), Source{})
	if len(vm1.take()) != 1 || len(tap.take()) != 0 {
		t.Error("a port's static entries are missing")
	}
	if _, err := b.net.Attach(&recPort{}, PortConfig{Kind: KindVM, MACs: []MAC{mac(9), mac(2)}}); !errors.Is(err,
		ErrMACInUse) {
		t.Errorf("second port with the same MAC: %v", err)
	}
	if _, ok := b.net.Lookup(mac(9)); ok {
		t.Error("a failed Attach left an entry")
	}
	for _, m := range []MAC{{}, broadcast} {
		if _, err := b.net.Attach(&recPort{}, PortConfig{MACs: []MAC{m}}); err == nil {
			t.Errorf("port with MAC %v was accepted", m)
		}
		if err := b.net.SetStatic(Address{MAC: m}, tap.att, 0); err == nil {
			t.Errorf("static entry %v was accepted", m)
		}
	}
	if err := b.net.SetStatic(Address{MAC: mac(2)}, tap.att, 0); !errors.Is(err, ErrMACInUse) {
		t.Errorf("SetStatic on a VM's address: %v", err)
	}
	if err := b.net.SetStatic(Address{MAC: mac(50)}, tap.att, 6); err != nil {
		t.Error(err)
	}
	if err := b.net.SetStatic(Address{MAC: mac(50)}, tap.att, 7); err != nil {
		t.Error(err)
	}
	b.advance(DefaultAge * 2)
	if e, ok := b.net.Lookup(mac(50)); !ok || !e.Static || e.Remote != 7 || e.Port != "tap" {
		t.Errorf("static entry: %+v %v", e, ok)
	}
	if !b.net.RemoveStatic(Address{MAC: mac(50)}, tap.att) || b.net.RemoveStatic(Address{MAC: mac(50)}, tap.att) ||
		b.net.RemoveStatic(Address{MAC: mac(1)}, tap.att) {
		t.Error("RemoveStatic")
	}
	// The address of an attached VM was learnt elsewhere before: it moved here.
	b.input(tap.att, buildFrame(broadcast, mac(60), ""), Source{})
	vm3 := b.port(PortConfig{Name: "vm3", Kind: KindVM, MACs: []MAC{mac(60)}})
	if e, _ := b.net.Lookup(mac(60)); e.Port != "vm3" {
		t.Errorf("%+v", e)
	}
	vm3.att.Close()
	if _, ok := b.net.Lookup(mac(60)); ok {
		t.Error("Close left an entry")
	}
	if n := b.net.entries.Load(); n != 3 || b.net.statics.Load() != 3 || tap.att.entries.Load() != 0 {
		t.Errorf("%d entries, %d static, tap %d", n, b.net.statics.Load(), tap.att.entries.Load())
	}
}

// Frames never pass between tenants with the same addresses (MT-9).
func TestTenantsAreApart(t *testing.T) {
	a, b := newBench(t, Config{VNI: 1}), newBench(t, Config{VNI: 2})
	a1, a2 := a.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(1)}}), a.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(2)}})
	b1, b2 := b.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(1)}}), b.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(2)}})
	a.input(a1.att, buildFrame(mac(2), mac(1), "a"), Source{})
	a.input(a1.att, buildFrame(broadcast, mac(1), "a"), Source{})
	b.input(b2.att, buildFrame(mac(1), mac(2), "b"), Source{})
	if len(a2.got) != 2 || len(b1.got) != 1 || len(a1.got)+len(b2.got) != 0 {
		t.Errorf("%d %d %d %d", len(a1.got), len(a2.got), len(b1.got), len(b2.got))
	}
}

func TestLimits(t *testing.T) {
	b := newBench(t, Config{MaxEntries: 100, MaxPortEntries: 60, Age: 10 * time.Second, MaxPorts: 3})
	p1, p2, _ := b.port(PortConfig{Kind: KindTAP}), b.port(PortConfig{Kind: KindTAP}), b.port(PortConfig{Kind: KindTAP})
	if _, err := b.net.Attach(&recPort{}, PortConfig{}); !errors.Is(err, ErrTooManyPorts) {
		t.Errorf("fourth port: %v", err)
	}
	for i := range 200 {
		b.input(p1.att, buildFrame(broadcast, mac(i+1), ""), Source{})
		b.input(p2.att, buildFrame(broadcast, mac(i+1001), ""), Source{})
	}
	if n, m := p1.att.entries.Load(), b.net.entries.Load(); n > 60 || m != 100 {
		t.Errorf("port %d, network %d entries", n, m)
	}
	if got := len(b.net.Entries()); got != 100 {
		t.Errorf("%d entries listed", got)
	}
	if p1.att.Counters.Dropped(PortFull)+p1.att.Counters.Dropped(TableFull) == 0 ||
		p2.att.Counters.Dropped(TableFull) == 0 {
		t.Error("refusals are not counted")
	}
	p2.take()
	b.input(p1.att, buildFrame(broadcast, mac(500), ""), Source{})
	if len(p2.take()) != 1 {
		t.Error("a frame whose source was not learnt was not delivered")
	}
	// Once the flood of addresses is over and has aged, other addresses are learnt again.
	b.advance(11 * time.Second)
	for i := range 50 {
		b.input(p1.att, buildFrame(broadcast, mac(i+5000), ""), Source{})
		b.advance(time.Second / 2)
	}
	if _, ok := b.net.Lookup(mac(5049)); !ok {
		t.Error("the table did not recover")
	}
}

// safePort counts atomically, for tests with several loops.
type safePort struct {
	frames atomic.Int64
	closed atomic.Bool
	late   atomic.Int64
}

func (p *safePort) Deliver(*loop.Loop, *frame.Buf, Destination) {
	if p.closed.Load() {
		p.late.Add(1)
	}
	p.frames.Add(1)
}

// Several loops learn and forward while ports are attached and closed: nothing is delivered after Close, the counts
// match the table, and no lookup finds an address at a port where it never was.
func TestConcurrent(t *testing.T) {
	n, err := NewNetwork(Config{VNI: 9, MaxEntries: 500, MaxPortEntries: 400, Age: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	pool, err := frame.NewPool(frame.Config{Count: 64, Capacity: 512})
	if err != nil {
		t.Fatal(err)
	}
	const loops = 4
	var ports [loops]*safePort
	var atts [loops]*Attachment
	var ls [loops]*loop.Loop
	for i := range loops {
		if ls[i], err = loop.New(loop.Config{ID: i, SpinFor: time.Millisecond}); err != nil {
			t.Fatal(err)
		}
		if err := ls[i].Start(); err != nil {
			t.Fatal(err)
		}
		defer ls[i].Close()
		ports[i] = &safePort{}
		if atts[i], err = n.Attach(ports[i], PortConfig{Name: fmt.Sprint(i), Kind: KindTAP, Loop: ls[i]}); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for i := range loops {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 8))
			for range 200 {
				ls[i].Do(func() {
					b := pool.Get()
					for range 40 {
						// Loop i owns the addresses i*1000..; a few roam between all loops.
						src := mac(i*1000 + rng.IntN(300) + 1)
						if rng.IntN(10) == 0 {
							src = mac(9000 + rng.IntN(5))
						}
						b.Reset()
						b.Append(buildFrame(mac(rng.IntN(loops)*1000+rng.IntN(300)+1), src, ""))
						atts[i].Input(ls[i], b, Source{})
					}
					b.Free()
				})
			}
		})
	}
	wg.Go(func() {
		for k := range 60 {
			p := &safePort{}
			m := mac(100000 + k)
			a, err := n.Attach(p, PortConfig{Name: "guest", Kind: KindVM, MACs: []MAC{m}})
			if err != nil {
				t.Error(err)
				return
			}
			time.Sleep(time.Millisecond)
			a.Close()
			p.closed.Store(true)
			defer func() {
				if p.late.Load() != 0 {
					t.Errorf("%d frames after Close", p.late.Load())
				}
			}()
		}
	})
	wg.Go(func() {
		for range 200 {
			for _, e := range n.Entries() {
				if id := int(e.MAC[3])<<16 | int(e.MAC[4])<<8 | int(e.MAC[5]); id < 9000 && e.Port != fmt.Sprint(id/1000) {
					t.Errorf("%v at port %s", e.MAC, e.Port)
				}
			}
			n.Status()
		}
	})
	wg.Wait()
	var physical, perPort int64
	n.fdb.each(func(uint64, value) { physical++ })
	for _, a := range atts {
		perPort += a.entries.Load()
	}
	if c := n.entries.Load(); c != physical || c != perPort || c > 500 {
		t.Errorf("counted %d, in the table %d, by ports %d", c, physical, perPort)
	}
	for i, p := range ports {
		if p.frames.Load() == 0 {
			t.Errorf("port %d got nothing", i)
		}
	}
}

// The two-choice table holds as many entries as it promises for practically any set of addresses.
func TestTableCapacity(t *testing.T) {
	for _, n := range []int{1, 10, 100, 1000, 16384} {
		f := newFDB(n)
		for i := range n {
			res := f.put(mac(i+1).key(), makeValue(1, false, 0, 0), false, func(value) bool { return false },
				func(value) bool { return true }, func(value) {})
			if res != putDone {
				t.Fatalf("%d: entry %d: %d", n, i, res)
			}
		}
	}
}

func TestStatusJSON(t *testing.T) {
	b := newBench(t, Config{})
	p := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1)}, Loop: b.loop})
	q := b.port(PortConfig{Name: "tap", Kind: KindTAP})
	b.input(q.att, buildFrame(mac(1), mac(2), "hello"), Source{})
	b.input(q.att, buildFrame(mac(1), mac(2), "")[:5], Source{})
	q.att.Close()
	b.input(q.att, buildFrame(mac(1), mac(2), "hello"), Source{})
	j, err := json.Marshal(b.net.Status())
	if err != nil {
		t.Fatal(err)
	}
	want := `{"vni":7,"name":"seven","mtu":1500,"entries":1,"static":1,"moves":0,"aged":0,"drops":{"short-frame":1},"ports":[{"name":"vm","kind":"vm","macs":["02:00:00:00:00:01"],"loop":0,"learnt":0,"in_frames":0,"in_bytes":0,"out_frames":1,"out_bytes":19}],"fdb":[{"mac":"02:00:00:00:00:01","port":"vm","kind":"vm","static":true,"idle":0}]}`
	if string(j) != want {
		t.Errorf("got  %s\nwant %s", j, want)
	}
	if q.att.Counters.Dropped(PortClosed) != 1 || len(p.got) != 1 {
		t.Error("a frame passed a closed port")
	}
	var s Status
	if err := json.Unmarshal(j, &s); err != nil || s.FDB[0].MAC != mac(1) {
		t.Errorf("%v %+v", err, s)
	}
}

func TestReasonNames(t *testing.T) {
	seen := map[string]bool{}
	for r := range NumReasons {
		if s := r.String(); s == "" || seen[s] {
			t.Errorf("reason %d has name %q", r, s)
		} else {
			seen[s] = true
		}
	}
	if NumReasons.String() != "unknown" {
		t.Error("name beyond the table")
	}
}

// watcher is a Monitor that records frames.
type watcher struct{ in, out []string }

func (w *watcher) Frame(_ *loop.Loop, out bool, f []byte) {
	if out {
		w.out = append(w.out, string(f))
	} else {
		w.in = append(w.in, string(f))
	}
}

// A monitor sees the frames that its port sends, refused ones included, and those delivered to it; none of other ports,
// and none after its removal.
func TestMonitor(t *testing.T) {
	b := newBench(t, Config{})
	p, q := b.port(PortConfig{Kind: KindTAP}), b.port(PortConfig{Kind: KindTAP})
	w := &watcher{}
	if err := p.att.SetMonitor(w); err != nil {
		t.Fatal(err)
	}
	if err := p.att.SetMonitor(&watcher{}); !errors.Is(err, ErrMonitored) {
		t.Errorf("a second monitor: %v", err)
	}
	b.input(p.att, buildFrame(broadcast, mac(1), "a"), Source{})
	b.input(p.att, []byte("short"), Source{})
	b.input(q.att, buildFrame(mac(1), mac(2), "b"), Source{})
	b.input(q.att, buildFrame(mac(2), mac(2), "c"), Source{})
	p.att.RemoveMonitor()
	b.input(p.att, buildFrame(broadcast, mac(1), "d"), Source{})
	if len(w.out) != 2 || w.out[1] != "short" || len(w.in) != 1 || w.in[0] != string(buildFrame(mac(1), mac(2), "b")) {
		t.Errorf("sent %q, got %q", w.out, w.in)
	}
	if err := p.att.SetMonitor(w); err != nil {
		t.Errorf("after the removal of the first: %v", err)
	}
}

type nullPort struct{}

func (nullPort) Deliver(*loop.Loop, *frame.Buf, Destination) {}

func BenchmarkForward(b *testing.B) {
	t := newBench(b, Config{Storm: Unlimited})
	for i := range 64 {
		if _, err := t.net.Attach(nullPort{}, PortConfig{Kind: KindVM, MACs: []MAC{mac(i + 1)}}); err != nil {
			b.Fatal(err)
		}
	}
	tap, err := t.net.Attach(nullPort{}, PortConfig{Kind: KindTAP})
	if err != nil {
		b.Fatal(err)
	}
	run := func(name string, a *Attachment, dst, src MAC) {
		b.Run(name, func(b *testing.B) {
			buf := t.pool.Get()
			defer buf.Free()
			buf.Append(buildFrame(dst, src, "payload"))
			b.ReportAllocs()
			t.loop.Do(func() {
				for b.Loop() {
					a.Input(t.loop, buf, Source{})
				}
			})
		})
	}
	vm := t.net.table.Load().byID[0]
	run("vm to vm", vm, mac(2), mac(1))
	run("learnt to vm", tap, mac(2), mac(1000))
	run("vm to learnt", vm, mac(1000), mac(1))
	run("flood to 64", vm, broadcast, mac(1))
}
