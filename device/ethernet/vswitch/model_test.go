package vswitch

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// tagged inserts a VLAN tag into a frame; with VLAN 0 it returns the frame unchanged.
func tagged(vlan uint16, f []byte) []byte {
	if vlan == 0 {
		return f
	}
	return slices.Insert(slices.Clone(f), 12, 0x81, 0, byte(vlan>>8)|0x60, byte(vlan)) // with a priority
}

// The table against a map: random learning, moving, ageing, static entries, removal of ports and remotes.
func TestTableModel(t *testing.T) {
	type entry struct {
		port   string
		remote Remote
		static bool
		seen   int64
	}
	const age = 20
	b := newBench(t, Config{Age: age * time.Second, MaxEntries: 4096, MaxPortEntries: 4096, noHold: true})
	model := map[Address]entry{}
	rng := rand.New(rand.NewPCG(5, 6))
	var ports []*recPort
	serial := 0
	attach := func() {
		serial++
		kind := KindTAP
		if rng.IntN(2) == 0 {
			kind = KindVTEP
		}
		ports = append(ports, b.port(PortConfig{Name: fmt.Sprint("p", serial), Kind: kind}))
	}
	for range 4 {
		attach()
	}
	now := func() int64 { return b.clock.Now() / int64(time.Second) }
	live := func(m Address) (entry, bool) {
		e, ok := model[m]
		return e, ok && (e.static || now()-e.seen <= age)
	}
	random := func() Address { return Address{mac(rng.IntN(300) + 1), []uint16{0, 0, 5, 4094}[rng.IntN(4)]} }
	for step := range 15000 {
		p := ports[rng.IntN(len(ports))]
		name := p.att.Config().Name
		m, r := random(), Remote(rng.IntN(3))
		switch k := rng.IntN(100); {
		case k < 80:
			b.input(p.att, tagged(m.VLAN, buildFrame(mac(rng.IntN(300)+1), m.MAC, "")), Source{Remote: r})
			e, _ := live(m)
			all, _ := live(Address{MAC: m.MAC})
			if !e.static && !all.static {
				model[m] = entry{name, r, false, now()}
			}
		case k < 90:
			b.advance(time.Duration(rng.IntN(3000)) * time.Millisecond)
		case k < 93:
			err := b.net.SetStatic(m, p.att, r)
			if e, ok := live(m); ok && e.static && e.port != name {
				if !errors.Is(err, ErrMACInUse) {
					t.Fatalf("SetStatic: %v", err)
				}
			} else if err != nil {
				t.Fatal(err)
			} else {
				model[m] = entry{name, r, true, 0}
				for x, e := range model {
					if m.VLAN == 0 && x.MAC == m.MAC && !e.static {
						delete(model, x)
					}
				}
			}
		case k < 97:
			e, ok := model[m]
			want := ok && e.static && e.port == name
			if b.net.RemoveStatic(m, p.att) != want {
				t.Fatalf("RemoveStatic: want %v", want)
			}
			if want {
				delete(model, m)
			}
		case k < 98:
			e, ok := live(m)
			if got := b.net.Forget(m); ok && got == e.static { // aged entries may still be in the table
				t.Fatalf("Forget %v: %v, model %+v %v", m, got, e, ok)
			}
			if !e.static {
				delete(model, m)
			}
		case k < 99:
			b.net.FlushRemote(p.att, r)
			for m, e := range model {
				if e.port == name && e.remote == r {
					delete(model, m)
				}
			}
		default:
			p.att.Close()
			ports = slices.DeleteFunc(ports, func(x *recPort) bool { return x == p })
			for m, e := range model {
				if e.port == name {
					delete(model, m)
				}
			}
			attach()
		}
		for range 3 {
			m := random()
			got, ok := b.net.LookupIn(m)
			want, wantOK := live(m)
			if all, ok := live(Address{MAC: m.MAC}); !wantOK && all.static {
				want, wantOK = all, ok
			}
			if ok != wantOK || ok && (got.Port != want.port || got.Remote != want.remote || got.Static != want.static) {
				t.Fatalf("step %d: %v: table %+v %v, model %+v %v", step, m, got, ok, want, wantOK)
			}
		}
		if step%1000 == 0 {
			n := 0
			for m := range model {
				if _, ok := live(m); ok {
					n++
				}
			}
			if got := len(b.net.Entries()); got != n {
				t.Fatalf("step %d: %d entries, model %d", step, got, n)
			}
			var physical, perPort int64
			b.net.fdb.each(func(uint64, value) { physical++ })
			for _, p := range ports {
				perPort += p.att.entries.Load()
			}
			if c := b.net.entries.Load(); c != physical || perPort+b.net.statics.Load() != c {
				t.Fatalf("step %d: counted %d, in the table %d, by ports %d + %d static", step, c, physical, perPort,
					b.net.statics.Load())
			}
		}
	}
}
