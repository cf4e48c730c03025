package cli

import (
	"context"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/lab/cluster"
)

func (a *app) labUpCmd() *cobra.Command {
	var f labFlags
	var name string
	c := &cobra.Command{
		Use:   "up [flags]",
		Short: "Make a lab that stays until \"vnicd lab down\"",
		Args:  args(cobra.NoArgs),
		RunE:  func(c *cobra.Command, _ []string) error { return a.labUp(c.Context(), name, &f) },
	}
	addLabName(c, &name, "`name` of the new lab")
	f.add(c)
	return c
}

// labUp makes a lab. The name is claimed first, so that a mistake in it shows before images are built.
func (a *app) labUp(ctx context.Context, name string, f *labFlags) error {
	if err := cluster.ValidName(name); err != nil {
		return usageError{fmt.Errorf("--name: %w", err)}
	}
	o, err := f.complete()
	if err != nil {
		return usageError{err}
	}
	return labStatus(ctx, func(ctx context.Context) (int, error) {
		p, err := cluster.Claim(name)
		if err != nil {
			return 0, err
		}
		s, err := cluster.Prepare(ctx, o, a.err)
		if err != nil {
			_ = p.Remove()
			return 0, err
		}
		if err := cluster.Up(ctx, s, p, labServe, a.err); err != nil {
			return 0, err
		}
		more := ""
		if name != cluster.DefaultName {
			more = " " + name
		}
		fmt.Fprintf(a.err, "vnicd: lab: %q stays until `vnicd lab down%s`; in its VMs: %s\n", name, more, o.Dir)
		return 0, nil
	})
}

func (a *app) labExecCmd() *cobra.Command {
	var cmd cluster.Command
	var name string
	c := &cobra.Command{
		Use:               "exec [flags] -- CMD [ARG]...",
		Short:             "Run a command on a VM of a lab that is up, or on all",
		Args:              args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: files,
		RunE: func(c *cobra.Command, argv []string) error {
			cmd.Argv, cmd.Env = argv, variables(cmd.Env)
			return a.labExec(c.Context(), name, &cmd)
		},
	}
	c.Flags().SetInterspersed(false)
	addLabName(c, &name, "`name` of the lab")
	addLabVM(c, &cmd.VM)
	c.Flags().BoolVar(&cmd.Each, "each", false, "run CMD on all VMs, each line of output behind the VM's name")
	c.Flags().StringArrayVarP(&cmd.Env, "env", "e", nil,
		"`NAME=VALUE` in the command's environment, or NAME with its value here; may be repeated")
	return c
}

// labExec runs a command in a lab that is up and ends with its status.
func (a *app) labExec(ctx context.Context, name string, cmd *cluster.Command) error {
	if err := cluster.ValidName(name); err != nil {
		return usageError{fmt.Errorf("--name: %w", err)}
	}
	if err := cmd.Validate(); err != nil {
		return usageError{err}
	}
	return labStatus(ctx, func(ctx context.Context) (int, error) {
		return cluster.Exec(ctx, name, cmd, os.Stdin, os.Stdout, os.Stderr)
	})
}

func (a *app) labListCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List your labs that \"vnicd lab up\" has made",
		Args:  args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			list, err := cluster.List()
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(list)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\tSTATE\tSINCE\tKERNEL\tVMS\tDIRECTORY")
			for _, s := range list {
				state, since := s.State, ""
				if s.Error != "" {
					state += " (" + s.Error + ")"
				}
				if !s.Since.IsZero() {
					since = s.Since.Local().Format(time.DateTime)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", s.Name, state, since, s.Kernel, strings.Join(s.VMs, ","), s.Directory)
			}
			return w.Flush()
		},
	}
	c.Flags().BoolVarP(&a.json, "json", "j", false, "JSON output")
	return c
}

func (a *app) labDownCmd() *cobra.Command {
	return &cobra.Command{
		Use:               "down [NAME]",
		Short:             "End a lab that is up, and remove all that it has made",
		Args:              args(cobra.MaximumNArgs(1)),
		ValidArgsFunction: a.complete(nil, labNames),
		RunE: func(c *cobra.Command, argv []string) error {
			name := cluster.DefaultName
			if len(argv) == 1 {
				name = argv[0]
			}
			if err := cluster.ValidName(name); err != nil {
				return usageError{err}
			}
			return labStatus(c.Context(), func(ctx context.Context) (int, error) {
				note, err := cluster.Down(ctx, name)
				if note != "" {
					fmt.Fprintf(a.err, "vnicd: lab: %s\n", note)
				}
				return 0, err
			})
		},
	}
}

func addLabName(c *cobra.Command, name *string, usage string) {
	c.Flags().StringVar(name, "name", cluster.DefaultName, usage)
	_ = c.RegisterFlagCompletionFunc("name", labNames)
}

func addLabVM(c *cobra.Command, vm *string) {
	c.Flags().StringVar(vm, "vm", "", "`name` of the VM (default vm1)")
	_ = c.RegisterFlagCompletionFunc("vm", labVMs)
}

// labVMs completes names of VMs, of the lab that --name or nothing chooses.
var labVMs completer = func(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	list, _ := cluster.List()
	for _, s := range list {
		if s.Name == c.Flag("name").Value.String() {
			return s.VMs, cobra.ShellCompDirectiveNoFileComp
		}
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}

// labNames completes names of labs.
var labNames completer = func(*cobra.Command, []string, string) (names []string, _ cobra.ShellCompDirective) {
	list, _ := cluster.List()
	for _, s := range list {
		names = append(names, s.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
