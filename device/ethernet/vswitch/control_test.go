package vswitch

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
)

// Yielding entries: tunnels cannot move them; ports of this host can, by any frame except RoCE; a VM's port takes them
// over when it is attached.
func TestYielding(t *testing.T) {
	b := newBench(t, Config{})
	tunnel, tap := b.port(PortConfig{Name: "vxlan", Kind: KindVTEP}), b.port(PortConfig{Name: "tap", Kind: KindTAP})
	told := 0
	b.net.OnChange(func() { told++ })
	m := Address{MAC: mac(7)}
	at := func(want *recPort, remote Remote, static bool) {
		t.Helper()
		e, ok := b.net.Lookup(m.MAC)
		if !ok || e.Port != want.att.cfg.Name || e.Remote != remote || e.Static != static {
			t.Fatalf("entry %+v %v; want port %s remote %d static %v", e, ok, want.att.cfg.Name, remote, static)
		}
	}
	if err := b.net.SetYielding(m, tunnel.att, 1); err != nil {
		t.Fatal(err)
	}
	b.input(tunnel.att, buildFrame(mac(8), m.MAC, "x"), Source{Remote: 2})
	at(tunnel, 1, true)
	if err := b.net.SetYielding(m, tunnel.att, 2); err != nil {
		t.Fatal(err)
	}
	at(tunnel, 2, true)
	if told != 0 {
		t.Errorf("OnChange called %d times for frames from tunnels", told)
	}
	b.input(tap.att, buildFrame(mac(8), m.MAC, "y"), Source{})
	at(tap, 0, false)
	if told == 0 {
		t.Error("OnChange not called for an address that moved to a port of this host")
	}
	macs, _ := b.net.Locals()
	if !slices.Contains(macs, Local{MAC: m.MAC, Port: "tap", Kind: KindTAP}) {
		t.Errorf("locals %+v", macs)
	}
	if s := b.net.Status(); s.Static != 0 || s.Entries != len(s.FDB) {
		t.Errorf("counts %d static of %d, table %+v", s.Static, s.Entries, s.FDB)
	}

	// The control plane reports that it has moved away again, and then a VM with that address starts here.
	if err := b.net.SetYielding(m, tunnel.att, 3); err != nil {
		t.Fatal(err)
	}
	at(tunnel, 3, true)
	vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{m.MAC}})
	at(vm, 0, true)
	if err := b.net.SetYielding(m, tunnel.att, 3); err == nil {
		t.Error("a VM's address was moved to a tunnel")
	}
	if b.net.RemoveStatic(m, tunnel.att) {
		t.Error("the VM's entry was removed with the tunnel's")
	}
	at(vm, 0, true)
}

// A yielding IP address goes to the port that claims it; another one stays.
func TestYieldingNeighbour(t *testing.T) {
	b := newBench(t, Config{})
	b.port(PortConfig{Name: "vxlan", Kind: KindVTEP})
	tap := b.port(PortConfig{Name: "tap", Kind: KindTAP})
	one, two := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for _, err := range []error{b.net.SetYieldingNeighbour(one, Address{MAC: mac(7)}),
		b.net.SetNeighbour(two, Address{MAC: mac(7)})} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range []netip.Addr{one, two} {
		b.input(tap.att, arp(header.ARPReply, mac(8), mac(9), "", a.String(), "10.0.0.99"), Source{})
	}
	for a, want := range map[netip.Addr]MAC{one: mac(9), two: mac(7)} {
		if got, ok := b.net.Owner(a.As16(), 0); !ok || got != want {
			t.Errorf("%v is at %v (%v), want %v", a, got, ok, want)
		}
	}
	if _, ips := b.net.Locals(); !slices.Equal(ips, []LocalIP{{IP: one, MAC: mac(9)}}) {
		t.Errorf("local IPs %+v", ips)
	}
	if err := b.net.SetYieldingNeighbour(one, Address{MAC: mac(7)}); err != nil {
		t.Errorf("setting it again: %v", err)
	}
}

// Without flooding and learning, a tunnel gets only known and group addresses, and no addresses are learnt from it.
func TestSetTunnels(t *testing.T) {
	b := newBench(t, Config{})
	tunnel, tap, other := b.port(PortConfig{Name: "vxlan", Kind: KindVTEP}),
		b.port(PortConfig{Name: "tap", Kind: KindTAP}), b.port(PortConfig{Name: "other", Kind: KindTAP})
	b.net.SetTunnels(false, false)
	b.input(tap.att, buildFrame(mac(50), mac(1), "x"), Source{Remote: 0})
	if len(tunnel.got) != 0 || len(other.got) != 1 {
		t.Errorf("unknown unicast: %d to the tunnel, %d to the other port", len(tunnel.got), len(other.got))
	}
	b.input(tap.att, buildFrame(broadcast, mac(1), "x"), Source{Remote: 0})
	if len(tunnel.got) != 1 {
		t.Errorf("broadcast: %d to the tunnel", len(tunnel.got))
	}
	b.input(tunnel.att, buildFrame(mac(1), mac(2), "x"), Source{Remote: 4})
	if _, ok := b.net.Lookup(mac(2)); ok {
		t.Error("learnt from a tunnel")
	}
	b.input(tunnel.att, buildFrame(mac(50), mac(1), "x"), Source{Remote: 4})
	if e, _ := b.net.Lookup(mac(1)); e.Port != "tap" {
		t.Errorf("a tunnel moved an address to %q", e.Port)
	}
	b.net.SetTunnels(true, true)
	b.input(tap.att, buildFrame(mac(50), mac(1), "x"), Source{Remote: 0})
	if len(tunnel.got) != 2 {
		t.Errorf("flooding again: %d to the tunnel", len(tunnel.got))
	}
}
