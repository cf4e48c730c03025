package rdmacm

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
)

// question asks host n for testPort, as Resolve does.
func (h *host) question(tb testing.TB, now time.Time, n byte) *session {
	tb.Helper()
	x := ipHeader{src: netip.AddrPortFrom(addr(h.n), 50000), dst: addr(n), rest: []byte("who")}
	s, err := h.resolve(now, gidOf(n), datagramID(testPort), x.encode(), nil)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func serveDatagrams(h *host) {
	h.services[testPort] = &service{cm.Fields{Kind: cm.SIDRRep, Service: datagramID(testPort), QPN: 0x22, QKey: UDPQKey,
		Private: []byte("me")}}
}

// A service is found, also if messages are lost, and is repeated without end; what nobody serves is no service.
func TestResolve(t *testing.T) {
	n, a, b := pair(t)
	s := a.question(t, n.now, 2)
	n.deliver(t)
	check(t, s, gone, nil)
	if s.reply.Status != cm.SIDRUnsupported {
		t.Errorf("without a service: status %d", s.reply.Status)
	}
	serveDatagrams(b)
	for lost := range 3 {
		s = a.question(t, n.now, 2)
		for range lost {
			n.drop() // the question
			n.now = n.now.Add(s.wait)
			a.tick(n.now)
		}
		n.deliver(t)
		check(t, s, gone, nil)
		if f := &s.reply; f.Status != cm.SIDRValid || f.QPN != 0x22 || f.QKey != UDPQKey ||
			string(f.Private[:3]) != "me\x00" {
			t.Errorf("%d lost: %+v", lost, f)
		}
	}
	if a.counters.Repeated != 1+2 {
		t.Errorf("repeated %d times", a.counters.Repeated)
	}
	s = a.question(t, n.now, 3) // does not exist
	n.pass(t, time.Minute)
	check(t, s, gone, ErrTimeout)
	s = a.question(t, n.now, 2)
	a.abandon(n.now, s)
	n.deliver(t)
	check(t, s, gone, ErrClosed)
	if a.counters.Unknown != 1 {
		t.Errorf("%d late answers", a.counters.Unknown)
	}
	a.empty(t)
	b.empty(t)
}

// Questions and answers that contradict themselves have no effect.
func TestForgedResolution(t *testing.T) {
	now := time.Unix(0, 0)
	a, b := newHost(1, settings{}), newHost(2, settings{})
	serveDatagrams(b)
	s := a.question(t, now, 2)
	good := cm.Fields{Kind: cm.SIDRRep, Transaction: s.transaction, LocalID: s.localID, Service: datagramID(testPort),
		QPN: 0x22, QKey: 1}
	for name, change := range map[string]func(f *cm.Fields) (from byte){
		"another peer":        func(*cm.Fields) byte { return 3 },
		"another transaction": func(f *cm.Fields) byte { f.Transaction++; return 2 },
		"another service":     func(f *cm.Fields) byte { f.Service++; return 2 },
		"queue pair 1":        func(f *cm.Fields) byte { f.QPN = 1; return 2 },
		"an answer to a REQ": func(f *cm.Fields) byte {
			*f = cm.Fields{Kind: cm.REJ, LocalID: 9, RemoteID: s.localID}
			return 2
		},
	} {
		f := good
		from := change(&f)
		mad, err := f.Encode()
		if err != nil {
			t.Fatal(err)
		}
		before := a.counters.Refused
		a.receive(now, gidOf(from), mad)
		if a.counters.Refused != before+1 || s.state != sidrSent {
			t.Errorf("%s: refused %d, state %v", name, a.counters.Refused-before, s.state)
		}
	}
	mad, err := good.Encode()
	if err != nil {
		t.Fatal(err)
	}
	a.receive(now, gidOf(2), mad)
	check(t, s, gone, nil)

	// The IP header must be between the addresses of the packet.
	for _, from := range []byte{1, 3} {
		b.out = nil
		b.receive(now, gidOf(from), s.requestBytes(t))
		m, err := cm.Parse(b.out[0].mad)
		if err != nil {
			t.Fatal(err)
		}
		f, _ := m.Decode()
		want := map[byte]cm.SIDRStatus{1: cm.SIDRValid, 3: cm.SIDRRejected}[from]
		if f.Status != want || (f.QPN != 0) != (want == cm.SIDRValid) || f.LocalID != s.localID ||
			f.Transaction != s.transaction {
			t.Errorf("asked by %d: %+v", from, f)
		}
	}

	// The table is bounded, and questions leave it.
	a = newHost(1, settings{most: 2})
	a.question(t, now, 2)
	a.question(t, now, 2)
	if _, err := a.resolve(now, gidOf(2), datagramID(1), nil, nil); !errors.Is(err, ErrTooMany) {
		t.Errorf("a third question: %v", err)
	}
	for range 16 {
		now = now.Add(time.Minute)
		a.tick(now)
	}
	a.empty(t)
}

func (s *session) requestBytes(tb testing.TB) []byte {
	tb.Helper()
	b, err := s.request.Encode()
	if err != nil {
		tb.Fatal(err)
	}
	return b
}
