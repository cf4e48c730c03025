package rstream_test

import (
	"net"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/net/nettest"

	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/guestdrv/rstream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const port = 7471

// pair is two applications, of which the second listens; the network has a third one.
type pair struct {
	net      *rig.Network
	a, b     *rdmacm.Manager
	listener *rstream.Listener
}

func newPair(tb testing.TB, cfg rstream.Config) *pair {
	tb.Helper()
	p := &pair{net: rig.New(tb, 3)}
	p.a, p.b = p.net.Manager(tb, 0, rdmacm.Config{}), p.net.Manager(tb, 1, rdmacm.Config{})
	l, err := rstream.Listen(p.b, port, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	p.listener = l
	tb.Cleanup(func() {
		if err := l.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

// connect makes a connection, which the test closes at its end.
func (p *pair) connect(tb testing.TB, cfg rstream.Config) (a, b *rstream.Conn) {
	tb.Helper()
	a, err := rstream.Dial(rig.Context(tb), p.a, p.listener.Addr().String(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	x, err := p.listener.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	b = x.(*rstream.Conn)
	tb.Cleanup(func() {
		_ = a.Close()
		_ = b.Close()
	})
	return a, b
}

// The properties that every net.Conn has: golang.org/x/net/nettest.
func TestConn(t *testing.T) {
	for name, cfg := range map[string]rstream.Config{
		"default": {},
		"small":   {SendBuffer: 8192, ReceiveBuffer: 8192, SendQueue: 16, ReceiveQueue: 16},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, cfg)
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				a, b := p.connect(t, cfg)
				return a, b, func() { _ = a.Close(); _ = b.Close() }, nil
			})
		})
	}
}
