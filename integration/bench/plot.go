package main

import (
	"encoding/xml"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
)

// The plot of a run: an SVG file with a group per row, which shows every round of ours, of the anchor and of their
// ratio. The axes begin at 0, so that noise looks as large as it is.

// plotted is one row of the plot.
type plotted struct {
	row    Row
	res    *Result     // nil: the row failed
	goals  []judgement // of the row
	failed string
}

// Sizes in pixels.
const (
	stripWidth  = 300
	stripHeight = 110
	stripGap    = 70 // left of a strip: labels of its axis
	rowHeight   = stripHeight + 70
	plotWidth   = 3*(stripWidth+stripGap) + 30
)

const plotStyle = `text{font:12px sans-serif;fill:#222}.name{font-weight:bold;font-size:14px}` +
	`.axis{stroke:#999;fill:none}.label{text-anchor:end}` +
	`.ours{fill:#1f6fb4;stroke:#1f6fb4}.anchor{fill:#888;stroke:#888}.ratio{fill:#2a8c4a;stroke:#2a8c4a}` +
	`g text{stroke:none}polyline{fill:none;stroke-opacity:.4}.median{stroke-dasharray:4 3}` +
	`.goal{stroke:#c22}.band{fill:#c22;fill-opacity:.1;stroke:none}`

// svg draws the rows below each other.
func svg(rows []plotted) string {
	var b strings.Builder
	height := 30 + rowHeight*len(rows)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d">`,
		plotWidth, height)
	fmt.Fprintf(&b, `<style>%s</style>\n<rect width="100%%" height="100%%" fill="#fff"/>`+"\n", plotStyle)
	fmt.Fprintf(&b, `<text x="10" y="20">%s</text>`+"\n", escape("Each round, left to right. Dashed: the median. "+
		"Red: the goal, and the confidence interval that is compared with it."))
	for i := range rows {
		rows[i].draw(&b, 30+i*rowHeight)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// draw adds the row's group, whose upper edge is at y.
func (p *plotted) draw(b *strings.Builder, y int) {
	fmt.Fprintf(b, `<g id="row-%s" transform="translate(0 %d)">`+"\n", escape(p.row.Name), y)
	defer b.WriteString("</g>\n")
	what := p.row.What
	if p.row.Anchor != "" {
		what += " / " + p.row.Anchor
	}
	fmt.Fprintf(b, `<text class="name" x="10" y="20">%s</text><text x="10" y="37">%s</text>`+"\n",
		escape(p.row.Name), escape(what))
	if p.res == nil {
		fmt.Fprintf(b, `<text class="failed" x="10" y="60">%s</text>`+"\n", escape("failed: "+p.failed))
		return
	}
	var onOurs, onRatio []judgement
	for _, j := range p.goals {
		if j.OnRatio {
			onRatio = append(onRatio, j)
		} else {
			onOurs = append(onOurs, j)
		}
	}
	strip(b, 0, "ours", p.row.Unit, p.res.Ours, onOurs)
	if len(p.res.Anchor) > 0 {
		strip(b, 1, "anchor", p.row.Unit, p.res.Anchor, nil)
		strip(b, 2, "ratio", "ours/anchor", p.res.ratios(), onRatio)
	}
}

// strip draws one series in column col of the row. Values that are not finite are left out.
func strip(b *strings.Builder, col int, class, unit string, values []float64, goals []judgement) {
	left, top := float64(col*(stripWidth+stripGap)+stripGap), 55.0
	shown := slices.DeleteFunc(slices.Clone(values), func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) })
	// The goal is in the picture unless that would press all rounds into a tenth of it.
	low, high := 0.0, 0.0
	for _, v := range shown {
		low, high = min(low, v), max(high, v)
	}
	for _, g := range goals {
		if g.Bound <= 10*high {
			high = max(high, g.Bound)
		}
	}
	if high == low {
		high = low + 1
	}
	high += (high - low) / 20
	at := func(v float64) float64 { return top + stripHeight*(high-v)/(high-low) }
	across := func(class string, v float64) {
		fmt.Fprintf(b, `<line class="%s" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1[4]f"/>`, class, left,
			left+stripWidth, at(v))
	}
	label := func(y float64, text string) {
		fmt.Fprintf(b, `<text class="label" x="%.1f" y="%.1f">%s</text>`, left-5, y+4, escape(text))
	}
	fmt.Fprintf(b, `<g class="%s"><text x="%.1f" y="%.1f">%s</text>`, class, left, top-4, escape(class+", "+unit))
	fmt.Fprintf(b, `<path class="axis" d="M%.1f %.1fv%dh%d"/>`, left, top, stripHeight, stripWidth)
	label(at(low), number(low))
	for _, g := range goals {
		if g.Bound > high {
			continue
		}
		across("goal", g.Bound)
		if l, h := max(g.Low, low), min(g.High, high); l <= h {
			fmt.Fprintf(b, `<rect class="band" x="%.1f" y="%.1f" width="%d" height="%.1f"/>`, left, at(h),
				stripWidth, max(1, at(l)-at(h)))
		}
	}
	if len(shown) > 0 {
		m := median(shown)
		across(class+" median", m)
		label(at(m), number(m))
	}
	var line, points strings.Builder
	for i, v := range values {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			continue
		}
		x := left + stripWidth*(float64(i)+0.5)/float64(len(values))
		fmt.Fprintf(&line, "%.1f,%.1f ", x, at(v))
		fmt.Fprintf(&points, `<circle cx="%.1f" cy="%.1f" r="3.5"><title>round %d: %s</title></circle>`, x, at(v),
			i+1, number(v))
	}
	fmt.Fprintf(b, `<polyline points="%s"/>%s</g>`+"\n", strings.TrimSpace(line.String()), points.String())
}

// escape writes text for XML.
func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder does not fail
	return b.String()
}

// plotPath is the plot's file beside the JSON.
func plotPath(json string) string {
	return strings.TrimSuffix(json, ".jsonl") + ".svg"
}

func writePlot(path string, rows []plotted) error {
	return os.WriteFile(path, []byte(svg(rows)), 0o644)
}
