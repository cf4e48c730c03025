package monitoring

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/pprof"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

const healthTime = 3 * time.Second

// paces are the shortest times between the beginnings of two questions of a kind. They bound what a process that was
// taken over makes the daemon do; monitoring systems and pages ask far less often.
var paces = map[query.Kind]time.Duration{
	query.Metrics: 20 * time.Millisecond, query.Health: 5 * time.Millisecond, query.Overview: 10 * time.Millisecond,
	query.Profile: 50 * time.Millisecond,
}

// answers answers the questions of the process that speaks HTTP. It does not trust that process: see package query.
type answers struct {
	kinds   map[query.Kind]*kind
	metrics prometheus.Gatherer
	health  func(context.Context) error
	sampler *sampler // nil without the page
	log     hclog.Logger

	readTime time.Duration // query.ReadTime

	slots   []query.Kind
	running sync.WaitGroup // one for each slot in use
}

// kind bounds the questions of one kind, of all processes together: that of a process which has ended may still be
// worked on.
type kind struct {
	answer func(context.Context, *query.Query, *query.Writer) error
	pace   time.Duration
	free   chan struct{} // has an element for each question that is worked on

	mu   sync.Mutex
	next time.Time // when the next question may begin
}

// newAnswers returns what answers on slots of the given kinds.
func newAnswers(slots []query.Kind, src Source, s *sampler, certificateEnd func() *time.Time,
	log hclog.Logger) *answers {
	a := &answers{kinds: map[query.Kind]*kind{}, metrics: registry(src.Status, certificateEnd), health: src.Healthy,
		sampler: s, log: loglimit.New(log), readTime: query.ReadTime, slots: slots}
	of := map[query.Kind]func(context.Context, *query.Query, *query.Writer) error{
		query.Metrics: a.writeMetrics, query.Health: a.writeHealth, query.Overview: a.writeOverview,
		query.Profile: a.writeProfile,
	}
	count := map[query.Kind]int{}
	for _, k := range slots {
		count[k]++
	}
	for k, n := range count {
		a.kinds[k] = &kind{answer: of[k], pace: paces[k], free: make(chan struct{}, n)}
	}
	return a
}

// start answers on the slots of one process until ctx ends, and closes them then. What is still worked on ends by
// itself; running has it. When a slot ends earlier, its error is sent.
func (a *answers) start(ctx context.Context, slots []net.Conn) (ended <-chan error) {
	out := make(chan error, len(slots))
	for i, conn := range slots {
		a.running.Go(func() { out <- a.serve(ctx, conn, a.slots[i]) })
	}
	return out
}

// serve answers on a slot until the process closes it, breaks the protocol or does not read an answer in time, or ctx
// ends. The error is io.EOF if the process closed the slot between two questions.
func (a *answers) serve(ctx context.Context, conn net.Conn, of query.Kind) error {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	b := make([]byte, query.Size)
	for {
		if _, err := io.ReadFull(conn, b); err != nil {
			return err
		}
		q, err := query.Parse(b)
		if err != nil {
			return err
		}
		k := a.kinds[q.Kind]
		if q.Kind != of || k == nil {
			return fmt.Errorf("a question for %v where only %v may be asked", q.Kind, of)
		}
		if err := k.work(ctx, &q, query.NewWriter(conn, a.readTime+q.Duration())); err != nil {
			return fmt.Errorf("answer to %v: %w", q.Kind, err)
		}
	}
}

// work answers one question, once the others of its kind permit it.
func (k *kind) work(ctx context.Context, q *query.Query, w *query.Writer) error {
	select {
	case k.free <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-k.free }()
	t := time.NewTimer(k.wait(time.Now()))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return w.Close(k.answer(ctx, q, w))
}

// wait returns how long a question must wait, and reserves its time.
func (k *kind) wait(now time.Time) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.next.Before(now) {
		k.next = now
	}
	d := k.next.Sub(now)
	k.next = k.next.Add(k.pace)
	return d
}

// The functions below write an answer. Their error is one of the daemon; one of w is found by its Close.

func (a *answers) writeMetrics(_ context.Context, q *query.Query, w *query.Writer) error {
	families, err := a.metrics.Gather()
	if err != nil {
		a.log.Error("cannot gather metrics", "error", err)
		return err
	}
	format := expfmt.NewFormat(expfmt.TypeTextPlain)
	if q.Protobuf {
		format = expfmt.NewFormat(expfmt.TypeProtoDelim)
	}
	w.Header().Set("Content-Type", string(format))
	text := expfmt.NewEncoder(w, format)
	for _, f := range families {
		if err := text.Encode(f); err != nil {
			return err
		}
	}
	return nil
}

func (a *answers) writeHealth(ctx context.Context, _ *query.Query, w *query.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, healthTime)
	defer cancel()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if err := a.health(ctx); err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprintln(w, err)
		return nil
	}
	_, _ = fmt.Fprintln(w, "ok")
	return nil
}

func (a *answers) writeOverview(_ context.Context, q *query.Query, w *query.Writer) error {
	v := a.sampler.view()
	if v == nil {
		http.Error(w, "the first snapshot is not complete", http.StatusServiceUnavailable)
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(v.overview(time.Now(), q.Since, q.VM))
}

// writeProfile calls Go's handlers, with a request that has only what is asked for.
func (a *answers) writeProfile(ctx context.Context, q *query.Query, w *query.Writer) error {
	name, args := query.Profiles[q.Profile], url.Values{}
	if q.Seconds > 0 {
		args.Set("seconds", strconv.Itoa(int(q.Seconds)))
	}
	if q.Debug > 0 {
		args.Set("debug", strconv.Itoa(int(q.Debug)))
	}
	if q.GC {
		args.Set("gc", "1")
	}
	r := (&http.Request{Method: http.MethodGet, URL: &url.URL{Path: "/" + name, RawQuery: args.Encode()}}).WithContext(ctx)
	switch name {
	case "cmdline":
		pprof.Cmdline(w, r)
	case "profile":
		pprof.Profile(w, r)
	case "trace":
		pprof.Trace(w, r)
	default:
		pprof.Handler(name).ServeHTTP(w, r)
	}
	return nil
}
