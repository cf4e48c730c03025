package guestdrv_test

import (
	"bytes"
	"context"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// TestRemoteAt addresses an implicit region by VAs. Its pages can be set by its Pager only.
func TestRemoteAt(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	const base, at = 1 << 40, 1<<40 + 100
	buf, err := hb.Alloc(page)
	if err != nil {
		t.Fatal(err)
	}
	far, err := hb.pd.RegisterImplicit(bg, allAccess, guestdrv.PagerFunc(
		func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
			if f.VA == base {
				pas[0] = buf.PA()
			}
			return nil
		}))
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := any(far).(interface {
		SetPages(context.Context, uint64, []uint64) error
	}); ok {
		t.Error("an on-demand region has SetPages, which bypasses Invalidate")
	}
	if p := far.RemoteAt(at); p != far.Remote(at) || p != (guestdrv.Remote{Addr: at, RKey: far.RKey()}) {
		t.Errorf("%+v, %+v by offset", p, far.Remote(at))
	}
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	src, mr := ha.region(t, page, guestdrv.AccessLocalWrite)
	fill(src.Bytes(), 1)
	if err := a.qp.PostSend(guestdrv.NewWrite(1, far.RemoteAt(at), mr.SGE(0, 1000)).With(guestdrv.SendSignaled)); err != nil {
		t.Fatal(err)
	}
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(buf.Bytes()[100:1100], src.Bytes()[:1000]) {
		t.Error("data differ")
	}
}
