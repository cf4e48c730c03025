package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"time"
)

// `make bench-compare DAEMONS=1` compares two commits' daemons, both driven by this program, which has every row open
// twice. A turn is one sample, so the turns of a pair are a fraction of a second apart, where processes of their own
// are seconds apart: the machine changes less from one to the other. Meanwhile the other daemon sleeps. What VMs and
// applications do is the same code on both sides, so a change of guestdrv does not show, and the base must be a daemon
// that this program's guestdrv still drives.
//
// The daemon that is opened second may have an advantage, by the memory that is left (a tenth in local_write_1m). So
// there are two sittings, with the daemons opened in either order, and a turn's figure is the geometric mean of its
// samples in both.

// takeSamples measures a row with each of two daemons, o.rounds times in each sitting.
func takeSamples(ctx context.Context, daemons [2]string, row Row, o options) (*turns, error) {
	t, err := sitting(ctx, daemons, 0, row, o)
	if err != nil {
		return nil, err
	}
	second, err := sitting(ctx, daemons, 1, row, o)
	if err != nil {
		return nil, err
	}
	t.base.merge(&second.base)
	t.head.merge(&second.head)
	return t, nil
}

// sitting measures a row o.rounds times with each daemon, after a sample of each that warms up; first is opened first.
func sitting(ctx context.Context, daemons [2]string, first int, row Row, o options) (_ *turns, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute+time.Duration(4*o.rounds)*o.time)
	defer cancel()
	var meters [2]Meter
	for _, i := range []int{first, 1 - first} {
		o.vnicd = daemons[i]
		b, err := newBench(o)
		if err != nil {
			return nil, err
		}
		defer b.Run()
		if meters[i], err = row.Open(ctx, b); err != nil {
			return nil, fmt.Errorf("%s: %w", daemons[i], err)
		}
		meters[i].Anchor = nil
	}
	t := &turns{row: row.Name, unit: row.Unit}
	for i := range 2 * (o.rounds + 1) {
		which := (i + 1) / 2 % 2 // 0 1 1 0 0 1 1 0
		s, _, err := meters[which].round(ctx, o.time, true)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", daemons[which], err)
		}
		if i < 2 {
			continue
		}
		to := [2]*figures{&t.base, &t.head}[which]
		to.ours = append(to.ours, s.Value)
		if _, tells := s.Extra[lineFigure]; tells {
			to.addStates(s.Extra)
		}
	}
	return t, nil
}

// merge replaces figures by their geometric means with those of another sitting; NaN if one has none.
func (f *figures) merge(other *figures) {
	mean := func(v, w []float64) {
		for i := range min(len(v), len(w)) {
			v[i] = math.Sqrt(v[i] * w[i])
		}
	}
	mean(f.ours, other.ours)
	for state := range f.states {
		mean(f.states[state], other.states[state])
	}
}

// ownRows returns the rows of this program that were selected and have one figure.
func ownRows(selected string) (map[string]Row, []string, error) {
	rows, err := pick(selected)
	byName := map[string]Row{}
	var names []string
	for _, r := range rows {
		if r.Open != nil {
			byName[r.Name], names = r, append(names, r.Name)
		}
	}
	if err == nil && len(names) == 0 {
		err = errors.New("no row with one figure was selected")
	}
	return byName, names, err
}

// daemon is the commit's daemon.
func (s *side) daemon() string { return filepath.Join(s.dir, "build", "vnicd") }
