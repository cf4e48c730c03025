package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Bounds of what Load reads.
const (
	maxFileSize  = 4 << 20
	maxTotalSize = 16 << 20 // of all files together
	maxFragments = 4096     // entries of the directory of fragments
)

// source is one file of the configuration.
type source struct {
	path string
	data []byte
}

// FragmentDir is the directory with the fragments of the configuration file at path: /etc/vnicd/vnicd.d for
// /etc/vnicd/vnicd.yaml.
func FragmentDir(path string) string { return strings.TrimSuffix(path, fragmentSuffix) + ".d" }

// fragmentSuffix ends the names of fragments; other files are no part of the configuration.
const fragmentSuffix = ".yaml"

// Load reads and checks the file at path and its fragments, the files NAME.yaml in FragmentDir, in the order of their
// names. Errors are *Errors.
func Load(path string) (*Config, error) {
	var l loader
	l.load(path)
	return parse(path, l.sources, l.errs)
}

// loader reads the files of a configuration.
type loader struct {
	sources []source
	size    int
	errs    Errors
}

// load reads the file at path and its fragments.
func (l *loader) load(path string) {
	if main := l.main(path); main != nil {
		l.fragments(FragmentDir(path), *main)
	}
}

func (l *loader) fail(path, format string, args ...any) {
	l.errs.add(Place{File: path}, format, args...)
}

// unreadable reports why a file or directory cannot be read.
func (l *loader) unreadable(path string, err error) {
	var p *fs.PathError
	if errors.As(err, &p) {
		err = p.Err // the message has the path
	}
	l.fail(path, "cannot be read: %v", err)
}

// main reads the main file, which may be a pipe. It returns who may write to it; nil after a mistake.
func (l *loader) main(path string) *writers {
	f, err := os.Open(path)
	if err != nil {
		l.unreadable(path, err)
		return nil
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		l.unreadable(path, err)
		return nil
	}
	l.read(path, f)
	w := writersOf(st)
	return &w
}

// fragments reads the files in dir, if there is such a directory.
func (l *loader) fragments(dir string, main writers) {
	f := l.open(dir, main, fs.FileMode.IsDir, "a directory")
	if f == nil {
		return
	}
	names, err := f.Readdirnames(maxFragments + 1)
	f.Close()
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		l.unreadable(dir, err)
		return
	case len(names) > maxFragments:
		l.fail(dir, "has more than %d entries", maxFragments)
		return
	}
	slices.Sort(names)
	for _, name := range names {
		path := filepath.Join(dir, name)
		switch {
		case strings.HasPrefix(name, "."):
		case strings.HasSuffix(name, fragmentSuffix):
			if f := l.open(path, main, fs.FileMode.IsRegular, "a regular file"); f != nil {
				l.read(path, f)
				f.Close()
			}
		case strings.HasSuffix(name, ".yml"):
			l.fail(path, "is not read: the name must end in %s; rename it, or move it away", fragmentSuffix)
		}
	}
}

// open opens a fragment or the directory of fragments, which is kind. It returns nil after a mistake, and if the
// directory does not exist.
func (l *loader) open(path string, main writers, is func(fs.FileMode) bool, kind string) *os.File {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0) // a FIFO would block
	if err != nil {
		if _, lerr := os.Lstat(path); !errors.Is(lerr, fs.ErrNotExist) { // a file may just have been removed
			l.unreadable(path, err)
		}
		return nil
	}
	st, err := f.Stat()
	switch {
	case err != nil:
		l.unreadable(path, err)
	case !is(st.Mode()):
		l.fail(path, "must be %s, found %v", kind, st.Mode())
	default:
		if err := writersOf(st).within(main); err != nil {
			l.fail(path, "%v", err)
			break
		}
		return f
	}
	f.Close()
	return nil
}

// read adds the contents of a file.
func (l *loader) read(path string, f io.Reader) {
	l.errs.Files = append(l.errs.Files, path)
	data, err := io.ReadAll(io.LimitReader(f, maxFileSize+1))
	l.size += len(data)
	switch {
	case err != nil:
		l.unreadable(path, err)
	case len(data) > maxFileSize:
		l.fail(path, "must have at most %d bytes, found more", maxFileSize)
	case l.size > maxTotalSize:
		l.fail(path, "with this file the configuration has more than %d bytes", maxTotalSize)
	default:
		l.sources = append(l.sources, source{path, data})
	}
}

// readRegular reads a regular file of at most most bytes, which messages call what. allowed returns why its permission
// bits are refused, or nil.
func readRegular(what, path string, most int64, allowed func(fs.FileMode) error) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0) // a FIFO would block
	if err != nil {
		return nil, fmt.Errorf("cannot read %s: %w", what, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("cannot read %s: %w", what, err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s must be a regular file, found %v", path, st.Mode())
	}
	if err := allowed(st.Mode().Perm()); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("cannot read %s: %w", what, err)
	case int64(len(b)) > most:
		return nil, fmt.Errorf("%s must have at most %d bytes, found more", path, most)
	}
	return b, nil
}

// writers are those who may write to a file, besides root: its owner, and by its mode (permission bits for writing)
// its group and others.
type writers struct {
	uid, gid int
	mode     fs.FileMode
}

func writersOf(st fs.FileInfo) writers {
	s := st.Sys().(*syscall.Stat_t)
	return writers{int(s.Uid), int(s.Gid), st.Mode().Perm() & 0o022}
}

// within returns an error if somebody may write who may not write to the main file.
func (w writers) within(main writers) error {
	switch more := w.mode &^ main.mode; {
	case w.uid != 0 && w.uid != main.uid:
		return fmt.Errorf("must belong to root or to the owner of the main file, user %d, found user %d", main.uid, w.uid)
	case more&0o002 != 0:
		return errors.New("everybody may write to it, but not to the main file: chmod o-w it")
	case more != 0 || w.mode&0o020 != 0 && w.gid != main.gid:
		return fmt.Errorf("the group %d may write to it, but not to the main file: chmod g-w it", w.gid)
	}
	return nil
}
