package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// `make bench-compare` measures two commits with the programs of each (turns.go), or their daemons (beside.go), and
// says for each row whether the second one is faster. A pair of turns, or a sitting, gives one ratio head/base; the
// median of the ratios has the confidence interval of intervalOf.

type change string

const (
	better  change = "better"
	worse   change = "worse"
	same    change = "same"
	unclear change = "not decided"
)

// sameWithin is how far from 1 both ends of an interval may be for "same".
const sameWithin = 0.03

// comparison is what the turns of one row say.
type comparison struct {
	Ratios []float64 // head/base of each pair
	Ratio  float64   // their median
	interval
	Change change
}

// compareRounds compares the figures of pairs of turns; higher: the higher figure is the better one.
func compareRounds(base, head []float64, higher bool) comparison {
	c := comparison{Change: unclear}
	for i := range base {
		c.Ratios = append(c.Ratios, head[i]/base[i])
	}
	if len(c.Ratios) == 0 {
		return c
	}
	c.Ratio, c.interval = median(c.Ratios), intervalOf(c.Ratios)
	grew, shrank := c.Low > 1, c.High < 1
	switch {
	case len(base) < fewestRounds:
	case grew && higher, shrank && !higher:
		c.Change = better
	case grew, shrank:
		c.Change = worse
	case c.Low >= 1-sameWithin && c.High <= 1+sameWithin:
		c.Change = same
	}
	return c
}

// higherIsBetter reports the direction of a unit: rates and shares grow, times, memory and load shrink.
func higherIsBetter(unit string) bool {
	return strings.HasSuffix(unit, "/s") || strings.HasPrefix(unit, "of ")
}

// compareHead is the first line of the comparison's JSON.
type compareHead struct {
	Base    string  `json:"base_commit"`
	Head    string  `json:"head_commit"`
	Daemons bool    `json:"daemons,omitempty"`
	Machine machine `json:"machine"`
}

// compareLine is the JSON of a row that both commits have.
type compareLine struct {
	Row  string `json:"row"`
	Unit string `json:"unit"`
	compared
	AnchorRatio      *float64  `json:"anchor_ratio,omitempty"`
	AnchorLow        *float64  `json:"anchor_low,omitempty"`
	AnchorHigh       *float64  `json:"anchor_high,omitempty"`
	BaseAnchorRounds []float64 `json:"base_anchor_rounds,omitempty"`
	HeadAnchorRounds []float64 `json:"head_anchor_rounds,omitempty"`

	States []stateLine `json:"states,omitempty"`
}

// stateLine compares the turns that had figures in one state of the cores.
type stateLine struct {
	State string `json:"state"`
	compared
}

// compared is what the figures of pairs of turns are, and say.
type compared struct {
	Base       float64   `json:"base"`
	Head       float64   `json:"head"`
	Ratio      *float64  `json:"ratio,omitempty"`
	Low        *float64  `json:"low,omitempty"`
	High       *float64  `json:"high,omitempty"`
	Confidence float64   `json:"confidence"`
	Change     change    `json:"change"`
	BaseRounds []float64 `json:"base_rounds"`
	HeadRounds []float64 `json:"head_rounds"`
}

// onlyLine is the JSON of a row that one commit has.
type onlyLine struct {
	Row  string `json:"row"`
	Only string `json:"only"`
}

const compareFormat = "%-22s %-11s %9s %9s %9s  %-14s %-12s %s\n"

// comparer prints the comparison as rows are done and writes it as JSON lines.
type comparer struct {
	out io.Writer
	enc *json.Encoder
	err error
}

func (c *comparer) printf(format string, args ...any) {
	_, err := fmt.Fprintf(c.out, format, args...)
	c.err = errors.Join(c.err, err)
}

func (c *comparer) json(v any) { c.err = errors.Join(c.err, c.enc.Encode(v)) }

// compare compares the figures of pairs of turns and prints them below name.
func (c *comparer) compare(name, unit string, base, head []float64, higher bool, control string) compared {
	r := compareRounds(base, head, higher)
	f := compared{
		Base: median(base), Head: median(head), Ratio: finiteOnly(r.Ratio), Low: finiteOnly(r.Low),
		High: finiteOnly(r.High), Confidence: r.Confidence, Change: r.Change, BaseRounds: base, HeadRounds: head,
	}
	c.printf(compareFormat, name, unit, number(f.Base), number(f.Head), times(finite(r.Ratio)), span(r.interval),
		r.Change, control)
	return f
}

// add reports a row that was measured in turns.
func (c *comparer) add(t *turns) {
	l := compareLine{Row: t.row, Unit: t.unit}
	control := ""
	if n := len(t.base.ours); len(t.base.anchor) == n && len(t.head.anchor) == n {
		a := compareRounds(t.base.anchor, t.head.anchor, true)
		l.AnchorRatio, l.AnchorLow, l.AnchorHigh = finiteOnly(a.Ratio), finiteOnly(a.Low), finiteOnly(a.High)
		l.BaseAnchorRounds, l.HeadAnchorRounds = t.base.anchor, t.head.anchor
		control = span(a.interval)
	}
	higher := higherIsBetter(t.unit)
	l.compared = c.compare(t.row, t.unit, t.base.ours, t.head.ours, higher, control)
	for _, state := range []string{coresNear, coresFar} {
		if base, head := t.inState(state); len(base) > 0 {
			f := c.compare("  "+state, fmt.Sprintf("%d pairs", len(base)), base, head, higher, "")
			l.States = append(l.States, stateLine{state, f})
		}
	}
	c.json(l)
}

func span(i interval) string { return number(i.Low) + ".." + number(i.High) + "x" }

func (c *comparer) failure(row string, err error) {
	c.printf("%-22s FAILED: %v\n", row, err)
	c.json(failureLine{row, err.Error()})
}

// plan returns which rows are compared, which rows only one side has, and the function that measures one.
func plan(ctx context.Context, sides [2]*side, o options) (rows []string, only [2][]string,
	take func(row string) (*turns, error), err error) {
	if !o.daemons {
		rows, only, err = commonRows(ctx, sides, o.only)
		return rows, only, func(row string) (*turns, error) { return takeTurns(ctx, sides, row, o) }, err
	}
	own, rows, err := ownRows(o.only)
	daemons := [2]string{sides[0].daemon(), sides[1].daemon()}
	return rows, only, func(row string) (*turns, error) { return takeSamples(ctx, daemons, own[row], o) }, err
}

// compare builds the commits base and head and measures the selected rows in turns.
func compare(ctx context.Context, o options, base, head string, out io.Writer) (err error) {
	var sides [2]*side
	for i, rev := range []string{base, head} {
		s, err := checkout(ctx, rev, filepath.Join("build", "compare", []string{"base", "head"}[i]), os.Stderr)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.remove()) }()
		sides[i] = s
	}
	rows, only, take, err := plan(ctx, sides, o)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(o.out), 0o755); err != nil {
		return err
	}
	f, err := os.Create(o.out)
	if err != nil {
		return err
	}
	c := &comparer{out: out, enc: json.NewEncoder(f)}
	c.enc.SetEscapeHTML(false)
	m := thisMachine()
	c.json(compareHead{sides[0].commit, sides[1].commit, o.daemons, m})
	pairs, note := fmt.Sprintf("%d pairs of turns", o.rounds), ""
	if o.daemons {
		pairs = fmt.Sprintf("%d sittings", o.sittings())
		note = "Only the daemons are compared: this program drives both and starts them anew for each sitting.\n"
	}
	c.printf("base %s, head %s; %s; %s, %d cores, load %s\n%s\n", sides[0].commit, sides[1].commit, pairs, m.CPU,
		m.Cores, m.Load, note)
	dirty, err := exec.CommandContext(ctx, "git", "status", "--porcelain", "--untracked-files=no").Output()
	if err == nil && len(dirty) > 0 {
		c.printf("The changes that are not committed are not measured.\n\n")
	}
	c.printf(compareFormat, "row", "unit", "base", "head", "head/base", "interval", "change", "the anchor's interval")
	failed := 0
	for _, row := range rows {
		t, err := take(row)
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), c.err, f.Close())
		}
		if err != nil {
			failed++
			c.failure(row, err)
		} else {
			c.add(t)
		}
	}
	for i, name := range []string{"base", "head"} {
		for _, row := range only[i] {
			c.printf("%-22s only in %s\n", row, name)
			c.json(onlyLine{row, name})
		}
	}
	if failed > 0 {
		c.err = errors.Join(c.err, fmt.Errorf("%d of %d rows could not be measured", failed, len(rows)))
	}
	return errors.Join(c.err, f.Close())
}
