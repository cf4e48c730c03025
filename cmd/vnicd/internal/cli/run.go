package cli

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/keeper"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/systemd"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
)

func (a *app) runCmd() *cobra.Command {
	var level string
	var jsonLog, keep bool
	c := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon in the foreground",
		Long: `Creates the networks, TAP ports, tunnels and VM sockets of the configuration and
serves them until SIGINT or SIGTERM. SIGHUP acts as "vnicd reload". Each VM has the
sockets RUN-DIR/NAME.net and RUN-DIR/NAME.hca, to which its QEMU may connect at any time.

TAP ports and WireGuard need CAP_NET_ADMIN, BGP on its standard port
CAP_NET_BIND_SERVICE, connections of host applications that outlive vnicd
CAP_LINUX_IMMUTABLE, and the short path of TAP ports CAP_BPF at the start, which vnicd
then drops. Everything else runs without privileges. Once started, the process cannot
start programs, load others into the kernel, mount, trace or use keyrings (seccomp(2)).
BGP and monitoring run in processes without rights, vnicd-bgp and vnicd-monitoring, which
vnicd starts again if they end; vnicd-spawner starts them.

Without systemd, such as in a container, use --keep. The process then starts the daemon
as its child, holds the connections of VMs and host applications while the daemon is
replaced, and starts it again if it ends by a crash. "vnicd upgrade", or SIGUSR2,
replaces the daemon by the program that is installed then; if that does not come up, the
previous one runs again.`,
		Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if keep {
				return a.keep(level, jsonLog)
			}
			cfg, err := a.loadAll()
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
			// Before the sockets exist, so that an early signal cannot kill the process while it creates them.
			// In two channels: a full one would lose the order to end.
			ending, reloads := make(chan os.Signal, 1), make(chan os.Signal, 1)
			signal.Notify(ending, syscall.SIGINT, syscall.SIGTERM)
			defer signal.Stop(ending)
			signal.Notify(reloads, syscall.SIGHUP)
			defer signal.Stop(reloads)

			options := []daemon.Option{daemon.Confined}
			var processes *worker.Spawner
			if needsWorkers(cfg) {
				// Before the daemon has descriptors that another process must not hold, and forbids itself to start one.
				if processes, err = worker.Start(log.Named("worker")); err != nil {
					return err
				}
				defer processes.Close()
				options = append(options, daemon.Workers(processes))
			}
			d, err := daemon.Start(cfg, a.version, log, options...)
			if err != nil {
				return err
			}
			web, err := monitoring.Serve(cfg.Monitoring, d, processes, log.Named("monitoring"))
			if err != nil {
				_ = d.Close()
				return err
			}
			log.Info("ready", "networks", len(cfg.Networks), "vms", len(cfg.VMs), "control", cfg.Control)
			notify(systemd.Ready, log)
			ctx, cancel := context.WithCancel(context.Background())
			watched := make(chan struct{})
			go func() { defer close(watched); systemd.Watch(ctx, d.Healthy) }()
			var sig os.Signal
			for sig == nil {
				select {
				case sig = <-ending:
				case <-reloads:
					reload(d, log)
				}
			}
			log.Info("stopping", "signal", sig.String())
			notify(systemd.Stopping, log)
			cancel()
			<-watched
			web.Close()
			return d.Close()
		},
	}
	c.Flags().StringVar(&level, "log-level", "",
		"`level`: trace, debug, info, warn or error (default: the configuration's)")
	c.Flags().BoolVar(&jsonLog, "log-json", false, "log JSON lines")
	c.Flags().BoolVar(&keep, "keep", false, "stay in front of the daemon, so that connections outlive it")
	return c
}

// keep runs the daemon under a keeper.
func (a *app) keep(level string, jsonLog bool) error {
	log := hclog.New(&hclog.LoggerOptions{Name: "vnicd.keeper", Level: hclog.Info, Output: a.err, JSONFormat: jsonLog})
	_ = os.WriteFile("/proc/self/comm", []byte("vnicd-keeper"), 0) // for ps, which otherwise shows two of a name
	config := "--config=" + a.config
	daemon := []string{"run", config, fmt.Sprintf("--log-json=%v", jsonLog)}
	if level != "" {
		daemon = append(daemon, "--log-level="+level)
	}
	status, err := keeper.Run(keeper.Config{Args: daemon, Check: []string{"check", config}, Log: log})
	if err == nil && status == 0 {
		return nil
	}
	return statusError{status, err}
}

// notify sends a state to systemd, if it runs this process.
func notify(state string, log hclog.Logger) {
	if err := systemd.Notify(state); err != nil {
		log.Warn("cannot notify systemd", "state", state, "error", err)
	}
}

func reload(d *daemon.Daemon, log hclog.Logger) {
	done, err := d.Reload()
	for _, what := range done {
		log.Info("reload", "change", what)
	}
	if err != nil {
		log.Error("reload", "error", err)
	}
}

func (a *app) reloadCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "reload",
		Short: "Make the running vnicd read its configuration again",
		Long: `Applies the present configuration, the file and its fragments, to the running daemon and
prints the changes: networks and VMs that are added or removed, VMs that move, peers, host
ports, keys and peers of WireGuard, the log level. VMs that are attached to a QEMU keep
running; only their network can change. A file with mistakes changes nothing, and neither
does one with a change that needs a restart (engines, buffers, vtep, sockets, monitoring,
a network's vni and limits). The file that monitoring.web-config names is checked; vnicd
reads its changes by itself.
Objects that were added at run time remain; once a file has them, they go with it.

` + whichSocket,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			var changes []string
			if err := a.ask(c, http.MethodPost, "/v1/reload", nil, &changes); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(changes)
			}
			for _, what := range changes {
				fmt.Fprintln(a.out, what)
			}
			return nil
		},
	}
	a.askFlags(c)
	return c
}
