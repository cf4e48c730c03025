package guestdrv

import (
	"context"
	"fmt"
	"sync"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// asyncEvents is the asynchronous event queue. Page faults of on-demand regions are dispatched to their pagers, and
// their buffers return to the device at once. Other events keep their buffers until NextEvent returns them: while
// queueSize events wait, the device has no buffer and holds back further events, faults included. No event is lost.
type asyncEvents struct {
	mu   sync.Mutex
	q    *frontend.Queue // guarded by mu, except Await
	d    *Device
	bufs *Buffer

	listMu sync.Mutex
	list   []keptEvent   // oldest first, at most queueSize
	ready  chan struct{} // holds a token while list is not empty
}

// Event is an asynchronous event. The fields after Handle belong to EventPageFault.
type Event struct {
	Type   EventType
	Handle uint32 // number of the CQ, QP or SRQ
	VA     uint64 // first byte that is needed
	Length uint64 // bytes
	Key    uint32 // of the region
	Access Access // needed by the operation
	Token  uint32 // for Device.ResumeFault
}

type keptEvent struct {
	event Event
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
	if err := a.q.Add(i, nil, []frontend.Buf{{PA: translate.PA(a.bufs.PA() + i*abi.SizeEvent),
		Len: abi.SizeEvent}}); err != nil {
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

// handle processes an event that the device wrote into buffer i.
func (a *asyncEvents) handle(i uint64, n uint32) error {
	if n < abi.SizeEvent {
		return fmt.Errorf("queue %d: event of %d bytes, expected %d", abi.EventQueue, n, abi.SizeEvent)
	}
	var e abi.Event
	if err := decode(&e, a.bufs.Bytes()[i*abi.SizeEvent:][:abi.SizeEvent]); err != nil {
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
	a.list = append(a.list, keptEvent{Event{
		Type: EventType(e.Type), Handle: e.Handle, VA: e.VA, Length: e.Length, Key: e.Key, Access: Access(e.Access),
		Token: e.Token,
	}, i})
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

// next removes the oldest event, if there is one.
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

// NextEvent waits for an asynchronous event. Page faults of on-demand regions are handled by their pagers and not
// returned; those of regions with PageAbsent entries (RegisterPages) are, and the caller answers them with ResumeFault.
// When the device becomes unusable, NextEvent fails with Device.Err. Ignore events of types that this package does not
// name: the device is of a later release.
func (d *Device) NextEvent(ctx context.Context) (Event, error) {
	if err := d.users.enter(); err != nil {
		return Event{}, err
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
			return Event{}, ctx.Err()
		case <-d.done:
			return Event{}, d.Err()
		}
	}
}

// startCEQ starts the goroutine that serves the completion event queue with virtqueue number index.
func (d *Device) startCEQ(index int) error {
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

// onCompletion forwards a completion event of n bytes to its CQ.
func (d *Device) onCompletion(b []byte, n uint32) error {
	if n < abi.SizeCEQE {
		return fmt.Errorf("completion event of %d bytes, expected %d", n, abi.SizeCEQE)
	}
	var e abi.CEQE
	if err := decode(&e, b[:abi.SizeCEQE]); err != nil {
		return err
	}
	d.mu.Lock()
	cq := d.cqs[e.CQN]
	d.mu.Unlock()
	if cq != nil { // otherwise it has been destroyed
		select {
		case cq.event <- struct{}{}:
		default:
		}
	}
	return nil
}
