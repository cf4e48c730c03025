package rstream_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/guestdrv/rstream"
)

// liar is a peer that speaks the protocol itself, and not as it should. It has one buffer: 4 KiB to receive, then its
// target SGL.
type liar struct {
	*rdmacm.Conn
	buf   *guestdrv.Buffer
	hello []byte // the other end's
}

const (
	liarReceive = 4096
	helloLen    = 40
)

// good returns private data that is as it should be.
func (x *liar) good(mr *guestdrv.MR) []byte {
	b := make([]byte, helloLen)
	b[0] = 1
	binary.BigEndian.PutUint16(b[2:], 100)
	binary.BigEndian.PutUint64(b[8:], mr.Addr()+liarReceive)
	binary.BigEndian.PutUint32(b[16:], mr.RKey())
	binary.BigEndian.PutUint32(b[20:], 2)
	binary.BigEndian.PutUint64(b[24:], mr.Addr())
	binary.BigEndian.PutUint32(b[32:], mr.RKey())
	binary.BigEndian.PutUint32(b[36:], liarReceive/2)
	return b
}

// dialLiar connects a liar with the pair's listener, after change has been at its private data.
func (p *pair) dialLiar(tb testing.TB, change func(hello []byte)) (*liar, error) {
	tb.Helper()
	x := &liar{}
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	var err error
	x.buf, err = p.a.Device().Alloc(2 * liarReceive)
	must(err)
	mr, err := p.a.PD().Register(rig.Context(tb), x.buf, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	must(err)
	hello := x.good(mr)
	change(hello)
	x.Conn, err = p.a.Dial(rig.Context(tb), p.listener.Addr().String(), rdmacm.Params{PrivateData: hello,
		QP:     guestdrv.QPConfig{MaxSendWR: 64, MaxRecvWR: 64, MaxInline: 64, SigAll: true},
		Access: guestdrv.AccessRemoteWrite, Prepare: func(c *rdmacm.Conn) error {
			for range 64 {
				if err := c.QP().PostRecv(guestdrv.NewRecv(1)); err != nil {
					return err
				}
			}
			return nil
		}})
	tb.Cleanup(func() {
		if x.Conn != nil {
			must(x.Close())
		}
		must(mr.Close())
		must(x.buf.Close())
	})
	if err == nil {
		x.hello = x.PrivateData()
	}
	return x, err
}

// place is off bytes behind the beginning of the other end's receive buffer.
func (x *liar) place(off int) guestdrv.Remote {
	return guestdrv.Remote{Addr: binary.BigEndian.Uint64(x.hello[24:]) + uint64(off),
		RKey: binary.BigEndian.Uint32(x.hello[32:])}
}

// say posts a WRITE with immediate data.
func (x *liar) say(tb testing.TB, to guestdrv.Remote, message uint32, data string) {
	tb.Helper()
	var imm [4]byte
	binary.BigEndian.PutUint32(imm[:], message)
	wr := guestdrv.NewWriteImm(2, to, imm)
	if data != "" {
		wr.Inline = []byte(data)
	}
	if err := x.QP().PostSend(wr); err != nil {
		tb.Fatal(err)
	}
}

func nothing([]byte) {}

// A peer that violates the protocol ends its own connection, and this end's program learns why. Data that had arrived
// can be read before. Other connections are not affected.
func TestHostilePeer(t *testing.T) {
	p := newPair(t, rstream.Config{})
	ga, gb := p.connect(t, rstream.Config{})
	other, err := p.dialLiar(t, nothing)
	if err != nil {
		t.Fatal(err)
	}
	otherConn, err := p.listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer otherConn.Close()
	message := func(m uint32) func(*liar) {
		return func(x *liar) { x.say(t, guestdrv.Remote{}, m, "") }
	}
	for name, tc := range map[string]struct {
		act  func(x *liar)
		want error
		text string
	}{
		"more data than announced": {message(1 << 28), rstream.ErrProtocol, "the announced buffer has 65531"},
		"empty data":               {message(0), rstream.ErrProtocol, "0 bytes"},
		"credits":                  {message(4<<29 | 5000), rstream.ErrProtocol, "at most 100 more"},
		"iomap":                    {message(6 << 29), rstream.ErrProtocol, "announced 0 iomaps"},
		"reserved":                 {message(3 << 29), rstream.ErrProtocol, "reserved operation 3"},
		"control":                  {message(7<<29 | 77), rstream.ErrProtocol, "control code 77"},
		"outside memory":           {func(x *liar) { x.say(t, x.place(1<<30), 1, "x") }, rstream.ErrReset, ""},
		"another's key":            {func(x *liar) { x.say(t, other.place(0), 1, "x") }, rstream.ErrReset, ""},
		"a message without WRITE": {func(x *liar) {
			if err := x.QP().PostSend(guestdrv.NewSend(3)); err != nil {
				t.Fatal(err)
			}
		}, rstream.ErrProtocol, "expected a WRITE with immediate data"},
		"gone without DISCONNECT": {func(x *liar) {
			if err := x.Disconnect(rig.Context(t)); err != nil {
				t.Fatal(err)
			}
		}, rstream.ErrReset, rdmacm.ErrPeerDisconnected.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			x, err := p.dialLiar(t, nothing)
			if err != nil {
				t.Fatal(err)
			}
			c, err := p.listener.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			x.greet(t, c)
			tc.act(x)
			for _, f := range []func([]byte) (int, error){c.Read, c.Write} {
				var err error
				rig.Until(t, "the violation is noticed", func() bool {
					_, err = f(make([]byte, 1))
					return err != nil
				})
				var op *net.OpError
				if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) || !errors.As(err, &op) {
					t.Errorf("%v, expected %v, %q", err, tc.want, tc.text)
				}
			}
			<-x.Done() // the liar's connection has ended
		})
	}
	talk(t, ga, gb)
	other.greet(t, otherConn)
}

// greet sends a few bytes as the protocol wants it.
func (x *liar) greet(tb testing.TB, c net.Conn) {
	tb.Helper()
	x.say(tb, x.place(0), 5, "hello")
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
		tb.Fatalf("%q, %v", b, err)
	}
}

// Private data that is not as it should be: the request is rejected with the reason, and a reply ends the connection.
func TestHostileHello(t *testing.T) {
	p := newPair(t, rstream.Config{})
	_, err := p.dialLiar(t, func(hello []byte) { hello[0] = 9 })
	var e *rdmacm.RejectError
	if !errors.As(err, &e) || e.Reason != rdmacm.RejectConsumer ||
		!strings.Contains(string(e.PrivateData), "version 9, expected 1") {
		t.Errorf("a request: %v", err)
	}
	l, err := p.b.Listen(port+1, rdmacm.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan *rdmacm.Conn, 1)
	go func() {
		var c *rdmacm.Conn
		if req, err := l.Accept(rig.Context(t)); err == nil {
			c, _ = req.Accept(rig.Context(t), rdmacm.Params{PrivateData: []byte("something else")})
		}
		accepted <- c
	}()
	if _, err := rstream.Dial(rig.Context(t), p.a, "10.0.0.2:7472", rstream.Config{}); !errors.Is(err,
		rstream.ErrProtocol) || !strings.Contains(err.Error(), "version 115, expected 1") {
		t.Errorf("a reply: %v", err)
	}
	if c := <-accepted; c != nil {
		<-c.Done()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// Keys and addresses in this end's target SGL that mean nothing at the peer harm only this connection.
func TestHostileSGL(t *testing.T) {
	p := newPair(t, rstream.Config{})
	x, err := p.dialLiar(t, func(hello []byte) { hello[32]++ }) // another key for the receive buffer
	if err != nil {
		t.Fatal(err)
	}
	c, err := p.listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := c.Write([]byte("x")); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, rstream.ErrReset) ||
		!errors.Is(err, guestdrv.WCRemAccessErr) {
		t.Errorf("%v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	<-x.Done()
}

// A peer that does not answer any more after its request holds up no other, and is forgotten after HandshakeTimeout.
func TestSilentPeer(t *testing.T) {
	p := newPair(t, rstream.Config{HandshakeTimeout: 100 * time.Millisecond})
	silent := p.net.Manager(t, 2, rdmacm.Config{})
	before := p.net.Hosts[1].Objects()
	c, err := rstream.Dial(rig.Context(t), silent, p.listener.Addr().String(), rstream.Config{}) // resolves the address
	if err != nil {
		t.Fatal(err)
	}
	x, err := p.listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{c, x} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	rig.Until(t, "the connection has ended", func() bool { return p.net.Hosts[1].Objects() == before })
	p.net.Hosts[2].Port.SetHCA(nil) // it receives nothing
	ctx, cancel := context.WithCancel(rig.Context(t))
	dialed := make(chan error, 1)
	go func() {
		_, err := rstream.Dial(ctx, silent, p.listener.Addr().String(), rstream.Config{})
		dialed <- err
	}()
	rig.Until(t, "the request is being accepted", func() bool { return p.net.Hosts[1].Objects() != before })
	a, b := p.connect(t, rstream.Config{})
	talk(t, a, b)
	for _, c := range []net.Conn{a, b} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	rig.Until(t, "the request is forgotten", func() bool { return p.net.Hosts[1].Objects() == before })
	cancel()
	if err := <-dialed; !errors.Is(err, context.Canceled) {
		t.Errorf("Dial: %v", err)
	}
}

// talk sends a line in each direction.
func talk(tb testing.TB, a, b net.Conn) {
	tb.Helper()
	for _, x := range [][2]net.Conn{{a, b}, {b, a}} {
		if _, err := x[0].Write([]byte("hello")); err != nil {
			tb.Fatal(err)
		}
		got := make([]byte, 5)
		if _, err := io.ReadFull(x[1], got); err != nil || string(got) != "hello" {
			tb.Fatalf("%q, %v", got, err)
		}
	}
}
