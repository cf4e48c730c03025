package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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
configuration, no hardware and no root. That of "run" ends with its command; that of "up"
stays for any number of commands ("exec", "shell") until "down".`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.labRunCmd(), a.labShellCmd(), a.labUpCmd(), a.labExecCmd(), a.labListCmd(), a.labDownCmd())
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
	var name, vm string
	c := &cobra.Command{
		Use:   "shell [flags]",
		Short: "Run an interactive shell on a VM, in a new lab or in one that is up",
		Args:  args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			if !c.Flags().Changed("name") {
				if vm != "" {
					return usageError{errors.New("--vm is for a lab that is up: want --name, too")}
				}
				return a.lab(c.Context(), &f)
			}
			var of []string // a new lab
			c.Flags().Visit(func(g *pflag.Flag) {
				if c.LocalFlags().Lookup(g.Name) != nil && !slices.Contains([]string{"name", "vm", "env"}, g.Name) {
					of = append(of, "--"+g.Name)
				}
			})
			if len(of) > 0 {
				return usageError{fmt.Errorf("--name is a lab that is up already: it has been made without %s",
					strings.Join(of, ", "))}
			}
			return a.labExec(c.Context(), name, &cluster.Command{VM: vm, Env: variables(f.options.Env)})
		},
	}
	f.add(c)
	addLabName(c, &name, "in the lab of this `name`, which is up, in place of a new one")
	c.Flags().Lookup("name").DefValue = ""
	addLabVM(c, &vm)
	return c
}

// labServe are the arguments of the process that runs a lab in namespaces of its own, which this program starts.
var labServe = []string{"lab", "serve"}

// labFlags are the flags that describe a new lab.
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
	o.Env = variables(f.options.Env)
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

// variables gives those without a value the one of this process.
func variables(list []string) (env []string) {
	for _, v := range list {
		if !strings.Contains(v, "=") {
			v += "=" + os.Getenv(v)
		}
		env = append(env, v)
	}
	return env
}

// lab runs a lab and ends with the status of its command.
func (a *app) lab(ctx context.Context, f *labFlags) error {
	o, err := f.complete()
	if err != nil {
		return usageError{err}
	}
	return labStatus(ctx, func(ctx context.Context) (int, error) {
		s, err := cluster.Prepare(ctx, o, a.err)
		if err != nil {
			return 0, err
		}
		return cluster.Enter(ctx, s, labServe, os.Stdin, a.out, a.err)
	})
}

// labStatus runs f, whose context ends with a signal, and ends with the exit status that it returns.
func labStatus(ctx context.Context, f func(ctx context.Context) (int, error)) error {
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
	status, err := f(ctx)
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
