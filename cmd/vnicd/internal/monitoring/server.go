// Package monitoring serves a running daemon's state to monitoring systems: Prometheus metrics, a health check and, if
// enabled, Go's profiles and a web page. It is read-only. Any client that reaches the address, and has a password or a
// certificate if the rules of package access demand one, may read all of it.
//
// HTTP is spoken by package web, in a process of its own without rights, which gets what it serves by the few questions
// of package query. This package opens the listening socket, answers the questions, and reads the files with the rules.
package monitoring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/access"
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
	answers  *answers
	sampler  *sampler  // nil without the page
	rules    *ruleFile // nil without a file
	process  *worker.Supervisor

	mu     sync.Mutex
	config web.Config   // what each process knows of the configuration
	conn   *worker.Conn // of the process that serves; nil: none

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
	return serve(cfg, src, processes, web.Kind.Name, rulePause, log)
}

// serve serves by processes of a kind, and looks at the file of rules after each pause; tests have others.
func serve(cfg config.Monitoring, src Source, processes *worker.Spawner, kind string, pause time.Duration,
	log hclog.Logger) (*Server, error) {
	s := &Server{config: webConfig(cfg)}
	if err := s.open(cfg, log); err != nil {
		return nil, fmt.Errorf("monitoring: %w", err)
	}
	if cfg.Page {
		s.sampler = startSampler(src)
	}
	kinds := query.Slots(cfg.Page, cfg.PProf)
	s.answers = newAnswers(kinds, src, s.sampler, s.rules.certificateEnd, log)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.process = processes.Supervise(worker.Config{Kind: kind, Log: log, Files: s.files, Streams: len(kinds),
		Serve: s.talk})
	log.Info("serving metrics", "listen", cfg.Listen, "pprof", cfg.PProf, "page", cfg.Page,
		"tls", s.config.Rules.TLS != nil, "passwords", len(s.config.Rules.Users) > 0)
	if s.rules != nil {
		s.rules.watch(pause)
	}
	return s, nil
}

// talk answers one process, until it ends or does what it must not.
func (s *Server) talk(ctx context.Context, c *worker.Conn) error {
	if err := s.begin(c); err != nil {
		return err
	}
	defer s.end()
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

// begin tells a process the configuration, and has it told of each change.
func (s *Server) begin(c *worker.Conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, err := json.Marshal(s.config)
	if err != nil {
		return err
	}
	if err := c.Send(text); err != nil {
		return err
	}
	s.conn = c
	return nil
}

// end is the end of the process.
func (s *Server) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn = nil
}

// setRules replaces the rules of access, for the process that serves and those that follow.
func (s *Server) setRules(r *access.Rules) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if len(text) > web.MaxRules {
		return fmt.Errorf("%d bytes of rules, at most %d", len(text), web.MaxRules)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.config.Rules = *r
	if s.conn != nil && s.conn.Send(text) != nil {
		_ = s.conn.Close() // the process has ended or is stuck; the next one gets the whole configuration
	}
	return nil
}

// Close ends the server; responses in progress get two seconds.
func (s *Server) Close() {
	if s == nil {
		return
	}
	if s.rules != nil {
		s.rules.close()
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

// open reads the rules of access and makes the listening socket.
func (s *Server) open(cfg config.Monitoring, log hclog.Logger) error {
	if cfg.WebConfig != "" {
		s.rules = newRuleFile(cfg.WebConfig, cfg.Listen, s.setRules, log)
		if err := s.rules.first(); err != nil {
			return err
		}
	}
	text, err := json.Marshal(s.config)
	if err != nil {
		return err
	}
	if len(text) > web.MaxConfig {
		return fmt.Errorf("%d bytes of configuration, at most %d: give it fewer `names`", len(text), web.MaxConfig)
	}
	return s.listen(cfg)
}

// listen makes the listening socket; if the address is a path, for the group.
func (s *Server) listen(cfg config.Monitoring) (err error) {
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

func registry(status func() *daemon.Status, certificateEnd func() *time.Time) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collector{status, certificateEnd, &faultTimes{}}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}
