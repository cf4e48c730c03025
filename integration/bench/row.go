package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Row is one line of the table.
type Row struct {
	Name   string // as ONLY= takes it
	What   string // what is measured
	Anchor string // what it is compared with; empty: nothing
	Unit   string // of both
	Goals  []Goal // all of which must be met; none: reported only
	// Open sets the stage; what has to be undone goes to Bench.Add.
	Open func(ctx context.Context, b *Bench) (Meter, error)
	// Section, in place of Open, prints figures of its own kind.
	Section func(ctx context.Context, o options, r *report) error
}

// Meter takes one sample, in about d. Anchor is nil if the row has none.
type Meter struct {
	Ours, Anchor func(ctx context.Context, d time.Duration) (Sample, error)
	// Turns is how often the two take turns within a round, whose figures are the means; zero: once. The more, the more
	// alike is what the machine does besides to both.
	Turns int
}

// round returns the figures of one round, of which ours comes first or last.
func (m *Meter) round(ctx context.Context, d time.Duration, oursFirst bool) (ours, anchor Sample, err error) {
	turns := max(m.Turns, 1)
	take := func(f func(context.Context, time.Duration) (Sample, error), to *Sample) {
		if f == nil || err != nil {
			return
		}
		var s Sample
		if s, err = f(ctx, d/time.Duration(turns)); err != nil {
			return
		}
		to.Value += s.Value / float64(turns)
		for k, v := range s.Extra {
			if to.Extra == nil {
				to.Extra = map[string]float64{}
			}
			to.Extra[k] += v / float64(turns)
		}
	}
	for range turns {
		if !oursFirst {
			take(m.Anchor, &anchor)
		}
		take(m.Ours, &ours)
		if oursFirst {
			take(m.Anchor, &anchor)
		}
		oursFirst = !oursFirst
	}
	return ours, anchor, err
}

// Sample is one figure, and perhaps others that belong to it, such as a percentile.
type Sample struct {
	Value float64
	Extra map[string]float64
}

// Goal is a bound on the median of ours, or of the ratio ours/anchor of each round.
type Goal struct {
	OnRatio bool
	AtLeast bool // else: at most
	Bound   float64
}

func atLeast(x float64) Goal      { return Goal{AtLeast: true, Bound: x} }
func atMost(x float64) Goal       { return Goal{Bound: x} }
func ratioAtLeast(x float64) Goal { return Goal{OnRatio: true, AtLeast: true, Bound: x} }
func ratioAtMost(x float64) Goal  { return Goal{OnRatio: true, Bound: x} }

func (g Goal) describe() string {
	op := "<="
	if g.AtLeast {
		op = ">="
	}
	if g.OnRatio {
		return fmt.Sprintf("%s %gx", op, g.Bound)
	}
	return op + " " + strings.TrimSuffix(number(g.Bound), ".00")
}

// missing is by how much v falls short of the goal as a part of the bound; 0 or less: met.
func (g Goal) missing(v float64) float64 {
	if g.AtLeast {
		return 1 - v/g.Bound
	}
	return v/g.Bound - 1
}

// Result is what the rounds of a row gave.
type Result struct {
	Ours, Anchor []float64
	Extra        map[string]float64 // medians
}

func (r *Result) ratios() []float64 {
	var out []float64
	for i := range r.Anchor {
		out = append(out, r.Ours[i]/r.Anchor[i])
	}
	return out
}

// short is by how much the worst goal is missed; 0: all are met.
func (r *Result) short(goals []Goal) float64 {
	worst := 0.0
	for _, g := range goals {
		v := median(r.Ours)
		if g.OnRatio {
			v = median(r.ratios())
		}
		worst = max(worst, g.missing(v))
	}
	return worst
}

// measure opens a row, runs its rounds and clears the stage.
func measure(ctx context.Context, o options, row Row) (_ *Result, err error) {
	// A device that does not answer must not hold up the other rows.
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute+time.Duration(4*o.rounds)*o.time)
	defer cancel()
	b, err := newBench(o)
	if err != nil {
		return nil, err
	}
	defer b.Run()
	m, err := row.Open(ctx, b)
	if err != nil {
		return nil, err
	}
	res := &Result{}
	extra := map[string][]float64{}
	for round := range o.rounds + 1 {
		ours, anchor, err := m.round(ctx, o.time, round%2 == 0)
		if err != nil {
			return nil, err
		}
		if round == 0 {
			continue // it warms up
		}
		res.Ours = append(res.Ours, ours.Value)
		if m.Anchor != nil {
			res.Anchor = append(res.Anchor, anchor.Value)
		}
		for _, x := range []map[string]float64{ours.Extra, anchor.Extra} {
			for k, v := range x {
				extra[k] = append(extra[k], v)
			}
		}
	}
	if b.profiles != "" {
		if err := b.profile(ctx, row.Name, m.Ours); err != nil {
			return nil, err
		}
	}
	if len(extra) > 0 {
		res.Extra = map[string]float64{}
		for k, v := range extra {
			res.Extra[k] = median(v)
		}
	}
	return res, nil
}

// median of v, which is not empty; v is left as it is.
func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// spread is half the distance between the extremes as a part of the median.
func spread(v []float64) float64 {
	m := median(v)
	if m == 0 {
		return 0
	}
	return (slices.Max(v) - slices.Min(v)) / 2 / m
}
