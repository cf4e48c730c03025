package cm_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

func gid(n byte) [16]byte { return [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: n} }
func mac(n byte) [6]byte  { return [6]byte{2, 5: n} }

// side is a VM with its table.
type side struct {
	n     byte
	table *cm.Table
}

func newSide(n byte) *side { return &side{n, cm.NewTable(0)} }

// datagram is a message from one to another, as the sender's or the receiver's table sees it.
func datagram(out bool, from, to byte, m *cmtest.Message) *cm.Datagram {
	d := &cm.Datagram{Out: out, Local: gid(to), Remote: gid(from), RemoteMAC: mac(from), RemoteQPN: 1, MAD: m.Bytes()}
	if out {
		d.Local, d.Remote, d.RemoteMAC = gid(from), gid(to), mac(to)
	}
	return d
}

// carry passes a message through both tables.
func carry(t *testing.T, now int64, a, b *side, m cmtest.Message) (atA, atB *cm.Conn) {
	t.Helper()
	if m.Kind == cm.REQ {
		m.Local, m.Remote = gid(a.n), gid(b.n)
	}
	atA, why := a.table.Watch(now, datagram(true, a.n, b.n, &m))
	if why != cm.Pass {
		t.Fatalf("%v leaves: %v", m.Kind, why)
	}
	atB, why = b.table.Watch(now, datagram(false, a.n, b.n, &m))
	if why != cm.Pass {
		t.Fatalf("%v arrives: %v", m.Kind, why)
	}
	for _, s := range []*side{a, b} {
		if x := s.table.Invariants(); x != "" {
			t.Fatalf("after %v: %s", m.Kind, x)
		}
	}
	return atA, atB
}

const tcp7174 = 0x01061c06

// The whole life of a connection, at both sides.
func TestLife(t *testing.T) {
	a, b := newSide(1), newSide(2)
	states := func(what string, atA, atB *cm.Conn, sa, sb cm.State) {
		t.Helper()
		if atA == nil || atB == nil || atA.State != sa || atB.State != sb {
			t.Fatalf("%s: %+v and %+v, want %v and %v", what, atA, atB, sa, sb)
		}
	}
	req := cmtest.Message{Kind: cm.REQ, LocalID: 11, Service: tcp7174, QPN: 0x101, PathMTU: 3}
	x, y := carry(t, 0, a, b, req)
	states("REQ", x, y, cm.ReqSent, cm.ReqReceived)
	if x2, y2 := carry(t, 0, a, b, req); x2 != x || y2 != y || a.table.Len() != 1 || b.table.Len() != 1 {
		t.Error("a repeated REQ made another connection")
	}
	carry(t, 0, b, a, cmtest.Message{Kind: cm.MRA, LocalID: 22, RemoteID: 11, ServiceTimeout: 20})
	// The passive side makes its queue pair ready before it replies.
	if c := b.table.Bind(0x202, gid(1), 0x101); c != y {
		t.Fatal("the passive queue pair found no connection")
	}
	y, x = carry(t, 0, b, a, cmtest.Message{Kind: cm.REP, LocalID: 22, RemoteID: 11, QPN: 0x202})
	states("REP", x, y, cm.RepReceived, cm.RepSent)
	if c := a.table.Bind(0x101, gid(2), 0x202); c != x {
		t.Fatal("the active queue pair found no connection")
	}
	x, y = carry(t, 0, a, b, cmtest.Message{Kind: cm.RTU, LocalID: 11, RemoteID: 22})
	states("RTU", x, y, cm.Established, cm.Established)
	want := cm.Conn{State: cm.Established, Active: true, Service: tcp7174, PathMTU: 3, LocalID: 11, RemoteID: 22,
		LocalQPN: 0x101, RemoteQPN: 0x202, Local: gid(1), Remote: gid(2), RemoteMAC: mac(2)}
	if s := show(x); s != show(&want) {
		t.Errorf("active:\n%s\nwant\n%s", s, show(&want))
	}
	want.Active, want.LocalID, want.RemoteID, want.LocalQPN, want.RemoteQPN = false, 22, 11, 0x202, 0x101
	want.Local, want.Remote, want.RemoteMAC = gid(2), gid(1), mac(1)
	if s := show(y); s != show(&want) {
		t.Errorf("passive:\n%s\nwant\n%s", s, show(&want))
	}
	// With a queue pair it stays, however long without messages.
	year := int64(365 * 24 * time.Hour)
	if n := count(a.table, year); n != 1 {
		t.Fatalf("%d connections after a year", n)
	}
	x, y = carry(t, year, a, b, cmtest.Message{Kind: cm.DREQ, LocalID: 11, RemoteID: 22, QPN: 0x202})
	states("DREQ", x, y, cm.DreqSent, cm.DreqReceived)
	y, x = carry(t, year, b, a, cmtest.Message{Kind: cm.DREP, LocalID: 22, RemoteID: 11})
	states("DREP", x, y, cm.Closed, cm.Closed)
	a.table.Release(year, 0x101)
	if count(a.table, year) != 1 || count(a.table, year+int64(cm.Over)) != 0 || a.table.ByQP(0x101) != nil {
		t.Error("a closed connection must be shown for a while, then removed")
	}
	if a.table.Strays+b.table.Strays != 0 {
		t.Error("strays")
	}
}

func waits(c *cm.Conn) bool { return c.PeerPatience() == wire.PatienceForever }

// The peer is taken for one that retries RNR NAKs for ever only if both REQ and REP name 7, in their newest copies
// (HF-1).
func TestPeerPatience(t *testing.T) {
	for _, tc := range []struct {
		req, rep uint8
		want     bool
	}{{7, 7, true}, {7, 6, false}, {0, 7, false}, {0, 0, false}} {
		a, b := newSide(1), newSide(2)
		req := cmtest.Message{Kind: cm.REQ, LocalID: 11, QPN: 0x101, RNRRetry: tc.req}
		x, y := carry(t, 0, a, b, req)
		if waits(x) || waits(y) {
			t.Errorf("%+v: known before the REP", tc)
		}
		b.table.Bind(0x202, gid(1), 0x101)
		rep := cmtest.Message{Kind: cm.REP, LocalID: 22, RemoteID: 11, QPN: 0x202, RNRRetry: tc.rep}
		carry(t, 0, b, a, rep)
		if waits(x) != tc.want || waits(y) != tc.want {
			t.Errorf("%+v: %v and %v", tc, waits(x), waits(y))
		}
		rep.RNRRetry = 1
		if carry(t, 0, b, a, rep); waits(x) || waits(y) {
			t.Errorf("%+v: another REP is ignored", tc)
		}
	}
}

func TestRejectAndSIDR(t *testing.T) {
	a, b := newSide(1), newSide(2)
	carry(t, 0, a, b, cmtest.Message{Kind: cm.REQ, LocalID: 1, QPN: 5})
	y, x := carry(t, 0, b, a, cmtest.Message{Kind: cm.REJ, LocalID: 0, RemoteID: 1, Reason: 8})
	if x.State != cm.Rejected || y.State != cm.Rejected || x.Reject != 8 {
		t.Errorf("%+v, %+v", x, y)
	}
	if b.table.Bind(9, gid(1), 5) != nil {
		t.Error("bound to a rejected connection")
	}
	// The requester gives up: it knows no ID of the other side.
	carry(t, 0, a, b, cmtest.Message{Kind: cm.REQ, LocalID: 2, QPN: 6})
	x, y = carry(t, 0, a, b, cmtest.Message{Kind: cm.REJ, LocalID: 2, Reason: 4})
	if x.State != cm.Rejected || y.State != cm.Rejected {
		t.Errorf("%+v, %+v", x, y)
	}
	// Datagrams: the request ID is not of the communication IDs' space.
	x, y = carry(t, 0, a, b, cmtest.Message{Kind: cm.SIDRReq, LocalID: 2, Service: 7})
	if x.State != cm.SIDRSent || y.State != cm.SIDRReceived {
		t.Errorf("%+v, %+v", x, y)
	}
	y, x = carry(t, 0, b, a, cmtest.Message{Kind: cm.SIDRRep, LocalID: 2, Service: 7, QPN: 77, QKey: 5})
	if x.State != cm.Resolved || y.State != cm.Resolved || x.RemoteQPN != 77 || y.LocalQPN != 77 {
		t.Errorf("%+v, %+v", x, y)
	}
	if a.table.Len() != 3 || count(a.table, int64(cm.Over)) != 1 || count(a.table, int64(cm.HalfOpen)) != 0 {
		t.Error("ageing")
	}
}

// Both ends are in one VM: one table sees every message twice.
func TestLoopback(t *testing.T) {
	a := newSide(1)
	carry(t, 0, a, a, cmtest.Message{Kind: cm.REQ, LocalID: 1, QPN: 5})
	p := a.table.Bind(6, gid(1), 5)
	carry(t, 0, a, a, cmtest.Message{Kind: cm.REP, LocalID: 2, RemoteID: 1, QPN: 6})
	q := a.table.Bind(5, gid(1), 6)
	carry(t, 0, a, a, cmtest.Message{Kind: cm.RTU, LocalID: 1, RemoteID: 2})
	if p == nil || q == nil || p == q || p.State != cm.Established || q.State != cm.Established || p.Active || !q.Active {
		t.Errorf("%+v, %+v", p, q)
	}
}

// Every datagram that contradicts a connection is refused with its reason and changes nothing (MT-4, MT-6).
func TestForged(t *testing.T) {
	a, b := newSide(1), newSide(2)
	carry(t, 0, a, b, cmtest.Message{Kind: cm.REQ, LocalID: 11, Service: 5, QPN: 0x101})
	b.table.Bind(0x202, gid(1), 0x101)
	carry(t, 0, b, a, cmtest.Message{Kind: cm.REP, LocalID: 22, RemoteID: 11, QPN: 0x202})
	before := list(b.table, 0, 1)
	for name, tc := range map[string]struct {
		m    cmtest.Message
		mod  func(*cm.Datagram)
		want cm.Reason
	}{
		"source queue pair": {cmtest.Message{Kind: cm.RTU, LocalID: 11, RemoteID: 22},
			func(d *cm.Datagram) { d.RemoteQPN = 2 }, cm.SourceQP},
		"not a message": {cmtest.Message{Kind: 0x30}, func(d *cm.Datagram) {}, cm.Malformed},
		"cut off":       {cmtest.Message{Kind: cm.RTU}, func(d *cm.Datagram) { d.MAD = d.MAD[:100] }, cm.Malformed},
		"another GID": {cmtest.Message{Kind: cm.RTU, LocalID: 11, RemoteID: 22},
			func(d *cm.Datagram) { d.Remote = gid(3) }, cm.WrongPeer},
		"another MAC": {cmtest.Message{Kind: cm.RTU, LocalID: 11, RemoteID: 22},
			func(d *cm.Datagram) { d.RemoteMAC = mac(3) }, cm.WrongPeer},
		"another VLAN": {cmtest.Message{Kind: cm.RTU, LocalID: 11, RemoteID: 22}, func(d *cm.Datagram) { d.VLAN = 3 },
			cm.WrongPeer},
		"another ID": {cmtest.Message{Kind: cm.RTU, LocalID: 12, RemoteID: 22}, func(*cm.Datagram) {},
			cm.WrongMessage},
		"DREQ for another QP": {cmtest.Message{Kind: cm.DREQ, LocalID: 11, RemoteID: 22, QPN: 0x203}, func(*cm.Datagram) {},
			cm.WrongQP},
		"REP from requester": {cmtest.Message{Kind: cm.REP, LocalID: 11, RemoteID: 22, QPN: 0x101}, func(*cm.Datagram) {},
			cm.WrongMessage},
		"REQ, path elsewhere": {cmtest.Message{Kind: cm.REQ, LocalID: 99, QPN: 1, Local: gid(4), Remote: gid(2)},
			func(*cm.Datagram) {}, cm.WrongGID},
		"REQ, path not to us": {cmtest.Message{Kind: cm.REQ, LocalID: 99, QPN: 1, Local: gid(1), Remote: gid(4)},
			func(*cm.Datagram) {}, cm.WrongGID},
		"REQ again, other MAC": {cmtest.Message{Kind: cm.REQ, LocalID: 11, QPN: 0x101, Service: 5, Local: gid(1),
			Remote: gid(2)}, func(d *cm.Datagram) { d.RemoteMAC = mac(3) }, cm.WrongPeer},
	} {
		d := datagram(false, 1, 2, &tc.m)
		tc.mod(d)
		if c, why := b.table.Watch(0, d); why != tc.want || c != nil {
			t.Errorf("%s: %v, %+v, want %v", name, why, c, tc.want)
		}
		if after := list(b.table, 0, 1); !slices.Equal(before, after) {
			t.Fatalf("%s: the table changed:\n%v\nbefore\n%v", name, after, before)
		}
	}
	carry(t, 0, a, b, cmtest.Message{Kind: cm.RTU, LocalID: 11, RemoteID: 22})
	again := cmtest.Message{Kind: cm.REQ, LocalID: 11, QPN: 0x105, Local: gid(1), Remote: gid(2)}
	if _, why := b.table.Watch(0, datagram(false, 1, 2, &again)); why != cm.WrongPeer {
		t.Errorf("a REQ with the IDs of an open connection: %v", why)
	}
	// Other management classes are not watched.
	d := datagram(false, 1, 2, &again)
	d.MAD[1] = 3
	if _, why := b.table.Watch(0, d); why != cm.Pass {
		t.Errorf("another class: %v", why)
	}
}

// Honest peers and a liar at random: a table that sees both must agree about the honest peers with one that sees only
// them.
func TestLiarModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	honest, both := newSide(2), newSide(2)
	type script struct {
		peer byte
		at   int
		id   uint32
	}
	var scripts []*script
	for i := range 40 {
		scripts = append(scripts, &script{peer: 3 + byte(i%3), id: uint32(100 + i)})
	}
	now := int64(0)
	refused, completed := 0, 0
	for step := range 10000 {
		now += int64(rng.IntN(100)) * int64(time.Millisecond)
		s := scripts[rng.IntN(len(scripts))]
		mine, qpn, peerQPN := s.id+10000, s.id+20000, s.id+30000
		if rng.IntN(2) == 0 { // the liar, with its own or another's address
			from := []byte{9, s.peer}[rng.IntN(2)]
			pick := func(right uint32) uint32 { return []uint32{right, right + 1, rng.Uint32()}[rng.IntN(3)] }
			m := cmtest.Message{Kind: kinds[rng.IntN(len(kinds))], LocalID: pick(s.id), RemoteID: pick(mine), QPN: pick(peerQPN),
				Service: uint64(rng.IntN(2)), Local: gid(from), Remote: gid(2)}
			d := datagram(false, from, 2, &m)
			// It cannot have the peer's MAC and everything else right: then it would be the peer.
			d.RemoteMAC = mac(9)
			if m.Kind == cm.REQ && from == s.peer {
				m.LocalID = s.id // another ID of a peer's would be a new connection, which only the switch can refuse
				d.MAD = m.Bytes()
				if s.at == 0 || s.at == 5 || !slices.Contains(list(honest.table, now, 2), key(s.peer, s.id)) {
					continue
				}
			}
			if m.Kind == cm.SIDRReq && from == s.peer {
				continue
			}
			if _, why := both.table.Watch(now, d); why != cm.Pass {
				refused++
			}
		} else {
			in := func(m cmtest.Message) {
				if m.Kind == cm.REQ {
					m.Local, m.Remote = gid(s.peer), gid(2)
				}
				for _, x := range []*side{honest, both} {
					if _, why := x.table.Watch(now, datagram(false, s.peer, 2, &m)); why != cm.Pass {
						t.Fatalf("step %d: honest %v refused: %v", step, m.Kind, why)
					}
				}
			}
			out := func(m cmtest.Message) {
				for _, x := range []*side{honest, both} {
					x.table.Watch(now, datagram(true, 2, s.peer, &m))
				}
			}
			switch s.at {
			case 0:
				in(cmtest.Message{Kind: cm.REQ, LocalID: s.id, QPN: peerQPN})
			case 1:
				for _, x := range []*side{honest, both} {
					x.table.Bind(qpn, gid(s.peer), peerQPN)
				}
				out(cmtest.Message{Kind: cm.REP, LocalID: mine, RemoteID: s.id, QPN: qpn})
			case 2:
				in(cmtest.Message{Kind: cm.RTU, LocalID: s.id, RemoteID: mine})
				completed++
			case 3:
				out(cmtest.Message{Kind: cm.DREQ, LocalID: mine, RemoteID: s.id, QPN: peerQPN})
			case 4:
				in(cmtest.Message{Kind: cm.DREP, LocalID: s.id, RemoteID: mine})
			case 5:
				for _, x := range []*side{honest, both} {
					x.table.Release(now, qpn)
				}
				s.id += 1000
			}
			s.at = (s.at + 1) % 6
		}
		if x := both.table.Invariants(); x != "" {
			t.Fatalf("step %d: %s", step, x)
		}
		if p := s.peer; step%8 == 0 || s.at == 0 {
			if h, x := list(honest.table, now, p), list(both.table, now, p); !slices.Equal(h, x) {
				t.Fatalf("step %d: peer %d:\n%v\nwith the liar\n%v", step, p, h, x)
			}
		}
	}
	if refused < 1000 || completed < 300 {
		t.Errorf("refused %d, completed %d: the test tries too little", refused, completed)
	}
}

// The table is bounded: bound connections are never dropped for half-open ones.
func TestBound(t *testing.T) {
	b := &side{2, cm.NewTable(10)}
	for i := range uint32(5) {
		m := cmtest.Message{Kind: cm.REQ, LocalID: i, QPN: 100 + i, Local: gid(1), Remote: gid(2)}
		b.table.Watch(0, datagram(false, 1, 2, &m))
		if b.table.Bind(200+i, gid(1), 100+i) == nil {
			t.Fatal("not bound")
		}
	}
	for i := range uint32(1000) {
		m := cmtest.Message{Kind: cm.REQ, LocalID: 1000 + i, QPN: 2000 + i, Local: gid(1), Remote: gid(2)}
		b.table.Watch(0, datagram(false, 1, 2, &m))
	}
	if b.table.Len() != 10 || b.table.ByQP(200) == nil || b.table.ByQP(204) == nil || b.table.Invariants() != "" {
		t.Errorf("%d connections; %s", b.table.Len(), b.table.Invariants())
	}
	for i := range uint32(5) {
		if b.table.Bind(300+i, gid(1), 2000+995+i) == nil {
			t.Error("the newest connection is missing")
		}
	}
	m := cmtest.Message{Kind: cm.REQ, LocalID: 7777, QPN: 7777, Local: gid(1), Remote: gid(2)}
	if c, why := b.table.Watch(0, datagram(false, 1, 2, &m)); c != nil || why != cm.Pass || b.table.Untracked != 1 {
		t.Error("a full table must let connections pass untracked")
	}
	b.table.Clear()
	if b.table.Len() != 0 || b.table.ByQP(200) != nil {
		t.Error("not cleared")
	}

	// The bound on connections without a queue pair does not depend on the VM's number of queue pairs.
	b.table = cm.NewTable(1 << 20)
	for i := range uint32(5 * cm.DefaultMax) {
		m := cmtest.Message{Kind: cm.REQ, LocalID: i, QPN: i, Local: gid(1), Remote: gid(2)}
		b.table.Watch(0, datagram(false, 1, 2, &m))
		if i%2 == 0 && b.table.Bind(1+i, gid(1), i) == nil {
			t.Fatal("not bound")
		}
	}
	if n := b.table.Len(); n != 5*cm.DefaultMax/2+cm.DefaultMax || b.table.Invariants() != "" {
		t.Errorf("%d connections, %d with a queue pair; %s", n, 5*cm.DefaultMax/2, b.table.Invariants())
	}
}

// A peer whose first REP names queue pair 0 and whose second one another has one queue pair, the latter, and none once
// its connection is forgotten.
func TestPeerChangesQP(t *testing.T) {
	b := &side{2, cm.NewTable(10)}
	in := func(out bool, kind cm.Kind, remoteID, qpn uint32) {
		m := cmtest.Message{Kind: kind, LocalID: 1, RemoteID: remoteID, QPN: qpn, Local: gid(2), Remote: gid(3)}
		from, to := byte(3), byte(2)
		if out {
			from, to = 2, 3
		}
		if _, why := b.table.Watch(0, datagram(out, from, to, &m)); why != cm.Pass {
			t.Fatal(why)
		}
		if x := b.table.Invariants(); x != "" {
			t.Error(x)
		}
	}
	in(true, cm.REQ, 0, 100)
	in(false, cm.REP, 1, 0)
	in(false, cm.REP, 1, 7)
	if b.table.Bind(100, gid(3), 0) != nil {
		t.Error("queue pair 0 is still the peer's")
	}
	if b.table.Bind(100, gid(3), 7) == nil {
		t.Error("queue pair 7 is not the peer's")
	}
	b.table.Release(0, 100)
	in(true, cm.REQ, 0, 101) // the ID again: the first connection is forgotten
	if b.table.Len() != 1 {
		t.Errorf("%d connections", b.table.Len())
	}
}

func FuzzTable(f *testing.F) {
	f.Add([]byte("012345678901234567890123456789"))
	f.Fuzz(func(t *testing.T, script []byte) {
		s := &side{2, cm.NewTable(6)}
		now := int64(0)
		for len(script) >= 6 {
			op, a, b, c, d, e := script[0], script[1]&3, script[2]&3, script[3]&3, script[4]&3, script[5]
			script = script[6:]
			now += int64(e&0x1f) * int64(time.Second)
			switch {
			case op < 200:
				m := cmtest.Message{Kind: kinds[int(op)%len(kinds)], LocalID: uint32(a), RemoteID: uint32(b), QPN: uint32(c),
					Local: gid(3), Remote: gid(2), Status: e >> 7}
				out := e&0x40 != 0
				from, to := byte(3), byte(2)
				if out {
					from, to = 2, 3
					m.Local, m.Remote = gid(2), gid(3)
				}
				x := datagram(out, from, to, &m)
				x.RemoteMAC = mac(d & 1)
				s.table.Watch(now, x)
			case op < 230:
				s.table.Bind(uint32(a), gid(3), uint32(c))
			default:
				s.table.Release(now, uint32(a))
			}
			if x := s.table.Invariants(); x != "" {
				t.Fatal(x)
			}
		}
	})
}

func show(c *cm.Conn) string {
	return fmt.Sprint(c.State, c.Active, c.Service, c.LocalID, c.RemoteID, c.LocalQPN, c.RemoteQPN, c.Local, c.Remote,
		c.RemoteMAC, c.VLAN)
}

func key(peer byte, id uint32) string { return fmt.Sprint(peer, "/", id) }

// list returns the connections with a peer; peer 2: only which exist.
func list(t *cm.Table, now int64, peer byte) (out []string) {
	t.Each(now, func(c *cm.Conn) {
		switch {
		case peer == 2:
			out = append(out, key(c.Remote[15], c.RemoteID))
		case c.Remote == gid(peer):
			out = append(out, show(c))
		}
	})
	slices.Sort(out)
	return out
}

func count(t *cm.Table, now int64) int { return len(list(t, now, 2)) }
