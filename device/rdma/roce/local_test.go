package roce

import (
	"testing"

	"github.com/vnicd/vnicd/translate"
)

// localMode says when QPs of a fabric use the local path.
type localMode uint8

const (
	framesOnly localMode = iota
	localOn
	localMixed // changes with each Run
)

func (m localMode) String() string { return [...]string{"frames", "local", "mixed"}[m] }

// Peer implements Adapter.
func (n *node) Stored(psn uint64) { n.stored = psn }

func (n *node) Journaled() bool { return n.journaled }

func (n *node) Peer() (*QP, uint64) {
	if n.f.local == framesOnly || n.f.local == localMixed && n.f.rng.Intn(3) == 0 {
		return nil, 0
	}
	if p := n.f.byQPN(n.q.attr.DestQPN); p != nil && p.f == n.f && !p.paused {
		return p.q, 4096 << n.f.rng.Intn(5)
	}
	return nil, 0
}

// span limits n bytes from va on to a contiguous part, within a page if pages come and go.
func (n *node) span(b []byte, key translate.Key, va uint64, need translate.Access) ([]byte, translate.Miss) {
	k := uint64(len(b))
	if n.rng != nil {
		k = min(k, pageBytes-va%pageBytes)
	} else if n.f.rng.Intn(2) == 0 {
		k = 1 + uint64(n.f.rng.Int63n(int64(k)))
	}
	if m := n.touch(key, va, k, need); !m.OK() {
		return nil, m
	}
	return b[:k], translate.Miss{}
}

func (n *node) localSpan(what string, sg []SGE, off, k uint64, need translate.Access) ([]byte, translate.Miss) {
	if m := n.miss(what); !m.OK() {
		return nil, m
	}
	for _, s := range sg {
		if off >= uint64(s.Length) {
			off -= uint64(s.Length)
			continue
		}
		k = min(k, uint64(s.Length)-off)
		r := n.regions[s.Key]
		if r == nil {
			return nil, translate.Miss{Kind: translate.BadKey}
		}
		if need&^r.access != 0 {
			return nil, translate.Miss{Kind: translate.BadAccess}
		}
		b, ok := r.at(uint64(s.VA)+off, k)
		if !ok {
			return nil, translate.Miss{Kind: translate.OutOfRange}
		}
		return n.span(b, s.Key, uint64(s.VA)+off, need)
	}
	n.f.t.Fatalf("%s: access beyond the segments", n.name)
	return nil, translate.Miss{}
}

// GatherSpan implements Adapter.
func (n *node) GatherSpan(w *WQE, off, k uint64) ([]byte, translate.Miss) {
	return n.localSpan("gather", w.SGEs, off, k, 0)
}

// ScatterSpan implements Adapter.
func (n *node) ScatterSpan(sg []SGE, off, k uint64) ([]byte, translate.Miss) {
	return n.localSpan("scatter", sg, off, k, translate.LocalWrite)
}

// RemoteSpan implements Adapter.
func (n *node) RemoteSpan(key translate.Key, va translate.VA, k uint64,
	need translate.Access) ([]byte, translate.Miss) {
	what := "readremote"
	if need.Writes() {
		what = "writeremote"
	}
	if m := n.miss(what); !m.OK() {
		return nil, m
	}
	b, m := n.remote(key, va, k, need)
	if !m.OK() {
		return nil, m
	}
	return n.span(b, key, uint64(va), need)
}

// Operations on the local path send no frames.
func TestLocalNoFrames(t *testing.T) {
	for _, typ := range []Type{RC, UC} {
		f := newFabric(t, 1)
		f.local = localOn
		o := opts()
		o.typ = typ
		a, b := f.pair(o)
		a.reg(4, chLocal, 1<<20, allAccess)
		b.reg(1, chTarget, 1<<20, allAccess)
		b.reg(5, chRecv, 1<<16, allAccess)
		for range 4 {
			b.postRecv(sge(5, chRecv, 1<<16))
		}
		a.post(WQE{Opcode: WRWrite, RKey: 1, RemoteVA: chTarget,
			SGEs: []SGE{sge(4, chLocal, 1000), sge(4, chLocal+1000, 1<<20-1000)}})
		a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(4, chLocal, 1<<16)}})
		a.post(WQE{Opcode: WRSendImm, Inline: true, InlineData: []byte("hello")})
		a.post(WQE{Opcode: WRWriteImm, RKey: 1, RemoteVA: chTarget})
		want := []Status{0, 0, 0, 0}
		if typ == RC {
			a.post(WQE{Opcode: WRRead, RKey: 1, RemoteVA: chTarget, SGEs: []SGE{sge(4, chLocal, 1<<20)}})
			a.post(WQE{Opcode: WRFetchAdd, RKey: 1, RemoteVA: chTarget, SwapAdd: 1, SGEs: []SGE{sge(4, chLocal, 8)}})
			a.post(WQE{Opcode: WRAtomicWrite, RKey: 1, RemoteVA: chTarget + 8, SGEs: []SGE{sge(4, chLocal+64, 8)}})
			a.post(WQE{Opcode: WRAtomicWrite, RKey: 1, RemoteVA: chTarget + 16, Inline: true,
				InlineData: []byte("inlined!")})
			want = append(want, 0, 0, 0, 0)
		}
		f.settle(1e9)
		a.wantSends(want...)
		b.wantRecvs(0, 0, 0)
		if s := a.q.Stats(); f.frames != 0 || s.LocalMessages != uint64(len(want)) {
			t.Errorf("%d frames, %+v", f.frames, *s)
		}
		same(t, "memory behind the atomics", b.regions[1].buf[24:], a.regions[4].buf[24:])
		if typ == RC {
			same(t, "atomic write", b.regions[1].buf[8:16], a.regions[4].buf[64:72])
			same(t, "inline atomic write", b.regions[1].buf[16:24], []byte("inlined!"))
		}
	}
}

// A WRITE beyond its region writes nothing, even in several pieces: the peer checks the whole range first.
func TestLocalRefusedWritesNothing(t *testing.T) {
	f := newFabric(t, 1)
	f.local = localOn
	a, b := f.pair(opts())
	a.reg(4, chLocal, 200, allAccess)
	b.reg(1, chTarget, 150, allAccess)
	for i := range a.regions[4].buf {
		a.regions[4].buf[i] = 0xff
	}
	before := append([]byte(nil), b.regions[1].buf...)
	a.post(WQE{Opcode: WRWrite, RKey: 1, RemoteVA: chTarget,
		SGEs: []SGE{sge(4, chLocal, 100), sge(4, chLocal+100, 100)}})
	f.settle(1e9)
	a.wantSends(StatusRemAccess)
	same(t, "memory of a refused WRITE", b.regions[1].buf, before)
}

// With a journal, a request with a fence waits until the READs before it are committed: if this process is killed
// before, they are repeated, and must not find what the request has written (CO-2, IBTA 10.8.3.3).
func TestFenceWaitsForCommit(t *testing.T) {
	f := newFabric(t, 1)
	f.local = localOn
	a, b := f.pair(opts())
	a.journaled, b.journaled = true, true
	mine, theirs := a.reg(4, chLocal, 200, allAccess), b.reg(1, chTarget, 100, allAccess)
	for i := range 100 {
		theirs.buf[i], mine.buf[100+i] = 1, 2
	}
	read := WQE{Opcode: WRRead, RKey: 1, RemoteVA: chTarget, SGEs: []SGE{sge(4, chLocal, 100)}}
	write := WQE{Opcode: WRWrite, RKey: 1, RemoteVA: chTarget, SGEs: []SGE{sge(4, chLocal+100, 100)}, Fence: true}
	a.post(read)
	a.post(write)
	run := func() {
		leave := a.enter()
		defer leave()
		a.q.Run(f.now, 64)
	}
	run()
	if !a.q.AwaitsCommit() || mine.buf[0] != 1 || theirs.buf[0] != 1 || f.frames != 0 {
		t.Fatalf("waits %v, read %d, there is %d, %d frames", a.q.AwaitsCommit(), mine.buf[0], theirs.buf[0], f.frames)
	}
	a.q.Committed()
	run()
	if a.q.AwaitsCommit() || theirs.buf[0] != 2 {
		t.Errorf("after the commit: waits %v, there is %d", a.q.AwaitsCommit(), theirs.buf[0])
	}
	a.wantSends(StatusSuccess, StatusSuccess)
}
