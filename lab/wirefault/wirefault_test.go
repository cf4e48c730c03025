package wirefault

import (
	"context"
	"net/netip"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/vnicd/vnicd/lab/harness"
)

// ping joins two hosts by a wire with a policy, and returns the output of n pings and the wire.
func ping(t *testing.T, p Policy, n int) (string, *Wire) {
	t.Helper()
	ns := make([]*harness.Namespace, 3) // two hosts, and the wire between
	for i, name := range []string{"vnicd-a", "vnicd-b", "vnicd-wire"} {
		var err error
		if ns[i], err = harness.NewNamespace(name); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ns[i].Close() })
	}
	for i, x := range []struct{ end, addr string }{{"wa", "192.0.2.1/24"}, {"wb", "192.0.2.2/24"}} {
		if err := harness.AddVeth(ns[i], "ul", ns[2], x.end, 1500); err != nil {
			t.Fatal(err)
		}
		if err := ns[i].AddAddress("ul", netip.MustParsePrefix(x.addr)); err != nil {
			t.Fatal(err)
		}
	}
	w, err := Start(ns[2].Name, "wa", "wb", p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	out, err := ns[0].Run(context.Background(), "ping", "-c", strconv.Itoa(n), "-i", "0.01", "-W", "60", "192.0.2.2")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out, w
}

// TestDelay: no round trip is shorter than the delays on its way, and all frames arrive, in order.
func TestDelay(t *testing.T) {
	for name, x := range map[string]struct {
		policy Policy
		least  time.Duration
	}{
		"both ways": {Policy{Delay: 30 * time.Millisecond}, 60 * time.Millisecond},
		"one way":   {Policy{Delay: 30 * time.Millisecond, OneWay: true}, 30 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			out, w := ping(t, x.policy, 20)
			times := regexp.MustCompile(`icmp_seq=(\d+) .*time=([\d.]+) ms`).FindAllStringSubmatch(out, -1)
			if len(times) != 20 || w.Frames.Load() < 40 || w.Dropped.Load() != 0 {
				t.Errorf("%d answers, %d frames, %d dropped\n%s", len(times), w.Frames.Load(), w.Dropped.Load(), out)
			}
			for i, m := range times {
				ms, err := strconv.ParseFloat(m[2], 64)
				if err != nil || ms < float64(x.least.Milliseconds()) || m[1] != strconv.Itoa(i+1) {
					t.Errorf("answer %d: number %s after %v ms (%v)", i+1, m[1], ms, err)
				}
			}
		})
	}
}

// TestWithoutDelay: a wire without faults drops nothing.
func TestWithoutDelay(t *testing.T) {
	if out, w := ping(t, Policy{}, 3); w.Frames.Load() < 6 || w.Dropped.Load() != 0 {
		t.Errorf("%d frames, %d dropped\n%s", w.Frames.Load(), w.Dropped.Load(), out)
	}
}

// TestTimeout: a relay sleeps until the next frame is due, and no longer than a reordered frame waits.
func TestTimeout(t *testing.T) {
	if ts := timeout(nil, nil); ts != nil {
		t.Errorf("nothing to send: %v", ts)
	}
	later := []delayed{{due: time.Now().Add(time.Hour)}}
	if ts := timeout(nil, later); ts == nil || ts.Nano() < int64(30*time.Minute) || ts.Nano() > int64(time.Hour) {
		t.Errorf("in an hour: %v", ts)
	}
	if ts := timeout(make([]held, 1), later); ts == nil || ts.Nano() != int64(lateTime) {
		t.Errorf("a reordered frame: %v", ts)
	}
	if ts := timeout(nil, []delayed{{due: time.Now().Add(-time.Second)}}); ts == nil || ts.Nano() != 0 {
		t.Errorf("overdue: %v", ts)
	}
}
