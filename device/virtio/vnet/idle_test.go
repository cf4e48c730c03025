package vnet

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio"
)

// TestWakesFromSleep: each frame is sent when the loops are asleep, or about to sleep; a lost kick shows as a timeout.
func TestWakesFromSleep(t *testing.T) {
	const ringFeatures = virtio.FeatureEventIdx | virtio.FeatureIndirectDesc
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprintf("plain=%v", plain), func(t *testing.T) {
			bothRings(t, 2, func(t *testing.T, h *host) {
				a, b := h.vm(1, 1), h.vm(2, 1)
				if plain {
					a.refuse, b.refuse = ringFeatures, ringFeatures
				}
				a.boot(0, 2000, 8)
				b.boot(0, 2000, 8)
				for i := range 300 {
					if i%3 == 0 {
						before := h.loops[1].Stats().Sleeps
						h.loops[1].Wake()
						testutil.Eventually(t, "sleep", func() bool { return h.loops[1].Stats().Sleeps > before })
					}
					f := buildFrame(b.mac, a.mac, 100, byte(i))
					a.send(0, f)
					if got := b.recv(0); !bytes.Equal(got, f) {
						t.Fatal("wrong frame")
					}
				}
			})
		})
	}
}

// TestIdle: the loops of idle guests sleep.
func TestIdle(t *testing.T) {
	bothRings(t, 1, idle)
}

func idle(t *testing.T, h *host) {
	a, b := h.vm(1, 1).boot(0, 2000, 8), h.vm(2, 1).boot(0, 2000, 8)
	a.send(0, buildFrame(b.mac, a.mac, 100, 1))
	b.recv(0)
	testutil.Eventually(t, "quiet", func() bool {
		before := h.loops[0].Stats().Rounds
		time.Sleep(100 * time.Millisecond)
		return h.loops[0].Stats().Rounds-before <= 1
	})
}
