package tap_test

import (
	"encoding/json"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
)

// Traffic in each direction keeps to the port's rate: a burst passes while the clock stands, then as much as the rate
// allows for the time; the rest is dropped and counted. Each direction has its own rate.
func TestRate(t *testing.T) {
	const (
		rate  = 100_000_000
		burst = rate / 50
		size  = 1414 // of a frame
	)
	clock := loop.NewManualClock(1)
	r := newRigAt(t, clock)
	p := r.open(tap.Config{Offloads: true,
		Name: "host0", Rate: rate, Addrs: []netip.Prefix{netip.MustParsePrefix("10.1.2.3/24")}})
	r.ns.IP("neigh", "add", "10.1.2.4", "lladdr", "02:00:00:00:00:01", "dev", "host0")
	dropped := func() uint64 { return p.Attachment().Counters.Dropped(vswitch.RateLimit) }
	var conn net.Conn
	r.ns.Do(func() {
		var err error
		if conn, err = net.Dial("udp", "10.1.2.4:9"); err != nil {
			t.Fatal(err)
		}
	})
	defer conn.Close()

	datagram := make([]byte, size-14-20-8)
	var fromHost, toHost int // bits that passed
	sent := func() {
		t.Helper()
		before := dropped()
		testutil.Eventually(t, "the host's frames exceed the rate", func() bool {
			for range 50 {
				_, _ = conn.Write(datagram)
			}
			return dropped() > before+50
		})
		r.loop.Do(func() {
			for len(r.sink.frames) > 0 {
				fromHost += 8 * len(<-r.sink.frames)
			}
		})
	}
	hw := p.MAC()
	frame := string(hw[:]) + "\x02\x00\x00\x00\x00\x01\x88\xb5" + string(make([]byte, size-14))
	received := func() {
		t.Helper()
		before := dropped()
		for range 3 * burst / 8 / size {
			r.inject(frame)
		}
		if dropped() == before {
			t.Error("no frame to the host exceeded the rate")
		}
		var links []struct {
			Stats struct{ RX struct{ Bytes int } } `json:"stats64"`
		}
		if err := json.Unmarshal([]byte(r.ns.IP("-s", "-j", "link", "show", "host0")), &links); err != nil ||
			len(links) != 1 {
			t.Fatal(links, err)
		}
		toHost = 8 * links[0].Stats.RX.Bytes
	}
	want := burst
	for range 4 {
		sent()
		received()
		for what, got := range map[string]int{"from the host": fromHost, "to the host": toHost} {
			if got < want-8*size || got > want+8*size {
				t.Errorf("%s: %d bits passed, want %d", what, got, want)
			}
		}
		clock.Advance(7 * time.Millisecond)
		want += rate / 1000 * 7
	}
}
