package hca

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// writes is a program that posts WRITEs with completions in a CQ of 8 elements.
type writes struct {
	w      *world
	g      *guest
	q      *tqp
	cq     *tcq
	posted uint64
	passed bool   // the guest has passed the producer index
	before uint32 // which was this
}

func newWrites(t *testing.T, elems uint32) *writes {
	t.Helper()
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	ga.cfg.Journal = true
	if _, err := ga.Journal(); err != nil {
		t.Fatal(err)
	}
	cq := ga.cq(elems)
	a, b := ga.qp(qpSpec{pd: ga.pd(), scq: cq}), gb.qp(qpSpec{pd: gb.pd()})
	a.connectRC(b)
	b.connectRC(a)
	return &writes{w: w, g: ga, q: a, cq: cq}
}

func (x *writes) post(n int) {
	for range n {
		s := x.q.wqe()
		s.SetRequest(x.posted, abi.WRRDMAWrite, abi.SendSignaled)
		x.posted++
		x.q.post()
	}
}

// pass moves the consumer index one beyond the producer index, as the rxe provider of rdma-core 44 may.
func (x *writes) pass() {
	x.passed, x.before = true, x.cq.prod().Load()
	x.cq.cons().Store((x.cq.prod().Load() + 1) & (x.cq.desc.NumElems - 1))
}

// poll takes all completions. A guest that has passed the producer waits until that moves.
func (x *writes) poll() []abi.WC {
	if x.passed && x.cq.prod().Load() == x.before {
		return nil
	}
	x.passed = false
	return x.cq.poll()
}

func (x *writes) failed() bool { return x.g.tables.cqs[x.cq.n].q.failed.Load() }

// The process ends at a store, and so may the next one, and the guest's consumer index is one beyond the producer
// index: the CQ is not full, and no completion is lost, or there twice.
func TestCrashConsumerPassed(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	size := logSize
	logSize = 256 << 10
	defer func() { logSize = size }()
	for _, elems := range []uint32{4, 8, 16} {
		for _, twice := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d elements, twice %v", elems, twice), func(t *testing.T) {
				at, step := 1, 1
				if !*everyCrash {
					step = 7
					at += rand.IntN(step)
				}
				err := eachPoint(t, t.Run, at, step, func(t *testing.T, at int) int {
					return crashConsumerPassed(t, at, elems, twice)
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func crashConsumerPassed(t *testing.T, at int, elems uint32, twice bool) (points int) {
	x := newWrites(t, elems)
	var got []abi.WC
	var left []corpse
	device := x.g.Device
	ends := func() {
		if points++; points != at {
			return
		}
		if wcs := x.poll(); len(wcs) > 0 {
			got = append(got, wcs...)
			x.pass()
		}
		left = append(left, x.g.remains())
		x.w.lose = func([]byte) bool { return true } // what the process still does is undone
	}
	defer endAt(func() {
		if x.g.Device == device {
			ends()
		}
	})()
	until := func(what string, cond func() bool) {
		x.w.until(what, func() bool {
			if left != nil {
				x.w.lose = nil
				x.g.replace(left[0])
				if left = nil; twice {
					twice, device, at = false, x.g.Device, points+1
				}
			}
			return cond()
		})
	}
	n := int(elems) - 2 // the consumer index of a guest that passes the producer of a full ring says nothing, ever
	for range 3 {
		x.post(n)
		until(fmt.Sprintf("completions, has %v", ids(got)), func() bool {
			got = append(got, x.poll()...)
			return uint64(len(got)) >= x.posted || x.failed()
		})
	}
	m := 0
	until("the end", func() bool { m++; return m > 30 })
	want := make([]uint64, x.posted)
	for i := range want {
		want[i] = uint64(i)
	}
	if id := ids(got); !slices.Equal(id, want) || x.failed() {
		t.Errorf("completions %v, failed %v", id, x.failed())
	}
	return points
}

// A CQ that is full when the process ends is full for the next one, too.
func TestCrashFull(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	for _, elems := range []uint32{2, 4, 8} {
		for _, extra := range []int{0, 1} {
			x := newWrites(t, elems)
			n := int(elems) - 1
			x.post(n)
			x.w.step(20)
			for range 2 {
				x.g.replace(x.g.remains())
			}
			x.post(extra)
			x.w.step(50)
			if x.failed() != (extra > 0) {
				t.Errorf("%d completions in a CQ of %d elements: failed %v", n+extra, elems, x.failed())
			}
			if got := x.cq.poll(); len(got) != n || got[0].ID != 0 || got[n-1].ID != uint64(n-1) {
				t.Errorf("%d elements: completions %v", elems, ids(got))
			}
			if extra == 0 {
				x.post(1)
				x.cq.await(1)
			}
		}
	}
}
