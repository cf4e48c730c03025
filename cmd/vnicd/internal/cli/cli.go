// Package cli is vnicd's command line: one file per sub-command.
package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
	"github.com/vnicd/vnicd/lab/cluster"
)

// DefaultConfig is the default path of the configuration.
const DefaultConfig = "/etc/vnicd/vnicd.yaml"

// Exit statuses.
const (
	exitOK      = 0
	exitFailure = 1 // the command could not do its work
	exitUsage   = 2 // the command line or the configuration is wrong
)

// usageError marks mistakes in the command line or the configuration.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// statusError ends the program with a status of another process, which has said why.
type statusError struct {
	status int
	error
}

func (e statusError) Unwrap() error { return e.error }

type app struct {
	version string
	config  string
	control string // control socket; "": that of the configuration
	json    bool
	out     io.Writer
	err     io.Writer
}

// Main runs the command line and returns the exit status: 0, 1 (failure) or 2 (wrong usage or configuration).
func Main(version string, args []string, stdout, stderr io.Writer) int {
	if status, is := worker.Main(workers, args); is {
		return status
	}
	if slices.Equal(args, labServe) {
		if err := cluster.Serve(os.Stdin, stdout, stderr); err != nil {
			fmt.Fprintf(stderr, "vnicd: lab: %s\n", err)
			return exitFailure
		}
		return exitOK
	}
	a := &app{version: version, out: stdout, err: stderr}
	root := a.rootCmd()
	root.SetArgs(args)
	if err := root.Execute(); err != nil {
		var s statusError
		if errors.As(err, &s) {
			if s.error != nil {
				fmt.Fprintf(stderr, "vnicd: %s\n", s.error)
			}
			return max(s.status, exitFailure)
		}
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
and an RDMA HCA for stock rdma-core programs. It connects the VMs of many tenants
across hosts by RoCEv2 inside VXLAN, without RDMA hardware and without a patched QEMU.

A VM attaches through two vhost-user sockets, NAME.net and NAME.hca. "vnicd qemu-args
NAME" prints the options for its QEMU command line, "vnicd libvirt-xml NAME" the
elements for its libvirt domain; "vnicd attach" plugs both devices into a running VM.

The commands network, vm, fdb and neigh change a running daemon, for root and members of
the group of its control socket (vnicd-admin). They do not change the configuration,
which vnicd.yaml(5) describes, except network and vm with --save.
What only shows something also works for members of the status socket's group
(vnicd-status).

Exit status: 0 success, 1 failure, 2 wrong command line or configuration.`,
		Version:       a.version,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.PersistentFlags().StringVarP(&a.config, "config", "c", DefaultConfig,
		"configuration `file`; its fragments are in its .d")
	root.AddCommand(a.runCmd(), a.reloadCmd(), a.upgradeCmd(), a.checkCmd(), a.schemaCmd(), a.statusCmd(), a.topCmd(),
		a.qemuArgsCmd(), a.vmmArgsCmd(), a.networkCmd(), a.vmCmd(), a.portCmd(), a.fdbCmd(), a.neighCmd(),
		a.connectionCmd(), a.evpnCmd(), a.captureCmd(), a.attachCmd(), a.detachCmd(), a.migrateCmd(), a.libvirtCmd(),
		a.cdiCmd(), a.devicePluginCmd(), a.backendCmd(), a.labCmd())
	addHelp(root, "")
	a.completeFlags(root)
	// Where nothing else is said, names of files are not completed.
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath())}
	})
	return root
}

// args wraps cobra's checks so that their errors are usage errors.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, a []string) error {
		if err := check(c, a); err != nil {
			return usageError{fmt.Errorf("%w; usage: %s", err, c.UseLine())}
		}
		return nil
	}
}
