package web

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/access"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
	"github.com/vnicd/vnicd/device/testutil/testca"
)

// everyPath are paths that exist with the page and profiles, and one that does not.
var everyPath = []string{"/", "/app.js", "/v1/overview", "/metrics", "/healthz", "/debug/pprof/", "/debug/pprof/heap",
	"/none"}

// answerYes is a daemon that answers each question.
func answerYes(_ *query.Query, w *query.Writer) error {
	_, err := io.WriteString(w, "yes")
	return err
}

// rulesFor returns rules with TLS by a new certificate for vnicd.example.
func rulesFor(t *testing.T, ca *testca.CA) access.Rules {
	t.Helper()
	p := ca.Issue(t, "vnicd.example")
	return access.Rules{HTTP2: true, TLS: &access.TLS{Cert: p.Cert, Key: p.Key, Min: tls.VersionTLS12,
		Max: tls.VersionTLS13}}
}

// over makes the client use TLS with config, and HTTP/2 if the server has it.
func (s *stage) over(config *tls.Config) *http.Client {
	transport := &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: config, DisableCompression: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", s.path) }}
	s.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// fetch sends a request; change changes it before.
func fetch(t *testing.T, c *http.Client, url string, change func(*http.Request)) (*http.Response, string, error) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(req)
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp, string(text), err
}

// TestTLS: with TLS all paths are served by HTTP/2 or 1.1, to clients that can TLS 1.2 and trust the certificate. The
// host name is checked as without.
func TestTLS(t *testing.T) {
	ca := testca.New(t)
	for _, http2 := range []bool{true, false} {
		rules := rulesFor(t, ca)
		rules.HTTP2 = http2
		s := newStage(t, Config{Page: true, Profiles: true, Names: []string{"vnicd.example"}, Rules: rules}, answerYes)
		client := s.over(ca.Client(t, "vnicd.example", nil))
		for _, path := range everyPath {
			want := http.StatusOK
			if path == "/none" {
				want = http.StatusNotFound
			}
			resp, text, err := fetch(t, client, "https://vnicd.example"+path, nil)
			if err != nil || resp.StatusCode != want || (resp.ProtoMajor == 2) != http2 ||
				resp.TLS.Version != tls.VersionTLS13 {
				t.Errorf("%s: %v, %+v, %.100q", path, err, resp, text)
			}
			resp, text, err = fetch(t, client, "https://vnicd.example"+path, func(r *http.Request) { r.Host = "evil.example" })
			if err != nil || resp.StatusCode != http.StatusMisdirectedRequest || !strings.Contains(text, "`monitoring.names`") {
				t.Errorf("%s of another host: %v, %+v, %.100q, want 421", path, err, resp, text)
			}
		}
		if resp, text, err := s.get("/metrics"); err != nil || resp.StatusCode != http.StatusBadRequest ||
			!strings.Contains(text, "HTTP request to an HTTPS server") {
			t.Errorf("without TLS: %v, %+v, %.100q", err, resp, text)
		}
	}
	s := newStage(t, Config{Rules: rulesFor(t, ca)}, answerYes)
	for version, ok := range map[uint16]bool{tls.VersionTLS10: false, tls.VersionTLS11: false, tls.VersionTLS12: true,
		tls.VersionTLS13: true} {
		config := ca.Client(t, "vnicd.example", nil)
		config.MinVersion, config.MaxVersion = version, version
		err := handshake(t, s.path, config)
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "protocol version not supported") {
			t.Errorf("%s: %v", tls.VersionName(version), err)
		}
	}
	for name, config := range map[string]*tls.Config{"another name": ca.Client(t, "other.example", nil),
		"another authority": testca.New(t).Client(t, "vnicd.example", nil)} {
		if handshake(t, s.path, config) == nil {
			t.Errorf("a client that expects %s accepts the certificate", name)
		}
	}
}

// handshake makes a connection with TLS, and reads from it: a server of TLS 1.3 refuses a client's certificate after
// the client has ended its handshake.
func handshake(t *testing.T, path string, config *tls.Config) error {
	t.Helper()
	raw, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(raw, config)
	defer c.Close()
	if err := c.Handshake(); err != nil {
		return err
	}
	_, _ = io.WriteString(c, "GET /healthz HTTP/1.0\r\n\r\n") // the server may have refused; then reading says why
	b, err := io.ReadAll(c)
	if err == nil && !strings.HasPrefix(string(b), "HTTP/1.0 200") {
		err = fmt.Errorf("answer %q", b)
	}
	return err
}

// TestClientCertificates: clients need a certificate of the authority, with one of the names, also to resume a session.
func TestClientCertificates(t *testing.T) {
	ca, theirs, foreign := testca.New(t), testca.New(t), testca.New(t)
	rules := rulesFor(t, ca)
	rules.TLS.ClientAuth, rules.TLS.ClientCAs = tls.RequireAndVerifyClientCert, theirs.Cert
	good, bad, nobody := theirs.Issue(t, "prometheus.example", "192.0.2.7"), foreign.Issue(t, "prometheus.example"),
		theirs.Issue(t, "other.example")
	s := newStage(t, Config{Rules: rules}, answerYes)
	try := func(what string, cert *testca.Pair, want string) {
		t.Helper()
		config := ca.Client(t, "vnicd.example", cert)
		config.ClientSessionCache = tls.NewLRUClientSessionCache(1)
		for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			config.MaxVersion = version
			for range 2 {
				err := handshake(t, s.path, config)
				if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("%s, %s: %v, want %q", what, tls.VersionName(version), err, want)
				}
			}
		}
	}
	try("good", &good, "")
	try("without", nil, "tls:")
	try("of another authority", &bad, "tls:")
	try("another name", &nobody, "")
	apply := func(change func(*access.TLS)) {
		t.Helper()
		next := *rules.TLS // the server uses the former one
		change(&next)
		rules.TLS = &next
		if err := s.srv.Apply(rules); err != nil {
			t.Fatal(err)
		}
	}
	for _, san := range []string{"prometheus.example", "192.0.2.7"} {
		apply(func(t *access.TLS) { t.ClientSANs = []string{"x.example", san} })
		try("good with "+san, &good, "")
		try("another name than "+san, &nobody, "tls:")
	}
	// Without an authority nobody has a certificate, and not whoever the system trusts.
	apply(func(t *access.TLS) { t.ClientCAs, t.ClientSANs = nil, nil })
	try("no authority", &good, "tls:")
}

// TestPasswordOfEachPath: with users each path asks for a password, those that do not exist included. Foreign hosts are
// refused before. The headers are in all responses; the page keeps its own policy.
func TestPasswordOfEachPath(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("right"), 4)
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Page: true, Profiles: true, Rules: access.Rules{Users: map[string]string{"alice": string(hash)},
		Headers: map[string]string{"X-Frame-Options": "deny", "Content-Security-Policy": "default-src *"}}}
	asked := make(chan query.Kind, 100)
	s := newStage(t, cfg, func(q *query.Query, w *query.Writer) error {
		asked <- q.Kind
		return answerYes(q, w)
	})
	for _, path := range everyPath {
		for _, x := range []struct {
			name, password string
			host           string
			want           int
		}{
			{"", "", "localhost", 401}, {"alice", "right", "evil.example", 421}, {"", "", "evil.example", 421},
			{"alice", "right", "localhost", 200},
		} {
			if path == "/none" && x.want == 200 {
				x.want = 404
			}
			resp, text, err := fetch(t, &s.client, "http://localhost"+path, func(r *http.Request) {
				if r.Host = x.host; x.name != "" {
					r.SetBasicAuth(x.name, x.password)
				}
			})
			if err != nil || resp.StatusCode != x.want || resp.Header.Get("X-Frame-Options") != "deny" ||
				(resp.Header.Get("WWW-Authenticate") != "") != (x.want == 401) {
				t.Errorf("%s by %+v: %v, %+v, %.100q", path, x, err, resp, text)
			}
			if x.want == 200 && path == "/" && resp.Header.Get("Content-Security-Policy") != policy {
				t.Errorf("policy of the page: %q", resp.Header.Get("Content-Security-Policy"))
			}
			if x.want > 400 && len(asked) > 0 {
				t.Errorf("%s by %+v: the daemon was asked for %v", path, x, <-asked)
			}
		}
		for len(asked) > 0 {
			<-asked
		}
	}
	for _, wrong := range [][2]string{{"alice", "wrong"}, {"bob", "right"}, {"alice", ""}, {"", "right"}} {
		resp, _, err := fetch(t, &s.client, "http://localhost/metrics",
			func(r *http.Request) { r.SetBasicAuth(wrong[0], wrong[1]) })
		if err != nil || resp.StatusCode != http.StatusUnauthorized || len(asked) > 0 {
			t.Errorf("%q: %v, %+v", wrong, err, resp)
		}
	}
	resp, _, err := fetch(t, &s.client, "http://localhost/metrics",
		func(r *http.Request) { r.Header.Set("Authorization", "Bearer right") })
	if err != nil || resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("another scheme: %v, %+v", err, resp)
	}
}

// TestApply: new connections get the new certificate, or TLS at all. A connection that exists goes on, and its requests
// follow the new rules.
func TestApply(t *testing.T) {
	ca := testca.New(t)
	first, second := rulesFor(t, ca), rulesFor(t, ca)
	s := newStage(t, Config{}, answerYes)
	serial := func(c *http.Client) string {
		t.Helper()
		resp, _, err := fetch(t, c, "https://localhost/healthz", nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatal(resp, err)
		}
		return resp.TLS.PeerCertificates[0].SerialNumber.String()
	}
	if resp, _, err := s.get("/healthz"); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp, err)
	}
	apply := func(r access.Rules) {
		t.Helper()
		if err := s.srv.Apply(r); err != nil {
			t.Fatal(err)
		}
	}
	apply(first)
	old := s.over(ca.Client(t, "vnicd.example", nil))
	one := serial(old)
	apply(second)
	if n := serial(old); n != one {
		t.Errorf("a connection changed its certificate from %s to %s", one, n)
	}
	if n := serial(s.over(ca.Client(t, "vnicd.example", nil))); n == one {
		t.Error("a new connection has the old certificate")
	}
	second.Users = map[string]string{"alice": strings.Repeat("x", 60)}
	apply(second)
	if resp, _, err := fetch(t, old, "https://localhost/healthz", nil); err != nil || resp.StatusCode != 401 {
		t.Errorf("the next request on the old connection: %v, %v", resp, err)
	}
	second.TLS = &access.TLS{Cert: []byte("x")}
	if err := s.srv.Apply(second); err == nil || handshake(t, s.path, &tls.Config{InsecureSkipVerify: true}) == nil {
		t.Errorf("rules that cannot be applied: %v; the users of the former ones must stay", err)
	}
}

// TestRate: beyond the rate requests get 429, and are served again later.
func TestRate(t *testing.T) {
	at := time.Unix(0, 0)
	r := rate{now: func() time.Time { return at }}
	for i, x := range []struct {
		after  time.Duration
		burst  int
		served bool
	}{
		{0, 2, true}, {0, 2, true}, {0, 2, false}, {time.Second - 1, 2, false}, {1, 2, true}, {0, 2, false},
		{time.Hour, 2, true}, {0, 2, true}, {0, 2, false}, {0, 3, true}, // a new limit begins anew
	} {
		at = at.Add(x.after)
		if got := r.allow(time.Second, x.burst); got != x.served {
			t.Errorf("%d: %v, want %v", i, got, x.served)
		}
	}
	s := newStage(t, Config{Rules: access.Rules{Interval: time.Hour, Burst: 1}}, answerYes)
	for _, want := range []int{200, 429, 429} {
		if resp, text, err := s.get("/healthz"); err != nil || resp.StatusCode != want {
			t.Errorf("%v, %+v, %q, want %d", err, resp, text, want)
		}
	}
}
