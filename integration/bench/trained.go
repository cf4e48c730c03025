package main

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
)

// The daemon and this program are compiled with a profile of the benchmark's own rows, so that those rows profit from
// it more than other work does. The head of the table names the rows and shows three of them without the profile.

// trainedPath lists the rows whose profiles were merged into cmd/vnicd/default.pgo, one per line. `make profile` writes
// both.
const trainedPath = "cmd/vnicd/default.pgo.rows"

// withoutProfile are the rows that are also measured without it: one of a host, one between hosts, and one of Ethernet,
// whose gain was the largest.
var withoutProfile = []string{"local_write_lat", "remote_write_64k", "vhost_64"}

// trainedRows returns the rows that path lists.
func trainedRows(path string) ([]string, error) {
	text, err := os.ReadFile(path)
	return strings.Fields(string(text)), err
}

// plainLine is the JSON of a row with and without the compiler's profile.
type plainLine struct {
	Row           string    `json:"row"`
	Unit          string    `json:"unit"`
	With          float64   `json:"with_profile"`
	Without       float64   `json:"without_profile"`
	Ratio         *float64  `json:"ratio,omitempty"`
	Low           *float64  `json:"low,omitempty"`
	High          *float64  `json:"high,omitempty"`
	Confidence    float64   `json:"confidence"`
	Change        change    `json:"change"`
	WithRounds    []float64 `json:"with_rounds"`
	WithoutRounds []float64 `json:"without_rounds"`
}

// plainSides returns the programs in o.plain, which were built without the profile, and this program with o.vnicd.
func plainSides(o options) (sides [2]*side, err error) {
	self, err := os.Executable()
	if err != nil {
		return sides, err
	}
	sides = [2]*side{
		{bench: filepath.Join(o.plain, "bench"), vnicd: filepath.Join(o.plain, "vnicd"), alone: true},
		{bench: self, vnicd: o.vnicd, alone: true},
	}
	for i, s := range sides {
		for _, path := range []string{s.bench, s.vnicd} {
			switch with, err := profiled(path); {
			case err != nil:
				return sides, err
			case with && i == 0:
				return sides, fmt.Errorf("%s was built with a profile", path)
			case !with && i == 1:
				return sides, fmt.Errorf("%s was built without a profile", path)
			}
		}
		// exec needs a path.
		if s.bench, err = filepath.Abs(s.bench); err != nil {
			return sides, err
		}
	}
	return sides, nil
}

// profiled reports whether a Go program was compiled with a profile.
func profiled(path string) (bool, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool { return s.Key == "-pgo" }), nil
}

// comparePlain measures the rows of withoutProfile that were selected in turns, without anchors.
func comparePlain(ctx context.Context, o options, sides [2]*side, rows []Row, rep *report) error {
	for _, name := range withoutProfile {
		if !slices.ContainsFunc(rows, func(r Row) bool { return r.Name == name }) {
			continue
		}
		t, err := takeTurns(ctx, sides, name, o)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("%s without the profile: %w", name, err)
		}
		rep.plain(t)
	}
	return nil
}

// plain reports a row that was measured without the profile (base) and with it (head).
func (r *report) plain(t *turns) {
	c := compareRounds(t.base.ours, t.head.ours, higherIsBetter(t.unit))
	l := plainLine{
		Row: t.row, Unit: t.unit, With: median(t.head.ours), Without: median(t.base.ours), Ratio: finiteOnly(c.Ratio),
		Low: finiteOnly(c.Low), High: finiteOnly(c.High), Confidence: c.Confidence, Change: c.Change,
		WithRounds: t.head.ours, WithoutRounds: t.base.ours,
	}
	r.printf("%s: %s %s with the profile, %s without it: %s (%s, %s)\n", t.row, number(l.With), t.unit,
		number(l.Without), times(finite(c.Ratio)), span(c.interval), c.Change)
	r.json(l)
}

// wrapped breaks a list of words into lines of at most width characters.
func wrapped(words []string, width int) string {
	var b strings.Builder
	at := 0
	for i, w := range words {
		switch {
		case i == 0: // no separator
		case at+1+len(w) > width:
			b.WriteString("\n")
			at = 0
		default:
			b.WriteString(" ")
			at++
		}
		b.WriteString(w)
		at += len(w)
	}
	return b.String()
}
