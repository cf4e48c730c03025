package rdmacm

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
)

// phase is a connection in the model: what both programs have said so far, on a network that loses nothing.
type phase int

const (
	requested phase = iota
	replied
	connected
	ended
)

// TestModel compares two machines with a model after each of many random operations.
func TestModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	a, b := newHost(1, settings{most: 64}), newHost(2, settings{most: 64})
	b.serve(t, 64)
	n := newNetwork(a, b)
	type link struct {
		x, y *session
		at   phase
		why  [2]error // of the active and the passive end
	}
	var links []*link
	counts := map[phase]int{}
	for step := range 5000 {
		if len(links) < 20 && rng.IntN(3) == 0 {
			l := &link{x: a.dial(t, n.now, 2)}
			n.deliver(t)
			if l.y = b.take(b.port); l.y == nil {
				t.Fatalf("step %d: no request", step)
			}
			links = append(links, l)
		}
		if len(links) == 0 {
			continue
		}
		i := rng.IntN(len(links))
		l := links[i]
		switch op := rng.IntN(5); {
		case l.at == requested && op < 3:
			if err := b.accept(n.now, l.y, cm.Fields{QPN: b.qpn()}); err != nil {
				t.Fatal(err)
			}
			l.at = replied
		case l.at == requested && op == 3:
			if err := b.reject(n.now, l.y, RejectConsumer, nil); err != nil {
				t.Fatal(err)
			}
			l.at, l.why = ended, [2]error{RejectConsumer, RejectConsumer}
		case l.at == requested:
			a.abandon(n.now, l.x)
			l.at, l.why = ended, [2]error{ErrClosed, RejectTimeout}
		case l.at == replied && op < 3:
			if err := a.ready(l.x); err != nil {
				t.Fatal(err)
			}
			l.at = connected
		case l.at == replied && op == 3:
			a.abandon(n.now, l.x)
			l.at, l.why = ended, [2]error{ErrClosed, RejectConsumer}
		case l.at == replied:
			b.abandon(n.now, l.y)
			l.at, l.why = ended, [2]error{RejectConsumer, ErrClosed}
		case l.at == connected && op == 0:
			a.disconnect(n.now, l.x, ErrClosed)
			l.at, l.why = ended, [2]error{ErrClosed, ErrPeerDisconnected}
		case l.at == connected && op == 1:
			b.disconnect(n.now, l.y, ErrClosed)
			l.at, l.why = ended, [2]error{ErrPeerDisconnected, ErrClosed}
		case l.at == connected && op == 2: // both at once
			a.disconnect(n.now, l.x, ErrClosed)
			b.disconnect(n.now, l.y, ErrClosed)
			l.at, l.why = ended, [2]error{ErrClosed, ErrClosed}
		default: // the operation is not allowed in this phase
			if l.at != requested && b.accept(n.now, l.y, cm.Fields{QPN: 99}) == nil || l.at != replied && a.ready(l.x) == nil ||
				l.at != requested && b.reject(n.now, l.y, RejectConsumer, nil) == nil {
				t.Fatalf("step %d: accepted in phase %d", step, l.at)
			}
		}
		n.deliver(t)
		for _, l := range links {
			want := [2]state{reqSent, reqReceived}
			switch l.at {
			case replied:
				want = [2]state{repReceived, repSent}
			case connected:
				want = [2]state{established, established}
			}
			for k, s := range []*session{l.x, l.y} {
				if over := s.state >= timeWait; over != (l.at == ended) || !over && s.state != want[k] ||
					over && !errors.Is(s.err, l.why[k]) {
					t.Fatalf("step %d, phase %d: %v, want %v, %v", step, l.at, s, want[k], l.why[k])
				}
			}
		}
		if counts[l.at]++; l.at == ended {
			links = append(links[:i], links[i+1:]...)
		}
		n.pass(t, time.Duration(rng.IntN(int(20*time.Millisecond))))
	}
	for _, p := range []phase{requested, replied, connected, ended} {
		if counts[p] < 100 && p != requested {
			t.Errorf("phase %d: %d times: the test tries too little", p, counts[p])
		}
	}
	if n.sent[cm.MRA]+int(a.counters.Refused+b.counters.Refused+a.counters.Malformed+b.counters.Malformed) != 0 {
		t.Errorf("%v, %+v, %+v", n.sent, a.counters, b.counters)
	}
}
