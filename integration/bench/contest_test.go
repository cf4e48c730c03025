package main

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"testing"
	"time"
)

func TestShares(t *testing.T) {
	for _, tc := range []struct {
		served                 []float64
		smallest, largest, sum float64
	}{
		{[]float64{5}, 1, 1, 5}, {[]float64{2, 2, 2, 2}, 1, 1, 8}, {[]float64{1, 3}, 0.5, 1.5, 4},
		{[]float64{4, 0, 0, 0}, 0, 4, 4}, {[]float64{1, 16}, 2. / 17, 32. / 17, 17},
	} {
		if a, b, c := shares(tc.served); a != tc.smallest || b != tc.largest || c != tc.sum {
			t.Errorf("%v: %v, %v, %v", tc.served, a, b, c)
		}
	}
	if a, _, _ := shares([]float64{0, 0}); !math.IsNaN(a) { // decides no goal
		t.Error(a)
	}
}

// A contest counts what flows send after they have settled, and stops them all if one fails.
func TestContest(t *testing.T) {
	const begun = 1 << 40
	c := &contest{sent: []*atomic.Uint64{new(atomic.Uint64), new(atomic.Uint64)}}
	c.sent[0].Add(begun)
	c.send = func(ctx context.Context, i int, stop *atomic.Bool) error {
		for !stop.Load() && ctx.Err() == nil {
			c.sent[i].Add(uint64(i) * 1024)
			time.Sleep(100 * time.Microsecond)
		}
		return ctx.Err()
	}
	compared := false
	c.after = func() error { compared = true; return nil }
	served, err := c.run(context.Background(), 40*time.Millisecond)
	if err != nil || !compared || served[0] != 0 || served[1] <= 0 || served[1] >= float64(c.sent[1].Load()) {
		t.Errorf("%v of %d, %v", served, c.sent[1].Load(), err)
	}
	differ := errors.New("data differ")
	c.after = func() error { return differ }
	if _, err := c.run(context.Background(), time.Millisecond); !errors.Is(err, differ) {
		t.Error(err)
	}
	broken := errors.New("broken")
	send := c.send
	c.send = func(ctx context.Context, i int, stop *atomic.Bool) error {
		if i == 1 {
			return broken
		}
		return send(ctx, i, stop)
	}
	if _, err := c.run(context.Background(), time.Hour); !errors.Is(err, broken) {
		t.Error(err)
	}
}

func TestQueue(t *testing.T) {
	q, err := parseQueue(`[{"kind":"tbf","root":true,"options":{"rate":62500000},"bytes":9,"packets":110,"drops":13}]`)
	if err != nil || q != (queue{110, 13}) || q.dropped(queue{20, 3}) != 10 || q.dropped(q) != 0 {
		t.Error(q, err)
	}
	for _, bad := range []string{"", "[]", "nonsense"} {
		if q, err := parseQueue(bad); err == nil {
			t.Error(bad, q)
		}
	}
}
