// Side: data

package hca

import (
	"fmt"

	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio/virtq"
)

// The virtqueues that loops serve: event queues (buffers from the driver) and
// doorbell queues (kicks only). Their kick eventfd is watched on the engine's loop.

// start begins to serve the queue; control goroutine.
func (eq *eventQueue) start(q *virtq.Queue) (err error) {
	gone := eq.engine.visit(func() {
		if eq.q != nil {
			err = fmt.Errorf("hca: queue %d runs already", eq.index)
			return
		}
		if fd := q.KickFD(); fd >= 0 {
			var w *loop.Watch
			if w, err = eq.engine.loop.Watch(fd, eq.kicked, loop.Name("hca event kick"), eq.engine.faultOption(),
				loop.Metered(&eq.engine.dev.meter)); err != nil {
				return
			}
			eq.watch = w
		}
		eq.q, eq.starved = q, false
		eq.recall()
		if t, ok := eq.engine.enter(); ok {
			defer eq.engine.leave(t)
			eq.run() // events may have waited for the queue
		}
	})
	if gone != nil {
		eq.stop()
		return gone
	}
	return err
}

func (eq *eventQueue) kicked() {
	eventfd.Take(eq.q.KickFD())
	if t, ok := eq.engine.enter(); ok {
		defer eq.engine.leave(t)
		eq.run()
	}
}

// stop ends service; when it returns no thread accesses the virtqueue any more.
// Pending events stay with their objects.
func (eq *eventQueue) stop() {
	eq.engine.onLoop(func() {
		if eq.watch != nil {
			eq.watch.Close()
			eq.watch = nil
		}
		eq.q, eq.fetching = nil, false
	})
}

// startDoorbells watches the doorbell queue's kick; control goroutine.
func (e *engine) startDoorbells(q *virtq.Queue) (err error) {
	e.onLoop(func() {
		switch fd := q.KickFD(); {
		case e.dbWatch != nil:
			err = fmt.Errorf("hca: doorbell queue %d runs already", q.Index())
		case fd >= 0:
			// The kick does nothing by itself: it wakes the loop, which then polls.
			e.dbWatch, err = e.loop.Watch(fd, func() { eventfd.Take(fd) }, loop.Name("hca doorbell kick"), e.faultOption(),
				loop.Metered(&e.dev.meter))
		}
	})
	return err
}

func (e *engine) stopDoorbells() {
	e.onLoop(func() {
		if e.dbWatch != nil {
			e.dbWatch.Close()
			e.dbWatch = nil
		}
	})
}
