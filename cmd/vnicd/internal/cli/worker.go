package cli

import (
	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/web"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
)

// workers are the kinds of processes that `vnicd run` starts. Tests of this package have them, too (TestMain).
var workers = []worker.Kind{daemon.BGPWorker, web.Kind}

// needsWorkers reports whether a daemon has any of them.
func needsWorkers(cfg *config.Config) bool { return cfg.EVPN != nil || cfg.Monitoring.Listen != "" }
