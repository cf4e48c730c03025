package hca

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// naivePager is a simple memory manager of a guest: one lock; pages move, appear and
// disappear at random; released pages must not be written any more.
type naivePager struct {
	t   *testing.T
	g   *guest
	dq  *drvq
	d   *dregion
	rng *rand.Rand

	mu    sync.Mutex
	at    []translate.PA // the location of each page's contents
	spare []translate.PA // free pages, filled with a canary
	resp  [abi.SizeResp + maxReply]byte

	served, moved int
}

const canary = 0xc5

func newNaivePager(t *testing.T, g *guest, pd uint32, pages int, seed uint64) *naivePager {
	p := &naivePager{t: t, g: g, dq: g.faultQueue(4), d: g.demand(pd, pages, demandAccess),
		rng: rand.New(rand.NewPCG(seed, 1))}
	for i := range pages {
		p.at = append(p.at, p.d.home+translate.PA(i*4096))
	}
	for range 8 {
		pa := g.alloc(4096)
		p.spare = append(p.spare, pa)
		paint(g.at(pa, 4096))
	}
	return p
}

func paint(b []byte) {
	for i := range b {
		b[i] = canary
	}
}

// do issues a command from a driver's thread and waits for its answer.
func (p *naivePager) do(op abi.Opcode, payload []byte) abi.Status {
	b := make([]byte, abi.SizeReq, abi.SizeReq+len(payload))
	(&abi.Req{Opcode: op, Length: uint32(len(payload))}).Encode(b)
	n := p.g.runHere(append(b, payload...), p.resp[:], uint64(len(p.resp)))
	var r abi.Resp
	if err := r.Decode(p.resp[:n]); err != nil {
		p.t.Error(err)
	}
	return r.Status
}

func (p *naivePager) want(op abi.Opcode, payload []byte) {
	if s := p.do(op, payload); s != abi.StatusOK {
		p.t.Errorf("%v: %v", op, s)
	}
}

// run serves faults and moves pages until ctx ends.
func (p *naivePager) run(ctx context.Context) {
	for ctx.Err() == nil {
		p.mu.Lock()
		for _, e := range p.dq.events() {
			p.serve(e)
			p.dq.add(1)
		}
		if p.rng.IntN(4) == 0 {
			p.move(p.rng.IntN(len(p.at)))
		}
		p.mu.Unlock()
		time.Sleep(time.Duration(p.rng.IntN(200)) * time.Microsecond)
	}
}

func (p *naivePager) serve(e abi.Event) {
	if e.Type != abi.EventPageFault || e.VA < p.d.iova || e.VA+e.Length > p.d.iova+uint64(len(p.at))*4096 {
		p.t.Errorf("event %+v", e)
		return
	}
	mark := uint64(0)
	if e.Access == 0 || e.Access == abi.AccessRemoteRead {
		mark = abi.MTTReadOnly * uint64(p.rng.IntN(2))
	}
	first, last := (e.VA-p.d.iova)/4096, (e.VA+e.Length-1-p.d.iova)/4096
	if p.rng.IntN(3) == 0 {
		last = first // fewer pages than requested are sufficient
	}
	var pas []uint64
	for i := first; i <= last; i++ {
		pas = append(pas, uint64(p.at[i])|mark)
	}
	set := abi.SetMTT{Handle: p.d.handle, Count: uint16(len(pas)), First: first}
	if p.rng.IntN(2) == 0 {
		set.Flags = abi.SetMTTResume
		p.want(abi.CmdSetMTT, enc(abi.SizeSetMTT, &set, append(pas, uint64(e.Token))...))
	} else {
		p.want(abi.CmdSetMTT, enc(abi.SizeSetMTT, &set, pas...))
		p.want(abi.CmdResumeFault, enc(abi.SizeResumeFault, &abi.ResumeFault{Token: e.Token}))
	}
	p.served++
}

// move unmaps page i and moves it: after the answer to CLEAR_MTT no thread may access
// the old page (ODP-5).
func (p *naivePager) move(i int) {
	p.want(abi.CmdClearMTT, enc(abi.SizeClearMTT, &abi.ClearMTT{Handle: p.d.handle, First: uint64(i), Count: 1}))
	old, k := p.at[i], p.rng.IntN(len(p.spare))
	p.check(p.spare[k])
	copy(p.g.at(p.spare[k], 4096), p.g.at(old, 4096))
	paint(p.g.at(old, 4096))
	p.at[i], p.spare[k] = p.spare[k], old
	p.moved++
}

func (p *naivePager) check(pa translate.PA) {
	for i, b := range p.g.at(pa, 4096) {
		if b != canary {
			p.t.Errorf("byte %d of a page that was released at %v was written", i, pa)
			return
		}
	}
}

// each calls f with the pieces of [off, off+n).
func (p *naivePager) each(off, n int, f func(b []byte)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n > 0 {
		k := min(n, 4096-off%4096)
		f(p.g.at(p.at[off/4096]+translate.PA(off%4096), k))
		off, n = off+k, n-k
	}
}

// warm reports whether enough events have happened to make the test meaningful.
func (p *naivePager) warm() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.served >= 20 && p.moved >= 20 && p.g.space.Faults().Stats().Raised >= 20
}

func (p *naivePager) get(off, n int) (out []byte) {
	p.each(off, n, func(b []byte) { out = append(out, b...) })
	return out
}

func (p *naivePager) put(off int, data []byte) {
	p.each(off, len(data), func(b []byte) { data = data[copy(b, data):] })
}

// evictor evicts memory on the host at random: from first on, and the rings.
func (g *guest) evictor(ctx context.Context, rng *rand.Rand, first translate.PA, rings []*tring) {
	var pages []translate.PA
	for pa := first; pa < g.next; pa += 4096 {
		pages = append(pages, pa)
	}
	for _, r := range rings {
		for _, pa := range r.pas {
			pages = append(pages, translate.PA(pa))
		}
	}
	for ctx.Err() == nil {
		pa := pages[rng.IntN(len(pages))]
		if g.space.Withdraw(pa, 4096) == nil {
			_ = g.space.Epochs().Flip().Wait(ctx)
		}
		time.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
	}
}

// Both levels fault at once, in both VMs, under every operation: pages move and are
// evicted while they are used. In the end every byte is at its place, no
// released page was written, and no operation waits any more.
func TestRandomPaging(t *testing.T) {
	const (
		links  = 5
		slice  = 6 * 4096 // of each connection, in either region
		rounds = 60       // per connection, at least
	)
	w := newWorld(t, 2, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pda, pdb := ga.pd(), gb.pd()
	type link struct {
		a, b           *tqp
		base           int
		done           int
		busy           bool
		op             uint32
		from, to, size int
		want           []byte
		sum            uint64
	}
	var all []*link
	var ringsA, ringsB []*tring
	for i := range links {
		l := &link{a: ga.qp(qpSpec{pd: pda}), b: gb.qp(qpSpec{pd: pdb}), base: i * slice}
		l.a.connectRC(l.b)
		l.b.connectRC(l.a)
		all = append(all, l)
		ringsA, ringsB = append(ringsA, &l.a.sq, &l.a.rq), append(ringsB, &l.b.sq, &l.b.rq)
	}
	firstA, firstB := ga.next, gb.next
	pa, pb := newNaivePager(t, ga, pda, links*slice/4096, 1), newNaivePager(t, gb, pdb, links*slice/4096, 2)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	stopA, stopB := ga.hostDriver(t), gb.hostDriver(t)
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { pa.run(ctx) })
	wg.Go(func() { pb.run(ctx) })
	wg.Go(func() { ga.evictor(ctx, rand.New(rand.NewPCG(3, 1)), firstA, ringsA) })
	wg.Go(func() { gb.evictor(ctx, rand.New(rand.NewPCG(4, 1)), firstB, ringsB) })

	rng := rand.New(rand.NewPCG(5, 1))
	start := func(l *link) {
		l.busy = true
		l.size = 1 + rng.IntN(3*4096)
		l.from, l.to = l.base+rng.IntN(slice-l.size), l.base+rng.IntN(slice-l.size)
		l.op = []uint32{abi.WRRDMAWrite, abi.WRRDMARead, abi.WRSend, abi.WRAtomicFetchAndAdd}[rng.IntN(4)]
		data := make([]byte, l.size)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		s := l.a.wqe()
		s.SetRequest(uint64(l.done), l.op, abi.SendSignaled)
		va := pb.d.iova + uint64(l.to)
		switch l.op {
		case abi.WRRDMARead:
			pb.put(l.to, data)
			s.SetRDMA(va, pb.d.key)
		case abi.WRAtomicFetchAndAdd:
			l.to, l.size = l.to&^7, 8
			data = pb.get(l.to, 8)
			s.SetAtomic(pb.d.iova+uint64(l.to), pb.d.key, 1, 0)
			l.sum = le.Uint64(data) + 1
		case abi.WRSend:
			pa.put(l.from, data)
			l.b.recv(1, abi.SGE{Addr: va, Length: uint32(l.size), LKey: pb.d.key})
		default:
			pa.put(l.from, data)
			s.SetRDMA(va, pb.d.key)
		}
		l.want = data
		s.SetSGEs([]abi.SGE{{Addr: pa.d.iova + uint64(l.from), Length: uint32(l.size), LKey: pa.d.key}})
		l.a.post()
	}
	finish := func(l *link, wc abi.WC) {
		l.busy = false
		if wc.Status != abi.WCSuccess || wc.ID != uint64(l.done) {
			t.Fatalf("op %d, %d bytes: %+v", l.op, l.size, wc)
		}
		l.done++
		near, far := pa.get(l.from, l.size), pb.get(l.to, l.size)
		switch {
		case l.op == abi.WRAtomicFetchAndAdd:
			if !bytes.Equal(near, l.want) || le.Uint64(far) != l.sum {
				t.Fatalf("atomic: returned %x, want %x; there is %x, want %x", near, l.want, far, l.sum)
			}
		case !bytes.Equal(near, l.want) || !bytes.Equal(far, l.want):
			t.Fatalf("op %d: data differs", l.op)
		}
	}
	limit := time.Now().Add(2 * time.Minute)
	for left := 1; left > 0; {
		left = 0
		for _, l := range all {
			switch wcs := l.a.scq.poll(); {
			case len(wcs) == 1 && l.busy:
				finish(l, wcs[0])
			case len(wcs) > 0:
				t.Fatalf("completions %+v", wcs)
			}
			l.b.rcq.poll()
			if !l.busy && (l.done < rounds || !pa.warm() || !pb.warm()) {
				start(l)
			}
			if l.busy {
				left++
			}
		}
		w.step(1)
		w.clock.Advance(20 * time.Microsecond)
		if time.Now().After(limit) {
			for _, l := range all {
				t.Logf("done %d, busy %v, op %d, %d bytes", l.done, l.busy, l.op, l.size)
			}
			t.Fatalf("stuck: %+v, %+v", ga.Describe().Faults, gb.Describe().Faults)
		}
	}
	// Faults of operations that do not need them any more (a copy of a packet) are answered too.
	w.until("no operation waits", func() bool {
		a, b := ga.Describe().Faults, gb.Describe().Faults
		return a.Parked+b.Parked == 0 && a.Guest.Waiting+a.Host.Waiting+b.Guest.Waiting+b.Host.Waiting == 0
	})
	cancel()
	wg.Wait()
	stopA()
	stopB()
	for _, p := range []*naivePager{pa, pb} {
		for _, s := range p.spare {
			p.check(s)
		}
	}
}

// A flush of a long send queue whose header is absent on the host keeps few completions, however long that takes, and
// completes all requests when the page is there.
func TestFlushKeepsFewCompletions(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	const n = 1000
	c := g.cq(2048)
	q := g.qp(qpSpec{pd: g.pd(), elems: 1024, scq: c, rcq: g.cq(16)})
	q.connectRC(q)
	for i := range n {
		q.wqe().SetRequest(uint64(i), abi.WRSend, abi.SendSignaled)
		q.sq.push()
	}
	q.modify(abi.QPErr, 0, abi.QPAttr{})
	w.step(1) // the producer index is known now
	x := g.tables.qpList[q.n].q
	if x.sq.have == 0 {
		t.Fatal("nothing was fetched")
	}
	g.takeAway(q.sq.base, 4096)
	most := 0
	for range 2000 {
		q.bell()
		w.step(1)
		most = max(most, len(x.unpostedCQEs))
	}
	if most < mayPostpone || most > maxUnposted {
		t.Errorf("%d completions were kept, want %d to %d", most, mayPostpone, maxUnposted)
	}
	g.hostDriver(t)
	for i, wc := range c.await(n) {
		if wc.ID != uint64(i) || wc.Status != abi.WCWRFlushErr {
			t.Fatalf("completion %d: %+v", i, wc)
		}
	}
}
