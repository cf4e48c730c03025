package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Kind is a list whose entries can be saved, each in a fragment of its own: NAME's is KIND-NAME.yaml.
type Kind struct {
	list, word string
	find       func(c *Config, name string) (Place, bool)
}

// The kinds that can be saved.
var (
	KindNetwork = Kind{"networks", "network", func(c *Config, name string) (Place, bool) {
		if n := c.Network(name); n != nil {
			return n.At, true
		}
		return Place{}, false
	}}
	KindVM = Kind{"vms", "vm", func(c *Config, name string) (Place, bool) {
		if v, err := c.VM(name); err == nil {
			return v.At, true
		}
		return Place{}, false
	}}
)

// String returns the kind as command lines have it.
func (k Kind) String() string { return k.word }

// fragment returns the path of the fragment for name, which may be the name of any file if it is not checked.
func (k Kind) fragment(main, name string) (string, error) {
	if len(name) > maxNameLength || !nameRule.MatchString(name) {
		return "", fmt.Errorf("%s name %q must be 1 to %d letters, digits, '_', '.' or '-'", k.word, name, maxNameLength)
	}
	return filepath.Join(FragmentDir(main), k.word+"-"+name+fragmentSuffix), nil
}

// header is the first line of a saved fragment. It distinguishes them from those that people wrote.
func (k Kind) header() string { return fmt.Sprintf("# Written by `vnicd %s add --save`", k.word) }

// Save writes the fragment for a new entry of the configuration whose main file is at main, if the configuration has no
// mistakes with it. keys are the entry's without its name: texts, lists of texts, numbers or truth values. No file is
// replaced. The file is complete once it has its name, and outlives a crash of the host when Save returns. undo removes
// it again.
func Save(main string, kind Kind, name string, keys map[string]any) (path string, undo func() error, err error) {
	if path, err = kind.fragment(main, name); err != nil {
		return "", nil, err
	}
	text, err := kind.format(name, keys)
	if err != nil {
		return "", nil, err
	}
	var l loader
	l.load(main)
	l.read(path, bytes.NewReader(text))
	if _, err := parse(main, l.sources, l.errs); err != nil {
		return "", nil, fmt.Errorf("with %s %q the configuration would have mistakes:\n%w", kind, name, err)
	}
	if err := createFragment(main, path, text); err != nil {
		return "", nil, fmt.Errorf("cannot save in %s: %w", path, advised(err))
	}
	undo = func() error { return errors.Join(os.Remove(path), syncDir(filepath.Dir(path))) }
	if _, err := Load(main); err != nil { // whom the file belongs to, and how many there are
		return "", nil, errors.Join(err, undo())
	}
	return path, undo, nil
}

// format returns the text of a fragment with one entry.
func (k Kind) format(name string, keys map[string]any) ([]byte, error) {
	entry := &yaml.Node{Kind: yaml.MappingNode}
	add := func(key string, value any) error {
		v := &yaml.Node{}
		if err := v.Encode(value); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		if v.Kind == yaml.SequenceNode {
			v.Style = yaml.FlowStyle
		}
		entry.Content = append(entry.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key}, v)
		return nil
	}
	rest := make([]string, 0, len(keys))
	for key := range keys {
		rest = append(rest, key)
	}
	slices.Sort(rest)
	err := add("name", name)
	for _, key := range rest {
		err = errors.Join(err, add(key, keys[key]))
	}
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s; `vnicd %s del %s --save` removes it.\n", k.header(), k.word, name)
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	err = enc.Encode(map[string][]*yaml.Node{k.list: {entry}})
	return b.Bytes(), errors.Join(err, enc.Close())
}

// createFragment makes a file that may be read, and written to, like the main file.
func createFragment(main, path string, text []byte) error {
	st, err := os.Stat(main)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	if err := os.Mkdir(dir, 0o755); err == nil {
		err = os.Chmod(dir, 0o755) // whatever the umask; the daemon's user must find the files
		if err := errors.Join(err, syncDir(filepath.Dir(dir))); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return err
	}
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".") // no fragment, because of the dot
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	w := writersOf(st)
	if _, err = f.Write(text); err == nil {
		_ = f.Chown(w.uid, w.gid) // if it is not permitted, the caller finds out whether that matters
		err = f.Chmod(st.Mode().Perm() &^ 0o133)
	}
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil { // unlike rename(2), it replaces nothing
		return err
	}
	return syncDir(dir)
}

// Removal is a saved fragment that is no longer read, but not removed yet.
type Removal struct {
	// Path of the fragment; "": no file has the thing.
	Path   string
	hidden string
}

// Forget takes away the fragment that Save has written for name. It is an error if another file has the thing, or if
// the configuration has mistakes without it.
func Forget(main string, kind Kind, name string) (*Removal, error) {
	c, err := Load(main)
	if err != nil {
		return nil, err
	}
	at, ok := kind.find(c, name)
	if !ok {
		return &Removal{}, nil
	}
	path, err := kind.fragment(main, name)
	if err != nil {
		return nil, err
	}
	if at.File != path {
		return nil, fmt.Errorf("%s %q is defined in %v, which `vnicd %s add --save` has not written: remove it there, then run `vnicd reload`",
			kind, name, at, kind)
	}
	if err := kind.wrote(path); err != nil {
		return nil, err
	}
	r := &Removal{path, filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".removed")}
	if err := os.Rename(path, r.hidden); err != nil {
		return nil, fmt.Errorf("cannot remove %s: %w", path, advised(err))
	}
	if _, err := Load(main); err != nil {
		err = fmt.Errorf("without %s %q the configuration would have mistakes:\n%w", kind, name, err)
		return nil, errors.Join(err, r.Undo())
	}
	return r, nil
}

// wrote returns an error unless path is as Save has written it: its first line, and one entry.
func (k Kind) wrote(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var file map[string][]map[string]any
	first, _, _ := strings.Cut(string(data), "\n")
	if !strings.HasPrefix(first, k.header()) || yaml.Unmarshal(data, &file) != nil || len(file) != 1 ||
		len(file[k.list]) != 1 {
		return fmt.Errorf("%s has not been written by `vnicd %s add --save`, or has been extended since: remove the %s there, then run `vnicd reload`",
			path, k, k)
	}
	return nil
}

// Commit removes the file.
func (r *Removal) Commit() error {
	if r.Path == "" {
		return nil
	}
	return errors.Join(os.Remove(r.hidden), syncDir(filepath.Dir(r.Path)))
}

// Undo makes it a fragment again.
func (r *Removal) Undo() error {
	if r.Path == "" {
		return nil
	}
	return os.Rename(r.hidden, r.Path)
}

// advised adds to an error what to do about it.
func advised(err error) error {
	var l *os.LinkError
	var p *fs.PathError
	switch {
	case errors.As(err, &l):
		err = l.Err
	case errors.As(err, &p):
		err = p.Err
	}
	switch {
	case errors.Is(err, fs.ErrExist):
		return errors.New("the file exists, and is not replaced: see what it has, or remove it")
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: the daemon does not write its configuration, so the caller needs the right to: run it as root", err)
	}
	return err
}

// syncDir makes changes of a directory's entries outlive a crash of the host.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
