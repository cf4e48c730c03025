package web

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stage is a server and the daemon that it asks.
type stage struct {
	t      *testing.T
	client http.Client
	slots  []net.Conn // the daemon's ends
	served chan error
	srv    *Server
	path   string // of the listening socket
	// instead, if set, is called for a question, after which the daemon's side of the slot ends.
	instead func(*query.Query)
}

// newStage starts a server; answer is called for each question, in any goroutine.
func newStage(t *testing.T, cfg Config, answer func(*query.Query, *query.Writer) error) *stage {
	t.Helper()
	return startStage(t, cfg, answer, func(*http.Server) {})
}

// startStage is newStage; change changes the server before it serves.
func startStage(t *testing.T, cfg Config, answer func(*query.Query, *query.Writer) error,
	change func(*http.Server)) *stage {
	t.Helper()
	s := &stage{t: t, served: make(chan error, 1)}
	var theirs []net.Conn
	var daemon sync.WaitGroup
	for range query.Slots(cfg.Page, cfg.Profiles) {
		a, b := pair(t)
		s.slots, theirs = append(s.slots, a), append(theirs, b)
		daemon.Go(func() { s.serve(a, answer) })
	}
	path := filepath.Join(t.TempDir(), "web")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv, err := New(cfg, theirs, hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	s.srv, s.path = srv, path
	change(srv.srv)
	go func() { s.served <- srv.Serve(l) }()
	t.Cleanup(func() {
		srv.Close()
		if err, ok := <-s.served; ok && err != nil {
			t.Error(err)
		}
		daemon.Wait()
	})
	s.client.Transport = &http.Transport{DisableKeepAlives: true, DisableCompression: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", path) }}
	return s
}

// pair makes a socket pair.
func pair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	return conns[0], conns[1]
}

// serve is the daemon's side of a slot.
func (s *stage) serve(conn net.Conn, answer func(*query.Query, *query.Writer) error) {
	defer conn.Close()
	b := make([]byte, query.Size)
	for {
		if _, err := io.ReadFull(conn, b); err != nil {
			return
		}
		q, err := query.Parse(b)
		if err != nil {
			return
		}
		if s.instead != nil {
			s.instead(&q)
			return
		}
		w := query.NewWriter(conn, time.Minute)
		if w.Close(answer(&q, w)) != nil {
			return
		}
	}
}

// get returns the response, closed, and its text.
func (s *stage) get(path string, header ...string) (*http.Response, string, error) {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp, string(text), err
}

// Arguments of requests become questions; mistakes do not reach the daemon.
func TestQuestions(t *testing.T) {
	var mu sync.Mutex
	var asked []query.Query
	s := newStage(t, Config{Page: true, Profiles: true}, func(q *query.Query, w *query.Writer) error {
		mu.Lock()
		asked = append(asked, *q)
		mu.Unlock()
		_, err := io.WriteString(w, "yes")
		return err
	})
	profile := func(name string) uint8 {
		for i, p := range query.Profiles {
			if p == name {
				return uint8(i)
			}
		}
		t.Fatal(name)
		return 0
	}
	for _, x := range []struct {
		path   string
		status int
		want   *query.Query
	}{
		{"/metrics", 200, &query.Query{Kind: query.Metrics}},
		{"/metrics/", 404, nil},
		{"/healthz", 200, &query.Query{Kind: query.Health}},
		{"/v1/overview", 200, &query.Query{Kind: query.Overview}},
		{"/v1/overview?since=18446744073709551615&vm=one", 200,
			&query.Query{Kind: query.Overview, Since: 1<<64 - 1, VM: "one"}},
		{"/v1/overview?vm=" + strings.Repeat("x", query.MaxVM), 200,
			&query.Query{Kind: query.Overview, VM: strings.Repeat("x", query.MaxVM)}},
		{"/v1/overview?vm=" + strings.Repeat("x", query.MaxVM+1), 200, &query.Query{Kind: query.Overview}},
		{"/v1/overview?since=18446744073709551616", 400, nil},
		{"/v1/overview?since=-1", 400, nil},
		{"/debug/pprof/", 200, nil},
		{"/debug/pprof/goroutine?debug=2", 200,
			&query.Query{Kind: query.Profile, Profile: profile("goroutine"), Debug: 2}},
		{"/debug/pprof/heap?gc=1", 200, &query.Query{Kind: query.Profile, Profile: profile("heap"), GC: true}},
		{"/debug/pprof/trace?seconds=0.5", 200, &query.Query{Kind: query.Profile, Profile: profile("trace"), Seconds: 1}},
		{"/debug/pprof/profile?seconds=120", 200,
			&query.Query{Kind: query.Profile, Profile: profile("profile"), Seconds: 120}},
		{"/debug/pprof/profile?seconds=121", 400, nil},
		{"/debug/pprof/profile?seconds=NaN", 400, nil},
		{"/debug/pprof/heap?debug=3", 400, nil},
		{"/debug/pprof/heap?gc=yes", 400, nil},
		{"/debug/pprof/none", 404, nil},
		{"/debug/pprof/heap/x", 404, nil},
	} {
		asked = nil
		resp, text, err := s.get(x.path)
		if err != nil || resp.StatusCode != x.status {
			t.Errorf("%s: %v %v %.100q, want %d", x.path, err, resp, text, x.status)
		}
		mu.Lock()
		if x.want == nil && len(asked) > 0 || x.want != nil && (len(asked) != 1 || asked[0] != *x.want || text != "yes") {
			t.Errorf("%s: asked %+v, want %+v", x.path, asked, x.want)
		}
		mu.Unlock()
	}
}

// The status, the type and the text are the daemon's; what it cannot complete, the client does not take for complete.
func TestAnswers(t *testing.T) {
	why := errors.New("no more")
	text := strings.Repeat("0123456789", 20_000)
	var given error
	status := http.StatusOK
	s := newStage(t, Config{}, func(_ *query.Query, w *query.Writer) error {
		w.Header().Set("Content-Type", "text/x-test")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text)
		return given
	})
	for _, encoding := range []string{"", "identity", "gzip", "br, gzip;q=0.5", "gzip;q=0"} {
		resp, got, err := s.get("/metrics", "Accept-Encoding", encoding)
		if err != nil || resp.Header.Get("Content-Type") != "text/x-test" {
			t.Fatalf("%v, %+v", err, resp)
		}
		zipped := resp.Header.Get("Content-Encoding") == "gzip"
		if want := strings.Contains(encoding, "gzip") && encoding != "gzip;q=0"; zipped != want ||
			!zipped && got != text || zipped && len(got) > len(text)/10 {
			t.Errorf("%q: compressed %v, %d bytes", encoding, zipped, len(got))
		}
	}
	status = http.StatusServiceUnavailable
	if resp, got, err := s.get("/healthz"); err != nil || resp.StatusCode != status || got != text {
		t.Errorf("%v, %+v, %d bytes", err, resp, len(got))
	}
	given = why
	if _, got, err := s.get("/healthz"); err == nil {
		t.Errorf("an answer that is not complete: %d bytes without an error", len(got))
	}
	given = nil
	if _, got, err := s.get("/healthz"); err != nil || got != text {
		t.Errorf("the next one: %v, %d bytes", err, len(got))
	}
}

// A client that does not read its answer holds one slot of that kind. Further requests are refused once all are in use,
// and served again when the clients have gone.
func TestSlowClients(t *testing.T) {
	s := newStage(t, Config{}, func(q *query.Query, w *query.Writer) error {
		if q.Kind == query.Metrics {
			for range 2000 {
				if _, err := w.Write(make([]byte, 32<<10)); err != nil {
					return nil
				}
			}
		}
		return nil
	})
	var slow []io.Closer
	for range 2 {
		resp, err := s.client.Get("http://localhost/metrics")
		if err != nil {
			t.Fatal(err)
		}
		slow = append(slow, resp.Body)
	}
	resp, text, err := s.get("/metrics")
	if err != nil || resp.StatusCode != 503 || !strings.Contains(text, "2 requests") {
		t.Errorf("a third request: %v %v %.100q", err, resp, text)
	}
	if resp, _, err := s.get("/healthz"); err != nil || resp.StatusCode != 200 {
		t.Errorf("the health check: %v %v", err, resp)
	}
	for _, c := range slow {
		_ = c.Close()
	}
	if resp, text, err := s.get("/metrics"); err != nil || resp.StatusCode != 200 || len(text) != 2000*32<<10 {
		t.Errorf("when they have gone: %v %v, %d bytes", err, resp, len(text))
	}
}

// The server ends when the daemon has, or answers what is no answer; requests in progress end.
func TestDaemonEnds(t *testing.T) {
	for _, text := range []string{"", "\x02\x00", "\xff\xff\xff\xff", "\x00\x00\x00\x00", "\x03\x00\x00\x00\x00\x00x",
		"\x03\x00\x00\x00\xc8\x00x\xfe\xff\xff\xff", "\x03\x00\x00\x00\xc8\x00x\x04\x00\x00\x00yes"} {
		s := newStage(t, Config{}, func(_ *query.Query, _ *query.Writer) error { return nil })
		health := s.slots[2]
		s.instead = func(q *query.Query) {
			_, _ = io.WriteString(health, text)
			_ = health.Close()
		}
		if resp, got, err := s.get("/healthz"); err == nil && resp.StatusCode == 200 {
			t.Errorf("%q: answered %q", text, got)
		}
		if err := <-s.served; err == nil || !strings.Contains(err.Error(), "connection with the daemon, for health") {
			t.Errorf("%q: it ended with %v", text, err)
		}
		close(s.served)
	}
}
