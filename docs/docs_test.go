package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

const root = ".."

// read returns a file of the project.
func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// files returns the project's files whose names end in one of the suffixes, relative to its root.
func files(t *testing.T, suffixes ...string) (paths []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "build" || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.Type().IsRegular() && slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(path, s) }):
			rel, err := filepath.Rel(root, path)
			paths = append(paths, rel)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) == 0 {
		t.Fatalf("no files that end in %v", suffixes)
	}
	return paths
}

// functions returns the names of the functions of a Go or C file; methods as (*T).f or T.f.
func functions(t *testing.T, path string) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	if strings.HasSuffix(path, ".c") {
		for _, m := range regexp.MustCompile(`(?m)^[a-z][\w\s*]*?\b(\w+)\([^;]*?\)\s*\{`).FindAllStringSubmatch(read(t, path),
			-1) {
			names[m[1]] = true
		}
		return names
	}
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, path), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		name := fn.Name.Name
		if fn.Recv != nil {
			switch recv := fn.Recv.List[0].Type.(type) {
			case *ast.StarExpr:
				name = fmt.Sprintf("(*%v).%s", recv.X, name)
			default:
				name = fmt.Sprintf("%v.%s", recv, name)
			}
		}
		names[name] = true
	}
	return names
}

// TestWalks checks that the functions which ARCHITECTURE.md walks through are where it says.
func TestWalks(t *testing.T) {
	step := regexp.MustCompile("`([\\w/.-]+\\.(?:go|c))`:\\s+`([^`]+)`")
	steps := step.FindAllStringSubmatch(read(t, "ARCHITECTURE.md"), -1)
	if len(steps) < 30 {
		t.Errorf("ARCHITECTURE.md names %d functions, want at least 30", len(steps))
	}
	packages := map[string]bool{}
	for _, s := range steps {
		packages[filepath.Dir(s[1])] = true
		if _, err := os.Stat(filepath.Join(root, s[1])); err != nil {
			t.Errorf("ARCHITECTURE.md names %s: %v", s[1], err)
		} else if !functions(t, s[1])[s[2]] {
			t.Errorf("ARCHITECTURE.md names %s in %s, which has no such function", s[2], s[1])
		}
	}
	t.Logf("%d functions in %d packages", len(steps), len(packages))
}

// TestSecurityClaims checks that the tests that SECURITY.md names exist: its sentences are promises.
func TestSecurityClaims(t *testing.T) {
	named := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`").FindAllStringSubmatch(read(t, "SECURITY.md"), -1)
	if len(named) < 40 {
		t.Errorf("SECURITY.md names %d tests, want at least 40", len(named))
	}
	exist := map[string]bool{}
	for _, f := range files(t, "_test.go") {
		for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`).FindAllStringSubmatch(read(t, f), -1) {
			exist[m[1]] = true
		}
	}
	for _, n := range named {
		if !exist[n[1]] {
			t.Errorf("SECURITY.md names %s, which is no test", n[1])
		}
	}
}

// TestLinks checks that the relative links of all documents lead to files and headings that exist.
func TestLinks(t *testing.T) {
	fence := regexp.MustCompile("(?ms)^```.*?^```$")
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	anchors := map[string]map[string]bool{}
	pages := files(t, ".md")
	for _, p := range pages {
		anchors[p] = map[string]bool{}
		for _, h := range heading.FindAllStringSubmatch(fence.ReplaceAllString(read(t, p), ""), -1) {
			anchors[p][Anchor(h[1])] = true
		}
	}
	n := 0
	for _, p := range pages {
		for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(read(t, p), ""), -1) {
			u, err := url.Parse(m[1])
			if err != nil {
				t.Errorf("%s: link %q: %v", p, m[1], err)
				continue
			}
			if u.IsAbs() {
				continue
			}
			n++
			to := p
			if u.Path != "" {
				to = filepath.Join(filepath.Dir(p), u.Path)
			}
			info, err := os.Stat(filepath.Join(root, to))
			switch {
			case err != nil:
				t.Errorf("%s: link %q: there is no %s", p, m[1], to)
				continue
			case info.IsDir():
				to = filepath.Join(to, "README.md")
			}
			if u.Fragment != "" && !anchors[to][u.Fragment] {
				t.Errorf("%s: link %q: %s has no heading #%s", p, m[1], to, u.Fragment)
			}
		}
	}
	t.Logf("%d links in %d documents", n, len(pages))
}

// TestRequirements checks that every requirement that the project cites is defined in requirements.md.
func TestRequirements(t *testing.T) {
	defined := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\| ([A-Z]+-\d+) \|`).FindAllStringSubmatch(read(t, "docs/requirements.md"),
		-1) {
		defined[m[1]] = true
	}
	cited := regexp.MustCompile(`\b(?:PF|RA|ODP|EP|MT|HF|TR|CO)-\d+\b`)
	for _, p := range files(t, ".go", ".c", ".h", ".md") {
		for _, number := range cited.FindAllString(read(t, p), -1) {
			if !defined[number] {
				t.Errorf("%s cites %s, which docs/requirements.md does not define", p, number)
			}
		}
	}
}

// maxLine bounds the lines of sources and documents, in characters.
const maxLine = 120

// TestLineLength checks that lines are at most maxLine long: in Go and C except where a string literal is long (C has
// tabs of 8), in documents except tables and blocks.
func TestLineLength(t *testing.T) {
	fence := regexp.MustCompile("(?ms)^```.*?^```$")
	report := func(path string, line int, text string) {
		if n := utf8.RuneCountInString(text); n > maxLine {
			t.Errorf("%s:%d: %d characters, want at most %d", path, line, n, maxLine)
		}
	}
	for _, p := range files(t, ".go", ".c", ".h") {
		text := read(t, p)
		if filepath.Ext(p) != ".go" {
			text = strings.ReplaceAll(text, "\t", strings.Repeat(" ", 8))
		}
		long := longStrings(t, p, text)
		for i, line := range strings.Split(text, "\n") {
			if !long[i+1] {
				report(p, i+1, line)
			}
		}
	}
	for _, p := range files(t, ".md") {
		text := fence.ReplaceAllStringFunc(read(t, p), func(block string) string {
			return strings.Repeat("\n", strings.Count(block, "\n"))
		})
		for i, line := range strings.Split(text, "\n") {
			if !strings.HasPrefix(line, "|") {
				report(p, i+1, line)
			}
		}
	}
}

// longStrings returns the lines of a Go or C file that hold string literals of 60 characters or more, or parts of them.
func longStrings(t *testing.T, path, text string) map[int]bool {
	t.Helper()
	lines := map[int]bool{}
	set := token.NewFileSet()
	f := set.AddFile(path, -1, len(text))
	var s scanner.Scanner
	s.Init(f, []byte(text), nil, 0)
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return lines
		}
		if tok == token.STRING && len(lit) >= 60 {
			first := set.Position(pos).Line
			for i := range strings.Count(lit, "\n") + 1 {
				lines[first+i] = true
			}
		}
	}
}
