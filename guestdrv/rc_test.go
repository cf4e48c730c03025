package guestdrv_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

var le = binary.LittleEndian

// messageSizes cover every packet boundary: none, one byte, around one MTU, several packets, and far more than any
// window.
var messageSizes = []int{0, 1, 2, 3, 4, 7, 255, 256, 1023, 1024, 1025, 4095, 4096, 4097, 65536, 100001, 1 << 20,
	8 << 20}

func TestRCWrite(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	const room = 8<<20 + 64
	src, smr := a.h.region(t, room, 0)
	dst, dmr := b.h.region(t, room, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	for i, n := range messageSizes {
		off := i % 5 // differently unaligned at both ends
		fill(src.Bytes(), uint64(i))
		clear(dst.Bytes())
		a.post(t, &request{
			ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{smr.SGE(off, n)},
			RemoteAddr: dst.Addr() + 8, RKey: dmr.RKey(),
		})
		expect(t, a.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		if !bytes.Equal(dst.Bytes()[8:8+n], src.Bytes()[off:off+n]) {
			t.Fatalf("%d bytes: data differ", n)
		}
		if !allZero(dst.Bytes()[:8]) || !allZero(dst.Bytes()[8+n:]) {
			t.Fatalf("%d bytes: wrote outside the range", n)
		}
	}
}

func allZero(b []byte) bool {
	return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}

func TestRCRead(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	const room = 8<<20 + 64
	dst, dmr := a.h.region(t, room, guestdrv.AccessLocalWrite)
	src, smr := b.h.region(t, room, guestdrv.AccessRemoteRead)
	for i, n := range messageSizes {
		off := i % 5
		fill(src.Bytes(), uint64(i))
		clear(dst.Bytes())
		a.post(t, &request{
			ID: uint64(i), Opcode: guestdrv.WRRDMARead, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{dmr.SGE(8, n)},
			RemoteAddr: src.Addr() + uint64(off), RKey: smr.RKey(),
		})
		expect(t, a.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
		if !bytes.Equal(dst.Bytes()[8:8+n], src.Bytes()[off:off+n]) {
			t.Fatalf("%d bytes: data differ", n)
		}
		if !allZero(dst.Bytes()[:8]) || !allZero(dst.Bytes()[8+n:]) {
			t.Fatalf("%d bytes: wrote outside the range", n)
		}
	}
}

func TestRCSend(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	const room = 8<<20 + 64
	src, smr := a.h.region(t, room, 0)
	dst, dmr := b.h.region(t, room, guestdrv.AccessLocalWrite)
	imm := [4]byte{0xde, 0xad, 0xbe, 0xef}
	for i, n := range messageSizes {
		fill(src.Bytes(), uint64(i))
		clear(dst.Bytes())
		b.recv(t, uint64(100+i), dmr.SGE(3, room-3))
		wr := &request{ID: uint64(i), Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(1, n)}}
		if i%2 == 1 {
			wr.Opcode, wr.Imm = guestdrv.WRSendWithImm, imm
		}
		a.post(t, wr)
		expect(t, a.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpSend)
		wc := expect(t, b.rcq, uint64(100+i), guestdrv.WCSuccess, guestdrv.WCOpRecv)
		if int(wc.ByteLen) != n || wc.QPN != b.qp.Number() {
			t.Fatalf("%d bytes: completion %+v", n, wc)
		}
		if withImm := wc.Flags&guestdrv.WCFlagWithImm != 0; withImm != (i%2 == 1) || (withImm && wc.Imm != imm) {
			t.Fatalf("%d bytes: flags %#x, immediate %x", n, wc.Flags, wc.Imm)
		}
		if !bytes.Equal(dst.Bytes()[3:3+n], src.Bytes()[1:1+n]) || !allZero(dst.Bytes()[3+n:]) {
			t.Fatalf("%d bytes: data differ", n)
		}
	}
}

func TestRCWriteWithImm(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 1<<20, 0)
	dst, dmr := b.h.region(t, 1<<20, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	for i, n := range []int{0, 1, 1024, 1025, 1 << 20} {
		fill(src.Bytes(), uint64(i))
		b.recv(t, uint64(i)) // no SGEs: the data goes to another place
		a.post(t, &request{
			ID: uint64(i), Opcode: guestdrv.WRRDMAWriteWithImm, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{smr.SGE(0, n)},
			Imm: [4]byte{0, 0, 0, byte(i)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey(),
		})
		expect(t, a.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		wc := expect(t, b.rcq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRecvRDMAWithImm)
		if wc.Flags&guestdrv.WCFlagWithImm == 0 || wc.Imm != [4]byte{0, 0, 0, byte(i)} || int(wc.ByteLen) != n {
			t.Fatalf("%d bytes: completion %+v", n, wc)
		}
		if !bytes.Equal(dst.Bytes()[:n], src.Bytes()[:n]) {
			t.Fatalf("%d bytes: data differ", n)
		}
	}
}

func TestRCInline(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	dst, dmr := b.h.region(t, 4096, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	data := make([]byte, 128)
	for _, n := range []int{0, 1, 5, 63, 64, 127, 128} {
		fill(data, uint64(n))
		clear(dst.Bytes())
		a.post(t, &request{
			ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled | sendInline, Inline: data[:n],
			RemoteAddr: dst.Addr(), RKey: dmr.RKey(),
		})
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		b.recv(t, 2, dmr.SGE(1024, 1024))
		a.post(t, &request{ID: 3, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled | sendInline, Inline: data[:n]})
		expect(t, a.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpSend)
		expect(t, b.rcq, 2, guestdrv.WCSuccess, guestdrv.WCOpRecv)
		if !bytes.Equal(dst.Bytes()[:n], data[:n]) || !bytes.Equal(dst.Bytes()[1024:1024+n], data[:n]) ||
			!allZero(dst.Bytes()[n:1024]) {
			t.Fatalf("%d bytes: data differ", n)
		}
	}
}

// TestRCScatterGather splits the data unevenly at both ends, with empty parts.
func TestRCScatterGather(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 64<<10, guestdrv.AccessLocalWrite)
	dst, dmr := b.h.region(t, 64<<10, allAccess)
	fill(src.Bytes(), 1)
	gather := []guestdrv.SGE{smr.SGE(40000, 777), smr.SGE(1, 4096), smr.SGE(9, 0), smr.SGE(20000, 3333)}
	var want []byte
	for _, s := range gather {
		off := s.Addr - src.Addr()
		want = append(want, src.Bytes()[off:][:s.Length]...)
	}
	scatter := []guestdrv.SGE{dmr.SGE(50000, 1), dmr.SGE(0, 1500), dmr.SGE(30000, 0), dmr.SGE(9999, 20000)}

	b.recv(t, 1, scatter...)
	a.post(t, &request{ID: 2, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled, SGL: gather})
	expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
	if wc := expect(t, b.rcq, 1, guestdrv.WCSuccess, guestdrv.WCOpRecv); int(wc.ByteLen) != len(want) {
		t.Fatalf("%d bytes received of %d", wc.ByteLen, len(want))
	}
	got := append([]byte{}, dst.Bytes()[50000])
	got = append(got, dst.Bytes()[:1500]...)
	got = append(got, dst.Bytes()[9999:9999+len(want)-1501]...)
	if !bytes.Equal(got, want) {
		t.Fatal("SEND: data differ")
	}

	a.post(t, &request{ID: 3, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled, SGL: gather,
		RemoteAddr: dst.Addr() + 5, RKey: dmr.RKey()})
	expect(t, a.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(dst.Bytes()[5:5+len(want)], want) {
		t.Fatal("WRITE: data differ")
	}

	fill(dst.Bytes(), 2)
	clear(src.Bytes())
	back := []guestdrv.SGE{smr.SGE(3, 1025), smr.SGE(10000, 2), smr.SGE(30001, 5000)}
	a.post(t, &request{ID: 4, Opcode: guestdrv.WRRDMARead, Flags: guestdrv.SendSignaled, SGL: back,
		RemoteAddr: dst.Addr() + 7, RKey: dmr.RKey()})
	expect(t, a.scq, 4, guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
	got = append([]byte{}, src.Bytes()[3:3+1025]...)
	got = append(got, src.Bytes()[10000:10002]...)
	got = append(got, src.Bytes()[30001:35001]...)
	if !bytes.Equal(got, dst.Bytes()[7:7+6027]) {
		t.Fatal("READ: data differ")
	}
}

func TestRCAtomics(t *testing.T) {
	r := newRig(t, rigConfig{})
	if r.hosts[0].Attr().Caps&guestdrv.CapAtomic == 0 {
		t.Fatal("device has no atomics")
	}
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	old, omr := a.h.region(t, 4096, guestdrv.AccessLocalWrite)
	word, wmr := b.h.region(t, 4096, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteAtomic)
	target := word.Bytes()[16:24]
	le.PutUint64(target, 100)
	do := func(op guestdrv.Opcode, compareAdd, swap, wantOld, wantNew uint64) {
		t.Helper()
		wcop := guestdrv.WCOpFetchAdd
		if op == guestdrv.WRAtomicCmpAndSwp {
			wcop = guestdrv.WCOpCompSwap
		}
		a.post(t, &request{
			ID: 9, Opcode: op, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{omr.SGE(32, 8)}, RemoteAddr: word.Addr() + 16,
			RKey: wmr.RKey(), CompareAdd: compareAdd, Swap: swap,
		})
		expect(t, a.scq, 9, guestdrv.WCSuccess, wcop)
		if o, n := le.Uint64(old.Bytes()[32:]), le.Uint64(target); o != wantOld || n != wantNew {
			t.Fatalf("old %d, new %d, want %d, %d", o, n, wantOld, wantNew)
		}
	}
	do(guestdrv.WRAtomicFetchAndAdd, 11, 0, 100, 111)
	do(guestdrv.WRAtomicCmpAndSwp, 111, 7, 111, 7)
	do(guestdrv.WRAtomicCmpAndSwp, 111, 8, 7, 7)
	do(guestdrv.WRAtomicFetchAndAdd, ^uint64(0), 0, 7, 6)

	// More requests than may be in flight; each is executed exactly once.
	const adds = 200
	for i := range adds {
		wr := request{
			ID: uint64(i), Opcode: guestdrv.WRAtomicFetchAndAdd, SGL: []guestdrv.SGE{omr.SGE(8*(i%8), 8)},
			RemoteAddr: word.Addr() + 16, RKey: wmr.RKey(), CompareAdd: 1,
		}
		if i == adds-1 {
			wr.Flags = guestdrv.SendSignaled
		}
		a.postWhenRoom(t, &wr)
	}
	expect(t, a.scq, adds-1, guestdrv.WCSuccess, guestdrv.WCOpFetchAdd)
	if got := le.Uint64(target); got != 6+adds {
		t.Fatalf("counter at %d, want %d", got, 6+adds)
	}
	if got := le.Uint64(old.Bytes()[8*((adds-1)%8):]); got != 6+adds-1 {
		t.Fatalf("last old value %d, want %d", got, 6+adds-1)
	}
}

// TestRCAtomicWrite: 8 bytes written atomically (IBTA annex A19), gathered or inline, in order with earlier requests.
func TestRCAtomicWrite(t *testing.T) {
	r := newRig(t, rigConfig{})
	if r.hosts[0].Attr().Caps&guestdrv.CapAtomicWrite == 0 {
		t.Fatal("device has no ATOMIC WRITE")
	}
	c := qpDefaults()
	c.MaxInline = 8
	a, b := connect(t, r.hosts[0], r.hosts[1], c, guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 1<<16, guestdrv.AccessLocalWrite)
	dst, dmr := b.h.region(t, 1<<16, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	word := dst.Bytes()[16:24]
	fill(src.Bytes(), 9)
	want := append(append([]byte{}, src.Bytes()[1:4]...), src.Bytes()[100:105]...)
	put := func(wr request) {
		t.Helper()
		wr.ID, wr.Opcode, wr.RemoteAddr, wr.RKey = 5, guestdrv.WRAtomicWrite, dst.Addr()+16, dmr.RKey()
		a.postWhenRoom(t, &wr)
	}
	put(request{SGL: []guestdrv.SGE{smr.SGE(1, 3), smr.SGE(100, 5)}, Flags: guestdrv.SendSignaled})
	expect(t, a.scq, 5, guestdrv.WCSuccess, guestdrv.WCOpAtomicWrite)
	if !bytes.Equal(word, want) || !allZero(dst.Bytes()[:16]) || !allZero(dst.Bytes()[24:]) {
		t.Fatalf("%x, want %x and nothing else", dst.Bytes()[:32], want)
	}

	// More requests than may be in flight, behind a long WRITE to the same address.
	const writes = 200
	a.post(t, &request{ID: 4, Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{smr.SGE(0, 1<<16)}, RemoteAddr: dst.Addr(),
		RKey: dmr.RKey()})
	for i := range uint64(writes) {
		wr := request{Flags: sendInline, Inline: le.AppendUint64(nil, i)}
		if i == writes-1 {
			wr.Flags |= guestdrv.SendSignaled
		}
		put(wr)
	}
	expect(t, a.scq, 5, guestdrv.WCSuccess, guestdrv.WCOpAtomicWrite)
	if got := le.Uint64(word); got != writes-1 {
		t.Fatalf("the word is %d, want %d", got, writes-1)
	}
	copy(word, src.Bytes()[16:])
	if !bytes.Equal(dst.Bytes(), src.Bytes()) {
		t.Fatal("WRITE: data differ")
	}
}

// TestRCFlush: FLUSH of a range and of a region (IBTA annex A19), more than may be in flight, between WRITEs and ATOMIC
// WRITEs. Persistence is not supported.
func TestRCFlush(t *testing.T) {
	r := newRig(t, rigConfig{})
	if r.hosts[0].Attr().Caps&guestdrv.CapFlushGlobal == 0 {
		t.Fatal("device has no FLUSH")
	}
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 1<<16, guestdrv.AccessLocalWrite)
	dst, dmr := b.h.region(t, 1<<16, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite|guestdrv.AccessFlushGlobal)
	fill(src.Bytes(), 9)
	put := func(wr request) {
		t.Helper()
		wr.RKey = dmr.RKey()
		a.postWhenRoom(t, &wr)
	}
	put(request{Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{smr.SGE(0, 1<<16)}, RemoteAddr: dst.Addr()})
	for i := range 200 {
		put(request{Opcode: guestdrv.WRFlush, RemoteAddr: dst.Addr() + uint64(i),
			Flush: guestdrv.Flush{Length: uint32(i), Placement: guestdrv.FlushGlobal}})
		put(request{Opcode: guestdrv.WRAtomicWrite, SGL: []guestdrv.SGE{smr.SGE(i, 8)}, RemoteAddr: dst.Addr()})
	}
	put(request{ID: 5, Opcode: guestdrv.WRFlush, Flags: guestdrv.SendSignaled,
		Flush: guestdrv.Flush{Placement: guestdrv.FlushGlobal, Selectivity: guestdrv.FlushMR}})
	expect(t, a.scq, 5, guestdrv.WCSuccess, guestdrv.WCOpFlush)
	if !bytes.Equal(dst.Bytes()[8:], src.Bytes()[8:]) || !bytes.Equal(dst.Bytes()[:8], src.Bytes()[199:207]) {
		t.Error("data differ")
	}
	if _, err := b.h.pd.Register(bg, dst, guestdrv.AccessLocalWrite|abi.AccessFlushPersistent); !errors.Is(err,
		guestdrv.StatusInvalid) {
		t.Errorf("a region that asks for persistence: %v", err)
	}
}

// TestRCOrder posts a long mixed sequence, mostly unsignalled, and checks the order of completions and that a fenced
// WRITE sees the data of the READ before it.
func TestRCOrder(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	local, lmr := a.h.region(t, 1<<20, guestdrv.AccessLocalWrite)
	remote, rmr := b.h.region(t, 1<<20, allAccess)
	const n = 300
	const piece = 3000
	fill(remote.Bytes()[:piece], 5)
	want := 0
	buf := make([]guestdrv.Completion, 16)
	collect := func() {
		for i := range a.scq.Poll(buf) {
			wc := buf[i]
			if wc.Status != guestdrv.WCSuccess || wc.ID != uint64(want) {
				t.Fatalf("completion %+v, want id %d", wc, want)
			}
			want += 10
		}
	}
	ctx := ctxFor(t)
	for i := range n {
		// Part i is read into local i+1, then written, fenced, to remote i+1.
		slot := (i/2)%100 + 1
		wr := request{ID: uint64(i), SGL: []guestdrv.SGE{lmr.SGE(slot*piece, piece)}, RKey: rmr.RKey()}
		if i%2 == 0 {
			wr.Opcode, wr.RemoteAddr = guestdrv.WRRDMARead, remote.Addr()+uint64((slot-1)*piece)
		} else {
			wr.Opcode, wr.RemoteAddr, wr.Flags = guestdrv.WRRDMAWrite, remote.Addr()+uint64(slot*piece), guestdrv.SendFence
		}
		if i%10 == 0 {
			wr.Flags |= guestdrv.SendSignaled
		}
		for {
			err := postSend(a.qp, &wr)
			collect()
			if err == nil {
				break
			}
			if err != guestdrv.ErrFull || ctx.Err() != nil {
				t.Fatal(err)
			}
		}
	}
	a.postWhenRoom(t, &request{ID: n, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled})
	for want <= n {
		collect()
		if ctx.Err() != nil {
			t.Fatalf("completions up to %d of %d", want, n)
		}
	}
	for i := 1; i <= 100; i++ {
		if !bytes.Equal(remote.Bytes()[i*piece:][:piece], remote.Bytes()[:piece]) ||
			!bytes.Equal(local.Bytes()[i*piece:][:piece], remote.Bytes()[:piece]) {
			t.Fatalf("piece %d differs", i)
		}
	}
}

// postWhenRoom posts as soon as the queue has room.
func (e *end) postWhenRoom(tb testing.TB, wr *request) {
	tb.Helper()
	ctx := ctxFor(tb)
	for {
		err := postSend(e.qp, wr)
		if err == nil {
			return
		}
		if err != guestdrv.ErrFull || ctx.Err() != nil {
			tb.Fatal(err)
		}
	}
}

// TestMTUs runs every path MTU, on networks that carry it.
func TestMTUs(t *testing.T) {
	for mtu := guestdrv.MTU256; mtu <= guestdrv.MTU4096; mtu++ {
		t.Run(mtu.String(), func(t *testing.T) {
			r := newRig(t, rigConfig{mtu: 9000})
			a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{MTU: mtu})
			src, smr := a.h.region(t, 100000, guestdrv.AccessLocalWrite)
			dst, dmr := b.h.region(t, 100000, allAccess)
			fill(src.Bytes(), uint64(mtu))
			for _, n := range []int{mtu.Bytes() - 1, mtu.Bytes(), mtu.Bytes() + 1, 99999} {
				clear(dst.Bytes())
				a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
					SGL: []guestdrv.SGE{smr.SGE(0, n)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
				expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
				if !bytes.Equal(dst.Bytes()[:n], src.Bytes()[:n]) {
					t.Fatalf("%d bytes: data differ", n)
				}
			}
		})
	}
}

// TestLoopback connects two QPs of one HCA, and a QP with itself.
func TestLoopback(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	a, b := connect(t, r.hosts[0], r.hosts[0], qpDefaults(), guestdrv.ConnectOptions{})
	self := r.hosts[0].end(t, qpDefaults(), 77)
	if err := self.qp.Connect(bg, guestdrv.Peer{QPN: self.qp.Number(), PSN: self.psn, Path: self.h.at()},
		guestdrv.ConnectOptions{PSN: self.psn, Access: peerAccess}); err != nil {
		t.Fatal(err)
	}
	src, smr := a.h.region(t, 100000, guestdrv.AccessLocalWrite)
	dst, dmr := b.h.region(t, 100000, allAccess)
	for i, e := range []*end{a, b, self} {
		fill(src.Bytes(), uint64(i))
		e.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, 99999)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
		expect(t, e.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		if !bytes.Equal(dst.Bytes()[:99999], src.Bytes()[:99999]) {
			t.Fatal("data differ")
		}
	}
}

// TestManyQPs keeps many connections busy.
func TestManyQPs(t *testing.T) {
	const qps, rounds, size = 64, 8, 20000
	r := newRig(t, rigConfig{driver: guestdrv.Config{Memory: 64 << 20}})
	ha, hb := r.hosts[0], r.hosts[1]
	src, smr := ha.region(t, qps*size, 0)
	dst, dmr := hb.region(t, qps*size, allAccess)
	fill(src.Bytes(), 3)
	cq := ha.cq(t, qps*rounds)
	var ends []*end
	for range qps {
		c := qpDefaults()
		c.SendCQ = cq
		a := ha.end(t, c, 5)
		b := hb.end(t, qpDefaults(), 6)
		join(t, a, b, guestdrv.ConnectOptions{})
		ends = append(ends, a)
	}
	for range rounds {
		for i, e := range ends {
			e.post(t, &request{
				ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{smr.SGE(i*size, size)}, RemoteAddr: dst.Addr() + uint64(i*size), RKey: dmr.RKey(),
			})
		}
	}
	seen := make([]int, qps)
	for _, wc := range await(t, cq, qps*rounds) {
		if wc.Status != guestdrv.WCSuccess {
			t.Fatalf("completion %+v", wc)
		}
		seen[wc.ID]++
	}
	for i, n := range seen {
		if n != rounds {
			t.Errorf("QP %d: %d completions", i, n)
		}
	}
	if !bytes.Equal(src.Bytes(), dst.Bytes()) {
		t.Error("data differ")
	}
}

// Memory that the guest has pinned is made present on the host at registration, not by the first access: otherwise a
// burst of datagrams would lose some to a fault (PF-11).
func TestPinnedIsThereAtOnce(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	const room = 16 << 20
	_, smr := a.h.region(t, room, 0)
	dst, dmr := b.h.region(t, room, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	write := func(id uint64, n int) {
		a.post(t, &request{
			ID: id, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{smr.SGE(0, n)},
			RemoteAddr: dst.Addr(), RKey: dmr.RKey(),
		})
		expect(t, a.scq, id, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	}
	write(1, 8) // makes the work queues present
	faults := func() uint64 { return a.h.hca.Describe().Faults.Host.Raised + b.h.hca.Describe().Faults.Host.Raised }
	before := faults()
	write(2, room)
	// A ring may still have a fault; 32 MiB of regions would have 16 or more.
	if n := faults() - before; n > 3 {
		t.Errorf("%d host faults", n)
	}
}
