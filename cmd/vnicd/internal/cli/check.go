package cli

import (
	"errors"
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

// loadAll is load, and checks the other files that the configuration names, too.
func (a *app) loadAll() (*config.Config, error) {
	c, err := a.load()
	if err != nil {
		return nil, err
	}
	if err := c.CheckFiles(); err != nil {
		return nil, usageError{err}
	}
	return c, nil
}

// checked is the JSON of check.
type checked struct {
	Files        []string        `json:"files"` // that were read: the main file and its fragments
	Networks     int             `json:"networks"`
	VMs          int             `json:"vms"`
	Applications int             `json:"applications"`
	Overrides    []checkOverride `json:"overrides"` // values that stand in several files
	Mistakes     []checkMistake  `json:"mistakes"`  // if there are any, the numbers are 0
}

// checkPlace is where something stands.
type checkPlace struct {
	File string `json:"file"`
	Line int    `json:"line,omitempty"` // from 1; 0: the file as a whole
	Key  string `json:"key,omitempty"`  // such as vms[2].mac, counted within the file
}

type checkOverride struct {
	checkPlace
	Was checkPlace `json:"was"`
}

type checkMistake struct {
	checkPlace
	Message string `json:"message"`
}

func newChecked(c *config.Config, err error) (*checked, error) {
	r := &checked{Overrides: []checkOverride{}, Mistakes: []checkMistake{}}
	place := func(p config.Place) checkPlace { return checkPlace{p.File, p.Line, p.Key} }
	var wrong *config.Errors
	switch {
	case errors.As(err, &wrong):
		r.Files = wrong.Files
		for _, e := range wrong.List() {
			r.Mistakes = append(r.Mistakes, checkMistake{place(e.Place), e.Msg})
		}
		return r, nil
	case err != nil:
		return nil, err
	}
	r.Files, r.Networks = c.Files, len(c.Networks)
	for _, vm := range c.VMs {
		if vm.Application != nil {
			r.Applications++
		} else {
			r.VMs++
		}
	}
	for _, o := range c.Overrides {
		r.Overrides = append(r.Overrides, checkOverride{place(o.Is), place(o.Was)})
	}
	return r, nil
}

func (a *app) checkCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "check",
		Short: "Check the configuration",
		Long: `Reads the configuration file and its fragments, and then the files that they name, and
reports every mistake with its file and line. Without mistakes it prints what there is,
and which values override those of an earlier file. Exit status: 0 no mistakes, 2 mistakes.

` + fragmentsHelp,
		Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			c, err := a.loadAll()
			if a.json {
				return a.checkJSON(c, err)
			}
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
	c.Flags().BoolVarP(&a.json, "json", "j", false, "JSON output, also of mistakes")
	return c
}

// checkJSON prints what config.Load returned.
func (a *app) checkJSON(c *config.Config, err error) error {
	r, err := newChecked(c, err)
	if err != nil {
		return err
	}
	if err := a.printJSON(r); err != nil || len(r.Mistakes) == 0 {
		return err
	}
	return statusError{status: exitUsage}
}
