package guestdrv_test

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// holed registers a buffer of 16 pages at its own VA, with every second page absent.
func (h *host) holed(tb testing.TB, access guestdrv.Access) (*guestdrv.Buffer, *guestdrv.MR, func()) {
	tb.Helper()
	const pages = 16
	buf, err := h.Alloc(pages << 12)
	if err != nil {
		tb.Fatal(err)
	}
	whole := make([]uint64, pages)
	pas := make([]uint64, pages)
	for i := range pas {
		whole[i] = buf.PA() + uint64(i)<<12
		if pas[i] = whole[i]; i%2 == 1 {
			pas[i] = guestdrv.PageAbsent
		}
	}
	mr, err := h.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: 0x5550000, Length: pages << 12, PageShift: 12, PAs: pas,
		Access: access})
	if err != nil {
		tb.Fatal(err)
	}
	return buf, mr, func() {
		tb.Helper()
		for i := 1; i < pages; i += 2 {
			if err := mr.SetPages(bg, uint64(i), whole[i:i+1]); err != nil {
				tb.Fatal(err)
			}
		}
	}
}

// faulted waits until the device has counted a guest fault beyond the first n and returns the count.
func (h *host) faulted(tb testing.TB, n uint64) uint64 {
	tb.Helper()
	ctx := ctxFor(tb)
	for {
		st, err := h.Stats(bg)
		if err != nil {
			tb.Fatal(err)
		}
		if v := st[guestdrv.StatGuestFaults]; v > n {
			return v
		}
		if ctx.Err() != nil {
			tb.Fatal("no guest fault was counted")
		}
	}
}

// TestGuestFaults accesses absent pages on both sides of every RC operation. The QP waits until the pages are present
// (PF-8, PF-10, PF-12); another QP of the same VM continues meanwhile.
func TestGuestFaults(t *testing.T) {
	const n = 50000
	for _, tc := range []struct {
		name      string
		responder bool // the responder's memory has the holes, not the requester's
		wr        request
		wcop      guestdrv.WCOpcode
	}{
		{"WRITE, responder", true, request{Opcode: guestdrv.WRRDMAWrite}, guestdrv.WCOpRDMAWrite},
		{"WRITE, requester", false, request{Opcode: guestdrv.WRRDMAWrite}, guestdrv.WCOpRDMAWrite},
		{"READ, responder", true, request{Opcode: guestdrv.WRRDMARead}, guestdrv.WCOpRDMARead},
		{"READ, requester", false, request{Opcode: guestdrv.WRRDMARead}, guestdrv.WCOpRDMARead},
		{"SEND, responder", true, request{Opcode: guestdrv.WRSend}, guestdrv.WCOpSend},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, rigConfig{})
			ha, hb := r.hosts[0], r.hosts[1]
			a, b := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{MinRNRTimer: 5})
			x, _ := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{})
			var la, lb *guestdrv.Buffer
			var ma, mb *guestdrv.MR
			var bringIn func()
			holed := hb
			if tc.responder {
				la, ma = ha.region(t, 16<<12, allAccess)
				lb, mb, bringIn = hb.holed(t, allAccess)
			} else {
				holed = ha
				la, ma, bringIn = ha.holed(t, allAccess)
				lb, mb = hb.region(t, 16<<12, allAccess)
			}
			fill(la.Bytes(), 1)
			fill(lb.Bytes(), 2)
			want := append([]byte{}, la.Bytes()[100:100+n]...)
			got := lb.Bytes()[200 : 200+n]
			if tc.wr.Opcode == guestdrv.WRRDMARead {
				want, got = append([]byte{}, got...), la.Bytes()[100:100+n]
			}
			b.recv(t, 7, mb.SGE(200, n))
			wr := tc.wr
			wr.ID, wr.Flags, wr.SGL, wr.RemoteAddr, wr.RKey = 1, guestdrv.SendSignaled, []guestdrv.SGE{ma.SGE(100, n)},
				mb.Addr()+200, mb.RKey()
			a.post(t, &wr)
			holed.faulted(t, 0)

			_, xm := ha.region(t, 65536, 0)
			xb, xr := hb.region(t, 65536, allAccess)
			for i := range 20 {
				x.post(t, &request{ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
					SGL: []guestdrv.SGE{xm.SGE(0, 65536)}, RemoteAddr: xb.Addr(), RKey: xr.RKey()})
				expect(t, x.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			}
			if wcs := make([]guestdrv.Completion, 1); a.scq.Poll(wcs) != 0 {
				t.Fatalf("completed without the page: %+v", wcs[0])
			}

			bringIn()
			expect(t, a.scq, 1, guestdrv.WCSuccess, tc.wcop)
			if tc.wr.Opcode == guestdrv.WRSend {
				expect(t, b.rcq, 7, guestdrv.WCSuccess, guestdrv.WCOpRecv)
			}
			if !bytes.Equal(got, want) {
				t.Error("data differ")
			}
		})
	}
}
