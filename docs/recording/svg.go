package main

import (
	"bytes"
	_ "embed"
	"encoding/xml"
	"fmt"
	"regexp"
	"strings"
	"text/template"
	"time"
	"unicode/utf8"
)

// The terminal, in characters, and its characters, in pixels.
const (
	columns    = 100
	rows       = 26
	charWidth  = 8.43
	lineHeight = 19
	margin     = 16
	titleBar   = 34
)

// endFor is how long the last lines stay before the picture begins anew.
const endFor = 8 * time.Second

//go:embed terminal.svg
var layoutText string

var layout = template.Must(template.New("terminal").Parse(layoutText))

// picture returns the lines as an SVG: a column of text in a window, whose lower edge is always below the newest line.
// Both move in steps. While there is room for all lines, the window moves down over the column; then the column moves
// up in the window. Where motion is not wanted, the picture shows the end.
func picture(title string, lines []line) []byte {
	type row struct {
		Y    int
		Text string
	}
	var texts []row
	var column, window strings.Builder
	end := endFor
	if n := len(lines); n > 0 {
		end += lines[n-1].at
	}
	last := -1.0
	for i, l := range lines {
		texts = append(texts, row{i * lineHeight, escape(printable(l.text))})
		// Of lines at the same time the last one's place counts.
		part := 100 * float64(l.at) / float64(end)
		if part = max(part, last); part == last {
			part += 0.001
		}
		last = part
		frame(&column, part, inWindow(i+1))
		frame(&window, part, windowAt(i+1))
	}
	frame(&column, 100, inWindow(len(lines)))
	frame(&window, 100, windowAt(len(lines)))
	var out bytes.Buffer
	err := layout.Execute(&out, map[string]any{
		"Width": int(columns*charWidth) + 2*margin, "Height": titleBar + rows*lineHeight + 2*margin,
		"Middle": (int(columns*charWidth) + 2*margin) / 2,
		"Left":   margin, "Top": titleBar + margin, "Inner": rows * lineHeight, "Title": escape(title),
		"Seconds": fmt.Sprintf("%.1f", end.Seconds()), "Column": column.String(), "Window": window.String(),
		"ColumnEnd": inWindow(len(lines)), "WindowEnd": windowAt(len(lines)), "Lines": texts, "Baseline": lineHeight - 5,
	})
	if err != nil {
		panic(err) // the template and its values are ours
	}
	return out.Bytes()
}

func frame(to *strings.Builder, percent float64, y int) {
	fmt.Fprintf(to, "%.3f%%{transform:translateY(%dpx)}", percent, y)
}

// inWindow is where the column is in the window when there are n lines.
func inWindow(n int) int { return (rows - n) * lineHeight }

// windowAt is where the window is then.
func windowAt(n int) int { return min(0, (n-rows)*lineHeight) }

var control = regexp.MustCompile("\x1b\\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")

// printable returns a line as a terminal shows it in the end: what was overwritten from the beginning of the line is
// gone, tabs are spaces, colours are not shown, and what is beyond the last column is cut off.
func printable(s string) string {
	s = strings.TrimRight(s, "\r")
	s = s[strings.LastIndexByte(s, '\r')+1:]
	s = control.ReplaceAllString(strings.ToValidUTF8(s, "?"), "")
	var b strings.Builder
	n := 0
	for _, r := range s {
		if r == '\t' {
			spaces := 8 - n%8
			b.WriteString(strings.Repeat(" ", spaces))
			n += spaces
			continue
		}
		b.WriteRune(r)
		n++
	}
	if s = b.String(); utf8.RuneCountInString(s) > columns {
		s = string([]rune(s)[:columns-1]) + "…"
	}
	return s
}

func escape(s string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(s)) // a buffer has no errors
	return b.String()
}
