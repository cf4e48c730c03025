package vxlan_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/packet"
	"github.com/vnicd/vnicd/device/tap"
	"github.com/vnicd/vnicd/device/vxlan"
	"github.com/vnicd/vnicd/device/vxlan/nstest"
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

func newLoops(t testing.TB, n int) (loops []*engine.Loop) {
	for i := range n {
		l := must[*engine.Loop](t)(engine.New(engine.Config{ID: i, SpinFor: 20 * time.Microsecond}))
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
	net  *lfe.Network
	tap  *tap.TAP
	pool *packet.Pool
}

type hostConfig struct {
	vni   uint32
	local string
	peers []string
	tap   tap.Config
	opts  []vxlan.NetworkOption
}

func newHost(t testing.TB, ns *nstest.NS, loops []*engine.Loop, c hostConfig) *host {
	t.Helper()
	h := &host{}
	h.pool = must[*packet.Pool](t)(packet.NewPool(packet.Config{Count: 2048}))
	h.net = must[*lfe.Network](t)(lfe.NewNetwork(lfe.Config{VNI: c.vni, Name: fmt.Sprint("net", c.vni)}))
	var peers []netip.Addr
	for _, p := range c.peers {
		peers = append(peers, netip.MustParseAddr(p))
	}
	ns.Do(func() {
		h.vt = must[*vxlan.VTEP](t)(vxlan.New(vxlan.Config{Local: netip.MustParseAddr(c.local), Loops: loops, Pool: h.pool}))
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

// A plain Linux vxlan device in a bridge is the remote peer; ping and iperf3 run both ways, over IPv4 and IPv6.
func TestLinuxPeer(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	nstest.Require(t, "iperf3", "iperf3")
	for _, u := range []struct {
		name, local, remote string
		overhead            int
		device              []string
	}{
		{"IPv4", "192.0.2.1", "192.0.2.2", 50, nil},
		{"IPv6", "2001:db8::1", "2001:db8::2", 70, nil},
		{"IPv6 zero checksum received", "2001:db8::1", "2001:db8::2", 70, []string{"udp6zerocsumtx"}},
	} {
		t.Run(u.name, func(t *testing.T) {
			a, b := nstest.New(t, "a"), nstest.New(t, "b")
			nstest.Pair(a, b, "under", 1500)
			plen := "/24"
			if strings.Contains(u.local, ":") {
				plen = "/64"
			}
			a.Addr("under", u.local+plen)
			b.Addr("under", u.remote+plen)
			b.NoOffload("under")
			b.IP(append([]string{"link", "add", "vx", "type", "vxlan", "id", "4711", "dstport", "4789", "local", u.remote, "remote", u.local, "dev", "under"}, u.device...)...)
			b.IP("link", "add", "brt", "type", "bridge")
			b.IP("link", "set", "vx", "master", "brt", "up")
			b.IP("link", "set", "brt", "up")
			b.Addr("brt", "10.0.0.2/24")
			b.Addr("brt", "fd00::2/64")

			loops := newLoops(t, 2)
			h := newHost(t, a, loops, hostConfig{vni: 4711, local: u.local, peers: []string{u.remote}, tap: tap.Config{Name: "tenant",
				Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"), netip.MustParsePrefix("fd00::1/64")}}})
			if got, want := h.net.MTU(), 1500-u.overhead; got != want {
				t.Errorf("network MTU %d, want %d", got, want)
			}
			full := fmt.Sprint(1500 - u.overhead - 28)
			a.Ping("10.0.0.2", "-s", full, "-Mdo")
			b.Ping("10.0.0.1", "-s", full, "-Mdo")
			a.Ping("fd00::2")
			b.Ping("fd00::1")

			b.Start("iperf3", "-s")
			waitListen(t, b, 5201)
			for _, dir := range [][]string{nil, {"-R"}, {"-P4"}} {
				out := a.MustExec("iperf3", append([]string{"-c", "10.0.0.2", "-n32M", "-J"}, dir...)...)
				t.Logf("TCP %v: %.0f Mbit/s", dir, bitsPerSecond(t, out)/1e6)
			}
			out := a.MustExec("iperf3", "-c", "10.0.0.2", "-u", "-b20M", "-l", "1200", "-n1M", "-J")
			// A busy machine loses datagrams in socket buffers; that they pass at all is the point here, and the
			// drop counters below are ours.
			if lost := lostPercent(t, out); lost > 90 {
				t.Errorf("iperf3 UDP lost %.1f %%", lost)
			} else {
				t.Logf("UDP: %.1f %% lost", lost)
			}
			st := h.net.Status()
			for _, r := range []lfe.Reason{lfe.UnknownPeer, lfe.BadHeader, lfe.UnderlayTooBig, lfe.TooBig, lfe.SendError, lfe.Unreachable} {
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

// An underlay of IPv6 link-local addresses, which only mean something together with an interface.
func TestLinkLocalUnderlay(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	a.Addr("under", "fe80::a/64")
	b.Addr("under", "fe80::b/64")
	b.NoOffload("under")
	b.IP("link", "add", "vx", "type", "vxlan", "id", "7", "dstport", "4789", "local", "fe80::b", "remote", "fe80::a", "dev", "under")
	b.IP("link", "set", "vx", "up")
	b.Addr("vx", "10.0.0.2/24")
	newHost(t, a, newLoops(t, 1), hostConfig{vni: 7, local: "fe80::a%under", peers: []string{"fe80::b%under"},
		tap: tap.Config{Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	a.Ping("10.0.0.2")
}

// Two tenants with the same addresses on the same hosts, both behind one VTEP: each reaches its own peer only (MT-9).
func TestTwoTenants(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	a.Addr("under", "192.0.2.1/24")
	b.Addr("under", "192.0.2.2/24")
	b.NoOffload("under")
	loops := newLoops(t, 2)
	first := newHost(t, a, loops, hostConfig{vni: 1, local: "192.0.2.1", peers: []string{"192.0.2.2"},
		tap: tap.Config{Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	// Tenant 2's host port lives in a namespace of its own, with tenant 1's addresses.
	second := must[*lfe.Network](t)(lfe.NewNetwork(lfe.Config{VNI: 2, Name: "two"}))
	if err := first.vt.AddNetwork(second, []netip.Addr{netip.MustParseAddr("192.0.2.2")}); err != nil {
		t.Fatal(err)
	}
	c := nstest.New(t, "c")
	mac := first.tap.MAC()
	c.Do(func() {
		p := must[*tap.TAP](t)(tap.Open(tap.Config{Name: "tenant", Network: second, Loop: loops[1], Pool: first.pool, MAC: mac,
			Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}))
		t.Cleanup(func() { p.Close() })
	})
	// The peer's two tenants: same address, same MAC, in one namespace each.
	far := nstest.New(t, "far")
	b.IP("link", "add", "vx1", "type", "vxlan", "id", "1", "dstport", "4789", "local", "192.0.2.2", "remote", "192.0.2.1", "dev", "under")
	b.IP("link", "add", "vx2", "type", "vxlan", "id", "2", "dstport", "4789", "local", "192.0.2.2", "remote", "192.0.2.1", "dev", "under")
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
		if p.InFrames > before[i].InFrames+5 { // its own kernel may say something meanwhile
			t.Errorf("tenant 1's pings show at tenant 2's port %s: %d frames, before %d", p.Name, p.InFrames, before[i].InFrames)
		}
	}
	far.IP("link", "set", "vx2", "down")
	a.Ping("10.0.0.2")
	if _, err := c.Exec("ping", "-c2", "-W1", "10.0.0.2"); err == nil {
		t.Error("tenant 2 got an answer from tenant 1's peer")
	}
}

func waitListen(t *testing.T, ns *nstest.NS, port int) {
	nstest.Eventually(t, "iperf3 listens", func() bool {
		out, _ := ns.Exec("ss", "-Hltn", "sport", "=", fmt.Sprint(port))
		return out != ""
	})
}

type iperf struct {
	End struct {
		SumReceived struct {
			BitsPerSecond float64 `json:"bits_per_second"`
		} `json:"sum_received"`
		Sum struct {
			LostPercent float64 `json:"lost_percent"`
		} `json:"sum"`
	} `json:"end"`
}

func parseIperf(t *testing.T, out string) iperf {
	t.Helper()
	var r iperf
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("iperf3: %v\n%s", err, out)
	}
	return r
}

func bitsPerSecond(t *testing.T, out string) float64 {
	t.Helper()
	v := parseIperf(t, out).End.SumReceived.BitsPerSecond
	if v == 0 {
		t.Fatalf("iperf3 moved nothing:\n%s", out)
	}
	return v
}

func lostPercent(t *testing.T, out string) float64 {
	t.Helper()
	return parseIperf(t, out).End.Sum.LostPercent
}
