package vhostuser

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// counter is a Keeper that counts.
type counter struct{ kept, forgotten []time.Time }

type clocked struct {
	*counter
	now *time.Time
}

func (c clocked) Keep(string, int) error { c.kept = append(c.kept, *c.now); return nil }
func (c clocked) Forget(string) error    { c.forgotten = append(c.forgotten, *c.now); return nil }
func (c clocked) Ending() bool           { return false }

// A front end that adds and removes memory in a loop makes few messages per second for the service manager, and loses
// none; one that behaves does not wait; and nothing waits once the server closes.
func TestPace(t *testing.T) {
	now := time.Unix(1000, 0)
	to := clocked{&counter{}, &now}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p := newPacer(ctx, to)
	p.now = func() time.Time { return now }
	p.sleep = func(_ context.Context, d time.Duration) { now = now.Add(d) }
	begin := now
	for i := range paceBurst / 2 {
		_ = p.Keep(fmt.Sprint(i), 0)
		_ = p.Forget(fmt.Sprint(i))
	}
	if now != begin {
		t.Errorf("a burst takes %v", now.Sub(begin))
	}
	const flood = 10000
	for range flood {
		_ = p.Keep("x", 0)
		_ = p.Forget("x")
	}
	if n := len(to.kept) + len(to.forgotten); n != paceBurst+2*flood {
		t.Errorf("%d messages, want %d", n, paceBurst+2*flood)
	}
	if took, want := now.Sub(begin), 2*flood*time.Second/paceRate; took < want || took > want+time.Second {
		t.Errorf("%d messages beyond the burst take %v, want %v", 2*flood, took, want)
	}
	for _, times := range [][]time.Time{to.kept, to.forgotten} {
		var second int
		for i, x := range times {
			if x == begin { // the burst
				second = i
				continue
			}
			for times[second].Add(time.Second).Before(x) {
				second++
			}
			if n := i - second; n > paceRate {
				t.Fatalf("%d messages in a second", n)
			}
		}
	}
	now = now.Add(time.Hour)
	begin = now
	_ = p.Keep("y", 0)
	for range paceBurst - 1 {
		_ = p.Forget("y")
	}
	if now != begin {
		t.Errorf("after a pause a burst takes %v", now.Sub(begin))
	}
	cancel()
	for range flood {
		_ = p.Forget("y")
	}
	if now != begin {
		t.Errorf("a closing server waits %v", now.Sub(begin))
	}
}
