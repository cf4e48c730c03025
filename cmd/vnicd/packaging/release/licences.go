package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// module is one whose code is in the daemon.
type module struct {
	path, version, sum string
	licence            string   // an SPDX expression
	files              []string // licences and notices
	root               string
}

// licenceName matches the names of files that must go with the code.
var licenceName = regexp.MustCompile(`(?i)^(licen[cs]es?|copying|copyright|notice|patents|unlicense)([.-][^/]*)?$`)

// linked returns the Go modules in the daemon that host has built, ordered by path, Go's own library first. The files
// are those beside the packages that are used, and in the folders above as far as the module's root.
func (b *builder) linked(arch string) ([]module, error) {
	info, err := buildinfo.ReadFile(b.binary(arch))
	if err != nil {
		return nil, err
	}
	out, err := b.command(goEnv(arch), "go", "list", "-deps", "-json=Dir,Module", "./cmd/vnicd")
	if err != nil {
		return nil, err
	}
	dirs, roots := map[string][]string{}, map[string]string{} // by path of the module
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			Dir    string
			Module *struct {
				Path, Dir string
			}
		}
		if err := d.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		if p.Module != nil {
			dirs[p.Module.Path] = append(dirs[p.Module.Path], p.Dir)
			roots[p.Module.Path] = p.Module.Dir
		}
	}
	goroot, err := b.command(nil, "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	library := strings.TrimSpace(string(goroot))
	modules := []module{{path: "std", version: strings.TrimPrefix(info.GoVersion, "go"), root: library}}
	dirs["std"] = []string{library}
	for _, d := range info.Deps {
		code := d
		if d.Replace != nil {
			code = d.Replace
		}
		if len(dirs[d.Path]) == 0 {
			return nil, fmt.Errorf("module %s is in the program, but `go list` has no package of it", d.Path)
		}
		modules = append(modules, module{path: d.Path, version: code.Version, sum: code.Sum, root: roots[d.Path]})
	}
	for i := range modules {
		if err := modules[i].find(dirs[modules[i].path]); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(modules[1:], func(a, b module) int { return strings.Compare(a.path, b.path) })
	return modules, nil
}

// find looks for the module's licences from the folders of its packages upwards.
func (m *module) find(dirs []string) error {
	seen := map[string]bool{}
	for _, dir := range dirs {
		for ; !seen[dir]; dir = filepath.Dir(dir) {
			seen[dir] = true
			entries, err := os.ReadDir(dir)
			if err != nil {
				return err
			}
			for _, e := range entries {
				if e.Type().IsRegular() && licenceName.MatchString(e.Name()) && !strings.HasSuffix(e.Name(), ".go") {
					m.files = append(m.files, filepath.Join(dir, e.Name()))
				}
			}
			if dir == m.root {
				break
			}
		}
	}
	slices.Sort(m.files)
	ids := map[string]bool{}
	for _, f := range m.files {
		text, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		for _, id := range identify(string(text)) {
			ids[id] = true
		}
	}
	if len(ids) == 0 {
		return fmt.Errorf("module %s %s has no licence that is known here: read it, and decide whether the project may "+
			"use it; files: %q", m.path, m.version, m.files)
	}
	var all []string
	for id := range ids {
		all = append(all, id)
	}
	slices.Sort(all)
	m.licence = strings.Join(all, " AND ")
	return nil
}

// identify returns the SPDX identifiers of the licences whose text is in a file. It knows those that the project's
// modules have, all of which allow linking.
func identify(text string) (ids []string) {
	text = strings.ToLower(strings.Join(strings.Fields(text), " "))
	has := func(s string) bool { return strings.Contains(text, s) }
	if has("apache license version 2.0") || has(`licensed under the apache license, version 2.0`) {
		ids = append(ids, "Apache-2.0")
	}
	if has("permission is hereby granted, free of charge, to any person obtaining a copy") {
		ids = append(ids, "MIT")
	}
	if has("redistribution and use in source and binary forms") {
		if has("neither the name") {
			ids = append(ids, "BSD-3-Clause")
		} else {
			ids = append(ids, "BSD-2-Clause")
		}
	}
	if has("permission to use, copy, modify, and/or distribute this software for any purpose") ||
		has("permission to use, copy, modify, and distribute this software for any purpose") {
		ids = append(ids, "ISC")
	}
	return ids
}

// licences returns the text that accompanies the daemon.
func (b *builder) licences(arch string) ([]byte, error) {
	modules, err := b.linked(arch)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	out.WriteString("Licences of the Go modules that are linked into vnicd, and of Go's standard library (std).\n\n")
	for _, m := range modules {
		fmt.Fprintf(&out, "%s %s: %s\n", m.path, m.version, m.licence)
	}
	for _, m := range modules {
		for _, f := range m.files {
			text, err := os.ReadFile(f)
			if err != nil {
				return nil, err
			}
			name, err := filepath.Rel(m.root, f)
			if err != nil {
				return nil, err
			}
			fmt.Fprintf(&out, "\n%s\n%s %s: %s\n\n%s\n", strings.Repeat("=", 80), m.path, m.version, filepath.ToSlash(name),
				strings.TrimSpace(strings.ReplaceAll(string(text), "\r\n", "\n")))
		}
	}
	return out.Bytes(), nil
}
