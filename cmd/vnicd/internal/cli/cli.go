// Package cli is vnicd's command line: one file per sub-command.
package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// DefaultConfig is where the configuration is looked for.
const DefaultConfig = "/etc/vnicd/vnicd.yaml"

// Exit statuses.
const (
	exitOK      = 0
	exitFailure = 1 // the command could not do its work
	exitUsage   = 2 // the command line or the configuration is wrong
)

// usageError marks mistakes of the command line or the configuration.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

type app struct {
	version string
	config  string
	control string // socket; "" = the configuration's
	json    bool
	out     io.Writer
	err     io.Writer
}

// Main runs the command line and returns the exit status: 0, 1 (failure) or
// 2 (wrong usage or configuration).
func Main(version string, args []string, stdout, stderr io.Writer) int {
	a := &app{version: version, out: stdout, err: stderr}
	root := a.rootCmd()
	root.SetArgs(args)
	if err := root.Execute(); err != nil {
		fmt.Fprintf(stderr, "vnicd: %s\n", err)
		var u usageError
		if errors.As(err, &u) || strings.HasPrefix(err.Error(), "unknown command") {
			return exitUsage
		}
		return exitFailure
	}
	return exitOK
}

func (a *app) rootCmd() *cobra.Command {
	root := &cobra.Command{
		Use:   "vnicd",
		Short: "A paravirtual RDMA NIC for QEMU VMs",
		Long: `vnicd gives QEMU VMs a virtual NIC with two faces: an Ethernet NIC (virtio-net)
and an RDMA HCA that stock rdma-core programs use. VMs of many tenants are joined
across hosts by RoCEv2 inside VXLAN. No RDMA hardware, no patched QEMU.

A VM is attached by two vhost-user sockets, NAME.net and NAME.hca; what to add to
its QEMU command line is printed by "vnicd qemu-args NAME", or to its libvirt domain by
"vnicd libvirt-xml NAME"; "vnicd attach" plugs both into a VM that runs.

A running daemon is changed by the commands network, vm, fdb and neigh; whoever may
open its control socket may do so. Changes are not written to the configuration.`,
		Version:       a.version,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.PersistentFlags().StringVarP(&a.config, "config", "c", DefaultConfig, "configuration `file`")
	root.AddCommand(a.runCmd(), a.reloadCmd(), a.checkCmd(), a.statusCmd(), a.topCmd(), a.qemuArgsCmd(),
		a.networkCmd(), a.vmCmd(), a.portCmd(), a.fdbCmd(), a.neighCmd(), a.connectionCmd(), a.evpnCmd(), a.captureCmd(),
		a.attachCmd(), a.detachCmd(), a.libvirtCmd(), a.backendCmd())
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath())}
	})
	return root
}

// args wraps cobra's checks so that their errors count as wrong usage.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, a []string) error {
		if err := check(c, a); err != nil {
			return usageError{fmt.Errorf("%w; usage: %s", err, c.UseLine())}
		}
		return nil
	}
}
