package main

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// element is any element of the plot.
type element struct {
	XMLName  xml.Name
	Attrs    []xml.Attr `xml:",any,attr"`
	Children []element  `xml:",any"`
	Text     string     `xml:",chardata"`
}

func (e *element) attr(name string) string {
	for _, a := range e.Attrs {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

// each calls f for the element and all below it.
func (e *element) each(f func(*element)) {
	f(e)
	for i := range e.Children {
		e.Children[i].each(f)
	}
}

// TestPlot writes the plot of a report and reads it back: well-formed XML with one group per row, a point for each
// round of ours, anchor and ratio, and nothing outside of the picture.
func TestPlot(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	rep, err := newReport(path, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	rounds := func(v ...float64) []float64 { return v }
	rep.add(Row{Name: "plain", What: `<b> & "c"`, Anchor: "d>e", Unit: "GB/s",
		Goals: []Goal{ratioAtLeast(0.95), atMost(6)}},
		&Result{Ours: rounds(5, 4, 6, 5, 5), Anchor: rounds(10, 10, 10, 9, 11)})
	rep.add(Row{Name: "alone", What: "without an anchor", Unit: "KiB", Goals: []Goal{atMost(1e9)}},
		&Result{Ours: rounds(-1, 4, 6)})
	rep.add(Row{Name: "zero", What: "an anchor of 0", Anchor: "nothing", Unit: "%", Goals: []Goal{ratioAtMost(1)}},
		&Result{Ours: rounds(0, 1), Anchor: rounds(0, 0)}) // ratios: NaN and infinite
	rep.failure(Row{Name: "broken", What: "w"}, errors.New("a < b & \x00"))
	if err := rep.close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(strings.TrimSuffix(path, "jsonl") + "svg")
	if err != nil {
		t.Fatal(err)
	}
	var top element
	if err := xml.Unmarshal(text, &top); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if top.XMLName != (xml.Name{Space: "http://www.w3.org/2000/svg", Local: "svg"}) {
		t.Errorf("the root is %v", top.XMLName)
	}
	points := map[string]map[string]int{} // by row and series
	var order []string
	for i := range top.Children {
		g := &top.Children[i]
		row, ok := strings.CutPrefix(g.attr("id"), "row-")
		if !ok {
			continue
		}
		order = append(order, row)
		points[row] = map[string]int{}
		for k := range g.Children {
			s := &g.Children[k]
			s.each(func(e *element) {
				if e.XMLName.Local == "circle" {
					points[row][s.attr("class")]++
				}
				for _, name := range []string{"cx", "cy", "y1", "y2", "x1", "x2", "x", "y", "height"} {
					v := e.attr(name)
					if v == "" {
						continue
					}
					if f, err := strconv.ParseFloat(v, 64); err != nil || math.IsNaN(f) || f < 0 || f > plotWidth {
						t.Errorf("%s: %s=%q of <%s>", row, name, v, e.XMLName.Local)
					}
				}
				if y, err := strconv.ParseFloat(e.attr("cy"), 64); err == nil && (y < 55 || y > 55+stripHeight) {
					t.Errorf("%s: a round at %v is outside of its axes", row, y)
				}
			})
		}
	}
	if strings.Join(order, " ") != "plain alone zero broken" {
		t.Errorf("groups: %v", order)
	}
	for row, want := range map[string]map[string]int{
		"plain": {"ours": 5, "anchor": 5, "ratio": 5}, "alone": {"ours": 3},
		"zero": {"ours": 2, "anchor": 2}, "broken": {},
	} {
		for _, series := range []string{"ours", "anchor", "ratio"} {
			if points[row][series] != want[series] {
				t.Errorf("%s: %d points of %s, want %d", row, points[row][series], series, want[series])
			}
		}
	}
	for _, want := range []string{"&lt;b&gt; &amp;", "failed: a &lt; b", `class="goal"`, `class="band"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
}
