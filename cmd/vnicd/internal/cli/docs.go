package cli

import (
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// WriteDocs writes manual pages and shell completions below dir, at Debian's paths.
func WriteDocs(version, dir string) error {
	a := &app{version: version, out: io.Discard, err: io.Discard}
	root := a.rootCmd()
	root.InitDefaultCompletionCmd()
	root.DisableAutoGenTag = true // no day: the pages have a month only, that of SOURCE_DATE_EPOCH if it is set
	man := filepath.Join(dir, "usr/share/man/man8")
	if err := os.MkdirAll(man, 0o755); err != nil {
		return err
	}
	if err := doc.GenManTree(root, &doc.GenManHeader{Section: "8", Source: "vnicd " + version, Manual: "vnicd"},
		man); err != nil {
		return err
	}
	config := filepath.Join(dir, "usr/share/man/man5/vnicd.yaml.5")
	if err := os.MkdirAll(filepath.Dir(config), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(config, configManual(version), 0o644); err != nil {
		return err
	}
	for _, c := range []struct {
		path string
		gen  func(*cobra.Command, string) error
	}{
		{"usr/share/bash-completion/completions/vnicd", func(c *cobra.Command, f string) error {
			return c.GenBashCompletionFileV2(f, true)
		}},
		{"usr/share/zsh/vendor-completions/_vnicd", (*cobra.Command).GenZshCompletionFile},
		{"usr/share/fish/vendor_completions.d/vnicd.fish",
			func(c *cobra.Command, f string) error { return c.GenFishCompletionFile(f, true) }},
	} {
		path := filepath.Join(dir, c.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := c.gen(root, path); err != nil {
			return err
		}
	}
	return nil
}
