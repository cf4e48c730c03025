package hca

import (
	"net/netip"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
)

// station is a host of the network that records all frames and sends what the test injects.
type station struct {
	att *vswitch.Attachment
	got [][]byte
}

func (s *station) Deliver(_ *loop.Loop, b *frame.Buf, _ vswitch.Destination) {
	s.got = append(s.got, append([]byte(nil), b.Bytes()...))
}

func (s *station) take() [][]byte {
	got := s.got
	s.got = nil
	return got
}

// TestNeighbours: two devices without a network card resolve each other and a host by ARP and ND, are resolved by the
// host, and answer only for their own addresses.
func TestNeighbours(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	net, err := vswitch.NewNetwork(vswitch.Config{VNI: 2, MTU: 1500, Clock: w.clock, Pool: w.pool})
	if err != nil {
		t.Fatal(err)
	}
	l := w.loops[0]
	for _, g := range w.guests {
		p, err := vswitch.NewVMPort(net, vswitch.VMPortConfig{Name: g.cfg.Name, MAC: g.cfg.MAC, Loop: l})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		p.SetHCA(g.HCAFace())
		p.SetNet(g.Neighbours())
		g.SetPort(p)
		t.Cleanup(func() { g.SetPort(nil); p.SetNet(nil); p.SetHCA(nil) })
	}
	host := &station{}
	if host.att, err = net.Attach(host, vswitch.PortConfig{Name: "host", Kind: vswitch.KindTAP, Loop: l}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.att.Close)
	say := func(eth header.Ethernet, n int, put func([]byte)) {
		b := w.pool.Get()
		defer b.Free()
		b.SetLen(eth.Len() + n)
		put(b.Bytes()[eth.Encode(b.Bytes()):])
		l.Do(func() { host.att.Input(l, b, vswitch.Source{}) })
	}
	hostMAC := header.MAC{2, 0, 0, 0, 0, 0x77}
	a, b := w.guests[0], w.guests[1]
	for _, c := range []struct{ a, b, host, unused string }{
		{"10.0.0.1", "10.0.0.2", "10.0.0.9", "10.0.0.55"},
		{"2001:db8::1", "2001:db8::2", "2001:db8::9", "2001:db8::55"},
	} {
		gid := func(s string) [16]byte { return netip.MustParseAddr(s).As16() }
		v4 := netip.MustParseAddr(c.a).Is4()
		for _, x := range []struct {
			g    *guest
			addr string
		}{{a, c.a}, {b, c.b}} {
			req := abi.SetGID{Type: abi.GIDRoCEv2, VLANID: abi.NoVLAN, SMAC: x.g.cfg.MAC, GID: gid(x.addr)}
			x.g.must(abi.CmdSetGID, enc(abi.SizeSetGID, &req))
		}
		resolve := func(addr string) (mac [6]byte) {
			t.Helper()
			var r abi.ResolveResp
			if err := r.Decode(a.must(abi.CmdResolve, enc(abi.SizeResolve, &abi.Resolve{DGID: gid(addr)}))); err != nil {
				t.Fatal(err)
			}
			return r.MAC
		}
		if got := resolve(c.a); got != a.cfg.MAC {
			t.Errorf("its own address %s: %x", c.a, got)
		}
		// The neighbour answers within the request, so that the second lookup finds it.
		resolve(c.b)
		if got := resolve(c.b); got != b.cfg.MAC {
			t.Errorf("%s is at %x, want %x", c.b, got, b.cfg.MAC)
		}
		// A silent host stays unknown; each lookup sends a request.
		host.take()
		for range 2 {
			if got := resolve(c.host); got != [6]byte{} {
				t.Fatalf("%s is at %x before it sent a frame", c.host, got)
			}
		}
		asked := host.take()
		if len(asked) != 2 {
			t.Fatalf("%s was asked %d times, want 2", c.host, len(asked))
		}
		if v4 {
			reply := header.ARP{Op: header.ARPReply, SenderMAC: hostMAC, SenderIP: netip.MustParseAddr(c.host).As4(),
				TargetMAC: a.cfg.MAC, TargetIP: netip.MustParseAddr(c.a).As4()}
			say(header.Ethernet{Dst: a.cfg.MAC, Src: hostMAC, Type: header.TypeARP, VLAN: header.NoVLAN}, header.ARPLen,
				func(b []byte) { reply.Encode(b) })
		} else {
			src, dst := gid(c.host), gid(c.a)
			reply := header.Neighbor{Advert: true, Solicited: true, Override: true, Target: src, Link: hostMAC, HasLink: true}
			ip := header.IPv6{PayloadLen: uint16(reply.Len()), NextHeader: header.ProtoICMPv6, HopLimit: 255, Src: src, Dst: dst}
			say(header.Ethernet{Dst: a.cfg.MAC, Src: hostMAC, Type: header.TypeIPv6, VLAN: header.NoVLAN},
				header.IPv6Len+reply.Len(), func(b []byte) {
					ip.Encode(b)
					reply.Encode(b[header.IPv6Len:], src, dst)
				})
		}
		if got := resolve(c.host); got != hostMAC {
			t.Errorf("%s is at %x, want %x", c.host, got, hostMAC)
		}
		// The host asks the device directly, so that the switch does not answer: for its own and an unused address.
		ask := func(target string) [][]byte {
			t.Helper()
			host.take()
			if v4 {
				q := header.ARP{Op: header.ARPRequest, SenderMAC: hostMAC, SenderIP: netip.MustParseAddr(c.host).As4(),
					TargetIP: netip.MustParseAddr(target).As4()}
				say(header.Ethernet{Dst: a.cfg.MAC, Src: hostMAC, Type: header.TypeARP, VLAN: header.NoVLAN}, header.ARPLen,
					func(b []byte) { q.Encode(b) })
			} else {
				src, dst := gid(c.host), gid(target)
				q := header.Neighbor{Target: dst, Link: hostMAC, HasLink: true}
				ip := header.IPv6{PayloadLen: uint16(q.Len()), NextHeader: header.ProtoICMPv6, HopLimit: 255, Src: src, Dst: dst}
				say(header.Ethernet{Dst: a.cfg.MAC, Src: hostMAC, Type: header.TypeIPv6, VLAN: header.NoVLAN},
					header.IPv6Len+q.Len(), func(b []byte) {
						ip.Encode(b)
						q.Encode(b[header.IPv6Len:], src, dst)
					})
			}
			return host.take()
		}
		if got := ask(c.a); len(got) != 1 || !claims(got[0], a.cfg.MAC, gid(c.a)) {
			t.Errorf("asked for %s: %x", c.a, got)
		}
		if got := ask(c.unused); len(got) != 0 {
			t.Errorf("answers for %s, which is not its own: %x", c.unused, got)
		}
		a.up.Store(false)
		if got := ask(c.a); len(got) != 0 {
			t.Errorf("answers for %s without a driver: %x", c.a, got)
		}
		a.up.Store(true)
	}
	for _, bad := range []abi.Resolve{
		{SGIDIndex: 9, DGID: [16]byte{15: 1}},
		{},
		{DGID: [16]byte{0: 0xff, 1: 2, 15: 1}},
		{DGID: netip.MustParseAddr("10.0.0.1").As16()}, // the GID is an IPv6 address now
	} {
		a.refused(abi.StatusInvalid, abi.CmdResolve, enc(abi.SizeResolve, &bad))
	}
}

// claims reports whether a frame announces that a MAC has an address.
func claims(f []byte, mac header.MAC, addr [16]byte) bool {
	var eth header.Ethernet
	n, err := eth.Decode(f)
	if err != nil || eth.Src != mac {
		return false
	}
	if eth.Type == header.TypeARP {
		var m header.ARP
		_, err := m.Decode(f[n:])
		return err == nil && m.Op == header.ARPReply && m.SenderMAC == mac && header.Mapped4(m.SenderIP) == addr
	}
	var ip header.IPv6
	var m header.Neighbor
	h, err := ip.Decode(f[n:])
	return err == nil && m.Decode(f[n+h:], ip.Src, ip.Dst) == nil && m.Advert && m.Target == addr && m.Link == mac &&
		m.HasLink
}
