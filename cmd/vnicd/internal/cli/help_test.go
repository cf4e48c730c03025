package cli

import (
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Every command has an example that runs it or one of its sub-commands.
func TestExamples(t *testing.T) {
	a := &app{version: "test", out: io.Discard, err: io.Discard}
	left := map[string]bool{}
	for p := range helps {
		left[p] = true
	}
	var visit func(c *cobra.Command, path string)
	visit = func(c *cobra.Command, path string) {
		for _, sub := range c.Commands() {
			if sub.Name() == "help" || sub.Name() == "completion" {
				continue
			}
			p := strings.TrimSpace(path + " " + sub.Name())
			delete(left, p)
			if !strings.Contains(sub.Example, "vnicd "+p) && !strings.Contains(sub.Example, "vnicd "+path) {
				t.Errorf("%s: example %q does not run it", p, sub.Example)
			}
			visit(sub, p)
		}
	}
	visit(a.rootCmd(), "")
	for p := range left {
		t.Errorf("help.go describes %q, which is no command", p)
	}
}
