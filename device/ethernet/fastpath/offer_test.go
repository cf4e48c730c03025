package fastpath

import (
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

type offerSink struct{}

func (offerSink) Deliver(*loop.Loop, *frame.Buf, vswitch.Destination) {}

// Any number of addresses in a peer's frames leads to a bounded number of offers, and the same addresses are offered
// again later.
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
	c := &controller{offers: make(chan vswitch.Candidate, 2*frames)}
	network := &network{c: c}
	count := func(many bool) int {
		l.Do(func() {
			for i := range frames {
				o := vswitch.Candidate{From: a, Dst: vswitch.MAC{2}, Src: vswitch.MAC{2, 1}}
				if many {
					o.Src[3], o.Src[4], o.Src[5] = byte(i>>16), byte(i>>8), byte(i)
				}
				network.Offer(l, o)
			}
		})
		made := len(c.offers)
		for range made {
			<-c.offers
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
