package recovery

import (
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// model is RFC 8985 by its definition, for packets of SENDs and WRITEs: everything is computed from the list of all
// arrivals that were reported since the recovery began. Nothing is a ring, a flag or a running count.
type model struct {
	una, nxt, sent uint64
	packets        map[uint64]*packet
	arrivals       []arrival
	newestRTT      int64 // of the newest arrival, also of an earlier recovery
	rtt            RTT
	quarters       int64
	losses         int // cuts since the last spurious retransmission
	cutEnd         uint64
}

type packet struct {
	sentAt           int64
	again, delivered bool
}

type arrival struct{ sentAt, rtt int64 }

// newest returns the last reported of the packets that were sent last.
func (m *model) newest() (n arrival) {
	for _, a := range m.arrivals {
		if a.sentAt >= n.sentAt {
			n = a
		}
	}
	return n
}

func (m *model) window() int64 { return max(10*us, m.rtt.Smoothed*max(m.quarters, 1)/4) }

// arrived records the report of psn.
func (m *model) arrived(psn uint64, now int64) {
	p := m.packets[psn]
	p.delivered = true
	if p.again && now-p.sentAt < m.rtt.Min {
		m.quarters, m.losses = min(m.quarters+1, 8), 0
		return
	}
	if p.sentAt != 0 {
		m.arrivals = append(m.arrivals, arrival{p.sentAt, max(now-p.sentAt, 1)})
		m.newestRTT = m.newest().rtt
	}
}

// lostAt returns when psn is lost; 0: not known.
func (m *model) lostAt(psn uint64) int64 {
	n, p := m.newest(), m.packets[psn]
	if p.sentAt > n.sentAt {
		return 0
	}
	return p.sentAt + m.newestRTT + m.window()
}

// detect returns what DetectLosses should.
func (m *model) detect(now int64) (lost, delivered, oldest uint64, checkAt int64) {
	for psn := m.una; psn < m.sent; psn++ {
		at := m.lostAt(psn)
		switch {
		case m.packets[psn].delivered:
			delivered++
		case at == 0:
		case at <= now:
			if lost++; oldest == 0 {
				oldest = psn
			}
		case checkAt == 0 || at < checkAt:
			checkAt = at
		}
	}
	return lost, delivered, oldest, checkAt
}

func (m *model) cut(oldest uint64) bool {
	if oldest < m.cutEnd {
		return false
	}
	m.cutEnd = m.sent
	if m.losses++; m.losses >= reorderHoldLosses || m.quarters == 0 {
		m.quarters = 1
	}
	return true
}

// sender drives a scoreboard as the requester does, beside its model.
type sender struct {
	t    *testing.T
	b    Scoreboard
	m    model
	now  int64
	ring uint64
	step int
}

// send sends up to n packets: first retransmissions, then new ones.
func (s *sender) send(n int) (psns []uint64) {
	b, m := &s.b, &s.m
	for ; n > 0; n-- {
		for b.Active && m.nxt < m.sent && !b.NeedsRetransmit(m.nxt, s.now) {
			at := m.lostAt(m.nxt)
			if p := m.packets[m.nxt]; !p.delivered && (!b.Retransmitting || at != 0 && at <= s.now) {
				s.t.Fatalf("step %d: PSN %d is skipped", s.step, m.nxt)
			}
			if m.nxt++; m.nxt == m.sent {
				b.EndRetransmit()
			}
		}
		if m.nxt == m.sent && m.sent-m.una >= s.ring {
			break
		}
		f := Flags(0)
		if m.nxt < m.sent {
			if m.packets[m.nxt].delivered {
				s.t.Fatalf("step %d: PSN %d is sent again", s.step, m.nxt)
			}
			f = b.NoteRetransmit(f, 1)
		}
		b.NoteSent(m.nxt, m.nxt+1, s.now, f)
		m.packets[m.nxt] = &packet{sentAt: s.now, again: m.nxt < m.sent}
		psns = append(psns, m.nxt)
		if m.nxt++; m.nxt >= m.sent {
			m.sent = m.nxt
			b.EndRetransmit()
		}
	}
	return psns
}

// report handles a selective acknowledgement.
func (s *sender) report(psn uint64, a *wire.Arrivals) {
	b, m := &s.b, &s.m
	if psn < m.una || psn > m.sent {
		return // the requester drops it
	}
	if b.Active {
		b.Acknowledged(m.una, psn, m.sent, s.now)
		for p := m.una; p < psn; p++ {
			if !m.packets[p].delivered {
				m.arrived(p, s.now)
			}
		}
	}
	for ; m.una < psn; m.una++ {
		delete(m.packets, m.una)
	}
	m.nxt = max(m.nxt, m.una)
	if !b.Active {
		m.arrivals = nil
	}
	b.Start(m.una)
	news := b.SelectiveAck(psn, m.una, m.sent, a, s.now)
	want := false
	for i := range uint64(wire.ArrivalsSpan) {
		if p := m.packets[psn+i]; p != nil && a.Has(i) && !p.delivered {
			m.arrived(psn+i, s.now)
			want = m.newestRTT != 0
		}
	}
	if news != want {
		s.t.Fatalf("step %d: news %t, want %t", s.step, news, want)
	}
	if want {
		m.rtt.Sample(s.now, m.newestRTT)
		b.Extend(m.sent)
	}
	s.check()
}

// check detects losses in both and compares.
func (s *sender) check() {
	b, m := &s.b, &s.m
	b.ClearCounts()
	b.Retransmitting = b.Retransmitting && m.nxt < m.sent
	if b.Done(m.una) {
		s.clear()
		return
	}
	if m.nxt < m.sent && !b.Retransmitting {
		return // everything is sent again
	}
	lost, delivered, oldest, checkAt := m.detect(s.now)
	gotLost, gotOldest := b.DetectLosses(m.una, m.sent, s.now)
	if gotLost != lost || gotOldest != oldest || b.CheckAt != checkAt || b.RTT != m.rtt ||
		b.ReorderWindow() != m.window() {
		s.t.Fatalf("step %d: lost %d from %d on, check at %d, %+v, window %d, want %d from %d on, %d, %+v, %d", s.step,
			gotLost, gotOldest, b.CheckAt, b.RTT, b.ReorderWindow(), lost, oldest, checkAt, m.rtt, m.window())
	}
	for psn := m.una; psn < m.sent; psn++ {
		if b.Delivered(psn) != m.packets[psn].delivered {
			s.t.Fatalf("step %d: PSN %d delivered %t", s.step, psn, b.Delivered(psn))
		}
	}
	if lost > 0 {
		if b.CutWindow(oldest, m.sent) != m.cut(oldest) {
			s.t.Fatalf("step %d: cut of the congestion window", s.step)
		}
		b.Retransmitting = true
		m.nxt = m.una
	}
	if b.Retransmitting || m.nxt == m.sent {
		if got, want := b.InFlight(m.una, m.nxt, m.sent), m.sent-m.una-delivered-lost; got != want {
			s.t.Fatalf("step %d: %d in flight, want %d", s.step, got, want)
		}
	}
}

// clear discards the reports of both.
func (s *sender) clear() {
	s.b.Clear(s.m.una, s.m.sent)
	for _, p := range s.m.packets {
		p.delivered = false
	}
}

// goBack makes the sender send everything again.
func (s *sender) goBack() {
	s.clear()
	s.m.nxt = s.m.una
}

func newSender(t *testing.T, ring int) *sender {
	s := &sender{t: t, b: NewScoreboard(ring), now: 1e6, ring: uint64(ring)}
	s.m = model{una: base, nxt: base, sent: base, packets: map[uint64]*packet{}}
	s.b.RTT.Sample(s.now, 40*us)
	s.m.rtt.Sample(s.now, 40*us)
	return s
}

// TestModelHostile compares the scoreboard with the model under reports that no honest peer would send, at random
// times, with sending and going back in between.
func TestModelHostile(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(7, seed))
		s := newSender(t, 16<<rng.IntN(6))
		for s.step = range 1500 {
			s.now += rng.Int64N(20 * us)
			switch rng.IntN(12) {
			case 0, 1, 2, 3, 4, 5:
				s.send(rng.IntN(12))
			case 6:
				if rng.IntN(20) == 0 {
					s.goBack()
				}
			case 7:
				if s.b.Active {
					s.check()
				}
			default:
				var a wire.Arrivals
				for range rng.IntN(4) {
					a.Set(1+rng.Uint64N(min(300, 2*(s.m.sent-s.m.una)+1)), rng.Uint64N(20))
				}
				psn := s.m.una
				if rng.IntN(3) == 0 {
					psn += rng.Uint64N(s.m.sent - s.m.una + 4) // may be beyond what was sent
				}
				s.report(psn, &a)
			}
		}
	}
}

// TestModelPath compares the scoreboard with the model over a path that loses, delays and reorders packets and reports.
// All packets arrive in the end, and without loss none is sent again for long.
func TestModelPath(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(8, seed))
		lossy := seed%4 != 0
		s := newSender(t, 64)
		type event struct {
			at      int64
			psn     uint64 // a packet, or the expected PSN of a report
			arrived *wire.Arrivals
		}
		var events []event
		has, expected := map[uint64]bool{}, base
		delay := func() int64 { return 20*us + rng.Int64N(15*us) }
		resent := 0
		const count = 3000
		for s.step = 0; expected < base+count || s.m.una < base+count; s.step++ {
			if s.step > 400_000 {
				t.Fatalf("seed %d: %d of %d packets have arrived", seed, expected-base, count)
			}
			s.now += us
			if s.step%4 == 0 {
				before := s.m.sent
				for _, psn := range s.send(1) {
					if psn < before {
						resent++
					}
					if !lossy || rng.IntN(10) != 0 {
						events = append(events, event{at: s.now + delay(), psn: psn})
					}
				}
			}
			if s.b.Active && s.b.CheckAt != 0 && s.b.CheckAt <= s.now {
				s.check()
			}
			if s.step%1000 == 999 && s.m.sent > s.m.una { // the tail-loss probe
				s.goBack()
			}
			rest := events[:0]
			var due []event
			for _, e := range events {
				if e.at <= s.now {
					due = append(due, e)
				} else {
					rest = append(rest, e)
				}
			}
			events = rest
			for _, e := range due {
				if e.arrived != nil {
					s.report(e.psn, e.arrived)
					continue
				}
				for has[e.psn] = true; has[expected]; expected++ {
				}
				r := event{at: s.now + delay(), psn: expected, arrived: new(wire.Arrivals)}
				for i := range uint64(wire.ArrivalsSpan) {
					if has[expected+i] {
						r.arrived.Set(i, 1)
					}
				}
				if !lossy || rng.IntN(10) != 0 {
					events = append(events, r)
				}
			}
		}
		if !lossy && resent > 200 { // until the reorder window has grown, and when it has shrunk for a while
			t.Errorf("seed %d: %d of %d packets were sent again without a loss", seed, resent, count)
		}
	}
}
