// Package monitoring serves a running daemon's state to monitoring systems: Prometheus metrics, a health check and, if
// enabled, Go's profiles and a web page. It is read-only. Any client that reaches the address may read all of it.
//
// HTTP is spoken by package web, which gets what it serves by the few questions of package query. This package opens
// the listening socket and answers the questions.
package monitoring

import (
	"context"
	"fmt"
	"net"
	"path/filepath"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/web"
)

// Source is the daemon, as this package uses it.
type Source interface {
	// Status makes a snapshot. It may wait for the data path.
	Status() *daemon.Status
	// Healthy returns nil when all engines have answered. If ctx ends first, the error names those that have not.
	Healthy(ctx context.Context) error
	// Connections lists the RDMA connections of all VMs, or of one.
	Connections(vm string) ([]daemon.VMConnection, error)
}

// Server is a running server.
type Server struct {
	answers *answers
	cancel  context.CancelFunc
	web     *web.Server
	done    chan struct{} // closed when both sides have ended
}

// Serve listens at the address in cfg and serves until Close. Without an address it does nothing and returns nil, on
// which Close may be called.
func Serve(cfg config.Monitoring, src Source, log hclog.Logger) (*Server, error) {
	if cfg.Listen == "" {
		return nil, nil
	}
	l, err := listen(cfg.Listen, cfg.Group)
	if err != nil {
		return nil, fmt.Errorf("monitoring: %w", err)
	}
	kinds := query.Slots(cfg.Page, cfg.PProf)
	ours, theirs := make([]net.Conn, len(kinds)), make([]net.Conn, len(kinds))
	for i := range kinds {
		ours[i], theirs[i] = net.Pipe()
	}
	s := &Server{done: make(chan struct{})}
	if s.web, err = web.New(webConfig(cfg), theirs, log); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("monitoring: %w", err)
	}
	var smp *sampler
	if cfg.Page {
		smp = startSampler(src)
	}
	s.answers = newAnswers(kinds, src, smp, log)
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go func() {
		defer close(s.done)
		served := make(chan error, 1)
		go func() { served <- s.answers.serveAll(ctx, ours) }()
		if err := s.web.Serve(l); err != nil {
			log.Error("monitoring server failed", "error", err)
		}
		cancel()
		if err := <-served; err != nil {
			log.Error("monitoring server failed", "error", err)
		}
		s.answers.running.Wait()
		if smp != nil {
			smp.close()
		}
	}()
	log.Info("serving metrics", "listen", cfg.Listen, "pprof", cfg.PProf, "page", cfg.Page)
	return s, nil
}

// webConfig returns what the HTTP side knows of the configuration.
func webConfig(cfg config.Monitoring) web.Config {
	c := web.Config{Names: cfg.Names, Page: cfg.Page, Profiles: cfg.PProf}
	if own, _, err := net.SplitHostPort(cfg.Listen); err == nil && own != "" {
		c.Names = append([]string{own}, c.Names...)
	}
	return c
}

// Close ends the server; responses in progress get two seconds.
func (s *Server) Close() {
	if s == nil {
		return
	}
	s.web.Close()
	<-s.done
}

// listen listens at where; if that is a path, for the group gid.
func listen(where string, gid int) (net.Listener, error) {
	if filepath.IsAbs(where) {
		return daemon.ListenUnix(where, gid)
	}
	return net.Listen("tcp", where)
}

func registry(status func() *daemon.Status) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collector{status}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}
