package fastpath

import (
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/loop"
)

const (
	// offerEvery is the shortest time between two offers by one loop for the same hash of addresses.
	offerEvery = int64(100 * time.Millisecond)
	offersHeld = 64  // hashes
	offerQueue = 256 // offers waiting for the controller; more are dropped
)

// recentOffers are the times of one loop's latest offers, by a hash of the addresses. Whatever addresses frames carry,
// the loop makes at most offersHeld offers per offerEvery.
type recentOffers struct {
	at [offersHeld]int64
	_  [64]byte
}

// Offer implements vswitch.ShortPath.
func (n *network) Offer(l *loop.Loop, c vswitch.Candidate) {
	key := uint64(c.Dst[5])<<40 | uint64(c.Dst[4])<<32
	for i, b := range c.Src {
		key = (key^uint64(b)<<(8*i))*0x9e3779b97f4a7c15 + uint64(c.Dst[i])
	}
	key ^= uint64(c.From.Network().VNI()) << 1
	at := &n.c.recent[l.ID()].at[key>>32%offersHeld]
	if now := l.Now(); now-*at >= offerEvery {
		*at = now
		select {
		case n.c.offers <- c:
		default: // the controller is busy; the addresses will be offered again
		}
	}
}
