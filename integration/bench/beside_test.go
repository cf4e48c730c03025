package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// fakeDaemons returns a base and a head that newBench accepts.
func fakeDaemons(t *testing.T) (daemons [2]string) {
	dir := t.TempDir()
	for i, name := range []string{"base", "head"} {
		daemons[i] = filepath.Join(dir, name)
		if err := os.WriteFile(daemons[i], nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return daemons
}

// message is a sample of one message.
func message(value float64) Sample {
	return Sample{Value: value, Work: work{units: 1, unit: "message"}}
}

// Each sitting opens both daemons anew and closes them, with the other one first than before. Their samples alternate,
// the first of each warms up, and no anchor is measured. The medians of a sitting's samples are one pair of figures.
func TestTakeSamples(t *testing.T) {
	daemons := fakeDaemons(t)
	var opened, undone []string
	var calls string
	var fails error
	row := Row{Name: "x", Unit: "ns", Open: func(_ context.Context, b *Bench) (Meter, error) {
		name := filepath.Base(b.VNICD)
		if open := len(opened) - len(undone); open != len(opened)%2 {
			t.Errorf("%d daemons were open before the %dth", open, len(opened))
		}
		opened = append(opened, name)
		b.Add(func() { undone = append(undone, name) })
		ours := func(_ context.Context, d time.Duration) (Sample, error) {
			if d != 200*time.Millisecond {
				t.Errorf("a sample of %v", d)
			}
			calls += name[:1]
			s := message(math.Pow(2, float64(len(calls)-1)))
			if name == "head" {
				s.Extra = map[string]float64{lineFigure: 1, coresNear: s.Value}
				return s, fails
			}
			switch len(calls) { // of the second sitting
			case 15:
				s.Extra = map[string]float64{coresNear: 70}
			case 18, 22:
				s.Extra = map[string]float64{coresFar: 80}
			}
			return s, nil
		}
		anchor := func(context.Context, time.Duration) (Sample, error) { return Sample{}, errors.New("an anchor") }
		return Meter{Ours: ours, Anchor: anchor, Turns: 20}, nil
	}}
	o := options{rounds: 3, time: time.Second}
	got, err := takeSamples(t.Context(), daemons, row, o)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Repeat("bhhbbhhbbhhb"+"hbbhhbbhhbbh", 2); calls != want { // four sittings: an even number
		t.Errorf("samples of %v, want %s", calls, want)
	}
	if want := strings.Repeat("base head head base ", 2); strings.Join(opened, " ")+" " != want {
		t.Errorf("opened: %v, want %s", opened, want)
	}
	if len(undone) != 8 {
		t.Errorf("closed: %v", undone)
	}
	// The third of the samples 4 5 8 9 12, and 3 6 7 10 11; in the next sitting the other way round.
	base, head := []float64{1 << 7, 1 << 18, 1 << 31, 1 << 42}, []float64{1 << 6, 1 << 19, 1 << 30, 1 << 43}
	if !slices.Equal(got.base.ours, base) || !slices.Equal(got.head.ours, head) || got.row != "x" || got.unit != "ns" {
		t.Errorf("%+v", got)
	}
	// A sitting counts for a state if both had samples in it, also if other sittings have none.
	if b, h := got.inState(coresNear); !slices.Equal(b, []float64{70}) || !slices.Equal(h, head[1:2]) {
		t.Errorf("with near cores: %v, %v", b, h)
	}
	if b, h := got.inState(coresFar); len(b)+len(h) != 0 || got.base.states[coresFar][1] != 80 {
		t.Errorf("with far cores: %v, %v, %v", b, h, got.base.states)
	}
	fails = errors.New("no link")
	if _, err := takeSamples(t.Context(), daemons, row, o); !errors.Is(err, fails) ||
		!strings.Contains(err.Error(), daemons[1]) {
		t.Errorf("a failing sample: %v", err)
	}
	if len(undone) != 10 {
		t.Errorf("closed after an error: %v", undone)
	}
	if _, err := takeSamples(t.Context(), [2]string{daemons[0], daemons[1] + "/none"}, row, o); err == nil ||
		len(undone) != 11 {
		t.Errorf("without a daemon: %v; closed: %v", err, undone)
	}
}

// A sample has its part of the time, but it is not shorter than the shortest sample.
func TestShortSamples(t *testing.T) {
	row := Row{Name: "x", Open: func(context.Context, *Bench) (Meter, error) {
		return Meter{Ours: func(_ context.Context, d time.Duration) (Sample, error) {
			if d != shortestSample {
				t.Errorf("a sample of %v", d)
			}
			return message(1), nil
		}}, nil
	}}
	if _, err := takeSamples(t.Context(), fakeDaemons(t), row, options{rounds: 1, time: time.Millisecond}); err != nil {
		t.Error(err)
	}
}

// Both daemons are one commit's. What a start gives a process stays until its end and varies by 5 %, samples vary by
// 1 %, and the daemon that is opened second has 1.1 of the first. The interval contains 1 at least as often as it says.
func TestSittingsDecide(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	opened := 0
	row := Row{Name: "x", Unit: "GB/s", Open: func(context.Context, *Bench) (Meter, error) {
		process := 100 * math.Exp(0.05*rnd.NormFloat64())
		if opened++; opened%2 == 0 {
			process *= 1.1
		}
		return Meter{Ours: func(context.Context, time.Duration) (Sample, error) {
			return message(process * math.Exp(0.01*rnd.NormFloat64())), nil
		}}, nil
	}}
	const series = 60
	daemons, inside := fakeDaemons(t), 0
	for range series {
		got, err := takeSamples(t.Context(), daemons, row, options{rounds: 10, time: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		c := compareRounds(got.base.ours, got.head.ours, true)
		if len(c.Ratios) != 10 || c.Confidence < 0.95 {
			t.Fatalf("10 sittings gave %d pairs and a confidence of %v", len(c.Ratios), c.Confidence)
		}
		inside += b2i(c.Low <= 1 && 1 <= c.High)
	}
	if part := float64(inside) / series; part < 0.95 {
		t.Errorf("%v of the intervals contain the true ratio", part)
	}
}

// An interrupt ends the sitting: both daemons are closed, and no others are opened.
func TestInterruptedSitting(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	opened, closed, samples := 0, 0, 0
	row := Row{Name: "x", Open: func(_ context.Context, b *Bench) (Meter, error) {
		opened++
		b.Add(func() { closed++ })
		return Meter{Ours: func(ctx context.Context, _ time.Duration) (Sample, error) {
			if samples++; samples == 15 { // in the second sitting
				interrupt()
			}
			return message(1), ctx.Err()
		}}, nil
	}}
	_, err := takeSamples(ctx, fakeDaemons(t), row, options{rounds: 10, time: time.Second})
	if !errors.Is(err, context.Canceled) || opened != 4 || closed != 4 || samples != 15 {
		t.Errorf("%v after %d samples; %d daemons were opened and %d closed", err, samples, opened, closed)
	}
}
