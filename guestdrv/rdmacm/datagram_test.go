package rdmacm_test

import (
	"context"
	"errors"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

// An application finds another one's UD queue pair, with what it says, and sends to it; a port is open once.
func TestDatagrams(t *testing.T) {
	r := rig.New(t, 2)
	a, b := open(t, r, 0, rdmacm.Config{}), open(t, r, 1, rdmacm.Config{})
	ctx := rig.Context(t)
	ud := func(e *end) (*guestdrv.QP, *guestdrv.CQ) {
		cq, err := e.Device().CreateCQ(ctx, 8, guestdrv.CQOptions{})
		if err != nil {
			t.Fatal(err)
		}
		qp, err := e.PD().CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeUD, SendCQ: cq, RecvCQ: cq})
		if err == nil {
			err = qp.StartUD(ctx, rdmacm.UDPQKey)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := errors.Join(qp.Close(), cq.Close()); err != nil {
				t.Error(err)
			}
		})
		return qp, cq
	}
	qa, _ := ud(a)
	qb, cb := ud(b)
	bufA, mrA := a.memory(t, 0)
	bufB, mrB := b.memory(t, guestdrv.AccessLocalWrite)
	if err := qb.PostRecv(guestdrv.NewRecv(1, mrB.SGE(0, guestdrv.GRHLen+5))); err != nil {
		t.Fatal(err)
	}

	address := b.Addr().String() + ":7174"
	var none *rdmacm.ResolveError
	if _, err := a.Resolve(ctx, address, nil); !errors.As(err, &none) || none.Status != 1 {
		t.Errorf("nobody serves: %v", err)
	}
	s, err := b.ServeDatagrams(7174, rdmacm.Service{QPN: qb.Number(), PrivateData: []byte("me")})
	if err != nil || s.Addr().String() != address {
		t.Fatal(s, err)
	}
	if _, err := b.ServeDatagrams(7174, rdmacm.Service{QPN: qb.Number()}); !errors.Is(err, rdmacm.ErrInUse) {
		t.Errorf("the port a second time: %v", err)
	}
	peer, err := a.Resolve(ctx, address, []byte("who"))
	if err != nil {
		t.Fatal(err)
	}
	if peer.QPN != qb.Number() || peer.QKey != rdmacm.UDPQKey || string(peer.PrivateData[:3]) != "me\x00" ||
		len(peer.PrivateData) != rdmacm.MaxPrivateService {
		t.Errorf("%+v", peer)
	}
	ah, err := a.PD().CreateAH(peer.Path)
	if err != nil {
		t.Fatal(err)
	}
	copy(bufA.Bytes(), "hello")
	to := guestdrv.Datagram{AH: ah, QPN: peer.QPN, QKey: peer.QKey}
	if err := qa.PostSend(guestdrv.NewDatagram(2, to, mrA.SGE(0, 5))); err != nil {
		t.Fatal(err)
	}
	wc := poll(t, cb)
	from, dest, ok := wc.Addresses(bufB.Bytes())
	if err := wc.Err(); err != nil || string(bufB.Bytes()[guestdrv.GRHLen:][:5]) != "hello" || !ok ||
		from != guestdrv.IPGID(a.Addr()) || dest != guestdrv.IPGID(b.Addr()) || wc.SrcQPN != qa.Number() {
		t.Errorf("%v: %q of %v to %v, %v, queue pair %d", err, bufB.Bytes()[guestdrv.GRHLen:][:5], from, dest, ok, wc.SrcQPN)
	}
	if err := ah.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := a.Resolve(ctx, address, nil); !errors.As(err, &none) {
		t.Errorf("after Close: %v", err)
	}
	if n := a.Connections() + b.Connections(); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
}

// Arguments that are refused, a context that ends, and a manager that closes.
func TestResolveEnds(t *testing.T) {
	r := rig.New(t, 2)
	a, b := open(t, r, 0, rdmacm.Config{}), open(t, r, 1, rdmacm.Config{})
	ctx := rig.Context(t)
	for name, err := range map[string]error{
		"port 0":       func() error { _, err := a.ServeDatagrams(0, rdmacm.Service{QPN: 9}); return err }(),
		"queue pair 1": func() error { _, err := a.ServeDatagrams(1, rdmacm.Service{QPN: 1}); return err }(),
		"long data": func() error {
			_, err := a.ServeDatagrams(1, rdmacm.Service{QPN: 9, PrivateData: make([]byte, rdmacm.MaxPrivateService+1)})
			return err
		}(),
		"address":      func() error { _, err := a.Resolve(ctx, "10.0.0.2", nil); return err }(),
		"other family": func() error { _, err := a.Resolve(ctx, "[fd00::2]:1", nil); return err }(),
		"long question": func() error {
			_, err := a.Resolve(ctx, "10.0.0.2:1", make([]byte, rdmacm.MaxPrivateResolve+1))
			return err
		}(),
	} {
		if !errors.Is(err, rdmacm.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	address := b.Addr().String() + ":7174"
	if _, err := a.Resolve(ctx, address, nil); err == nil { // the path is known from here on
		t.Fatal("nobody serves, and there is an answer")
	}
	b.h.Kill()
	short, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { _, err := a.Resolve(short, address, nil); ended <- err }()
	rig.Until(t, "the question is asked", func() bool { return a.Connections() == 1 })
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || a.Connections() != 0 {
		t.Errorf("canceled: %v, %d sessions", err, a.Connections())
	}
	go func() { _, err := a.Resolve(ctx, address, nil); ended <- err }()
	rig.Until(t, "the question is asked again", func() bool { return a.Connections() == 1 })
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, rdmacm.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}
