package roce

import (
	"encoding/binary"
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// hostile drives a QP with packets made from bytes, as a peer that sends anything with the right addresses and a right
// ICRC. Checked: no panic, bounded work, only exposed memory is read or written, and the QP can be recovered.
type hostile struct {
	in []byte
}

func (h *hostile) byte() byte {
	if len(h.in) == 0 {
		return 0
	}
	b := h.in[0]
	h.in = h.in[1:]
	return b
}

func (h *hostile) u32() uint32 {
	var b [4]byte
	n := copy(b[:], h.in)
	h.in = h.in[n:]
	return binary.LittleEndian.Uint32(b[:])
}

// some returns one of the likely values, or any.
func (h *hostile) some(likely ...uint32) uint32 {
	k := int(h.byte())
	if k >= 240 {
		return h.u32()
	}
	return likely[k%len(likely)]
}

var fuzzOps = [][]wire.Opcode{
	{
		wire.OpRCSendFirst, wire.OpRCSendMiddle, wire.OpRCSendLast, wire.OpRCSendLastImm, wire.OpRCSendOnly,
		wire.OpRCSendOnlyImm,
		wire.OpRCWriteFirst, wire.OpRCWriteMiddle, wire.OpRCWriteLast, wire.OpRCWriteLastImm, wire.OpRCWriteOnly,
		wire.OpRCWriteOnlyImm,
		wire.OpRCReadRequest, wire.OpRCReadResponseFirst, wire.OpRCReadResponseMid, wire.OpRCReadResponseLast,
		wire.OpRCReadResponseOnly,
		wire.OpRCAck, wire.OpRCAck, wire.OpRCAck, wire.OpRCAtomicAck, wire.OpRCCompareSwap, wire.OpRCFetchAdd,
		wire.OpRCSendLastInv, wire.OpRCSendOnlyInv,
		wire.OpRCAtomicWrite, wire.OpRCAtomicWrite, wire.OpRCFlush,
		wire.OpUCSendOnly, wire.OpCNP, wire.OpCNP, wire.OpRCSelectiveAck, wire.OpRCSelectiveAck, wire.OpRCSelectiveAck,
	}, {
		wire.OpUCSendFirst, wire.OpUCSendMiddle, wire.OpUCSendLast, wire.OpUCSendLastImm, wire.OpUCSendOnly,
		wire.OpUCSendOnlyImm,
		wire.OpUCWriteFirst, wire.OpUCWriteMiddle, wire.OpUCWriteLast, wire.OpUCWriteLastImm, wire.OpUCWriteOnly,
		wire.OpUCWriteOnlyImm, wire.OpRCAck,
	}, {wire.OpUDSendOnly, wire.OpUDSendOnlyImm, wire.OpRCSendOnly},
}

const (
	keySecret = 7 // no remote rights; also the source of sends
	keyRead   = 8
	keyWrite  = 9
	keyRecv   = 10
	secret    = 0xa5
)

func runHostile(t *testing.T, data []byte) {
	h := &hostile{in: data}
	typ := int(h.byte()) % 3
	o := opts()
	o.typ = [...]Type{RC, UC, UD}[typ]
	o.psnA, o.psnB = h.some(0, 1, psnMask, psnMask-2, 1<<23)&psnMask, h.some(0, psnMask)&psnMask
	o.mtu, o.destRd = 1, h.byte()%4
	o.srq = h.byte()&1 != 0
	o.retry, o.rnr = h.byte()&7, h.byte()&7
	var f *fabric
	var b *node
	var sent *[]wire.RoCE
	if typ == 2 {
		f = newFabric(t, 1)
		b = f.datagramQP("b", UD, 0x22, 7)
		b.q.attr.AV = o.avB
		sent = new([]wire.RoCE)
		b.onTx = func(p *wire.RoCE, _ []byte) bool { *sent = append(*sent, *p); return true }
	} else {
		f, b, sent = lone(t, o)
	}
	// Two guard areas around the two exposed areas, all in one address range.
	const size = 1024
	mem := make([]byte, 4*size)
	for i := range mem {
		mem[i] = secret
	}
	b.regions[keySecret] = &region{va: 0, buf: mem, access: translate.LocalWrite}
	b.regions[keyRead] = &region{va: size, buf: mem[size : 2*size], access: translate.RemoteRead}
	b.regions[keyWrite] = &region{va: 2 * size, buf: mem[2*size : 3*size],
		access: translate.RemoteWrite | translate.RemoteAtomic}
	clear(mem[size : 3*size])
	recv := b.reg(keyRecv, 0, 2048, translate.LocalWrite)
	results := b.reg(1, 0, 4096, translate.LocalWrite)
	_, _ = recv, results
	if h.byte()&1 != 0 { // pages become present if the input says so
		b.paging(int64(h.byte()), 0.3, 0.1)
		b.service = func() int64 { return -1 }
		b.fault = func(what string) translate.MissKind {
			if what == "fetchsend" && h.byte()&3 == 0 {
				return translate.GuestFault
			}
			return 0
		}
	}
	for k := range 6 {
		b.postRecv(sge(keyRecv, 100, k*300))
	}
	for range h.byte() % 8 {
		switch h.byte() % 5 {
		case 0:
			b.post(WQE{Opcode: WRRead, RKey: 1, SGEs: []SGE{sge(1, 16, int(h.byte())*12)}})
		case 1:
			b.post(WQE{Opcode: WRFetchAdd, RKey: 1, SGEs: []SGE{sge(1, 8, 8)}})
		case 2:
			b.post(WQE{Opcode: WRWrite, RKey: 1, SGEs: []SGE{sge(1, 0, int(h.byte())*12)}})
		default:
			b.post(WQE{Opcode: WRSend, AV: o.avB, RemoteQPN: 0x11, Fence: true, SGEs: []SGE{sge(1, 0, int(h.byte()))}})
		}
	}
	b.runAll()
	for len(h.in) > 0 {
		op := fuzzOps[typ][int(h.byte())%len(fuzzOps[typ])]
		base := uint32(b.q.resp.epsn)
		if op.Info().Is(wire.Response) {
			base = uint32(b.q.req.una)
		}
		c := craft{
			op: op, psn: base + h.some(0, 0, 0, 1, 2, psnMask, psnMask-1, 1<<23, 1<<23-1), ack: h.byte()&1 != 0,
			qkey:   h.some(7),
			va:     uint64(h.some(size, 2*size, 0, size-8, 2*size-8, 3*size-8, 3*size)),
			key:    h.some(keyRead, keyWrite, keySecret, 0),
			length: h.some(0, 1, 8, 256, 257, 600, 1024, 1025, 1<<31, 1<<31+1, 1<<32-1), swap: uint64(h.byte()),
			cmp:  uint64(h.byte()),
			syn:  wire.Syndrome(h.some(0x1f, 0x1f, 0x1f, 0x20, 0x3f, 0x60, 0x61, 0x62, 0x63, 0x64)),
			data: make([]byte, h.some(0, 256, 256, 8, 1, 255, 257, 1000)%1400),
		}
		if h.byte() == 0 {
			c.va |= 1 << 63
		}
		k := h.byte()
		c.wait = [...]wire.Patience{wire.PatienceUnknown, wire.PatienceEnds, wire.PatienceForever, 0x3f}[k>>2&3]
		if c.sel = k&3 != 0; op == wire.OpRCSelectiveAck {
			c.there = wire.Arrivals{uint64(h.u32()), uint64(h.byte())}
		}
		if !op.Info().Is(wire.HasPayload) {
			c.data = nil
		}
		b.inject(c)
		if h.byte()&3 != 0 {
			*sent = (*sent)[:0]
			b.runAll()
			// At most what can be in flight: all remembered responses at full length, the window, an acknowledgement,
			// and flushes.
			if n := len(*sent); n > 4*(size/256+2)+128+2 {
				t.Fatalf("one packet made the QP send %d packets", n)
			}
			for _, p := range *sent {
				for _, x := range p.Payload {
					if x == secret && p.Info.Op == wire.ReadResponse {
						t.Fatal("a READ response contains memory that was not exposed")
					}
				}
			}
		}
		for _, done := range b.open {
			if done != nil && h.byte()&3 == 0 {
				done(h.byte()&7 != 0)
			}
		}
		if h.byte()&15 == 0 && b.timer != 0 {
			f.now = max(f.now, b.timer)
			b.timer = 0
			leave := b.enter()
			b.q.Timer(f.now)
			leave()
		}
		if b.q.State() == Err {
			b.fault = nil
			b.runAll()
			if b.q.req.head != b.q.req.tail {
				t.Fatal("not flushed")
			}
			break
		}
	}
	for i, x := range mem {
		if x != secret && (i < size || i >= 3*size) || i >= size && i < 2*size && x != 0 {
			t.Fatalf("memory at %d was written", i)
		}
	}
	if b.q.resp.pending < 0 || b.q.req.una > b.q.req.nxt || b.q.req.nxt > b.q.req.sent && typ == 0 ||
		int32(b.q.req.tail-b.q.req.head) < 0 || int32(b.q.req.cur-b.q.req.head) < 0 ||
		int32(b.q.req.tail-b.q.req.cur) < 0 {
		t.Fatalf("inconsistent: %+v", b.q.req)
	}
	if len(b.recvs) > 6 || len(b.sends) > len(b.sq) {
		t.Fatal("more completions than requests")
	}
	b.modify(Attr{State: Reset}, MaskState)
	if n := f.held.InUse(); n != 0 {
		t.Fatalf("%d frames are held", n)
	}
}

func FuzzReceive(f *testing.F) { fuzzFrom(f, 400, runHostile) }

// TestHostile runs fixed seeds, so that every test run covers it.
func TestHostile(t *testing.T) { runFixed(t, 2, 1200, runHostile) }

// fuzzFrom fuzzes run, from inputs of up to 20+most bytes.
func fuzzFrom(f *testing.F, most int, run func(*testing.T, []byte)) {
	rng := rand.New(rand.NewSource(1))
	for range 50 {
		b := make([]byte, 20+rng.Intn(most))
		rng.Read(b)
		f.Add(b)
	}
	f.Fuzz(run)
}

// runFixed runs a seed's random inputs, of up to most bytes each, and logs the first that fails.
func runFixed(t *testing.T, seed int64, most int, run func(*testing.T, []byte)) {
	n := 2000
	if testing.Short() {
		n = 1000
	}
	rng := rand.New(rand.NewSource(seed))
	b := make([]byte, most)
	for range n {
		k := 10 + rng.Intn(len(b)-10)
		rng.Read(b[:k])
		if run(t, b[:k]); t.Failed() {
			t.Fatalf("input %x", b[:k])
		}
	}
}
