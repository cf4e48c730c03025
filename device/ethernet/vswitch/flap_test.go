package vswitch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// flapBench is a network with one roaming address, mac(1), and several ports.
type flapBench struct {
	*bench
	home, x, y *recPort
	serial     int
}

func newFlapBench(t *testing.T, c Config) *flapBench {
	b := newBench(t, c)
	return &flapBench{bench: b, home: b.port(PortConfig{Name: "home", Kind: KindTAP}),
		x: b.port(PortConfig{Name: "x", Kind: KindTAP}), y: b.port(PortConfig{Name: "y", Kind: KindTAP})}
}

// from sends a new broadcast of mac(1) and reports whether it passed.
func (b *flapBench) from(p *recPort) bool {
	before := p.att.Counters.Dropped(FlapHeld)
	b.serial++
	b.input(p.att, buildFrame(broadcast, mac(1), fmt.Sprint(b.serial)), Source{})
	return p.att.Counters.Dropped(FlapHeld) == before
}

func (b *flapBench) at() string { e, _ := b.net.Lookup(mac(1)); return e.Port }

func (b *flapBench) wantAt(want, when string) {
	b.t.Helper()
	if at := b.at(); at != want {
		b.t.Fatalf("%s: the address is at %q, want %q", when, at, want)
	}
}

// A frame that the network has flooded and gets back from elsewhere is dropped and nothing is learnt from it, from the
// first one on; but only for some time, and new frames pass.
func TestEcho(t *testing.T) {
	b := newFlapBench(t, Config{})
	send := func(p *recPort, what string) (passed bool) {
		before := p.att.Counters.Dropped(Looped)
		b.input(p.att, buildFrame(broadcast, mac(1), what), Source{})
		return p.att.Counters.Dropped(Looped) == before
	}
	send(b.home, "hello")
	for range 100 {
		if send(b.x, "hello") || send(b.y, "hello") {
			t.Fatal("an echo passed")
		}
	}
	b.wantAt("home", "after echoes")
	if !send(b.home, "hello") {
		t.Error("a repeated frame of the host was dropped")
	}
	if n := len(b.x.take()); n != 2 {
		t.Errorf("x got %d frames", n)
	}
	if !send(b.x, "I am here now") {
		t.Error("a new frame of a host that has moved was dropped")
	}
	b.wantAt("x", "moved")
	// It repeats the frames that it sent at its old place.
	send(b.home, "who has")
	for range echoWindow + 1 {
		send(b.x, "who has")
		b.advance(time.Second)
	}
	if !send(b.x, "who has") {
		t.Error("repeated frames at the host's new place were all dropped")
	}
	b.wantAt("x", "repeating itself")
}

// A flapping address is returned to its home at once, and is there when the hold ends; the frame that made it flap is
// dropped.
func TestFlapHome(t *testing.T) {
	for _, first := range []int{0, 1} { // port of the last move
		b := newFlapBench(t, Config{})
		b.from(b.home)
		if first == 1 {
			b.from(b.x)
			b.from(b.home)
		}
		other := []*recPort{b.x, b.y}
		for i := 2 * first; i < flapMoves-1; i++ {
			if !b.from(other[i%2]) {
				t.Fatalf("move %d was refused", i+1)
			}
		}
		b.home.take()
		if b.from(other[(flapMoves-1)%2]) {
			t.Error("the last move passed")
		}
		b.wantAt("home", "found")
		if len(b.home.take()) != 0 {
			t.Error("the frame of the last move was delivered")
		}
		for range 10 {
			if b.from(b.x) || b.from(b.y) {
				t.Fatal("a looped frame passed")
			}
			b.wantAt("home", "held")
		}
		if f := b.net.Flapping(); len(f) != 1 || f[0].Home != "home" {
			t.Errorf("%+v", f)
		}
		b.advance((flapWindow + 2) * time.Second)
		b.wantAt("home", "at the end of the window")
		if len(b.net.Flapping()) != 0 {
			t.Error("the address still flaps")
		}
		if !b.from(b.x) {
			t.Error("the address cannot move any more")
		}
		b.wantAt("x", "a move later")
	}
}

// A loop lasts for minutes, and returns every frame ever sent, ten times a second at two ports. A host that sends now
// and then stays at its place all the time; one that is silent loses a few frames per window, but not its place.
func TestFlapLoopPersists(t *testing.T) {
	for _, every := range []time.Duration{5 * time.Second, time.Hour} {
		t.Run(every.String(), func(t *testing.T) {
			b := newFlapBench(t, Config{})
			const step, lasts = 50 * time.Millisecond, 4 * time.Minute
			passed, away := 0, 0
			for d := time.Duration(0); d < lasts; d += step {
				if d%every == 0 {
					if !b.from(b.home) {
						t.Fatalf("after %v: the host's own frame was dropped", d)
					}
				}
				if b.from([]*recPort{b.x, b.y}[d/step%2]) {
					passed++
				}
				if b.at() != "home" {
					away++
				}
				b.advance(step)
			}
			limit := flapMoves
			if every > lasts {
				limit *= int(lasts/time.Second)/flapWindow + 1
			}
			if passed > limit || away > limit {
				t.Errorf("%d looped frames passed, the address was %d times not at home; want at most %d", passed, away, limit)
			}
			b.wantAt("home", "in the end")
			// The loop ends. Then the host moves, and its first frame is learnt.
			b.advance((flapWindow + 1) * time.Second)
			if !b.from(b.y) || b.at() != "y" {
				t.Error("the address cannot move after the loop has ended")
			}
		})
	}
}

// A bridge repeats all frames at one port, and the host sends little: there are no five moves within a window, until it
// sends more. Then its home is the place before all of that.
func TestFlapSlowLoop(t *testing.T) {
	b := newFlapBench(t, Config{})
	say := func() (repeated bool) {
		b.x.take()
		if b.from(b.home); len(b.x.take()) > 0 {
			repeated = b.from(b.x)
		}
		return repeated
	}
	for range 10 {
		say()
		b.wantAt("x", "a slow loop is not detected")
		b.advance((flapWindow + 2) * time.Second)
	}
	for range flapMoves {
		say()
	}
	b.wantAt("home", "noticed")
	if say() || !b.from(b.home) {
		t.Error("the repeated frame passes, or the host's own does not")
	}
}

// A host that moves is found at once; one that moves too often, or while its address is held, when its old place has
// been silent for a window; and if a loop repeats its frames from the new place, when the old entry has aged.
func TestFlapMove(t *testing.T) {
	found := func(t *testing.T, b *flapBench, from, loop *recPort, within int) {
		t.Helper()
		for range within + 1 {
			b.from(from)
			if loop != nil {
				b.from(loop)
			}
			b.advance(time.Second)
		}
		b.from(from)
		b.wantAt(from.att.Config().Name, fmt.Sprint("after ", within, " s"))
	}
	t.Run("once", func(t *testing.T) {
		b := newFlapBench(t, Config{})
		b.from(b.home)
		found(t, b, b.x, nil, 0)
	})
	t.Run("too often", func(t *testing.T) {
		b := newFlapBench(t, Config{})
		for range flapMoves {
			b.from(b.home)
			b.from(b.x)
		}
		b.wantAt("home", "held")
		found(t, b, b.x, nil, flapWindow)
	})
	t.Run("while held", func(t *testing.T) {
		b := newFlapBench(t, Config{})
		for range 30 { // a loop through the network: each frame comes back once
			b.from(b.home)
			b.from(b.x)
			b.advance(time.Second)
		}
		b.wantAt("home", "held")
		found(t, b, b.y, nil, flapWindow)
	})
	t.Run("in a loop", func(t *testing.T) {
		const age = 60
		b := newFlapBench(t, Config{Age: age * time.Second})
		for range 30 {
			b.from(b.home)
			b.from(b.x)
			b.advance(time.Second)
		}
		found(t, b, b.y, b.x, age+2*flapWindow)
		for range 60 { // and stays
			if !b.from(b.y) {
				t.Fatal("dropped at its new place")
			}
			b.from(b.x)
			b.advance(time.Second)
		}
		b.wantAt("y", "a minute later")
	})
}

// A home on a closed port is void, even if another port gets its number.
func TestFlapHomeGone(t *testing.T) {
	flap := func(b *flapBench) {
		for range flapMoves {
			b.from(b.home)
			b.from(b.x)
		}
		b.wantAt("home", "held")
	}
	t.Run("port", func(t *testing.T) {
		b := newFlapBench(t, Config{})
		flap(b)
		b.home.att.Close()
		b.port(PortConfig{Name: "heir", Kind: KindTAP})
		if !b.from(b.x) || !b.from(b.y) {
			t.Error("still held")
		}
		b.wantAt("y", "free")
	})
	t.Run("remote", func(t *testing.T) {
		b := newFlapBench(t, Config{})
		far := b.port(PortConfig{Name: "far", Kind: KindVTEP})
		for range flapMoves {
			for r := range Remote(2) {
				b.serial++
				b.input(far.att, buildFrame(broadcast, mac(1), fmt.Sprint(b.serial)), Source{Remote: r + 1})
			}
		}
		if e, _ := b.net.Lookup(mac(1)); e.Remote != 1 {
			t.Fatalf("held at %+v", e)
		}
		b.net.FlushRemote(far.att, 1)
		if !b.from(b.x) {
			t.Error("still held")
		}
		b.wantAt("x", "free")
	})
}

// Under random moves of few addresses between ports that are attached and closed, the table's counts are right, no
// entry points to a closed port, and an address listed as flapping is at its home.
func TestFlapModel(t *testing.T) {
	b := newBench(t, Config{MaxEntries: 64, MaxPortEntries: 64})
	rng := rand.New(rand.NewPCG(7, 8))
	var ports []*recPort
	serial := 0
	attach := func() {
		serial++
		ports = append(ports, b.port(PortConfig{Name: fmt.Sprint("p", serial), Kind: []Kind{KindTAP, KindVTEP}[rng.IntN(2)]}))
	}
	for range 4 {
		attach()
	}
	flapped := 0
	for step := range 8000 {
		p := ports[rng.IntN(len(ports))]
		m := mac(rng.IntN(3) + 1)
		switch k := rng.IntN(1000); {
		case k < 950:
			b.input(p.att, buildFrame(broadcast, m, fmt.Sprint(rng.IntN(100))), Source{Remote: Remote(rng.IntN(2))})
		case k < 990:
			b.advance(time.Duration(rng.IntN(4000)) * time.Millisecond)
		case k < 994:
			b.net.FlushRemote(p.att, Remote(rng.IntN(2)))
		case k < 997:
			b.net.Forget(Address{MAC: m})
		default:
			p.att.Close()
			ports = slices.DeleteFunc(ports, func(x *recPort) bool { return x == p })
			attach()
		}
		for _, f := range b.net.Flapping() {
			flapped++
			if e, ok := b.net.Lookup(f.MAC); ok && e.Port != f.Home {
				t.Fatalf("step %d: %+v is at %+v", step, f, e)
			}
		}
		var physical, perPort int64
		b.net.fdb.each(func(_ uint64, v value) {
			physical++
			if b.net.byID(v.port()) == nil {
				t.Fatalf("step %d: an entry of no port", step)
			}
		})
		for _, p := range ports {
			perPort += p.att.entries.Load()
			p.take()
		}
		if c := b.net.entries.Load(); c != physical || c != perPort {
			t.Fatalf("step %d: counted %d, in the table %d, by ports %d", step, c, physical, perPort)
		}
	}
	if flapped == 0 {
		t.Error("nothing flapped")
	}
}
