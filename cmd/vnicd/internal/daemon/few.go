package daemon

import (
	"net"
	"sync"
)

// statusClients bounds the connections to the status socket, so that those who only ask cannot use up the daemon's
// descriptors. Further ones wait in the socket's backlog. The control socket has no such bound: who may change
// everything is not kept out by those who may not.
const statusClients = 64

// few is a listener with a bound on the connections that are open at once.
type few struct {
	net.Listener
	free   chan struct{} // has an element for each open connection
	closed chan struct{}
	once   sync.Once
}

func newFew(l net.Listener, n int) net.Listener {
	return &few{Listener: l, free: make(chan struct{}, n), closed: make(chan struct{})}
}

// Accept implements net.Listener.
func (f *few) Accept() (net.Conn, error) {
	select {
	case f.free <- struct{}{}:
	case <-f.closed:
		return nil, net.ErrClosed
	}
	c, err := f.Listener.Accept()
	if err != nil {
		<-f.free
		return nil, err
	}
	return &fewConn{Conn: c, of: f}, nil
}

// Close implements net.Listener.
func (f *few) Close() error {
	f.once.Do(func() { close(f.closed) })
	return f.Listener.Close()
}

type fewConn struct {
	net.Conn
	of   *few
	once sync.Once
}

// Close implements net.Conn.
func (c *fewConn) Close() error {
	c.once.Do(func() { <-c.of.free })
	return c.Conn.Close()
}
