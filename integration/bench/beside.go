package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"
)

// `make bench-compare DAEMONS=1` compares two commits' daemons, both driven by this program, which has every row open
// twice. Their samples alternate, a fraction of a second apart, where processes of their own are seconds apart: the
// machine changes less from one to the other. Meanwhile the other daemon sleeps. What VMs and applications do is the
// same code on both sides, so a change of guestdrv does not show, and the base must be a daemon that this program's
// guestdrv still drives.
//
// A process keeps what chance gave it (addresses, hash seeds, cores), so two processes of one commit differ by more
// than their samples do. Therefore each pair of figures comes from a sitting with processes of its own: more samples in
// a sitting make a figure steadier, but only sittings are independent of each other. The daemon that is opened second
// may have an advantage, by the memory that is left (a tenth in local_write_1m), so the order alternates.

// sitting has the samples of the base's daemon and of the head's, from one start of both.
type sitting [2][]Sample

const (
	// sittingSamples is how many samples of each daemon a sitting has, besides one that warms up.
	sittingSamples = 5
	// shortestSample is how long each takes at least. A daemon that has slept seems to begin on the core of the program
	// that drives it: in samples of 0.1 s most round trips of local_write_lat took 23 us in place of 1.
	shortestSample = 200 * time.Millisecond
)

// sittings is the number of sittings of a row, as many with either daemon opened first.
func (o *options) sittings() int { return o.rounds + o.rounds%2 }

// takeSamples measures a row in sittings with two daemons.
func takeSamples(ctx context.Context, daemons [2]string, row Row, o options) (*turns, error) {
	var all []sitting
	for i := range o.sittings() {
		s, err := sit(ctx, daemons, i%2, row, o)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	t := &turns{row: row.Name, unit: row.Unit}
	t.addSittings(all)
	return t, nil
}

// sit starts both daemons, measures a row with them alternately and stops them; first is opened and measured first.
func sit(ctx context.Context, daemons [2]string, first int, row Row, o options) (s sitting, err error) {
	each := max(o.time/sittingSamples, shortestSample)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute+4*sittingSamples*each)
	defer cancel()
	order := [2]int{first, 1 - first}
	var meters [2]Meter
	for _, which := range order {
		o.vnicd = daemons[which]
		b, err := newBench(o)
		if err != nil {
			return s, err
		}
		defer b.Run()
		m, err := row.Open(ctx, b)
		if err != nil {
			return s, fmt.Errorf("%s: %w", daemons[which], err)
		}
		meters[which] = Meter{Ours: m.Ours} // there is no anchor to alternate with
	}
	for i := range 2 * (1 + sittingSamples) {
		which := order[(i+1)/2%2] // 0 1 1 0 0 1 1 0 of order
		sample, _, err := meters[which].round(ctx, each, true)
		if err != nil {
			return s, fmt.Errorf("%s: %w", daemons[which], err)
		}
		if i >= 2 {
			s[which] = append(s[which], sample)
		}
	}
	return s, nil
}

// addSittings adds one pair of figures for each sitting: the medians of its samples, so that a disturbed sample counts
// for little.
func (t *turns) addSittings(all []sitting) {
	for _, s := range all {
		for which, to := range []*figures{&t.base, &t.head} {
			var ours []float64
			extra := map[string][]float64{}
			for _, sample := range s[which] {
				ours = append(ours, sample.Value)
				gather(extra, sample.Extra)
			}
			to.ours = append(to.ours, median(ours))
			to.addStates(medians(extra))
		}
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
