package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestTrainedRows(t *testing.T) {
	trained, err := trainedRows(filepath.Join("..", "..", trainedPath))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.IsSorted(trained) {
		t.Error("the list is not sorted")
	}
	for _, name := range withoutProfile {
		if !slices.Contains(trained, name) {
			t.Errorf("%s did not train the profile", name)
		}
	}
	// A row that is renamed keeps its place in the list.
	for _, name := range trained {
		if !slices.ContainsFunc(registry(), func(r Row) bool { return r.Name == name }) {
			t.Errorf("there is no row %s", name)
		}
	}
}

// TestWithoutProfile measures rows by two programs of a few lines, which take turns.
func TestWithoutProfile(t *testing.T) {
	dir := t.TempDir()
	const program = `#!/bin/sh
while [ $# -gt 0 ]; do
	case $1 in
	-only) row=$2 ;; -json) out=$2 ;; -vnicd) vnicd=$2 ;; -anchors=false) alone=1 ;;
	esac
	shift
done
[ "$alone" = 1 ] || exit 1
printf '%%s ' "$vnicd" >>%s
echo "{\"row\":\"$row\",\"unit\":\"ns\",\"rounds\":[%d]}" >"$out"
`
	order := filepath.Join(dir, "order")
	var sides [2]*side
	for i, ns := range []int{200, 100} {
		path := filepath.Join(dir, fmt.Sprint(i))
		if err := os.WriteFile(path, fmt.Appendf(nil, program, order, ns), 0o755); err != nil {
			t.Fatal(err)
		}
		sides[i] = &side{bench: path, vnicd: []string{"plain", "trained"}[i], alone: true}
	}
	var out bytes.Buffer
	path := filepath.Join(dir, "x.jsonl")
	rep, err := newReport(path, &out)
	if err != nil {
		t.Fatal(err)
	}
	rows := []Row{{Name: "local_write_lat"}, {Name: "other"}, {Name: "vhost_64"}}
	o := options{rounds: 5, time: time.Millisecond}
	if err := comparePlain(context.Background(), o, sides, rows, rep); err != nil {
		t.Fatal(err)
	}
	rep.columns()
	if err := rep.close(); err != nil {
		t.Fatal(err)
	}
	turns, err := os.ReadFile(order)
	if want := "plain trained trained plain plain trained trained plain plain trained "; string(turns) != want+want {
		t.Errorf("turns: %s, %v", turns, err)
	}
	head, _, _ := strings.Cut(out.String(), "what / anchor")
	const want = "local_write_lat: 100 ns with the profile, 200 without it: 0.50x (0.50..0.50x, better)"
	if !strings.Contains(head, want) || !strings.Contains(head, "vhost_64: ") ||
		strings.Contains(head, "other: ") {
		t.Errorf("the head: %s", head)
	}
	text, err := os.ReadFile(path)
	if err != nil || bytes.Count(text, []byte(`"with_profile":100,"without_profile":200`)) != 2 {
		t.Errorf("%s, %v", text, err)
	}
	sides[1].bench = filepath.Join(dir, "absent")
	if err := comparePlain(context.Background(), o, sides, rows, rep); err == nil {
		t.Error("a program that is absent")
	}
}

// This test program was built without a profile, so it cannot stand for the programs with one.
func TestPlainSides(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if with, err := profiled(self); with || err != nil {
		t.Errorf("%s: %v, %v", self, with, err)
	}
	dir := t.TempDir()
	for _, name := range []string{"bench", "vnicd"} {
		if err := os.Symlink(self, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	_, err = plainSides(options{plain: dir, vnicd: self})
	if err == nil || !strings.Contains(err.Error(), "without a profile") {
		t.Error(err)
	}
	if _, err := plainSides(options{plain: t.TempDir(), vnicd: self}); err == nil {
		t.Error("an empty directory")
	}
}

func TestWrapped(t *testing.T) {
	for want, width := range map[string]int{"aa bb\ncc": 5, "aa\nbb\ncc": 4, "aa bb cc": 8} {
		if got := wrapped([]string{"aa", "bb", "cc"}, width); got != want {
			t.Errorf("%d: %q, want %q", width, got, want)
		}
	}
}
