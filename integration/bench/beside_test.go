package main

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Two daemons take turns sample by sample in two sittings, with another one opened first: the first sample of each
// warms up, none is always first, the n-th figures of both form a pair, and no anchor is measured.
func TestTakeSamples(t *testing.T) {
	dir := t.TempDir()
	var daemons [2]string
	for i, name := range []string{"base", "head"} {
		daemons[i] = filepath.Join(dir, name)
		if err := os.WriteFile(daemons[i], nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var opened, calls, undone []string
	var fails error
	row := Row{Name: "x", Unit: "ns", Open: func(_ context.Context, b *Bench) (Meter, error) {
		name := filepath.Base(b.VNICD)
		opened = append(opened, name)
		b.Add(func() { undone = append(undone, name) })
		ours := func(_ context.Context, d time.Duration) (Sample, error) {
			if d != time.Millisecond {
				t.Errorf("a sample of %v", d)
			}
			calls = append(calls, name)
			s := Sample{Value: float64(len(calls)), Work: work{units: 1, unit: "message"}}
			if name == "head" {
				s.Extra = map[string]float64{lineFigure: 1, coresNear: s.Value}
				return s, fails
			}
			s.Extra = map[string]float64{lineFigure: 1, coresFar: s.Value}
			return s, nil
		}
		anchor := func(context.Context, time.Duration) (Sample, error) { return Sample{}, errors.New("an anchor") }
		return Meter{Ours: ours, Anchor: anchor}, nil
	}}
	o := options{rounds: 3, time: time.Millisecond}
	got, err := takeSamples(t.Context(), daemons, row, o)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Repeat("base head head base base head head base ", 2); strings.Join(calls, " ")+" " != want {
		t.Errorf("samples of %v, want %s", calls, want)
	}
	if want := "base head head base"; strings.Join(opened, " ") != want {
		t.Errorf("opened: %v, want %s", opened, want)
	}
	mean := func(x ...float64) (m []float64) { // of the first sitting's samples, numbered from 1, and the second's
		for _, x := range x {
			m = append(m, math.Sqrt(x*(x+8)))
		}
		return m
	}
	if !slices.Equal(got.base.ours, mean(4, 5, 8)) || !slices.Equal(got.head.ours, mean(3, 6, 7)) || got.row != "x" ||
		got.unit != "ns" {
		t.Errorf("%+v", got)
	}
	if b, h := got.inState(coresNear); len(b)+len(h) != 0 || !slices.Equal(got.head.states[coresNear], mean(3, 6, 7)) {
		t.Errorf("with near cores: %v, %v, %v", b, h, got.head.states)
	}
	if len(undone) != 4 {
		t.Errorf("closed: %v", undone)
	}
	fails = errors.New("no link")
	if _, err := takeSamples(t.Context(), daemons, row, o); !errors.Is(err, fails) ||
		!strings.Contains(err.Error(), daemons[1]) {
		t.Errorf("a failing sample: %v", err)
	}
	if len(undone) != 6 {
		t.Errorf("closed after an error: %v", undone)
	}
	if _, err := takeSamples(t.Context(), [2]string{daemons[0], dir + "/none"}, row, o); err == nil || len(undone) != 7 {
		t.Errorf("without a daemon: %v; closed: %v", err, undone)
	}
}
