package recovery

import "testing"

func TestRTT(t *testing.T) {
	type sample struct{ now, rtt int64 }
	for name, c := range map[string]struct {
		samples       []sample
		smoothed, min int64
	}{
		"no sample":                 {nil, 0, 0},
		"the first is taken as is":  {[]sample{{1e6, 8000}}, 8000, 8000},
		"gain 1/8, up":              {[]sample{{1e6, 8000}, {2e6, 16000}}, 9000, 8000},
		"gain 1/8, down":            {[]sample{{1e6, 8000}, {2e6, 800}}, 7100, 800},
		"minimum is kept for 10 s":  {[]sample{{0, 1000}, {10e9, 9000}}, 2000, 1000},
		"minimum expires":           {[]sample{{0, 1000}, {10e9 + 1, 9000}}, 2000, 9000},
		"an equal one renews it":    {[]sample{{0, 1000}, {9e9, 1000}, {18e9, 9000}}, 2000, 1000},
		"smoothed never reaches 0":  {[]sample{{0, 1}, {1, 1}, {2, 1}}, 1, 1},
		"a large one does not wrap": {[]sample{{0, 1000}, {1 << 62, 1 << 61}}, 1000 + (1<<61-1000)/8, 1 << 61},
	} {
		var r RTT
		for _, s := range c.samples {
			r.Sample(s.now, s.rtt)
		}
		if r.Smoothed != c.smoothed || r.Min != c.min {
			t.Errorf("%s: smoothed %d, minimum %d, want %d and %d", name, r.Smoothed, r.Min, c.smoothed, c.min)
		}
	}
}

// TestRTTConverges: a constant response time is estimated exactly enough from any start.
func TestRTTConverges(t *testing.T) {
	for _, first := range []int64{1, 1000, 40e3, 100e6} {
		var r RTT
		r.Sample(0, first)
		for i := range int64(200) {
			r.Sample(i, 40e3)
		}
		if d := r.Smoothed - 40e3; d < -8 || d > 8 {
			t.Errorf("first sample %d: smoothed %d", first, r.Smoothed)
		}
	}
}

// TestRTTMax: the maximum of the last 10 s, in which silence counts although it is no sample.
func TestRTTMax(t *testing.T) {
	var r RTT
	for i, x := range []struct {
		now, d  int64
		silence bool
		max     int64
	}{
		{1e9, 1000, false, 1000},
		{2e9, 500, false, 1000},
		{3e9, 90e6, true, 90e6},
		{4e9, 1000, false, 90e6},
		{13e9, 2000, true, 90e6},
		{13e9 + 1, 2000, true, 2000},
		{14e9, 3000, false, 3000},
	} {
		if x.silence {
			before := r.Smoothed
			if r.Silence(x.now, x.d); r.Smoothed != before {
				t.Errorf("%d: silence is a sample", i)
			}
		} else {
			r.Sample(x.now, x.d)
		}
		if r.Max != x.max {
			t.Errorf("%d: maximum %d, want %d", i, r.Max, x.max)
		}
	}
}
