package hca

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// sharing is a guest with queue pairs on two engines whose completions are in one CQ: x receives into it, y receives
// into it and sends from it. Its peer's are px and py.
type sharing struct {
	t            *testing.T
	w            *world
	g            *guest // the one whose process ends
	cq           *tcq   // shared
	x, y, px, py *tqp

	at, meanwhile int  // the point, and how many of the other engine's follow it
	points        int  // passed
	running       int  // the loop that runs
	nested        bool // it runs inside a point of the other one
	left          []corpse

	sent   map[*tqp]int
	ready  map[*tqp]int
	got    []abi.WC
	atPeer []abi.WC
}

const sharedMessages = 9 // of each kind

func newSharing(t *testing.T, at, meanwhile int) *sharing {
	s := &sharing{t: t, w: newWorld(t, 2, 2, Limits{}), at: at, meanwhile: meanwhile,
		sent: map[*tqp]int{}, ready: map[*tqp]int{}}
	ga, gb := s.w.guests[0], s.w.guests[1]
	s.g = gb
	gb.cfg.Journal = true
	if _, err := gb.Journal(); err != nil {
		t.Fatal(err)
	}
	pa, pb := ga.pd(), gb.pd()
	first := gb.cq(32)
	s.cq = gb.cq(32)
	gb.qp(qpSpec{pd: pb, scq: first})                                    // binds first to one engine,
	s.y = gb.qp(qpSpec{pd: pb, scq: s.cq, elems: 4})                     // and the shared one to the other
	s.x = gb.qp(qpSpec{pd: pb, scq: first, rcq: s.cq, elems: 4})         // placed with first
	s.px, s.py = ga.qp(qpSpec{pd: pa}), ga.qp(qpSpec{pd: pa, elems: 16}) // whose completions nobody counts
	if s.x.engine == s.y.engine {
		t.Fatal("both queue pairs are on one engine")
	}
	for _, p := range [][2]*tqp{{s.x, s.px}, {s.y, s.py}} {
		p[0].connectRC(p[1])
		p[1].connectRC(p[0])
	}
	return s
}

// program is what the programs of both guests do at any time.
func (s *sharing) program() {
	s.got = append(s.got, s.cq.poll()...)
	s.atPeer = append(s.atPeer, append(s.px.rcq.poll(), s.py.rcq.poll()...)...)
	for _, q := range []*tqp{s.x, s.y, s.py} {
		for ; s.ready[q] < sharedMessages && !full(&q.rq); s.ready[q]++ {
			q.recv(s.id(q, true, s.ready[q]), abi.SGE{})
		}
	}
	for _, q := range []*tqp{s.px, s.py, s.y} {
		flags := uint32(0)
		if q == s.y {
			flags = abi.SendSignaled
		}
		for ; s.sent[q] < sharedMessages && !full(&q.sq); s.sent[q]++ {
			w := q.wqe()
			w.SetRequest(s.id(q, false, s.sent[q]), abi.WRSend, flags)
			w.SetSGEs(nil)
			q.post()
		}
	}
}

func (s *sharing) id(q *tqp, receive bool, i int) uint64 {
	id := uint64(q.n)<<16 | uint64(i)
	if receive {
		id |= 1 << 15
	}
	return id
}

// point ends the process after a store: at once, or after some of the other engine's. That does not run while this one
// holds the lock of the CQ.
func (s *sharing) point() {
	if s.points++; s.left != nil {
		return
	}
	switch {
	case s.nested:
		if s.meanwhile--; s.meanwhile > 0 {
			return
		}
	case s.points < s.at:
		return
	case s.meanwhile > 0:
		shared := s.g.tables.cqs[s.cq.n].q
		if s.points > s.at || !shared.mu.TryLock() {
			break
		}
		shared.mu.Unlock()
		s.nested = true
		s.w.loops[1-s.running].Step()
		if s.nested = false; s.left != nil {
			return
		}
	}
	s.left = append(s.left, s.g.remains())
	s.w.lose = func([]byte) bool { return true } // what the process still does is undone
}

// run runs the program to its end, and returns the number of points.
func (s *sharing) run() int {
	stop := endAt(s.point)
	defer stop()
	for i := 0; len(s.got) < 3*sharedMessages || len(s.atPeer) < sharedMessages; i++ {
		if i > 5000 {
			s.t.Fatalf("no end: %d completions in the shared CQ, %d at the peer", len(s.got), len(s.atPeer))
		}
		s.program()
		for s.running = range s.w.loops {
			s.w.loops[s.running].Step()
		}
		if s.left != nil {
			stop()
			s.w.lose = nil
			s.g.replace(s.left[0])
			s.left = nil
		}
		s.w.clock.Advance(1e6)
	}
	stop()
	s.w.step(50)
	s.program()
	s.check()
	return s.points
}

// check compares with the model: the completions of each queue are there once, in order.
func (s *sharing) check() {
	s.t.Helper()
	want := map[uint64]uint64{}
	for _, wc := range s.got {
		queue := wc.ID &^ (1<<15 - 1)
		if wc.Status != abi.WCSuccess || wc.ID != queue|want[queue] {
			s.t.Errorf("request %#x with status %d, want %#x: %#x", wc.ID, wc.Status, queue|want[queue], ids(s.got))
			return
		}
		want[queue]++
	}
	for _, id := range []uint64{s.id(s.x, true, 0), s.id(s.y, true, 0), s.id(s.y, false, 0)} {
		if want[id] != sharedMessages {
			s.t.Errorf("%d completions of %#x", want[id], id)
		}
	}
	if len(s.atPeer) != sharedMessages {
		s.t.Errorf("the peer has %d completions", len(s.atPeer))
	}
}

// The process ends at a store of one of two engines that share a CQ, while the other one is between two passes or has
// come to a store of its own: no completion is lost, doubled or overtaken (CO-2).
func TestCrashSharedCQ(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	size := logSize
	logSize = 256 << 10
	defer func() { logSize = size }()
	for _, meanwhile := range []int{0, 1, 2, 3, 5, 8, 13} {
		t.Run(fmt.Sprint(meanwhile), func(t *testing.T) {
			at, step := 1, 1
			if !*everyCrash {
				step = 23
				at += rand.IntN(step)
			}
			err := eachPoint(t, t.Run, at, step, func(t *testing.T, at int) int {
				if at == 0 {
					at = 1 << 30
				}
				return newSharing(t, at, meanwhile).run()
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}
