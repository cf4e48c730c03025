package rdmacm_test

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

// liar is an application that writes its management datagrams itself.
type liar struct {
	dev *guestdrv.Device
	qp  *guestdrv.QP
	cq  *guestdrv.CQ
	pd  *guestdrv.PD
	buf *guestdrv.Buffer
	mr  *guestdrv.MR
	gid guestdrv.GID
}

func newLiar(tb testing.TB, r *rig.Network, i int) *liar {
	tb.Helper()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	ctx := rig.Context(tb)
	x := &liar{gid: guestdrv.IPGID(r.Hosts[i].Addr)}
	var err error
	x.dev, err = guestdrv.Open(ctx, r.Hosts[i].Path, guestdrv.Config{})
	must(err)
	tb.Cleanup(func() {
		if err := x.dev.Close(); err != nil {
			tb.Error(err)
		}
	})
	must(x.dev.SetGID(ctx, 0, x.gid, guestdrv.GIDOptions{}))
	x.pd, err = x.dev.AllocPD(ctx)
	must(err)
	x.buf, err = x.dev.Alloc(cm.MADLen)
	must(err)
	x.mr, err = x.pd.Register(ctx, x.buf, 0)
	must(err)
	x.cq, err = x.dev.CreateCQ(ctx, 8, guestdrv.CQOptions{})
	must(err)
	x.qp, err = x.pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeGSI, SendCQ: x.cq, RecvCQ: x.cq})
	must(err)
	must(x.qp.StartUD(ctx, gsiQKey))
	return x
}

const gsiQKey = 0x80010000

// send sends a datagram to an application's queue pair 1.
func (x *liar) send(tb testing.TB, to *end, mad []byte) {
	tb.Helper()
	path, err := x.dev.Resolve(rig.Context(tb), guestdrv.IPGID(to.Addr()), 0)
	if err != nil {
		tb.Fatal(err)
	}
	ah, err := x.pd.CreateAH(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer ah.Close()
	copy(x.buf.Bytes(), mad)
	wr := guestdrv.NewDatagram(1, guestdrv.Datagram{AH: ah, QPN: 1, QKey: gsiQKey}, x.mr.SGE(0, len(mad)))
	if err := x.qp.PostSend(wr.With(guestdrv.SendSignaled)); err != nil {
		tb.Fatal(err)
	}
	if wc := poll(tb, x.cq); wc.Err() != nil {
		tb.Fatal(wc.Err())
	}
}

// Messages of another application about a connection, with all numbers right, do not end it: the device or the manager
// drops and counts them (MT-4). Requests that claim what is not so are rejected.
func TestForged(t *testing.T) {
	r := rig.New(t, 3)
	a, b := open(t, r, 0, rdmacm.Config{}), open(t, r, 1, rdmacm.Config{})
	l := b.listen(t, 0)
	ca, cb := connect(t, a, b, l, rdmacm.Params{}, rdmacm.Params{})
	x := newLiar(t, r, 2)
	var open cm.Fields
	for _, c := range b.h.HCA.Connections() {
		if c.LocalQPN == cb.QP().Number() {
			open = cm.Fields{LocalID: c.RemoteID, RemoteID: c.LocalID, QPN: c.LocalQPN}
		}
	}
	if open.RemoteID == 0 {
		t.Fatalf("the connection is missing in %+v", b.h.HCA.Connections())
	}
	dropped := func() (n uint64) {
		for _, d := range b.h.HCA.Drops() {
			n += d
		}
		c := b.Counters()
		return n + c.Malformed + c.Refused + c.Unknown
	}
	for _, k := range []cm.Kind{cm.DREQ, cm.REJ, cm.DREP, cm.RTU, cm.REP, cm.MRA} {
		f := open
		f.Kind, f.Reason = k, uint16(rdmacm.RejectStale)
		mad, err := f.Encode()
		if err != nil {
			t.Fatal(err)
		}
		before := dropped()
		x.send(t, b, mad)
		rig.Until(t, "the forged message is counted", func() bool { return dropped() > before })
		if cb.Err() != nil {
			t.Fatalf("%v: the connection has ended: %v", k, cb.Err())
		}
	}
	// What is no message of connection management: too short, another class, another kind.
	class := make([]byte, cm.MADLen)
	copy(class, []byte{1, 3, 2, 3})
	path := make([]byte, cm.MADLen)
	copy(path, []byte{1, 7, 2, 3, 16: 0, byte(cm.LAP)})
	for name, mad := range map[string][]byte{"short": class[:64], "class": class, "alternate path": path} {
		before := dropped()
		x.send(t, b, mad)
		rig.Until(t, name+" is counted", func() bool { return dropped() > before })
	}
	// A request whose IP header names another source. The device admits it, because its path is right.
	private := make([]byte, 36)
	copy(private, []byte{0, 0x40, 0xc3, 0x50})
	copy(private[16:], []byte{10, 0, 0, 1}) // a's address
	copy(private[32:], []byte{10, 0, 0, 2})
	mad, err := (&cm.Fields{Kind: cm.REQ, LocalID: 9, Service: 0x01060000 | port, QPN: 99, PathMTU: 3, Local: x.gid,
		Remote: guestdrv.IPGID(b.Addr()), Private: private}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	before := b.Counters().Received
	x.send(t, b, mad)
	rig.Until(t, "the request has arrived", func() bool { return b.Counters().Received > before })
	if n := b.Connections(); n != 1 {
		t.Errorf("%d connections, want that of before", n)
	}
	// The connection works, and its own end is obeyed.
	if err := ca.Disconnect(rig.Context(t)); err != nil {
		t.Error(err)
	}
	<-cb.Done()
}
