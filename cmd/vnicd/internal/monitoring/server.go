// Package monitoring serves a running daemon's state to monitoring systems: Prometheus metrics, a health check and, if
// enabled, Go's profiles and a web page. It is read-only. Any client that reaches the address may read all of it.
//
// HTTP is spoken by package web, in a process of its own without rights, which gets what it serves by the few questions
// of package query. This package opens the listening socket and answers the questions.
package monitoring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/web"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
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
	listener net.Listener // whose descriptor each process gets; nobody accepts here
	files    []*os.File   // of listener
	config   []byte       // what each process knows of the configuration
	answers  *answers
	sampler  *sampler // nil without the page
	process  *worker.Supervisor

	ctx    context.Context // of all answers
	cancel context.CancelFunc
}

// Serve listens at the address in cfg and has a process of web.Kind serve there until Close; if it dies, the next one
// serves the connections that came meanwhile. Without an address Serve does nothing and returns nil, on which Close may
// be called.
func Serve(cfg config.Monitoring, src Source, processes *worker.Spawner, log hclog.Logger) (*Server, error) {
	if cfg.Listen == "" {
		return nil, nil
	}
	return serve(cfg, src, processes, web.Kind.Name, log)
}

// serve serves by processes of a kind; tests have others than web.Kind.
func serve(cfg config.Monitoring, src Source, processes *worker.Spawner, kind string, log hclog.Logger) (*Server,
	error) {
	s := &Server{}
	if err := s.listen(cfg); err != nil {
		return nil, fmt.Errorf("monitoring: %w", err)
	}
	if cfg.Page {
		s.sampler = startSampler(src)
	}
	kinds := query.Slots(cfg.Page, cfg.PProf)
	s.answers = newAnswers(kinds, src, s.sampler, log)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.process = processes.Supervise(worker.Config{Kind: kind, Log: log, Files: s.files, Streams: len(kinds),
		Serve: s.talk})
	log.Info("serving metrics", "listen", cfg.Listen, "pprof", cfg.PProf, "page", cfg.Page)
	return s, nil
}

// talk answers one process, until it ends or does what it must not.
func (s *Server) talk(ctx context.Context, c *worker.Conn) error {
	if err := c.Send(s.config); err != nil {
		return err
	}
	answering, cancel := context.WithCancel(s.ctx)
	defer func() {
		if ctx.Err() == nil {
			cancel()
		} // otherwise responses in progress get the time until the process ends
	}()
	lost := make(chan error, 1)
	s.answers.running.Go(func() {
		_, err := c.Receive(0)
		if err == nil {
			err = errors.New("it sent a message, want none")
		}
		lost <- err
	})
	select {
	case err := <-s.answers.start(answering, c.Streams):
		return err
	case err := <-lost:
		return err
	case <-ctx.Done():
		return nil
	}
}

// Close ends the server; responses in progress get two seconds.
func (s *Server) Close() {
	if s == nil {
		return
	}
	s.process.Close()
	s.cancel()
	s.answers.running.Wait()
	if s.sampler != nil {
		s.sampler.close()
	}
	s.close()
}

// close closes the listening socket.
func (s *Server) close() {
	for _, f := range s.files {
		_ = f.Close()
	}
	_ = s.listener.Close()
}

// listen makes the listening socket; if the address is a path, for the group.
func (s *Server) listen(cfg config.Monitoring) (err error) {
	if s.config, err = json.Marshal(webConfig(cfg)); err != nil {
		return err
	}
	if len(s.config) > web.MaxConfig {
		return fmt.Errorf("%d bytes of configuration, at most %d: give it fewer `names`", len(s.config), web.MaxConfig)
	}
	if filepath.IsAbs(cfg.Listen) {
		s.listener, err = daemon.ListenUnix(cfg.Listen, cfg.Group)
	} else {
		s.listener, err = net.Listen("tcp", cfg.Listen)
	}
	if err != nil {
		return err
	}
	var f *os.File
	if l, ok := s.listener.(interface{ File() (*os.File, error) }); !ok {
		err = fmt.Errorf("a %T has no descriptor", s.listener)
	} else if f, err = l.File(); err == nil {
		s.files = []*os.File{f}
	}
	if err != nil {
		_ = s.listener.Close()
	}
	return err
}

// webConfig returns what the HTTP side knows of the configuration.
func webConfig(cfg config.Monitoring) web.Config {
	c := web.Config{Names: cfg.Names, Page: cfg.Page, Profiles: cfg.PProf}
	if own, _, err := net.SplitHostPort(cfg.Listen); err == nil && own != "" {
		c.Names = append([]string{own}, c.Names...)
	}
	return c
}

func registry(status func() *daemon.Status) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collector{status, &faultTimes{}}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}
