package rdmacm_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

const port = 7471

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// end is an application with its connection manager.
type end struct {
	*rdmacm.Manager
	h *rig.Host
}

func open(tb testing.TB, r *rig.Network, i int, cfg rdmacm.Config) *end {
	tb.Helper()
	return &end{r.Manager(tb, i, cfg), r.Hosts[i]}
}

// listen opens the port of an end.
func (e *end) listen(tb testing.TB, backlog int) *rdmacm.Listener {
	tb.Helper()
	l, err := e.Listen(port, rdmacm.ListenConfig{Backlog: backlog})
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

// dialed is the result of Dial.
type dialed struct {
	conn *rdmacm.Conn
	err  error
}

// dial dials in the background.
func (e *end) dial(ctx context.Context, to string, p rdmacm.Params) <-chan dialed {
	c := make(chan dialed, 1)
	go func() {
		conn, err := e.Dial(ctx, to, p)
		c <- dialed{conn, err}
	}()
	return c
}

// connect connects a to b's port.
func connect(tb testing.TB, a, b *end, l *rdmacm.Listener, pa, pb rdmacm.Params) (ca, cb *rdmacm.Conn) {
	tb.Helper()
	ctx := rig.Context(tb)
	d := a.dial(ctx, l.Addr().String(), pa)
	r, err := l.Accept(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	if cb, err = r.Accept(ctx, pb); err != nil {
		tb.Fatal(err)
	}
	x := <-d
	if x.err != nil {
		tb.Fatal(x.err)
	}
	return x.conn, cb
}

// poll returns the next completion.
func poll(tb testing.TB, cq *guestdrv.CQ) guestdrv.Completion {
	tb.Helper()
	wcs := make([]guestdrv.Completion, 1)
	if _, err := cq.PollWait(rig.Context(tb), wcs); err != nil {
		tb.Fatal(err)
	}
	return wcs[0]
}

// memory makes registered memory.
func (e *end) memory(tb testing.TB, access guestdrv.Access) (*guestdrv.Buffer, *guestdrv.MR) {
	tb.Helper()
	b, err := e.Device().Alloc(4096)
	if err != nil {
		tb.Fatal(err)
	}
	mr, err := e.PD().Register(rig.Context(tb), b, access)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { // before the Manager's, which closes the PD
		if err := mr.Close(); err != nil {
			tb.Error(err)
		}
		if err := b.Close(); err != nil {
			tb.Error(err)
		}
	})
	return b, mr
}

// Two applications connect, learn each other's private data and parameters, exchange messages and disconnect. Both
// devices have observed the connection, with its tuple (PF-4, MT-10; MT-3 to MT-5).
func TestConnection(t *testing.T) {
	r := rig.New(t, 2)
	a, b := open(t, r, 0, rdmacm.Config{}), open(t, r, 1, rdmacm.Config{})
	l := b.listen(t, 0)
	out, omr := a.memory(t, guestdrv.AccessLocalWrite)
	in, imr := b.memory(t, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	ca, cb := connect(t, a, b, l,
		rdmacm.Params{PrivateData: []byte("request"), InitiatorDepth: 3, ResponderResources: rdmacm.None},
		rdmacm.Params{PrivateData: []byte("reply"), Access: guestdrv.AccessRemoteWrite, ResponderResources: 2,
			Prepare: func(c *rdmacm.Conn) error { return c.QP().PostRecv(guestdrv.NewRecv(1, imr.SGE(0, 100))) }})
	if got := cb.PrivateData(); !bytes.HasPrefix(got, []byte("request\x00")) || len(got) != rdmacm.MaxPrivateREQ {
		t.Errorf("private data of the request: %q", got)
	}
	if got := ca.PrivateData(); !bytes.HasPrefix(got, []byte("reply\x00")) || len(got) != rdmacm.MaxPrivateREP {
		t.Errorf("private data of the reply: %q", got)
	}
	if ca.RemoteAddr() != l.Addr() || cb.LocalAddr() != l.Addr() || ca.LocalAddr() != cb.RemoteAddr() ||
		ca.LocalAddr().Addr() != a.Addr() {
		t.Errorf("addresses: %v to %v, %v to %v", ca.LocalAddr(), ca.RemoteAddr(), cb.LocalAddr(), cb.RemoteAddr())
	}
	for _, x := range []struct {
		c                *rdmacm.Conn
		depth, responder uint8
	}{{ca, 2, 0}, {cb, 0, 2}} {
		attr, err := x.c.QP().Query(rig.Context(t))
		if err != nil {
			t.Fatal(err)
		}
		if x.c.InitiatorDepth() != x.depth || x.c.ResponderResources() != x.responder || attr.MaxRdAtomic != x.depth ||
			attr.MaxDestRdAtomic != x.responder || attr.State != guestdrv.QPRTS || attr.RetryCnt != 7 || attr.RNRRetry != 7 ||
			attr.PathMTU != guestdrv.MTU1024 || attr.Timeout != 14 {
			t.Errorf("depth %d, responder resources %d, %+v", x.c.InitiatorDepth(), x.c.ResponderResources(), attr)
		}
	}
	for _, x := range []struct {
		e    *end
		c    *rdmacm.Conn
		role string
	}{{a, ca, "active"}, {b, cb, "passive"}} {
		rig.Until(t, "the device has seen the connection", func() bool {
			for _, c := range x.e.h.HCA.Connections() {
				if c.LocalQPN == x.c.QP().Number() && c.State == "established" && c.Role == x.role && c.Tuple != nil &&
					c.Tuple.VNI == 7 && c.Service == "tcp 7471" {
					return true
				}
			}
			return false
		})
	}

	copy(out.Bytes(), "hello")
	send := guestdrv.NewSend(2, omr.SGE(0, 5)).With(guestdrv.SendSignaled)
	if err := ca.QP().PostSend(send); err != nil {
		t.Fatal(err)
	}
	if wc := poll(t, ca.SendCQ()); wc.Err() != nil || wc.ID != 2 {
		t.Fatalf("%+v", wc)
	}
	if wc := poll(t, cb.RecvCQ()); wc.Err() != nil || wc.ByteLen != 5 || string(in.Bytes()[:5]) != "hello" {
		t.Fatalf("%+v, %q", wc, in.Bytes()[:5])
	}
	write := guestdrv.NewWrite(3, imr.Remote(100), omr.SGE(0, 5)).With(guestdrv.SendSignaled)
	if err := ca.QP().PostSend(write); err != nil {
		t.Fatal(err)
	}
	if wc := poll(t, ca.SendCQ()); wc.Err() != nil || string(in.Bytes()[100:105]) != "hello" {
		t.Fatalf("%+v, %q", wc, in.Bytes()[100:105])
	}

	// The peer's outstanding requests complete when the connection ends.
	if err := cb.QP().PostRecv(guestdrv.NewRecv(4, imr.SGE(0, 100))); err != nil {
		t.Fatal(err)
	}
	if ca.Err() != nil || cb.Err() != nil {
		t.Errorf("errors of an open connection: %v, %v", ca.Err(), cb.Err())
	}
	if err := ca.Disconnect(rig.Context(t)); err != nil {
		t.Fatal(err)
	}
	<-cb.Done()
	if wc := poll(t, cb.RecvCQ()); wc.ID != 4 || wc.Status != guestdrv.WCWRFlushErr {
		t.Errorf("%+v", wc)
	}
	if !errors.Is(cb.Err(), rdmacm.ErrPeerDisconnected) || !errors.Is(ca.Err(), rdmacm.ErrClosed) {
		t.Errorf("%v, %v", ca.Err(), cb.Err())
	}
	for range 2 {
		for _, c := range []*rdmacm.Conn{ca, cb} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	for _, e := range []*end{a, b} {
		rig.Until(t, "nothing is left", func() bool { return e.Connections() == 0 })
		if n := e.Counters(); n.Malformed+n.Refused+n.Unsent != 0 {
			t.Errorf("%+v", n)
		}
		if d := e.h.HCA.Drops(); d["cm-peer"]+d["cm-message"]+d["cm-gid"]+d["cm-mac"] != 0 {
			t.Errorf("drops %v", d)
		}
	}
}

// Rejections have their reasons, for errors.Is, and private data.
func TestRejections(t *testing.T) {
	r := rig.New(t, 2)
	a, b := open(t, r, 0, rdmacm.Config{}), open(t, r, 1, rdmacm.Config{})
	ctx := rig.Context(t)
	if _, err := a.Dial(ctx, "10.0.0.2:7471", rdmacm.Params{}); !errors.Is(err, rdmacm.RejectServiceID) {
		t.Errorf("nobody listens: %v", err)
	}
	l := b.listen(t, 2)
	if _, err := b.Listen(port, rdmacm.ListenConfig{}); !errors.Is(err, rdmacm.ErrInUse) {
		t.Errorf("a second listener: %v", err)
	}
	d := a.dial(ctx, l.Addr().String(), rdmacm.Params{})
	req, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := req.Reject(rdmacm.RejectConsumer, []byte("no")); err != nil {
		t.Fatal(err)
	}
	var e *rdmacm.RejectError
	if x := <-d; !errors.Is(x.err, rdmacm.RejectConsumer) || !errors.As(x.err, &e) ||
		!bytes.HasPrefix(e.PrivateData, []byte("no\x00")) {
		t.Errorf("rejected by the program: %v", x.err)
	}
	if _, err := req.Accept(ctx, rdmacm.Params{}); !errors.Is(err, rdmacm.RejectConsumer) {
		t.Errorf("accepted after the rejection: %v", err)
	}

	// A full backlog; then the listener closes.
	var waiting []<-chan dialed
	for range 2 {
		waiting = append(waiting, a.dial(ctx, l.Addr().String(), rdmacm.Params{}))
	}
	rig.Until(t, "the backlog is full", func() bool { return b.Connections() == 2+1 }) // the rejected one is remembered
	if _, err := a.Dial(ctx, l.Addr().String(), rdmacm.Params{}); !errors.Is(err, rdmacm.RejectNoResources) {
		t.Errorf("backlog full: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	for _, w := range waiting {
		if x := <-w; !errors.Is(x.err, rdmacm.RejectServiceID) {
			t.Errorf("the listener has closed: %v", x.err)
		}
	}
	if _, err := l.Accept(ctx); !errors.Is(err, rdmacm.ErrClosed) {
		t.Errorf("Accept of a closed listener: %v", err)
	}

	// Arguments.
	for _, address := range []string{"", "10.0.0.2", "10.0.0.2:0", "host:7471", "0.0.0.0:1", "224.0.0.1:1",
		"[fe80::1%eth0]:1", "[fd00::1]:7471"} {
		if _, err := a.Dial(ctx, address, rdmacm.Params{}); !errors.Is(err, rdmacm.ErrInvalid) {
			t.Errorf("Dial %q: %v", address, err)
		}
	}
	for name, p := range map[string]rdmacm.Params{
		"private data": {PrivateData: make([]byte, rdmacm.MaxPrivateREQ+1)},
		"retries":      {RetryCount: 8},
		"MTU":          {MTU: guestdrv.MTU4096},
		"ACK timeout":  {ACKTimeout: 32},
	} {
		if _, err := a.Dial(ctx, "10.0.0.2:7471", p); !errors.Is(err, rdmacm.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	failure := errors.New("not prepared")
	failing := rdmacm.Params{Prepare: func(*rdmacm.Conn) error { return failure }}
	if _, err := a.Dial(ctx, "10.0.0.2:7471", failing); err != failure {
		t.Errorf("Prepare fails: %v", err)
	}
}

// A context that ends while Dial or Accept waits: the peer is told, and everything is released.
func TestCancelled(t *testing.T) {
	r := rig.New(t, 2)
	a, b := open(t, r, 0, rdmacm.Config{}), open(t, r, 1, rdmacm.Config{})
	l := b.listen(t, 0)
	ctx, cancel := context.WithCancel(rig.Context(t))
	d := a.dial(ctx, l.Addr().String(), rdmacm.Params{})
	req, err := l.Accept(rig.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if x := <-d; !errors.Is(x.err, context.Canceled) {
		t.Errorf("Dial: %v", x.err)
	}
	rig.Until(t, "the other end knows", func() bool { return b.Connections() == 0 })
	if _, err := req.Accept(rig.Context(t), rdmacm.Params{}); !errors.Is(err, rdmacm.RejectTimeout) {
		t.Errorf("Accept of a request that is gone: %v", err)
	}
	if _, err := l.Accept(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Accept: %v", err)
	}
	// Nobody has the address.
	ctx, cancel = context.WithCancel(rig.Context(t))
	d = a.dial(ctx, "10.0.0.99:7471", rdmacm.Params{})
	cancel()
	if x := <-d; !errors.Is(x.err, context.Canceled) {
		t.Errorf("Dial an address that nobody has: %v", x.err)
	}
}

// Close interrupts calls that wait, and releases everything: a new manager can start at once.
func TestClose(t *testing.T) {
	r := rig.New(t, 2)
	a, b := open(t, r, 0, rdmacm.Config{}), open(t, r, 1, rdmacm.Config{})
	l := b.listen(t, 0)
	ca, cb := connect(t, a, b, l, rdmacm.Params{}, rdmacm.Params{})
	d := a.dial(rig.Context(t), l.Addr().String(), rdmacm.Params{})
	rig.Until(t, "the request has arrived", func() bool { return b.Connections() == 2 })
	lost := a.dial(rig.Context(t), "10.0.0.99:7471", rdmacm.Params{})
	accepting := make(chan error, 1)
	la := a.listen(t, 0)
	go func() {
		_, err := la.Accept(context.Background())
		accepting <- err
	}()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	for _, x := range []dialed{<-d, <-lost} {
		if !errors.Is(x.err, rdmacm.ErrClosed) {
			t.Errorf("Dial: %v", x.err)
		}
	}
	if err := <-accepting; !errors.Is(err, rdmacm.ErrClosed) {
		t.Errorf("Accept: %v", err)
	}
	<-ca.Done()
	<-cb.Done() // the DREQ has left before
	if !errors.Is(cb.Err(), rdmacm.ErrPeerDisconnected) || !errors.Is(ca.Err(), rdmacm.ErrClosed) {
		t.Errorf("%v, %v", ca.Err(), cb.Err())
	}
	if _, err := a.Dial(rig.Context(t), l.Addr().String(), rdmacm.Params{}); !errors.Is(err, rdmacm.ErrClosed) {
		t.Errorf("Dial after Close: %v", err)
	}
	if _, err := a.Listen(1, rdmacm.ListenConfig{}); !errors.Is(err, rdmacm.ErrClosed) {
		t.Errorf("Listen after Close: %v", err)
	}
	if o := a.h.Objects(); o != (rig.Objects{}) {
		t.Errorf("left: %+v", o)
	}
	again, err := rdmacm.New(rig.Context(t), a.Device(), rdmacm.Config{Address: a.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	a.Manager = again
	defer again.Close()
	d = a.dial(rig.Context(t), l.Addr().String(), rdmacm.Params{})
	req, err := l.Accept(rig.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := req.Accept(rig.Context(t), rdmacm.Params{}); err != nil {
		t.Fatal(err)
	}
	if x := <-d; x.err != nil {
		t.Fatal(x.err)
	}
}

// A device whose process dies in any state: the other end releases what it has, by its own timeouts.
func TestPeerGone(t *testing.T) {
	fast := rdmacm.Config{ResponseTimeout: 12, MaxRetries: 3} // 17 ms
	for _, tc := range []struct {
		name string
		run  func(t *testing.T, a, b *end, l *rdmacm.Listener)
	}{
		{"before its REP", func(t *testing.T, a, b *end, l *rdmacm.Listener) {
			d := a.dial(rig.Context(t), l.Addr().String(), rdmacm.Params{})
			if _, err := l.Accept(rig.Context(t)); err != nil {
				t.Fatal(err)
			}
			b.h.Kill()
			if x := <-d; !errors.Is(x.err, rdmacm.ErrTimeout) {
				t.Errorf("Dial: %v", x.err)
			}
		}},
		{"before its RTU", func(t *testing.T, a, b *end, l *rdmacm.Listener) {
			la := a.listen(t, 0)
			b.dial(rig.Context(t), la.Addr().String(), rdmacm.Params{})
			req, err := la.Accept(rig.Context(t))
			if err != nil {
				t.Fatal(err)
			}
			b.h.Kill()
			if _, err := req.Accept(rig.Context(t), rdmacm.Params{}); !errors.Is(err, rdmacm.ErrTimeout) {
				t.Errorf("Accept: %v", err)
			}
		}},
		{"in the backlog", func(t *testing.T, a, b *end, l *rdmacm.Listener) {
			la := a.listen(t, 0)
			b.dial(rig.Context(t), la.Addr().String(), rdmacm.Params{})
			rig.Until(t, "the request has arrived", func() bool { return a.Connections() == 1 })
			b.h.Kill()
		}},
		{"connected", func(t *testing.T, a, b *end, l *rdmacm.Listener) {
			c, _ := connect(t, a, b, l, rdmacm.Params{}, rdmacm.Params{})
			b.h.Kill()
			if err := c.Disconnect(rig.Context(t)); err != nil {
				t.Errorf("Disconnect: %v", err)
			}
			if err := c.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}},
		{"connected, closed at once", func(t *testing.T, a, b *end, l *rdmacm.Listener) {
			c, _ := connect(t, a, b, l, rdmacm.Params{}, rdmacm.Params{})
			b.h.Kill()
			if err := c.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := rig.New(t, 2)
			a, b := open(t, r, 0, fast), open(t, r, 1, fast)
			before := a.h.Objects()
			tc.run(t, a, b, b.listen(t, 0))
			rig.Until(t, "nothing is left", func() bool { return a.Connections() == 0 && a.h.Objects() == before })
		})
	}
}

var connections = flag.Int("connections", 1000, "of TestManyConnections")

// Many connections opened and closed, several at once, leave nothing behind.
func TestManyConnections(t *testing.T) {
	r := rig.New(t, 2)
	a, b := open(t, r, 0, rdmacm.Config{}), open(t, r, 1, rdmacm.Config{})
	l := b.listen(t, 0)
	before := []rig.Objects{a.h.Objects(), b.h.Objects()}
	const workers = 8
	each := *connections / workers
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				req, err := l.Accept(rig.Context(t))
				if err != nil {
					t.Error(err)
					return
				}
				c, err := req.Accept(rig.Context(t), rdmacm.Params{})
				if err != nil {
					t.Error(err)
					return
				}
				<-c.Done()
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range each {
				c, err := a.Dial(rig.Context(t), l.Addr().String(), rdmacm.Params{})
				if err != nil {
					t.Error(err)
					return
				}
				if err := c.Disconnect(rig.Context(t)); err != nil {
					t.Error(err)
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for i, e := range []*end{a, b} {
		rig.Until(t, "nothing is left", func() bool { return e.Connections() == 0 })
		if o := e.h.Objects(); o != before[i] {
			t.Errorf("objects %+v, before %+v", o, before[i])
		}
	}
}
