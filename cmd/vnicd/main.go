// Command vnicd is the host daemon that gives QEMU VMs a paravirtual RDMA NIC, and the operator's command-line tool.
// See `vnicd --help`.
package main

import (
	"os"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/cli"
)

// version is set by the linker (Makefile).
var version = "v0.1.0-dev"

func main() { os.Exit(cli.Main(version, cli.Args(os.Args), os.Stdout, os.Stderr)) }
