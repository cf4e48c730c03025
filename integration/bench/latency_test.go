package main

import (
	"context"
	"strings"
	"testing"
	"time"
)

func TestPercentiles(t *testing.T) {
	var thousand latencies
	for i := range 1000 {
		thousand = append(thousand, float64(1000-i))
	}
	thousand.sorted()
	for _, tc := range []struct {
		l    latencies
		q    float64
		want float64
	}{
		{latencies{7}, 0.5, 7}, {latencies{7}, 0, 7}, {latencies{7}, 0.999, 7},
		{latencies{1, 2}, 0.5, 1}, {latencies{1, 2}, 0.51, 2}, {latencies{1, 2, 3}, 0.5, 2},
		{thousand, 0, 1}, {thousand, 0.5, 500}, {thousand, 0.99, 990}, {thousand, 0.999, 999}, {thousand, 1, 1000},
		{thousand[:999], 0.999, 999}, {thousand[:100], 0.999, 100}, // too few for p99.9: the slowest
	} {
		if got := tc.l.at(tc.q); got != tc.want {
			t.Errorf("quantile %v of %d values: %v, want %v", tc.q, len(tc.l), got, tc.want)
		}
	}
	p := thousand.percentiles("anchor, ")
	if len(p) != 3 || p["anchor, p99"] != 990 || p["anchor, p99.9"] != 999 || p["anchor, max"] != 1000 {
		t.Errorf("%v", p)
	}
}

// pipe is a messenger in memory. Its program may be slow, or change one number.
type pipe struct {
	out   chan<- uint64
	in    <-chan uint64
	delay time.Duration
	wrong uint64 // this number is sent as another
}

func (p *pipe) send(n uint64) error {
	time.Sleep(p.delay)
	if n == p.wrong && n != endOfSample {
		n += 1 << 32
	}
	p.out <- n
	return nil
}

func (p *pipe) receive(ctx context.Context) (uint64, error) {
	select {
	case n := <-p.in:
		return n, nil
	case <-ctx.Done():
		return 0, errStuck
	}
}

func pipes() (a, b *pipe) {
	x, y := make(chan uint64, 1), make(chan uint64, 1)
	return &pipe{out: x, in: y}, &pipe{out: y, in: x}
}

func TestBouncer(t *testing.T) {
	for _, sleep := range []bool{false, true} {
		a, b := pipes()
		p := newBouncer(a, b, sleep)
		for range 3 { // the programs survive the end of a sample
			times, w, err := p.sample(context.Background(), time.Millisecond)
			if err != nil || len(times) == 0 || w.unit != "message" || w.units != 2*float64(len(times)) {
				t.Fatalf("sleep %v: %d times, %+v, %v", sleep, len(times), w, err)
			}
		}
		// The slower of two programs delays each round trip: one way takes at least half of that.
		b.delay = 10 * time.Millisecond
		if times, _, err := p.sample(context.Background(), time.Millisecond); err != nil || times.at(0) < 5000 {
			t.Errorf("sleep %v: %v us, %v", sleep, times, err)
		}
		b.delay, b.wrong = 0, p.last+2
		if _, _, err := p.sample(context.Background(), time.Minute); err == nil ||
			!strings.Contains(err.Error(), "was answered by") {
			t.Errorf("sleep %v: a wrong answer: %v", sleep, err)
		}
		a, b = pipes()
		a.out = make(chan uint64, 1<<10) // the wire loses everything
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		if _, _, err := newBouncer(a, b, sleep).sample(ctx, time.Minute); err == nil {
			t.Errorf("sleep %v: no answer is no error", sleep)
		}
		cancel()
	}
}
