package hca

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// benchQP is a QP whose SQ slot 0 holds the given request; the benchmark fetches
// it repeatedly.
func benchFetch(b *testing.B, fill func(g *guest, s abi.SendWQE)) {
	w := newWorld(b, 1, 1, Limits{})
	g := w.guests[0]
	tq := g.qp(qpSpec{pd: g.pd()})
	q := g.qpFor(tq.n)
	for i := range tq.sq.desc.NumElems {
		fill(g, abi.SendWQE(tq.sq.elem(i)))
	}
	wqe := roce.WQE{SGEs: make([]roce.SGE, 0, 4), InlineData: make([]byte, 0, 64)}
	c := roce.Completion{}
	t, _ := q.engine.enter()
	defer q.engine.leave(t)
	prod := tq.sq.prod()
	b.ReportAllocs()
	seq := uint32(0)
	for b.Loop() {
		prod.Store((seq + 1) & 63)
		if f := q.FetchSend(seq, &wqe); f != roce.FetchReady {
			b.Fatal(f)
		}
		q.CompleteSend(&wqe, &c)
		seq++
	}
}

// A posted request is fetched, decoded and completed unsignalled: the adapter's
// share of a work request.
func BenchmarkFetchSend(b *testing.B) {
	b.Run("sge1", func(b *testing.B) {
		benchFetch(b, func(g *guest, s abi.SendWQE) {
			s.SetRequest(1, abi.WRRDMAWrite, 0)
			s.SetSGEs([]abi.SGE{{Addr: 4096, Length: 4096, LKey: 5}})
		})
	})
	b.Run("sge4", func(b *testing.B) {
		benchFetch(b, func(g *guest, s abi.SendWQE) {
			s.SetRequest(1, abi.WRRDMAWrite, 0)
			s.SetSGEs([]abi.SGE{{Addr: 1, Length: 1, LKey: 5}, {Addr: 1, Length: 1, LKey: 5}, {Addr: 1, Length: 1, LKey: 5},
				{Addr: 1, Length: 1, LKey: 5}})
		})
	})
	b.Run("inline64", func(b *testing.B) {
		benchFetch(b, func(g *guest, s abi.SendWQE) {
			s.SetRequest(1, abi.WRRDMAWrite, abi.SendInline)
			s.SetInline(make([]byte, 64))
		})
	})
}

// A CQE is written, the CQ not armed.
func BenchmarkCQPost(b *testing.B) {
	w := newWorld(b, 1, 1, Limits{})
	g := w.guests[0]
	c := g.cq(256)
	q := g.tables.cqs[c.n].q
	wc := abi.WC{ID: 1}
	e := g.space.Epochs()
	t := e.Enter(translate.ByLoop(0))
	defer e.Leave(0, t)
	prod, cons := c.prod(), c.cons()
	b.ReportAllocs()
	for b.Loop() {
		q.post(&wc, false)
		cons.Store(prod.Load())
	}
	if q.failed.Load() {
		b.Fatal("the CQ failed")
	}
}

// The whole path from doorbell to completion, both ends on one loop: WRITE of
// size bytes, 32 posted per doorbell, the last one signalled.
func benchWrite(b *testing.B, size int) {
	for _, local := range []bool{false, true} {
		name := "frames"
		if local {
			name = "local"
		}
		b.Run(name, func(b *testing.B) {
			defer func(old bool) { LocalPath = old }(LocalPath)
			LocalPath = local
			benchWriteOn(b, newWorld(b, 1, 2, Limits{}), size)
		})
	}
}

func benchWriteOn(b *testing.B, w *world, size int) {
	qa, qb := w.pair()
	src, dst := qa.g.alloc(size), qb.g.alloc(size)
	ka, kb := qa.g.mr(1, src, size, 1), qb.g.mr(1, dst, size, 1|remoteAll)
	for i := range qa.sq.desc.NumElems {
		s := abi.SendWQE(qa.sq.elem(i))
		flags := uint32(0)
		if i%32 == 31 {
			flags = abi.SendSignaled
		}
		s.SetRequest(uint64(i), abi.WRRDMAWrite, flags)
		s.SetRDMA(uint64(dst), kb)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: uint32(size), LKey: ka}})
	}
	prod, done, cons := qa.sq.prod(), qa.scq.prod(), qa.scq.cons()
	l := w.loops[0]
	b.SetBytes(int64(size))
	b.ReportAllocs()
	start := cpuTime(b)
	defer func() { b.ReportMetric(float64(cpuTime(b)-start)/float64(b.N), "cpu-ns/op") }()
	for i := 0; b.Loop(); i++ {
		prod.Store((prod.Load() + 1) & 63)
		if i%32 != 31 {
			continue
		}
		qa.bell()
		for done.Load() == cons.Load() {
			l.Step()
		}
		cons.Store(done.Load())
	}
}

// cpuTime is the CPU time of this process, ns: on a shared machine it is a better measure than elapsed time.
func cpuTime(b *testing.B) int64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

// The anchor of BenchmarkWrite64K.
func BenchmarkMemcpy64K(b *testing.B) {
	src, dst := make([]byte, 65536), make([]byte, 65536)
	b.SetBytes(int64(len(src)))
	start := cpuTime(b)
	for b.Loop() {
		copy(dst, src)
	}
	b.ReportMetric(float64(cpuTime(b)-start)/float64(b.N), "cpu-ns/op")
}

func BenchmarkWrite8(b *testing.B)    { benchWrite(b, 8) }
func BenchmarkWrite4096(b *testing.B) { benchWrite(b, 4096) }
func BenchmarkWrite64K(b *testing.B)  { benchWrite(b, 65536) }

// The state of a queue pair becomes valid in the journal, as after each turn.
func BenchmarkJournalCommit(b *testing.B) {
	defer func(old bool) { Journaled = old }(Journaled)
	Journaled = true
	w := newWorld(b, 1, 2, Limits{})
	qa, _ := w.pair()
	q := qa.g.tables.qpList[qa.n].q
	b.ReportAllocs()
	for b.Loop() {
		q.engine.touch(q)
		q.engine.commitNow()
		q.engine.show()
	}
}

// The engine's poll without work: the cost of an idle VM on a busy loop.
func BenchmarkIdlePoll(b *testing.B) {
	w := newWorld(b, 1, 1, Limits{})
	e := w.guests[0].engines[0]
	b.ReportAllocs()
	for b.Loop() {
		e.Poll(1)
	}
}
