package integration

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/lab/harness"
)

// An example's header has its command line, indented, and a part of what it prints if it works. Another file of the
// directory is part of an example that names it.
var (
	exampleLine   = regexp.MustCompile(`(?m)^(?:#| \*|//)(?:     |\t)(\S.*)$`)
	examplePrints = regexp.MustCompile(`(?m)^(?:#| \*|//) prints: (.+)$`)
)

// TestLabExamples: each file of docs/lab/examples, by the command line in its header, in a copy of that directory alone
// and with `vnicd` as the only other thing that is not the distribution's.
func TestLabExamples(t *testing.T) {
	const dir = "../docs/lab/examples"
	entries := must[[]os.DirEntry](t)(os.ReadDir(dir))
	if len(entries) == 0 {
		t.Fatal("no examples")
	}
	bin, work := t.TempDir(), t.TempDir()
	check(t, os.Symlink(must[string](t)(filepath.Abs("../build/vnicd")), filepath.Join(bin, "vnicd")))
	check(t, os.CopyFS(work, os.DirFS(dir)))
	doc := string(must[[]byte](t)(os.ReadFile("../docs/lab.md")))
	texts := map[string]string{}
	for _, e := range entries {
		texts[e.Name()] = string(must[[]byte](t)(os.ReadFile(filepath.Join(dir, e.Name()))))
	}
	for _, e := range entries {
		t.Run(e.Name(), func(t *testing.T) {
			text := texts[e.Name()]
			line, prints := exampleLine.FindAllStringSubmatch(text, -1), examplePrints.FindAllStringSubmatch(text, -1)
			if len(line) == 0 && len(prints) == 0 {
				for name, other := range texts {
					if name != e.Name() && exampleLine.MatchString(other) && strings.Contains(other, e.Name()) {
						return
					}
				}
			}
			if len(line) != 1 || len(prints) != 1 {
				t.Fatalf("the header has %d command lines and %d results, want one of each", len(line), len(prints))
			}
			if !strings.Contains(doc, "(lab/examples/"+e.Name()+")") {
				t.Error("docs/lab.md does not name it")
			}
			ctx, cancel := context.WithTimeout(context.Background(), testTimeout()) // includes building images
			defer cancel()
			log := filepath.Join(t.TempDir(), "log")
			p := must[*harness.Process](t)((&harness.Namespace{}).Start(log, []string{"PATH=" + bin + ":" + os.Getenv("PATH")},
				"sh", "-c", "cd \"$0\" && eval \"$1\"", work, line[0][1]))
			defer p.Kill()
			err := p.Wait(ctx)
			out := string(must[[]byte](t)(os.ReadFile(log)))
			if err != nil || !strings.Contains("\n"+out, "\n"+prints[0][1]+"\n") {
				t.Errorf("%s: %v, want the line %q", line[0][1], err, prints[0][1])
			}
			t.Log(tail(out, 3000))
		})
	}
	// Of the labs that stay nothing does.
	out, err := exec.Command(filepath.Join(bin, "vnicd"), "lab", "list", "-j").Output()
	if err != nil || strings.Contains(string(out), `"example"`) {
		t.Errorf("a lab is left: %v\n%s", err, out)
	}
}
