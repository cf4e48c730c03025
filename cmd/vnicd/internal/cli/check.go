package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

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
		Short: "Check the configuration file",
		Long: `Reads the configuration file and reports every mistake with its line. Without
mistakes it prints nothing. Exit status: 0 no mistakes, 2 mistakes.`,
		Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			c, err := a.load()
			if err != nil {
				return err
			}
			fmt.Fprintf(a.out, "%s: %d networks, %d VMs\n", c.Path, len(c.Networks), len(c.VMs))
			return nil
		},
	}
}
