package roce

import (
	"bytes"
	"container/heap"
	"encoding/binary"
	"fmt"
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// The test fabric: QPs with adapters over plain Go memory, joined by queues of frames, under one virtual clock. Every
// frame is parsed and its ICRC checked as the device would.

type region struct {
	va     uint64
	buf    []byte
	access translate.Access
}

func (r *region) at(va, n uint64) ([]byte, bool) {
	if va < r.va || va+n < va || va+n > r.va+uint64(len(r.buf)) {
		return nil, false
	}
	return r.buf[va-r.va : va-r.va+n], true
}

type cqe struct {
	id uint64
	c  Completion
}

type node struct {
	f       *fabric
	name    string
	q       *QP
	regions map[translate.Key]*region

	sq        []WQE
	rq        []RecvWQE
	rqNext    int
	sends     []cqe // all send completions, unsignalled ones too
	recvs     []cqe
	events    []EventKind
	run       bool
	journaled bool   // see Adapter.Journaled
	stored    uint64 // see Memory.Stored
	timer     int64
	inCall    bool
	noBufs    int                                  // the next noBufs calls of GetBuf fail
	fault     func(what string) translate.MissKind // injected misses
	recvMiss  func() Fetch                         // injected FetchRecv results
	bad       map[uint32]Status                    // send WQEs that FetchSend finds bad
	manage    func(w *WQE) translate.Outcome       // memory management requests
	invalid   []translate.Key                      // keys invalidated by the peer
	onTx      func(p *wire.RoCE, frame []byte) (drop bool)
	pager
	// What connection management says of its peer: that it retries RNR NAKs for ever, or anything.
	waits    bool
	patience wire.Patience
	paused   bool // its VM is paused: guest memory must not be accessed
	hostile  bool // its QP's state was made up: it may contradict what the node knows
	unmarked bool // its packets do not say what it does after RNR NAKs: rxe, an older vnicd
	slow     bool // its frames go through the link
	pad      bool // the frame being sent may be padded
	seen     map[uint32]bool
	atomics  int
	maxTimer int64
	runsAt   func(now int64) int64 // when its loop runs, from now on; nil: always
	budget
}

type delivery struct {
	at    int64
	order int
	frame []byte
	fn    func() // called instead of delivering a frame
}

// deliveries is a heap by time, then order of sending.
type deliveries []delivery

func (q deliveries) Len() int { return len(q) }
func (q deliveries) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].order < q[j].order
}
func (q deliveries) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *deliveries) Push(x any)   { *q = append(*q, x.(delivery)) }
func (q *deliveries) Pop() any {
	d := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return d
}

type fabric struct {
	t      testing.TB
	now    int64
	nodes  []*node
	queue  deliveries
	order  int
	pool   *frame.Pool
	held   *frame.Pool // frames held by QPs
	frame  []byte      // the frame being received
	rng    *rand.Rand
	delay  int64
	jitter int64 // reorders
	loss   func(p *wire.RoCE) bool
	dup    float64
	lag    int64   // maximum delay of a scheduled QP's Run
	late   int64   // maximum delay of a duplicate behind the original
	flip   float64 // corruption rate
	frames int
	bytes  int
	p      wire.RoCE
	budget int
	steps  int
	moves  float64 // probability that a step moves a QP to another process
	local  localMode
	link   *link // link shared by frames of some nodes; nil: none
}

func newFabric(t testing.TB, seed int64) *fabric {
	pool, err := frame.NewPool(frame.Config{Count: 4, Capacity: 4300})
	if err != nil {
		t.Fatal(err)
	}
	return &fabric{t: t, now: 1e9, pool: pool, held: newHeld(t, 256), rng: rand.New(rand.NewSource(seed)), delay: 5e3,
		budget: 64}
}

// newHeld returns the pool of held frames.
func newHeld(t testing.TB, n int) *frame.Pool {
	pool, err := frame.NewPool(frame.Config{Count: n, Capacity: 4300})
	if err != nil {
		t.Fatal(err)
	}
	return pool
}

func (f *fabric) node(name string, cfg Config) *node {
	n := &node{f: f, name: name, regions: map[translate.Key]*region{}, seen: map[uint32]bool{},
		bad: map[uint32]Status{}}
	n.q = NewQP(cfg, n)
	f.nodes = append(f.nodes, n)
	return n
}

// enter fails the test if the QP is called while it calls the adapter.
func (n *node) enter() func() {
	if n.inCall {
		n.f.t.Fatalf("%s: QP entered twice", n.name)
	}
	n.inCall = true
	return func() { n.inCall = false }
}

// awake fails the test if guest memory is accessed during a pause.
func (n *node) awake() {
	if n.paused {
		n.f.t.Fatalf("%s: guest memory accessed while the VM is paused", n.name)
	}
}

func (n *node) FetchSend(seq uint32, w *WQE) Fetch {
	n.awake()
	if n.fault != nil && n.fault("fetchsend") != 0 {
		n.raise(Requester, translate.Miss{})
		return FetchFault
	}
	if seq >= uint32(len(n.sq)) {
		return FetchEmpty
	}
	if n.seen[seq] && !n.hostile {
		n.f.t.Fatalf("%s: send WQE %d fetched twice", n.name, seq)
	}
	n.seen[seq] = true
	src := &n.sq[seq]
	if cap(w.SGEs) < len(src.SGEs) || cap(w.InlineData) < len(src.InlineData) || len(w.SGEs) != 0 ||
		len(w.InlineData) != 0 {
		n.f.t.Fatalf("%s: WQE storage too small or not empty", n.name)
	}
	sg, in := append(w.SGEs, src.SGEs...), append(w.InlineData, src.InlineData...)
	*w = *src
	w.SGEs, w.InlineData, w.Seq = sg, in, seq
	if s, ok := n.bad[seq]; ok {
		w.Status = s
		return FetchBad
	}
	return FetchReady
}

func (n *node) CompleteSend(w *WQE, c *Completion) {
	n.awake()
	if int(w.Seq) != len(n.sends) && !n.hostile {
		n.f.t.Fatalf("%s: send WQE %d completed, want %d", n.name, w.Seq, len(n.sends))
	}
	n.sends = append(n.sends, cqe{w.ID, *c})
}

func (n *node) FetchRecv(w *RecvWQE) Fetch {
	n.awake()
	if n.recvMiss != nil {
		if r := n.recvMiss(); r != FetchReady {
			if r == FetchFault {
				n.raise(Responder, translate.Miss{})
			}
			return r
		}
	}
	if n.rqNext >= len(n.rq) {
		return FetchEmpty
	}
	src := &n.rq[n.rqNext]
	n.rqNext++
	sg := append(w.SGEs, src.SGEs...)
	*w = *src
	w.SGEs = sg
	if w.Status != 0 {
		return FetchBad
	}
	return FetchReady
}

func (n *node) CompleteRecv(w *RecvWQE, c *Completion) {
	n.awake()
	n.recvs = append(n.recvs, cqe{w.ID, *c})
}

func (n *node) miss(what string) (m translate.Miss) {
	n.awake()
	if n.fault != nil {
		if m.Kind = n.fault(what); m.Kind != 0 {
			m.Len = 8
		}
	}
	return m
}

func (n *node) local(sg []SGE, off uint64, b []byte, need translate.Access) translate.Miss {
	for _, s := range sg {
		if off >= uint64(s.Length) {
			off -= uint64(s.Length)
			continue
		}
		k := min(uint64(len(b)), uint64(s.Length)-off)
		r := n.regions[s.Key]
		if r == nil {
			return translate.Miss{Kind: translate.BadKey}
		}
		if need&^r.access != 0 {
			return translate.Miss{Kind: translate.BadAccess}
		}
		m, ok := r.at(uint64(s.VA)+off, k)
		if !ok {
			return translate.Miss{Kind: translate.OutOfRange}
		}
		if m := n.touch(s.Key, uint64(s.VA)+off, k, need); !m.OK() {
			return m
		}
		if need.Writes() {
			copy(m, b[:k])
		} else {
			copy(b[:k], m)
		}
		if b, off = b[k:], 0; len(b) == 0 {
			return translate.Miss{}
		}
	}
	if !n.hostile {
		n.f.t.Fatalf("%s: access beyond the segments, %d bytes left", n.name, len(b))
	}
	return translate.Miss{Kind: translate.OutOfRange}
}

func (n *node) Gather(dst []byte, w *WQE, off uint64) translate.Miss {
	if m := n.miss("gather"); !m.OK() {
		return m
	}
	return n.local(w.SGEs, off, dst, 0)
}

func (n *node) Scatter(sg []SGE, off uint64, src []byte) translate.Miss {
	if m := n.miss("scatter"); !m.OK() {
		return m
	}
	return n.local(sg, off, src, translate.LocalWrite)
}

func (n *node) remote(key translate.Key, va translate.VA, k uint64, need translate.Access) ([]byte, translate.Miss) {
	r := n.regions[key]
	if r == nil {
		return nil, translate.Miss{Kind: translate.BadKey}
	}
	if r.access&need != need {
		return nil, translate.Miss{Kind: translate.BadAccess}
	}
	b, ok := r.at(uint64(va), k)
	if !ok {
		return nil, translate.Miss{Kind: translate.OutOfRange}
	}
	return b, translate.Miss{}
}

func (n *node) CheckRemote(key translate.Key, va translate.VA, k uint64, need translate.Access) translate.Miss {
	_, m := n.remote(key, va, k, need)
	return m
}

func (n *node) FlushRemote(key translate.Key, va translate.VA, k uint64, whole bool,
	need translate.Access) translate.Miss {
	if r := n.regions[key]; whole && r != nil {
		va, k = translate.VA(r.va), 0
	}
	return n.CheckRemote(key, va, k, need)
}

func (n *node) ReadRemote(dst []byte, key translate.Key, va translate.VA) translate.Miss {
	if m := n.miss("readremote"); !m.OK() {
		return m
	}
	b, m := n.remote(key, va, uint64(len(dst)), translate.RemoteRead)
	if m.OK() {
		m = n.touch(key, uint64(va), uint64(len(dst)), translate.RemoteRead)
	}
	if !m.OK() {
		return m
	}
	copy(dst, b)
	return m
}

func (n *node) WriteRemote(key translate.Key, va translate.VA, src []byte) translate.Miss {
	if m := n.miss("writeremote"); !m.OK() {
		return m
	}
	b, m := n.remote(key, va, uint64(len(src)), translate.RemoteWrite)
	if m.OK() {
		m = n.touch(key, uint64(va), uint64(len(src)), translate.RemoteWrite)
	}
	if !m.OK() {
		return m
	}
	copy(b, src)
	return m
}

func (n *node) AtomicRemote(key translate.Key, va translate.VA, op AtomicOp, compare,
	swapAdd uint64) (uint64, translate.Miss) {
	if m := n.miss("atomic"); !m.OK() {
		return 0, m
	}
	if va&7 != 0 {
		n.f.t.Fatalf("%s: misaligned atomic reached memory", n.name)
	}
	b, m := n.remote(key, va, 8, op.Needs())
	if m.OK() {
		m = n.touch(key, uint64(va), 8, op.Needs())
	}
	if !m.OK() {
		return 0, m
	}
	n.atomics++
	old := binary.LittleEndian.Uint64(b)
	switch {
	case op == AtomicFetchAdd:
		binary.LittleEndian.PutUint64(b, old+swapAdd)
	case op == AtomicWrite || old == compare:
		binary.LittleEndian.PutUint64(b, swapAdd)
	}
	return old, translate.Miss{}
}

func (n *node) InvalidateRemote(key translate.Key) translate.Outcome {
	if n.regions[key] == nil {
		return translate.Refused
	}
	n.invalid = append(n.invalid, key)
	return translate.Done
}

func (n *node) Manage(w *WQE) (translate.Outcome, translate.Miss) {
	if m := n.miss("manage"); !m.OK() {
		if m.Fault() {
			m.VA = translate.VA(w.Manage.List)
		}
		return translate.Done, m
	}
	if n.manage == nil {
		return translate.Refused, translate.Miss{}
	}
	return n.manage(w), translate.Miss{}
}

func (n *node) GetBuf() *frame.Buf {
	if n.noBufs > 0 {
		n.noBufs--
		return nil
	}
	return n.f.pool.Get()
}

func (n *node) Hold(bool) *frame.Buf {
	b := n.f.held.Get()
	if b != nil && !b.Append(n.f.frame) {
		n.f.t.Fatal("no room for a frame")
	}
	return b
}

func (n *node) Release(b *frame.Buf) { b.Free() }
func (n *node) PeerPatience() wire.Patience {
	if n.waits {
		return wire.PatienceForever
	}
	return n.patience
}

func (n *node) InHand(b *frame.Buf) {
	if n.f.frame = nil; b != nil {
		n.f.frame = b.Bytes()
	}
}

func (n *node) Schedule()         { n.run = true }
func (n *node) ArmTimer(at int64) { n.timer = at; n.maxTimer = max(n.maxTimer, at-n.f.now) }
func (n *node) Event(k EventKind) { n.events = append(n.events, k) }

func (n *node) Transmit(b *frame.Buf) {
	f := n.f
	frame := append([]byte(nil), b.Bytes()...)
	n.pad = b.Offload.Pad
	b.Free()
	f.frames++
	f.bytes += len(frame)
	var p wire.RoCE
	if err := wire.ParseRoCE(frame, header.Locate(frame), &p); err != nil {
		f.t.Fatalf("%s sent a malformed frame: %v\n%x", n.name, err, frame)
	}
	if !wire.CheckICRC(frame, &p) {
		f.t.Fatalf("%s sent a frame with a wrong ICRC", n.name)
	}
	if n.unmarked {
		frame[len(frame)-wire.ICRCLen-len(p.Payload)-int(p.BTH.Pad)-len(p.Ext)-wire.BTHLen+4] &^= 0x3f
	}
	if n.onTx != nil && n.onTx(&p, frame) {
		return
	}
	if f.loss != nil && f.loss(&p) {
		return
	}
	if f.byQPN(p.BTH.DestQP) == nil {
		return
	}
	passed := f.now
	if f.link != nil && n.slow {
		if passed = f.link.pass(f.now, &p, frame); passed < 0 {
			return
		}
	}
	copies := 1
	if f.dup > 0 && f.rng.Float64() < f.dup {
		copies = 2
	}
	for i := range copies {
		g := frame
		if f.flip > 0 && f.rng.Float64() < f.flip {
			g = append([]byte(nil), frame...)
			// Not in the Ethernet header, which the link protects.
			g[14+f.rng.Intn(len(g)-14)] ^= 1 << f.rng.Intn(8)
		}
		at := passed + f.delay
		if f.jitter > 0 {
			at += f.rng.Int63n(f.jitter)
		}
		if i > 0 && f.late > 0 {
			at += f.rng.Int63n(f.late)
		}
		f.order++
		heap.Push(&f.queue, delivery{at: at, order: f.order, frame: g})
	}
}

func (f *fabric) byQPN(qpn uint32) *node {
	for _, n := range f.nodes {
		if n.q.QPN() == qpn {
			return n
		}
	}
	return nil
}

// after calls fn after d ns.
func (f *fabric) after(d int64, fn func()) {
	f.order++
	heap.Push(&f.queue, delivery{at: f.now + d, order: f.order, fn: fn})
}

func (f *fabric) deliver(d *delivery) {
	if d.fn != nil {
		d.fn()
		return
	}
	if err := wire.ParseRoCE(d.frame, header.Locate(d.frame), &f.p); err != nil || !wire.CheckICRC(d.frame, &f.p) {
		return
	}
	if to := f.byQPN(f.p.BTH.DestQP); to != nil {
		if to.receivesLater(d) {
			return
		}
		f.frame = d.frame
		leave := to.enter()
		if to.paused {
			to.q.ReceiveFrozen(f.now, &f.p)
		} else {
			to.q.Receive(f.now, &f.p)
		}
		leave()
	}
}

// step does one thing that is due, or advances the clock to the next; false if nothing is left to do.
func (f *fabric) step() bool {
	f.steps++
	for _, n := range f.nodes {
		n.watched()
		if f.moves > 0 && !n.paused && f.rng.Float64() < f.moves {
			n.move(f.rng.Int63n(200e3))
		}
	}
	// A busy loop: frames that arrive within lag may be received before a QP runs.
	busy := f.lag > 0 && len(f.queue) > 0 && f.queue[0].at <= f.now+f.lag && f.rng.Intn(2) == 0
	for _, n := range f.nodes {
		if n.run && !busy && !n.paused && n.runs(f.now) == f.now {
			n.run = false
			leave := n.enter()
			if n.q.Run(f.now, f.budget) {
				n.run = true
			}
			leave()
			return true
		}
	}
	best, next := len(f.queue)-1, int64(0)
	if best >= 0 {
		next = f.queue[0].at
	}
	var timed *node
	for _, n := range f.nodes {
		if n.timer != 0 && !n.paused && (best < 0 && timed == nil || n.expires() < next) {
			timed, next = n, n.expires()
		}
	}
	switch {
	case timed != nil:
		f.now = max(f.now, next)
		timed.timer = 0
		leave := timed.enter()
		timed.q.Timer(f.now)
		leave()
	case best >= 0:
		d := heap.Pop(&f.queue).(delivery)
		f.now = max(f.now, next)
		f.deliver(&d)
	default:
		return false
	}
	return true
}

// until steps until done, for at most limit ns of virtual time.
func (f *fabric) until(what string, limit int64, done func() bool) {
	f.t.Helper()
	end := f.now + limit
	for !done() {
		if f.now > end || f.steps > 20e6 {
			f.t.Fatalf("%s: not within %d ms of virtual time (%d steps)", what, limit/1e6, f.steps)
		}
		if !f.step() {
			f.t.Fatalf("%s: no event is left", what)
		}
	}
}

// settle steps until nothing happens for a while or nothing is left to do.
func (f *fabric) settle(limit int64) {
	f.t.Helper()
	for end := f.now + limit; f.now < end && f.step(); {
		if f.steps > 20e6 {
			f.t.Fatal("the fabric does not settle")
		}
	}
	if n := f.pool.InUse(); n != 0 {
		f.t.Fatalf("%d frame buffers leaked", n)
	}
	kept := 0
	for _, n := range f.nodes {
		for _, r := range [...]*recovery.Queue{&n.q.resp.reorder.Queue, &n.q.recovery.responses.Queue} {
			queued := 0
			for psn := range r.Span() {
				if r.Peek(psn) != nil {
					queued++
				}
			}
			if queued != r.Len() {
				f.t.Fatalf("%d frames in a reorder queue of length %d", queued, r.Len())
			}
			kept += queued
		}
	}
	if n := f.held.InUse(); n != kept {
		f.t.Fatalf("%d frames are held, but QPs account for %d", n, kept)
	}
}

var (
	ipA = [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}
	ipB = [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 2}
)

func av(from, to [16]byte) AddressVector {
	return AddressVector{DMAC: [6]byte{2, 0, 0, 0, 0, to[15]}, SMAC: [6]byte{2, 0, 0, 0, 0, from[15]},
		VLAN: NoVLAN, SGID: from, DGID: to, HopLimit: 64}
}

type pairOpt struct {
	typ              Type
	mtu              uint8 // enum
	psnA, psnB       uint32
	retry, rnr       uint8
	timeout          uint8
	minRNR           uint8
	rd, destRd       uint8
	access           translate.Access
	avA, avB         AddressVector
	outstanding, win int
	srq, noECN       bool
	backA, backB     bool  // go-back-N
	stay             State // leave both in this state
}

func opts() pairOpt {
	return pairOpt{typ: RC, mtu: 3, psnA: 100, psnB: 0xfffff0, retry: 7, rnr: 7, timeout: 14, minRNR: 12, rd: 4,
		destRd: 4,
		access: translate.RemoteWrite | translate.RemoteRead | translate.RemoteAtomic,
		avA:    av(ipA, ipB), avB: av(ipB, ipA), stay: RTS}
}

const (
	maskInitRC = MaskState | MaskPKeyIndex | MaskPort | MaskAccess
	maskInitUD = MaskState | MaskPKeyIndex | MaskPort | MaskQKey
	maskRTRUC  = MaskState | MaskAV | MaskPathMTU | MaskDestQPN | MaskRQPSN
	maskRTRRC  = maskRTRUC | MaskMaxDestRdAtomic | MaskMinRNRTimer
	maskRTSUC  = MaskState | MaskSQPSN
	maskRTSRC  = maskRTSUC | MaskTimeout | MaskRetryCnt | MaskRNRRetry | MaskMaxRdAtomic
)

func (n *node) modify(a Attr, m Mask) {
	n.f.t.Helper()
	if err := n.q.Modify(n.f.now, &a, m); err != nil {
		n.f.t.Fatal(err)
	}
}

func (n *node) connect(o *pairOpt, peer uint32, av AddressVector, rq, sq uint32) {
	n.f.t.Helper()
	n.modify(Attr{State: Init, Port: 1, Access: o.access}, maskInitRC)
	rtr, rts := maskRTRRC, maskRTSRC
	if o.typ == UC {
		rtr, rts = maskRTRUC, maskRTSUC
	}
	n.modify(Attr{State: RTR, AV: av, PathMTU: o.mtu, DestQPN: peer, RQPSN: rq, MaxDestRdAtomic: o.destRd,
		MinRNRTimer: o.minRNR}, rtr)
	if o.stay == RTR {
		return
	}
	n.modify(Attr{State: RTS, SQPSN: sq, Timeout: o.timeout, RetryCnt: o.retry, RNRRetry: o.rnr, MaxRdAtomic: o.rd},
		rts)
}

func (f *fabric) pair(o pairOpt) (a, b *node) {
	f.t.Helper()
	cfg := Config{Type: o.typ, MaxSendSGE: 8, MaxRecvSGE: 8, MaxInline: 256, MaxOutstanding: o.outstanding,
		Window: o.win, HasSRQ: o.srq, MaxRdAtomic: 128, ECN: !o.noECN}
	cfg.QPN, cfg.SelectiveRepeat = 0x11, !o.backA
	a = f.node("a", cfg)
	cfg.QPN, cfg.SelectiveRepeat = 0x22, !o.backB
	b = f.node("b", cfg)
	a.connect(&o, 0x22, o.avA, o.psnB, o.psnA)
	b.connect(&o, 0x11, o.avB, o.psnA, o.psnB)
	return a, b
}

// reg registers a region of n bytes with random contents.
func (n *node) reg(key translate.Key, va uint64, size int, access translate.Access) *region {
	r := &region{va: va, buf: make([]byte, size), access: access}
	x := n.f.rng.Uint64() | 1
	for i := 0; i < len(r.buf); i++ { // much faster than rng.Read under the race detector
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		r.buf[i] = byte(x)
	}
	n.regions[key] = r
	return r
}

const allAccess = translate.LocalWrite | translate.RemoteWrite | translate.RemoteRead | translate.RemoteAtomic

// post adds a send WQE and schedules the QP.
func (n *node) post(w WQE) {
	if w.Length == 0 {
		for _, s := range w.SGEs {
			w.Length += uint64(s.Length)
		}
		if w.Inline {
			w.Length = uint64(len(w.InlineData))
		}
	}
	w.ID = 1000 + uint64(len(n.sq))
	n.sq = append(n.sq, w)
	n.run = true
}

func (n *node) postRecv(sg ...SGE) {
	w := RecvWQE{ID: 5000 + uint64(len(n.rq)), SGEs: sg}
	for _, s := range sg {
		w.Length += uint64(s.Length)
	}
	n.rq = append(n.rq, w)
}

func sge(key translate.Key, va uint64, n int) SGE {
	return SGE{VA: translate.VA(va), Length: uint32(n), Key: key}
}

// wantSends fails unless the send completions have exactly these statuses.
func (n *node) wantSends(st ...Status) {
	n.f.t.Helper()
	if got := statuses(n.sends); got != fmt.Sprint(st) {
		n.f.t.Fatalf("%s: send completions %s, want %v", n.name, got, st)
	}
}

func (n *node) wantRecvs(st ...Status) {
	n.f.t.Helper()
	if got := statuses(n.recvs); got != fmt.Sprint(st) {
		n.f.t.Fatalf("%s: receive completions %s, want %v", n.name, got, st)
	}
}

func (n *node) wantEvents(e ...EventKind) {
	n.f.t.Helper()
	if fmt.Sprint(n.events) != fmt.Sprint(e) {
		n.f.t.Fatalf("%s: events %v, want %v", n.name, n.events, e)
	}
}

func (n *node) wantState(s State) {
	n.f.t.Helper()
	if n.q.State() != s {
		n.f.t.Fatalf("%s is in state %v, want %v", n.name, n.q.State(), s)
	}
}

func statuses(c []cqe) string {
	s := []Status{}
	for i := range c {
		s = append(s, c[i].c.Status)
	}
	return fmt.Sprint(s)
}

func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("%s: differ from byte %d of %d on", what, i, len(got))
			}
		}
		t.Fatalf("%s: %d bytes, want %d", what, len(got), len(want))
	}
}
