package guestdrv_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// benchRig has a network that carries the largest path MTU, and loops that spin like those of a configured daemon.
func benchRig(b *testing.B, vxlan bool) (x, y *end) {
	b.Helper()
	r := newRig(b, rigConfig{loops: 1, mtu: 9000, vxlan: vxlan, spin: 50 * time.Microsecond,
		driver: guestdrv.Config{Memory: 32 << 20}})
	c := qpDefaults()
	c.MaxSendWR = 256
	return connect(b, r.hosts[0], r.hosts[1], c, guestdrv.ConnectOptions{})
}

// pollSome spins until there are completions and checks them.
func pollSome(b *testing.B, cq *guestdrv.CQ, wcs []guestdrv.Completion) int {
	for {
		if n := cq.Poll(wcs); n > 0 {
			for i := range n {
				if wcs[i].Status != guestdrv.WCSuccess {
					b.Fatalf("completion %+v (%s)", wcs[i], wcs[i].Status)
				}
			}
			return n
		}
	}
}

// BenchmarkWrite keeps 16 WRITEs in flight between two HCAs of one daemon.
func BenchmarkWrite(b *testing.B) { benchWrite(b, false, 8, 4096, 64<<10, 1<<20) }

// BenchmarkWriteVXLAN does so between two sites joined by a veth pair, MTU 9000.
func BenchmarkWriteVXLAN(b *testing.B) { benchWrite(b, true, 64<<10, 1<<20) }

func benchWrite(b *testing.B, vxlan bool, sizes ...int) {
	for _, size := range sizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			x, y := benchRig(b, vxlan)
			_, smr := x.h.region(b, size, 0)
			_, dmr := y.h.region(b, size, allAccess)
			wr := guestdrv.NewWrite(0, dmr.Remote(0), smr.SGE(0, size)).With(guestdrv.SendSignaled)
			wcs := make([]guestdrv.Completion, 16)
			flying := 0
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if flying == 16 {
					flying -= pollSome(b, x.scq, wcs)
				}
				if err := x.qp.PostSend(wr); err != nil {
					b.Fatal(err)
				}
				flying++
			}
			for flying > 0 {
				flying -= pollSome(b, x.scq, wcs)
			}
		})
	}
}

// BenchmarkWriteRate posts 8-byte WRITEs in batches of 32, one of them signalled.
func BenchmarkWriteRate(b *testing.B) {
	x, y := benchRig(b, false)
	_, smr := x.h.region(b, 4096, 0)
	_, dmr := y.h.region(b, 4096, allAccess)
	wr := guestdrv.NewWrite(0, dmr.Remote(0), smr.SGE(0, 8))
	wcs := make([]guestdrv.Completion, 16)
	const batch, most = 32, 4
	i, flying := 0, 0
	b.ReportAllocs()
	for b.Loop() {
		i++
		wr.Flags = 0
		if i%batch == 0 {
			wr.Flags = guestdrv.SendSignaled
			if flying == most {
				flying -= pollSome(b, x.scq, wcs)
			}
			flying++
		}
		if err := x.qp.QueueSend(wr); err != nil {
			b.Fatal(err)
		}
		if i%batch == 0 {
			x.qp.Ring()
		}
	}
	for flying > 0 {
		flying -= pollSome(b, x.scq, wcs)
	}
}

// BenchmarkWriteLatency bounces 8 bytes between two hosts: each WRITEs when it sees the other's bytes. One operation is
// one way.
func BenchmarkWriteLatency(b *testing.B) {
	x, y := benchRig(b, false)
	xb, xm := x.h.region(b, 4096, allAccess)
	yb, ym := y.h.region(b, 4096, allAccess)
	to := func(far *guestdrv.MR) *guestdrv.SendWR {
		wr := guestdrv.NewWrite(0, far.Remote(0))
		wr.Inline = make([]byte, 8)
		return wr
	}
	xw, yw := to(ym), to(xm)
	bounce := func(e *end, wr *guestdrv.SendWR, seen func() uint64, n uint64) {
		le.PutUint64(wr.Inline, n)
		if err := e.qp.PostSend(wr); err != nil {
			b.Fatal(err)
		}
		for seen() != n {
		}
	}
	n := uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		n++
		if n%2 == 1 {
			bounce(x, xw, func() uint64 { return yb.Load64(0) }, n)
		} else {
			bounce(y, yw, func() uint64 { return xb.Load64(0) }, n)
		}
	}
}

// BenchmarkDatapathCalls measures the driver's part, without the device: posting and polling must not allocate.
func BenchmarkDatapathCalls(b *testing.B) {
	r := newRig(b, rigConfig{hosts: 1})
	e := r.hosts[0].end(b, qpDefaults(), 0)
	_, mr := r.hosts[0].region(b, 4096, allAccess)
	wr := guestdrv.NewWrite(0, guestdrv.Remote{}, mr.SGE(0, 8))
	wcs := make([]guestdrv.Completion, 4)
	b.ReportAllocs()
	for b.Loop() {
		e.qp.SendIndices(0, 0)
		if err := e.qp.QueueSend(wr); err != nil {
			b.Fatal(err)
		}
		e.scq.Poll(wcs)
	}
}

// TestPostingAllocates: posting a request, made in place or reused, and polling must not allocate (PF-4).
func TestPostingAllocates(t *testing.T) {
	if allocsAllowed > 0 {
		t.Skip("the race detector disables inlining of the constructors")
	}
	r := newRig(t, rigConfig{hosts: 1})
	e := r.hosts[0].end(t, qpDefaults(), 0)
	_, mr := r.hosts[0].region(t, 4096, allAccess)
	wcs := make([]guestdrv.Completion, 4)
	reused := guestdrv.NewWrite(1, mr.Remote(0), mr.SGE(0, 8))
	for name, post := range map[string]func() error{
		"reused": func() error { return e.qp.QueueSend(reused) },
		"WRITE": func() error {
			return e.qp.QueueSend(guestdrv.NewWrite(1, mr.Remote(0), mr.SGE(0, 8)).With(guestdrv.SendSignaled))
		},
		"READ":      func() error { return e.qp.QueueSend(guestdrv.NewRead(1, mr.Remote(0), mr.SGE(0, 8), mr.SGE(8, 8))) },
		"SEND":      func() error { return e.qp.QueueSend(guestdrv.NewSend(1, mr.SGE(0, 8))) },
		"FETCH_ADD": func() error { return e.qp.QueueSend(guestdrv.NewFetchAdd(1, mr.Remote(0), 1, mr.SGE(0, 8))) },
		"poll":      func() error { e.scq.Poll(wcs); return nil },
	} {
		n := testing.AllocsPerRun(100, func() {
			e.qp.SendIndices(0, 0)
			if err := post(); err != nil {
				t.Error(err)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
