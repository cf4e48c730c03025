package vxlan

import (
	"net"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// protection stands for an encrypting interface. TestProtectedUnderlay of package integration has a real one.
type protection struct {
	name      string
	refreshed atomic.Int64
}

func (p *protection) Name() string { return p.name }
func (p *protection) Refresh()     { p.refreshed.Add(1) }

func (p *protection) Peer(a netip.Addr) bool {
	return a == netip.MustParseAddr(remoteIP) || a == netip.MustParseAddr("2001:db8::2")
}

// With a protection, datagrams are accepted only through its interface and sent only through it, whatever the routes
// say, also after it has gone (TR-4). Those that arrive otherwise are counted.
func TestProtection(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		p := &protection{name: "under"}
		c := Config{Protection: p, ShortPath: func(ShortPathConfig) (ShortPath, error) {
			t.Error("the short path was opened")
			return nil, nil
		}}
		peer, local, own, other, bits, host := remoteIP, localIP, "198.51.100.1", "198.51.100.2", "/24", "/32"
		if v6 {
			peer, own, other, bits, host = "2001:db8::2", "2001:db8:1::1", "2001:db8:1::2", "/64", "/128"
			c.Local = netip.MustParseAddr("2001:db8::1")
			local = c.Local.String()
		}
		r := newRig(t, c, []string{peer})
		if p.refreshed.Load() == 0 {
			t.Error("the interface was not adapted to its routes")
		}
		if s := r.vt.Status(); s.Device != "under" || s.ShortPath.State != "off: the underlay is encrypted" {
			t.Errorf("device %s, short path %q", s.Device, s.ShortPath.State)
		}
		// The path that is not protected. On it, a host uses the peer's address.
		path := nstest.New(t, "c")
		nstest.Pair(r.a, path, "plain", 1500)
		for _, dev := range []string{"all", "plain"} {
			r.a.MustExec("sysctl", "-qw", "net.ipv4.conf."+dev+".rp_filter=0")
		}
		r.a.Addr("plain", own+bits)
		path.Addr("plain", other+bits)
		path.Addr("lo", peer+host)
		path.IP("route", "add", local+host, "via", own, "src", peer)
		open := func(ns *nstest.NS, addr string, port int) (s *net.UDPConn) {
			ns.Do(func() {
				var err error
				if s, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(addr), Port: port}); err != nil {
					t.Fatal(err)
				}
			})
			t.Cleanup(func() { _ = s.Close() })
			return s
		}
		forger := open(path, peer, 4789)

		good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
		arrives := func() {
			t.Helper()
			r.send(r.remote, datagram(8, 100, good))
			testutil.Eventually(t, "a datagram through the interface is accepted", func() bool {
				select {
				case got := <-r.sink.frames:
					return got == string(good)
				default:
					return false
				}
			})
		}
		arrives()
		unprotected := func() uint64 { return r.vt.Status().Drops[Unprotected] }
		for _, from := range []*net.UDPConn{forger, open(path, peer, 180)} {
			before := unprotected()
			r.send(from, datagram(8, 100, good))
			testutil.Eventually(t, "a datagram by another interface is counted",
				func() bool { return unprotected() == before+1 })
		}
		arrives()
		select {
		case f := <-r.sink.frames:
			t.Errorf("%x arrived", f)
		default:
		}
		if n := unprotected(); n != 2 {
			t.Errorf("%d unprotected, want 2", n)
		}

		// For the kernel, what a user of this host sends to the VTEP's address has come by the address's interface. Its
		// source is an address of this host, so no peer, and it is not learnt either.
		if err := r.vt.SetLearnPeers(100, true); err != nil {
			t.Fatal(err)
		}
		drops := &r.vt.Attachment(100).Counters
		for i, from := range []*net.UDPConn{open(r.a, local, 200), open(r.a, own, 201)} {
			r.send(from, datagram(8, 100, good))
			testutil.Eventually(t, "a datagram of a user of this host is refused",
				func() bool { return drops.Dropped(vswitch.UnknownPeer)+unprotected() == uint64(i+3) })
		}
		arrives()
		if peers := r.vt.Peers(100); len(peers) != 1 || peers[0].Learnt {
			t.Errorf("peers %+v", peers)
		}

		// A route to the peer by the other interface is not taken.
		r.a.IP("route", "add", peer+host, "via", other)
		out := macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
		r.inject(r.loops[0], out)
		if d, _ := r.receive(r.remote); string(d[HeaderLen:]) != string(out) {
			t.Errorf("got %x, want %x", d, out)
		}

		// Without its interface it sends nothing.
		r.a.IP("link", "del", "under")
		r.a.Addr("plain", local+host)
		for range 10 {
			r.inject(r.loops[0], out)
		}
		testutil.Eventually(t, "frames are dropped as unreachable",
			func() bool { return drops.Dropped(vswitch.Unreachable) == 10 })
		marker := open(r.a, "", 7)
		testutil.Eventually(t, "the other interface works", func() bool {
			if _, err := marker.WriteTo([]byte("marker"), forger.LocalAddr()); err != nil {
				return false // the address is not usable yet
			}
			return true
		})
		b := make([]byte, 2048)
		if n, _, err := forger.ReadFrom(b); err != nil || string(b[:n]) != "marker" {
			t.Errorf("the first datagram on the other interface: %x, %v", b[:n], err)
		}
	}
}
