package guestdrv

import (
	"context"
	"fmt"
	"sync"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// asyncEvents is the asynchronous event queue. Page faults of on-demand regions
// go to their pagers, and their buffers back to the device at once. Other events
// keep their buffers until NextEvent fetches them: with queueSize of them the
// device has none left and keeps further events, faults included. None is lost.
type asyncEvents struct {
	mu   sync.Mutex
	q    *frontend.Queue // guarded by mu, but for Await
	d    *Device
	bufs *Buffer

	listMu sync.Mutex
	list   []keptEvent   // oldest first, at most queueSize
	ready  chan struct{} // holds a token while list is not empty
}

type keptEvent struct {
	event abi.Event
	buf   uint64
}

func newAsyncEvents(d *Device) (*asyncEvents, error) {
	a := &asyncEvents{q: d.fe.Queue(abi.EventQueue), d: d, ready: make(chan struct{}, 1)}
	var err error
	if a.bufs, err = d.mem.alloc(abi.SizeEvent*queueSize, pageSize); err != nil {
		return nil, err
	}
	for i := range uint64(queueSize) {
		if err := a.give(i); err != nil {
			return nil, err
		}
	}
	d.wg.Go(a.run)
	return a, nil
}

// give hands buffer i to the device.
func (a *asyncEvents) give(i uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.q.Add(i, nil, []frontend.Buf{{PA: translate.PA(a.bufs.PA() + i*abi.SizeEvent), Len: abi.SizeEvent}}); err != nil {
		return err
	}
	a.q.Kick()
	return nil
}

func (a *asyncEvents) returned() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.q.Returned()
}

func (a *asyncEvents) get() (buf uint64, n uint32, ok bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.q.Get()
}

func (a *asyncEvents) run() {
	for a.q.Await(a.returned) {
		for {
			i, n, ok, err := a.get()
			if err == nil && ok {
				err = a.handle(i, n)
			}
			if err != nil {
				a.d.fail(err)
				return
			}
			if !ok {
				break
			}
		}
	}
}

// handle takes an event that the device wrote into buffer i.
func (a *asyncEvents) handle(i uint64, n uint32) error {
	if n < abi.SizeEvent {
		return fmt.Errorf("queue %d: event of %d bytes, expected %d", abi.EventQueue, n, abi.SizeEvent)
	}
	var e abi.Event
	if err := e.Decode(a.bufs.Bytes()[i*abi.SizeEvent:][:abi.SizeEvent]); err != nil {
		return err
	}
	if e.Type == abi.EventPageFault {
		if served, err := a.d.faults.dispatch(a.d, &e); served || err != nil {
			if err == nil {
				err = a.give(i)
			}
			return err
		}
	}
	a.listMu.Lock()
	a.list = append(a.list, keptEvent{e, i})
	a.signalLocked()
	a.listMu.Unlock()
	return nil
}

func (a *asyncEvents) signalLocked() {
	if len(a.list) == 0 {
		return
	}
	select {
	case a.ready <- struct{}{}:
	default:
	}
}

// next takes the oldest event, if there is one.
func (a *asyncEvents) next() (keptEvent, bool) {
	a.listMu.Lock()
	defer a.listMu.Unlock()
	if len(a.list) == 0 {
		return keptEvent{}, false
	}
	e := a.list[0]
	a.list = append(a.list[:0], a.list[1:]...)
	a.signalLocked()
	return e, true
}

// NextEvent waits for an asynchronous event. Page faults of on-demand regions are
// none; those of regions that RegisterPages made are, and the caller answers them
// with ResumeFault.
func (d *Device) NextEvent(ctx context.Context) (abi.Event, error) {
	if err := d.users.enter(); err != nil {
		return abi.Event{}, err
	}
	defer d.users.leave()
	for {
		if e, ok := d.async.next(); ok {
			return e.event, d.async.give(e.buf)
		}
		select {
		case <-d.async.ready:
			continue
		case <-ctx.Done():
			return abi.Event{}, ctx.Err()
		case <-d.ctx.Done():
		case <-d.fe.Gone():
		}
		return abi.Event{}, d.closing()
	}
}

// completionQueue serves completion event queue i: one goroutine, for which the
// order of events does not matter.
func (d *Device) completionQueue(index int) error {
	q := d.fe.Queue(index)
	bufs, err := d.mem.alloc(abi.SizeCEQE*queueSize, pageSize)
	if err != nil {
		return err
	}
	give := func(i uint64) error {
		return q.Add(i, nil, []frontend.Buf{{PA: translate.PA(bufs.PA() + i*abi.SizeCEQE), Len: abi.SizeCEQE}})
	}
	for i := range uint64(queueSize) {
		if err := give(i); err != nil {
			return err
		}
	}
	q.Kick()
	d.wg.Go(func() {
		for q.Await(q.Returned) {
			i, n, ok, err := q.Get()
			if err == nil && !ok {
				continue
			}
			if err == nil {
				err = d.onCompletion(bufs.Bytes()[i*abi.SizeCEQE:], n)
			}
			if err == nil {
				err = give(i)
			}
			if err != nil {
				d.fail(err)
				return
			}
			q.Kick()
		}
	})
	return nil
}

// onCompletion passes a completion event of n bytes on to its CQ.
func (d *Device) onCompletion(b []byte, n uint32) error {
	if n < abi.SizeCEQE {
		return fmt.Errorf("completion event of %d bytes, expected %d", n, abi.SizeCEQE)
	}
	var e abi.CEQE
	if err := e.Decode(b[:abi.SizeCEQE]); err != nil {
		return err
	}
	d.mu.Lock()
	cq := d.cqs[e.CQN]
	d.mu.Unlock()
	if cq != nil { // else: destroyed meanwhile
		select {
		case cq.event <- struct{}{}:
		default:
		}
	}
	return nil
}
