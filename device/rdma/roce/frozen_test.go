package roce

import (
	"fmt"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// pause freezes the QP of n for d ns of virtual time.
func (f *fabric) pause(n *node, d int64) {
	n.paused = true
	n.q.Freeze(f.now)
	f.after(d, func() {
		n.paused = false
		n.q.Thaw(f.now)
		n.timer = 0
		n.q.Timer(f.now)
		n.run = true
	})
}

// mixed posts one request of each kind, k times, and returns their number. The regions are 1 at a and 2 at b.
func (f *fabric) mixed(a, b *node, k int) int {
	n := 0
	for range k {
		for _, op := range []WROpcode{WRWrite, WRSend, WRRead, WRFetchAdd, WRAtomicWrite} {
			size := 1 + f.rng.Intn(20000)
			if op == WRFetchAdd || op == WRAtomicWrite {
				size = 8
			}
			b.postRecv(sge(2, 0, 1<<15))
			a.post(WQE{Opcode: op, RKey: 2, RemoteVA: 1 << 15, SGEs: []SGE{sge(1, 0, size)}})
			n++
		}
	}
	return n
}

// A pause of either end or of both loses no connection whose peer waits, however long it is, whatever was in flight
// (CO-3): between vnicds whatever rnr_retry is, and with other peers that retry RNR NAKs for ever, also if this is not
// known. fabric fails the test if a paused QP accesses guest memory.
func TestPause(t *testing.T) {
	for _, x := range []struct {
		name string
		set  func(o *pairOpt, a, b *node)
		opt  func(o *pairOpt)
	}{
		{"vnicd", nil, func(o *pairOpt) { o.rnr, o.retry = 0, 1 }},
		{"go-back-N", nil, func(o *pairOpt) { o.backA, o.backB, o.retry = true, true, 1 }},
		{"rxe", func(_ *pairOpt, a, b *node) { a.unmarked, b.unmarked = true, true },
			func(o *pairOpt) { o.backA, o.backB = true, true }},
	} {
		for _, who := range []string{"a", "b", "ab"} {
			for _, d := range []int64{1e6, 300e6, 60e9} {
				t.Run(fmt.Sprintf("%s/%s/%d ms", x.name, who, d/1e6), func(t *testing.T) {
					for seed := range int64(10) {
						f := newFabric(t, seed)
						o := opts()
						x.opt(&o)
						a, b := f.pair(o)
						if x.set != nil {
							x.set(&o, a, b)
						}
						a.reg(1, 0, 1<<16, allAccess)
						b.reg(2, 0, 1<<16, allAccess)
						n := f.mixed(a, b, 4)
						done := func() bool { return len(a.sends) == n }
						at := f.now + f.rng.Int63n(400e3)
						for f.now < at && !done() && f.step() {
						}
						for _, p := range []*node{a, b} {
							if who == "ab" || who == p.name {
								f.pause(p, d)
							}
						}
						n += f.mixed(a, b, 1) // posts of a paused end are seen afterwards
						f.until("all requests", d+60e9, done)
						a.wantSends(slices.Repeat([]Status{StatusSuccess}, n)...)
						a.wantState(RTS)
						b.wantState(RTS)
					}
				})
			}
		}
	}
}

// A paused responder answers duplicates and requests without guest memory.
func TestFrozenResponder(t *testing.T) {
	o := opts()
	o.psnA = 100
	f, b, sent := lone(t, o)
	b.reg(2, 0, 1<<16, allAccess)
	write := func(psn uint32) craft {
		return craft{op: wire.OpRCWriteOnly, psn: psn, ack: true, key: 2, length: 4, data: []byte("data")}
	}
	b.inject(write(100))
	b.wantResp(sent, ackOf(100))
	b.paused = true
	b.q.Freeze(f.now)
	f.now += 3e6
	frozen := func(c craft) {
		t.Helper()
		fr := b.frame(c)
		if err := wire.ParseRoCE(fr, header.Locate(fr), &f.p); err != nil {
			t.Fatal(err)
		}
		b.q.ReceiveFrozen(f.now, &f.p)
	}
	frozen(write(100)) // executed before
	b.wantResp(sent, ackOf(100))
	for range silentRepeats + 1 { // nothing is known of the peer
		frozen(write(101))
		b.wantResp(sent)
	}
	frozen(write(101))
	b.wantResp(sent, nakOf(101, wire.SyndromeRNR|rnrCode(3e6)))
	frozen(write(102)) // not without the one before it
	frozen(craft{op: wire.OpRCAck, psn: 0, syn: wire.NoCredits})
	b.wantResp(sent)
	b.patience = wire.PatienceEnds
	frozen(write(101)) // an RNR NAK might end the connection
	b.wantResp(sent)
	b.patience = wire.PatienceForever
	f.now += 10e9
	frozen(write(101))
	b.wantResp(sent, nakOf(101, wire.SyndromeRNR|rnrCode(maxFrozenWait)))
	b.paused = false
	b.q.Thaw(f.now)
	b.runAll()
	b.wantResp(sent, ackOf(100)) // PF-9: it may continue at once
	b.inject(write(101))
	b.wantResp(sent, ackOf(101))
}

// After a pause a responder asks for requests that it has not answered, once, and only then.
func TestAsksAgain(t *testing.T) {
	o := opts()
	o.psnA = 100
	f, b, sent := lone(t, o)
	b.reg(2, 0, 1<<16, allAccess)
	write := craft{op: wire.OpRCWriteOnly, psn: 100, ack: true, key: 2, length: 4, data: []byte("data")}
	b.paused = true
	b.q.Freeze(f.now)
	fr := b.frame(write)
	if err := wire.ParseRoCE(fr, header.Locate(fr), &f.p); err != nil {
		t.Fatal(err)
	}
	b.q.ReceiveFrozen(f.now, &f.p)
	b.paused = false
	b.q.Thaw(f.now)
	b.runAll()
	b.wantResp(sent, nakOf(100, wire.NAKSequence))
	b.inject(write)
	b.wantResp(sent, ackOf(100))
	b.q.Freeze(f.now) // nothing arrives
	b.q.Thaw(f.now)
	b.runAll()
	b.wantResp(sent)
}

// A process that was killed may have executed an ATOMIC WRITE and a WRITE behind it. The next one repeats neither: the
// requester or the guest may have replaced what they stored.
func TestAtomicWriteStoredBefore(t *testing.T) {
	o := opts()
	o.psnA, o.destRd = 0, 2
	_, b, sent := lone(t, o)
	mem := b.reg(2, 0, 64, allAccess)
	put := func(psn uint32, v string) {
		b.inject(craft{op: wire.OpRCAtomicWrite, psn: psn, key: 2, va: 8, length: 8, data: []byte(v)})
		b.runAll()
	}
	put(0, "original")
	b.q.Revived(b.q.Expected() + 1)
	put(1, "repeated")
	same(t, "memory", mem.buf[8:16], []byte("original"))
	put(2, "the next")
	same(t, "memory", mem.buf[8:16], []byte("the next"))
	only := func(psn uint32) resp { return resp{wire.OpRCReadResponseOnly, psn, wire.NoCredits} }
	b.wantResp(sent, only(0), only(1), only(2))
}

// In the midst of a READ's responses no earlier request is acknowledged: Linux rxe would take that for the end of its
// READ, and fail at the next response. A repetition that was on its way may ask for it: during a pause, while the READ
// waits for a page, and after a kill, when nobody knows what the killed process has sent since its last commit. Nor is
// there an ACK behind responses, which acknowledge by themselves.
func TestNoAckWithinRead(t *testing.T) {
	const page = 0x1000
	write := craft{op: wire.OpRCWriteOnly, psn: 10, ack: true, key: 2, va: 0x8000, length: 4, data: []byte("data")}
	read := craft{op: wire.OpRCReadRequest, psn: 11, key: 2, va: page - 2048, length: 4096} // 11..14
	r := func(op wire.Opcode, psn uint32) resp { return resp{op, psn, wire.NoCredits} }
	first, mid := r(wire.OpRCReadResponseFirst, 11), r(wire.OpRCReadResponseMid, 12)
	rest := []resp{r(wire.OpRCReadResponseMid, 13), r(wire.OpRCReadResponseLast, 14)}
	begin := func(t *testing.T, absent ...uint64) (*fabric, *node, *[]wire.RoCE) {
		o := opts()
		o.mtu, o.psnA = 3, 10 // 1024 bytes
		f, b, sent := lone(t, o)
		b.reg(2, 0, 1<<16, allAccess)
		b.stuck(absent...)
		b.waits = true
		b.inject(write)
		b.wantResp(sent, ackOf(10))
		b.inject(read)
		return f, b, sent
	}
	frozen := func(f *fabric, b *node, c craft) {
		fr := b.frame(c)
		if err := wire.ParseRoCE(fr, header.Locate(fr), &f.p); err != nil {
			f.t.Fatal(err)
		}
		b.q.ReceiveFrozen(f.now, &f.p)
	}
	t.Run("page", func(t *testing.T) {
		_, b, sent := begin(t, page)
		b.wantResp(sent, first, mid)
		b.inject(write)
		b.wantResp(sent)
		b.answer(Responder, true)
		b.wantResp(sent, rest...)
	})
	t.Run("repeated", func(t *testing.T) {
		_, b, sent := begin(t)
		b.wantResp(sent, append([]resp{first, mid}, rest...)...)
		b.inject(write)
		b.inject(read)
		b.wantResp(sent, append([]resp{first, mid}, rest...)...)
	})
	t.Run("pause", func(t *testing.T) {
		f, b, sent := begin(t)
		b.q.Run(f.now, 4) // budget for two responses
		b.q.Freeze(f.now)
		frozen(f, b, write)
		b.q.Thaw(f.now)
		b.inject(write)
		b.wantResp(sent, append([]resp{first, mid}, rest...)...)
	})
	moved := func(t *testing.T, b *node) {
		w := record.Writer().Of(4)
		b.q.Journal(w, b.f.now)
		if err := b.adoptFrom(record.Reader(w.Bytes()).Of(4)); err != nil {
			t.Fatal(err)
		}
		b.busy, b.open = [2]bool{}, [2]func(bool){}
	}
	t.Run("kill", func(t *testing.T) {
		f, b, sent := begin(t, page-2048)
		b.wantResp(sent)
		moved(t, b)
		frozen(f, b, write)
		b.q.Revived(0)
		b.q.Thaw(f.now)
		b.runAll()
		b.inject(write)
		b.wantResp(sent)
		b.answer(Responder, true)
		b.wantResp(sent, append([]resp{first, mid}, rest...)...)
	})
	for _, vnicd := range []bool{false, true} { // which is not confused, and may wait after an RNR NAK
		t.Run(fmt.Sprintf("kill after the response, of a vnicd %v", vnicd), func(t *testing.T) {
			f, b, sent := begin(t)
			b.wantResp(sent, append([]resp{first, mid}, rest...)...)
			moved(t, b)
			b.q.Revived(0)
			next := write
			next.psn, next.sel = 15, vnicd
			frozen(f, b, next)
			*sent = nil
			b.q.Thaw(f.now)
			if want := []resp{ackOf(10)}; vnicd {
				b.wantResp(sent, want...)
			} else {
				b.wantResp(sent)
			}
		})
	}
}
