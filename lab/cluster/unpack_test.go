package cluster

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	vmimages "github.com/vnicd/vnicd/vm-images"
)

// TestUnpack: all files are there, and only the programs are executable, whatever the umask.
func TestUnpack(t *testing.T) {
	dir := t.TempDir()
	if err := unpack(vmimages.Recipes, dir, vmimages.Executables); err != nil {
		t.Fatal(err)
	}
	err := fs.WalkDir(vmimages.Recipes, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := os.Stat(filepath.Join(dir, path))
		if err != nil {
			return err
		}
		want := fs.FileMode(0o644)
		if slices.Contains(vmimages.Executables, path) {
			want = 0o755
		}
		if info.Mode() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode(), want)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestFingerprint(t *testing.T) {
	sum := func(files fstest.MapFS, more ...string) string {
		s, err := fingerprint(files, more...)
		if err != nil || len(s) != 12 {
			t.Errorf("%q, %v", s, err)
		}
		return s
	}
	a := fstest.MapFS{"d/x": {Data: []byte("1")}, "y": {Data: []byte("2")}}
	seen := map[string]bool{sum(a): true}
	for _, other := range []string{
		sum(a, "more"),
		sum(fstest.MapFS{"d/x": {Data: []byte("1")}}),
		sum(fstest.MapFS{"d/x": {Data: []byte("1")}, "z": {Data: []byte("2")}}),
		sum(fstest.MapFS{"d/x": {Data: []byte("2")}, "y": {Data: []byte("1")}}),
	} {
		if seen[other] {
			t.Errorf("%s twice", other)
		}
		seen[other] = true
	}
	if again := sum(fstest.MapFS{"y": {Data: []byte("2")}, "d/x": {Data: []byte("1")}}); !seen[again] {
		t.Error("equal files have another fingerprint")
	}
}

// TestProvide: a directory is complete or absent; several may provide it at once; nothing else is left.
func TestProvide(t *testing.T) {
	cache := filepath.Join(t.TempDir(), "cache")
	name := filepath.Join(cache, "x")
	broken := errors.New("broken")
	if _, err := provide(name, func(dir string) error {
		return errors.Join(os.WriteFile(filepath.Join(dir, "half"), nil, 0o644), broken)
	}); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(cache); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			got, err := provide(name, func(dir string) error {
				return os.WriteFile(filepath.Join(dir, "whole"), []byte("text"), 0o644)
			})
			if b, rerr := os.ReadFile(filepath.Join(got, "whole")); got != name || err != nil || string(b) != "text" {
				t.Errorf("%q, %v, %v: %s", got, err, rerr, b)
			}
		})
	}
	wg.Wait()
	if got, err := provide(name, func(string) error { return broken }); got != name || err != nil {
		t.Errorf("a directory that exists: %q, %v", got, err)
	}
	if left, err := os.ReadDir(cache); err != nil || len(left) != 1 {
		t.Errorf("in the cache: %v, %v", left, err)
	}
}

func TestCacheDir(t *testing.T) {
	t.Setenv("VNICD_CACHE", "/c")
	if d, err := cacheDir(); d != "/c" || err != nil {
		t.Errorf("%q, %v", d, err)
	}
	t.Setenv("VNICD_CACHE", "c")
	if _, err := cacheDir(); err == nil || !strings.Contains(err.Error(), "want an absolute path") {
		t.Errorf("a relative path: %v", err)
	}
	t.Setenv("VNICD_CACHE", "")
	t.Setenv("XDG_CACHE_HOME", "/x")
	if d, err := cacheDir(); d != "/x/vnicd" || err != nil {
		t.Errorf("%q, %v", d, err)
	}
}
