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
				out := a.MustExec("iperf3", append([]string{"-c", "10.0.0.2", "-t1", "-J"}, dir...)...)
				t.Logf("TCP %v: %.0f Mbit/s", dir, bitsPerSecond(t, out)/1e6)
			}
			out := a.MustExec("iperf3", "-c", "10.0.0.2", "-u", "-b20M", "-l", "1200", "-t1", "-J")
			if lost := lostPercent(t, out); lost > 1 {
				t.Errorf("iperf3 UDP lost %.1f %%", lost)
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
