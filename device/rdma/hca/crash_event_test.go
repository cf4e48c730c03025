package hca

import (
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/virtq"
)

// restart starts an event queue of a device that was revived, as the transport does.
func (d *drvq) restart() {
	d.g.tb.Helper()
	q, err := virtq.New(d.g.space, virtq.Config{Index: d.index, Size: int(d.size), Desc: d.desc, Avail: d.avail,
		Used: d.used, Kick: d.kick})
	if err == nil {
		err = d.g.space.Epochs().Within(commandSlot, func() error { _, err := q.Resume(); return err })
	}
	if err != nil {
		d.g.tb.Fatal(err)
	}
	d.q = q
	d.start()
}

// The process ends at a store after a CQ has failed, and perhaps the next one ends as soon as it has a journal: the
// driver gets the CQ's error event, once, and its queue pair ends (CO-2).
func TestCrashAtError(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	size := logSize
	logSize = 256 << 10
	defer func() { logSize = size }()
	for _, x := range []struct{ loops, buffers, others int }{{1, 16, 0}, {2, 16, 0}, {2, 16, 2}, {1, 0, 1}} {
		t.Run(fmt.Sprint(x), func(t *testing.T) {
			err := eachPoint(t, t.Run, 1, 1, func(t *testing.T, at int) int {
				return crashAtError(t, at, x.loops, x.buffers, x.others)
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// crashAtError has a CQ fail, and the process end at a point after that. The driver has that many event buffers before
// that, and that many other events come with the CQ's.
func crashAtError(t *testing.T, at, loops, buffers, others int) (points int) {
	w := newWorld(t, loops, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	ga.cfg.Journal = true
	if _, err := ga.Journal(); err != nil {
		t.Fatal(err)
	}
	dq := ga.eventQueue(abi.EventQueue, 16, abi.SizeEvent)
	dq.add(buffers)
	small := ga.cq(8)
	a, b := ga.qp(qpSpec{pd: ga.pd(), scq: small}), gb.qp(qpSpec{pd: gb.pd()})
	a.connectRC(b)
	b.connectRC(a)
	nodes := make([]eventNode, others)
	for range 20 {
		s := a.wqe()
		s.SetRequest(1, abi.WRRDMAWrite, abi.SendSignaled)
		a.post()
	}
	var left []corpse
	device := ga.Device
	stop := endAt(func() {
		if o := ga.tables.cqs[small.n]; ga.Device != device || o == nil || !o.q.failed.Load() {
			return
		}
		if points++; points == 1 {
			for i := range nodes { // of objects that the next device does not have
				nodes[i].init(uint32(1000+i), nodeQP)
				ga.async.post(&nodes[i], 1<<abi.EventQPCommEst)
			}
		}
		if points == at {
			left = append(left, ga.remains())
		}
	})
	defer stop()
	told := 0
	until := func(what string, cond func() bool) {
		w.until(what, func() bool {
			if left != nil {
				ga.replace(left[0])
				if left = nil; at%2 == 0 {
					ga.replace(ga.remains())
				}
				dq.restart()
				dq.add(len(dq.free))
			}
			for _, e := range dq.events() {
				if e.Type == abi.EventCQErr && e.Handle == small.n {
					told++
				}
			}
			return cond()
		})
	}
	until("the error state", func() bool { return a.state() == abi.QPErr })
	dq.add(len(dq.free))
	until("the event", func() bool { return told > 0 })
	n := 0
	until("more", func() bool { n++; return n > 30 })
	if told != 1 {
		t.Errorf("%d CQ error events", told)
	}
	if !ga.tables.cqs[small.n].q.failed.Load() {
		t.Error("the CQ has not failed")
	}
	return points
}
