package vxlan

import (
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

type offerSink struct{}

func (offerSink) Deliver(*loop.Loop, *frame.Buf, vswitch.Destination) {}

// Frames with as many addresses as a hostile far end likes lead to a bounded number of offers, and the same addresses come again.
func TestOffersAreBounded(t *testing.T) {
	clock := loop.NewManualClock(1e9)
	l, err := loop.New(loop.Config{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n, err := vswitch.NewNetwork(vswitch.Config{VNI: 1})
	if err != nil {
		t.Fatal(err)
	}
	a, err := n.Attach(offerSink{}, vswitch.PortConfig{Name: "far", Kind: vswitch.KindVTEP})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	const frames = 100_000
	s := &short{offers: make(chan vswitch.Candidate, 2*frames)}
	count := func(many bool) int {
		l.Do(func() {
			for i := range frames {
				c := vswitch.Candidate{From: a, Dst: vswitch.MAC{2}, Src: vswitch.MAC{2, 1}}
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
