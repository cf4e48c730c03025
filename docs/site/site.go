package main

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"maps"
	"net/url"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/text"

	"github.com/vnicd/vnicd/docs"
)

const (
	readme     = "README.md"
	stylesheet = "style.css"
)

var (
	//go:embed style.css
	style []byte

	//go:embed page.html
	layoutText string
	layout     = template.Must(template.New("page").Parse(layoutText))

	// markdown leaves out raw HTML, which is an error (see comment), and links such as javascript:.
	markdown = goldmark.New(goldmark.WithExtensions(extension.GFM))
)

// site is a site in the making.
type site struct {
	root       fs.FS             // the project
	repository *url.URL          // where readers find the other files of the project
	pages      map[string]*page  // by source
	groups     []group           // the navigation
	files      map[string][]byte // the result, by path
}

// page is a document.
type page struct {
	source   string // path in the project
	name     string // path in the site
	text     []byte
	tree     ast.Node
	title    string
	sections []section // headings of level 2
	anchors  map[string]bool
}

// section is an entry of a page's table of contents.
type section struct{ Title, Anchor string }

// build returns the files of the site by their paths. The error names every mistake of every document.
func build(root fs.FS, repository *url.URL) (map[string][]byte, error) {
	s := &site{root: root, repository: repository, pages: map[string]*page{},
		files: map[string][]byte{stylesheet: style}}
	if err := s.read(); err != nil {
		return nil, err
	}
	var err error
	if s.groups, err = navigation(s.pages); err != nil {
		return nil, err
	}
	var errs []error
	for _, source := range slices.Sorted(maps.Keys(s.pages)) {
		p := s.pages[source]
		if err := s.follow(p); err != nil {
			errs = append(errs, err)
		} else if s.files[p.name], err = s.render(p); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", source, err))
		}
	}
	return s.files, errors.Join(errs...)
}

// read parses the project's documents. Those in hidden folders are for the hosting platform.
func (s *site) read() error {
	return fs.WalkDir(s.root, ".", func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (file != "." && file[0] == '.' || d.Name() == "build" || d.Name() == "testdata"):
			return fs.SkipDir
		case d.IsDir() || path.Ext(file) != ".md":
			return nil
		}
		content, err := fs.ReadFile(s.root, file)
		if err != nil {
			return err
		}
		s.pages[file] = parse(file, content)
		return nil
	})
}

// parse gives the headings of a document their anchors, the second and further ones of equal names with a number.
func parse(source string, content []byte) *page {
	p := &page{source: source, name: strings.TrimSuffix(source, ".md") + ".html", text: content, title: source,
		tree: markdown.Parser().Parse(text.NewReader(content)), anchors: map[string]bool{}}
	if path.Base(source) == readme {
		p.name = path.Join(path.Dir(source), "index.html")
	}
	for n := p.tree.FirstChild(); n != nil; n = n.NextSibling() {
		h, ok := n.(*ast.Heading)
		if !ok {
			continue
		}
		title := plain(h, content)
		anchor := docs.Anchor(title)
		for i, name := 1, anchor; p.anchors[anchor]; i++ {
			anchor = fmt.Sprintf("%s-%d", name, i)
		}
		p.anchors[anchor] = true
		h.SetAttributeString("id", []byte(anchor))
		switch h.Level {
		case 1:
			p.title = title
		case 2:
			p.sections = append(p.sections, section{title, anchor})
		}
	}
	return p
}

// plain returns a node's text without markup.
func plain(n ast.Node, source []byte) string {
	var out strings.Builder
	for c := n.FirstChild(); c != nil; c = c.NextSibling() {
		if t, ok := c.(*ast.Text); ok {
			out.Write(t.Value(source))
		} else {
			out.WriteString(plain(c, source))
		}
	}
	return out.String()
}

// follow makes the links of a page those of the site, and adds the files that it shows.
func (s *site) follow(p *page) error {
	var errs []error
	_ = ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		var what []byte
		var err error
		switch n := n.(type) {
		case *ast.Link:
			what = n.Destination
			n.Destination, err = s.target(p, string(what), false)
		case *ast.Image:
			what = n.Destination
			n.Destination, err = s.target(p, string(what), true)
		case *ast.RawHTML:
			what = n.Segments.Value(p.text)
			err = comment(what)
		case *ast.HTMLBlock:
			what = n.Lines().Value(p.text)
			err = comment(what)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %q: %w", p.source, what, err))
		}
		return ast.WalkContinue, nil
	})
	return errors.Join(errs...)
}

// comment returns an error unless the text is a comment: other HTML would be missing on the page.
func comment(html []byte) error {
	if bytes.HasPrefix(html, []byte("<!--")) {
		return nil
	}
	return errors.New("raw HTML, want Markdown")
}

// target returns the site's link for a link in a document.
func (s *site) target(p *page, link string, image bool) ([]byte, error) {
	u, err := url.Parse(link)
	switch {
	case err != nil:
		return nil, err
	case (u.IsAbs() || u.Host != "") && image:
		return nil, errors.New("want an image of the project: pages load nothing from elsewhere")
	case u.IsAbs() || u.Host != "":
		return []byte(link), nil
	}
	file := p.source
	if u.Path != "" {
		file = path.Join(path.Dir(p.source), u.Path)
	}
	info, err := fs.Stat(s.root, file)
	if err != nil {
		return nil, fmt.Errorf("there is no %s", file)
	}
	if to := cmp.Or(s.pages[file], s.pages[path.Join(file, readme)]); to != nil {
		if u.Fragment != "" && !to.anchors[u.Fragment] {
			return nil, fmt.Errorf("%s has no heading #%s", to.source, u.Fragment)
		}
		return []byte(p.link(to.name, u.Fragment)), nil
	}
	if !info.IsDir() && (image || strings.HasPrefix(file, "docs/")) {
		s.files[file], err = fs.ReadFile(s.root, file)
		return []byte(p.link(file, u.Fragment)), err
	}
	out := s.repository.JoinPath(file)
	out.Fragment = u.Fragment
	return []byte(out.String()), nil
}

// link returns a link from the page to a file of the site.
func (p *page) link(to, fragment string) string {
	if to == p.name && fragment != "" {
		to = ""
	} else if rel, err := filepath.Rel(path.Dir(p.name), to); err == nil { // both are relative
		to = filepath.ToSlash(rel)
	}
	return (&url.URL{Path: to, Fragment: fragment}).String()
}

// entry is an entry of the navigation of a page.
type entry struct {
	Label, Link string
	Current     bool
}

// part is a group of the navigation of a page.
type part struct {
	Name    string
	Entries []entry
	Open    bool // has the page itself
}

// render returns the HTML of a page.
func (s *site) render(p *page) ([]byte, error) {
	var body, out bytes.Buffer
	if err := markdown.Renderer().Render(&body, p.text, p.tree); err != nil {
		return nil, err
	}
	var parts []part
	for _, g := range s.groups {
		this := part{Name: g.name, Open: slices.Contains(g.documents, p.source)}
		for _, d := range g.documents {
			to := s.pages[d]
			this.Entries = append(this.Entries, entry{to.label(), p.link(to.name, ""), to == p})
		}
		parts = append(parts, this)
	}
	err := layout.Execute(&out, map[string]any{
		"Title":    p.title,
		"Style":    p.link(stylesheet, ""),
		"Parts":    parts,
		"Sections": p.sections,
		"Body":     template.HTML(body.String()), // from Markdown without raw HTML
		"Source":   s.repository.JoinPath(p.source).String(),
	})
	return out.Bytes(), err
}
