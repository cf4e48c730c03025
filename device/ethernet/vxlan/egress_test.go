package vxlan_test

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// stray is a datagram that a VTEP without network 77 counts as of an unknown VNI.
const stray = `\x08\0\0\0\0\0\x4d\0`

// userSends sends stray to a VTEP as a user without rights.
func userSends(ns *nstest.NS, to string) {
	_, _ = ns.Exec("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c",
		"printf '"+stray+"' >/dev/udp/"+to+"/4789") // fails if the firewall refuses it
}

func strays(h *host) uint64 { return h.vt.Counters.Dropped(vswitch.UnknownVNI) }

// With the package's rules, a user of the host, and a container behind its NAT, cannot send to other hosts' tunnels
// from its address (TR-3). The container's datagrams would keep their source port, even a reserved one. The host's own
// tunnels work.
func TestEgressRule(t *testing.T) {
	nstest.Require(t, "nft", "nftables")
	nstest.Require(t, "ping", "iputils-ping")
	nstest.Require(t, "setpriv", "util-linux")
	const rules = "../../../cmd/vnicd/packaging/underlay.nft"
	a, b, box := nstest.New(t, "a"), nstest.New(t, "b"), nstest.New(t, "box")
	nstest.Pair(a, b, "under", 1500)
	nstest.Pair(a, box, "box", 1500)
	a.Addr("under", "192.0.2.1/24")
	b.Addr("under", "192.0.2.2/24")
	a.Addr("box", "172.16.0.1/24")
	box.Addr("box", "172.16.0.2/24")
	box.IP("route", "add", "default", "via", "172.16.0.1")
	a.MustExec("sysctl", "-qw", "net.ipv4.ip_forward=1")
	a.MustExec("nft", "add table ip n; add chain ip n post { type nat hook postrouting priority srcnat; }; "+
		"add rule ip n post oifname under masquerade")
	loops := newLoops(t, 2)
	var h [2]*host
	for i, ns := range []*nstest.NS{a, b} {
		addr := []string{"192.0.2.1", "192.0.2.2"}
		h[i] = newHost(t, ns, loops[i:i+1], hostConfig{vni: 4711, local: addr[i], peers: addr[1-i : 2-i],
			tap: tap.Config{Name: "tenant", Addrs: []netip.Prefix{netip.PrefixFrom(
				netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 24)}}})
	}
	boxSends := func() {
		box.Do(func() {
			c, err := net.DialUDP("udp", &net.UDPAddr{Port: 300}, &net.UDPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 4789})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Write([]byte{8, 0, 0, 0, 0, 0, 0x4d, 0}); err != nil {
				t.Fatal(err)
			}
		})
	}
	for what, send := range map[string]func(){"a user's": func() { userSends(a, "192.0.2.2") },
		"a container's": boxSends} {
		testutil.Eventually(t, what+" datagram arrives without the rules", func() bool {
			before := strays(h[1])
			send()
			return strays(h[1]) > before
		})
	}
	a.Ping("10.0.0.2")

	a.MustExec("nft", "-f", rules)
	a.MustExec("nft", "-f", rules) // may be repeated
	before := strays(h[1])
	dropped := func(ns *nstest.NS) int {
		n := 0
		for line := range strings.Lines(ns.MustExec("nft", "list", "table", "inet", "vnicd_underlay")) {
			if strings.Contains(line, "counter packets 1 ") {
				n++
			}
		}
		return n
	}
	userSends(a, "192.0.2.2")
	boxSends()
	testutil.Eventually(t, "both rules drop one datagram", func() bool { return dropped(a) == 2 })
	a.Ping("10.0.0.2")
	b.Ping("10.0.0.1")
	if n := strays(h[1]) - before; n != 0 {
		t.Errorf("%d datagrams arrived", n)
	}

	// On a host whose tunnels are the kernel's they may use reserved ports, too.
	a.MustExec("nft", "-f", rules) // new counters
	h[0].vt.Close()
	a.IP("link", "set", "tenant", "down")
	a.IP("link", "add", "vx", "type", "vxlan", "id", "4711", "dstport", "4789", "local", "192.0.2.1", "remote",
		"192.0.2.2", "dev", "under", "srcport", "200", "400")
	a.Addr("vx", "10.0.0.3/24")
	a.IP("link", "set", "vx", "up")
	before = strays(h[1])
	userSends(a, "192.0.2.2")
	testutil.Eventually(t, "the rule drops a datagram", func() bool { return dropped(a) == 1 })
	if n := strays(h[1]) - before; n != 0 {
		t.Errorf("%d datagrams arrived", n)
	}
	a.Ping("10.0.0.2")
}

// A kernel's vxlan device can send from reserved ports, too, so that a vnicd may demand them; from its usual ports it
// is refused then.
func TestLinuxPeerOnReservedPorts(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	b.NoOffload("under")
	underlay(a, "under", "192.0.2.1")
	linuxPeer(b, "under", "192.0.2.2", "192.0.2.1", "srcport", "200", "400")
	h := newHost(t, a, newLoops(t, 1), hostConfig{vni: 4711, local: "192.0.2.1", peers: []string{"192.0.2.2"},
		ports: vxlan.PeerPortsReserved, tap: tap.Config{Offloads: true, Name: "tenant",
			Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	a.Ping("10.0.0.2")
	b.Ping("10.0.0.1")
	if n := h.net.Status().Drops[vswitch.SourcePort.String()]; n != 0 {
		t.Errorf("%d datagrams refused", n)
	}
	b.IP("link", "del", "vx")
	b.IP("link", "add", "vx", "type", "vxlan", "id", "4711", "dstport", "4789", "local", "192.0.2.2", "remote",
		"192.0.2.1", "dev", "under")
	b.IP("addr", "add", "10.0.0.2/24", "dev", "vx")
	b.IP("link", "set", "vx", "up")
	testutil.Eventually(t, "its usual ports are refused", func() bool {
		_, _ = b.Exec("ping", "-c1", "-W1", "10.0.0.1")
		return h.net.Status().Drops[vswitch.SourcePort.String()] > 0
	})
}
