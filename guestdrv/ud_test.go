package guestdrv_test

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// grhLen is the room for the global routing header before every UD message.
const grhLen = 40

func (h *host) udEnd(tb testing.TB, c guestdrv.QPConfig, qkey uint32) *end {
	tb.Helper()
	e := h.end(tb, c, 0)
	if err := e.qp.StartUD(bg, qkey); err != nil {
		tb.Fatal(err)
	}
	return e
}

func (h *host) ah(tb testing.TB, to *host) *guestdrv.AH {
	tb.Helper()
	ah, err := h.pd.CreateAH(to.at())
	if err != nil {
		tb.Fatal(err)
	}
	return ah
}

func udConfig() guestdrv.QPConfig {
	c := qpDefaults()
	c.Type = guestdrv.QPTypeUD
	return c
}

func TestUD(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := r.hosts[0].udEnd(t, udConfig(), guestdrv.DefaultQKey), r.hosts[1].udEnd(t, udConfig(), guestdrv.DefaultQKey)
	src, smr := a.h.region(t, 4096, 0)
	dst, dmr := b.h.region(t, 8192, allAccess)
	b.h.warm(t, dmr)
	ah := a.h.ah(t, b.h)
	for i, n := range []int{0, 1, 3, 64, 1000, 1024} {
		fill(src.Bytes(), uint64(i))
		clear(dst.Bytes())
		b.recv(t, uint64(i), dmr.SGE(1, 20), dmr.SGE(21, 2000)) // the GRH is split
		wr := &request{
			ID: uint64(i), Opcode: guestdrv.WRSendWithImm, Imm: [4]byte{1, 2, 3, byte(i)}, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(3, n)}, AH: ah, RemoteQPN: b.qp.Number(), QKey: guestdrv.DefaultQKey,
		}
		if n <= 64 {
			wr.Flags |= sendInline
			wr.Inline = src.Bytes()[3 : 3+n]
		}
		a.post(t, wr)
		expect(t, a.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpSend)
		wc := expect(t, b.rcq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRecv)
		if int(wc.ByteLen) != n+grhLen || wc.SrcQPN != a.qp.Number() ||
			wc.Flags&(guestdrv.WCFlagGRH|guestdrv.WCFlagWithImm) != guestdrv.WCFlagGRH|guestdrv.WCFlagWithImm ||
			wc.Imm != wr.Imm || wc.SL != guestdrv.WCSLIPv4 {
			t.Fatalf("%d bytes: completion %+v", n, wc)
		}
		got := dst.Bytes()[1:]
		// RoCEv2 over IPv4: the IP header is in the last 20 of the 40 bytes.
		if got[20] != 0x45 || !bytes.Equal(got[32:36], a.h.gid[12:]) || !bytes.Equal(got[36:40], b.h.gid[12:]) {
			t.Fatalf("%d bytes: no IPv4 header in %x", n, got[:40])
		}
		if !bytes.Equal(got[grhLen:grhLen+n], src.Bytes()[3:3+n]) || !allZero(got[grhLen+n:]) {
			t.Fatalf("%d bytes: data differ", n)
		}
	}
}

// TestUDDrops sends messages that must be dropped, then one that must arrive: UD is in order on this network.
func TestUDDrops(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := r.hosts[0].udEnd(t, udConfig(), 5), r.hosts[1].udEnd(t, udConfig(), 6)
	_, smr := a.h.region(t, 4096, 0)
	_, dmr := b.h.region(t, 8192, allAccess)
	b.h.warm(t, dmr)
	ah := a.h.ah(t, b.h)
	send := func(id uint64, qpn, qkey uint32, n int) {
		a.post(t, &request{ID: id, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{smr.SGE(0, n)},
			AH: ah, RemoteQPN: qpn, QKey: qkey})
		expect(t, a.scq, id, guestdrv.WCSuccess, guestdrv.WCOpSend)
	}
	send(1, b.qp.Number(), 6, 10) // no buffer yet
	send(2, b.qp.Number(), 5, 10) // wrong Q_Key
	send(3, b.qp.Number()+1, 6, 10)
	// The device handles arrivals of one QP in order; a connected pair on the same two loops proves nothing. So the
	// last message is the marker: it needs a buffer, which is posted only when the counters show that the others were
	// dropped.
	ctx := ctxFor(t)
	for {
		st, err := b.h.Stats(bg)
		if err != nil {
			t.Fatal(err)
		}
		if st[guestdrv.StatRxDropped] >= 3 {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("drops were not counted: %v", st)
		}
	}
	b.recv(t, 9, dmr.SGE(0, 100))
	send(4, b.qp.Number(), 6, 60)
	if wc := expect(t, b.rcq, 9, guestdrv.WCSuccess, guestdrv.WCOpRecv); wc.ByteLen != 100 {
		t.Fatalf("completion %+v", wc)
	}
}

// TestGSI sends a datagram from QP 1 to QP 1, as the connection manager does.
func TestGSI(t *testing.T) {
	r := newRig(t, rigConfig{})
	c := udConfig()
	c.Type, c.Privileged = guestdrv.QPTypeGSI, true
	const gsiQKey = 0x80010000
	a, b := r.hosts[0].udEnd(t, c, gsiQKey), r.hosts[1].udEnd(t, c, gsiQKey)
	if a.qp.Number() != 1 || b.qp.Number() != 1 {
		t.Fatalf("GSI QPs have numbers %d and %d", a.qp.Number(), b.qp.Number())
	}
	src, _ := a.h.region(t, 4096, 0)
	dst, dmr := b.h.region(t, 4096, allAccess)
	b.h.warm(t, dmr)
	fill(src.Bytes(), 1)
	// Both sides use real addresses (RA-1), as a kernel does.
	b.recv(t, 1, guestdrv.SGE{Addr: dst.PA(), Length: 4096, LKey: guestdrv.DMALKey})
	a.post(t, &request{
		ID: 2, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{{Addr: src.PA(), Length: 256, LKey: guestdrv.DMALKey}}, AH: a.h.ah(t, b.h), RemoteQPN: 1,
		QKey: gsiQKey,
	})
	expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
	if wc := expect(t, b.rcq, 1, guestdrv.WCSuccess, guestdrv.WCOpRecv); wc.SrcQPN != 1 || wc.ByteLen != 256+grhLen {
		t.Fatalf("completion %+v", wc)
	}
	if !bytes.Equal(src.Bytes()[:256], dst.Bytes()[grhLen:][:256]) {
		t.Fatal("data differ")
	}
}

func TestMulticast(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 3})
	if r.hosts[0].Attr().Caps&guestdrv.CapMcast == 0 {
		t.Fatal("device has no multicast")
	}
	group := guestdrv.GID{10: 0xff, 11: 0xff, 12: 239, 13: 1, 14: 2, 15: 3}
	path := guestdrv.Path{GID: group, MAC: [6]byte{0x01, 0, 0x5e, 1, 2, 3}}
	var ends []*end
	for _, h := range r.hosts {
		ends = append(ends, h.udEnd(t, udConfig(), 5))
	}
	ah, err := r.hosts[0].pd.CreateAH(path)
	if err != nil {
		t.Fatal(err)
	}
	_, smr := r.hosts[0].region(t, 4096, 0)
	for i, e := range ends[1:] {
		if err := e.qp.AttachMulticast(bg, group); err != nil {
			t.Fatal(err)
		}
		_, mr := e.h.region(t, 4096, allAccess)
		e.h.warm(t, mr)
		e.recv(t, uint64(i), mr.SGE(0, 4096))
	}
	const mcastQPN = 0xffffff
	ends[0].post(t, &request{ID: 1, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{smr.SGE(0, 99)}, AH: ah, RemoteQPN: mcastQPN, QKey: 5})
	expect(t, ends[0].scq, 1, guestdrv.WCSuccess, guestdrv.WCOpSend)
	for i, e := range ends[1:] {
		if wc := expect(t, e.rcq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRecv); wc.ByteLen != 99+grhLen ||
			wc.SrcQPN != ends[0].qp.Number() {
			t.Errorf("member %d: completion %+v", i, wc)
		}
		if err := e.qp.DetachMulticast(bg, group); err != nil {
			t.Error(err)
		}
	}
}

func TestUC(t *testing.T) {
	r := newRig(t, rigConfig{})
	c := qpDefaults()
	c.Type = guestdrv.QPTypeUC
	a, b := connect(t, r.hosts[0], r.hosts[1], c, guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 100000, 0)
	dst, dmr := b.h.region(t, 100000, allAccess)
	b.h.warm(t, dmr)
	for i, n := range []int{0, 1, 1024, 5000, 99999} {
		fill(src.Bytes(), uint64(i))
		b.recv(t, uint64(i), dmr.SGE(0, 100000))
		a.post(t, &request{ID: 1, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{smr.SGE(0, n)}})
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpSend)
		if wc := expect(t, b.rcq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRecv); int(wc.ByteLen) != n ||
			!bytes.Equal(dst.Bytes()[:n], src.Bytes()[:n]) {
			t.Fatalf("%d bytes: completion %+v, or data differ", n, wc)
		}
		clear(dst.Bytes())
		b.recv(t, uint64(i))
		a.post(t, &request{ID: 2, Opcode: guestdrv.WRRDMAWriteWithImm, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, n)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
		expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		if expect(t, b.rcq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRecvRDMAWithImm); !bytes.Equal(dst.Bytes()[:n],
			src.Bytes()[:n]) {
			t.Fatalf("%d bytes: data differ", n)
		}
	}
}
