package vswitch

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/frame/header"
)

// roceFrame is a RoCE v2 frame over IPv4 with size bytes after the Ethernet header.
func roceFrame(f *Flow, size int) []byte {
	p := make([]byte, size)
	copy(p, v4RoCE)
	copy(p[12:16], f.SrcIP[12:])
	binary.BigEndian.PutUint16(p[2:], uint16(size))
	b := eth(0x800, p)
	copy(b, f.Dst[:])
	copy(b[6:], f.Src[:])
	return b
}

// After any change, a route that is still current equals a new one, and if it names a device, a frame goes there and
// nowhere else.
func TestRouteRandom(t *testing.T) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		b := newBench(t, Config{VNI: 1, MTU: 1500})
		other, err := NewNetwork(Config{VNI: 2, MTU: 1500, Clock: b.clock})
		if err != nil {
			t.Fatal(err)
		}
		tap := b.port(PortConfig{Kind: KindTAP, Name: "tap"})
		addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }
		const n = 4
		var vms [n]*VMPort
		var hcas [n]*face
		attach := func(i int) {
			c := VMPortConfig{Name: "vm", MAC: mac(i), Loop: b.loop}
			if rng.IntN(4) == 0 {
				c.IPs = []netip.Addr{addr(i)}
			}
			if rng.IntN(8) == 0 {
				c.Rate = 1e9
			}
			p, err := NewVMPort(b.net, c)
			if err != nil {
				t.Fatal(err)
			}
			p.SetHCA(hcas[i])
			vms[i] = p
		}
		for i := range n {
			hcas[i] = &face{up: true}
			attach(i)
		}
		type known struct {
			from int
			flow Flow
			r    Route
		}
		var routes []known
		named := 0
		for range 150 {
			i := rng.IntN(n)
			switch rng.IntN(9) {
			case 0:
				vms[i].Close()
				attach(i)
			case 1:
				vms[i].SetHCA(nil)
			case 2:
				vms[i].SetHCA(hcas[i])
			case 3:
				_ = vms[i].Attachment().SetMonitor(&watcher{})
			case 4:
				vms[i].Attachment().RemoveMonitor()
			case 5:
				if err := vms[i].Move([]*Network{b.net, other}[rng.IntN(2)]); err != nil {
					t.Fatal(err)
				}
			case 6:
				_ = b.net.SetStatic(Address{MAC: mac(100 + rng.IntN(3))}, tap.att, 0)
			case 7:
				b.net.RemoveStatic(Address{MAC: mac(100 + rng.IntN(3))}, tap.att)
			}
			b.advance(time.Duration(rng.IntN(3)) * time.Second)
			from := rng.IntN(n)
			src := rng.IntN(2*n) % (n + 1) // usually its own
			if rng.IntN(4) > 0 {
				src = from
			}
			f := Flow{Src: mac(src), Dst: mac(rng.IntN(n)), SrcIP: header.Mapped4(addr(from).As4()),
				Size: 1000 + rng.IntN(2)*501}
			if rng.IntN(8) == 0 {
				f.Dst = mac(100 + rng.IntN(3))
			}
			if rng.IntN(8) == 0 {
				f.SrcIP = header.Mapped4([4]byte{10, 0, 0, 99})
			}
			routes = append(routes, known{from, f, Route{}})
			b.loop.Do(func() {
				for k := range routes {
					x := &routes[k]
					fresh := vms[x.from].RouteHCA(b.loop, &x.flow)
					if x.r.Current() && x.r.HCA() != fresh.HCA() {
						t.Fatalf("route of %+v is current and leads to %v, now to %v", x.flow, x.r.HCA(), fresh.HCA())
					}
					x.r = fresh
					if fresh.HCA() == nil {
						continue
					}
					named++
					for _, h := range hcas {
						h.got = 0
					}
					tap.got = nil
					buf := b.pool.Get()
					buf.Append(roceFrame(&x.flow, x.flow.Size))
					vms[x.from].InputHCA(b.loop, buf)
					buf.Free()
					for _, h := range hcas {
						if want := fresh.HCA() == HCAFace(h); (h.got == 1) != want || h.got > 1 || len(tap.got) > 0 {
							t.Fatalf("%+v: a frame went to another device than the route says", x.flow)
						}
					}
				}
			})
			if len(routes) > 20 {
				routes = routes[1:]
			}
		}
		if named < 50 {
			t.Errorf("only %d routes named a device", named)
		}
		for _, v := range vms {
			v.Close()
		}
	}
}

// Setting a monitor on a port, or closing it, waits for loops that have entered a route.
func TestRouteEnter(t *testing.T) {
	b := newBench(t, Config{})
	var vms [2]*VMPort
	for i := range vms {
		var err error
		if vms[i], err = NewVMPort(b.net, VMPortConfig{Name: "vm", MAC: mac(i), Loop: b.loop}); err != nil {
			t.Fatal(err)
		}
		vms[i].SetHCA(&face{up: true})
	}
	inside, leave := make(chan bool), make(chan bool)
	go b.loop.Do(func() {
		r := vms[0].RouteHCA(b.loop, &Flow{Src: mac(0), Dst: mac(1), Size: 100})
		inside <- r.HCA() != nil && r.Enter(b.loop)
		<-leave
		if r.Current() {
			t.Error("a route is still current during a capture")
		}
		r.Leave(b.loop)
		if r.Enter(b.loop) {
			t.Error("a route was entered during a capture")
		}
		inside <- false
	})
	if !<-inside {
		t.Fatal("no route")
	}
	set := make(chan error)
	go func() { set <- vms[1].Attachment().SetMonitor(&watcher{}) }()
	for vms[1].Attachment().unseen() {
		time.Sleep(time.Millisecond)
	}
	select {
	case <-set:
		t.Error("RemoveMonitor or Close did not wait")
	case <-time.After(20 * time.Millisecond):
	}
	leave <- true
	<-inside
	if err := <-set; err != nil {
		t.Error(err)
	}
	var none Route
	b.loop.Do(func() {
		if none.Current() || none.Enter(b.loop) || none.HCA() != nil {
			t.Error("the zero Route leads somewhere")
		}
	})
	for _, v := range vms {
		v.Close()
	}
}
