package main

import (
	"math"
	"math/rand/v2"
	"testing"
)

// The intervals are those of tables of order statistics.
func TestIntervalOf(t *testing.T) {
	up := func(n int) (v []float64) {
		for i := n; i > 0; i-- { // not sorted
			v = append(v, float64(i))
		}
		return v
	}
	for _, tc := range []struct {
		n                     int
		low, high, confidence float64
	}{
		{1, 1, 1, 0}, {2, 1, 2, 0.5}, {3, 1, 3, 0.75}, {4, 1, 4, 0.875}, {5, 1, 5, 0.9375}, {6, 1, 6, 0.96875},
		{8, 1, 8, 0.9921875}, {9, 2, 8, 0.9609375}, {10, 2, 9, 0.978515625}, {12, 3, 10, 0.96142578125},
		{20, 6, 15, 0.958610534667},
	} {
		got := intervalOf(up(tc.n))
		if got.Low != tc.low || got.High != tc.high || math.Abs(got.Confidence-tc.confidence) > 1e-9 {
			t.Errorf("%d rounds: %+v, want %v to %v with %v", tc.n, got, tc.low, tc.high, tc.confidence)
		}
	}
}

// The interval contains the true median as often as it says, also of a skewed distribution.
func TestIntervalCoverage(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	const runs = 20000
	for _, n := range []int{5, 9, 12} {
		var want float64
		inside := 0
		for range runs {
			v := make([]float64, n)
			for i := range v {
				v[i] = math.Exp(rnd.NormFloat64()) // its median is 1
			}
			iv := intervalOf(v)
			if want = iv.Confidence; iv.Low <= 1 && 1 <= iv.High {
				inside++
			}
		}
		// Four standard deviations of the count are at most 0.7 % of the runs.
		if got := float64(inside) / runs; math.Abs(got-want) > 0.007 {
			t.Errorf("%d rounds: %.4f of the intervals contain the median, want %.4f", n, got, want)
		}
	}
}

func TestJudge(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, tc := range []struct {
		goal   Goal
		rounds []float64
		want   verdict
	}{
		{atLeast(1), []float64{1.0, 1.1, 1.2, 1.3, 1.4}, met}, // the bound itself meets the goal
		{atLeast(1), []float64{0.99, 1.1, 1.2, 1.3, 1.4}, undecided},
		{atLeast(1), []float64{0.5, 0.6, 0.7, 0.8, 1.0}, undecided},
		{atLeast(1), []float64{0.5, 0.6, 0.7, 0.8, 0.9}, missed},
		{atMost(1), []float64{0.5, 0.6, 0.7, 0.8, 1.0}, met},
		{atMost(1), []float64{0.5, 0.6, 0.7, 0.8, 1.1}, undecided},
		{atMost(1), []float64{1.1, 1.2, 1.3, 1.4, 1.5}, missed},
		// Of nine rounds the best and the worst may be on the other side, but not two.
		{atLeast(1), []float64{0.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 9}, met},
		{atLeast(1), []float64{0.1, 0.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 9}, undecided},
		// Too few rounds decide nothing, however good they are.
		{atLeast(1), []float64{5, 5, 5, 5}, undecided},
		{atLeast(1), nil, undecided},
		// An anchor of 0.
		{ratioAtLeast(1), []float64{inf, inf, inf, inf, inf}, met},
		{ratioAtMost(1), []float64{inf, inf, inf, inf, inf}, missed},
		{ratioAtMost(1), []float64{0.5, 0.5, 0.5, 0.5, nan}, undecided},
	} {
		if got := tc.goal.judge(tc.rounds); got.Verdict != tc.want {
			t.Errorf("%s of %v: %s, want %s", tc.goal.describe(), tc.rounds, got.Verdict, tc.want)
		}
	}
}

// A goal on the ratio is decided by the ratios of rounds, which may agree where figures of ours and anchor do not.
func TestJudgeRow(t *testing.T) {
	r := &Result{Ours: []float64{10, 20, 30, 40, 50}, Anchor: []float64{9, 18, 27, 36, 45}}
	for _, tc := range []struct {
		goals    []Goal
		want     verdict
		decisive int
	}{
		{[]Goal{ratioAtLeast(1)}, met, 0},
		{[]Goal{ratioAtLeast(1), atLeast(10)}, met, 0},
		{[]Goal{ratioAtLeast(1), atLeast(30)}, undecided, 1},
		{[]Goal{ratioAtLeast(2), atLeast(30)}, missed, 0},
		{[]Goal{atLeast(30), ratioAtLeast(2)}, missed, 1},
	} {
		all, v, decisive := r.judge(tc.goals)
		if v != tc.want || decisive != tc.decisive || len(all) != len(tc.goals) {
			t.Errorf("%+v: %s by goal %d, want %s by %d", tc.goals, v, decisive, tc.want, tc.decisive)
		}
	}
	if _, v, _ := r.judge(nil); v != "" {
		t.Errorf("a row without goals: %q", v)
	}
}
