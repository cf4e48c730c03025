package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"
)

// `make bench-compare DAEMONS=1` compares two commits' daemons, both driven by this program, which has every row open
// twice. A turn is one sample, so the turns of a pair are a fraction of a second apart, where processes of their own
// are seconds apart: the machine changes less from one to the other. Meanwhile the other daemon sleeps. What VMs and
// applications do is the same code on both sides, so a change of guestdrv does not show, and the base must be a daemon
// that this program's guestdrv still drives.

// takeSamples measures a row o.rounds times with each of two daemons, after a sample of each that warms up.
func takeSamples(ctx context.Context, daemons [2]string, row Row, o options) (_ *turns, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute+time.Duration(4*o.rounds)*o.time)
	defer cancel()
	var meters [2]Meter
	for i, vnicd := range daemons {
		o.vnicd = vnicd
		b, err := newBench(o)
		if err != nil {
			return nil, err
		}
		defer b.Run()
		if meters[i], err = row.Open(ctx, b); err != nil {
			return nil, fmt.Errorf("%s: %w", vnicd, err)
		}
	}
	t := &turns{row: row.Name, unit: row.Unit}
	for i := range 2 * (o.rounds + 1) {
		which := (i + 1) / 2 % 2 // 0 1 1 0 0 1 1 0
		m := meters[which]
		m.Anchor = nil
		s, _, err := m.round(ctx, o.time, true)
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
