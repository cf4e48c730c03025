package web

import (
	"crypto/tls"
	"net"
	"net/http"
	"sync"
)

// places is a listener with a number of places for connections. When all are taken, a new connection gets the place of
// the one that has been without a request for the longest time: before its first request, the handshake of TLS
// included, or since the last response. That one is closed, so clients that do nothing keep nobody away. While all
// connections have a request in progress, the new one waits.
//
// New connections have TLS if there is a configuration for it.
type places struct {
	net.Listener
	most int
	tls  func() *tls.Config

	mu     sync.Mutex
	closed bool
	freed  sync.Cond // a place, or a connection's end of work, or closed
	taken  map[net.Conn]*place
	count  uint64
}

// place is that of a connection.
type place struct {
	raw  net.Conn // below TLS
	busy bool     // with a request
	// since orders the places that are not busy by the time from which they are not.
	since uint64
}

func newPlaces(l net.Listener, most int, config func() *tls.Config) *places {
	p := &places{Listener: l, most: most, tls: config, taken: map[net.Conn]*place{}}
	p.freed.L = &p.mu
	return p
}

// Accept implements net.Listener.
func (p *places) Accept() (net.Conn, error) {
	raw, err := p.Listener.Accept()
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.taken) >= p.most && !p.evictLocked() {
		if p.closed {
			_ = raw.Close()
			return nil, net.ErrClosed
		}
		p.freed.Wait()
	}
	c := raw
	if config := p.tls(); config != nil {
		c = tls.Server(raw, config)
	}
	p.taken[c] = &place{raw: raw, since: p.nextLocked()}
	return c, nil
}

// evictLocked closes the connection that has been without a request for the longest time; false: there is none.
func (p *places) evictLocked() bool {
	var oldest net.Conn
	for c, x := range p.taken {
		if !x.busy && (oldest == nil || x.since < p.taken[oldest].since) {
			oldest = c
		}
	}
	if oldest == nil {
		return false
	}
	_ = p.taken[oldest].raw.Close() // not oldest, which would wait to tell the other side
	delete(p.taken, oldest)
	return true
}

func (p *places) nextLocked() uint64 {
	p.count++
	return p.count
}

// state is http.Server.ConnState.
func (p *places) state(c net.Conn, s http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	x := p.taken[c]
	switch {
	case x == nil: // evicted
	case s == http.StateActive:
		x.busy = true
	case s == http.StateIdle:
		x.busy, x.since = false, p.nextLocked()
		p.freed.Signal()
	case s == http.StateClosed || s == http.StateHijacked:
		delete(p.taken, c)
		p.freed.Signal()
	}
}

// Close implements net.Listener.
func (p *places) Close() error {
	p.mu.Lock()
	p.closed = true
	p.freed.Broadcast()
	p.mu.Unlock()
	return p.Listener.Close()
}
