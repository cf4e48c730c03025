package roce

import (
	"runtime"
	"testing"

	"github.com/vnicd/vnicd/device/frame"
)

// heapOf returns the bytes of heap that a QP takes.
func heapOf(make func() *QP) int64 {
	live := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	var kept [50]*QP
	before := live()
	for i := range kept {
		kept[i] = make()
	}
	grown := live() - before
	runtime.KeepAlive(kept)
	return grown / int64(len(kept))
}

// Footprint bounds what a QP occupies whose rings are all in use, and not by far. One that is connected and was never
// used takes a small part of that.
func TestFootprint(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  Config
		idle int64 // bytes at most
	}{
		{"64 requests of 4 segments", Config{Type: RC, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64, MaxOutstanding: 64,
			MaxRdAtomic: 128}, 8 << 10},
		{"512 requests of 32 segments", Config{Type: RC, MaxSendSGE: 32, MaxRecvSGE: 32, MaxInline: 512,
			MaxOutstanding: 512, MaxRdAtomic: 16}, 16 << 10},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n, buf := newFabric(t, 1).node("a", tc.cfg), &frame.Buf{}
			tc.cfg.Stats = new(Stats)
			connect := func() *QP {
				q := NewQP(tc.cfg, n)
				q.allocate()
				q.resp.resizeResources(tc.cfg.MaxRdAtomic)
				return q
			}
			idle := heapOf(connect)
			used := heapOf(func() *QP {
				q := connect()
				for len(q.req.slots) < q.cfg.MaxOutstanding {
					q.req.tail = q.req.head + uint32(len(q.req.slots))
					q.req.grow(&q.cfg)
				}
				q.req.tail = q.req.head
				q.recovery.scoreboard.NoteSent(0, 1, 0, 0)
				for _, r := range []interface{ Put(uint64, *frame.Buf) }{&q.recovery.responses, &q.resp.reorder} {
					r.Put(0, buf)
				}
				q.resp.resource(0)
				return q
			})
			most := int64(tc.cfg.Footprint())
			t.Logf("%d bytes idle, %d with all rings in use, Footprint is %d", idle, used, most)
			if idle > tc.idle {
				t.Errorf("an idle QP takes %d bytes, want at most %d", idle, tc.idle)
			}
			if used > most || used < most*3/4 {
				t.Errorf("a QP takes %d bytes, Footprint is %d", used, most)
			}
		})
	}
}
