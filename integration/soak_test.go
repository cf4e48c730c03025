package integration

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestSoak runs the hostile campaign for two minutes (TR-1, TR-2, TR-4, TR-6), and shows that a wrong byte, an ended
// and a stopped daemon are noticed.
func TestSoak(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "soak")
	if out, err := exec.Command("go", "build", "-o", binary, "./soak").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	vnicd := filepath.Join("..", "build", "vnicd")
	for _, c := range []struct {
		name  string
		args  []string
		event string // "": none
	}{
		{"corrupt", []string{"-time", "30s", "-only", "underlay", "-sabotage", "corrupt"}, "event: oracle: alice-bob"},
		{"kill", []string{"-time", "30s", "-only", "underlay", "-sabotage", "kill"}, "vnicd has ended"},
		{"stop", []string{"-time", "2m", "-only", "doors", "-sabotage", "stop"}, "event: "},
		{"attack", []string{"-time", "2m"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
			defer cancel()
			args := append([]string{"-vnicd", vnicd, "-dir", filepath.Join(t.TempDir(), "logs")}, c.args...)
			out, err := exec.CommandContext(ctx, binary, args...).CombinedOutput()
			t.Logf("%s", out)
			if (err != nil) != (c.event != "") || !strings.Contains(string(out), c.event) {
				t.Errorf("ended with %v, want %q", err, c.event)
			}
		})
	}
}
