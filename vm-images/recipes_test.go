package vmimages

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestRecipesAreComplete: Recipes has every file of the folder but documents and Go, unchanged, and Executables are
// those that are executable here.
func TestRecipesAreComplete(t *testing.T) {
	here := os.DirFS(".")
	n := 0
	err := fs.WalkDir(here, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || slices.Contains([]string{".md", ".go"}, filepath.Ext(path)) {
			return err
		}
		n++
		want, err := fs.ReadFile(here, path)
		if err != nil {
			return err
		}
		if got, err := Recipes.ReadFile(path); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not embedded as it is: %v", path, err)
		}
		info, err := d.Info()
		if err == nil && (info.Mode()&0o100 != 0) != slices.Contains(Executables, path) {
			t.Errorf("%s has mode %v; Executables is %q", path, info.Mode(), Executables)
		}
		return err
	})
	if err != nil || n < 20 {
		t.Errorf("%d files, %v", n, err)
	}
}
