package monitoring

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// asHost sends a request as a browser does that reached this server by a name.
func (s *stage) asHost(method, path, host string) (status int, text string) {
	s.t.Helper()
	req, err := http.NewRequest(method, "http://vnicd"+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Host = host
	resp, err := s.client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// DNS rebinding: a foreign page makes its own name resolve to this server's address, and its script asks this server
// for everything, as same-origin. No path answers, whether it exists or not; the answer names the key that would allow
// it.
func TestForeignHost(t *testing.T) {
	s := makeStage(t, "pprof: true, page: true, names: [Monitor.example, vnicd-1]")
	for _, path := range []string{"/", "/app.js", "/v1/overview", "/metrics", "/healthz", "/debug/pprof/",
		"/debug/pprof/cmdline", "/debug/pprof/goroutine", "/debug/pprof/symbol", "/none"} {
		for _, method := range []string{"GET", "HEAD", "POST"} {
			for _, host := range []string{"evil.example", "evil.example:9469", "127.0.0.1.evil.example", "xlocalhost",
				"monitor.example.evil.example", "127.1"} {
				status, text := s.asHost(method, path, host)
				if status != http.StatusMisdirectedRequest || method != "HEAD" && !strings.Contains(text, "`monitoring.names`") {
					t.Errorf("%s %s as %q: %d %.100q, want 421", method, path, host, status, text)
				}
			}
		}
	}
	for _, host := range []string{"127.0.0.1:9469", "[::1]:9469", "[fe80::1]", "localhost", "LOCALHOST:80",
		"monitor.example", "MONITOR.example:9469", "vnicd-1"} {
		for path, want := range map[string]int{"/": 200, "/metrics": 200, "/healthz": 200, "/debug/pprof/cmdline": 200,
			"/none": 404} {
			if status, text := s.asHost("GET", path, host); status != want {
				t.Errorf("%s as %q: %d %.100q, want %d", path, host, status, text, want)
			}
		}
	}
}
