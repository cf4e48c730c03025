package wireguard

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/vnicd/vnicd/device/testutil/nstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func secret(t *testing.T) Secret {
	t.Helper()
	k, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	return Secret{k}
}

func TestKeys(t *testing.T) {
	k := secret(t)
	text := k.key.String()
	again, err := ParseSecret(text)
	if err != nil || again != k {
		t.Errorf("%v, %v", again, err)
	}
	if p, err := ParseKey(k.Public().String()); err != nil || p != k.Public() {
		t.Errorf("%v, %v", p, err)
	}
	for _, bad := range []string{"", "x", text[1:], text + "A", strings.Repeat("A", 43) + "="} {
		if _, err := ParseKey(bad); err == nil {
			t.Errorf("public key %q accepted", bad)
		}
		if _, err := ParseSecret(bad); err == nil || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("secret %q: %v", bad, err)
		}
	}
	// Neither logs nor JSON show a secret.
	j, err := json.Marshal(Settings{PrivateKey: k, Peers: []Peer{{Preshared: k}}})
	if err != nil {
		t.Fatal(err)
	}
	bytes := strings.Trim(fmt.Sprint(k.key[:]), "[]")
	for _, s := range []string{fmt.Sprint(k), fmt.Sprintf("%v %+v %#v %s", k, k, k, k),
		fmt.Sprint(Settings{PrivateKey: k}),
		fmt.Sprintf("%+v %#v", Config{Settings: Settings{PrivateKey: k}}, Peer{Preshared: k}), string(j)} {
		if strings.Contains(s, text) || strings.Contains(s, bytes) || strings.Contains(s, fmt.Sprintf("%#v", k.key)) {
			t.Errorf("shown: %s", s)
		}
	}
}

func peer(t *testing.T, n int) Peer {
	return Peer{Addr: netip.AddrFrom4([4]byte{10, 9, 0, byte(n)}), PublicKey: secret(t).Public(),
		Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}), DefaultPort)}
}

// Only what has changed is told to the kernel, removals first, so that other peers keep their sessions.
func TestPeerConfigs(t *testing.T) {
	a, b, c := peer(t, 1), peer(t, 2), peer(t, 3)
	moved, other := b, peer(t, 2)
	moved.Endpoint = netip.MustParseAddrPort("192.0.2.99:1")
	for _, x := range []struct {
		name    string
		was, is []Peer
		removed []Peer
		set     []Peer
	}{
		{name: "all new", is: []Peer{a, b}, set: []Peer{a, b}},
		{name: "the same", was: []Peer{a, b}, is: []Peer{b, a}},
		{name: "moved", was: []Peer{a, b}, is: []Peer{a, moved}, set: []Peer{moved}},
		{name: "another key", was: []Peer{a, b}, is: []Peer{a, other}, removed: []Peer{b}, set: []Peer{other}},
		{name: "one less, one more", was: []Peer{a, b}, is: []Peer{c, b}, removed: []Peer{a}, set: []Peer{c}},
		{name: "none left", was: []Peer{a}, removed: []Peer{a}},
	} {
		got := peerConfigs(x.was, x.is)
		if len(got) != len(x.removed)+len(x.set) {
			t.Fatalf("%s: %+v", x.name, got)
		}
		for i, p := range x.removed {
			if g := got[i]; !g.Remove || g.PublicKey != p.PublicKey {
				t.Errorf("%s: %+v", x.name, g)
			}
		}
		for i, p := range x.set {
			g := got[len(x.removed)+i]
			if g.Remove || g.PublicKey != p.PublicKey || g.Endpoint.AddrPort() != p.Endpoint || !g.ReplaceAllowedIPs ||
				len(g.AllowedIPs) != 1 || g.AllowedIPs[0].String() != p.Addr.String()+"/32" || g.PresharedKey == nil ||
				g.PersistentKeepaliveInterval == nil {
				t.Errorf("%s: %+v", x.name, g)
			}
		}
	}
}

// The MTU is what the narrowest path to an endpoint leaves.
func TestMTU(t *testing.T) {
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "wide", 9000)
	nstest.Pair(a, b, "narrow", 1500)
	a.Addr("wide", "192.0.2.254/24")
	a.Addr("narrow", "2001:db8::1/64")
	v6 := peer(t, 3)
	v6.Endpoint = netip.MustParseAddrPort("[2001:db8::2]:51820")
	lost := peer(t, 4)
	lost.Endpoint = netip.MustParseAddrPort("203.0.113.1:51820")
	a.Do(func() {
		nl, err := netlink.NewHandle(syscall.NETLINK_ROUTE)
		if err != nil {
			t.Fatal(err)
		}
		defer nl.Close()
		narrow, err := nl.LinkByName("narrow")
		if err != nil {
			t.Fatal(err)
		}
		p := []Peer{peer(t, 1), peer(t, 2), v6, lost}
		for _, x := range []struct {
			name  string
			peers []Peer
			index int
			want  int
		}{
			{"IPv4", p[:2], 0, 9000 - 60},
			{"IPv6 is narrower", p, 0, 1500 - 80},
			{"through the interface itself", p, narrow.Attrs().Index, 9000 - 60},
			{"no route", p[3:], 0, usualMTU},
			{"no peer", nil, 0, usualMTU},
		} {
			if got := bestMTU(nl, x.index, x.peers); got != x.want {
				t.Errorf("%s: %d, want %d", x.name, got, x.want)
			}
		}
		a.IP("route", "add", "192.0.2.2/32", "dev", "wide", "mtu", "lock", "1400")
		if got := bestMTU(nl, 0, p[:2]); got != 1400-60 {
			t.Errorf("with an MTU of the route: %d", got)
		}
	})
}

// TestAlias: an alias of another program, or a damaged one, is not ours.
func TestAlias(t *testing.T) {
	a := alias{netip.MustParseAddrPort("[fd00::1]:4789"), 51820, "/run/a b"}
	if got, ok := parseAlias(a.String()); !ok || got != a {
		t.Errorf("%v, %t", got, ok)
	}
	if got, ok := parseAlias("vnicd 10.9.0.1:4789"); !ok || got.vtep.Port() != 4789 || got.owner != "" {
		t.Errorf("%v, %t", got, ok)
	}
	for _, text := range []string{"", "vnicd", "vnicd ", "other 10.9.0.1:4789 1 /run", "vnicd 10.9.0.1 1 /run",
		"vnicd 10.9.0.1:4789 70000 /run", "vnicdx 10.9.0.1:4789"} {
		if got, ok := parseAlias(text); ok {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// An interface that is not ours stays as it is.
func TestForeignInterface(t *testing.T) {
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, DefaultInterface, 1500)
	a.IP("link", "set", DefaultInterface, "alias", "vnicd 10.9.0.1:4789")
	a.Do(func() {
		_, err := Open(Config{Interface: DefaultInterface, ListenPort: DefaultPort, Local: netip.MustParseAddr("10.9.0.1"),
			Port: 4789, Settings: Settings{PrivateKey: secret(t)}, Log: hclog.NewNullLogger()})
		if !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "of type veth") {
			t.Errorf("%v", err)
		}
	})
	a.IP("link", "show", DefaultInterface)
}

// A VTEP's address must not be another interface's, whose traffic would be cleartext.
func TestAddressElsewhere(t *testing.T) {
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	a.Addr("under", "10.9.0.1/24")
	a.Do(func() {
		_, err := Open(Config{Interface: DefaultInterface, ListenPort: DefaultPort, Local: netip.MustParseAddr("10.9.0.1"),
			Port: 4789, Settings: Settings{PrivateKey: secret(t)}, Log: hclog.NewNullLogger()})
		if err == nil || !strings.Contains(err.Error(), "10.9.0.1 is an address of interface under") {
			t.Errorf("%v", err)
		}
	})
}

// TestKernel makes, changes and removes interfaces of a kernel with WireGuard.
func TestKernel(t *testing.T) {
	for _, local := range []string{"10.9.0.1", "fd00:9::1"} {
		ns := nstest.New(t, "wg")
		if out, err := ns.Exec("ip", "link", "add", "probe", "type", "wireguard"); err != nil {
			t.Skipf("this kernel has no WireGuard (TestProtectedUnderlay of package integration runs this in a VM): %s", out)
		}
		c := Config{Interface: DefaultInterface, ListenPort: DefaultPort, Local: netip.MustParseAddr(local), Port: 4789,
			Owner: "/run/v nicd", Settings: Settings{PrivateKey: secret(t), Peers: []Peer{peer(t, 2), peer(t, 3)}},
			Log: hclog.NewNullLogger()}
		if c.Local.Is6() {
			c.Peers[0].Addr, c.Peers[1].Addr = netip.MustParseAddr("fd00:9::2"), netip.MustParseAddr("fd00:9::3")
		}
		family := map[bool]string{true: "-6", false: "-4"}[c.Local.Is6()]
		open := func(c Config) (d *Device, err error) {
			ns.Do(func() { d, err = Open(c) })
			return d, err
		}
		d, err := open(c)
		if err != nil {
			t.Fatal(err)
		}
		routes := func() string { return ns.IP(family, "route", "show", "table", "478951820") }
		for _, p := range c.Peers {
			if out := routes(); !strings.Contains(out, p.Addr.String()+" dev "+DefaultInterface) || !d.Peer(p.Addr) {
				t.Errorf("no route to %v: %s", p.Addr, out)
			}
			// The host's own packets leave by the interface, and only those.
			if out := ns.IP("route", "get", p.Addr.String()); !strings.Contains(out, DefaultInterface) {
				t.Errorf("to %v: %s", p.Addr, out)
			}
		}
		if out := ns.IP(family, "rule"); !strings.Contains(out, "iif lo lookup 478951820") {
			t.Errorf("rules: %s", out)
		}
		s := d.Status()
		if s.Problem != "" || s.PublicKey != c.PrivateKey.Public().String() || len(s.Peers) != 2 || s.MTU != usualMTU ||
			s.Peers[1].VTEP != c.Peers[1].Addr || s.Peers[1].Endpoint != c.Peers[1].Endpoint {
			t.Errorf("%+v", s)
		}

		// Another one of that name, while the VTEP's address is in use.
		var vtep net.PacketConn
		ns.Do(func() { vtep, err = net.ListenPacket("udp", netip.AddrPortFrom(c.Local, c.Port).String()) })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := open(c); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "is in use by the vnicd") {
			t.Errorf("a second vnicd: %v", err)
		}
		_ = vtep.Close()

		// Keys and peers change; a refused change leaves the ones before.
		next := Settings{PrivateKey: secret(t), Peers: []Peer{c.Peers[1]}}
		next.Peers[0].Endpoint = netip.MustParseAddrPort("192.0.2.77:7")
		next.Peers[0].Preshared = secret(t)
		if err := d.Set(next); err != nil {
			t.Fatal(err)
		}
		if s := d.Status(); s.PublicKey != next.PrivateKey.Public().String() || len(s.Peers) != 1 ||
			s.Peers[0].Endpoint != next.Peers[0].Endpoint || d.Peer(c.Peers[0].Addr) {
			t.Errorf("%+v", s)
		}
		if out := routes(); strings.Contains(out, c.Peers[0].Addr.String()+" ") {
			t.Errorf("route to a peer that was removed: %s", out)
		}

		// What a killed vnicd has left is replaced.
		again, err := open(c)
		if err != nil {
			t.Fatal(err)
		}
		if s := d.Status(); !strings.Contains(s.Problem, "somebody has removed the interface") {
			t.Errorf("%+v", s)
		}
		if err := d.Set(c.Settings); err == nil {
			t.Error("an interface that has gone was changed")
		}
		d.Close()
		if s := again.Status(); s.Problem != "" {
			t.Errorf("%+v", s)
		}
		again.Close()
		again.Close()

		// Also under another name, with its rule, if nobody uses its VTEP's address. Another owner's is left alone.
		killed, foreign := c, c
		killed.Interface, killed.ListenPort, foreign.Interface, foreign.Owner = "killed", 51821, "foreign", "/run/another"
		foreign.ListenPort, foreign.Local, foreign.Peers = 51822, c.Peers[1].Addr, c.Peers[:1]
		k, err := open(killed)
		if err != nil {
			t.Fatal(err)
		}
		f, err := open(foreign)
		if err != nil {
			t.Fatal(err)
		}
		sweep := func() {
			ns.Do(func() { err = Sweep(c.Owner) })
			if err != nil {
				t.Error(err)
			}
		}
		ns.Do(func() { vtep, err = net.ListenPacket("udp", netip.AddrPortFrom(c.Local, c.Port).String()) })
		if err != nil {
			t.Fatal(err)
		}
		if sweep(); k.Status().Problem != "" {
			t.Errorf("an interface in use: %+v", k.Status())
		}
		_ = vtep.Close()
		if again, err = open(c); err != nil {
			t.Fatal(err)
		}
		out := ns.IP("link") + ns.IP(family, "rule")
		if strings.Contains(out, "killed") || strings.Contains(out, "478951821") || !strings.Contains(out, "foreign") ||
			!strings.Contains(out, "478951822") || again.Status().Problem != "" {
			t.Errorf("an interface of another name is left: %s", out)
		}
		// Its vnicd is dead: rule and interface go with the next one, whether that has WireGuard or not.
		if sweep(); strings.Contains(ns.IP("link")+ns.IP(family, "rule"), "vnicd-wg0") || f.Status().Problem != "" {
			t.Errorf("left: %s; %+v", ns.IP("link"), f.Status())
		}
		k.Close()
		again.Close()
		f.Close()
		if out := ns.IP("link"); strings.Contains(out, DefaultInterface) {
			t.Errorf("left behind: %s", out)
		}
		if out := ns.IP(family, "rule"); strings.Contains(out, "478951820") {
			t.Errorf("left behind: %s", out)
		}

		// Interfaces of others.
		ns.IP("link", "set", "probe", "name", DefaultInterface)
		if _, err := open(c); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "without the alias") {
			t.Errorf("an interface of somebody else: %v", err)
		}
		ns.IP("link", "set", DefaultInterface, "name", "probe")
		ns.MustExec("sh", "-c", "ip link add other type wireguard && ip link set other up")
		var busy net.PacketConn
		ns.Do(func() { busy, err = net.ListenPacket("udp", ":51820") })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := open(c); err == nil || !strings.Contains(err.Error(), "51820") {
			t.Errorf("a port in use: %v", err)
		}
		_ = busy.Close()
		if out := ns.IP("link"); strings.Contains(out, DefaultInterface) {
			t.Errorf("left behind after an error: %s", out)
		}
	}
}
