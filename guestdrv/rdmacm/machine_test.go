package rdmacm

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// pair returns two hosts of which the second listens.
func pair(tb testing.TB) (*network, *host, *host) {
	a, b := newHost(1, settings{}), newHost(2, settings{})
	b.serve(tb, 10)
	return newNetwork(a, b), a, b
}

// open connects a to b.
func open(tb testing.TB, n *network, a, b *host) (x, y *session) {
	tb.Helper()
	x = a.dial(tb, n.now, b.n)
	n.deliver(tb)
	if y = b.take(b.port); y == nil {
		tb.Fatal("no request")
	}
	if err := b.accept(n.now, y, cm.Fields{QPN: b.qpn()}); err != nil {
		tb.Fatal(err)
	}
	n.deliver(tb)
	if err := a.ready(x); err != nil {
		tb.Fatal(err)
	}
	n.deliver(tb)
	check(tb, x, established, nil)
	check(tb, y, established, nil)
	return x, y
}

// check compares the state of a session and its error.
func check(tb testing.TB, s *session, want state, err error) {
	tb.Helper()
	if s.state != want || !errors.Is(s.err, err) {
		tb.Fatalf("%v, %v; want %v, %v", s.state, s.err, want, err)
	}
}

// The usual course of a connection, with what both ends learn (IBTA 12.9.8).
func TestCourse(t *testing.T) {
	n, a, b := pair(t)
	x, y := open(t, n, a, b)
	if y.peerQPN != x.qpn || x.peerQPN != y.qpn || x.localID != y.remoteID || x.remoteID != y.localID {
		t.Errorf("%+v\n%+v", x, y)
	}
	if y.header.src != netip.MustParseAddrPort("10.0.0.1:50000") || !bytes.HasPrefix(y.header.rest, []byte("hello\x00")) ||
		len(y.header.rest) != MaxPrivateREQ {
		t.Errorf("header %+v", y.header)
	}
	b.disconnect(n.now, y, ErrClosed)
	check(t, y, dreqSent, ErrClosed)
	n.deliver(t)
	check(t, x, timeWait, ErrPeerDisconnected)
	check(t, y, timeWait, ErrClosed)
	n.pass(t, 2*time.Second)
	check(t, x, gone, ErrPeerDisconnected)
	a.empty(t)
	b.empty(t)
	for k, want := range map[cm.Kind]int{cm.REQ: 1, cm.REP: 1, cm.RTU: 1, cm.DREQ: 1, cm.DREP: 1, cm.REJ: 0, cm.MRA: 0} {
		if n.sent[k] != want {
			t.Errorf("%d %v, want %d", n.sent[k], k, want)
		}
	}
}

// Each message that is lost is repeated, and the repetition is answered as the first was.
func TestRepeated(t *testing.T) {
	n, a, b := pair(t)
	x := a.dial(t, n.now, 2)
	n.drop() // the REQ
	n.pass(t, 1200*time.Millisecond)
	y := b.take(b.port)
	n.pass(t, 1200*time.Millisecond) // the program is slow: the next REQ is answered by an MRA
	if n.sent[cm.MRA] != 1 || n.sent[cm.REQ] != 3 {
		t.Fatalf("sent %v", n.sent)
	}
	n.pass(t, 10*time.Second) // the MRA has been obeyed
	if n.sent[cm.REQ] != 3 {
		t.Fatalf("sent %v", n.sent)
	}
	if err := b.accept(n.now, y, cm.Fields{QPN: 77}); err != nil {
		t.Fatal(err)
	}
	n.drop() // the REP
	again := bytes.Clone(x.message)
	b.receive(n.now, a.gid, again) // a REQ that was delayed
	n.deliver(t)
	check(t, x, repReceived, nil)
	b.send(a.gid, y.message)
	n.deliver(t) // a repeated REP while the queue pair is made ready: an MRA, which delays the next
	if n.sent[cm.MRA] != 2 {
		t.Fatalf("sent %v", n.sent)
	}
	if err := a.ready(x); err != nil {
		t.Fatal(err)
	}
	n.drop() // the RTU
	check(t, y, repSent, nil)
	n.pass(t, 30*time.Second)
	check(t, y, established, nil)
	a.disconnect(n.now, x, ErrClosed)
	n.collect()
	dreq := n.way[0].mad
	n.drop()
	n.pass(t, 1200*time.Millisecond)
	check(t, y, timeWait, ErrPeerDisconnected)
	before := n.sent[cm.DREP]
	for range 2 { // in time wait, and when nothing is known any more
		b.receive(n.now, a.gid, dreq)
		n.deliver(t)
		if before++; n.sent[cm.DREP] != before {
			t.Fatalf("sent %v, want %d DREPs", n.sent, before)
		}
		n.pass(t, 5*time.Second)
	}
	a.empty(t)
	b.empty(t)
}

// A peer that dies in any state: bounded repetitions, then nothing is left.
func TestPeerDies(t *testing.T) {
	for name, tc := range map[string]struct {
		at   func(t *testing.T, n *network, a, b *host) *session // returns the session of the end that stays, a's
		want error
		last cm.Kind // that is sent
	}{
		"after the REQ was lost": {func(t *testing.T, n *network, a, b *host) *session { return a.dial(t, n.now, 2) },
			ErrTimeout, cm.REJ},
		"after its REQ": {func(t *testing.T, n *network, a, b *host) *session {
			a.serve(t, 1)
			b.dial(t, n.now, 1)
			n.deliver(t)
			return a.port.backlog[0]
		}, ErrTimeout, 0},
		"before its RTU": {func(t *testing.T, n *network, a, b *host) *session {
			a.serve(t, 1)
			b.dial(t, n.now, 1)
			n.deliver(t)
			s := a.take(a.port)
			if err := a.accept(n.now, s, cm.Fields{QPN: 9}); err != nil {
				t.Fatal(err)
			}
			return s
		}, ErrTimeout, cm.REJ},
		"before its DREP": {func(t *testing.T, n *network, a, b *host) *session {
			s, _ := open(t, n, a, b)
			a.disconnect(n.now, s, ErrClosed)
			return s
		}, ErrClosed, cm.DREQ},
	} {
		t.Run(name, func(t *testing.T) {
			n, a, b := pair(t)
			s := tc.at(t, n, a, b)
			n.collect()
			n.way = nil
			n.hosts, n.last = []*host{a}, 0 // b is dead
			before := a.counters.Repeated
			n.pass(t, 5*time.Minute)
			check(t, s, gone, tc.want)
			if a.counters.Repeated-before > 15 || tc.last != 0 && a.counters.Repeated-before != 15 {
				t.Errorf("%d repetitions, want 15", a.counters.Repeated-before)
			}
			if tc.last != 0 && n.last != tc.last {
				t.Errorf("the last message is a %v, want %v", n.last, tc.last)
			}
			a.empty(t)
			if a.port != nil && len(a.port.backlog) != 0 {
				t.Error("the request is still in the backlog")
			}
		})
	}
}

// Rejections with their reasons and private data, in each state where one may come.
func TestReject(t *testing.T) {
	n, a, b := pair(t)
	reason := func(s *session, want Reason) {
		t.Helper()
		n.deliver(t)
		var e *RejectError
		if s.state != gone || !errors.As(s.err, &e) || e.Reason != want || !errors.Is(s.err, want) {
			t.Fatalf("%v: %v, want %v", s.state, s.err, want)
		}
	}
	refused := func(want Reason, change func(*cm.Fields)) {
		t.Helper()
		f := a.requestTo(2, nil)
		change(&f)
		s, err := a.connect(n.now, b.gid, f, nil)
		if err != nil {
			t.Fatal(err)
		}
		reason(s, want)
	}
	refused(RejectServiceID, func(f *cm.Fields) { f.Service++ })
	refused(RejectServiceID, func(f *cm.Fields) { f.Service |= 1 << 63 })
	refused(RejectTransport, func(f *cm.Fields) { f.Transport = 1 })
	refused(RejectNoQP, func(f *cm.Fields) { f.QPN = 1 })
	refused(RejectMTU, func(f *cm.Fields) { f.PathMTU = uint8(guestdrv.MTU2048) })
	refused(RejectMTU, func(f *cm.Fields) { f.PathMTU = 0 })
	refused(RejectConsumer, func(f *cm.Fields) { f.Private = f.Private[:3] })
	refused(RejectConsumer, func(f *cm.Fields) { f.Private[0] = 0x10 })
	refused(RejectConsumer, func(f *cm.Fields) { f.Private[19]++ }) // another source address than the packet's

	for range 10 {
		a.dial(t, n.now, 2)
	}
	n.deliver(t)
	full := a.dial(t, n.now, 2)
	reason(full, RejectNoResources)

	s := b.take(b.port)
	x := a.byLocal[s.remoteID]
	if err := b.reject(n.now, s, RejectConsumer, []byte("not today")); err != nil {
		t.Fatal(err)
	}
	reason(x, RejectConsumer)
	var e *RejectError
	if !errors.As(x.err, &e) || !bytes.HasPrefix(e.PrivateData, []byte("not today\x00")) ||
		len(e.PrivateData) != MaxPrivateREJ {
		t.Errorf("private data %q", e.PrivateData)
	}
	if err := b.reject(n.now, s, RejectConsumer, nil); !errors.Is(err, RejectConsumer) {
		t.Errorf("rejected again: %v", err)
	}

	// The active end has second thoughts, before and after the REP.
	s = b.take(b.port)
	a.abandon(n.now, a.byLocal[s.remoteID])
	n.deliver(t)
	check(t, s, gone, RejectTimeout)
	s = b.take(b.port)
	if err := b.accept(n.now, s, cm.Fields{QPN: 5}); err != nil {
		t.Fatal(err)
	}
	n.deliver(t)
	if err := a.reject(n.now, a.byLocal[s.remoteID], RejectConsumer, nil); err != nil {
		t.Fatal(err)
	}
	n.deliver(t)
	check(t, s, gone, RejectConsumer)

	// A closed listener rejects its backlog.
	waits := b.port.backlog[0].remoteID
	b.unlisten(n.now, b.port)
	reason(a.byLocal[waits], RejectServiceID)
	n.pass(t, time.Minute)
	b.empty(t)
}

// A peer that was restarted uses IDs and queue pairs again: the old connection ends, the new one is refused once.
func TestStale(t *testing.T) {
	for name, change := range map[string]func(h *host, old *session, f *cm.Fields){
		"queue pair":       func(h *host, old *session, f *cm.Fields) { f.QPN = old.qpn },
		"communication ID": func(h *host, old *session, f *cm.Fields) { h.random = counting(old.localID - 3) },
	} {
		n, a, b := pair(t)
		_, y := open(t, n, a, b)
		old := a.byLocal[y.remoteID]
		reborn := newHost(1, settings{random: counting(0x50000000)})
		n.hosts = []*host{reborn, b}
		f := reborn.requestTo(2, nil)
		f.QPN += 1000
		change(reborn, old, &f)
		x, err := reborn.connect(n.now, b.gid, f, nil)
		if err != nil {
			t.Fatal(err)
		}
		n.deliver(t)
		if !errors.Is(x.err, RejectStale) || !y.state.over() || !errors.Is(y.err, RejectStale) {
			t.Errorf("%s: %v, %v: %v", name, x.err, y.state, y.err)
		}
		n.pass(t, time.Minute)
		open(t, n, reborn, b)
	}
}

// Messages that contradict a connection change nothing and are not answered.
func TestContradictions(t *testing.T) {
	n, a, b := pair(t)
	x, y := open(t, n, a, b)
	half := a.dial(t, n.now, 2)
	n.deliver(t)
	good := func(k cm.Kind) cm.Fields {
		return cm.Fields{Kind: k, LocalID: x.localID, RemoteID: y.localID, QPN: y.qpn}
	}
	for name, tc := range map[string]struct {
		from   byte
		f      cm.Fields
		change func(*cm.Fields)
	}{
		"DREQ, another host":  {3, good(cm.DREQ), func(*cm.Fields) {}},
		"DREQ, another ID":    {1, good(cm.DREQ), func(f *cm.Fields) { f.LocalID++ }},
		"DREQ, another QP":    {1, good(cm.DREQ), func(f *cm.Fields) { f.QPN++ }},
		"REJ, another host":   {3, good(cm.REJ), func(*cm.Fields) {}},
		"REJ, another ID":     {1, good(cm.REJ), func(f *cm.Fields) { f.LocalID = 0 }},
		"REJ, wrong receiver": {1, good(cm.REJ), func(f *cm.Fields) { f.RemoteID += 100 }},
		"RTU, another host":   {3, good(cm.RTU), func(*cm.Fields) {}},
		"REP to the passive":  {1, good(cm.REP), func(f *cm.Fields) {}},
		"MRA when open":       {1, good(cm.MRA), func(f *cm.Fields) {}},
		"DREP when open":      {1, good(cm.DREP), func(f *cm.Fields) {}},
		"DREQ when half open": {1, good(cm.DREQ), func(f *cm.Fields) {
			f.LocalID, f.RemoteID = half.localID, b.port.backlog[0].localID
		}},
	} {
		tc.change(&tc.f)
		mad, err := tc.f.Encode()
		if err != nil {
			t.Fatal(err)
		}
		b.receive(n.now, gidOf(tc.from), mad)
		if len(b.out) != 0 || y.state != established || y.err != nil || b.port.backlog[0].state != reqReceived {
			t.Fatalf("%s: %v, %v, %d answers", name, y.state, y.err, len(b.out))
		}
	}
	// Unknown connections: Linux answers DREQs, IBTA also REPs; nothing else is answered.
	for k, want := range map[cm.Kind]cm.Kind{cm.DREQ: cm.DREP, cm.REP: cm.REJ, cm.RTU: 0, cm.MRA: 0, cm.REJ: 0,
		cm.DREP: 0} {
		mad, err := (&cm.Fields{Kind: k, Transaction: 42, LocalID: 7, RemoteID: 8, QPN: 9}).Encode()
		if err != nil {
			t.Fatal(err)
		}
		b.out = nil
		b.receive(n.now, gidOf(9), mad)
		switch {
		case want == 0 && len(b.out) == 0:
		case want == 0 || len(b.out) != 1:
			t.Errorf("%v: %d answers", k, len(b.out))
		default:
			m, err := cm.Parse(b.out[0].mad)
			if err != nil || m.Kind() != want || m.LocalID() != 8 || m.RemoteID() != 7 || m.Transaction() != 42 ||
				want == cm.REJ && Reason(m.Reason()) != RejectCommID {
				t.Errorf("%v: answer %v %v", k, m.Kind(), err)
			}
		}
	}
}

// The table is bounded. Sessions in time wait make room, others do not.
func TestBounds(t *testing.T) {
	a, b := newHost(1, settings{most: 4}), newHost(2, settings{most: 3})
	b.serve(t, 10)
	n := newNetwork(a, b)
	for range 4 {
		a.dial(t, n.now, 2)
	}
	if _, err := a.connect(n.now, b.gid, a.requestTo(2, nil), nil); !errors.Is(err, ErrTooMany) {
		t.Errorf("a fifth session: %v", err)
	}
	n.deliver(t)
	if len(b.byLocal) != 3 || n.sent[cm.REJ] != 1 {
		t.Errorf("%d sessions, %d rejections", len(b.byLocal), n.sent[cm.REJ])
	}
	for _, s := range a.byLocal {
		a.abandon(n.now, s)
	}
	n.deliver(t)
	for range 10 {
		x, _ := open(t, n, a, b)
		a.disconnect(n.now, x, ErrClosed)
		n.deliver(t)
		check(t, x, timeWait, ErrClosed)
	}
	n.pass(t, time.Minute)
	a.empty(t)
	b.empty(t)
}

// A peer that fills a backlog shuts nobody out: each peer gets a fair part of it.
func TestBacklogIsShared(t *testing.T) {
	a, b, c := newHost(1, settings{}), newHost(2, settings{}), newHost(3, settings{})
	const room = 4
	b.serve(t, room)
	n := newNetwork(a, b, c)
	waiting := func(from ...*host) {
		t.Helper()
		n.deliver(t)
		var got, want []guestdrv.GID
		for _, s := range b.port.backlog {
			got = append(got, s.peer)
		}
		for _, h := range from {
			want = append(want, h.gid)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("in the backlog: %v, want %v", got, want)
		}
	}
	for range room + 2 {
		a.dial(t, n.now, 2)
	}
	waiting(a, a, a, a)
	c.dial(t, n.now, 2)
	waiting(a, a, a, c)
	c.dial(t, n.now, 2)
	waiting(a, a, c, c)
	for _, h := range []*host{a, c} {
		x := h.dial(t, n.now, 2)
		waiting(a, a, c, c)
		check(t, x, gone, RejectNoResources)
	}
	if n.sent[cm.REJ] != 2+2+2 {
		t.Errorf("%d rejections", n.sent[cm.REJ])
	}
}

// A session that is remembered for long does not keep those that have ended since.
func TestForgotten(t *testing.T) {
	n, a, b := pair(t)
	x := a.dial(t, n.now, b.n)
	n.deliver(t)
	y := b.take(b.port)
	y.delayed = true
	if err := b.reject(n.now, y, RejectConsumer, nil); err != nil {
		t.Fatal(err)
	}
	n.deliver(t)
	check(t, x, gone, RejectConsumer)
	for range 10 {
		var some []*session
		for range 40 {
			x, _ := open(t, n, a, b)
			some = append(some, x)
		}
		for _, x := range some {
			a.disconnect(n.now, x, ErrClosed)
		}
		n.pass(t, a.timeWait+time.Millisecond)
	}
	check(t, y, timeWait, RejectConsumer)
	n.pass(t, time.Minute)
	a.empty(t)
	b.empty(t)
}

// Two hosts that dial each other over a network that loses, repeats and reorders: every connection is made, both ends
// agree about it, and nothing is left.
func TestLossy(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { lossy(t, seed) })
	}
}

func lossy(t *testing.T, seed uint64) {
	a, b := newHost(1, settings{}), newHost(2, settings{})
	a.serve(t, 100)
	b.serve(t, 100)
	n := newNetwork(a, b)
	n.rng, n.loss = rand.New(rand.NewPCG(seed, 1)), 0.25
	type link struct{ active, passive *session }
	var links []*link
	by := func(s *session) *link { // that of a passive session
		for _, l := range links {
			if l.active.localID == s.remoteID && l.active.peer != s.peer {
				return l
			}
		}
		t.Fatalf("a request that nobody made: %v", s)
		return nil
	}
	rejected, closed := 0, 0
	for step := range 400 {
		h, peer := n.hosts[step%2], n.hosts[1-step%2]
		if step < 200 && n.rng.IntN(2) == 0 {
			links = append(links, &link{active: h.dial(t, n.now, peer.n)})
		}
		for len(h.port.backlog) > 0 && n.rng.IntN(4) > 0 {
			s := h.take(h.port)
			l := by(s)
			// All REJs may be lost until the request is forgotten: then it is a new one.
			if l.passive != nil && !errors.Is(l.passive.err, RejectConsumer) {
				t.Fatalf("a second request for %v", l.active)
			}
			l.passive = s
			if n.rng.IntN(8) == 0 {
				rejected++
				if err := h.reject(n.now, s, RejectConsumer, nil); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if err := h.accept(n.now, s, cm.Fields{QPN: h.qpn()}); err != nil {
				t.Fatal(err)
			}
		}
		for _, l := range links {
			if l.active.state == repReceived && n.rng.IntN(3) > 0 {
				if err := hostOf(n, l.active).ready(l.active); err != nil {
					t.Fatal(err)
				}
			}
			for _, s := range []*session{l.active, l.passive} {
				if s != nil && s.state == established && n.rng.IntN(20) == 0 {
					closed++
					hostOf(n, s).disconnect(n.now, s, ErrClosed)
				}
			}
		}
		n.pass(t, time.Duration(n.rng.IntN(400))*time.Millisecond)
	}
	n.pass(t, 5*time.Minute)
	made := 0
	for _, l := range links {
		switch {
		case l.passive == nil:
			t.Errorf("%v was not received", l.active)
		case l.active.up && (!l.passive.up || l.active.peerQPN != l.passive.qpn || l.passive.peerQPN != l.active.qpn):
			t.Errorf("they disagree:\n%+v\n%v", l.active, l.passive)
		case l.active.up:
			made++
		case !errors.Is(l.active.err, RejectConsumer):
			t.Errorf("not connected: %v", l.active.err)
		}
	}
	if made < 50 || rejected == 0 || closed < 20 || a.counters.Duplicate == 0 || a.counters.Repeated == 0 {
		t.Errorf("%d made, %d rejected, %d closed, %+v: the test tries too little", made, rejected, closed, a.counters)
	}
	for _, h := range n.hosts {
		for _, s := range h.byLocal {
			if s.state != established {
				t.Errorf("left: %v", s)
			}
			h.disconnect(n.now, s, ErrClosed)
		}
	}
	n.pass(t, 5*time.Minute)
	a.empty(t)
	b.empty(t)
}

// hostOf returns the host of a session: the one that is not its peer.
func hostOf(n *network, s *session) *host {
	if n.hosts[0].gid == s.peer {
		return n.hosts[1]
	}
	return n.hosts[0]
}
