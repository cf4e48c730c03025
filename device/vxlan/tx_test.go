package vxlan

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/packet"
)

// naiveRuns says how many messages datagrams of such sizes are: a message ends with the first that is shorter than its first, or
// before one that is longer.
func naiveRuns(sizes []int) (n int) {
	for i := 0; i < len(sizes); n++ {
		first := sizes[i]
		limit := min(gsoSegments, gsoBytes/(HeaderLen+first))
		for k := 0; k < limit && i < len(sizes) && sizes[i] <= first; k++ {
			i++
			if sizes[i-1] < first {
				break
			}
		}
	}
	return n
}

// Batches of frames of any sizes leave in as few messages as there may be, and arrive one by one, whole and in order; over both underlays, and
// the same when the kernel is not to be asked for that.
func TestBatchesInMessages(t *testing.T) {
	for _, c := range []struct {
		name        string
		local, peer string
		plain       bool
	}{{"IPv4", localIP, remoteIP, false}, {"IPv6", "2001:db8::1", "2001:db8::2", false}, {"one by one", localIP, remoteIP, true}} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, Config{Local: netip.MustParseAddr(c.local), NoSegmentation: c.plain}, []string{c.peer})
			rng := rand.New(rand.NewPCG(7, 8))
			choice := []int{60, 60, 61, 300, 1380, 1380}
			for range 60 {
				var frames [][]byte
				var sizes []int
				for range 1 + rng.IntN(txBatch-1) {
					f := macs(9, 1, ip4(0, 1, 2, protoUDP, 7, 8))
					size := choice[rng.IntN(len(choice))]
					if n := len(sizes); n > 0 && rng.IntN(4) > 0 {
						size = sizes[n-1]
					}
					f = append(f, make([]byte, size-len(f))...)
					rng := rng.Uint64()
					for i := 50; i < size; i++ {
						f[i] = byte(rng >> (i % 56))
					}
					frames, sizes = append(frames, f), append(sizes, size)
				}
				l, messages := r.loops[0], 0
				l.Do(func() {
					bufs := make([]*packet.Buf, len(frames))
					for i, f := range frames {
						bufs[i] = r.pool.Get()
						bufs[i].Append(f)
						r.att.Input(l, bufs[i], lfe.Source{})
						bufs[i].Free()
					}
					k := r.vt.tx[0].dirty[0]
					messages, _ = k.messages(r.vt, 0, true)
				})
				if want := naiveRuns(sizes); !c.plain && messages != want || c.plain && messages != len(sizes) {
					t.Errorf("%v: %d messages, want %d", sizes, messages, want)
				}
				for i, f := range frames {
					if p, _ := r.receive(r.remote); string(p) != string(datagram(8, 100, f)) {
						t.Fatalf("frame %d of %v: %d bytes arrived: %x", i, sizes, len(p), p)
					}
				}
			}
		})
	}
}
