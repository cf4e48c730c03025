package cli

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
)

// Networks and VMs are added and removed for as long as the daemon runs; with --save also in a fragment of the
// configuration. This process writes it, because the daemon runs without the right to. The file changes first, and is
// restored if the daemon refuses the change: while both are on their way a reload already finds what is wanted.

// saveFlag adds --save to a command that adds or removes something.
func saveFlag(c *cobra.Command) *cobra.Command {
	c.Flags().Bool("save", false, "change the configuration, too, in a file of its own in vnicd.d")
	return c
}

// listOf has the path of each kind's requests.
var listOf = map[string]string{"network": "/v1/networks", "vm": "/v1/vms"}

// add adds a network or VM, whose keys are in body.
func (a *app) add(c *cobra.Command, kind config.Kind, name string, body map[string]any,
	known map[string]wordKind) error {
	to := listOf[kind.String()]
	keys := fileKeys(body, known)
	body["name"] = name
	if save, _ := c.Flags().GetBool("save"); !save {
		return a.ask(c, http.MethodPost, to, body, nil)
	}
	if err := a.sameConfig(c); err != nil {
		return err
	}
	path, undo, err := config.Save(a.config, kind, name, keys)
	if err != nil {
		return configError(err)
	}
	if path, err = filepath.Abs(path); err == nil {
		err = a.ask(c, http.MethodPost, to+"?file="+url.QueryEscape(path), body, nil)
	}
	if err != nil {
		return errors.Join(err, undo())
	}
	return nil
}

// del removes a network or VM.
func (a *app) del(c *cobra.Command, kind config.Kind, name string) error {
	ask := func() error {
		return a.ask(c, http.MethodDelete, listOf[kind.String()]+"/"+url.PathEscape(name), nil, nil)
	}
	if save, _ := c.Flags().GetBool("save"); !save {
		return ask()
	}
	if err := a.sameConfig(c); err != nil {
		return err
	}
	r, err := config.Forget(a.config, kind, name)
	if err != nil {
		return configError(err)
	}
	if err := ask(); err != nil && (r.Path == "" || !daemon.IsNotFound(err)) { // it may have been removed before
		return errors.Join(err, r.Undo())
	}
	return r.Commit()
}

// sameConfig returns an error unless the running daemon has the configuration that this process would change.
func (a *app) sameConfig(c *cobra.Command) error {
	var s daemon.Status
	if err := a.ask(c, http.MethodGet, "/v1/status", nil, &s); err != nil {
		return err
	}
	if s.Config == "" {
		return errors.New("--save needs a vnicd that names its configuration: the running one is older than this program")
	}
	its, err := os.Stat(filepath.Dir(s.Config))
	if err == nil && filepath.Base(s.Config) == filepath.Base(a.config) {
		if mine, err := os.Stat(filepath.Dir(a.config)); err == nil && os.SameFile(mine, its) {
			return nil
		}
	}
	return usageError{fmt.Errorf("the running vnicd has the configuration %s, not %s: name it with --config", s.Config,
		a.config)}
}

// configError makes mistakes in the configuration usage errors (exit status 2).
func configError(err error) error {
	var wrong *config.Errors
	if errors.As(err, &wrong) {
		return usageError{err}
	}
	return err
}
