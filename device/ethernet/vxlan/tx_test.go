package vxlan

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
)

// sent is a frame's size, and whether it may be padded.
type sent struct {
	size int
	pad  bool
}

// fits reports whether frames can be one message.
func fits(run []sent) bool {
	longest := 0
	for _, f := range run {
		longest = max(longest, f.size)
	}
	for _, f := range run[:len(run)-1] {
		if short := longest - f.size; short > 0 && (!f.pad || short > maxPad) {
			return false
		}
	}
	return len(run) <= gsoSegments && len(run)*(HeaderLen+longest) <= gsoBytes
}

// naiveRuns returns the number of messages for the frames.
func naiveRuns(frames []sent) (messages int) {
	for ; len(frames) > 0; messages++ {
		n := 1
		for n < len(frames) && fits(frames[:n+1]) {
			n++
		}
		frames = frames[n:]
	}
	return messages
}

// Batches of frames of any sizes leave in the fewest messages possible, and arrive one by one, whole, in order and with
// nothing added except padding; over both underlays, and the same without segmentation. Shared frames are not written
// to.
func TestBatchesInMessages(t *testing.T) {
	for _, c := range []struct {
		name        string
		local, peer string
		plain       bool
	}{{"IPv4", localIP, remoteIP, false}, {"IPv6", "2001:db8::1", "2001:db8::2", false},
		{"one by one", localIP, remoteIP, true}} {
		t.Run(c.name, func(t *testing.T) {
			r := newRigAsIs(t, Config{Local: netip.MustParseAddr(c.local), Segmentation: !c.plain}, []string{c.peer})
			rng := rand.New(rand.NewPCG(7, 8))
			choice := []int{60, 60, 61, 75, 76, 77, 300, 1363, 1364, 1380, 1380}
			padded := 0
			for range 60 {
				var frames [][]byte
				var sizes []sent
				pads, shares := rng.IntN(4), rng.IntN(4) // of 3: how many frames may be padded, and are shared
				for range 1 + rng.IntN(txBatch-1) {
					f := macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
					size := choice[rng.IntN(len(choice))]
					if n := len(sizes); n > 0 && rng.IntN(4) > 0 {
						size = sizes[n-1].size
					}
					f = append(f, make([]byte, size-len(f))...)
					noise := rng.Uint64()
					for i := 50; i < size; i++ {
						f[i] = byte(noise >> (i % 56))
					}
					frames, sizes = append(frames, f), append(sizes, sent{size, rng.IntN(3) < pads})
				}
				l, messages := r.loops[0], 0
				shared := map[int]*frame.Buf{}
				l.Do(func() {
					for i, f := range frames {
						b := r.pool.Get()
						b.Append(f)
						for at := range maxPad { // old contents of the buffer
							b.Room()[len(f)+at] = 0xa5
						}
						b.Offload.Pad = sizes[i].pad
						r.att.Input(l, b, vswitch.Source{})
						if i%3 < shares {
							shared[i] = b
						} else {
							b.Free()
						}
					}
					k := r.vt.tx[0].dirty[0]
					messages, _ = k.messages(r.vt, 0, true)
				})
				if want := naiveRuns(sizes); !c.plain && messages != want || c.plain && messages != len(sizes) {
					t.Errorf("%v: %d messages, want %d", sizes, messages, want)
				}
				for i, f := range frames {
					want := datagram(8, 100, f)
					p, _ := r.receive(r.remote)
					pad := len(p) - len(want)
					if pad < 0 || pad > maxPad || pad > 0 && !sizes[i].pad || !bytes.Equal(p, append(want, make([]byte, pad)...)) {
						t.Fatalf("frame %d of %v: got %d bytes: %x", i, sizes, len(p), p)
					}
					padded += min(pad, 1)
				}
				l.Do(func() {
					for i, b := range shared {
						if !bytes.Equal(b.Bytes(), frames[i]) || b.Room()[len(frames[i])] != 0xa5 {
							t.Errorf("frame %d of %v was written to", i, sizes)
						}
						b.Free()
					}
				})
			}
			if padded > 0 == c.plain {
				t.Errorf("%d frames were padded", padded)
			}
		})
	}
}
