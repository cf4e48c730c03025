package vxlan

import (
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/packet"
)

type offerSink struct{}

func (offerSink) Deliver(*engine.Loop, *packet.Buf, lfe.Destination) {}

// Frames with as many addresses as a hostile far end likes lead to a bounded number of offers, and the same addresses come again.
func TestOffersAreBounded(t *testing.T) {
	clock := engine.NewManualClock(1e9)
	l, err := engine.New(engine.Config{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n, err := lfe.NewNetwork(lfe.Config{VNI: 1})
	if err != nil {
		t.Fatal(err)
	}
	a, err := n.Attach(offerSink{}, lfe.PortConfig{Name: "far", Kind: lfe.KindVTEP})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	const frames = 100_000
	s := &short{offers: make(chan lfe.Candidate, 2*frames)}
	count := func(many bool) int {
		l.Do(func() {
			for i := range frames {
				c := lfe.Candidate{From: a, Dst: lfe.MAC{2}, Src: lfe.MAC{2, 1}}
				if many {
					c.Src[3], c.Src[4], c.Src[5] = byte(i>>16), byte(i>>8), byte(i)
				}
				s.Offer(l, c)
			}
		})
		made := len(s.offers)
		for range made {
			<-s.offers
		}
		return made
	}
	for range 3 {
		if made := count(false); made != 1 {
			t.Errorf("%d offers of the same addresses", made)
		}
		clock.Advance(2 * time.Duration(offerEvery))
		if made := count(true); made > offersHeld || made < offersHeld/2 {
			t.Errorf("%d offers, want about %d", made, offersHeld)
		}
		clock.Advance(2 * time.Duration(offerEvery))
	}
}
