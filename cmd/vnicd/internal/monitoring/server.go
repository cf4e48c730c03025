// Package monitoring serves a running daemon's state to monitoring systems: Prometheus metrics, a health check and, if
// enabled, Go's profiles and a web page. It is read-only. Any client that reaches the address may read all of it.
//
//	GET /metrics        the values of `vnicd status`, and the process's
//	GET /healthz        200 "ok", or 503 with the stuck engine
//	GET /debug/pprof/   profiles, if enabled
//	GET /               the web page, if enabled
//	GET /v1/overview    the page's data, as JSON
//
// Requests for other host names than the server's own are refused, whatever their path; see ownHost.
package monitoring

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
)

// Bounds of a reader's cost.
const (
	scrapes    = 2 // at once
	scrapeTime = 10 * time.Second
	healthTime = 3 * time.Second
	writeTime  = 2 * time.Minute // a profile takes 30 s by default
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
	srv     *http.Server
	sampler *sampler // nil without the page
	done    chan struct{}
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
	mux := handler(src, cfg.PProf, log)
	s := &Server{
		srv: &http.Server{
			Handler: ownHost(cfg, mux), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
			WriteTimeout: writeTime, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
			ErrorLog: daemon.ErrorLog(log),
		},
		done: make(chan struct{}),
	}
	if cfg.Page {
		s.sampler = startSampler(src)
		servePage(mux, s.sampler)
	}
	go func() {
		defer close(s.done)
		if err := s.srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("monitoring server failed", "error", err)
		}
	}()
	log.Info("serving metrics", "listen", cfg.Listen, "pprof", cfg.PProf, "page", cfg.Page)
	return s, nil
}

// Close ends the server; responses in progress get two seconds.
func (s *Server) Close() {
	if s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if s.srv.Shutdown(ctx) != nil {
		_ = s.srv.Close()
	}
	<-s.done
	if s.sampler != nil {
		s.sampler.close()
	}
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

func handler(src Source, profiles bool, log hclog.Logger) *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry(src.Status), promhttp.HandlerOpts{
		ErrorLog: daemon.ErrorLog(log), MaxRequestsInFlight: scrapes,
		Timeout: scrapeTime,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), healthTime)
		defer cancel()
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if err := src.Healthy(ctx); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = fmt.Fprintln(w, err)
			return
		}
		_, _ = fmt.Fprintln(w, "ok")
	})
	if profiles {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}
