package guestdrv_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// TestResolve connects hosts by the paths that Resolve returns, from source GIDs with and without a VLAN: Connect takes
// them as they are.
func TestResolve(t *testing.T) {
	r := newRig(t, rigConfig{mtu: 1600}) // room for a VLAN tag
	gid := func(index int, h *host) guestdrv.GID {
		g := h.gid
		g[14] = byte(index)
		return g
	}
	for index, o := range []guestdrv.GIDOptions{{}, {VLAN: 42}, {VLAN: 43}, {}} {
		for _, h := range r.hosts {
			if err := h.SetGID(bg, index, gid(index, h), o); err != nil {
				t.Fatal(err)
			}
		}
		a, b := r.hosts[0].end(t, qpDefaults(), 1), r.hosts[1].end(t, qpDefaults(), 2)
		for _, x := range [][2]*end{{a, b}, {b, a}} {
			to := x[1].h
			p, err := x[0].h.Resolve(ctxFor(t), gid(index, to), index)
			if err != nil {
				t.Fatal(err)
			}
			if want := (guestdrv.Path{GID: gid(index, to), MAC: to.mac, SGIDIndex: index, VLAN: o.VLAN}); p != want {
				t.Errorf("path %+v, want %+v", p, want)
			}
			if err := x[0].qp.Connect(bg, guestdrv.Peer{QPN: x[1].qp.Number(), PSN: x[1].psn, Path: p},
				guestdrv.ConnectOptions{PSN: x[0].psn}); err != nil {
				t.Fatal(err)
			}
		}
		src, smr := a.h.region(t, 4096, guestdrv.AccessLocalWrite)
		dst, dmr := b.h.region(t, 4096, allAccess)
		fill(src.Bytes(), uint64(index))
		b.recv(t, 2, dmr.SGE(0, 4096))
		a.post(t, &request{ID: 1, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, 4096)}})
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpSend)
		expect(t, b.rcq, 2, guestdrv.WCSuccess, guestdrv.WCOpRecv)
		if !bytes.Equal(src.Bytes(), dst.Bytes()) {
			t.Error("data differ")
		}
		destroy(t, a, b)
	}

	// A rewritten entry has its new VLAN.
	h, to := r.hosts[0], r.hosts[1]
	if err := h.SetGID(bg, 1, gid(0, h), guestdrv.GIDOptions{}); err != nil {
		t.Fatal(err)
	}
	if p, err := h.Resolve(ctxFor(t), gid(0, to), 1); err != nil || p.VLAN != 0 {
		t.Errorf("path %+v, %v, want no VLAN", p, err)
	}
}

// TestGIDIndex: an index outside of the GID table is refused wherever it is an argument, and changes no entry.
func TestGIDIndex(t *testing.T) {
	r := newRig(t, rigConfig{})
	h, to := r.hosts[0], r.hosts[1]
	qp, none := h.end(t, qpDefaults(), 0).qp, guestdrv.ConnectOptions{}
	if err := qp.ToInit(bg, 0, 0); err != nil {
		t.Fatal(err)
	}
	most := int(h.Attr().MaxGID)
	for _, index := range []int{-65536, -1, most, 65535, 65536, 1 << 32} {
		path := to.at()
		path.SGIDIndex = index
		for what, op := range map[string]func() error{
			"SetGID":   func() error { return h.SetGID(bg, index, guestdrv.GID{15: 1}, guestdrv.GIDOptions{}) },
			"ClearGID": func() error { return h.ClearGID(bg, index) },
			"Resolve":  func() error { _, err := h.Resolve(bg, to.gid, index); return err },
			"CreateAH": func() error { _, err := h.pd.CreateAH(path); return err },
			"ToRTR":    func() error { return qp.ToRTR(bg, guestdrv.Peer{QPN: 5, Path: path}, none) },
		} {
			if err := op(); !errors.Is(err, guestdrv.ErrInvalid) || !strings.Contains(err.Error(), "expected 0..") {
				t.Errorf("%s with index %d: %v", what, index, err)
			}
		}
	}
	if _, err := h.Resolve(ctxFor(t), to.gid, 0); err != nil {
		t.Errorf("entry 0: %v", err)
	}
}

// TestNoRights: without ConnectOptions.Access a peer can send messages and nothing else, whatever the region permits.
func TestNoRights(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	_, smr := ha.region(t, page, allAccess)
	dst, dmr := hb.region(t, page, allAccess)
	for _, op := range []*guestdrv.SendWR{
		guestdrv.NewWrite(1, dmr.Remote(0), smr.SGE(0, 8)),
		guestdrv.NewRead(1, dmr.Remote(0), smr.SGE(0, 8)),
		guestdrv.NewFetchAdd(1, dmr.Remote(0), 1, smr.SGE(0, 8)),
	} {
		a, b := ha.end(t, qpDefaults(), 1), hb.end(t, qpDefaults(), 2)
		for _, x := range [][2]*end{{a, b}, {b, a}} {
			if err := x[0].qp.Connect(bg, guestdrv.Peer{QPN: x[1].qp.Number(), PSN: x[1].psn, Path: x[1].h.at()},
				guestdrv.ConnectOptions{PSN: x[0].psn}); err != nil {
				t.Fatal(err)
			}
			if q, err := x[0].qp.Query(bg); err != nil || q.Access != 0 {
				t.Errorf("rights %v, %v", q.Access, err)
			}
		}
		b.recv(t, 2, dmr.SGE(100, 8))
		a.post(t, &request{ID: 3, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, 8)}})
		expect(t, a.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpSend)
		expect(t, b.rcq, 2, guestdrv.WCSuccess, guestdrv.WCOpRecv)
		if err := a.qp.PostSend(op); err != nil {
			t.Fatal(err)
		}
		if wc := await(t, a.scq, 1)[0]; !errors.Is(wc.Err(), guestdrv.WCRemInvReqErr) {
			t.Errorf("%v: %v, want %v", op.Opcode(), wc.Err(), guestdrv.WCRemInvReqErr)
		}
		if dst.Load64(0) != 0 {
			t.Errorf("%v was executed", op.Opcode())
		}
		destroy(t, a, b)
	}
}
