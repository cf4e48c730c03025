package main

import (
	"context"
	"errors"
	"sync"

	"github.com/vnicd/vnicd/guestdrv"
)

// An outage is the time around a restart of a daemon in which the connections of its innocents end, and are made again.
//
//	expect      from now on the pair may lose its connection, and nothing else
//	            the daemon is killed; the pair meets errors, or nothing
//	interrupt   ends the pair's waits; it parks
//	            the daemon runs again; devices are opened, the pair connects
//	restored    the pair goes on; errors are events
type outage struct {
	once   sync.Once
	parked chan struct{} // closed when the pair's goroutine does not touch the pair any more
	over   chan struct{} // closed by restored
}

// lost reports whether err says that the connection has ended: with the device, or with a completion error that a peer
// without the queue pair causes.
func lost(err error) bool {
	for _, x := range []error{guestdrv.ErrDisconnected, guestdrv.ErrClosed, guestdrv.WCRetryExcErr, guestdrv.WCWRFlushErr,
		context.Canceled} {
		if errors.Is(err, x) {
			return true
		}
	}
	return false
}

// park gives the pair away until the outage is over, or ctx ends.
func (o *outage) park(ctx context.Context) {
	o.once.Do(func() { close(o.parked) })
	select {
	case <-o.over:
	case <-ctx.Done():
	}
}

func (p *pair) enter() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = true
}

func (p *pair) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = false
	if o := p.outage; o != nil {
		o.once.Do(func() { close(o.parked) })
	}
}

// expected returns the outage in progress, or nil.
func (p *pair) expected() *outage {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.outage
}

// expect begins an outage.
func (p *pair) expect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.outage = &outage{parked: make(chan struct{}), over: make(chan struct{})}
	if !p.running {
		p.outage.once.Do(func() { close(p.outage.parked) })
	}
}

// interrupt ends the pair's waits and returns when it is parked.
func (p *pair) interrupt() {
	o := p.expected()
	p.cut()
	<-o.parked
}

// restored ends the outage.
func (p *pair) restored() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.outage.over)
	p.outage = nil
}
