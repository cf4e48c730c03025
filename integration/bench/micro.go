package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// micro runs the Go benchmarks of the hot functions, with allocations. They have neither anchors nor goals: unwanted
// allocations fail unit tests. They are compiled like the daemon, with its PGO profile.
func micro(ctx context.Context, o options, rep *report) error {
	c := exec.CommandContext(ctx, "go", "test", "-pgo", "cmd/vnicd/default.pgo", "-run", "^$", "-bench", ".", "-benchmem",
		"-benchtime", (o.time / 10).String(),
		"./translate/...", "./device/...", "./guestdrv/...")
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	rep.printf("\nGo benchmarks (go test -bench . -benchmem):\n")
	var failed []string
	pkg := ""
	for in := bufio.NewScanner(out); in.Scan(); {
		l := in.Text()
		if p, ok := strings.CutPrefix(l, "pkg: "); ok {
			pkg = p
		} else if b, ok := parseBenchmark(l); ok {
			b.Package = pkg
			rep.printf("%s\n", l)
			rep.json(b)
		} else if strings.HasPrefix(l, "FAIL") || strings.HasPrefix(l, "---") {
			failed = append(failed, l)
		}
	}
	if err := c.Wait(); err != nil {
		return fmt.Errorf("go test -bench: %w: %s", err, strings.Join(failed, "; "))
	}
	return nil
}

// benchmark is one line of `go test -bench`.
type benchmark struct {
	Package string             `json:"package"`
	Name    string             `json:"benchmark"`
	N       int                `json:"n"`
	Metrics map[string]float64 `json:"metrics"` // by unit, such as "ns/op"
}

func parseBenchmark(l string) (b benchmark, ok bool) {
	f := strings.Fields(l)
	if len(f) < 4 || len(f)%2 != 0 || !strings.HasPrefix(f[0], "Benchmark") {
		return b, false
	}
	n, err := strconv.Atoi(f[1])
	if err != nil {
		return b, false
	}
	b = benchmark{Name: strings.TrimPrefix(f[0], "Benchmark"), N: n, Metrics: map[string]float64{}}
	for i := 2; i < len(f); i += 2 {
		v, err := strconv.ParseFloat(f[i], 64)
		if err != nil {
			return b, false
		}
		b.Metrics[f[i+1]] = v
	}
	return b, true
}
