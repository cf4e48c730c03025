package vswitch

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// groupMAC returns the Ethernet address of an IP group.
func groupMAC(g netip.Addr) (m MAC) {
	b := g.As16()
	if g.Is4() {
		return MAC{1, 0, 0x5e, b[13] & 0x7f, b[14], b[15]}
	}
	return MAC{0x33, 0x33, b[12], b[13], b[14], b[15]}
}

// ipFrame builds a packet to a group; body has a zero checksum at 2 if it is an IGMP or MLD message (alert).
func ipFrame(t testing.TB, src MAC, from, to string, proto layers.IPProtocol, alert bool, body []byte) []byte {
	t.Helper()
	s, d := netip.MustParseAddr(from), netip.MustParseAddr(to)
	dst := groupMAC(d)
	eth := &layers.Ethernet{SrcMAC: src[:], DstMAC: dst[:], EthernetType: layers.EthernetTypeIPv4}
	ls := []gopacket.SerializableLayer{eth}
	body = slices.Clone(body)
	if d.Is6() {
		eth.EthernetType = layers.EthernetTypeIPv6
		p := &layers.IPv6{Version: 6, HopLimit: 1, NextHeader: proto, SrcIP: s.AsSlice(), DstIP: d.AsSlice()}
		ls = append(ls, p)
		if alert {
			p.NextHeader = layers.IPProtocolIPv6HopByHop
			hbh := &layers.IPv6HopByHop{}
			hbh.NextHeader = proto
			hbh.Options = []*layers.IPv6HopByHopOption{{OptionType: 5, OptionLength: 2, OptionData: []byte{0, 0}},
				{OptionType: 1}} // PadN
			ls = append(ls, hbh)
			binary.BigEndian.PutUint16(body[2:], header.Checksum(body, header.PseudoSum6(s.As16(), d.As16(),
				header.ProtoICMPv6, uint32(len(body)))))
		}
	} else {
		p := &layers.IPv4{Version: 4, TTL: 1, Protocol: proto, SrcIP: s.AsSlice(), DstIP: d.AsSlice()}
		ls = append(ls, p)
		if alert {
			p.Options = []layers.IPv4Option{{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}}}
			binary.BigEndian.PutUint16(body[2:], header.Checksum(body, 0))
		}
	}
	buf := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		append(ls, gopacket.Payload(body))...); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func message(t testing.TB, src MAC, from, to string, body []byte) []byte {
	proto := layers.IPProtocolIGMP
	if strings.Contains(to, ":") {
		proto = layers.IPProtocolICMPv6
	}
	return ipFrame(t, src, from, to, proto, true, body)
}

func igmpBody(typ, code byte, group string, more ...byte) []byte {
	g := netip.MustParseAddr(group).As4()
	return append([]byte{typ, code, 0, 0, g[0], g[1], g[2], g[3]}, more...)
}

func mldBody(typ byte, code uint16, group string) []byte {
	g := netip.MustParseAddr(group).As16()
	return append([]byte{typ, 0, 0, 0, byte(code >> 8), byte(code), 0, 0}, g[:]...)
}

// query is a general query with 10 s for answers.
func query(t testing.TB, src MAC, from string) []byte {
	if strings.Contains(from, ":") {
		return message(t, src, from, "ff02::1", mldBody(130, 10000, "::"))
	}
	return message(t, src, from, "224.0.0.1", igmpBody(0x11, 100, "0.0.0.0"))
}

func joinFrame(t testing.TB, src MAC, group string) []byte {
	if strings.Contains(group, ":") {
		return message(t, src, "fe80::1", group, mldBody(131, 0, group))
	}
	return message(t, src, "192.0.2.1", group, igmpBody(0x16, 0, group))
}

func leaveFrame(t testing.TB, src MAC, group string) []byte {
	if strings.Contains(group, ":") {
		return message(t, src, "fe80::1", "ff02::2", mldBody(132, 0, group))
	}
	return message(t, src, "192.0.2.1", "224.0.0.2", igmpBody(0x17, 0, group))
}

func dataFrame(t testing.TB, src MAC, group string) []byte {
	from := "192.0.2.1"
	if strings.Contains(group, ":") {
		from = "2001:db8::1"
	}
	return ipFrame(t, src, from, group, layers.IPProtocolUDP, false, []byte{1, 2, 3, 4, 0, 12, 0, 0, 'd', 'a', 't', 'a'})
}

// snoopBench is a network with a router and three VMs on ports of their own, a host port, and a tunnel.
type snoopBench struct {
	*bench
	router, a, b, c, tap, vtep *recPort
}

const routerIP = "192.0.2.254"

func newSnoopBench(t testing.TB, c Config) *snoopBench {
	c.Snoop = true
	b := &snoopBench{bench: newBench(t, c)}
	b.router = b.port(PortConfig{Name: "router", Kind: KindVM, MACs: []MAC{mac(9)}})
	b.a = b.port(PortConfig{Name: "a", Kind: KindVM, MACs: []MAC{mac(1)}})
	b.b = b.port(PortConfig{Name: "b", Kind: KindVM, MACs: []MAC{mac(2)}})
	b.c = b.port(PortConfig{Name: "c", Kind: KindVM, MACs: []MAC{mac(3)}})
	b.tap = b.port(PortConfig{Name: "tap", Kind: KindTAP})
	b.vtep = b.port(PortConfig{Name: "vtep", Kind: KindVTEP})
	// New ports take all until they have been asked.
	b.advance(leastMembers + time.Second)
	return b
}

func (b *snoopBench) ports() map[string]*recPort {
	return map[string]*recPort{"router": b.router, "a": b.a, "b": b.b, "c": b.c, "tap": b.tap, "vtep": b.vtep}
}

// to sends a frame and returns the ports that got it, in order, tunnels with the peer if it went to one.
func (b *snoopBench) to(p *recPort, f []byte, from ...Remote) string {
	b.t.Helper()
	src := Source{}
	if len(from) > 0 {
		src.Remote = from[0]
	}
	b.input(p.att, f, src)
	if s := b.net.snooping.Load(); s != nil {
		s.settle()
	}
	var got []string
	for name, p := range b.ports() {
		for _, r := range p.take() {
			if r.to.Remote != 0 {
				got = append(got, fmt.Sprint(name, ":", r.to.Remote))
			} else {
				got = append(got, name)
			}
		}
	}
	slices.Sort(got)
	return strings.Join(got, " ")
}

func (b *snoopBench) want(what, got, want string) {
	b.t.Helper()
	if got != want {
		b.t.Errorf("%s: delivered to %q, want %q", what, got, want)
	}
}

// ask lets the router query, and waits until the hosts have had time to answer.
func (b *snoopBench) ask() {
	b.t.Helper()
	b.to(b.router, query(b.t, mac(9), routerIP))
	b.to(b.router, query(b.t, mac(9), "fe80::9"))
	b.advance(12 * time.Second)
}

const all = "a b c router tap vtep"

func without(names ...string) string {
	left := slices.DeleteFunc(strings.Fields(all), func(s string) bool { return slices.Contains(names, s) })
	return strings.Join(left, " ")
}

// TestSnooping counts who gets a group's frames, for both IP versions (RFC 4541).
func TestSnooping(t *testing.T) {
	for _, group := range []string{"239.1.1.1", "ff05::1:1"} {
		t.Run(group, func(t *testing.T) {
			b := newSnoopBench(t, Config{})
			data := func() string { t.Helper(); return b.to(b.a, dataFrame(t, mac(1), group)) }
			b.want("report without a querier", b.to(b.b, joinFrame(t, mac(2), group)), without("b"))
			b.want("no querier", data(), without("a"))

			src := map[bool]string{true: "fe80::9", false: routerIP}[strings.Contains(group, ":")]
			b.want("query", b.to(b.router, query(t, mac(9), src)), without("router"))
			b.want("before the hosts have answered", data(), without("a"))
			b.want("report", b.to(b.b, joinFrame(t, mac(2), group)), "router vtep")
			b.advance(12 * time.Second)
			b.want("a member", data(), "b router")
			b.want("a member sends", b.to(b.b, dataFrame(t, mac(2), group)), "router")
			other := "239.1.1.2"
			if strings.Contains(group, ":") {
				other = "ff05::1:2"
			}
			b.want("an unknown group", b.to(b.a, dataFrame(t, mac(1), other)), without("a"))
			b.want("a link-local group", b.to(b.a, dataFrame(t, mac(1),
				map[bool]string{true: "ff02::fb", false: "224.0.0.251"}[strings.Contains(group, ":")])), without("a"))

			b.want("report from a tunnel", b.to(b.vtep, joinFrame(t, mac(20), group), 3), "router")
			b.want("a peer is a member", data(), "b router vtep:3")
			b.to(b.vtep, joinFrame(t, mac(21), group), 4)
			b.want("two peers", data(), "b router vtep:3 vtep:4")
			b.want("split horizon", b.to(b.vtep, dataFrame(t, mac(20), group), 3), "b router")
			b.to(b.tap, joinFrame(t, mac(30), group))
			b.want("a host port", data(), "b router tap vtep:3 vtep:4")

			b.want("leave", b.to(b.b, leaveFrame(t, mac(2), group)), "router vtep")
			b.want("a VM has left", data(), "router tap vtep:3 vtep:4")
			b.to(b.vtep, leaveFrame(t, mac(20), group), 3)
			b.want("a peer may have other members", data(), "router tap vtep:3 vtep:4")

			b.advance(110 * time.Second)
			b.to(b.router, query(t, mac(9), src))
			b.to(b.tap, joinFrame(t, mac(30), group))
			b.advance(150 * time.Second)
			b.want("memberships end unless reported", data(), "router tap")
			b.advance(110 * time.Second)
			b.want("the querier is gone", data(), without("a"))
			b.want("report, the querier being gone", b.to(b.b, joinFrame(t, mac(2), group)), without("b"))

			st := b.net.Status()
			if st.Pruned == 0 || st.Multicast == nil || st.Multicast.Refused != 0 {
				t.Errorf("status: %d pruned, %+v", st.Pruned, st.Multicast)
			}
			b.net.SetSnooping(false)
			b.ask()
			b.want("turned off", data(), without("a"))
		})
	}
}

// TestSnoopingIsExact: what is not a known IP group is flooded.
func TestSnoopingIsExact(t *testing.T) {
	b := newSnoopBench(t, Config{})
	b.ask()
	b.to(b.b, joinFrame(t, mac(2), "239.1.1.1"))
	f := dataFrame(t, mac(1), "239.1.1.1")
	b.want("known", b.to(b.a, f), "b router")
	other := slices.Clone(f)
	other[5]++
	b.want("MAC of another group", b.to(b.a, other), without("a"))
	copy(other, broadcast[:])
	b.want("broadcast", b.to(b.a, other), without("a"))
	b.want("another VLAN", b.to(b.a, tagged(7, f)), without("a"))
	b.want("no IP", b.to(b.a, buildFrame(MAC{1, 0, 0x5e, 1, 1, 1}, mac(1), "x")), without("a"))
	b.want("cut short", b.to(b.a, f[:20]), without("a"))

	b.want("query in a VLAN", b.to(b.router, tagged(7, query(t, mac(9), routerIP))), without("router"))
	b.to(b.c, tagged(7, joinFrame(t, mac(3), "239.1.1.1")))
	b.advance(12 * time.Second)
	b.want("in the VLAN", b.to(b.a, tagged(7, f)), "c router")
	b.want("without tag", b.to(b.a, f), "b router")
	b.want("two tags", b.to(b.a, tagged(7, tagged(8, f))), without("a"))

	b.to(b.c, ipFrame(t, mac(3), "192.0.2.3", "224.0.0.13", 103, false, []byte{0x20, 0, 0, 0, 0, 1, 0, 2, 0, 30}))
	b.want("a PIM router", b.to(b.a, f), "b c router")
	b.advance(31 * time.Second)
	b.want("a PIM router gone", b.to(b.a, f), "b router")
}

// TestSnoopingElection: the lowest address is the querier; 0.0.0.0 is none while another is present (RFC 4541, 2.1.1).
func TestSnoopingElection(t *testing.T) {
	b := newSnoopBench(t, Config{})
	querier := func() string {
		for _, q := range b.net.Multicast().Queriers {
			if q.Family == "igmp" {
				return fmt.Sprint(q.Address, " ", q.Port)
			}
		}
		return ""
	}
	for _, x := range []struct {
		p    *recPort
		src  MAC
		from string
		want string
	}{
		{b.tap, mac(30), "0.0.0.0", "0.0.0.0 tap"},
		{b.router, mac(9), "192.0.2.200", "192.0.2.200 router"},
		{b.c, mac(3), "192.0.2.201", "192.0.2.200 router"},
		{b.tap, mac(30), "0.0.0.0", "192.0.2.200 router"},
		{b.b, mac(2), "192.0.2.2", "192.0.2.2 b"},
	} {
		b.to(x.p, query(t, x.src, x.from))
		if got := querier(); got != x.want {
			t.Errorf("after a query from %s: querier %q, want %q", x.from, got, x.want)
		}
	}
	b.advance(12 * time.Second)
	b.to(b.b, joinFrame(t, mac(2), "239.1.1.1"))
	b.want("all that query are routers", b.to(b.a, dataFrame(t, mac(1), "239.1.1.1")), "b c router tap")
	b.b.att.Close()
	if got := querier(); strings.HasSuffix(got, " b") {
		t.Errorf("querier %q after its port was closed", got)
	}
}

// TestSnoopingHostileQuerier: queries that hosts ignore, do not all get, or may answer late do not make a querier: the
// memberships of others would end.
func TestSnoopingHostileQuerier(t *testing.T) {
	const group = "239.1.1.1"
	for _, c := range []struct {
		name string
		f    func(t testing.TB) []byte
		ok   bool
	}{
		{"proper", func(t testing.TB) []byte { return query(t, mac(3), "0.0.0.1") }, true},
		{"answers within 52 minutes", func(t testing.TB) []byte {
			return message(t, mac(3), "0.0.0.1", "224.0.0.1", igmpBody(0x11, 0xff, "0.0.0.0", 2, 125, 0, 0))
		}, false},
		{"every 8 hours", func(t testing.TB) []byte {
			return message(t, mac(3), "0.0.0.1", "224.0.0.1", igmpBody(0x11, 100, "0.0.0.0", 2, 0xff, 0, 0))
		}, false},
		{"one group", func(t testing.TB) []byte {
			return message(t, mac(3), "0.0.0.1", group, igmpBody(0x11, 100, group))
		}, false},
		{"to one host", func(t testing.TB) []byte {
			f := query(t, mac(3), "0.0.0.1")
			dst := mac(1)
			copy(f, dst[:])
			return f
		}, false},
		{"checksum", func(t testing.TB) []byte { f := query(t, mac(3), "0.0.0.1"); f[40]++; return f }, false},
		{"priority tag", func(t testing.TB) []byte {
			return slices.Insert(query(t, mac(3), "0.0.0.1"), 12, 0x81, 0, 0x60, 0)
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newSnoopBench(t, Config{})
			b.to(b.c, c.f(t))
			b.to(b.c, joinFrame(t, mac(3), group)) // the accomplice is the only member that reports
			b.advance(20 * time.Second)
			b.to(b.c, joinFrame(t, mac(3), group))
			got := b.to(b.a, dataFrame(t, mac(1), group))
			if c.ok {
				b.want("querier", got, "c")
				return
			}
			b.want("no querier", got, without("a"))
		})
	}
	t.Run("beyond the storm limit", func(t *testing.T) {
		b := newSnoopBench(t, Config{Storm: 1})
		b.to(b.c, buildFrame(broadcast, mac(3), "x"))
		b.to(b.c, buildFrame(broadcast, mac(3), "x"))
		b.want("query", b.to(b.c, query(t, mac(3), "0.0.0.1")), "")
		b.to(b.vtep, joinFrame(t, mac(20), group), 1)
		b.advance(20 * time.Second)
		b.want("no host has got the query", b.to(b.a, dataFrame(t, mac(1), group)), without("a"))
	})
	t.Run("short interval", func(t *testing.T) { // memberships live as long as by the defaults
		b := newSnoopBench(t, Config{})
		b.ask()
		b.to(b.c, message(t, mac(3), "0.0.0.1", "224.0.0.1", igmpBody(0x11, 1, "0.0.0.0", 2, 1, 0, 0)))
		b.to(b.b, joinFrame(t, mac(2), group))
		for range 20 {
			b.advance(time.Second)
			b.to(b.c, message(t, mac(3), "0.0.0.1", "224.0.0.1", igmpBody(0x11, 1, "0.0.0.0", 2, 1, 0, 0)))
			b.to(b.c, joinFrame(t, mac(3), group))
		}
		b.want("the member", b.to(b.a, dataFrame(t, mac(1), group)), "b c router")
	})
}

// TestSnoopingHostileJoins: a VM that joins groups in a loop gets all multicast itself, and no other port more or less.
func TestSnoopingHostileJoins(t *testing.T) {
	b := newSnoopBench(t, Config{Storm: Unlimited})
	b.ask()
	b.to(b.b, joinFrame(t, mac(2), "239.1.1.1"))
	b.want("before", b.to(b.a, dataFrame(t, mac(1), "239.1.1.1")), "b router")
	for i := range 2 * maxPortMembers {
		b.to(b.c, joinFrame(t, mac(3), fmt.Sprintf("239.2.%d.%d", i/256, i%256)))
		b.advance(10 * time.Millisecond)
	}
	st := b.net.Multicast()
	if st.Groups != maxPortMembers+1 || st.Refused != maxPortMembers {
		t.Errorf("%d groups, %d refused", st.Groups, st.Refused)
	}
	b.want("after", b.to(b.a, dataFrame(t, mac(1), "239.1.1.1")), "b c router")
	b.to(b.a, joinFrame(t, mac(1), "239.1.1.1"))
	b.want("others still join", b.to(b.b, dataFrame(t, mac(2), "239.1.1.1")), "a c router")
	b.want("one of the loop's", b.to(b.a, dataFrame(t, mac(1), "239.2.0.1")), "c router")
	b.want("refused in the loop", b.to(b.a, dataFrame(t, mac(1), "239.2.1.255")), without("a"))

	for i := range maxPortMembers {
		b.to(b.c, leaveFrame(t, mac(3), fmt.Sprintf("239.2.%d.%d", i/256, i%256)))
		b.advance(10 * time.Millisecond)
	}
	if st = b.net.Multicast(); st.Groups != 1 || len(b.net.snooping.Load().held) != 2 {
		t.Errorf("%d groups, held %v after leaving", st.Groups, b.net.snooping.Load().held)
	}

	// At more records per second than a port may send, and with a full queue, the port takes all.
	b.advance(leastMembers)
	b.ask()
	records := []byte{0x22, 0, 0, 0, 0, 0, 0, 100}
	for i := range 100 {
		records = append(records, 4, 0, 0, 0, 239, 3, 0, byte(i))
	}
	f := message(t, mac(3), "192.0.2.3", "224.0.0.22", records)
	b.to(b.b, joinFrame(t, mac(2), "239.1.1.1"))
	for range 20 {
		b.to(b.c, f)
	}
	if got := b.net.Multicast(); got.Refused <= st.Refused {
		t.Errorf("%d refused after 2000 records at once", got.Refused)
	}
	b.want("after too many records", b.to(b.a, dataFrame(t, mac(1), "239.1.1.1")), "b c router")
}

// TestSnoopingFull fills the whole table, and the queue: then ports take all, and ended memberships make room.
func TestSnoopingFull(t *testing.T) {
	b := newSnoopBench(t, Config{})
	b.ask()
	s := b.net.snooping.Load()
	now := b.net.seconds()
	for i := range MaxMembers { // tunnels fill half
		s.join(&event{spot: spot{b.vtep.att, Remote(1 + i/maxPlaceMembers)}, addr: ip{0: 0xff, 1: 5, 14: byte(i >> 8),
			15: byte(i)}, now: now})
	}
	if s.count != maxTunnelMembers || !b.vtep.att.takesAll(now) {
		t.Errorf("%d memberships of tunnels", s.count)
	}
	b.to(b.b, joinFrame(t, mac(2), "239.1.1.1"))
	b.want("members of this host", b.to(b.a, dataFrame(t, mac(1), "239.1.1.1")), "b router vtep")
	b.advance(leastMembers)
	b.ask()
	b.to(b.b, joinFrame(t, mac(2), "239.1.1.1"))
	b.to(b.vtep, joinFrame(t, mac(20), "239.1.1.1"), 9)
	b.want("after the others have ended", b.to(b.a, dataFrame(t, mac(1), "239.1.1.1")), "b router vtep:9")
	if s.count != 2 {
		t.Errorf("%d memberships", s.count)
	}

	s.mu.Lock() // the queue is not emptied meanwhile
	for range maxEvents + 1 {
		s.put(event{kind: eventLeave, spot: spot{att: b.c.att}, now: b.net.seconds()})
	}
	s.mu.Unlock()
	if !b.c.att.takesAll(b.net.seconds()) || b.b.att.takesAll(b.net.seconds()) {
		t.Error("a full queue does not make its port take all")
	}
}

// TestSnoopingMoves: nothing stale is left of a port or peer that is gone, and a VM that comes from or goes to another
// host loses no frames (MT-5).
func TestSnoopingMoves(t *testing.T) {
	const group = "239.1.1.1"
	b := newSnoopBench(t, Config{})
	b.ask()
	b.to(b.b, joinFrame(t, mac(2), group))
	b.to(b.vtep, joinFrame(t, mac(20), group), 3)
	data := func() string { t.Helper(); return b.to(b.a, dataFrame(t, mac(1), group)) }
	b.want("before", data(), "b router vtep:3")

	b.b.att.Close() // the VM goes to another host
	b.want("gone", data(), "router vtep")
	s := b.net.snooping.Load()
	if s.count != 1 || len(s.held) != 1 {
		t.Errorf("%d memberships, %v", s.count, s.held)
	}
	// The control plane has moved its address behind peer 4, where it reports.
	if err := b.net.SetYielding(Address{MAC: mac(2)}, b.vtep.att, 4); err != nil {
		t.Fatal(err)
	}
	b.to(b.vtep, joinFrame(t, mac(2), group), 4)
	b.want("it reports there", data(), "router vtep")
	b.advance(120 * time.Second)
	b.ask()
	b.to(b.vtep, joinFrame(t, mac(2), group), 4)
	b.advance(100 * time.Second)
	b.ask()
	b.advance(50 * time.Second)
	b.want("later", data(), "router vtep:4")

	// From peer 4 to peer 5: it gets all there until it is asked.
	if err := b.net.SetYielding(Address{MAC: mac(2)}, b.vtep.att, 5); err != nil {
		t.Fatal(err)
	}
	b.want("moved between peers", data(), "router vtep")

	b.net.FlushRemote(b.vtep.att, 4)
	if s.held[spot{b.vtep.att, 4}] != 0 || b.net.Multicast().Members != 0 {
		t.Errorf("%v after the peer is gone", b.net.Multicast())
	}

	// It comes back: until it has been asked it takes all.
	b.b = b.port(PortConfig{Name: "b", Kind: KindVM, MACs: []MAC{mac(2)}})
	b.to(b.c, joinFrame(t, mac(3), group))
	b.want("back", data(), "b c router vtep")
}

// groupHCA is an HCA that has joined groups.
type groupHCA struct {
	upHCA
	groups []string
}

func (h *groupHCA) Joined(g [16]byte) bool {
	return slices.Contains(h.groups, netip.AddrFrom16(g).Unmap().String())
}

// roceGroupFrame is a RoCE frame to a group: v2 for an IP address, v1 if told so.
func roceGroupFrame(t testing.TB, src MAC, group string, v1 bool) []byte {
	f := ipFrame(t, src, map[bool]string{true: "2001:db8::1", false: "192.0.2.1"}[strings.Contains(group, ":")], group,
		layers.IPProtocolUDP, false, append([]byte{0xc0, 0, 0x12, 0xb7, 0, 40, 0, 0}, make([]byte, 32)...))
	if v1 {
		f[12], f[13] = 0x89, 0x15
	}
	return f
}

// TestSnoopingRDMA: an HCA that is up gets RoCE frames of the groups that its QPs have joined, without reports; all
// others get them as before.
func TestSnoopingRDMA(t *testing.T) {
	b := newBench(t, Config{Snoop: true})
	rx := b.port(PortConfig{Name: "tap", Kind: KindTAP})
	vtep := b.port(PortConfig{Name: "vtep", Kind: KindVTEP})
	hcas := map[string]*groupHCA{
		"in4": {groups: []string{"239.1.1.1"}}, "in6": {groups: []string{"ff05::1:1"}}, "out": {}, "down": {},
	}
	faces := map[string]*face{}
	for i, name := range []string{"in4", "in6", "out", "down"} {
		p, err := NewVMPort(b.net, VMPortConfig{Name: name, MAC: mac(10 + i)})
		if err != nil {
			t.Fatal(err)
		}
		faces[name] = &face{}
		p.SetNet(faces[name])
		p.SetHCA(hcas[name])
	}
	hcas["down"].down = true
	src := b.port(PortConfig{Name: "src", Kind: KindVM, MACs: []MAC{mac(1)}})
	send := func(f []byte) (got string) {
		b.input(src.att, f, Source{})
		var list []string
		for name, h := range hcas {
			if h.got > 0 {
				list = append(list, name)
			}
			h.got = 0
			if faces[name].got > 0 {
				list = append(list, name+".net")
			}
			faces[name].got = 0
		}
		slices.Sort(list)
		if len(rx.take()) != 1 || len(vtep.take()) != 1 {
			t.Error("host port or tunnel did not get the frame")
		}
		return strings.Join(list, " ")
	}
	for _, c := range []struct {
		f    []byte
		want string
	}{
		{roceGroupFrame(t, mac(1), "239.1.1.1", false), "down.net in4"},
		{roceGroupFrame(t, mac(1), "ff05::1:1", false), "down.net in6"},
		{roceGroupFrame(t, mac(1), "ff05::1:1", true), "down.net in6"},
		{roceGroupFrame(t, mac(1), "239.1.1.2", false), "down.net"},
		{dataFrame(t, mac(1), "239.1.1.1"), "down.net in4.net in6.net out.net"},
	} {
		if got := send(c.f); got != c.want {
			t.Errorf("delivered to %q, want %q", got, c.want)
		}
	}
	b.net.SetSnooping(false)
	if got := send(roceGroupFrame(t, mac(1), "239.1.1.2", false)); got != "down.net in4 in6 out" {
		t.Errorf("without snooping: %q", got)
	}
}

// TestSnoopingConcurrent has loops send reports, queries and data while ports come and go.
func TestSnoopingConcurrent(t *testing.T) {
	n, err := NewNetwork(Config{VNI: 7, Name: "seven", Snoop: true, Storm: Unlimited})
	if err != nil {
		t.Fatal(err)
	}
	attach := func(i int) *Attachment {
		a, err := n.Attach(&safePort{}, PortConfig{Name: fmt.Sprint("p", i), Kind: KindVM, MACs: []MAC{mac(i)}})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	var wg sync.WaitGroup
	for i := range 3 {
		l, err := loop.New(loop.Config{ID: i})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		pool, err := frame.NewPool(frame.Config{Count: 8})
		if err != nil {
			t.Fatal(err)
		}
		own := attach(i + 1)
		frames := [][]byte{query(t, mac(i+1), routerIP), joinFrame(t, mac(i+1), "239.1.1.1"),
			dataFrame(t, mac(i+1), "239.1.1.1"), leaveFrame(t, mac(i+1), "239.1.1.1")}
		wg.Go(func() {
			for k := range 2000 {
				b := pool.Get()
				b.Append(frames[k%len(frames)])
				l.Do(func() { own.Input(l, b, Source{}) })
				b.Free()
			}
		})
	}
	wg.Go(func() {
		for range 200 {
			a := attach(9)
			n.Multicast()
			a.Close()
		}
	})
	wg.Go(func() {
		for i := range 50 {
			n.SetSnooping(i%2 == 1)
		}
	})
	wg.Wait()
	if s := n.snooping.Load(); s != nil {
		s.settle()
		for k := range s.held {
			if k.att.closed.Load() {
				t.Errorf("membership of closed port %s", k.att.cfg.Name)
			}
		}
	}
}

// TestSnoopingAllocs: the data path allocates nothing.
func TestSnoopingAllocs(t *testing.T) {
	b := newSnoopBench(t, Config{Storm: Unlimited})
	for _, p := range b.ports() {
		p.att.port = sink{}
	}
	b.ask()
	b.to(b.b, joinFrame(t, mac(2), "239.1.1.1"))
	b.to(b.vtep, joinFrame(t, mac(20), "239.1.1.1"), 3)
	for _, f := range [][]byte{dataFrame(t, mac(1), "239.1.1.1"), roceGroupFrame(t, mac(1), "239.1.1.1", false)} {
		buf := b.pool.Get()
		buf.Append(f)
		b.loop.Do(func() {
			if n := testing.AllocsPerRun(100, func() { b.a.att.Input(b.loop, buf, Source{}) }); n != 0 {
				t.Errorf("%v allocations", n)
			}
		})
		buf.Free()
	}
}

func BenchmarkMulticast(x *testing.B) {
	for _, snoop := range []bool{false, true} {
		x.Run(fmt.Sprint("snoop=", snoop), func(x *testing.B) {
			b := newSnoopBench(x, Config{Storm: Unlimited})
			for _, p := range b.ports() {
				p.att.port = sink{}
			}
			b.net.SetSnooping(snoop)
			b.ask()
			b.to(b.b, joinFrame(x, mac(2), "239.1.1.1"))
			buf := b.pool.Get()
			defer buf.Free()
			buf.Append(dataFrame(x, mac(1), "239.1.1.1"))
			x.ReportAllocs()
			b.loop.Do(func() {
				for x.Loop() {
					b.a.att.Input(b.loop, buf, Source{})
				}
			})
		})
	}
}
