package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/lab/cluster"
)

// exitLab is the exit status if the lab failed, so that a command's own status can be told from it. env(1), timeout(1)
// and container tools use the same.
const exitLab = 125

func (a *app) labCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "lab",
		Short: "Run commands on VMs with an HCA, on this machine alone",
		Long: `A lab is a set of "hosts", which are network namespaces joined by an underlay, with a
vnicd on each and QEMU VMs that have the guest module loaded and the HCA up. It needs no
configuration, no hardware and no root, and ends with the command.`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.labRunCmd(), a.labShellCmd())
	return c
}

func (a *app) labRunCmd() *cobra.Command {
	var f labFlags
	c := &cobra.Command{
		Use:               "run [flags] -- CMD [ARG]...",
		Short:             "Run a command on the first VM of a new lab, or on all",
		Args:              args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: files,
		RunE: func(c *cobra.Command, argv []string) error {
			f.options.Argv = argv
			return a.lab(c.Context(), &f)
		},
	}
	c.Flags().SetInterspersed(false)
	c.Flags().BoolVar(&f.options.Each, "each", false, "run CMD on all VMs, each line of output behind the VM's name")
	f.add(c)
	return c
}

func (a *app) labShellCmd() *cobra.Command {
	var f labFlags
	c := &cobra.Command{
		Use:   "shell [flags]",
		Short: "Run an interactive shell on the first VM of a new lab",
		Args:  args(cobra.NoArgs),
		RunE:  func(c *cobra.Command, _ []string) error { return a.lab(c.Context(), &f) },
	}
	f.add(c)
	return c
}

// labServe are the arguments of the process that runs a lab in namespaces of its own, which this program starts.
var labServe = []string{"lab", "serve"}

// labFlags are the flags of `vnicd lab run` and `vnicd lab shell`.
type labFlags struct {
	options              cluster.Options
	packages, loss, logs string
}

func (f *labFlags) add(c *cobra.Command) {
	o := &f.options
	c.Flags().IntVar(&o.Hosts, "hosts", 2, "`number` of hosts")
	c.Flags().IntVar(&o.VMsPerHost, "vms-per-host", 1, "`number` of VMs on each host")
	c.Flags().IntVar(&o.CPUs, "cpus", 1, "`number` of processors of each VM")
	c.Flags().IntVar(&o.MemoryMiB, "memory", 768, "memory of each VM in `MiB`")
	c.Flags().StringVar(&o.Kernel, "kernel", "6.12",
		"`version` of the VMs' kernel: "+strings.Join(cluster.Kernels(), ", "))
	c.Flags().StringVar(&f.packages, "packages", "",
		"Debian `packages` that the VMs have in addition, such as \"openmpi-bin gdb\"")
	c.Flags().StringVar(&f.loss, "loss", "0%", "`part` of the packets that each host's underlay loses, such as 1%")
	c.Flags().DurationVar(&o.Delay, "delay", 0, "delay of the packets that a host sends on the underlay, such as 1ms")
	c.Flags().StringArrayVarP(&o.Env, "env", "e", nil, "`NAME=VALUE` in the command's environment, or NAME with its value here; may be repeated")
	c.Flags().StringVar(&f.logs, "logs", "", "`directory` for logs and captures of a failure (default a new one in /tmp)")
}

// complete returns the options that the flags and the environment give. Its errors are mistakes in the command line.
func (f *labFlags) complete() (cluster.Options, error) {
	o := f.options
	var err, lerr error
	if o.Loss, lerr = cluster.ParseLoss(f.loss); lerr != nil {
		lerr = fmt.Errorf("--loss: %w", lerr)
	}
	o.Packages = strings.FieldsFunc(f.packages, func(r rune) bool { return r == ' ' || r == ',' })
	o.Env = nil
	for _, v := range f.options.Env {
		if !strings.Contains(v, "=") {
			v += "=" + os.Getenv(v)
		}
		o.Env = append(o.Env, v)
	}
	if o.Dir, err = os.Getwd(); err != nil {
		return o, err
	}
	if o.Dir, err = filepath.EvalSymlinks(o.Dir); err != nil {
		return o, err
	}
	if f.logs != "" {
		if o.Logs, err = filepath.Abs(f.logs); err != nil {
			return o, err
		}
	}
	return o, errors.Join(lerr, o.Validate())
}

// lab runs a lab and ends with the status of its command.
func (a *app) lab(ctx context.Context, f *labFlags) error {
	o, err := f.complete()
	if err != nil {
		return usageError{err}
	}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var interrupted syscall.Signal
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case s := <-signals:
			interrupted, _ = s.(syscall.Signal)
			cancel()
		case <-ctx.Done():
		}
	}()
	status, err := 0, error(nil)
	s, err := cluster.Prepare(ctx, o, a.err)
	if err == nil {
		status, err = cluster.Enter(ctx, s, labServe, os.Stdin, a.out, a.err)
	}
	cancel()
	<-done
	switch {
	case interrupted != 0:
		return statusError{128 + int(interrupted), fmt.Errorf("interrupted (%v)", interrupted)}
	case err != nil:
		return statusError{exitLab, err}
	case status != 0:
		return statusError{status, nil}
	}
	return nil
}
