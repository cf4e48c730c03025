package main

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// group is a part of the navigation.
type group struct {
	name      string
	documents []string
}

// groups are the parts of the navigation, in order. Another part has the READMEs of folders. A document that does not
// exist is left out.
var groups = []group{
	{"Start here", []string{"README.md", "docs/tutorial.md", "docs/lab.md"}},
	{"Use", []string{"docs/attach.md", "docs/configuration.md", "docs/limits.md", "docs/troubleshooting.md",
		"cmd/vnicd/OPERATING.md", "SECURITY.md"}},
	{"Understand", []string{"ARCHITECTURE.md", "docs/requirements.md", "docs/benchmarks.md"}},
	{"Contribute", []string{"CONTRIBUTING.md", "CHANGELOG.md"}},
}

// navigation returns all groups, with each page once, or the pages for which that is not so.
func navigation(pages map[string]*page) ([]group, error) {
	var all []group
	listed := map[string]bool{}
	var errs []error
	for _, g := range groups {
		exist := group{name: g.name}
		for _, d := range g.documents {
			if listed[d] {
				errs = append(errs, fmt.Errorf("%s is in the navigation twice", d))
			}
			listed[d] = true
			if pages[d] != nil {
				exist.documents = append(exist.documents, d)
			}
		}
		all = append(all, exist)
	}
	folders := group{name: "The code, by folder"}
	for _, d := range slices.Sorted(maps.Keys(pages)) {
		switch {
		case listed[d]:
		case path.Base(d) == readme:
			folders.documents = append(folders.documents, d)
		default:
			errs = append(errs, fmt.Errorf("%s is not in the navigation: name it in docs/site/navigation.go", d))
		}
	}
	return append(all, folders), errors.Join(errs...)
}

// label returns the name of a document in the navigation: a folder's path, or else its title.
func (p *page) label() string {
	if dir, is := strings.CutSuffix(p.source, "/"+readme); is {
		return dir
	}
	return p.title
}
