package main

import (
	"fmt"
	"math"
	"slices"
)

// A goal is met, or missed, only if the rounds agree: the confidence interval of their median lies on one side of the
// bound. Otherwise the run does not decide it.

type verdict string

const (
	met       verdict = "met"
	missed    verdict = "missed"
	undecided verdict = "not decided"
)

const (
	confidenceWanted = 0.95
	// fewestRounds decide a goal; all of five rounds lie on one side of the true median in one run of 16.
	fewestRounds = 5
)

// interval is a confidence interval of a median.
type interval struct {
	Low, High float64
	// Confidence is the probability that the interval contains the true median if rounds are independent.
	Confidence float64
}

// intervalOf returns the confidence interval of the median of v, which must not be empty, by order statistics: from the
// k-th smallest to the k-th largest value. It assumes no distribution. The median is outside if fewer than k of the n
// values lie on one of its sides, which has probability 2*P(B < k), where B is binomial with n trials of 1/2. k is the
// largest that leaves at least 95 %. Fewer than six values do not reach that and give their whole range: five have
// 93.75 %.
func intervalOf(v []float64) interval {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	k := 1
	outside := 2 * math.Pow(0.5, float64(n)) // 2*P(B < 1)
	for p := outside; ; k++ {
		p *= float64(n-k+1) / float64(k) // 2*P(B = k)
		if 2*(k+1) > n+1 || outside+p > 1-confidenceWanted {
			break
		}
		outside += p
	}
	return interval{s[k-1], s[n-k], max(0, 1-outside)}
}

// judgement is what a run says about one goal.
type judgement struct {
	Goal
	interval
	Verdict verdict
}

// judge compares the rounds' values with the goal. Values that are not numbers (0/0) decide nothing.
func (g Goal) judge(rounds []float64) judgement {
	j := judgement{Goal: g, Verdict: undecided}
	if len(rounds) == 0 || slices.ContainsFunc(rounds, math.IsNaN) {
		j.interval = interval{Low: math.NaN(), High: math.NaN()}
		return j
	}
	j.interval = intervalOf(rounds)
	if low, high := g.holds(j.Low), g.holds(j.High); len(rounds) < fewestRounds || low != high {
		return j
	} else if low {
		j.Verdict = met
	} else {
		j.Verdict = missed
	}
	return j
}

// holds reports whether v meets the goal; the bound itself does.
func (g Goal) holds(v float64) bool {
	if g.AtLeast {
		return v >= g.Bound
	}
	return v <= g.Bound
}

// describe writes the interval with the goal's unit.
func (j *judgement) describe() string {
	if math.IsNaN(j.Low) {
		return "-"
	}
	s := number(j.Low) + ".." + number(j.High)
	if j.OnRatio {
		s += "x"
	}
	return s
}

// judge returns the judgement of each goal and the row's verdict: missed if a goal is missed, met if all are met.
// decisive is the index of the goal that the verdict is due to.
func (r *Result) judge(goals []Goal) (all []judgement, v verdict, decisive int) {
	badness := []verdict{met, undecided, missed}
	worst := -1
	for i, g := range goals {
		rounds := r.Ours
		if g.OnRatio {
			rounds = r.ratios()
		}
		all = append(all, g.judge(rounds))
		if bad := slices.Index(badness, all[i].Verdict); bad > worst {
			worst, v, decisive = bad, all[i].Verdict, i
		}
	}
	return all, v, decisive
}

// shows writes a verdict for the table; short is the part by which the median misses the goal.
func (v verdict) shows(short float64) string {
	if v == missed {
		return fmt.Sprintf("missed by %s%%", percent(short))
	}
	return string(v)
}
