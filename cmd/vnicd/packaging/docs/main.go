// Command docs writes the manual pages and shell completions of vnicd's command line into a directory laid out as a
// file system.
package main

import (
	"fmt"
	"os"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/cli"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: docs VERSION DIRECTORY")
		os.Exit(2)
	}
	if err := cli.WriteDocs(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
