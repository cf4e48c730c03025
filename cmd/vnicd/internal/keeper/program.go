package keeper

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// program is an executable as it was when it was opened, also if its file is replaced later.
type program struct {
	f     *os.File
	named string
}

func open(path string) (program, error) {
	f, err := os.Open(path)
	if err != nil {
		return program{}, fmt.Errorf("the daemon's program: %w", err)
	}
	return program{f, path}, nil
}

func (p program) close() { _ = p.f.Close() }

// run prepares a run of the program with files as its descriptors from the third on. Behind them it has one more, of
// its own executable: by another number, the file could be hidden by one of files when it is executed.
func (p program) run(ctx context.Context, files []*os.File, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, fmt.Sprintf("/proc/self/fd/%d", firstFile+len(files)), args...)
	c.Args[0] = p.named
	c.ExtraFiles = append(files[:len(files):len(files)], p.f)
	return c
}

const firstFile = 3 // of exec.Cmd's ExtraFiles

// installed returns the path at which this program's file was, and its successor may be.
func installed() (string, error) {
	p, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("the path of this program: %w", err)
	}
	return filepath.Clean(strings.TrimSuffix(p, " (deleted)")), nil
}
