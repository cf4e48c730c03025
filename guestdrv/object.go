package guestdrv

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// object is the device's part of a PD, CQ, SRQ, QP, region or window: a handle and the memory that the device uses for
// it. The memory is released only once the device has confirmed that the object is destroyed.
type object struct {
	d       *Device
	destroy abi.Opcode
	handle  uint32
	free    func() // releases the memory; called once; must neither block nor issue commands; or nil

	mu      sync.Mutex
	closed  bool          // guarded by mu
	pending chan struct{} // closed when the outstanding destroy command is answered; guarded by mu
	err     error         // outcome of the latest destroy command; guarded by mu
}

// creation is a command that makes an object.
type creation struct {
	request
	resp    decoder
	handle  func(payload []byte) uint32 // of the object, in a valid response; nil: the first word
	destroy abi.Opcode
	free    func() // releases the memory that was allocated for the object, see object
}

// create issues c. If it fails, the memory is released once the device cannot use it: at once after a refusal; after an
// abandoned command when the late answer is a refusal, or the late object has been destroyed.
func (d *Device) create(ctx context.Context, c creation) error {
	free := c.free
	if free == nil {
		free = func() {}
	}
	c.onLate = func(payload []byte, err error) {
		if err != nil || len(payload) < abi.SizeHandle {
			free()
			return
		}
		handle := le.Uint32(payload)
		if c.handle != nil {
			handle = c.handle(payload)
		}
		d.late.add(func() {
			o := object{d: d, destroy: c.destroy, handle: handle, free: free}
			_ = o.close() // the only cause of failure is the end of the device, which releases everything
		})
	}
	abandoned, err := d.call(ctx, c.request, c.resp)
	if err != nil && !abandoned {
		free()
	}
	return err
}

// close destroys the object and releases its memory. It waits for at most Config.Timeout. It may be called again after
// a failure, and after success returns nil. Calls while a destroy command is outstanding wait for that command, because
// the device may reuse the handle as soon as it has executed it.
func (o *object) close() error {
	o.mu.Lock()
	if o.closed {
		o.mu.Unlock()
		return nil
	}
	if p := o.pending; p != nil {
		o.mu.Unlock()
		return o.await(p)
	}
	p := make(chan struct{})
	o.pending = p
	o.mu.Unlock()
	finish := func(err error) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.pending, o.err, o.closed = nil, err, err == nil
		if o.closed && o.free != nil {
			o.free()
		}
		close(p)
	}
	abandoned, err := o.d.call(context.Background(), request{
		op: o.destroy, fixed: &abi.Handle{Handle: o.handle}, size: abi.SizeHandle,
		onLate: func(_ []byte, err error) { finish(err) },
	}, nil)
	if !abandoned {
		finish(err)
	}
	return err
}

// await waits for an outstanding destroy command.
func (o *object) await(pending <-chan struct{}) error {
	d := o.d
	timeout := time.NewTimer(d.cfg.Timeout)
	defer timeout.Stop()
	select {
	case <-pending:
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.err
	case <-timeout.C:
		return fmt.Errorf("%v: %w", o.destroy, ErrTimeout)
	case <-d.done:
		return fmt.Errorf("%v: %w", o.destroy, d.Err())
	}
}

// lateWork runs functions that issue commands because of late answers, since a lateFunc may not issue them itself.
type lateWork struct {
	mu   sync.Mutex
	list []func()      // guarded by mu
	wake chan struct{} // holds a token while list may not be empty
}

func (l *lateWork) add(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, f)
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// run executes the functions one after the other until ctx ends.
func (l *lateWork) run(ctx context.Context) {
	for {
		select {
		case <-l.wake:
		case <-ctx.Done():
			return
		}
		l.mu.Lock()
		list := l.list
		l.list = nil
		l.mu.Unlock()
		for _, f := range list {
			f()
		}
	}
}
