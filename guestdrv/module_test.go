package guestdrv_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// TestModuleSource: every file that compiling the kernel module needs is embedded, unchanged.
func TestModuleSource(t *testing.T) {
	n := 0
	for _, pattern := range []string{"linux/*.c", "linux/*.h", "linux/Kbuild", "linux/Makefile", "linux/COPYING"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			t.Fatalf("no file %s: %v", pattern, err)
		}
		for _, p := range paths {
			n++
			want, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := guestdrv.ModuleSource.ReadFile(p); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s is not embedded as it is: %v", p, err)
			}
		}
	}
	if n < 25 {
		t.Errorf("%d files, want at least 25", n)
	}
}
