package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// described are the kinds of lines by their headings in the documentation.
var described = map[string]any{
	"First line: the machine":              machine{},
	"A row":                                line{},
	"A goal of a row":                      goalLine{},
	"A row that failed":                    failureLine{},
	"A row without the compiler's profile": plainLine{},
	"A Go benchmark of `micro`":            benchmark{},

	"First line of a comparison":     compareHead{},
	"A row that both commits have":   compareLine{},
	"A state of the cores":           stateLine{},
	"A row that only one commit has": onlyLine{},
}

const documentation = "../../docs/benchmarks.md"

// TestFieldsAreDescribed compares the JSON's fields with their description, in both directions.
func TestFieldsAreDescribed(t *testing.T) {
	doc := describedFields(t)
	for heading, v := range described {
		got, want := jsonFields(v), doc[heading]
		if len(want) == 0 {
			t.Errorf("%s: no table below the heading %q", documentation, heading)
		}
		for _, f := range got {
			if !slices.Contains(want, f) {
				t.Errorf("%s: %q does not describe the field %q", documentation, heading, f)
			}
		}
		for _, f := range want {
			if !slices.Contains(got, f) {
				t.Errorf("%s: %q describes %q, which is no field", documentation, heading, f)
			}
		}
	}
	for heading := range doc {
		if _, ok := described[heading]; !ok {
			t.Errorf("%s: no line is described by %q", documentation, heading)
		}
	}
}

// TestWrittenFieldsAreDescribed checks what a report writes, and that it writes every field of a row.
func TestWrittenFieldsAreDescribed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	rep, err := newReport(path, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	rep.add(Row{Name: "a", What: "b", Anchor: "c", Unit: "msg/s", Goals: []Goal{atLeast(100)}},
		&Result{Ours: []float64{1, 2}, Anchor: []float64{3, 5}, Extra: map[string]float64{"d": 1},
			OursWork:   []work{{"KiB", 1, machineTime{busy: 1, stolen: 1}}},
			AnchorWork: []work{{"KiB", 1, machineTime{busy: 1}}}})
	rep.failure(Row{Name: "broken"}, errors.New("reason"))
	if err := rep.close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	doc := describedFields(t)
	var lines []map[string]json.RawMessage
	for l := range bytes.Lines(text) {
		var m map[string]json.RawMessage
		if err := json.Unmarshal(l, &m); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, m)
	}
	if len(lines) != 3 {
		t.Fatalf("%d lines", len(lines))
	}
	var goals []map[string]json.RawMessage
	if err := json.Unmarshal(lines[1]["goals"], &goals); err != nil {
		t.Fatal(err)
	}
	for heading, m := range map[string]map[string]json.RawMessage{
		"First line: the machine": lines[0], "A row": lines[1], "A goal of a row": goals[0],
		"A row that failed": lines[2],
	} {
		for f := range m {
			if !slices.Contains(doc[heading], f) {
				t.Errorf("%s: the written field %q is not described", heading, f)
			}
		}
	}
	for _, f := range doc["A row"] {
		if _, ok := lines[1][f]; !ok {
			t.Errorf("a row has no %q: %v", f, slices.Sorted(maps.Keys(lines[1])))
		}
	}
}

// jsonFields returns the JSON names of a struct's fields, those of embedded structs included.
func jsonFields(v any) (names []string) {
	for _, f := range reflect.VisibleFields(reflect.TypeOf(v)) {
		if f.Anonymous {
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}

var fieldRow = regexp.MustCompile("^\\| `([^`]+)` \\|")

// describedFields returns the fields in the tables of the documentation's section of JSON files, by heading.
func describedFields(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(documentation)
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n## The JSON files\n")
	if !ok {
		t.Fatalf("%s: no section of the JSON files", documentation)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	fields := map[string][]string{}
	heading := ""
	for l := range strings.Lines(section) {
		if h, ok := strings.CutPrefix(strings.TrimSpace(l), "### "); ok {
			heading = h
			fields[heading] = nil
		} else if m := fieldRow.FindStringSubmatch(l); m != nil {
			fields[heading] = append(fields[heading], m[1])
		}
	}
	return fields
}
