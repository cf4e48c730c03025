package hca

import (
	"fmt"

	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio/virtq"
)

// The virtqueues that loops serve: event queues (buffers from the driver) and
// doorbell queues (kicks alone). Their kick eventfd is watched on the lane's loop.

// start begins to serve the queue; control goroutine.
func (e *eventQueue) start(q *virtq.Queue) (err error) {
	e.lane.loop.Do(func() {
		if e.q != nil {
			err = fmt.Errorf("hca: queue %d runs already", e.index)
			return
		}
		if fd := q.KickFD(); fd >= 0 {
			var w *loop.Watch
			if w, err = e.lane.loop.Watch(fd, e.kicked, loop.Name("hca event kick"), e.lane.fault()); err != nil {
				return
			}
			e.watch = w
		}
		e.q, e.starved = q, false
		if t, ok := e.lane.enter(); ok {
			defer e.lane.leave(t)
			e.run() // events may have waited for the queue
		}
	})
	return err
}

func (e *eventQueue) kicked() {
	eventfd.Take(e.q.KickFD())
	if t, ok := e.lane.enter(); ok {
		defer e.lane.leave(t)
		e.run()
	}
}

// stop ends service; nobody touches the virtqueue when it returns. Pending events
// stay with their objects.
func (e *eventQueue) stop() {
	e.lane.loop.Do(func() {
		if e.watch != nil {
			e.watch.Close()
			e.watch = nil
		}
		e.q, e.fetching = nil, false
	})
}

// startDoorbells watches the doorbell queue's kick; control goroutine.
func (l *lane) startDoorbells(q *virtq.Queue) (err error) {
	l.loop.Do(func() {
		switch fd := q.KickFD(); {
		case l.dbWatch != nil:
			err = fmt.Errorf("hca: doorbell queue %d runs already", q.Index())
		case fd >= 0:
			// The kick does nothing by itself: it wakes the loop, which then polls.
			l.dbWatch, err = l.loop.Watch(fd, func() { eventfd.Take(fd) }, loop.Name("hca doorbell kick"), l.fault())
		}
	})
	return err
}

func (l *lane) stopDoorbells() {
	l.loop.Do(func() {
		if l.dbWatch != nil {
			l.dbWatch.Close()
			l.dbWatch = nil
		}
	})
}
