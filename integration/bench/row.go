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
	Name   string // selects the row in ONLY=
	What   string // what is measured
	Anchor string // what it is compared with; "": nothing
	Unit   string // of the row and its anchor
	Goals  []Goal // all must be met; none: reported only
	// Open prepares the row; undo functions go to Bench.Add.
	Open func(ctx context.Context, b *Bench) (Meter, error)
	// Section, instead of Open, prints figures in its own format.
	Section func(ctx context.Context, o options, r *report) error
}

// Meter's functions each take one sample, in about d, and count its work. Anchor is nil if the row has none.
type Meter struct {
	Ours, Anchor func(ctx context.Context, d time.Duration) (Sample, error)
	// Turns is the number of alternations within a round, whose figures are the means; 0: once. More alternations
	// expose both to the same disturbance by other load.
	Turns int
}

// round returns the figures of one round; oursFirst gives the order.
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
		if s.Work.units <= 0 || to.Work.unit != "" && to.Work.unit != s.Work.unit {
			err = fmt.Errorf("a sample of %v %q: it must count its work (working)", s.Work.units, s.Work.unit)
			return
		}
		to.Work.add(s.Work)
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
	if err == nil && m.Anchor != nil && ours.Work.unit != anchor.Work.unit {
		err = fmt.Errorf("the work is counted in %q and the anchor's in %q", ours.Work.unit, anchor.Work.unit)
	}
	return ours, anchor, err
}

// Sample is one figure with optional related figures, such as a percentile.
type Sample struct {
	Value float64
	Extra map[string]float64
	Work  work // of the measured phase; see working
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

// missing returns the part of the bound by which v misses the goal; 0 or less: met.
func (g Goal) missing(v float64) float64 {
	if g.AtLeast {
		return 1 - v/g.Bound
	}
	return v/g.Bound - 1
}

// Result holds the figures of a row's rounds.
type Result struct {
	Ours, Anchor         []float64
	OursWork, AnchorWork []work
	Extra                map[string]float64 // medians
}

func (r *Result) ratios() []float64 {
	var out []float64
	for i := range r.Anchor {
		out = append(out, r.Ours[i]/r.Anchor[i])
	}
	return out
}

// short returns the part by which the worst goal is missed; 0: all are met. Goals on the ratio count only if the anchor
// was measured.
func (r *Result) short(goals []Goal) float64 {
	worst := 0.0
	for _, g := range goals {
		switch {
		case !g.OnRatio:
			worst = max(worst, g.missing(median(r.Ours)))
		case len(r.Anchor) > 0:
			worst = max(worst, g.missing(median(r.ratios())))
		}
	}
	return worst
}

// measure opens a row, runs its rounds and cleans up.
func measure(ctx context.Context, o options, row Row) (_ *Result, err error) {
	// A device that hangs must not delay the other rows for ever.
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
	if o.alone {
		m.Anchor = nil
	}
	res := &Result{}
	extra := map[string][]float64{}
	for round := range o.rounds + 1 {
		ours, anchor, err := m.round(ctx, o.time, round%2 == 0)
		if err != nil {
			return nil, err
		}
		if round == 0 {
			continue // warm-up
		}
		res.Ours = append(res.Ours, ours.Value)
		res.OursWork = append(res.OursWork, ours.Work)
		if m.Anchor != nil {
			res.Anchor = append(res.Anchor, anchor.Value)
			res.AnchorWork = append(res.AnchorWork, anchor.Work)
		}
		gather(extra, ours.Extra)
		gather(extra, anchor.Extra)
	}
	if b.profiles != "" {
		if err := b.profile(ctx, row.Name, m.Ours); err != nil {
			return nil, err
		}
	}
	res.Extra = medians(extra)
	return res, nil
}

// gather adds a sample's related figures to those of other samples.
func gather(all map[string][]float64, extra map[string]float64) {
	for k, v := range extra {
		all[k] = append(all[k], v)
	}
}

// medians returns the median of each related figure.
func medians(all map[string][]float64) map[string]float64 {
	m := make(map[string]float64, len(all))
	for k, v := range all {
		m[k] = median(v)
	}
	return m
}

// median returns the median of v, which must not be empty and is not modified.
func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// spread returns half the distance between the extremes as a part of the median.
func spread(v []float64) float64 {
	m := median(v)
	if m == 0 {
		return 0
	}
	return (slices.Max(v) - slices.Min(v)) / 2 / m
}
