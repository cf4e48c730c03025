package cli

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring"
)

func (a *app) runCmd() *cobra.Command {
	var level string
	var jsonLog bool
	c := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon in the foreground",
		Long: `Makes the networks, TAP ports, tunnels and VM sockets of the configuration and
serves them until SIGINT or SIGTERM. QEMU processes may come and go; each finds
the sockets RUN-DIR/NAME.net and RUN-DIR/NAME.hca.

A TAP port needs CAP_NET_ADMIN; everything else runs without privileges.`,
		Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			cfg, err := a.load()
			if err != nil {
				return err
			}
			if level == "" {
				level = cfg.LogLevel
			}
			if hclog.LevelFromString(level) == hclog.NoLevel {
				return usageError{fmt.Errorf("--log-level must be trace, debug, info, warn or error, found %q", level)}
			}
			log := hclog.New(&hclog.LoggerOptions{
				Name: "vnicd", Level: hclog.LevelFromString(level), Output: a.err, JSONFormat: jsonLog,
			})
			// Before the sockets exist, so that no early signal kills the process
			// with half of it made.
			stop := make(chan os.Signal, 1)
			signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
			defer signal.Stop(stop)

			d, err := daemon.Start(cfg, a.version, log)
			if err != nil {
				return err
			}
			web, err := monitoring.Serve(cfg.Monitoring, d, log.Named("monitoring"))
			if err != nil {
				_ = d.Close()
				return err
			}
			log.Info("ready", "networks", len(cfg.Networks), "vms", len(cfg.VMs), "control", cfg.Control)
			sig := <-stop
			log.Info("stopping", "signal", sig.String())
			web.Close()
			return d.Close()
		},
	}
	c.Flags().StringVar(&level, "log-level", "", "`level`: trace, debug, info, warn or error (default: the configuration's)")
	c.Flags().BoolVar(&jsonLog, "log-json", false, "log JSON lines")
	return c
}
