package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// format returns a manual page as readers see it, in ASCII and with long lines. Warnings are errors.
func format(t *testing.T, path string) string {
	t.Helper()
	c := exec.Command("groff", "-man", "-ww", "-Tascii", "-P-cbou", "-rLL=9999n", path)
	var warnings strings.Builder
	c.Stderr = &warnings
	out, err := c.Output()
	if err != nil || warnings.Len() > 0 {
		t.Errorf("%s: %v\n%s", path, err, warnings.String())
	}
	return string(out)
}

// The manual page of the configuration has every key with its description, and what such pages have. Groff accepts all
// pages without warnings.
func TestManualPages(t *testing.T) {
	nstest.Require(t, "groff", "groff-base")
	dir := t.TempDir()
	if err := WriteDocs("v1.2.3-4-gabcdef", dir); err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(dir, "usr/share/man/man8/*.8"))
	if err != nil || len(pages) < 20 {
		t.Fatalf("%d pages: %v", len(pages), err)
	}
	for _, p := range pages {
		format(t, p)
	}

	path := filepath.Join(dir, "usr/share/man/man5/vnicd.yaml.5")
	page := format(t, path)
	words := func(s string) string {
		return " " + strings.Join(strings.Fields(strings.ReplaceAll(s, "`", "")), " ") + " "
	}
	text := words(page)
	for _, s := range config.Sections {
		if !strings.Contains(page, "\n   "+s.Title+"\n") {
			t.Errorf("no section %q", s.Title)
		}
		for _, k := range s.Keys {
			if !strings.Contains(text, words(k.Key+" "+k.Plain())) {
				t.Errorf("%s is missing, or described in other words", k.Key)
			}
		}
	}
	for _, want := range []string{
		"VNICD.YAML(5)", "vnicd v1.2.3-4-gabcdef", "\nNAME\n       vnicd.yaml - configuration of vnicd\n", "\nSYNOPSIS\n",
		"\nDESCRIPTION\n", "\nKEYS\n", "\nEXAMPLE\n", "\nFILES\n", "\nSEE ALSO\n       vnicd(8), ",
		"       " + DefaultConfig + "\n", "       " + config.FragmentDir(DefaultConfig) + "/*.yaml\n",
		"       " + config.DefaultRunDir + "\n", strings.ReplaceAll("\n"+configExample, "\n", "\n       ")[:200],
	} {
		if !strings.Contains(page, want) {
			t.Errorf("%q is missing in\n%s", want, page)
		}
	}
	for _, p := range regexp.MustCompile(`([-\w]+)\(8\)`).FindAllStringSubmatch(page, -1) {
		if _, err := os.Stat(filepath.Join(dir, "usr/share/man/man8", p[1]+".8")); err != nil {
			t.Errorf("a reference to a page that does not exist: %v", err)
		}
	}
	if c, err := config.Parse("example", []byte(configExample)); err != nil || len(c.VMs) != 2 {
		t.Errorf("the example: %v", err)
	}
}
