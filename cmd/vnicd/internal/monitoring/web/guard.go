package web

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/access"
)

// guard enforces the rules of access.
type guard struct {
	log       hclog.Logger
	passwords *access.Passwords
	rate      rate
	now       atomic.Pointer[inForce]
}

// inForce are rules, and what is made of them.
type inForce struct {
	access.Rules
	tls *tls.Config // nil: plain HTTP
}

// newGuard returns one that needs rules: apply. Its log is limited.
func newGuard(log hclog.Logger) *guard {
	return &guard{log: log, passwords: access.NewPasswords(), rate: rate{now: time.Now}}
}

// apply replaces the rules.
func (g *guard) apply(r access.Rules) error {
	next := &inForce{Rules: r}
	if r.TLS != nil {
		var err error
		if next.tls, err = r.Config(); err != nil {
			return fmt.Errorf("TLS: %w", err)
		}
	}
	g.passwords.Retain(r.Users)
	g.now.Store(next)
	return nil
}

// tls returns the configuration for a new connection; nil: plain HTTP.
func (g *guard) tls() *tls.Config { return g.now.Load().tls }

// headers adds the headers of the rules to all responses. Those of the page overwrite them.
func (g *guard) headers(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for k, v := range g.now.Load().Headers {
			w.Header().Set(k, v)
		}
		h.ServeHTTP(w, r)
	})
}

// admit passes on requests within the rate and with the password of a user, if there are users.
func (g *guard) admit(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rules := g.now.Load()
		if !g.rate.allow(rules.Interval, rules.Burst) {
			later(w, "more requests than `rate_limit` permits: try again later")
			return
		}
		if len(rules.Users) == 0 {
			h.ServeHTTP(w, r)
			return
		}
		name, password, sent := r.BasicAuth()
		right := false
		if sent {
			var err error
			right, err = g.passwords.Check(r.Context(), rules.Users, r.RemoteAddr, name, password)
			if errors.Is(err, access.ErrBusy) {
				later(w, err.Error())
				return
			} else if err != nil {
				panic(http.ErrAbortHandler) // the client has gone
			}
		}
		if !right {
			if sent { // not the name: it may be a password in the wrong place
				g.log.Warn("wrong user name or password", "client", r.RemoteAddr)
			}
			w.Header().Set("WWW-Authenticate", `Basic realm="vnicd", charset="UTF-8"`)
			http.Error(w, http.StatusText(http.StatusUnauthorized), http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// later refuses a request that may succeed soon.
func later(w http.ResponseWriter, why string) {
	w.Header().Set("Retry-After", "1")
	http.Error(w, why, http.StatusTooManyRequests)
}

// rate is a token bucket for all clients together.
type rate struct {
	now func() time.Time

	mu       sync.Mutex
	interval time.Duration
	burst    int
	full     time.Time // when the bucket is full
}

// allow takes a token, one of which comes each interval, up to burst.
func (r *rate) allow(interval time.Duration, burst int) bool {
	if interval == 0 {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if r.interval != interval || r.burst != burst || r.full.Before(now) {
		r.interval, r.burst, r.full = interval, burst, now
	}
	full := r.full.Add(interval)
	if full.Sub(now) > interval*time.Duration(burst) {
		return false
	}
	r.full = full
	return true
}
