// Package bothways runs a package's tests with frames, and once more with the local path.
package bothways

import (
	"flag"
	"fmt"
	"testing"
)

// Tests is a testing.M for goleak.VerifyTestMain, whose tests run twice: with Local as it is, then true. Benchmarks and fuzzing
// run once.
type Tests struct {
	M     *testing.M
	Local *bool // whether the tests' devices may copy instead of sending frames
}

// Run runs the tests and returns the exit status of the worse run.
func (t Tests) Run() int {
	code := t.M.Run()
	for _, f := range []string{"test.bench", "test.fuzz"} {
		if flag.Lookup(f).Value.String() != "" {
			return code
		}
	}
	fmt.Println("once more, with the local path")
	*t.Local = true
	return max(code, t.M.Run())
}
