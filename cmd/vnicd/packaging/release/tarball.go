package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// tarball writes an archive of the host's files, at their paths below one folder. Directories that a host has, such as
// /usr, are not in it, so that unpacking does not change them.
func (b *builder) tarball(s *spec, arch, dir string) (err error) {
	name := fmt.Sprintf("vnicd-%s-linux-%s", b.version.pkg(), arch)
	path := filepath.Join(dir, name+".tar.gz")
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	z, err := gzip.NewWriterLevel(file, gzip.BestCompression)
	if err != nil {
		return err
	}
	w := tar.NewWriter(z)
	for _, c := range s.contents {
		if c.Packager == "rpm" || strings.HasPrefix(c.Path, "/usr/share/lintian/") {
			continue // what is for a packager only; where their paths differ, Debian's
		}
		if err := b.archive(w, name, c); err != nil {
			return err
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		return err
	}
	fmt.Println(path)
	return nil
}

// archive writes one file, link or directory, at its path below a folder, with root's ownership and the release's time.
func (b *builder) archive(w *tar.Writer, folder string, c content) (err error) {
	h := &tar.Header{Name: folder + c.Path, ModTime: b.time, Uname: "root", Gname: "root", Format: tar.FormatPAX}
	var data []byte
	switch c.Type {
	case "symlink":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, c.Source, 0o777
	case "dir":
		h.Typeflag, h.Name, h.Mode = tar.TypeDir, h.Name+"/", int64(c.Info.Mode)
	default:
		if data, err = os.ReadFile(c.Source); err != nil {
			return err
		}
		h.Typeflag, h.Size, h.Mode = tar.TypeReg, int64(len(data)), int64(c.Info.Mode)
	}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = w.Write(data)
	return err
}

// archiveFiles has the data of an archive's files by their paths.
type archiveFiles map[string][]byte

// write writes the files, which get a time, as an archive.
func (a archiveFiles) write(path string, when time.Time) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	w := tar.NewWriter(file)
	for _, name := range slices.Sorted(maps.Keys(a)) {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Size: int64(len(a[name])), Mode: 0o644, ModTime: when,
			Format: tar.FormatPAX}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		if _, err := w.Write(a[name]); err != nil {
			return err
		}
	}
	return w.Close()
}
