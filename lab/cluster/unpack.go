package cluster

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// cacheDir is the directory of vm-images' results (vm-images/lib/common.sh).
func cacheDir() (string, error) {
	if d := os.Getenv("VNICD_CACHE"); d != "" {
		if !filepath.IsAbs(d) {
			return "", fmt.Errorf("VNICD_CACHE=%q: want an absolute path", d)
		}
		return d, nil
	}
	d, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no directory for images: set VNICD_CACHE, or HOME: %w", err)
	}
	return filepath.Join(d, "vnicd"), nil
}

// fingerprint returns 12 hexadecimal digits over the paths and contents of all files, and over more.
func fingerprint(files fs.FS, more ...string) (string, error) {
	sum := sha256.New()
	for _, m := range more {
		fmt.Fprintf(sum, "%s\x00", m)
	}
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := fs.ReadFile(files, path)
		fmt.Fprintf(sum, "%s\x00%d\x00", path, len(b))
		sum.Write(b)
		return err
	})
	return hex.EncodeToString(sum.Sum(nil)[:6]), err
}

// provide returns the directory name, which fill makes if it does not exist. fill works in a directory that gets its
// name when it is complete, so that a directory with its final name is never half made. Several programs may provide
// the same.
func provide(name string, fill func(dir string) error) (string, error) {
	if _, err := os.Stat(name); err == nil {
		return name, nil
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(name), filepath.Base(name)+".tmp.")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := errors.Join(os.Chmod(tmp, 0o755), fill(tmp)); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, name); err != nil {
		if _, exists := os.Stat(name); exists != nil {
			return "", err
		}
	}
	return name, nil
}

// unpack writes files into dir with mode 0644, those in executables with 0755.
func unpack(files fs.FS, dir string, executables []string) error {
	return fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(dir, filepath.FromSlash(path))
		if d.IsDir() {
			return os.MkdirAll(to, 0o755)
		}
		b, err := fs.ReadFile(files, path)
		if err != nil {
			return err
		}
		mode := os.FileMode(0o644)
		if slices.Contains(executables, path) {
			mode = 0o755
		}
		// The umask must not matter.
		return errors.Join(os.WriteFile(to, b, mode), os.Chmod(to, mode))
	})
}
