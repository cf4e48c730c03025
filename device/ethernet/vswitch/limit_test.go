package vswitch

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// A storm on one port passes at its limit and is counted; known unicast of that port and floods of others are not
// affected.
func TestStorm(t *testing.T) {
	b := newBench(t, Config{Storm: 100})
	p, q := b.port(PortConfig{Kind: KindTAP}), b.port(PortConfig{Kind: KindTAP})
	vm := b.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(9)}, Storm: Unlimited})
	for range 1000 {
		b.input(p.att, buildFrame(broadcast, mac(1), ""), Source{})
	}
	if n := len(q.take()); n != 100 {
		t.Errorf("%d frames of a burst passed, want 100", n)
	}
	if n := p.att.Counters.Dropped(Storm); n != 900 {
		t.Errorf("%d counted", n)
	}
	for _, f := range [][]byte{buildFrame(mac(77), mac(1), ""), buildFrame(MAC{1, 0, 0x5e, 1, 1, 1}, mac(1), "")} {
		b.input(p.att, f, Source{})
		if len(q.take()) != 0 {
			t.Error("a flood passed beyond the limit")
		}
	}
	vm.take()
	b.input(p.att, buildFrame(mac(9), mac(1), ""), Source{})
	if len(vm.take()) != 1 {
		t.Error("a storm affects known unicast of its port")
	}
	b.input(q.att, buildFrame(broadcast, mac(2), ""), Source{})
	if len(p.take()) != 1 {
		t.Error("a storm affects another port's broadcast")
	}
	b.advance(100 * time.Millisecond)
	for range 100 {
		b.input(p.att, buildFrame(broadcast, mac(1), ""), Source{})
	}
	if n := len(q.take()); n < 9 || n > 11 {
		t.Errorf("%d frames passed after 100 ms, want 10", n)
	}
	for range 1000 {
		b.input(vm.att, buildFrame(broadcast, mac(9), ""), Source{})
	}
	if n := len(q.take()); n != 1000 {
		t.Errorf("unlimited port: %d of 1000", n)
	}
}

// A storm from one peer of a tunnel does not affect the others' broadcasts.
func TestStormPerRemote(t *testing.T) {
	b := newBench(t, Config{Storm: 10})
	vtep, vm := b.port(PortConfig{Kind: KindVTEP}), b.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(9)}})
	for range 50 {
		b.input(vtep.att, buildFrame(broadcast, mac(1), ""), Source{Remote: 1})
	}
	vm.take()
	b.input(vtep.att, buildFrame(broadcast, mac(2), ""), Source{Remote: 2})
	if len(vm.take()) != 1 {
		t.Error("remote 1's storm affects remote 2")
	}
}

// The rate holds in each direction separately, over any second, for all frame sizes.
func TestRate(t *testing.T) {
	const rate = 8_000_000 // 1 MB/s
	b := newBench(t, Config{MTU: 9000})
	slow := b.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(1)}, Rate: rate})
	fast := b.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(2)}})
	big, small := strings.Repeat("x", 8986), strings.Repeat("x", 50)
	for _, payload := range []string{big, small} {
		for range 10 {
			b.advance(time.Second)
		}
		in, out := 0, 0
		const seconds = 4
		for range seconds * 100 {
			b.advance(10 * time.Millisecond)
			for sent := 0; sent < 30000; sent += len(payload) + HeaderLen { // three times the rate
				b.input(slow.att, buildFrame(mac(2), mac(1), payload), Source{})
				b.input(fast.att, buildFrame(mac(1), mac(2), payload), Source{})
			}
			for _, r := range fast.take() {
				in += len(r.frame)
			}
			for _, r := range slow.take() {
				out += len(r.frame)
			}
		}
		burst := 2 * (MaxMTU + HeaderLen)
		for what, n := range map[string]int{"sent": in, "received": out} {
			if n < seconds*rate/8*98/100 || n > seconds*rate/8+burst+9000 {
				t.Errorf("%d-byte frames: %s %d bytes in %d s at %d bytes/s", len(payload), what, n, seconds, rate/8)
			}
		}
	}
	if slow.att.Counters.Dropped(RateLimit) == 0 || fast.att.Counters.Dropped(RateLimit) != 0 {
		t.Error("drops are not counted at the limited port")
	}
}

func TestLimitBounds(t *testing.T) {
	b := newBench(t, Config{})
	for _, c := range []PortConfig{{Rate: -1}, {Rate: MinRate - 1}, {Rate: MaxRate + 1}, {Storm: -2},
		{Storm: MaxStorm + 1}} {
		if _, err := b.net.Attach(&recPort{}, c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
	for _, n := range []int{-2, MaxStorm + 1} {
		if _, err := NewNetwork(Config{VNI: 1, Storm: n}); err == nil {
			t.Errorf("storm %d was accepted", n)
		}
	}
	for _, rate := range []int64{MinRate, MaxRate} {
		var m meter
		m.set(rate, rate/50)
		if !m.take(1, 8*MaxMTU) || m.full.Load() < 1 {
			t.Errorf("rate %d: the first frame did not pass", rate)
		}
	}
}

// A flood of addresses on some ports, however many, does not prevent another port's addresses from being learnt, and
// displaces none of ports within their share.
func TestFairTable(t *testing.T) {
	b := newBench(t, Config{MaxEntries: 400, MaxPortEntries: 300})
	greedy := []*recPort{b.port(PortConfig{Name: "g1", Kind: KindTAP}), b.port(PortConfig{Name: "g2", Kind: KindTAP})}
	modest := b.port(PortConfig{Name: "m", Kind: KindTAP})
	late := b.port(PortConfig{Name: "late", Kind: KindVTEP})
	for i := range 50 {
		b.input(modest.att, buildFrame(broadcast, mac(900000+i), ""), Source{})
	}
	for i := range 5000 {
		b.input(greedy[i%2].att, buildFrame(broadcast, mac(i+1), ""), Source{})
	}
	if n := b.net.entries.Load(); n != 400 {
		t.Fatalf("%d entries, want a full table", n)
	}
	for i := range 90 { // its share is 100
		b.input(late.att, buildFrame(broadcast, mac(800000+i), ""), Source{Remote: 1})
		for k := range 20 { // while the flood continues
			b.input(greedy[k%2].att, buildFrame(broadcast, mac(5000+i*20+k), ""), Source{})
		}
	}
	for i := range 90 {
		if e, ok := b.net.Lookup(mac(800000 + i)); !ok || e.Port != "late" {
			t.Fatalf("address %d of the late port: %+v %v", i, e, ok)
		}
	}
	for i := range 50 {
		if e, ok := b.net.Lookup(mac(900000 + i)); !ok || e.Port != "m" {
			t.Fatalf("address %d of the modest port: %+v %v", i, e, ok)
		}
	}
	st := b.net.Status()
	if st.Entries > 400 || st.Displaced != 90 {
		t.Errorf("%d entries, %d displaced", st.Entries, st.Displaced)
	}
	// Beyond its share it has no priority.
	for i := range 200 {
		b.input(late.att, buildFrame(broadcast, mac(700000+i), ""), Source{Remote: 1})
	}
	if n := late.att.entries.Load(); n > 101 {
		t.Errorf("late port has %d of 400 entries, 4 ports want them", n)
	}
	if n := late.att.Counters.Dropped(TableFull); n < 150 {
		t.Errorf("%d refusals counted", n)
	}
}

// An address that moves back and forth is counted, listed and logged once; one that moves once is not.
func TestFlapping(t *testing.T) {
	var log testlog.Log
	b := newBench(t, Config{Log: log.Logger()})
	p, q := b.port(PortConfig{Name: "left", Kind: KindTAP}), b.port(PortConfig{Name: "right", Kind: KindTAP})
	b.input(p.att, buildFrame(broadcast, mac(1), "p"), Source{})
	b.input(q.att, buildFrame(broadcast, mac(1), "q"), Source{})
	if len(b.net.Flapping()) != 0 {
		t.Error("a single move counts as flapping")
	}
	for range 20 { // slower than the window
		b.advance(flapWindow / flapMoves * 2 * time.Second)
		b.input(p.att, buildFrame(broadcast, mac(1), ""), Source{})
		b.advance(flapWindow / flapMoves * 2 * time.Second)
		b.input(q.att, buildFrame(broadcast, mac(1), ""), Source{})
	}
	if st := b.net.Status(); st.Flaps != 0 || st.Moves != 41 {
		t.Errorf("slow moves: %d flaps, %d moves", st.Flaps, st.Moves)
	}
	b.advance(time.Minute)
	for i := range 3 {
		for k := range 50 {
			b.input(p.att, tagged(5, buildFrame(broadcast, mac(2+i), fmt.Sprint("p", k))), Source{})
			b.input(q.att, tagged(5, buildFrame(broadcast, mac(2+i), fmt.Sprint("q", k))), Source{})
		}
	}
	st := b.net.Status()
	if st.Flaps != 3 || len(st.Flapping) != 3 {
		t.Fatalf("%d flaps: %+v", st.Flaps, st.Flapping)
	}
	if f := st.Flapping[0]; f != (Flapping{MAC: mac(2), VLAN: 5, Moves: flapMoves, Home: "left", From: "left",
		To: "right"}) {
		t.Errorf("%+v", f)
	}
	deadline := time.Now().Add(10 * time.Second)
	for strings.Count(log.String(), "flaps") == 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if n := strings.Count(log.String(), "mac="); n != 1 {
		t.Errorf("%d log lines, want 1:\n%s", n, log.String())
	}
	b.advance(time.Minute)
	if len(b.net.Flapping()) != 0 {
		t.Error("still flapping a minute later")
	}
}

// One MAC in two VLANs is two addresses; a static one is known in all VLANs.
func TestVLAN(t *testing.T) {
	b := newBench(t, Config{})
	p, q := b.port(PortConfig{Name: "p", Kind: KindTAP}), b.port(PortConfig{Name: "q", Kind: KindTAP})
	vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(9)}})
	b.input(p.att, tagged(5, buildFrame(broadcast, mac(1), "")), Source{})
	b.input(q.att, tagged(6, buildFrame(broadcast, mac(1), "")), Source{})
	if b.net.Status().Moves != 0 {
		t.Error("a MAC in two VLANs counts as a move")
	}
	p.take()
	q.take()
	for _, c := range []struct {
		vlan uint16
		p, q int
	}{{5, 1, 0}, {6, 0, 1}, {7, 1, 1}, {0, 1, 1}} {
		f := tagged(c.vlan, buildFrame(mac(1), mac(9), "hello"))
		b.input(vm.att, f, Source{})
		if gp, gq := p.take(), q.take(); len(gp) != c.p || len(gq) != c.q {
			t.Errorf("VLAN %d: %d %d frames", c.vlan, len(gp), len(gq))
		} else if len(gp) > 0 && gp[0].frame != string(f) {
			t.Errorf("VLAN %d: the frame was changed", c.vlan)
		}
	}
	vm.take()
	b.input(p.att, tagged(7, buildFrame(mac(9), mac(1), "")), Source{})
	if len(vm.take()) != 1 || len(q.take()) != 0 {
		t.Error("a VM's own MAC is not known in a VLAN")
	}
	b.input(p.att, tagged(7, buildFrame(broadcast, mac(9), "")), Source{})
	if p.att.Counters.Dropped(StaticMoved) != 1 || len(q.take()) != 0 {
		t.Error("a VM's MAC was claimed in a VLAN")
	}
	b.input(p.att, append(buildFrame(broadcast, mac(1), "")[:12], 0x81, 0, 1), Source{})
	if p.att.Counters.Dropped(ShortFrame) != 1 {
		t.Error("a truncated tag is not counted")
	}
}
