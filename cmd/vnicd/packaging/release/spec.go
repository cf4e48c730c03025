package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// content is a file, symbolic link or directory of a package, in nFPM's notation.
type content struct {
	Source   string    `yaml:"src,omitempty"`
	Path     string    `yaml:"dst"`
	Type     string    `yaml:"type,omitempty"`
	Packager string    `yaml:"packager,omitempty"`
	Info     *fileInfo `yaml:"file_info,omitempty"`
}

type fileInfo struct {
	Mode os.FileMode `yaml:"mode"`
}

// spec is a package.yaml with every variable and every pattern replaced.
type spec struct {
	name, arch string
	contents   []content
	fields     map[string]any // all of the file, with the contents
}

// readSpec reads a package's description. Its sources are relative to root. Modes do not depend on the umask under
// which the project was checked out.
func readSpec(root, file string, values map[string]string) (*spec, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var unknown error
	expanded := os.Expand(string(text), func(name string) string {
		v, ok := values[name]
		if !ok {
			unknown = fmt.Errorf("%s: ${%s} is unknown", file, name)
		}
		return v
	})
	if unknown != nil {
		return nil, unknown
	}
	s := &spec{}
	var known struct {
		Name     string
		Arch     string
		Contents []content
	}
	if err := errors.Join(yaml.Unmarshal([]byte(expanded), &known),
		yaml.Unmarshal([]byte(expanded), &s.fields)); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	s.name, s.arch = known.Name, known.Arch
	for _, c := range known.Contents {
		all, err := expand(root, c)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		s.contents = append(s.contents, all...)
	}
	slices.SortStableFunc(s.contents, func(a, b content) int { return strings.Compare(a.Path, b.Path) })
	s.fields["contents"] = s.contents
	return s, nil
}

// expand returns one content for each file that the source's pattern matches.
func expand(root string, c content) ([]content, error) {
	switch c.Type {
	case "symlink":
		// nFPM would take the mode of whatever the link points to from the folder in which it runs.
		c.Info = &fileInfo{0o777}
		return []content{c}, nil
	case "dir":
		c.Info = &fileInfo{0o755}
		return []content{c}, nil
	case "", "config|noreplace":
	default:
		return nil, fmt.Errorf("%s: type %q: expected symlink, dir, config|noreplace or none", c.Path, c.Type)
	}
	pattern := c.Source
	if !filepath.IsAbs(pattern) {
		pattern = filepath.Join(root, pattern)
	}
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("%s: no file %s (%v)", c.Path, c.Source, err)
	}
	var all []content
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() {
			return nil, fmt.Errorf("%s: %s is not a regular file", c.Path, f)
		}
		one := c
		one.Source = f
		if strings.HasSuffix(c.Path, "/") {
			one.Path = path.Join(c.Path, filepath.Base(f))
		} else if len(files) > 1 {
			return nil, fmt.Errorf("%s: %d files match %s: expected a path that ends in /", c.Path, len(files), c.Source)
		}
		one.Info = &fileInfo{0o644}
		if info.Mode()&0o100 != 0 {
			one.Info.Mode = 0o755
		}
		all = append(all, one)
	}
	return all, nil
}

// complete returns an error if a file below a folder is in no package: a new manual page, for example.
func (s *spec) complete(dir string) error {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if !slices.ContainsFunc(s.contents, func(c content) bool { return c.Source == path }) {
			return fmt.Errorf("%s was built, but the package %s has no place for it", path, s.name)
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// fileName returns the name that the packages of a distribution have.
func (s *spec) fileName(packager, version string) string {
	switch arch := s.arch; {
	case packager == "deb":
		return fmt.Sprintf("%s_%s_%s.deb", s.name, version, arch)
	case arch == "all":
		return fmt.Sprintf("%s-%s-1.noarch.rpm", s.name, version)
	default:
		return fmt.Sprintf("%s-%s-1.%s.rpm", s.name, version, map[string]string{"amd64": "x86_64"}[arch])
	}
}
