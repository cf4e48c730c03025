package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

const fragmentsHelp = `Fragments are the files *.yaml in the directory vnicd.d beside vnicd.yaml, or FILE.d beside
FILE.yaml, in the order of their names. Lists (networks, vms, applications and others) of all
files are joined; of a value that stands in several files, the last one applies.`

// load reads the configuration; its mistakes are usage errors (exit status 2).
func (a *app) load() (*config.Config, error) {
	c, err := config.Load(a.config)
	if err != nil {
		return nil, usageError{err}
	}
	return c, nil
}

func (a *app) checkCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "Check the configuration",
		Long: `Reads the configuration file and its fragments, and reports every mistake with its file
and line. Without mistakes it prints what there is, and which values override those of an
earlier file. Exit status: 0 no mistakes, 2 mistakes.

` + fragmentsHelp,
		Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			c, err := a.load()
			if err != nil {
				return err
			}
			from := ""
			if n := len(c.Files) - 1; n > 0 {
				from = fmt.Sprintf(", %d fragments in %s", n, config.FragmentDir(c.Path))
			}
			fmt.Fprintf(a.out, "%s: %d networks, %d VMs%s\n", c.Path, len(c.Networks), len(c.VMs), from)
			for _, o := range c.Overrides {
				fmt.Fprintf(a.out, "%v: %s overrides %v\n", o.Is, o.Is.Key, o.Was)
			}
			return nil
		},
	}
}
