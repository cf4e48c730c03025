package web

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil/testca"
)

// silent opens connections that send text and then nothing; within TLS, if there is a configuration for it. The server
// may close them.
func (s *stage) silent(n int, text string, config *tls.Config) {
	s.t.Helper()
	for range n {
		c, err := net.Dial("unix", s.path)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { _ = c.Close() })
		if config != nil {
			secure := tls.Client(c, config)
			if err := secure.Handshake(); err != nil {
				s.t.Fatal(err)
			}
			c = secure
		}
		if _, err := io.WriteString(c, text); err != nil {
			s.t.Fatal(err)
		}
	}
}

// patient makes a server end no connection by itself.
func patient(s *http.Server) {
	s.ReadHeaderTimeout, s.ReadTimeout, s.IdleTimeout, s.WriteTimeout = time.Hour, time.Hour, time.Hour, time.Hour
}

// TestSilentClients: clients that begin no handshake, do not finish it, send no request or only a part of one, or keep
// a connection after a response, keep nobody away, however many they are.
func TestSilentClients(t *testing.T) {
	ca := testca.New(t)
	for name, x := range map[string]struct {
		secure bool
		text   string
		within *tls.Config // the text is sent within TLS
	}{
		"nothing":                {true, "", nil},
		"the handshake's header": {true, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", nil},
		"no request":             {true, "", ca.Client(t, "vnicd.example", nil)},
		"half a request":         {true, "GET /healthz HTTP/1.1\r\nHost: local", ca.Client(t, "vnicd.example", nil)},
		"a request": {true, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
			ca.Client(t, "vnicd.example", nil)},
		"nothing without TLS": {false, "", nil},
		"half without TLS":    {false, "GET /healthz HTTP/1.1\r\nHost: local", nil},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{}
			if x.secure {
				cfg.Rules = rulesFor(t, ca)
			}
			s := startStage(t, cfg, answerYes, patient)
			client, url := &s.client, "http://localhost/healthz"
			if x.secure {
				client, url = s.over(ca.Client(t, "vnicd.example", nil)), "https://localhost/healthz"
			}
			client.Timeout = time.Minute
			for range 5 {
				s.silent(maxClients, x.text, x.within)
				resp, text, err := fetch(t, client, url, nil)
				if err != nil || resp.StatusCode != http.StatusOK || text != "yes" {
					t.Errorf("%v, %+v, %q", err, resp, text)
				}
				client.CloseIdleConnections()
			}
		})
	}
}

// TestBusyClients: connections with a request in progress keep their places; a further one waits for one of them.
func TestBusyClients(t *testing.T) {
	l := &fakeListener{conns: make(chan net.Conn, 3), closed: make(chan struct{})}
	p := newPlaces(l, 2, func() *tls.Config { return nil })
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
