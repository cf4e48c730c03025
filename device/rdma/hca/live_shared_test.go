package hca_test

import (
	"context"
	"sync"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/guestdrv"
)

// Two loops fill one CQ: every completion arrives once, and those of one QP in
// order.
func TestCQBetweenLoops(t *testing.T) {
	s := newSiteOf(t, 2, 2, hca.Limits{}, 0)
	a, b := s.open(0), s.open(1)
	const n = 1500
	cq := func(c *client, size int) *guestdrv.CQ {
		q, err := c.CreateCQ(context.Background(), size, guestdrv.CQOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return q
	}
	qp := func(c *client, scq, rcq *guestdrv.CQ) *end {
		q, err := c.pd.CreateQP(context.Background(), guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: scq, RecvCQ: rcq,
			MaxSendWR: 64, MaxRecvWR: 64})
		if err != nil {
			t.Fatal(err)
		}
		return &end{c, rcq, q}
	}
	first, second := cq(b, 64), cq(b, 256)
	qp(b, first, first)        // binds first to one loop
	y := qp(b, second, second) // and second to the other
	x := qp(b, first, second)  // placed with first, receives into second
	px, py := qp(a, cq(a, 128), cq(a, 16)), qp(a, cq(a, 128), cq(a, 16))
	px.cq, py.cq = nil, nil
	join(t, px, x)
	join(t, py, y)
	engines := map[uint32]int{}
	for _, q := range s.hosts[1].dev.Describe().QPs {
		engines[q.QPN] = q.Engine
	}
	if engines[x.qp.Number()] == engines[y.qp.Number()] {
		t.Fatal("both QPs are on one loop: test set-up: they must share a CQ between loops")
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for _, e := range []*end{px, py} {
		wg.Go(func() {
			for id := uint64(0); id < n && ctx.Err() == nil; {
				// Unsignalled: a slot is free as soon as the consumer index has passed it.
				if e.qp.PostSend(guestdrv.NewSend(id, a.mr.SGE(0, 64))) == nil {
					id++
				}
			}
		})
	}
	posted, got := map[uint32]uint64{}, map[uint32]uint64{}
	recv := func(e *end) {
		for posted[e.qp.Number()] < n && posted[e.qp.Number()]-got[e.qp.Number()] < 60 {
			if err := e.qp.PostRecv(&guestdrv.RecvWR{ID: posted[e.qp.Number()],
				SGL: []guestdrv.SGE{b.mr.SGE(0, 64)}}); err != nil {
				return
			}
			posted[e.qp.Number()]++
		}
	}
	wcs := make([]guestdrv.Completion, 32)
	for got[x.qp.Number()]+got[y.qp.Number()] < 2*n {
		recv(x)
		recv(y)
		k, err := second.PollWait(ctx, wcs)
		if err != nil {
			t.Fatalf("%v after %v", err, got)
		}
		for _, wc := range wcs[:k] {
			if wc.Status != guestdrv.WCSuccess || wc.ID != got[wc.QPN] {
				t.Fatalf("completion %+v, want id %d", wc, got[wc.QPN])
			}
			got[wc.QPN]++
		}
	}
	wg.Wait()
	for _, c := range []*client{a, b} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// QPs of two loops get their peers, at both ends at once and under traffic, and move to one loop: no request fails, and
// with the local path both ends are on one loop afterwards.
func TestMeeting(t *testing.T) {
	s := newSiteOf(t, 2, 3, hca.Limits{}, 0)
	a, b := s.open(0), s.open(1)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	const pairs = 7
	for round := range 4 {
		var xs, ys []*end
		for range pairs {
			xs, ys = append(xs, a.end(t)), append(ys, b.end(t))
		}
		var wg sync.WaitGroup
		for i, x := range xs {
			y := ys[(i+round+1)%pairs]
			both := [][2]*end{{x, y}, {y, x}}
			var ready sync.WaitGroup
			ready.Add(2)
			for _, p := range both {
				wg.Go(func() {
					peer := guestdrv.Peer{QPN: p[1].qp.Number(), Path: guestdrv.Path{GID: p[1].c.h.gid, MAC: p[1].c.h.mac}}
					err := p[0].qp.Connect(context.Background(), peer, peerOptions)
					ready.Done()
					if err != nil {
						t.Error(err)
						return
					}
					ready.Wait() // a peer that is not ready would refuse it
					wcs := make([]guestdrv.Completion, 8)
					for id := range uint64(50) {
						wr := requests[id%2](id, p[1].c.mr.Remote(0), p[0].c.mr.SGE(0, 9000)).With(guestdrv.SendSignaled)
						if err := p[0].qp.PostSend(wr); err != nil {
							t.Error(err)
							return
						}
						if n, err := p[0].cq.PollWait(ctx, wcs); err != nil || n != 1 || wcs[0].Status != guestdrv.WCSuccess ||
							wcs[0].ID != id {
							t.Errorf("request %d: %d completions, %+v, %v", id, n, wcs[0], err)
							return
						}
					}
				})
			}
		}
		wg.Wait()
		if hca.LocalPath {
			at := map[uint32]int{}
			for _, q := range s.hosts[1].dev.Describe().QPs {
				at[q.QPN] = q.Engine
			}
			for _, q := range s.hosts[0].dev.Describe().QPs {
				if q.Dest != 0 && at[q.Dest] != q.Engine {
					t.Errorf("QP %d on engine %d, its peer %d on %d", q.QPN, q.Engine, q.Dest, at[q.Dest])
				}
			}
		}
		for _, e := range append(xs, ys...) {
			if err := e.qp.Close(); err != nil {
				t.Fatal(err)
			}
			if err := e.cq.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []*client{a, b} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}
