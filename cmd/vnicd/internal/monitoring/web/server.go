// Package web is the HTTP side of monitoring. It runs in a process of its own, without rights: connections, requests,
// compression and the page's files are here; what it serves beyond those files are answers of the daemon (package
// query), and so it uses nothing of the daemon.
//
//	GET /metrics        the values of `vnicd status`, and the daemon's process
//	GET /healthz        200 "ok", or 503 with the stuck engine
//	GET /debug/pprof/   profiles of the daemon, if enabled
//	GET /               the web page, if enabled
//	GET /v1/overview    the page's data, as JSON
//
// Requests for other host names than the server's own are refused, whatever their path; see ownHost. So are those that
// the rules of access do not permit; see guard. Rules can change while the server runs.
package web

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/common/expfmt"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/access"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// Bounds of the clients' cost.
const (
	maxClients = 64              // connections; a further one needs the place of one of them, see places
	maxStreams = 16              // requests at once on one connection, with HTTP/2
	slotTime   = 2 * time.Second // to wait while others are served
	writeTime  = 2 * time.Minute
	idleTime   = 10 * time.Second // of a connection, which keeps one of maxClients places
	scrapeTime = 10 * time.Second
	healthTime = 4 * time.Second // the daemon answers in 3
	viewTime   = 10 * time.Second
	closeTime  = 2 * time.Second
)

// Config is what the process knows of the configuration.
type Config struct {
	// Names are host names by which clients may address the server, besides IP addresses and localhost.
	Names []string
	// Page and Profiles serve the page, and Go's profiles.
	Page, Profiles bool
	// Rules are those of access, at first.
	Rules access.Rules
}

// Server is the HTTP server.
type Server struct {
	srv    *http.Server
	daemon *daemon
	guard  *guard
	once   sync.Once
	stop   chan struct{} // closed by Close
}

// New returns a server that asks the daemon on slots, which are those of query.Slots. They and the listener are the
// server's from here on.
func New(cfg Config, slots []net.Conn, logger hclog.Logger) (*Server, error) {
	limited := loglimit.New(logger) // clients could fill the log otherwise
	guard := newGuard(limited)
	if err := guard.apply(cfg.Rules); err != nil {
		return nil, err
	}
	d, err := newDaemon(query.Slots(cfg.Page, cfg.Profiles), slots)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", d.metrics)
	mux.HandleFunc("GET /healthz", d.health)
	if cfg.Profiles {
		mux.HandleFunc("GET /debug/pprof/{$}", profileIndex)
		mux.HandleFunc("GET /debug/pprof/{name}", d.profile)
	}
	if cfg.Page {
		d.servePage(mux)
	}
	return &Server{daemon: d, guard: guard, stop: make(chan struct{}), srv: &http.Server{
		Handler:           guard.headers(ownHost(cfg.Names, guard.admit(mux))),
		ReadHeaderTimeout: 5 * time.Second, // also of TLS's handshake
		ReadTimeout:       10 * time.Second, WriteTimeout: writeTime, IdleTimeout: idleTime, MaxHeaderBytes: 16 << 10,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: maxStreams}, ErrorLog: errorLog(limited),
	}}, nil
}

// Apply replaces the rules of access. Connections that exist keep their TLS; requests on them follow the new rules.
func (s *Server) Apply(r access.Rules) error { return s.guard.apply(r) }

// errorLog is for mistakes of clients.
func errorLog(limited hclog.Logger) *log.Logger {
	return limited.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Warn})
}

// Serve serves until Close, and then returns nil, or until a slot breaks: the daemon has ended, or ends this process.
func (s *Server) Serve(l net.Listener) error {
	served := make(chan error, 1)
	p := newPlaces(l, maxClients, s.guard.tls)
	s.srv.ConnState = p.state
	go func() { served <- s.srv.Serve(p) }()
	var err error
	select {
	case err = <-served:
	case <-s.daemon.broken:
		err = s.daemon.why
		_ = s.srv.Close()
		<-served
	case <-s.stop:
		ctx, cancel := context.WithTimeout(context.Background(), closeTime)
		defer cancel()
		if s.srv.Shutdown(ctx) != nil {
			_ = s.srv.Close()
		}
		<-served
	}
	s.daemon.close()
	return err
}

// Close makes Serve return; responses in progress get two seconds. It may be called twice.
func (s *Server) Close() { s.once.Do(func() { close(s.stop) }) }

func (d *daemon) metrics(w http.ResponseWriter, r *http.Request) {
	// Names of metrics are ASCII, so that the client's choice of escaping does not matter.
	format := expfmt.NegotiateAccept(r.Header, expfmt.NewFormat(expfmt.TypeProtoDelim),
		expfmt.NewFormat(expfmt.TypeTextPlain))
	a, err := d.ask(r.Context(), &query.Query{Kind: query.Metrics, Protobuf: format.FormatType() == expfmt.TypeProtoDelim},
		scrapeTime)
	if err != nil {
		refuse(w, err)
		return
	}
	defer a.Close()
	send(compressed(w, r), a, query.SendTime)
}

func (d *daemon) health(w http.ResponseWriter, r *http.Request) {
	a, err := d.ask(r.Context(), &query.Query{Kind: query.Health}, healthTime)
	if err != nil {
		refuse(w, err)
		return
	}
	defer a.Close()
	send(w, a, query.SendTime)
}

// refuse answers a request without the daemon.
func refuse(w http.ResponseWriter, err error) {
	http.Error(w, err.Error(), http.StatusServiceUnavailable)
}

// send passes an answer on to the client, which must read it within a time. If it does not, or the daemon cannot
// complete its answer, the connection is closed, so that no client takes the part for the whole.
func send(w http.ResponseWriter, a *answer, within time.Duration) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(within))
	w.Header().Set("Content-Type", a.ContentType)
	w.WriteHeader(a.Status)
	_, err := io.Copy(w, a)
	if c, ok := w.(io.Closer); ok && err == nil {
		err = c.Close()
	}
	if err != nil {
		panic(http.ErrAbortHandler) // net/http closes the connection, without a line in the log
	}
}
