// Command site makes the project's documents a site of static pages. Run it in the project's root:
//
//	site [-out build/site] [-repository https://github.com/vnicd/vnicd/blob/main/]
//
// Each Markdown file becomes a page of the same relative path, each README.md the index.html of its folder. Links
// between documents lead to pages, links to other files into the repository. A link that leads nowhere is an error.
package main

import (
	"flag"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
)

func main() {
	out := flag.String("out", "build/site", "folder for the site")
	repository := flag.String("repository", "https://github.com/vnicd/vnicd/blob/main/",
		"where readers find the files that are not part of the site")
	flag.Parse()
	if err := run(*out, *repository, flag.Args()); err != nil {
		fmt.Fprintf(os.Stderr, "site: %v\n", err)
		os.Exit(1)
	}
}

// run makes the site of the documents in the working directory.
func run(out, repository string, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("argument %q: want flags only", args[0])
	}
	base, err := url.Parse(repository)
	if err != nil {
		return fmt.Errorf("-repository: %w", err)
	}
	files, err := build(os.DirFS("."), base)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(out, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, files[name], 0o644); err != nil {
			return err
		}
	}
	return nil
}
