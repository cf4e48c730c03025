package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/confine"
)

// noCapset makes the test binary start a program that cannot change capabilities.
const noCapset = "VNICD_TEST_NO_CAPSET"

func withoutCapset(argv []string) {
	err := confine.Forbid([]confine.Call{{Number: unix.SYS_CAPSET}})
	if err == nil {
		err = syscall.Exec(argv[0], argv, nil)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(99)
}

// build makes vnicd as it is packaged: a program with cgo cannot drop capabilities. With the flags of `make build` the
// compiler's results are the same, too: with others, it would compile everything once more, for the profile's sake.
func build(t *testing.T, dir string) (binary string) {
	t.Helper()
	binary = filepath.Join(dir, "vnicd")
	c := exec.Command("go", "build", "-trimpath", "-o", binary, "../..")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return binary
}

// A daemon that cannot drop CAP_BPF does not start; the error says what to do.
func TestCapabilityStays(t *testing.T) {
	dir := t.TempDir()
	binary := build(t, dir)
	config := filepath.Join(dir, "vnicd.yaml")
	yaml := fmt.Sprintf("run-dir: %s/run\nnetworks: [{name: blue, vni: 100}]\nvms: []\n", dir)
	if err := os.WriteFile(config, []byte(yaml), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, os.Args[0], binary, "-c", config, "run")
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	c.Env = append(os.Environ(), noCapset+"=1")
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != exitFailure {
		t.Errorf("vnicd ended with %v", err)
	}
	for _, want := range []string{"cannot drop CAP_BPF", "operation not permitted", "`short-path: false`"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in: %s", want, out)
		}
	}
	if strings.Contains(string(out), "ready") {
		t.Errorf("it has served clients: %s", out)
	}
}
