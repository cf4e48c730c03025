package guestdrv_test

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/guestdrv"
)

const gsiQKey = 0x80010000

// manager acts as a host's connection manager, as its kernel would.
type manager struct {
	*end
	out, in *guestdrv.Buffer
	mr, imr *guestdrv.MR
}

func (h *host) manager(tb testing.TB) *manager {
	tb.Helper()
	c := udConfig()
	c.Type, c.Privileged = guestdrv.QPTypeGSI, true
	m := &manager{end: h.udEnd(tb, c, gsiQKey)}
	m.out, m.mr = h.region(tb, 4096, guestdrv.AccessLocalWrite)
	m.in, m.imr = h.region(tb, 4096, allAccess)
	h.warm(tb, m.imr)
	return m
}

// say sends a message to another manager and waits until it has arrived.
func (m *manager) say(tb testing.TB, to *manager, x cmtest.Message) {
	tb.Helper()
	if x.Kind == cm.REQ {
		x.Local, x.Remote = m.h.gid, to.h.gid
	}
	copy(m.out.Bytes(), x.Bytes())
	to.recv(tb, 1, to.imr.SGE(0, 4096))
	m.post(tb, &request{ID: 2, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{m.mr.SGE(0, cm.MADLen)}, AH: m.h.ah(tb, to.h), RemoteQPN: 1, QKey: gsiQKey})
	expect(tb, m.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
	expect(tb, to.rcq, 1, guestdrv.WCSuccess, guestdrv.WCOpRecv)
	if !bytes.Equal(to.in.Bytes()[grhLen:][:cm.MADLen], m.out.Bytes()[:cm.MADLen]) {
		tb.Fatalf("%v: it differs", x.Kind)
	}
}

// managed connects two hosts as rdma_cm does.
func managed(tb testing.TB, ma, mb *manager, id uint32) (a, b *end) {
	tb.Helper()
	a, b = ma.h.end(tb, qpDefaults(), 0xfffff0), mb.h.end(tb, qpDefaults(), 0xfffffe)
	join := func(x, to *end) {
		tb.Helper()
		if err := x.qp.Connect(bg, guestdrv.Peer{QPN: to.qp.Number(), PSN: to.psn, Path: to.h.at()},
			guestdrv.ConnectOptions{PSN: x.psn, Access: peerAccess, Timeout: 12}); err != nil {
			tb.Fatal(err)
		}
	}
	ma.say(tb, mb, cmtest.Message{Kind: cm.REQ, LocalID: id, Service: 0x01061c06, QPN: a.qp.Number(), PSN: a.psn,
		PathMTU: 3})
	join(b, a)
	mb.say(tb, ma, cmtest.Message{Kind: cm.REP, LocalID: id + 1, RemoteID: id, QPN: b.qp.Number(), PSN: b.psn})
	join(a, b)
	ma.say(tb, mb, cmtest.Message{Kind: cm.RTU, LocalID: id, RemoteID: id + 1})
	return a, b
}

// connectionOf returns the connection of a queue pair.
func (h *host) connectionOf(tb testing.TB, qpn uint32) hca.Connection {
	tb.Helper()
	for _, c := range h.hca.Connections() {
		if c.LocalQPN == qpn {
			return c
		}
	}
	tb.Fatalf("no connection of QP %#x in %+v", qpn, h.hca.Connections())
	return hca.Connection{}
}

func (e *end) write(tb testing.TB, id uint64, n int, smr *guestdrv.MR, dst *guestdrv.Buffer, dmr *guestdrv.MR) {
	tb.Helper()
	e.post(tb, &request{ID: id, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{smr.SGE(0, n)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
	expect(tb, e.scq, id, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
}

// TestConnections: messages of connection management are observed on both sides. A connection's packets follow its
// tuple, also when the tuple changes while the connection is open, and status shows all of it (MT-3, MT-4, MT-5).
func TestConnections(t *testing.T) {
	r := newRig(t, rigConfig{vxlan: true, second: true})
	ha, hb := r.hosts[0], r.hosts[1]
	ma, mb := ha.manager(t), hb.manager(t)
	a, b := managed(t, ma, mb, 0x11110001)
	direct, _ := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{})

	want := hca.Connection{Type: "RC", State: "established", QPState: "RTS", Role: "active", LocalQPN: a.qp.Number(),
		RemoteQPN: b.qp.Number(), LocalID: 0x11110001, RemoteID: 0x11110002, ServiceID: "0x0000000001061c06",
		Service: "tcp 7174", LocalGID: "10.0.0.1", RemoteGID: "10.0.0.2", LocalMAC: "02:00:00:00:00:01",
		RemoteMAC: "02:00:00:00:00:02", PathMTU: 1024}
	tuple := hca.Tuple{Network: "tenant", VNI: 7, Port: "vxlan 192.0.2.1", Kind: "vtep", Far: 1, MTU: 1500}
	check := func(what string, got hca.Connection, want hca.Connection, tuple hca.Tuple) {
		t.Helper()
		if got.Tuple == nil || *got.Tuple != tuple {
			t.Errorf("%s: tuple %+v, want %+v", what, got.Tuple, tuple)
		}
		got.Tuple, got.Age = nil, 0
		if got != want {
			t.Errorf("%s:\n%+v, want\n%+v", what, got, want)
		}
	}
	check("active", ha.connectionOf(t, a.qp.Number()), want, tuple)
	want.Role, want.LocalQPN, want.RemoteQPN, want.LocalID, want.RemoteID = "passive", b.qp.Number(), a.qp.Number(),
		0x11110002, 0x11110001
	want.LocalGID, want.RemoteGID, want.LocalMAC, want.RemoteMAC = want.RemoteGID, want.LocalGID, want.RemoteMAC,
		want.LocalMAC
	back := tuple
	back.Port = "vxlan 192.0.2.2"
	check("passive", hb.connectionOf(t, b.qp.Number()), want, back)
	if c := ha.connectionOf(t, direct.qp.Number()); c.State != "direct" || c.Role != "" || c.Tuple == nil ||
		*c.Tuple != tuple {
		t.Errorf("a connection without a connection manager: %+v", c)
	}

	src, smr := ha.region(t, 1<<20, guestdrv.AccessLocalWrite)
	dst, dmr := hb.region(t, 1<<20, allAccess)
	fill(src.Bytes(), 1)
	a.write(t, 1, 1<<20, smr, dst, dmr)

	// B's host is now reached at its other address, and sends from it: another VTEP for A.
	nft := `table ip moved {
		chain in { type filter hook prerouting priority -300; ip daddr 192.0.2.12 udp dport 4789 ip daddr set 192.0.2.2; }
		chain out { type filter hook postrouting priority 300; ip saddr 192.0.2.2 udp dport 4789 ip saddr set 192.0.2.12; }
	}`
	hb.site.ns.MustExec("nft", nft)
	site := ha.site
	var far vswitch.Remote
	for _, p := range site.vt.Peers(7) {
		if p.Addr == netip.MustParseAddr("192.0.2.12") {
			far = p.Remote
		}
	}
	fill(src.Bytes(), 2)
	a.post(t, &request{ID: 3, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{smr.SGE(0, 1<<20)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
	if err := site.net.SetStatic(vswitch.Address{MAC: vswitch.MAC(hb.mac)}, site.net.Port("vxlan 192.0.2.1"),
		far); err != nil {
		t.Fatal(err)
	}
	expect(t, a.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(src.Bytes(), dst.Bytes()) {
		t.Error("data differ after the move")
	}
	tuple.Far, tuple.Moves = far, 1
	for _, e := range []*end{a, direct} {
		if c := ha.connectionOf(t, e.qp.Number()); c.Tuple == nil || *c.Tuple != tuple {
			t.Errorf("after the move: %+v, want %+v", c.Tuple, tuple)
		}
	}
	b.write(t, 4, 1000, dmr, src, smr2(t, ha, src))

	ma.say(t, mb, cmtest.Message{Kind: cm.DREQ, LocalID: 0x11110001, RemoteID: 0x11110002, QPN: b.qp.Number()})
	mb.say(t, ma, cmtest.Message{Kind: cm.DREP, LocalID: 0x11110002, RemoteID: 0x11110001})
	destroy(t, a, b)
	for _, h := range r.hosts {
		found := false
		for _, c := range h.hca.Connections() {
			found = found || c.State == "closed" && c.QPState == "" && c.Service == "tcp 7174"
		}
		if !found {
			t.Errorf("no closed connection in %+v", h.hca.Connections())
		}
		if d := h.hca.Drops(); d["cm-peer"]+d["cm-message"]+d["cm-gid"]+d["cm-mac"] != 0 {
			t.Errorf("drops %v", d)
		}
	}
}

// smr2 registers a buffer for the peer's writes.
func smr2(tb testing.TB, h *host, b *guestdrv.Buffer) *guestdrv.MR {
	tb.Helper()
	mr, err := h.pd.Register(bg, b, allAccess)
	if err != nil {
		tb.Fatal(err)
	}
	return mr
}

// forger sends forged datagrams to a VTEP, from inside the peer's namespace.
type forger struct {
	tb   testing.TB
	site *site
}

// forgery is a packet from a VTEP, correct except for a test's change.
type forgery struct {
	from string // the outer source address
	cmtest.Packet
	port int // outer source port; 0: one that only root may send from
}

func (f *forger) send(p *forgery) {
	f.tb.Helper()
	out, err := p.Bytes()
	if err != nil {
		f.tb.Fatal(err)
	}
	f.site.ns.Do(func() {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(p.from), Port: cmp.Or(p.port, 500)},
			&net.UDPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 4789})
		if err != nil {
			f.tb.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write(out); err != nil {
			f.tb.Fatal(err)
		}
	})
}

// TestForged: a packet or connection request with any forged part is dropped and counted by its reason, and nothing is
// learnt from it (MT-4, MT-6).
func TestForged(t *testing.T) {
	r := newRig(t, rigConfig{vxlan: true, second: true})
	ha, hb := r.hosts[0], r.hosts[1]
	ma, mb := ha.manager(t), hb.manager(t)
	a, b := managed(t, ma, mb, 77)
	_, smr := ha.region(t, 4096, guestdrv.AccessLocalWrite)
	dst, dmr := hb.region(t, 4096, allAccess)
	a.write(t, 1, 64, smr, dst, dmr)
	secret, xmr := hb.region(t, 4096, guestdrv.AccessLocalWrite) // without rights for the peer
	ud := hb.udEnd(t, udConfig(), 1234)
	_, umr := hb.region(t, 4096, allAccess)
	ud.recv(t, 1, umr.SGE(0, 4096))
	ha.site.ns.Addr("underlay", "192.0.2.99/24") // not a peer
	if err := hb.site.net.SetNeighbour(netip.MustParseAddr("10.0.0.1"),
		vswitch.Address{MAC: vswitch.MAC(ha.mac)}); err != nil {
		t.Fatal(err)
	}
	f := &forger{t, ha.site}
	write := func(key uint32, at *guestdrv.Buffer) *forgery {
		attr, err := a.qp.Query(bg)
		if err != nil {
			t.Fatal(err)
		}
		p := &forgery{from: "192.0.2.1", Packet: cmtest.Packet{VNI: 7,
			Path: wire.Path{SMAC: ha.mac, DMAC: hb.mac, VLAN: header.NoVLAN, SrcIP: ha.gid, DstIP: hb.gid, SrcPort: 0xc001}}}
		p.Write(b.qp.Number(), attr.SQPSN, key, at.Addr(), bytes.Repeat([]byte{0xee}, 64))
		return p
	}
	datagram := func(qpn, qkey, from uint32, data []byte) *forgery {
		p := write(0, dst)
		p.Datagram(qpn, qkey, from, data)
		return p
	}
	request := func(x cmtest.Message) *forgery {
		if x.Kind == cm.REQ {
			x.Local, x.Remote = ha.gid, hb.gid
		}
		return datagram(1, gsiQKey, 1, x.Bytes())
	}
	req := cmtest.Message{Kind: cm.REQ, LocalID: 666, Service: 1, QPN: 99}
	with := func(p *forgery, mod func(*forgery)) *forgery { mod(p); return p }
	strange := header.MAC{2, 0, 0, 0, 9, 9}

	counts := func() map[string]uint64 {
		m := hb.hca.Drops()
		for _, d := range []map[string]uint64{hb.site.net.Status().Drops, hb.site.vt.Status().Drops} {
			for k, v := range d {
				m[k] += v
			}
		}
		delete(m, "duplicate") // packets that an honest end repeats after a forged NAK
		return m
	}
	conns := func() string {
		out := ""
		for _, c := range hb.hca.Connections() {
			c.Age, c.Tuple = 0, nil
			out += fmt.Sprintf("%+v\n", c)
		}
		return out
	}
	before, table := conns(), fmt.Sprint(places(hb.site.net))
	for _, tc := range []struct {
		name, reason string
		p            *forgery
	}{
		{"VTEP, unknown", "unknown-peer", with(write(dmr.RKey(), dst), func(p *forgery) { p.from = "192.0.2.99" })},
		{"outer source port", "source-port", with(write(dmr.RKey(), dst), func(p *forgery) { p.port = 50000 })},
		{"VTEP, another peer's", "misplaced-roce", with(write(dmr.RKey(), dst), func(p *forgery) { p.from = "192.0.2.11" })},
		{"VNI", "unknown-vni", with(write(dmr.RKey(), dst), func(p *forgery) { p.VNI = 8 })},
		{"inner source MAC", "unwanted-roce", with(write(dmr.RKey(), dst), func(p *forgery) { p.Path.SMAC = strange })},
		{"inner source MAC of the receiver", "static-moved",
			with(write(dmr.RKey(), dst), func(p *forgery) { p.Path.SMAC = hb.mac })},
		{"inner source IP", "peer-address", with(write(dmr.RKey(), dst),
			func(p *forgery) { p.Path.SrcIP = guestdrv.IPGID(netip.MustParseAddr("10.0.0.9")) })},
		{"inner destination IP", "own-gid", with(write(dmr.RKey(), dst),
			func(p *forgery) { p.Path.DstIP = guestdrv.IPGID(netip.MustParseAddr("10.0.0.9")) })},
		{"QP number", "qp-number", with(write(dmr.RKey(), dst), func(p *forgery) { p.BTH.DestQP ^= 0x10000 })},
		{"P_Key", "p-key", with(write(dmr.RKey(), dst), func(p *forgery) { p.BTH.PKey = 0x8001 })},
		{"service", "transport", with(write(dmr.RKey(), dst), func(p *forgery) { p.BTH.Opcode = wire.OpUCWriteOnly })},
		{"PSN", "sequence", with(write(dmr.RKey(), dst), func(p *forgery) { p.BTH.PSN = (p.BTH.PSN + 1000) & wire.PSNMask })},
		{"R_Key and PSN", "sequence", with(write(dmr.RKey()^0x100, dst),
			func(p *forgery) { p.BTH.PSN = (p.BTH.PSN + 1000) & wire.PSNMask })},
		{"Q_Key", "q-key", datagram(ud.qp.Number(), 1235, 5, make([]byte, 64))},
		{"Q_Key of QP 1", "q-key", datagram(1, 1235, 1, req.Bytes())},
		{"REQ, VTEP, unknown", "unknown-peer", with(request(req), func(p *forgery) { p.from = "192.0.2.99" })},
		{"REQ, VTEP, another peer's", "misplaced-roce", with(request(req), func(p *forgery) { p.from = "192.0.2.11" })},
		{"REQ, VNI", "unknown-vni", with(request(req), func(p *forgery) { p.VNI = 8 })},
		{"REQ, inner MAC", "unwanted-roce", with(request(req), func(p *forgery) { p.Path.SMAC = strange })},
		{"REQ, from another QP", "cm-source-qp", datagram(1, gsiQKey, 5, req.Bytes())},
		{"REQ, GIDs", "cm-gid", datagram(1, gsiQKey, 1, req.Bytes())},
		{"DREQ, QP number", "cm-qp-number", request(cmtest.Message{Kind: cm.DREQ, LocalID: 77, RemoteID: 78, QPN: 5})},
		{"RTU, ID", "cm-message", request(cmtest.Message{Kind: cm.RTU, LocalID: 76, RemoteID: 78})},
	} {
		start := counts()
		f.send(tc.p)
		deadline := time.Now().Add(patience)
		for counts()[tc.reason] == start[tc.reason] {
			if time.Now().After(deadline) {
				t.Fatalf("%s: not counted as %s: %v", tc.name, tc.reason, counts())
			}
			time.Sleep(time.Millisecond)
		}
		if x := conns(); x != before {
			t.Errorf("%s: connections\n%s, before\n%s", tc.name, x, before)
		}
		if x := fmt.Sprint(places(hb.site.net)); x != table {
			t.Errorf("%s: learnt: %s, before %s", tc.name, x, table)
		}
		if bytes.IndexByte(dst.Bytes(), 0xee) >= 0 || bytes.IndexByte(secret.Bytes(), 0xee) >= 0 {
			t.Fatalf("%s: the forged packet reached memory", tc.name)
		}
	}
	// A sender in the peer's place with the right numbers cannot be told from the peer; a wrong key is answered as IBTA
	// 9.7.4.1 requires, and the memory is safe.
	a.write(t, 2, 64, smr, dst, dmr)
	start := maps.Clone(counts())
	f.send(write(xmr.RKey(), secret))
	deadline := time.Now().Add(patience)
	for counts()["r-key"] == start["r-key"] {
		if time.Now().After(deadline) {
			t.Fatalf("R_Key: %v", counts())
		}
		time.Sleep(time.Millisecond)
	}
	if bytes.IndexByte(secret.Bytes(), 0xee) >= 0 {
		t.Error("a wrong R_Key reached memory")
	}
}

// places returns the addresses that a network knows, with their places.
func places(n *vswitch.Network) (out []string) {
	for _, e := range n.Entries() {
		out = append(out, fmt.Sprint(e.MAC, e.Port, e.Remote))
	}
	return out
}
