package hca

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// TestStandstill: what a connection that stands still waits for can be seen, at either end, until it goes on.
func TestStandstill(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	buf := b.g.alloc(16)
	kb := b.g.mr(1, buf, 16, abi.AccessLocalWrite)
	look := func(q *tqp) QPStatus {
		for _, s := range q.g.Describe().QPs {
			if s.QPN == q.n {
				return s
			}
		}
		t.Fatalf("no queue pair %#x", q.n)
		return QPStatus{}
	}
	until := func(what string, q *tqp, ok func(QPStatus) bool) {
		t.Helper()
		w.until(what, func() bool { return ok(look(q)) })
	}
	idle := func(s QPStatus) bool { return s.Requests == 0 && s.Unacked == 0 && !s.NotReady && !s.Refused }
	until("at first", a, idle)
	s := a.wqe()
	s.SetRequest(1, abi.WRSend, abi.SendSignaled|abi.SendInline)
	s.SetInline([]byte("message"))
	a.post()
	sent := look(a).SQPSN
	until("requester", a, func(s QPStatus) bool { return s.Requests == 1 && s.Unacked == 1 && s.NotReady })
	until("responder", b, func(s QPStatus) bool { return s.Refused && s.Requests == 0 })
	if x := look(b); x.RQPSN != sent {
		t.Errorf("PSN %#x is expected, %#x was sent", x.RQPSN, sent)
	}
	b.recv(2, abi.SGE{Addr: uint64(buf), Length: 16, LKey: kb})
	a.scq.await(1)
	until("requester at last", a, func(x QPStatus) bool { return idle(x) && x.SQPSN == sent+1 })
	until("responder at last", b, idle)
}
