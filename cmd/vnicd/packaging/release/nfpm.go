package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// nFPM is a tool of a module of its own (../nfpm), so that its dependencies are not vnicd's.

// pack makes a package for a packager, "deb" or "rpm", in a folder.
func (b *builder) pack(s *spec, packager, dir string) error {
	if b.nfpm == "" {
		out, err := b.command(nil, "go", "-C", packaging+"/nfpm", "tool", "-n", "nfpm")
		if err != nil {
			return err
		}
		b.nfpm = strings.TrimSpace(string(out))
	}
	fields := maps.Clone(s.fields)
	if packager == "rpm" {
		fields["contents"] = marked(s.contents)
	}
	text, err := yaml.Marshal(fields)
	if err != nil {
		return err
	}
	file := filepath.Join(b.work, s.name+".yaml")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		return err
	}
	target := filepath.Join(dir, s.fileName(packager, b.version.pkg()))
	if _, err := b.command(nil, b.nfpm, "package", "--config", file, "--packager", packager,
		"--target", target); err != nil {
		return err
	}
	fmt.Println(target)
	return nil
}

// marked returns the files with the marks that rpm has for manuals and licences, by their folders as rpmbuild does.
func marked(contents []content) []content {
	all := slices.Clone(contents)
	for i, c := range all {
		switch {
		case c.Type != "":
		case strings.HasPrefix(c.Path, "/usr/share/doc/"), strings.HasPrefix(c.Path, "/usr/share/man/"):
			all[i].Type = "doc"
		case strings.HasPrefix(c.Path, "/usr/share/licenses/"):
			all[i].Type = "license"
		}
	}
	return all
}

// replaceDeb makes a Debian package in the output folder, in place of an older one: `apt install ./vnicd_*.deb` must
// match one file.
func (b *builder) replaceDeb(s *spec) error {
	old, err := filepath.Glob(filepath.Join(b.out, s.name+"_*.deb"))
	if err != nil {
		return err
	}
	for _, f := range old {
		if err := os.Remove(f); err != nil {
			return err
		}
	}
	return b.pack(s, "deb", b.out)
}
