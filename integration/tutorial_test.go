package integration

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// tutorialTime is what the tutorial promises, with building the image, but without reading.
const tutorialTime = 15 * time.Minute

var (
	pythonName     = regexp.MustCompile(`^# (\w+\.py): `)
	measuredFigure = regexp.MustCompile(`[0-9]+\.[0-9]+|[0-9]{3,}|[0-9]+ s$`)
)

// TestTutorial follows docs/tutorial.md as an unprivileged user without images: saves its programs, runs its commands
// in their order on a terminal with job control, at which nobody types, and looks for each line that it says they
// print, in which measured figures may be others.
func TestTutorial(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*testTimeout()) // includes building an image
	defer cancel()
	u := labSomebody(t)
	t.Cleanup(func() { // only a failure leaves it
		p := u.startLine(t, "exec '"+u.vnicd+"' lab down")
		_ = p.Wait(context.Background())
	})
	blocks := fence.FindAllStringSubmatch(string(must[[]byte](t)(os.ReadFile("../docs/tutorial.md"))), -1)
	begin, said, ran, compared := time.Now(), "", 0, 0
	for _, b := range blocks {
		switch kind, text := b[1], b[2]; kind {
		case "python":
			name := pythonName.FindStringSubmatch(text)
			if name == nil {
				t.Fatalf("a program without its name in the first line:\n%s", text)
			}
			u.write(t, name[1], text)
		case "sh":
			ran++
			u.write(t, "block", text)
			status := 0
			said, status = u.status(ctx, t, u.startLine(t, "PATH=$PATH:'"+filepath.Dir(u.vnicd)+`'
[ -p keys ] || mkfifo keys
exec script -qec 'bash -me block' /dev/null <>keys`))
			if status != 0 {
				t.Fatalf("status %d of\n%s", status, text)
			}
		case "text":
			for line := range strings.Lines(text) {
				if line = strings.TrimSpace(line); line == "..." {
					continue
				}
				compared++
				if !printed(said, line) {
					t.Errorf("the line %q is not printed", line)
				}
			}
		default:
			t.Errorf("a block of the kind %q, want sh, text or python:\n%s", kind, text)
		}
	}
	took := time.Since(begin)
	t.Logf("%d blocks of commands, %d lines of output compared, in %v", ran, compared, took.Round(time.Second))
	if ran < 7 || compared < 15 {
		t.Error("too few: the tutorial's blocks are not found")
	}
	if took > tutorialTime {
		t.Errorf("the commands took %v, the tutorial promises %v", took, tutorialTime)
	}
	u.nothingLeft(ctx, t)
}

// printed reports whether a line is in the output, blanks and measured figures aside.
func printed(output, line string) bool {
	shape := func(s string) string {
		return measuredFigure.ReplaceAllString(strings.Join(strings.Fields(s), " "), "0")
	}
	for l := range strings.Lines(output) {
		if shape(l) == shape(line) {
			return true
		}
	}
	return false
}
