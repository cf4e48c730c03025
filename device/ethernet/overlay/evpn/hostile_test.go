package evpn

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/testutil"
)

// intruder is a hostile BGP speaker, as neighbour 9 of host 1. It must be made before the host has networks: starting a
// gobgp sets variables of the package that others read when they have routes.
type intruder struct {
	f       *fabric
	srv     *server.BgpServer
	settled bool
}

func (f *fabric) intruder() *intruder {
	f.t.Helper()
	x := &intruder{f: f, srv: server.NewBgpServer()}
	done := make(chan struct{})
	go func() { x.srv.Serve(); close(done) }()
	f.t.Cleanup(func() { x.srv.Stop(); <-done })
	c := f.config(9, 1)
	g := &api.Global{Asn: testAS, RouterId: c.RouterID.String(), ListenPort: int32(f.port),
		ListenAddresses: []string{f.bgpAddr(9).String()}, Families: []uint32{9}}
	if err := x.srv.StartBgp(context.Background(), &api.StartBgpRequest{Global: g}); err != nil {
		f.t.Fatal(err)
	}
	c.HoldTime = DefaultHoldTime
	if err := x.srv.AddPeer(context.Background(), &api.AddPeerRequest{Peer: c.peer(&c.Neighbours[0])}); err != nil {
		f.t.Fatal(err)
	}
	return x
}

// lie is a type 2 route that the intruder sends.
type lie struct {
	rd      string // 192.0.2.N:NUMBER
	mac     vswitch.MAC
	ip      netip.Addr
	vni     uint32
	etag    uint32
	target  string
	nextHop netip.Addr
	encap   bgp.TunnelType
	seq     uint32
	sticky  bool
	pref    uint32
}

func truth(n int) lie {
	return lie{rd: "192.0.2.9:100", mac: hwaddr(n), vni: 100, target: "65001:100", nextHop: vtepAddr(9),
		encap: bgp.TUNNEL_TYPE_VXLAN}
}

func (l lie) path(t testing.TB) *apiutil.Path {
	t.Helper()
	rd, err := bgp.ParseRouteDistinguisher(l.rd)
	if err != nil {
		t.Fatal(err)
	}
	rt, err := bgp.ParseRouteTarget(l.target)
	if err != nil {
		t.Fatal(err)
	}
	key, err := bgp.NewEVPNMacIPAdvertisementRoute(rd, bgp.EthernetSegmentIdentifier{Value: make([]byte, 9)}, l.etag,
		l.mac.String(), l.ip, []uint32{l.vni})
	if err != nil {
		t.Fatal(err)
	}
	reach, err := bgp.NewPathAttributeMpReachNLRI(bgp.RF_EVPN, []bgp.PathNLRI{{NLRI: key}}, l.nextHop)
	if err != nil {
		t.Fatal(err)
	}
	attrs := []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(0), reach,
		bgp.NewPathAttributeExtendedCommunities([]bgp.ExtendedCommunityInterface{bgp.NewEncapExtended(l.encap), rt,
			bgp.NewMacMobilityExtended(l.seq, l.sticky)}),
	}
	if l.pref > 0 {
		attrs = append(attrs, bgp.NewPathAttributeLocalPref(l.pref))
	}
	return &apiutil.Path{Family: bgp.RF_EVPN, Nlri: key, Attrs: attrs, Age: time.Now().Unix()}
}

// settle waits until the intruder's gobgp sends changes. It first sends all routes, and changes between that and its
// next state are lost (watch.go). No network imports the route that is advertised here, and withdrawn again.
func (x *intruder) settle() {
	x.f.t.Helper()
	if x.settled {
		return
	}
	x.settled = true
	l := truth(0xffff)
	l.rd, l.target = "192.0.2.9:999", "65001:999"
	testutil.Eventually(x.f.t, "the neighbour sends changes", func() bool {
		l.seq++
		x.tell(l)
		updates := uint64(0)
		err := x.srv.ListPeer(context.Background(), &api.ListPeerRequest{}, func(p *api.Peer) {
			updates = p.GetState().GetMessages().GetSent().GetUpdate()
		})
		if err != nil {
			x.f.t.Fatal(err)
		}
		return updates > 2 // than the end of all routes, and one of them
	})
	x.untell(l)
}

func (x *intruder) tell(lies ...lie) {
	x.f.t.Helper()
	x.settle()
	for _, l := range lies {
		if _, err := x.srv.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{l.path(x.f.t)}}); err != nil {
			x.f.t.Fatal(err)
		}
	}
}

func (x *intruder) untell(lies ...lie) {
	x.f.t.Helper()
	for _, l := range lies {
		if err := x.srv.DeletePath(apiutil.DeletePathRequest{Paths: []*apiutil.Path{l.path(x.f.t)}}); err != nil {
			x.f.t.Fatal(err)
		}
	}
}

// serve advertises that a VTEP serves a network.
func (x *intruder) serve(vtep netip.Addr, vni uint32) {
	x.f.t.Helper()
	x.settle()
	rd, _ := bgp.ParseRouteDistinguisher(fmt.Sprintf("192.0.2.9:%d", vni))
	rt, _ := bgp.ParseRouteTarget(fmt.Sprintf("65001:%d", vni))
	key, err := bgp.NewEVPNMulticastEthernetTagRoute(rd, 0, vtep)
	if err != nil {
		x.f.t.Fatal(err)
	}
	id, _ := bgp.NewIngressReplTunnelID(vtep)
	reach, _ := bgp.NewPathAttributeMpReachNLRI(bgp.RF_EVPN, []bgp.PathNLRI{{NLRI: key}}, vtep)
	attrs := []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(0), reach,
		bgp.NewPathAttributeExtendedCommunities([]bgp.ExtendedCommunityInterface{rt}),
		bgp.NewPathAttributePmsiTunnel(bgp.PMSI_TUNNEL_TYPE_INGRESS_REPL, false, vni, id)}
	if _, err := x.srv.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{{Family: bgp.RF_EVPN, Nlri: key,
		Attrs: attrs}}}); err != nil {
		x.f.t.Fatal(err)
	}
}

// Every kind of unusable route is refused for its own reason, is shown with it, and changes nothing.
func TestHostileRoutes(t *testing.T) { both(t, testHostileRoutes) }

func testHostileRoutes(t *testing.T, f *fabric) {
	c := f.config(1, 9)
	c.Neighbours[0].NextHops = []netip.Prefix{netip.PrefixFrom(vtepAddr(9), 32)}
	h := f.host(1, c)
	x := f.intruder()
	blue, red := h.tenant(100, NetworkConfig{}), h.tenant(101, NetworkConfig{})
	x.serve(vtepAddr(9), 100)

	edit := func(n int, e func(*lie)) lie { l := truth(n); e(&l); return l }
	lies := map[error]lie{
		errForeign: edit(1, func(l *lie) { l.nextHop = vtepAddr(2) }),
		errOwn:     edit(2, func(l *lie) { l.nextHop = vtepAddr(1) }),
		errNextHop: edit(3, func(l *lie) { l.nextHop = netip.AddrFrom4([4]byte{239, 1, 1, 1}) }),
		errFamily:  edit(4, func(l *lie) { l.nextHop = netip.MustParseAddr("2001:db8::9") }),
		errTag:     edit(5, func(l *lie) { l.etag = 7 }),
		errVNI:     edit(6, func(l *lie) { l.vni = 101 }),
		errEncap:   edit(7, func(l *lie) { l.encap = bgp.TUNNEL_TYPE_MPLS }),
		errMAC:     edit(8, func(l *lie) { l.mac[0] = 3 }),
		errIP:      edit(9, func(l *lie) { l.ip = netip.AddrFrom4([4]byte{224, 0, 0, 9}) }),
		errTarget:  edit(10, func(l *lie) { l.target = "65001:999" }),
	}
	for _, l := range lies {
		x.tell(l)
	}
	x.tell(truth(50)) // and a usable one
	testutil.Eventually(t, "the usable route", func() bool { return blue.behind(hwaddr(50)) == vtepAddr(9) })
	testutil.Eventually(t, "reasons", func() bool {
		seen := map[string]bool{}
		for _, r := range h.s.Routes("") {
			if r.Active && r.Neighbour.IsValid() && r.MAC != hwaddr(50) && r.Type == "mac" {
				t.Fatalf("installed: %+v", r)
			}
			seen[r.Why] = true
		}
		for why := range lies {
			if !seen[why.Error()] {
				return false
			}
		}
		return true
	})
	for why, l := range lies {
		for _, n := range []*tenant{blue, red} {
			if _, ok := n.net.Lookup(l.mac); ok {
				t.Errorf("%v: the MAC was installed in network %s", why, n.net.Name())
			}
		}
		if h.s.Status().Refused[why.Error()] == 0 {
			t.Errorf("%v: not counted", why)
		}
	}
	if len(red.peers()) != 0 {
		t.Errorf("peers of the other tenant: %v", red.peers())
	}
	if log := h.log.String(); !strings.Contains(log, "EVPN route refused") ||
		!strings.Contains(log, "neighbour=127.0.1.9") {
		t.Error("no log line for refused routes")
	}
}

// A neighbour claims the MAC of a VM of this host: with higher sequence numbers, with the same key, as static. The VM
// keeps it; the contest ends.
func TestTheft(t *testing.T) { both(t, testTheft) }

func testTheft(t *testing.T, f *fabric) {
	h := f.host(1, f.config(1, 9))
	x := f.intruder()
	n := h.tenant(100, NetworkConfig{})
	m := hwaddr(1)
	n.attach("vm1", m)
	x.serve(vtepAddr(9), 100)
	said := func() (r RouteStatus) { r, _ = n.route(m, vtepAddr(1)); return r }
	mine := func() bool { e, ok := n.net.Lookup(m); return ok && e.Port == "vm1" }

	// The same key with a higher preference: our route stays the best.
	l := truth(1)
	l.rd, l.pref, l.seq = "192.0.2.1:100", 5000, 0
	x.tell(l)
	x.tell(truth(50))
	testutil.Eventually(t, "the route sent after it", func() bool { return n.behind(hwaddr(50)) == vtepAddr(9) })
	if r, ok := n.route(m, vtepAddr(9)); ok {
		t.Errorf("a foreign route replaced this host's own: %+v", r)
	}

	for i := range uint32(3) {
		l = truth(1)
		l.seq = 10 * (i + 1)
		x.tell(l)
		testutil.Eventually(t, "this host claims it again", func() bool { return said().Sequence == l.seq+1 })
	}
	for i := range uint32(dupMoves) {
		l.seq = 100 + 10*i
		x.tell(l)
		testutil.Eventually(t, "the claim arrives", func() bool {
			r, ok := n.route(m, vtepAddr(9))
			return ok && r.Sequence == l.seq
		})
	}
	testutil.Eventually(t, "the duplicate is detected", func() bool { return h.s.Status().Networks[0].Frozen == 1 })
	if !strings.Contains(h.log.String(), "duplicate MAC") {
		t.Error("no log line for the duplicate")
	}
	before := said()
	l.seq = math.MaxUint32
	x.tell(l)
	testutil.Eventually(t, "the last claim arrives", func() bool {
		r, _ := n.route(m, vtepAddr(9))
		return r.Sequence == l.seq
	})
	if after := said(); after != before {
		t.Errorf("the contest has not ended: %+v, %+v", before, after)
	}
	if !mine() {
		t.Error("the VM has lost its MAC")
	}
	// An operator clears it; the maximum sequence number cannot be exceeded, but the VM keeps its MAC.
	if !n.src.ClearDuplicate(m) {
		t.Error("no duplicate to clear")
	}
	if l.sticky = true; !mine() {
		t.Error("the VM has lost its MAC")
	}
	x.tell(l)
	testutil.Eventually(t, "the static claim arrives", func() bool {
		r, _ := n.route(m, vtepAddr(9))
		return r.Sticky
	})
	if !mine() {
		t.Error("the VM has lost its MAC to a static claim")
	}
}

// Claims with equal sequence numbers: the lower VTEP has the address (RFC 7432 section 15). A static one does not move
// to a host that sends here (section 15.2).
func TestTies(t *testing.T) {
	f := newFabric(t)
	h := f.host(1, f.config(1, 9))
	x := f.intruder()
	n := h.tenant(100, NetworkConfig{})
	lower := netip.AddrFrom4([4]byte{192, 0, 1, 1})
	f.ns.IP("route", "add", "192.0.1.0/24", "dev", "under")
	x.serve(vtepAddr(9), 100)
	x.serve(lower, 100)
	at := n.attach("tap1")
	m := hwaddr(1)
	n.speak(at, m)
	said := func(m vswitch.MAC) bool { _, ok := n.route(m, vtepAddr(1)); return ok }
	testutil.Eventually(t, "it is advertised", func() bool { return said(m) })
	l := truth(1)
	x.tell(l)
	testutil.Eventually(t, "the other claim arrives", func() bool {
		r, ok := n.route(m, vtepAddr(9))
		return ok && !r.Active
	})
	if !said(m) || n.behind(m).IsValid() {
		t.Error("a claim with the same number from a higher VTEP has taken the address")
	}
	l.rd, l.nextHop = "192.0.1.1:100", lower
	x.tell(l)
	testutil.Eventually(t, "a lower VTEP gets it", func() bool { return n.behind(m) == lower && !said(m) })

	l = truth(2)
	l.sticky = true
	x.tell(l)
	testutil.Eventually(t, "the static address is installed", func() bool { return n.behind(hwaddr(2)) == vtepAddr(9) })
	n.speak(at, hwaddr(2))
	n.speak(at, hwaddr(3))
	testutil.Eventually(t, "another address that sends here is advertised", func() bool { return said(hwaddr(3)) })
	if said(hwaddr(2)) || n.behind(hwaddr(2)) != vtepAddr(9) {
		t.Error("a static address has moved")
	}
}

// A flood of routes: a network installs as many as it has room for, and uses room that becomes free; a neighbour that
// exceeds its limit loses its session and all its routes, for some time.
func TestFlood(t *testing.T) { both(t, testFlood) }

func testFlood(t *testing.T, f *fabric) {
	c := f.config(1, 9)
	c.Neighbours[0].MaxRoutes, c.LimitIdle = 60, 5*time.Second
	// The intruder's gobgp (4.8) may send nothing in a session that follows another one: what ends the goroutine that
	// sends for the former is left in its queue. Such a session ends with the hold time, and another one follows.
	c.HoldTime = 9 * time.Second
	h := f.host(1, c)
	x := f.intruder()
	n := h.tenant(100, NetworkConfig{MaxEntries: 10})
	x.serve(vtepAddr(9), 100)
	for i := range 30 {
		x.tell(truth(i + 1))
	}
	net := func() NetworkStatus { return h.s.Status().Networks[0] }
	testutil.Eventually(t, "the network is full", func() bool { s := net(); return s.MACs == 10 && s.Waiting == 20 })
	waiting := 0
	for _, r := range h.s.Routes("net100") {
		if r.Why == errFull.Error() {
			waiting++
		}
	}
	if waiting != 20 {
		t.Errorf("%d routes wait for room", waiting)
	}
	for i := range 25 {
		x.untell(truth(i + 1))
	}
	testutil.Eventually(t, "waiting addresses get room", func() bool {
		s := net()
		return s.MACs == 5 && s.Waiting == 0
	})
	for i := range 5 {
		if got := n.behind(hwaddr(26 + i)); got != vtepAddr(9) {
			t.Errorf("MAC %d is at %v", 26+i, got)
		}
	}
	for i := range 80 {
		x.tell(truth(i + 1000))
	}
	testutil.Eventually(t, "the session is ended", func() bool {
		s := h.s.Status().Sessions[0]
		return s.State != "established" && strings.Contains(s.Why, "limit")
	})
	testutil.Eventually(t, "its routes are removed", func() bool {
		s := net()
		return s.MACs == 0 && s.VTEPs == 0 && len(n.peers()) == 0
	})
	testutil.Eventually(t, "a log line names the limit", func() bool {
		return strings.Contains(h.log.String(), "exceeds its route limit")
	})
	for i := range 80 {
		x.untell(truth(i + 1000))
	}
	testutil.Eventually(t, "the neighbour is accepted again", func() bool {
		s := net()
		return s.MACs == 5 && n.behind(hwaddr(26)) == vtepAddr(9)
	})
}

// A session is mute if nothing is sent in it although there is something to send.
func TestMute(t *testing.T) {
	begun := time.Unix(1000, 0)
	d := doubt{since: begun, sent: 7}
	for _, x := range []struct {
		after            time.Duration
		sent, advertised uint64
		over, mute       bool
	}{
		{muteTime - 1, 7, 3, false, false}, {muteTime, 7, 3, true, true}, {muteTime, 7, 0, true, false},
		{time.Second, 8, 3, true, false}, {time.Minute, 8, 3, true, false}, {time.Second, 7, 0, false, false},
	} {
		if over, mute := d.judge(begun.Add(x.after), x.sent, x.advertised); over != x.over || mute != x.mute {
			t.Errorf("%+v: over %t, mute %t", x, over, mute)
		}
		// What is advertised is known only if it has been asked for.
		if due := due(map[netip.Addr]doubt{{}: d}, begun.Add(x.after)); x.mute && !due {
			t.Errorf("%+v: not asked what is advertised", x)
		}
	}
}

// Routes that can never be best (here: their path has this AS) are kept by gobgp, and count towards the limit.
func TestFloodUnseen(t *testing.T) {
	f := newFabric(t)
	c := f.config(1)
	c.Neighbours = append(c.Neighbours, f.rawNeighbour(firstRaw))
	h := f.host(1, c)
	h.tenant(100, NetworkConfig{})
	x := f.call(t, firstRaw)
	time.Sleep(2 * watchEvery) // the start of the session is over
	through := attribute(0x40, 2, binary.BigEndian.AppendUint32([]byte{2, 1}, testAS)...)
	for i := range 2 * c.Neighbours[0].MaxRoutes {
		x.send(update(rawOrigin, through, rawPref, rawReach(x.rawMAC(i)...), rawTarget))
	}
	testutil.Eventually(t, "the session is ended", func() bool {
		s := h.s.Status().Sessions[0]
		return s.State != "established" && strings.Contains(s.Why, "limit")
	})
}

// The routes for one address are bounded, because each change of one looks at all of them.
func TestCrowd(t *testing.T) { both(t, testCrowd) }

func testCrowd(t *testing.T, f *fabric) {
	h := f.host(1, f.config(1, 9))
	x := f.intruder()
	n := h.tenant(100, NetworkConfig{})
	x.serve(vtepAddr(9), 100)
	// A list comes after the replay that the new network asked BGP's process for, which would refuse routes twice.
	h.s.Routes("")
	const more = 50
	for i := range maxClaims + more {
		l := truth(1)
		l.ip = netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		x.tell(l)
	}
	testutil.Eventually(t, "routes beyond the bound are refused",
		func() bool { return h.s.Status().Refused[errClaims.Error()] == more })
	if got := len(h.s.Routes("net100")); got > maxClaims+10 {
		t.Errorf("%d routes are kept", got)
	}
	testutil.Eventually(t, "the address is installed", func() bool { return n.behind(hwaddr(1)) == vtepAddr(9) })
	x.tell(truth(2))
	testutil.Eventually(t, "another address is installed", func() bool { return n.behind(hwaddr(2)) == vtepAddr(9) })
}

// Routes are decoded by gobgp and checked here; neither may crash, and accepted routes are valid.
func FuzzRoute(f *testing.F) {
	for _, l := range []lie{truth(1), {rd: "65001:7", mac: hwaddr(2), ip: netip.MustParseAddr("fd00::1"), vni: 100,
		target: "1.2.3.4:5", nextHop: vtepAddr(9), encap: 9, seq: 3, sticky: true}} {
		p := l.path(f)
		msg := bgp.NewBGPUpdateMessage(nil, p.Attrs, nil)
		b, err := msg.Body.Serialize()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		u := &bgp.BGPUpdate{}
		if err := u.DecodeFromBytes(b); err != nil {
			return
		}
		s := &Speaker{cfg: Config{AS: testAS, VTEP: vtepAddr(1), Neighbours: []Neighbour{{Address: vtepAddr(9)}}}}
		n := &Network{s: s, vni: 100}
		s.networks = map[uint32]*Network{100: n}
		for _, a := range u.PathAttributes {
			reach, ok := a.(*bgp.PathAttributeMpReachNLRI)
			if !ok {
				continue
			}
			for _, x := range reach.Value {
				p := readPath(&apiutil.Path{Nlri: x.NLRI, Attrs: u.PathAttributes, PeerAddress: vtepAddr(9)})
				r, why := s.decode(&p)
				if why != nil {
					continue
				}
				if r.net != n || r.etag != 0 || r.vtep == s.cfg.VTEP || !r.vtep.Is4() || r.vtep.IsMulticast() ||
					r.kind == bgp.EVPN_ROUTE_TYPE_MAC_IP_ADVERTISEMENT && (r.mac.IsZero() || r.mac.IsGroup()) {
					t.Errorf("counts: %+v", r)
				}
			}
		}
	})
}
