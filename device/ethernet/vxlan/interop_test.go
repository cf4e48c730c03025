package vxlan_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/fastpath"
	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/ways"
)

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func newLoops(t testing.TB, n int) (loops []*loop.Loop) {
	for i := range n {
		l := must[*loop.Loop](t)(loop.New(loop.Config{ID: i, SpinFor: ways.Spin(20 * time.Microsecond)}))
		if err := l.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		loops = append(loops, l)
	}
	return loops
}

// host is one vnicd-like host: a VTEP, one network, a TAP with an address in it.
type host struct {
	vt   *vxlan.VTEP
	net  *vswitch.Network
	tap  *tap.TAP
	pool *frame.Pool
}

type hostConfig struct {
	vni   uint32
	local string
	peers []string
	tap   tap.Config
	opts  []vxlan.NetworkOption
	zero  bool // IPv6 datagrams without checksum
	storm int  // frames per second
	whole bool // no short path: all frames go through the switch
	alone bool // no segmentation: every datagram is sent and received on its own
	ports vxlan.PeerPorts
}

// shortPath returns the short path's constructor, or nil.
func shortPath(on bool) func(vxlan.ShortPathConfig) (vxlan.ShortPath, error) {
	if !on {
		return nil
	}
	return fastpath.Open
}

func newHost(t testing.TB, ns *nstest.NS, loops []*loop.Loop, c hostConfig) *host {
	t.Helper()
	h := &host{}
	h.pool = must[*frame.Pool](t)(frame.NewPool(frame.Config{Count: 2048, Big: 128}))
	h.net = must[*vswitch.Network](t)(vswitch.NewNetwork(vswitch.Config{VNI: c.vni, Name: fmt.Sprint("net", c.vni),
		Pool: h.pool, Storm: c.storm}))
	var peers []netip.Addr
	for _, p := range c.peers {
		peers = append(peers, netip.MustParseAddr(p))
	}
	ns.Do(func() {
		h.vt = must[*vxlan.VTEP](t)(vxlan.New(vxlan.Config{Local: netip.MustParseAddr(c.local), Loops: loops, Pool: h.pool,
			ZeroChecksum6: c.zero, PeerPorts: c.ports, Segmentation: !c.alone && ways.Segmentation(),
			ShortPath: shortPath(!c.whole && ways.ShortPath())}))
		if err := h.vt.AddNetwork(h.net, peers, c.opts...); err != nil {
			t.Fatal(err)
		}
		c.tap.Network, c.tap.Loop, c.tap.Pool = h.net, loops[0], h.pool
		h.tap = must[*tap.TAP](t)(tap.Open(c.tap))
	})
	t.Cleanup(func() {
		if t.Failed() {
			j, _ := json.MarshalIndent(h.net.Status(), "", " ")
			t.Logf("%s", j)
		}
		ns.Do(func() {
			if err := h.tap.Close(); err != nil {
				t.Error(err)
			}
			h.vt.Close()
			if n := h.pool.InUse(); n != 0 {
				t.Errorf("%d buffers leaked", n)
			}
		})
	})
	return h
}

// wires are the underlays of the interoperability tests.
var wires = []wireKind{{name: "IPv4", mtu: 1500}, {name: "IPv4 jumbo", mtu: 9000}, {name: "IPv6", v6: true, mtu: 1500},
	{name: "IPv6 jumbo", v6: true, mtu: 9000}}

type wireKind struct {
	name string
	v6   bool
	mtu  int
}

// addr is host i's underlay address.
func (w wireKind) addr(i int) string {
	if w.v6 {
		return fmt.Sprint("2001:db8::", i)
	}
	return fmt.Sprint("192.0.2.", i)
}

// inner is the MTU that the underlay leaves to a network.
func (w wireKind) inner() int {
	if w.v6 {
		return w.mtu - 70
	}
	return w.mtu - 50
}

// underlay assigns an address to an interface.
func underlay(ns *nstest.NS, dev, addr string) {
	plen := "/24"
	if strings.Contains(addr, ":") {
		plen = "/64"
	}
	ns.Addr(dev, addr+plen)
}

// linuxPeer makes a Linux host with a vxlan device in a bridge, 10.0.0.2 and fd00::2 in the tenant's network.
func linuxPeer(ns *nstest.NS, dev, local, remote string, opts ...string) {
	underlay(ns, dev, local)
	ns.IP(append([]string{"link", "add", "vx", "type", "vxlan", "id", "4711", "dstport", "4789", "local", local, "remote",
		remote, "dev", dev}, opts...)...)
	ns.IP("link", "add", "brt", "type", "bridge")
	ns.IP("link", "set", "vx", "master", "brt", "up")
	ns.IP("link", "set", "brt", "up")
	ns.Addr("brt", "10.0.0.2/24")
	ns.Addr("brt", "fd00::2/64")
}

// tooBig has a host whose interface is wider than the network send full packets: the ICMP error must name the network's
// MTU.
func tooBig(t *testing.T, ns *nstest.NS, h *host, mtu int) {
	t.Helper()
	ns.IP("link", "set", "tenant", "mtu", fmt.Sprint(mtu+100))
	for _, c := range []struct{ ip, say string }{{"10.0.0.2", "mtu = %d"}, {"fd00::2", "mtu=%d"}} {
		out, err := ns.Exec("ping", "-c1", "-W5", "-Mdo", "-s", fmt.Sprint(mtu+20), c.ip)
		if want := fmt.Sprintf(c.say, mtu); err == nil || !strings.Contains(out, want) {
			t.Errorf("ping of a packet that is too big: no %q: %v\n%s", want, err, out)
		}
	}
	if n := h.net.Status().Drops[vswitch.TooBig.String()]; n != 2 {
		t.Errorf("%d counted as too big, want 2", n)
	}
	ns.IP("link", "set", "tenant", "mtu", fmt.Sprint(mtu))
}

// The peer is a plain Linux vxlan device in a bridge; ping and iperf3 run both ways, over IPv4 and IPv6.
func TestLinuxPeer(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	nstest.Require(t, "iperf3", "iperf3")
	type kind struct {
		wireKind
		device []string
		zero   bool
	}
	kinds := []kind{
		{wireKind{name: "IPv6 zero checksum received", v6: true, mtu: 1500}, []string{"udp6zerocsumtx"}, false},
		{wireKind{name: "IPv6 zero checksum sent", v6: true, mtu: 1500}, []string{"udp6zerocsumrx"}, true},
	}
	for _, w := range wires {
		kinds = append(kinds, kind{wireKind: w})
	}
	for _, u := range kinds {
		t.Run(u.name, func(t *testing.T) {
			a, b := nstest.New(t, "a"), nstest.New(t, "b")
			nstest.Pair(a, b, "under", u.mtu)
			b.NoOffload("under")
			local, remote := u.addr(1), u.addr(2)
			underlay(a, "under", local)
			linuxPeer(b, "under", remote, local, u.device...)
			loops := newLoops(t, 2)
			h := newHost(t, a, loops, hostConfig{vni: 4711, local: local, peers: []string{remote}, zero: u.zero,
				tap: tap.Config{Offloads: true, Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"),
					netip.MustParsePrefix("fd00::1/64")}}})
			if got, want := h.net.MTU(), u.inner(); got != want {
				t.Errorf("network MTU %d, want %d", got, want)
			}
			full := fmt.Sprint(u.inner() - 28)
			a.Ping("10.0.0.2", "-s", full, "-Mdo")
			b.Ping("10.0.0.1", "-s", full, "-Mdo")
			a.Ping("fd00::2")
			b.Ping("fd00::1")
			// Inner fragments.
			for _, ip := range []string{"10.0.0.2", "fd00::2"} {
				a.Ping(ip, "-s", fmt.Sprint(2*u.mtu))
			}
			// The host's neighbour table is flushed; the switch still knows the addresses and answers.
			a.IP("neigh", "flush", "dev", "tenant")
			a.Ping("10.0.0.2")
			a.Ping("fd00::2")
			if n := h.tap.Attachment().Counters.Totals().Answered; n < 2 {
				t.Errorf("%d requests were answered by the switch", n)
			}
			tooBig(t, a, h, u.inner())

			b.Start("iperf3", "-s")
			for _, dir := range [][]string{nil, {"-R"}, {"-P4"}} {
				r := runIperf(t, a, "10.0.0.2", append(dir, "-n32M")...)
				t.Logf("TCP %v: %.0f Mbit/s", dir, bitsPerSecond(t, r)/1e6)
			}
			udp := runIperf(t, a, "10.0.0.2", "-u", "-b20M", "-l", "1200", "-n1M")
			// A busy machine loses datagrams in socket buffers. The test is that datagrams pass at all, and that our
			// drop counters stay zero.
			if lost := udp.End.Sum.LostPercent; lost > 90 {
				t.Errorf("iperf3 UDP lost %.1f %%", lost)
			} else {
				t.Logf("UDP: %.1f %% lost", lost)
			}
			st := h.net.Status()
			for _, r := range []vswitch.Reason{vswitch.UnknownPeer, vswitch.BadHeader, vswitch.UnderlayTooBig, vswitch.SendError,
				vswitch.Unreachable} {
				if n := st.Drops[r.String()] + h.vt.Counters.Dropped(r); n != 0 {
					t.Errorf("dropped as %v: %d", r, n)
				}
			}
			if e, ok := h.net.Lookup(h.tap.MAC()); !ok || e.Kind != "tap" {
				t.Errorf("the TAP's own address is not in the table: %+v", e)
			}
		})
	}
}

// The underlay is a VLAN: the kernel's interfaces add and remove the tags.
func TestVLANUnderlay(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	b.NoOffload("under")
	for _, ns := range []*nstest.NS{a, b} {
		if out, err := ns.Exec("ip", "link", "add", "link", "under", "name", "under.7", "type", "vlan", "id",
			"7"); err != nil {
			t.Skipf("this kernel has no VLAN interfaces (CONFIG_VLAN_8021Q): %s", out)
		}
		ns.IP("link", "set", "under.7", "mtu", "1496", "up")
	}
	underlay(a, "under.7", "192.0.2.1")
	linuxPeer(b, "under.7", "192.0.2.2", "192.0.2.1")
	h := newHost(t, a, newLoops(t, 1), hostConfig{vni: 4711, local: "192.0.2.1", peers: []string{"192.0.2.2"},
		tap: tap.Config{Offloads: true, Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	if h.net.MTU() != 1446 {
		t.Errorf("MTU %d", h.net.MTU())
	}
	a.Ping("10.0.0.2", "-s", "1418", "-Mdo")
}

// A bridge outside connects two ports of the network: flooded frames come back, are dropped and counted, and other
// traffic goes on.
func TestLoopedBridge(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	b.NoOffload("under")
	underlay(a, "under", "192.0.2.1")
	linuxPeer(b, "under", "192.0.2.2", "192.0.2.1")
	loops := newLoops(t, 2)
	const storm = 200 // low enough for a slow machine to reach it
	h := newHost(t, a, loops, hostConfig{vni: 4711, local: "192.0.2.1", peers: []string{"192.0.2.2"}, storm: storm,
		tap: tap.Config{Offloads: true, Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	a.Ping("10.0.0.2")
	a.IP("link", "add", "loop", "type", "bridge", "stp_state", "0")
	a.IP("link", "set", "loop", "up")
	for i := range 2 {
		a.Do(func() {
			x := must[*tap.TAP](t)(tap.Open(tap.Config{Offloads: true,
				Name: fmt.Sprint("loop", i), Bridge: "loop", Network: h.net,
				Loop: loops[i], Pool: h.pool}))
			t.Cleanup(func() { x.Close() })
		})
	}
	start := time.Now()
	// One broadcast each; no answer is needed.
	_, _ = a.Exec("ping", "-c3", "-i0.1", "-W1", "-b", "10.0.0.255")
	testutil.Eventually(t, "loop detected", func() bool { return h.net.Status().Drops[vswitch.Looped.String()] > 0 })
	st, took := h.net.Status(), time.Since(start)
	var floods uint64
	for _, p := range st.Ports {
		floods += p.Floods
	}
	if limit := uint64(len(st.Ports)) * storm * (2 + uint64(took/time.Second)); floods > limit {
		t.Errorf("%d frames were flooded in %v; the limit is %d", floods, took, limit)
	}
	a.MustExec("ping", "-c5", "-i0.2", "-w15", "10.0.0.2")
}

// An underlay of IPv6 link-local addresses, which need a zone.
func TestLinkLocalUnderlay(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	a.Addr("under", "fe80::a/64")
	b.Addr("under", "fe80::b/64")
	b.NoOffload("under")
	b.IP("link", "add", "vx", "type", "vxlan", "id", "7", "dstport", "4789", "local", "fe80::b", "remote", "fe80::a",
		"dev", "under")
	b.IP("link", "set", "vx", "up")
	b.Addr("vx", "10.0.0.2/24")
	newHost(t, a, newLoops(t, 1), hostConfig{vni: 7, local: "fe80::a%under", peers: []string{"fe80::b%under"},
		tap: tap.Config{Offloads: true, Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	a.Ping("10.0.0.2")
}

// Two tenants with the same addresses on the same hosts, both behind one VTEP: each reaches only its own peer (MT-9).
func TestTwoTenants(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	a.Addr("under", "192.0.2.1/24")
	b.Addr("under", "192.0.2.2/24")
	b.NoOffload("under")
	loops := newLoops(t, 2)
	first := newHost(t, a, loops, hostConfig{vni: 1, local: "192.0.2.1", peers: []string{"192.0.2.2"},
		tap: tap.Config{Offloads: true, Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	// Tenant 2's host port is in its own namespace, with tenant 1's addresses.
	second := must[*vswitch.Network](t)(vswitch.NewNetwork(vswitch.Config{VNI: 2, Name: "two"}))
	if err := first.vt.AddNetwork(second, []netip.Addr{netip.MustParseAddr("192.0.2.2")}); err != nil {
		t.Fatal(err)
	}
	c := nstest.New(t, "c")
	mac := first.tap.MAC()
	c.Do(func() {
		p := must[*tap.TAP](t)(tap.Open(tap.Config{Offloads: true,
			Name: "tenant", Network: second, Loop: loops[1], Pool: first.pool,
			MAC: mac, Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}))
		t.Cleanup(func() { p.Close() })
	})
	// The peer's two tenants have the same address and MAC, each in its own namespace.
	far := nstest.New(t, "far")
	b.IP("link", "add", "vx1", "type", "vxlan", "id", "1", "dstport", "4789", "local", "192.0.2.2", "remote", "192.0.2.1",
		"dev", "under")
	b.IP("link", "add", "vx2", "type", "vxlan", "id", "2", "dstport", "4789", "local", "192.0.2.2", "remote", "192.0.2.1",
		"dev", "under")
	b.IP("link", "set", "vx2", "netns", far.Name)
	b.IP("link", "set", "vx1", "address", "02:00:00:00:00:99", "up")
	far.IP("link", "set", "vx2", "address", "02:00:00:00:00:99", "up")
	b.Addr("vx1", "10.0.0.2/24")
	far.Addr("vx2", "10.0.0.2/24")
	a.Ping("10.0.0.2")
	c.Ping("10.0.0.2")
	before := second.Status().Ports
	a.Ping("10.0.0.2")
	for i, p := range second.Status().Ports {
		if p.InFrames > before[i].InFrames+5 { // its own kernel may send some meanwhile
			t.Errorf("tenant 1's pings reached tenant 2's port %s: %d frames, before %d", p.Name, p.InFrames,
				before[i].InFrames)
		}
	}
	far.IP("link", "set", "vx2", "down")
	a.Ping("10.0.0.2")
	if _, err := c.Exec("ping", "-c2", "-W1", "10.0.0.2"); err == nil {
		t.Error("tenant 2 got an answer from tenant 1's peer")
	}
}

func waitListen(t *testing.T, ns *nstest.NS, port int) {
	testutil.Eventually(t, "iperf3 listens", func() bool {
		out, _ := ns.Exec("ss", "-Hltn", "sport", "=", fmt.Sprint(port))
		return out != ""
	})
}

// iperf is the JSON result of iperf3.
type iperf struct {
	Error string `json:"error"`
	End   struct {
		SumReceived struct {
			BitsPerSecond float64 `json:"bits_per_second"`
		} `json:"sum_received"`
		Sum struct {
			LostPercent float64 `json:"lost_percent"`
		} `json:"sum"`
	} `json:"end"`
}

// runIperf runs iperf3 against the server at to, and retries while the server is not ready: at start, and between two
// clients. With -J some versions exit with status 0 after an error.
func runIperf(t *testing.T, from *nstest.NS, to string, args ...string) (r iperf) {
	t.Helper()
	testutil.Eventually(t, "iperf3 reaches its server", func() bool {
		out, status := from.Exec("iperf3", append([]string{"-c", to, "-J"}, args...)...)
		r = iperf{}
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatalf("iperf3: %v, %v\n%s", status, err, out)
		}
		if strings.Contains(r.Error, "unable to connect to server") || strings.Contains(r.Error, "server is busy") {
			return false
		}
		if status != nil || r.Error != "" {
			t.Fatalf("iperf3: %v: %s", status, r.Error)
		}
		return true
	})
	return r
}

// bitsPerSecond returns the TCP throughput received, which must not be zero.
func bitsPerSecond(t *testing.T, r iperf) float64 {
	t.Helper()
	v := r.End.SumReceived.BitsPerSecond
	if v == 0 {
		t.Fatalf("iperf3 transferred nothing: %+v", r)
	}
	return v
}

// tapTotals returns the host port's counters in the network's status.
func (h *host) tapTotals() (t vswitch.Totals) {
	for _, p := range h.net.Ports() {
		if p.Kind == vswitch.KindTAP.String() {
			t = p.Totals
		}
	}
	return t
}
