package hca

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// moderated is a CQ with its event queue.
type moderated struct {
	*tcq
	q *cq
	d *drvq
}

func (g *guest) moderated(count, period uint16) *moderated {
	g.tb.Helper()
	m := &moderated{tcq: g.cq(64), d: g.eventQueue(abi.CEQQueue(0), 8, abi.SizeCEQE)}
	m.q = g.tables.cqs[m.n].q
	m.d.add(8)
	m.modify(count, period)
	return m
}

func (m *moderated) modify(count, period uint16) {
	m.g.tb.Helper()
	m.g.must(abi.CmdModifyCQ, enc(abi.SizeModifyCQ, &abi.ModifyCQ{CQN: m.n, Count: count, Period: period}))
}

func (m *moderated) arm() { m.g.u32(m.tcq.arm).Store(abi.ArmNext) }

// post writes n completions.
func (m *moderated) post(n int) {
	for range n {
		tok := m.g.space.Epochs().Enter(translate.ByLoop(0))
		m.q.post(&abi.WC{}, false)
		m.g.space.Epochs().Leave(0, tok)
	}
	m.poll()
}

// events returns how many events the driver got since the last call.
func (m *moderated) events() int {
	m.g.tb.Helper()
	m.g.w.step(3)
	got := m.d.get()
	m.d.add(len(got))
	for _, b := range got {
		if n := binary.LittleEndian.Uint32(b); n != m.n {
			m.g.tb.Errorf("event of CQ %d, want %d", n, m.n)
		}
	}
	return len(got)
}

func (m *moderated) expect(when string, n int) {
	m.g.tb.Helper()
	if got := m.events(); got != n {
		m.g.tb.Errorf("%s: %d events, want %d", when, got, n)
	}
}

// An event is delayed until there are enough completions or the time has passed, whichever is first, and comes once.
func TestModeration(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	const period = 50 * time.Microsecond
	m := w.guests[0].moderated(3, uint16(period/time.Microsecond))

	m.post(5)
	m.expect("not armed", 0)
	m.arm()
	m.post(2)
	m.expect("two completions", 0)
	m.post(1)
	m.expect("three completions", 1)
	m.post(5)
	w.clock.Advance(2 * period)
	m.expect("not armed again", 0)

	m.arm()
	m.post(1)
	m.expect("one completion", 0)
	w.clock.Advance(period - 1)
	m.expect("before the time has passed", 0)
	w.clock.Advance(1)
	m.expect("when the time has passed", 1)

	m.arm()
	m.post(1)
	m.expect("one completion", 0)
	m.arm() // the driver need not wait for the event
	m.post(1)
	m.expect("armed twice, two completions", 0)
	m.post(1)
	m.expect("armed twice, three completions", 1)
	w.clock.Advance(2 * period)
	m.expect("armed twice, later", 0)

	for _, off := range [][2]uint16{{1, 50}, {0, 50}, {3, 0}} {
		m.modify(3, 50)
		m.arm()
		m.post(1)
		m.expect("delayed", 0)
		m.modify(off[0], off[1])
		m.expect("delayed, when moderation ends", 1)
		m.arm()
		m.post(1)
		m.expect("without moderation", 1)
	}

	m.modify(3, 50)
	m.arm()
	m.post(1)
	m.g.must(abi.CmdDestroyCQ, handle(m.n))
	w.clock.Advance(2 * period)
	m.expect("of a CQ that was destroyed", 0)
	m.g.refused(abi.StatusNotFound, abi.CmdModifyCQ, enc(abi.SizeModifyCQ, &abi.ModifyCQ{CQN: m.n, Count: 2, Period: 1}))
}

// A reset drops a delayed event: the next driver may have a CQ with the same number.
func TestModerationReset(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	m := w.guests[0].moderated(3, 50)
	m.arm()
	m.post(1)
	m.expect("delayed", 0)
	m.g.wipe()
	w.clock.Advance(time.Millisecond)
	m.expect("after a reset", 0)
}

// A CQ that another process continues is moderated, and a delayed event is posted at once (CO-1).
func TestModerationContinues(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	m := w.guests[0].moderated(3, 50)
	m.arm()
	m.post(1)
	m.expect("delayed", 0)
	x := w.twin(t, m.g)
	defer x.dropTwin()
	if err := x.Restore(saved(t, m.g)); err != nil {
		t.Fatal(err)
	}
	q := x.tables.cqs[m.n].q
	if bits := q.comp.bits.Load(); bits != eventNow || !q.comp.queued.Load() {
		t.Errorf("events %#x are to be posted, want %#x", bits, eventNow)
	}
	if s := q.moderation.Load(); s == nil || s.count != 3 || s.period != 50 {
		t.Errorf("moderation %+v, want by 3 completions or 50 us", s)
	}
}
