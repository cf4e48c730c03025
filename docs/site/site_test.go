package main

import (
	"bytes"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/net/html"
)

const base = "https://example.org/project/blob/main/"

// project makes the site of the project.
func project(t *testing.T) map[string][]byte {
	t.Helper()
	t.Chdir("../..")
	files, err := siteOf(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// siteOf makes the site of some files.
func siteOf(root fs.FS) (map[string][]byte, error) {
	repository, err := url.Parse(base)
	if err != nil {
		return nil, err
	}
	return build(root, repository)
}

// elements returns the elements of a page.
func elements(t *testing.T, text []byte) (all []*html.Node) {
	t.Helper()
	tree, err := html.Parse(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	for n := range tree.Descendants() {
		if n.Type == html.ElementNode {
			all = append(all, n)
		}
	}
	return all
}

// attribute returns the value of an element's attribute, or "".
func attribute(n *html.Node, key string) string {
	for _, a := range n.Attr {
		if a.Key == key {
			return a.Val
		}
	}
	return ""
}

// TestLinks checks that each link of the project's site leads to a file and a place that exist, in the site or in the
// project, and that pages load nothing from elsewhere.
func TestLinks(t *testing.T) {
	files := project(t)
	places := map[string]map[string]bool{}
	for name, text := range files {
		places[name] = map[string]bool{}
		if path.Ext(name) != ".html" {
			continue
		}
		for _, n := range elements(t, text) {
			if id := attribute(n, "id"); id != "" && places[name][id] {
				t.Errorf("%s has two places #%s", name, id)
			} else if id != "" {
				places[name][id] = true
			}
		}
	}
	pages, links := 0, 0
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if path.Ext(name) != ".html" {
			continue
		}
		pages++
		for _, n := range elements(t, files[name]) {
			link := attribute(n, "href") + attribute(n, "src")
			switch n.Data {
			case "script", "style", "iframe", "object", "embed":
				t.Errorf("%s has <%s>", name, n.Data)
			case "a", "link", "img":
				links++
				if inside, is := strings.CutPrefix(link, base); is && n.Data == "a" {
					file, _, _ := strings.Cut(inside, "#")
					if _, err := os.Stat(file); err != nil {
						t.Errorf("%s: link to the repository: %v", name, err)
					}
					continue
				}
				u, err := url.Parse(link)
				if err != nil {
					t.Errorf("%s: %v", name, err)
				} else if !u.IsAbs() {
					to := name
					if u.Path != "" {
						to = path.Join(path.Dir(name), u.Path)
					}
					if files[to] == nil {
						t.Errorf("%s: link %q: the site has no %s", name, link, to)
					} else if u.Fragment != "" && !places[to][u.Fragment] {
						t.Errorf("%s: link %q: %s has no #%s", name, link, to, u.Fragment)
					}
				} else if n.Data != "a" || u.Scheme != "https" && u.Scheme != "http" && u.Scheme != "mailto" {
					t.Errorf("%s: <%s> leads to %s", name, n.Data, link)
				}
			}
		}
	}
	if pages < 30 || links < 1000 || files["index.html"] == nil {
		t.Errorf("%d pages and %d links, want at least 30 and 1000 and an index.html", pages, links)
	}
	t.Logf("%d pages, %d links", pages, links)
}

// TestNavigation checks that the navigation of each page has each document once, marks the page and opens its group,
// and that the table of contents has the headings of level 2.
func TestNavigation(t *testing.T) {
	files := project(t)
	var documents []string
	err := fs.WalkDir(os.DirFS("."), ".", func(file string, d fs.DirEntry, err error) error {
		if d.IsDir() && (len(file) > 1 && file[0] == '.' || file == "build") {
			return fs.SkipDir
		}
		if dir, is := strings.CutSuffix(file, "README.md"); is {
			documents = append(documents, dir+"index.html")
		} else if name, is := strings.CutSuffix(file, ".md"); is {
			documents = append(documents, name+".html")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(documents)
	for _, name := range documents {
		var listed, contents, headings []string
		for _, n := range elements(t, files[name]) {
			group := n.Parent
			for group != nil && group.Data != "details" {
				group = group.Parent
			}
			switch {
			case n.Data == "h2":
				headings = append(headings, "#"+attribute(n, "id"))
			case n.Data != "a" || group == nil:
			case attribute(group.Parent, "class") == "contents":
				contents = append(contents, attribute(n, "href"))
			default:
				to := path.Join(path.Dir(name), attribute(n, "href"))
				listed = append(listed, to)
				if marked := attribute(n, "aria-current") == "page"; marked != (to == name) {
					t.Errorf("%s: the mark of the page itself at %s: %v", name, to, marked)
				}
				open := slices.ContainsFunc(group.Attr, func(a html.Attribute) bool { return a.Key == "open" })
				if to == name && !open {
					t.Errorf("%s: its group is closed", name)
				}
			}
		}
		slices.Sort(listed)
		if !slices.Equal(listed, documents) {
			t.Errorf("%s: navigation has\n%q, want\n%q", name, listed, documents)
		}
		if !slices.Equal(contents, headings) {
			t.Errorf("%s: contents %q, want %q", name, contents, headings)
		}
	}
	for _, g := range groups {
		for _, d := range g.documents {
			if _, err := os.Stat(d); err != nil {
				t.Errorf("the list of the navigation names %s: %v", d, err)
			}
		}
	}
}

// TestSame checks that the same documents make the same site.
func TestSame(t *testing.T) {
	first := project(t)
	second, err := siteOf(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	if !maps.EqualFunc(first, second, bytes.Equal) {
		t.Error("two runs differ")
	}
}

// tree returns files by paths and contents.
func tree(files ...string) fstest.MapFS {
	all := fstest.MapFS{}
	for f := range slices.Chunk(files, 2) {
		all[f[0]] = &fstest.MapFile{Data: []byte(f[1])}
	}
	return all
}

// TestPage checks what becomes of links, headings and HTML.
func TestPage(t *testing.T) {
	files, err := siteOf(tree(
		"README.md", "# A\n[1](docs/attach.md#b-c_d-e-1) [2](cmd) [3](cmd/main.go#L3) [4](docs) [5](#a) [6](./)\n"+
			"[7](javascript:alert(1)) <https://example.com/> [8](//example.com/y)",
		"docs/attach.md", "# T\n## B, `c_d`: *e*\n## B c_d e\n[1](../README.md) ![2](./i.svg) [3](x/y.yml) [4](../cmd#c)\n"+
			"<!-- c -->\n\n[5](../cmd/README.md) ![6](../j.png)\n\n|a|\n|-|\n|b|\n",
		"docs/i.svg", "i", "docs/x/y.yml", "y", "docs/other.yml", "z", "j.png", "j",
		"cmd/README.md", "# C", "cmd/main.go", "", ".github/x.md", "<b>", "build/x.md", "<b>"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"cmd/index.html", "docs/attach.html", "docs/i.svg", "docs/x/y.yml", "index.html", "j.png",
		"style.css"}
	if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	for name, parts := range map[string][]string{
		"index.html": {`<a href="docs/attach.html#b-c_d-e-1">1`, `<a href="cmd/index.html">2`,
			`<a href="` + base + `cmd/main.go#L3">3`, `<a href="` + base + `docs">4`, `<a href="#a">5`,
			`<a href="index.html">6`, `<a href="">7`, `<a href="https://example.com/">`,
			`<a href="//example.com/y">8`, `<title>A</title>`},
		"docs/attach.html": {`<h2 id="b-c_d-e">`, `<h2 id="b-c_d-e-1">`, `<a href="#b-c_d-e">B, c_d: e</a>`,
			`<a href="../index.html">1`, `<img src="i.svg"`, `<a href="x/y.yml">3`, `<a href="../cmd/index.html#c">4`,
			`<a href="../cmd/index.html">5`, `<img src="../j.png"`, `<td>b</td>`, `href="../style.css"`},
	} {
		for _, p := range parts {
			if !strings.Contains(string(files[name]), p) {
				t.Errorf("%s has no %s:\n%s", name, p, files[name])
			}
		}
	}
}

// TestMistakes checks that errors name the file and the mistake.
func TestMistakes(t *testing.T) {
	for want, root := range map[string]fstest.MapFS{
		`README.md: "x.md": there is no x.md`:                      tree("README.md", "[a](x.md)"),
		`README.md: "../x": there is no ../x`:                      tree("README.md", "[a](../x)"),
		`README.md: "#x": README.md has no heading #x`:             tree("README.md", "[a](#x)"),
		`a/README.md: "..#x": README.md has no heading #x`:         tree("README.md", "", "a/README.md", "[a](..#x)"),
		`README.md: "x.svg": there is no x.svg`:                    tree("README.md", "![a](x.svg)"),
		`README.md: "https://example.org/x.png": want an image of`: tree("README.md", "![a](https://example.org/x.png)"),
		`README.md: "//example.org/x.png": want an image of`:       tree("README.md", "![a](//example.org/x.png)"),
		`README.md: "<b>": raw HTML, want Markdown`:                tree("README.md", "a <b> c"),
		`README.md: "<div>\n": raw HTML, want Markdown`:            tree("README.md", "<div>\n"),
		`docs/x.md is not in the navigation`:                       tree("docs/x.md", ""),
		"README.md: \"y\": there is no y\nSECURITY.md: \"z\": th":  tree("SECURITY.md", "[a](z)", "README.md", "[a](y)"),
	} {
		if files, err := siteOf(root); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("error %v, want %s; files %q", err, want, slices.Sorted(maps.Keys(files)))
		}
	}
	defer func(before []group) { groups = before }(groups)
	groups = append(slices.Clone(groups), group{"Again", []string{"README.md"}})
	if _, err := siteOf(tree("README.md", "")); err == nil || err.Error() != "README.md is in the navigation twice" {
		t.Errorf("error %v for a document that is in the navigation twice", err)
	}
}

// TestRun checks that the files are written.
func TestRun(t *testing.T) {
	want := project(t)
	out := t.TempDir()
	if err := run(out, base, nil); err != nil {
		t.Fatal(err)
	}
	for name, text := range want {
		if got, err := os.ReadFile(path.Join(out, name)); err != nil || !bytes.Equal(got, text) {
			t.Errorf("%s: %v, or another content", name, err)
		}
	}
	if run(out, ":", nil) == nil || run(out, base, []string{"x"}) == nil {
		t.Error("a wrong address or argument is accepted")
	}
}
