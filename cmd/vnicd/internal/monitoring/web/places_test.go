package web

import (
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
)

// silent opens connections that send text and then nothing. The server may close them.
func (s *stage) silent(n int, text string) {
	s.t.Helper()
	for range n {
		c, err := net.Dial("unix", s.path)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { _ = c.Close() })
		if _, err := io.WriteString(c, text); err != nil {
			s.t.Fatal(err)
		}
	}
}

// TestSilentClients: clients that send no request or only a part of one, or keep a connection after a response, keep
// nobody away, however many they are.
func TestSilentClients(t *testing.T) {
	for name, text := range map[string]string{"nothing": "", "half a request": "GET /healthz HTTP/1.1\r\nHost: local",
		"a request": "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, Config{}, func(_ *query.Query, _ *query.Writer) error { return nil })
			// Sooner than the server would end a connection by itself.
			s.client.Timeout = 4 * time.Second
			for range 5 {
				s.silent(maxClients, text)
				if resp, _, err := s.get("/healthz"); err != nil || resp.StatusCode != http.StatusOK {
					t.Errorf("%v, %+v", err, resp)
				}
			}
		})
	}
}

// TestBusyClients: connections with a request in progress keep their places; a further one waits for one of them.
func TestBusyClients(t *testing.T) {
	l := &fakeListener{conns: make(chan net.Conn, 3), closed: make(chan struct{})}
	p := newPlaces(l, 2)
	accepted := make(chan net.Conn, 3)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := p.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	})
	connect := func() (client net.Conn) {
		server, client := net.Pipe()
		t.Cleanup(func() { _ = client.Close() })
		l.conns <- server
		return client
	}
	gone := func(c net.Conn) bool {
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		_, err := c.Read(make([]byte, 1))
		return err == io.EOF
	}
	one := connect()
	a := <-accepted
	two := connect()
	b := <-accepted
	p.state(a, http.StateActive)
	p.state(b, http.StateActive)
	three := connect()
	select {
	case <-accepted:
		t.Fatal("a third connection")
	case <-time.After(50 * time.Millisecond): // for what must not happen
	}
	p.state(b, http.StateIdle)
	c := <-accepted
	if gone(one) || !gone(two) || gone(three) {
		t.Errorf("closed: %v, %v, %v, want the idle one", gone(one), gone(two), gone(three))
	}
	p.state(b, http.StateClosed) // which has no place any more
	p.state(c, http.StateActive)
	connect()
	p.state(a, http.StateClosed)
	<-accepted
	p.state(c, http.StateIdle)
	if len(p.taken) != 2 {
		t.Errorf("%d places are taken", len(p.taken))
	}
	connect() // takes that which was never used
	d := <-accepted
	p.state(d, http.StateActive)
	p.state(c, http.StateActive)
	connect() // waits, until
	_ = p.Close()
	serving.Wait()
}

// fakeListener accepts what it is given.
type fakeListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (l *fakeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *fakeListener) Close() error   { close(l.closed); return nil }
func (l *fakeListener) Addr() net.Addr { return &net.UnixAddr{} }
