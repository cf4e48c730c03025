package vxlan

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

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

// routed is a VTEP on host a, a router m, and a peer b behind a link of MTU 1400.
type routed struct {
	a, m, b *nstest.NS
	vt      *VTEP
	net     *vswitch.Network
	att     *vswitch.Attachment
	got     *sink
	peer    string
	via     string // a's next hop
	over    int    // of encapsulation
	frame   []byte // TCP with DF, larger than MTU 1400 allows
}

func newRouted(t *testing.T, v6 bool) *routed {
	t.Helper()
	r := &routed{a: nstest.New(t, "a"), m: nstest.New(t, "m"), b: nstest.New(t, "b")}
	nstest.Pair(r.a, r.m, "left", 1500)
	nstest.Pair(r.m, r.b, "right", 1400)
	local, via, bits := "192.0.2.1", []string{"192.0.2.2", "198.51.100.1"}, "/24"
	r.peer, r.over = "198.51.100.2", 50
	if v6 {
		local, via, bits = "2001:db8:1::1", []string{"2001:db8:1::2", "2001:db8:2::1"}, "/64"
		r.peer, r.over = "2001:db8:2::2", 70
	}
	r.via = via[0]
	r.a.Addr("left", local+bits)
	r.m.Addr("left", via[0]+bits)
	r.m.Addr("right", via[1]+bits)
	r.b.Addr("right", r.peer+bits)
	r.m.MustExec("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	r.a.IP("route", "add", "default", "via", via[0])
	r.b.IP("route", "add", "default", "via", via[1])
	r.vt, r.net, r.att, r.got = plain(t, r.a, local, r.peer)
	if r.net.MTU() != 1500-r.over {
		t.Fatalf("MTU %d at first", r.net.MTU())
	}
	r.frame = macs(9, 1, append(ip4(0, 1, 2, header.ProtoTCP, 7, 8), make([]byte, 1380)...))
	r.frame[ethLen+6] |= 0x40 // DF
	return r
}

func (r *routed) send() {
	l := r.att.Config().Loop
	l.Do(func() {
		p := r.vt.cfg.Pool.Get()
		p.Append(r.frame)
		r.att.Input(l, p, vswitch.Source{})
		p.Free()
	})
}

// answered waits for the ICMP error to the frame's sender, which names the tenants' MTU.
func (r *routed) answered(t *testing.T, want int) {
	t.Helper()
	var mtu int
	testutil.Eventually(t, "the sender gets an answer", func() bool {
		r.send()
		select {
		case s := <-r.got.frames:
			if s[ethLen+9] != 1 || s[ethLen+20] != 3 || s[ethLen+21] != 4 {
				t.Fatalf("got %x", s)
			}
			mtu = int(binary.BigEndian.Uint16([]byte(s)[ethLen+26:]))
			return true
		default:
			return false
		}
	})
	if mtu != want {
		t.Errorf("the answer names MTU %d, want %d", mtu, want)
	}
}

// The underlay's interface becomes narrower, and a frame is sent before the VTEP knows: the network's MTU follows, and
// the tenant's sender gets an ICMP error instead of silent loss.
func TestNarrowerInterface(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		r := newRouted(t, v6)
		// Changes are not followed meanwhile: otherwise the switch would refuse the frame before it gets here.
		r.vt.mu.Lock()
		unlock := sync.OnceFunc(r.vt.mu.Unlock)
		defer unlock()
		r.a.IP("link", "set", "left", "mtu", "1400")
		testutil.Eventually(t, "the frame is counted as too big", func() bool {
			r.send()
			return r.vt.Attachment(100).Counters.Dropped(vswitch.UnderlayTooBig) > 0
		})
		unlock()
		r.answered(t, 1400-r.over)
		testutil.Eventually(t, "the network's MTU follows", func() bool { return r.net.MTU() == 1400-r.over })
	}
}

// A router on the path has a narrower link and says so by ICMP, which is not believed, because anybody can send it
// (TR-3). The operator's route is: the network's MTU follows, and the tenant's sender gets an ICMP error.
func TestRouteMTU(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		r := newRouted(t, v6)
		before := icmpErrors(t, r.a, v6)
		testutil.Eventually(t, "the router's ICMP arrives", func() bool {
			r.send()
			return icmpErrors(t, r.a, v6) > before
		})
		r.stays(t, 1500-r.over)
		r.a.IP("route", "add", r.peer, "via", r.via, "mtu", "lock", "1400")
		testutil.Eventually(t, "the network's MTU follows the route", func() bool { return r.net.MTU() == 1400-r.over })
		r.answered(t, 1400-r.over)
		r.a.IP("route", "change", r.peer, "via", r.via, "mtu", "1390")
		testutil.Eventually(t, "and its change", func() bool { return r.net.MTU() == 1390-r.over })
		r.a.IP("route", "del", r.peer)
		testutil.Eventually(t, "and its end", func() bool { return r.net.MTU() == 1500-r.over })
	}
}

// stays checks that the network's MTU is unchanged, in the kernel's eyes too: a frame of that size leaves.
func (r *routed) stays(t *testing.T, mtu int) {
	t.Helper()
	if err := r.vt.RefreshMTU(); err != nil {
		t.Fatal(err)
	}
	if n := r.net.MTU(); n != mtu {
		t.Errorf("the network's MTU became %d, want %d", n, mtu)
	}
	if n := r.vt.Peers(100)[0].MTU; n != mtu {
		t.Errorf("the path's MTU became %d, want %d", n, mtu)
	}
	sent := r.vt.Status().OutFrames
	r.send()
	testutil.Eventually(t, "the frame leaves", func() bool { return r.vt.Status().OutFrames > sent })
	if n := r.vt.Attachment(100).Counters.Dropped(vswitch.UnderlayTooBig); n != 0 {
		t.Errorf("%d frames refused as too big", n)
	}
}

// icmpErrors returns how often the kernel of ns was told by ICMP that a datagram was too big.
func icmpErrors(t *testing.T, ns *nstest.NS, v6 bool) (n int) {
	t.Helper()
	if v6 {
		for line := range strings.Lines(ns.MustExec("cat", "/proc/self/net/snmp6")) {
			if f := strings.Fields(line); f[0] == "Icmp6InPktTooBigs" {
				n, _ = strconv.Atoi(f[1])
			}
		}
		return n
	}
	var names []string
	for line := range strings.Lines(ns.MustExec("cat", "/proc/self/net/snmp")) {
		f := strings.Fields(line)
		if i := slices.Index(names, "InDestUnreachs"); f[0] == "Icmp:" && i >= 0 {
			n, _ = strconv.Atoi(f[i])
		}
		if f[0] == "Icmp:" {
			names = f
		}
	}
	return n
}

// A host that is neither peer nor router sends one ICMP error "fragmentation needed" about a datagram of the VTEP,
// whose contents it need not know, and one about an answer to a ping, which the kernel believes whatever the VTEP's
// sockets say, and remembers for the route: neither changes the MTU (TR-3).
func TestForgedICMP(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		r := newRouted(t, v6)
		for _, ping := range []bool{false, true} {
			before := icmpErrors(t, r.a, v6)
			r.m.Do(func() { forgeICMP(t, r.vt.Local(), netip.MustParseAddr(r.peer), ping) })
			testutil.Eventually(t, "the error arrives", func() bool { return icmpErrors(t, r.a, v6) > before })
			r.stays(t, 1500-r.over)
		}
	}
}

// forgeICMP sends an ICMP error to host a: its datagram from port 4789 to port 4789 of peer, or its answer to a ping of
// peer, exceeds an MTU of 576, over IPv6 of 1280.
func forgeICMP(t *testing.T, a, peer netip.Addr, ping bool) {
	about, inner := byte(unix.IPPROTO_UDP),
		[]byte{4789 >> 8, 4789 & 0xff, 4789 >> 8, 4789 & 0xff, 1400 >> 8, 1400 & 0xff, 0, 0}
	switch {
	case ping && a.Is4():
		about, inner = unix.IPPROTO_ICMP, make([]byte, 8) // type 0: echo reply
	case ping:
		about, inner = unix.IPPROTO_ICMPV6, []byte{129, 0, 0, 0, 0, 0, 0, 0}
	}
	family, proto := unix.AF_INET, unix.IPPROTO_ICMP
	var to unix.Sockaddr
	var b []byte
	if a.Is4() {
		to = &unix.SockaddrInet4{Addr: a.As4()}
		b = []byte{3, 4, 0, 0, 0, 0, 576 >> 8, 576 & 0xff}
		b = append(b, 0x45, 0, 1420>>8, 1420&0xff, 0, 1, 0x40, 0, 64, about, 0, 0)
		b = append(append(b, a.AsSlice()...), peer.AsSlice()...)
		binary.BigEndian.PutUint16(b[18:], header.Checksum(b[8:28], 0))
		b = append(b, inner...)
		binary.BigEndian.PutUint16(b[2:], header.Checksum(b, 0))
	} else {
		family, proto, to = unix.AF_INET6, unix.IPPROTO_ICMPV6, &unix.SockaddrInet6{Addr: a.As16()}
		b = []byte{2, 0, 0, 0, 0, 0, 1280 >> 8, 1280 & 0xff, 0x60, 0, 0, 0, 1400 >> 8, 1400 & 0xff, about, 64}
		b = append(append(append(b, a.AsSlice()...), peer.AsSlice()...), inner...) // the kernel adds the checksum
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		t.Error(err)
		return
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, b, 0, to); err != nil {
		t.Error(err)
	}
}

const ethLen = vswitch.HeaderLen

// Status names the senders of refused datagrams, with the reason and the VNI; datagrams to a source port are counted.
func TestRefused(t *testing.T) {
	r := newRig(t, Config{SourcePorts: 1}, []string{remoteIP})
	stranger := r.socket("192.0.2.3:4789")
	good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	// One at a time: a loop does not wait for another one, or for Status, to name a sender.
	refused := func(s *net.UDPConn, d []byte, counters *vswitch.Counters, why vswitch.Reason) {
		before := counters.Dropped(why)
		r.send(s, d)
		testutil.Eventually(t, "a datagram is refused", func() bool { return counters.Dropped(why) == before+1 })
		for _, l := range r.loops {
			l.Do(func() {})
		}
	}
	for range 5 {
		refused(stranger, datagram(8, 100, good), &(*r.vt.nets.Load())[100].att.Counters, vswitch.UnknownPeer)
	}
	refused(r.remote, datagram(8, 77, good), &r.vt.Counters, vswitch.UnknownVNI)
	refused(r.remote, datagram(0, 100, good), &r.vt.Counters, vswitch.BadHeader)
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
	for _, x := range r.vt.Status().Refused {
		x.Ago = 0
		delete(want, x)
	}
	if len(want) > 0 {
		t.Errorf("not named: %v; named: %v", want, r.vt.Status().Refused)
	}
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
