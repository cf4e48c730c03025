package vxlan

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// A network's MTU follows the narrowest path to its peers: routes, interfaces, and changes of the peers. Another
// network with other peers has its own MTU.
func TestPathMTU(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		c, peer, other, over := Config{}, remoteIP, "192.0.2.3", 50
		if v6 {
			c.Local, peer, other, over = netip.MustParseAddr("2001:db8::1"), "2001:db8::2", "2001:db8::3", 70
		}
		r := newRig(t, c, []string{peer})
		second, err := vswitch.NewNetwork(vswitch.Config{VNI: 200})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.vt.AddNetwork(second, addrs([]string{other})); err != nil {
			t.Fatal(err)
		}
		becomes := func(what string, first, next int) {
			t.Helper()
			testutil.Eventually(t, what, func() bool { return r.net.MTU() == first-over && second.MTU() == next-over })
		}
		becomes("the interface's", 1500, 1500)
		r.a.IP("route", "add", peer, "dev", "under", "mtu", "1400")
		becomes("the MTU of the route to the peer", 1400, 1500)
		st := r.vt.Status()
		if got := st.Networks[0].Peers[0].MTU; got != 1400-over {
			t.Errorf("status shows a path MTU of %d", got)
		}
		r.a.IP("link", "set", "under", "mtu", "1450")
		becomes("the smaller one of both", 1400, 1450)
		r.a.IP("route", "del", peer, "dev", "under")
		becomes("the interface's again", 1450, 1450)
		// The route leaves by another interface than the one with the address.
		nstest.Pair(r.a, r.b, "narrow", 1350)
		r.a.IP("route", "add", peer, "dev", "narrow")
		becomes("that of the route's interface", 1350, 1450)
		if err := r.vt.SetPeers(100, addrs([]string{other})); err != nil {
			t.Fatal(err)
		}
		becomes("the path's to the new peer", 1450, 1450)
		if err := r.vt.SetPeers(100, nil); err != nil {
			t.Fatal(err)
		}
		becomes("without peers, that of the local address's interface", 1450, 1450)
		third, err := vswitch.NewNetwork(vswitch.Config{VNI: 300, MTU: 1320})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.vt.AddNetwork(third, addrs([]string{peer})); !errors.Is(err, ErrMTU) {
			t.Errorf("network of MTU 1320 over a path of 1350: %v", err)
		}
	}
}

// A local address on the loopback interface, as in routed fabrics: its MTU of 64 KiB does not count.
func TestLoopbackAddress(t *testing.T) {
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	a.Addr("under", "192.0.2.1/24")
	b.Addr("under", "192.0.2.2/24")
	a.Addr("lo", "198.51.100.1/32")
	vt, n, _, _ := plain(t, a, "198.51.100.1", "192.0.2.2")
	if n.MTU() != 1450 {
		t.Errorf("MTU %d", n.MTU())
	}
	if vt.MTU() <= 1500 {
		t.Errorf("MTU %d with a local address on the loopback interface", vt.MTU())
	}
}

// plain makes a VTEP with one network, and a port in it for the test.
func plain(t *testing.T, ns *nstest.NS, local string, peers ...string) (*VTEP, *vswitch.Network, *vswitch.Attachment,
	*sink) {
	t.Helper()
	l, err := loop.New(loop.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	pool, err := frame.NewPool(frame.Config{Count: 256})
	if err != nil {
		t.Fatal(err)
	}
	n, err := vswitch.NewNetwork(vswitch.Config{VNI: 100, Name: "hundred", Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{frames: make(chan string, 1000)}
	att, err := n.Attach(s, vswitch.PortConfig{Name: "vm", Kind: vswitch.KindVM, MACs: []vswitch.MAC{{2, 0, 0, 0, 0, 1}},
		Loop: l})
	if err != nil {
		t.Fatal(err)
	}
	var vt *VTEP
	ns.Do(func() {
		if vt, err = New(Config{Local: netip.MustParseAddr(local), Loops: []*loop.Loop{l}, Pool: pool,
			Segmentation: true}); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() {
		vt.Close()
		if k := pool.InUse(); k != 0 {
			t.Errorf("%d buffers leaked", k)
		}
	})
	if err := vt.AddNetwork(n, addrs(peers)); err != nil {
		t.Fatal(err)
	}
	return vt, n, att, s
}

// A router on the path has a narrower link. The kernel learns that from the router's ICMP; the network's MTU follows,
// and the tenant's sender gets an ICMP error instead of silent loss.
func TestPathMTUDiscovery(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		a, m, b := nstest.New(t, "a"), nstest.New(t, "m"), nstest.New(t, "b")
		nstest.Pair(a, m, "left", 1500)
		nstest.Pair(m, b, "right", 1400)
		local, peer, over := "192.0.2.1", "198.51.100.2", 50
		addr := func(s string) string { return s + "/24" }
		via := []string{"192.0.2.2", "198.51.100.1"}
		if v6 {
			local, peer, over, via = "2001:db8:1::1", "2001:db8:2::2", 70, []string{"2001:db8:1::2", "2001:db8:2::1"}
			addr = func(s string) string { return s + "/64" }
		}
		a.Addr("left", addr(local))
		m.Addr("left", addr(via[0]))
		m.Addr("right", addr(via[1]))
		b.Addr("right", addr(peer))
		m.MustExec("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
		a.IP("route", "add", "default", "via", via[0])
		b.IP("route", "add", "default", "via", via[1])
		vt, n, att, got := plain(t, a, local, peer)
		l := att.Config().Loop
		if n.MTU() != 1500-over {
			t.Fatalf("MTU %d at first", n.MTU())
		}
		f := macs(9, 1, append(ip4(0, 1, 2, header.ProtoTCP, 7, 8), make([]byte, 1380)...))
		f[ethLen+6] |= 0x40 // DF
		send := func() {
			l.Do(func() {
				p := vt.cfg.Pool.Get()
				p.Append(f)
				att.Input(l, p, vswitch.Source{})
				p.Free()
			})
		}
		// Routes are not checked meanwhile: a check would find the new MTU, too, and then the switch would refuse the
		// frame before it gets here.
		vt.mu.Lock()
		unlock := sync.OnceFunc(vt.mu.Unlock)
		defer unlock()
		testutil.Eventually(t, "the frame is counted as too big", func() bool {
			send()
			return vt.Attachment(100).Counters.Dropped(vswitch.UnderlayTooBig) > 0
		})
		unlock()
		var mtu int
		testutil.Eventually(t, "the sender gets an answer", func() bool {
			send()
			select {
			case s := <-got.frames:
				if s[ethLen+9] != 1 || s[ethLen+20] != 3 || s[ethLen+21] != 4 {
					t.Fatalf("got %x", s)
				}
				mtu = int(binary.BigEndian.Uint16([]byte(s)[ethLen+26:]))
				return true
			default:
				return false
			}
		})
		if mtu != 1400-over {
			t.Errorf("the answer names MTU %d, want %d", mtu, 1400-over)
		}
		testutil.Eventually(t, "the network's MTU follows", func() bool { return n.MTU() == 1400-over })
	}
}

const ethLen = vswitch.HeaderLen

// Status names the senders of refused datagrams, with the reason and the VNI; datagrams to a source port are counted.
func TestRefused(t *testing.T) {
	r := newRig(t, Config{SourcePorts: 1}, []string{remoteIP})
	stranger := r.socket("192.0.2.3:4789")
	good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	for range 5 {
		r.send(stranger, datagram(8, 100, good))
	}
	r.send(r.remote, datagram(8, 77, good))
	r.send(r.remote, datagram(0, 100, good))
	for i, s := range r.vt.tx[0].socks {
		if _, err := r.remote.WriteToUDPAddrPort(datagram(8, 100, good),
			netip.AddrPortFrom(r.vt.Local(), s.port)); err != nil {
			t.Fatal(i, err)
		}
	}
	want := map[Refused]bool{
		{From: netip.MustParseAddr("192.0.2.3"), VNI: 100, Reason: "unknown-peer", Count: 5}: true,
		{From: netip.MustParseAddr(remoteIP), VNI: 77, Reason: "unknown-vni", Count: 1}:      true,
		{From: netip.MustParseAddr(remoteIP), VNI: 0, Reason: "bad-header", Count: 1}:        true,
	}
	testutil.Eventually(t, "three senders are named", func() bool {
		left := len(want)
		for _, x := range r.vt.Status().Refused {
			x.Ago = 0
			if want[x] {
				left--
			}
		}
		return left == 0
	})
	testutil.Eventually(t, "the wrong port is counted", func() bool { return r.vt.Status().Drops[WrongPort] == 1 })
	select {
	case f := <-r.sink.frames:
		t.Errorf("%x arrived", f)
	default:
	}
	// A flood from many addresses does not grow the list.
	l := r.loops[0]
	l.Do(func() {
		for i := range 1000 {
			r.vt.refuse(l, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), 1, vswitch.UnknownPeer)
		}
	})
	if n := len(r.vt.Status().Refused); n != refusedSlots {
		t.Errorf("%d named", n)
	}
}

// Datagrams that the kernel drops because a receiver is slower than the wire are counted, too.
func TestSocketOverflow(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	gate := make(chan struct{})
	for _, l := range r.loops {
		l.Post(func() { <-gate })
	}
	p := datagram(8, 100, append(macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8)), make([]byte, 1300)...))
	testutil.Eventually(t, "the socket's buffer overflows", func() bool {
		for range 500 {
			r.send(r.remote, p)
		}
		var s vswitch.Totals
		r.vt.socketDrops(&s)
		return s.Drops[SocketOverflow] > 0
	})
	close(gate)
	for name := range r.vt.Status().Drops {
		if !strings.HasPrefix(name, "socket-") {
			t.Errorf("also counted as %s", name)
		}
	}
}
