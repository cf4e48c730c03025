package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// texts returns what an SVG shows: title and lines. It fails the test if that is not well-formed.
func texts(t *testing.T, svg []byte) (out []string) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(svg))
	in := false
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		switch x := tok.(type) {
		case xml.StartElement:
			in = x.Name.Local == "text"
			if in {
				out = append(out, "")
			}
		case xml.EndElement:
			in = false
		case xml.CharData:
			if in {
				out[len(out)-1] += string(x)
			}
		}
	}
}

// A command's output of both kinds is in the picture, in order, and is printed; one that fails makes none.
func TestRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.svg")
	var printed bytes.Buffer
	const script = `echo 'one <&>'; echo two >&2; printf 'three\tx'`
	if err := run(path, "make <it>", time.Second, []string{"sh", "-c", script}, &printed); err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"make <it>", "$ make <it>", "one <&>", "two", "three   x"}
	if got := texts(t, svg); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if printed.String() != "one <&>\ntwo\nthree\tx\n" {
		t.Errorf("printed %q", printed.String())
	}
	other := filepath.Join(t.TempDir(), "y.svg")
	for _, argv := range [][]string{{"sh", "-c", "echo begun; exit 3"}, {"/nonexistent"}, nil} {
		if err := run(other, "x", time.Second, argv, io.Discard); err == nil {
			t.Errorf("%q: no error", argv)
		}
	}
	if _, err := os.Stat(other); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a picture of a command that failed: %v", err)
	}
}

func TestShorten(t *testing.T) {
	got := shorten([]line{{0, "a"}, {500 * time.Millisecond, "b"}, {time.Minute, "c"}, {time.Minute, "d"}}, time.Second)
	want := []line{{0, "a"}, {500 * time.Millisecond, "b"}, {1500 * time.Millisecond, "c"}, {1500 * time.Millisecond, "d"}}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

func TestPrintable(t *testing.T) {
	long := strings.Repeat("ä", columns)
	for in, want := range map[string]string{"": "", "a\tb": "a       b", "10%\r100%": "100%", "100%\r": "100%",
		"\x1b[1;31mred\x1b[0m\x07": "red", "\xff": "?", long: long, long + "b": long[:2*(columns-1)] + "…"} {
		if got := printable(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

// Each line comes into the window when its time has come, and the picture rests at the end.
func TestFrames(t *testing.T) {
	var lines []line
	for i := range 40 {
		lines = append(lines, line{time.Duration(i/2) * 100 * time.Millisecond, strconv.Itoa(i)}) // two at a time
	}
	svg := string(picture("x", lines))
	frames := func(name string) [][]string {
		_, text, _ := strings.Cut(svg, "@keyframes "+name+"{")
		text, _, _ = strings.Cut(text, "}}")
		return regexp.MustCompile(`([0-9.]+)%\{transform:translateY\((-?\d+)px\)`).FindAllStringSubmatch(text, -1)
	}
	column, window := frames("column"), frames("window")
	if len(column) != len(lines)+1 || len(window) != len(column) {
		t.Fatalf("%d and %d frames", len(column), len(window))
	}
	before := -1.0
	for i := range column {
		at, _ := strconv.ParseFloat(column[i][1], 64)
		inside, _ := strconv.Atoi(column[i][2])
		moved, _ := strconv.Atoi(window[i][2])
		shown := min(i+1, len(lines))
		// The newest line ends where the window does. The first line is at the top as long as all have room.
		top := moved + inside
		if at <= before || window[i][1] != column[i][1] || top+shown*lineHeight != moved+rows*lineHeight ||
			shown <= rows && top != 0 || shown > rows && moved != 0 {
			t.Errorf("frame %d: %v and %v, after %v", i, column[i][1:], window[i][1:], before)
		}
		before = at
	}
	total := (1900*time.Millisecond + endFor).Seconds()
	if want := "animation:window " + strconv.FormatFloat(total, 'f', 1, 64) + "s"; !strings.Contains(svg, want) {
		t.Errorf("no %q", want)
	}
	if !strings.Contains(svg, "prefers-reduced-motion") {
		t.Error("it moves for those who do not want that")
	}
}

// The README's excerpt and its picture are of the same run, and neither names a path of the machine that made it.
func TestREADME(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile("../demo.svg")
	if err != nil {
		t.Fatal(err)
	}
	_, excerpt, _ := strings.Cut(string(readme), "```text\n$ make demo\n")
	excerpt, _, ok := strings.Cut(excerpt, "\n```")
	if !ok || !strings.Contains(string(readme), "](docs/demo.svg)") {
		t.Fatal("README.md has no excerpt of make demo, or no picture")
	}
	shown := texts(t, svg)
	for l := range strings.SplitSeq(excerpt, "\n") {
		if l != "..." && !slices.Contains(shown, l) {
			t.Errorf("not in the picture: %q; make recording, and copy from it", l)
		}
	}
	for _, l := range shown {
		if regexp.MustCompile(`(^|\s)/\w`).MatchString(l) {
			t.Errorf("a path of the machine: %q", l)
		}
	}
}
