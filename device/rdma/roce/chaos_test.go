package roce

import (
	"encoding/binary"
	"fmt"
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Mixed operations in random order over a bad network, compared with a naive model.
//
// The model executes each request at once. The transport promises this result if no request touches bytes that an
// earlier request in flight touches, unless ordering rules cover the pair (writes and atomics execute in order). So
// every WQE gets its own source or result area; writes and sends share a small target and may overlap each other; READs
// use their own area; atomics a few words.

type impair struct {
	name   string
	loss   float64
	every  int // every k-th frame is lost
	dup    float64
	jitter int64
	late   int64 // maximum delay of a duplicate
	lag    int64 // maximum delay of a Run
	flip   float64
	reads  bool // short READs and atomics only
}

var impairments = []impair{
	{name: "clean"},
	{name: "loss1", loss: 0.01},
	{name: "loss20", loss: 0.20},
	{name: "every3", every: 3},
	{name: "every2", every: 2},
	{name: "dup", dup: 0.3},
	{name: "late", dup: 0.3, late: 60e3, lag: 20e3},
	// READs and atomics compete for few resources while copies of old ones arrive.
	{name: "late-reads", dup: 0.5, late: 60e3, lag: 20e3, reads: true},
	{name: "later", dup: 0.3, late: 3e6, lag: 20e3},
	{name: "reorder", jitter: 40e3},
	{name: "corrupt", flip: 0.05},
	{name: "all", loss: 0.05, dup: 0.05, late: 300e3, lag: 10e3, jitter: 30e3, flip: 0.02},
	{name: "slow", jitter: 60e6}, // beyond the timeout
}

func (f *fabric) impair(im impair) {
	n := 0
	f.dup, f.late, f.lag, f.jitter, f.flip = im.dup, im.late, im.lag, im.jitter, im.flip
	f.loss = func(*wire.RoCE) bool {
		n++
		if f.rng.Intn(8) == 0 {
			n++ // otherwise the repetitions may stay in step with the losses for ever
		}
		return im.every != 0 && n%im.every == 0 || f.rng.Float64() < im.loss
	}
}

func TestRCChaos(t *testing.T) {
	for i, im := range impairments {
		for seed := range int64(3) {
			for _, m := range []localMode{framesOnly, localOn, localMixed} {
				t.Run(fmt.Sprintf("%s/%v/%d", im.name, m, seed), func(t *testing.T) {
					chaos(t, im, m, seed*100+int64(i), false, 0)
				})
				t.Run(fmt.Sprintf("%s/%v/faults/%d", im.name, m, seed), func(t *testing.T) {
					chaos(t, im, m, seed*100+int64(i), true, 0)
				})
			}
		}
	}
}

// chaosSide is one direction: requests from x act on y's memory.
type chaosSide struct {
	x, y     *node
	want     []byte // model of y's target area
	wantRead map[int][]byte
	wantAt   map[int]uint64
	recvs    []cqe
	recvData map[int][]byte
}

const (
	chTarget  = 0x100000 // writes: 32 KiB
	chAtomics = 0x200000 // 4 words
	chSource  = 0x300000 // source of READs, never written: 64 KiB
	chLocal   = 0x800000 // per WQE: 64 KiB
	chRecv    = 0x4000000
	chPer     = 1 << 16
	chRecvPer = 1 << 15
)

func chaos(t *testing.T, im impair, m localMode, seed int64, faults bool, moves float64) {
	f := newFabric(t, seed)
	f.moves = moves
	f.local = m
	rng := rand.New(rand.NewSource(seed + 7))
	o := opts()
	o.retry = 7
	o.mtu = uint8(1 + rng.Intn(5))
	o.rd = uint8(1) << rng.Intn(4)
	o.destRd = o.rd + uint8(max(0, rng.Intn(6)-3)) // mostly the number that the requester uses
	o.psnA, o.psnB = psnMask-uint32(rng.Intn(300)), psnMask-uint32(rng.Intn(300))
	o.outstanding = 1 << rng.Intn(7)
	o.win = 8 << rng.Intn(5)
	o.minRNR = 10
	o.backA, o.backB = seed/100%3 == 1, seed/100%3 == 2 // seed 0: both use selective repeat
	a, b := f.pair(o)
	// Chaos may exceed any retry count; the test is about the data.
	a.q.attr.RetryCnt, b.q.attr.RetryCnt, a.q.recovery.retryLeft, b.q.recovery.retryLeft = 255, 255, 255, 255
	f.budget = 1 + rng.Intn(100)
	count := 25
	if im.reads {
		count = 80
	}
	for _, n := range []*node{a, b} {
		n.chaosRegions(count)
	}
	sides := []*chaosSide{{x: a, y: b}, {x: b, y: a}}
	for _, s := range sides {
		s.build(rng, count, im.reads)
	}
	if faults {
		a.chaosFaults(seed + 1)
		b.chaosFaults(seed + 2)
	}
	watchAcks(t, a, b)
	watchAcks(t, b, a)
	f.impair(im)
	late := rng.Intn(2) == 0 // some receives are posted late: RNR
	for _, s := range sides {
		if late {
			all := s.y.rq
			s.y.rq = nil
			f.settle(3e6)
			s.y.rq = all
		}
	}
	f.until("chaos", 600e9, func() bool { return len(a.sends) == count && len(b.sends) == count })
	f.loss, f.dup, f.flip = nil, 0, 0
	f.settle(1e9)
	for _, s := range sides {
		s.check(t)
	}
}

// An invalid address somewhere among other requests: requests before it are done, it completes with the proper status,
// and requests behind it are flushed (PF-13).
func TestRCChaosInvalid(t *testing.T) {
	for _, im := range []impair{impairments[0], impairments[2],
		{name: "mess", loss: 0.02, dup: 0.1, late: 100e3, lag: 10e3, jitter: 20e3}} {
		for seed := range int64(12) {
			for _, m := range []localMode{framesOnly, localOn, localMixed} {
				t.Run(fmt.Sprintf("%s/%v/%d", im.name, m, seed), func(t *testing.T) { chaosInvalid(t, im, m, seed) })
			}
		}
	}
}

func chaosInvalid(t *testing.T, im impair, m localMode, seed int64) {
	f := newFabric(t, seed)
	f.local = m
	rng := rand.New(rand.NewSource(seed + 70))
	o := opts()
	o.mtu, o.win, o.outstanding = uint8(1+rng.Intn(5)), 8<<rng.Intn(5), 1<<rng.Intn(7)
	a, b := f.pair(o)
	a.q.attr.RetryCnt, a.q.recovery.retryLeft = 255, 255
	const count = 25
	for _, n := range []*node{a, b} {
		n.chaosRegions(count)
		n.chaosFaults(seed)
	}
	s := &chaosSide{x: a, y: b}
	s.build(rng, count, false)
	f.impair(im)
	// The victim is a WQE with local data, or a SEND whose receive buffer is invalid.
	k, st, node := 0, StatusLocProt, a
	base, key := uint64(0), translate.Key(4)
	for {
		k = rng.Intn(count)
		if w := &a.sq[k]; w.Inline || w.Length == 0 {
			continue
		}
		base = chLocal + uint64(k)*chPer
		break
	}
	recv := -1
	for i := range k + 1 {
		if op := a.sq[i].Opcode; op == WRSend || op == WRSendImm || op == WRWriteImm {
			recv++
		}
	}
	if op := a.sq[k].Opcode; (op == WRSend || op == WRSendImm) && rng.Intn(2) == 0 {
		st, node, key = StatusRemOp, b, 5
		base = chRecv + uint64(recv)*chRecvPer
	}
	node.pages[pageID{key, base / pageBytes}] = guestAbsent
	node.refuse = func(m translate.Miss) bool { return m.Key == key && uint64(m.VA)/pageBytes == base/pageBytes }
	f.until("chaos", 600e9, func() bool { return len(a.sends) == count })
	f.settle(3e9)
	end := k
	if node == b {
		// The answer to a READ or atomic before it may have been dropped for a fault at a, and b answers no more.
		for i := range k {
			if a.sq[i].Opcode.info().kind.needsResponse() && a.sends[i].c.Status == StatusRetryExc {
				end = i
				break
			}
		}
	}
	for i, c := range a.sends {
		want := StatusSuccess
		switch {
		case i == end && i < k:
			want = StatusRetryExc
		case i == k && i == end:
			want = st
		case i > end:
			want = StatusFlush
		}
		if i == k && node == b && im.loss > 0 && c.c.Status == StatusRetryExc {
			continue // a NAK is sent once
		}
		if c.c.Status != want {
			t.Fatalf("WQE %d of %d: status %d, want %d", i, k, c.c.Status, want)
		}
	}
	a.wantState(Err)
	if node == b {
		b.wantState(Err)
		if got := b.recvs[recv].c.Status; got != StatusLocProt {
			t.Errorf("receive %d: status %d", recv, got)
		}
	} else {
		b.wantState(RTS)
	}
	for i, want := range s.wantRead {
		if i < end {
			same(t, fmt.Sprintf("READ %d", i), a.regions[4].buf[i*chPer:i*chPer+len(want)], want)
		}
	}
	// More than one if the invalid page is met again during another fault.
	if node.failed < 1 || node.failed > 20 {
		t.Errorf("%d faults answered as invalid", node.failed)
	}
}

// chaosRegions registers the regions for count requests.
func (n *node) chaosRegions(count int) {
	n.reg(1, chTarget, 32<<10, allAccess)
	n.reg(2, chAtomics, 32, allAccess)
	n.reg(3, chSource, chPer, allAccess)
	n.reg(4, chLocal, count*chPer, allAccess)
	n.reg(5, chRecv, count*chRecvPer, allAccess)
}

// chaosFaults makes n's memory come and go at both stages, its work queues too, with service times from 0 to more than
// faultRetry.
func (n *node) chaosFaults(seed int64) {
	n.paging(seed, 0.5, 0.01)
	n.service = func() int64 { return n.rng.Int63n([]int64{1, 20e3, 200e3, 2e6, 20e6, 150e6}[n.rng.Intn(6)]) }
	n.delay = n.rng.Int63n(1e6)
	n.fault = func(what string) translate.MissKind {
		if what == "fetchsend" && n.rng.Intn(10) == 0 {
			return translate.HostFault
		}
		return 0
	}
	n.recvMiss = func() Fetch {
		if n.rng.Intn(10) == 0 {
			return FetchFault
		}
		return FetchReady
	}
}

// watchAcks fails if y's ACKs would mislead a requester that trusts them as Linux rxe does: an ACK must not carry the
// PSN of a READ or atomic, and no ACK or NAK may overtake the answer to an earlier one, except an RNR NAK for that
// request itself.
func watchAcks(t *testing.T, x, y *node) {
	answered := map[uint32]bool{}
	before := x.onTx
	x.onTx = func(p *wire.RoCE, frame []byte) bool {
		switch p.Info.Op {
		case wire.ReadRequest:
			for i := range uint32(packets(uint64(p.RETH().Length), x.q.mtu)) {
				answered[(p.BTH.PSN+i)&psnMask] = true
			}
		case wire.CompareSwap, wire.FetchAdd:
			answered[p.BTH.PSN] = true
		}
		return before != nil && before(p, frame)
	}
	other := y.onTx
	y.onTx = func(p *wire.RoCE, frame []byte) bool {
		if p.Info.Op == wire.Ack {
			kind := p.AETH().Syndrome.Kind()
			if kind == wire.SyndromeACK && answered[p.BTH.PSN] {
				t.Errorf("ACK for the PSN %#x of a READ or atomic", p.BTH.PSN)
			}
			if y.q.resp.pending != 0 && !y.paused {
				// Allowed while the oldest READ waits for a page: an ACK for requests before it, and its RNR NAK.
				r, psn := y.q.resp.oldestPending(), extend(y.q.resp.epsn, p.BTH.PSN)
				if psn >= r.first && (kind != wire.SyndromeRNR || psn < r.next || psn >= r.stop) ||
					y.q.faults.read.psn != r.next {
					t.Errorf("%v %#x for %#x sent before %d answers", p.BTH.Opcode, p.AETH().Syndrome, psn,
						y.q.resp.pending)
				}
			}
		}
		return other != nil && other(p, frame)
	}
}

func (s *chaosSide) build(rng *rand.Rand, count int, reads bool) {
	s.wantRead, s.wantAt, s.recvData = map[int][]byte{}, map[int]uint64{}, map[int][]byte{}
	s.want = append([]byte{}, s.y.regions[1].buf...)
	words := append([]byte{}, s.y.regions[2].buf...)
	local := s.x.regions[4]
	size := func(limit int) int {
		switch rng.Intn(5) {
		case 0:
			return rng.Intn(9)
		case 1:
			return 256 << rng.Intn(5)
		case 2:
			return rng.Intn(limit + 1)
		}
		return rng.Intn(3000)
	}
	for i := range count {
		base := uint64(chLocal + i*chPer)
		area := local.buf[i*chPer : (i+1)*chPer]
		w := WQE{Fence: rng.Intn(8) == 0, Solicited: rng.Intn(2) == 0}
		split := func(n int) (sg []SGE) {
			at := 0
			for k := rng.Intn(4); k > 0 && n-at > 1; k-- {
				l := rng.Intn(n - at)
				sg = append(sg, sge(4, base+uint64(at), l))
				at += l
			}
			return append(sg, sge(4, base+uint64(at), n-at))
		}
		recv := func(n int, imm bool, write bool) {
			r := uint64(chRecv + len(s.recvs)*chRecvPer)
			s.y.postRecv(sge(5, r, n/2), sge(5, r+uint64(n/2), chRecvPer-n/2))
			c := cqe{id: uint64(5000 + len(s.recvs)), c: Completion{Opcode: WCRecv, ByteLen: uint32(n),
				SrcQP: s.x.q.QPN(), VLAN: NoVLAN, Solicited: w.Solicited}}
			if write {
				c.c.Opcode = WCRecvWithImm
			} else {
				s.recvData[len(s.recvs)] = append([]byte{}, area[:n]...)
			}
			if imm {
				c.c.Flags, c.c.Imm = FlagImm, w.Imm
			}
			s.recvs = append(s.recvs, c)
		}
		k := rng.Intn(8)
		if reads {
			k = 5 + rng.Intn(3)
		}
		switch k {
		case 0, 1: // WRITE
			n := size(32 << 10)
			off := rng.Intn(32<<10 - n + 1)
			w.Opcode, w.RKey, w.RemoteVA = WRWrite, 1, vaOf(chTarget+off)
			w.SGEs = split(n)
			copy(s.want[off:], area[:n])
			if k == 1 {
				w.Opcode = WRWriteImm
				rng.Read(w.Imm[:])
				recv(n, true, true)
			}
		case 2: // inline WRITE
			n := rng.Intn(257)
			off := rng.Intn(32<<10 - n)
			w.Opcode, w.RKey, w.RemoteVA = WRWrite, 1, vaOf(chTarget+off)
			w.Inline, w.InlineData = true, append([]byte{}, area[:n]...)
			copy(s.want[off:], area[:n])
		case 3, 4: // SEND
			n := size(chRecvPer / 2)
			w.Opcode = WRSend
			w.SGEs = split(n)
			if k == 4 {
				w.Opcode = WRSendImm
				rng.Read(w.Imm[:])
			}
			recv(n, k == 4, false)
		case 5: // READ
			n := size(60 << 10)
			if reads {
				n = rng.Intn(3000)
			}
			off := rng.Intn(chPer - n)
			if reads {
				off %= 2000 // many READs of one page
			}
			w.Opcode, w.RKey, w.RemoteVA = WRRead, 3, vaOf(chSource+off)
			w.SGEs = split(n)
			s.wantRead[i] = append([]byte{}, s.y.regions[3].buf[off:off+n]...)
		default: // atomics
			o := rng.Intn(4) * 8
			w.RKey, w.RemoteVA = 2, vaOf(chAtomics+o)
			w.SGEs = split(8)
			v := binary.LittleEndian.Uint64(words[o:])
			s.wantAt[i] = v
			if k == 6 {
				w.Opcode, w.SwapAdd = WRFetchAdd, rng.Uint64()
				v += w.SwapAdd
			} else {
				w.Opcode, w.Compare, w.SwapAdd = WRCompareSwap, v, rng.Uint64()
				if rng.Intn(3) == 0 {
					w.Compare++
				} else {
					v = w.SwapAdd
				}
			}
			// A third becomes ATOMIC WRITEs, by a value drawn already: another draw would change the cases of all
			// seeds.
			if w.SwapAdd%3 == 0 {
				w.Opcode, v = WRAtomicWrite, w.SwapAdd
				binary.LittleEndian.PutUint64(area, v)
				s.wantAt[i] = v // the result area stays unchanged
				if w.Inline = v&8 == 0; w.Inline {
					w.InlineData = append([]byte{}, area[:8]...)
				}
			}
			binary.LittleEndian.PutUint64(words[o:], v)
		}
		s.x.post(w)
	}
	s.wantAt[-1] = binary.LittleEndian.Uint64(words)
	s.wantAt[-2] = binary.LittleEndian.Uint64(words[24:])
}

func (s *chaosSide) check(t *testing.T) {
	t.Helper()
	for i, c := range s.x.sends {
		if c.c.Status != 0 || c.id != uint64(1000+i) {
			t.Fatalf("%s: WQE %d (opcode %d): completion %+v", s.x.name, i, s.x.sq[i].Opcode, c)
		}
	}
	same(t, s.y.name+" written memory", s.y.regions[1].buf, s.want)
	for i, want := range s.wantRead {
		same(t, fmt.Sprintf("%s READ %d", s.x.name, i), s.x.regions[4].buf[i*chPer:i*chPer+len(want)], want)
	}
	for i, want := range s.wantAt {
		var got uint64
		switch i {
		case -1:
			got = binary.LittleEndian.Uint64(s.y.regions[2].buf)
		case -2:
			got = binary.LittleEndian.Uint64(s.y.regions[2].buf[24:])
		default:
			got = binary.LittleEndian.Uint64(s.x.regions[4].buf[i*chPer:])
		}
		if got != want {
			t.Fatalf("%s: atomic %d is %#x, want %#x", s.x.name, i, got, want)
		}
	}
	if len(s.y.recvs) != len(s.recvs) {
		t.Fatalf("%s: %d receive completions, want %d", s.y.name, len(s.y.recvs), len(s.recvs))
	}
	for i, want := range s.recvs {
		if s.y.recvs[i] != want {
			t.Fatalf("%s: receive %d is %+v, want %+v", s.y.name, i, s.y.recvs[i], want)
		}
		if d, ok := s.recvData[i]; ok {
			same(t, "received data", s.y.regions[5].buf[i*chRecvPer:i*chRecvPer+len(d)], d)
		}
	}
}

func vaOf(n int) translate.VA { return translate.VA(n) }
