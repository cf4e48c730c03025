package monitoring

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/crypto/bcrypt"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/access"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/web"
	"github.com/vnicd/vnicd/device/testutil/testca"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// secured is a directory with a web configuration file, and a server by it.
type secured struct {
	t    *testing.T
	ca   *testca.CA
	dir  string
	hash string // of "right"
	log  *testlog.Log
	addr string
	net  string
}

// file is the path of the web configuration.
func (s *secured) file() string { return filepath.Join(s.dir, "web.yml") }

// put writes a file of the directory in one step, as tools that renew certificates do.
func (s *secured) put(name string, text []byte) {
	s.t.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		s.t.Fatal(err)
	}
}

// renew makes a new certificate.
func (s *secured) renew() {
	p := s.ca.Issue(s.t, "127.0.0.1", "vnicd.example")
	s.put("cert", p.Cert)
	s.put("key", p.Key)
}

const tlsOnly = "tls_server_config: {cert_file: cert, key_file: key}\n"

func (s *secured) users() string { return "basic_auth_users: {alice: " + s.hash + "}\n" }

func newSecured(t *testing.T) *secured {
	t.Helper()
	hash, err := bcrypt.GenerateFromPassword([]byte("right"), 4)
	if err != nil {
		t.Fatal(err)
	}
	s := &secured{t: t, ca: testca.New(t), dir: t.TempDir(), hash: string(hash), log: &testlog.Log{}}
	s.renew()
	return s
}

// serve starts the server: its real process, and looks at the file in short intervals.
func (s *secured) serve(listen string) {
	s.t.Helper()
	srv, err := serve(config.Monitoring{Listen: listen, WebConfig: s.file(), PProf: true}, newBusy(1), newSpawner(s.t),
		web.Kind.Name, 10*time.Millisecond, hclog.New(&hclog.LoggerOptions{Output: s.log}))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(srv.Close)
	if s.net, s.addr = "tcp", srv.listener.Addr().String(); filepath.IsAbs(listen) {
		s.net, s.addr = "unix", listen
	}
}

// get requests a path on a new connection, with a password if it is not "".
func (s *secured) get(scheme, path, password string) (status int, text string, state *tls.ConnectionState) {
	s.t.Helper()
	c := http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true, ForceAttemptHTTP2: true,
		TLSClientConfig: s.ca.Client(s.t, "127.0.0.1", nil),
		DialContext:     func(context.Context, string, string) (net.Conn, error) { return net.Dial(s.net, s.addr) }}}
	req, err := http.NewRequest("GET", scheme+"://127.0.0.1"+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	if password != "" {
		req.SetBasicAuth("alice", password)
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, err.Error(), nil
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.TLS
}

// serial returns the number of the certificate that new connections get.
func (s *secured) serial() string {
	s.t.Helper()
	status, text, state := s.get("https", "/healthz", "right")
	if status != 200 {
		s.t.Fatalf("%d %.100q", status, text)
	}
	return state.PeerCertificates[0].SerialNumber.String()
}

// checkEnd checks that the metrics have the end of the certificate that new connections get.
func (s *secured) checkEnd() {
	s.t.Helper()
	_, text, state := s.get("https", "/metrics", "right")
	want := fmt.Sprintf("\nvnicd_monitoring_certificate_not_after_timestamp_seconds %v\n",
		float64(state.PeerCertificates[0].NotAfter.Unix()))
	if !strings.Contains(text, want) {
		s.t.Errorf("no %q in the metrics", want)
	}
}

// TestSecured: the process without rights serves TLS and asks for passwords, on TCP and on a unix socket alike. Its
// system calls are enough for that, and the next process does the same.
func TestSecured(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) { // which ends its server: processOf would find that of the other too
			s := newSecured(t)
			s.put("web.yml", []byte(tlsOnly+s.users()))
			listen := "127.0.0.1:0"
			if network == "unix" {
				listen = filepath.Join(s.dir, "mon")
			}
			s.serve(listen)
			pid := 0
			for range 2 {
				s.checkAnswers()
				if pid = processOf(t, pid); syscall.Kill(pid, syscall.SIGKILL) != nil {
					t.Fatal("cannot kill it")
				}
			}
			waitFor(t, "a line about a password", func() bool {
				return strings.Contains(s.log.String(), "wrong user name or password")
			})
			if strings.Contains(s.log.String(), "Basic") {
				t.Errorf("log %s", s.log)
			}
		})
	}
}

// checkAnswers checks the answers to right, wrong and no passwords, and to a request without TLS.
func (s *secured) checkAnswers() {
	s.t.Helper()
	for _, path := range []string{"/metrics", "/healthz", "/debug/pprof/heap", "/none"} {
		want := 200
		if path == "/none" {
			want = 404
		}
		for password, want := range map[string]int{"right": want, "wrong": 401, "": 401} {
			status, text, state := s.get("https", path, password)
			if status != want || state.Version != tls.VersionTLS13 || state.NegotiatedProtocol != "h2" {
				s.t.Errorf("%s with %q: %d %.100q, want %d", path, password, status, text, want)
			}
		}
	}
	if status, text, _ := s.get("http", "/healthz", "right"); status != 400 {
		s.t.Errorf("without TLS: %d %.100q", status, text)
	}
}

// TestRenewal: a renewed certificate and a changed password take effect while the server runs, for the next process
// too. Files with a mistake, and files that demand less, change nothing, and the log says so once.
func TestRenewal(t *testing.T) {
	s := newSecured(t)
	s.put("web.yml", []byte(tlsOnly+s.users()))
	s.serve("127.0.0.1:0")
	now := s.serial()
	renewed := func(what string) {
		t.Helper()
		before := now
		waitFor(t, what, func() bool { now = s.serial(); return now != before })
	}
	s.checkEnd()
	s.ca.Life = 2 * time.Hour
	s.renew()
	renewed("the new certificate")
	s.checkEnd()
	if syscall.Kill(processOf(t, 0), syscall.SIGKILL) != nil {
		t.Fatal("cannot kill it")
	}
	if n := s.serial(); n != now {
		t.Errorf("the next process has certificate %s, want %s", n, now)
	}

	key, err := os.ReadFile(filepath.Join(s.dir, "key"))
	if err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct{ file, text, want string }{
		"not YAML":      {"web.yml", "tls_server_config: {", "web.yml:1: not YAML"},
		"a mistake":     {"web.yml", tlsOnly + "basic_auth_users: {alice: right}", "want a bcrypt hash"},
		"truncated":     {"web.yml", "", "web.yml is empty"},
		"no TLS":        {"web.yml", s.users(), "web.yml demands no TLS any more"},
		"no passwords":  {"web.yml", tlsOnly, "web.yml demands no passwords any more"},
		"another's key": {"key", string(s.ca.Issue(t, "x").Key), "private key does not match public key"},
		"half a key":    {"key", string(key[:len(key)/2]), "failed to find any PEM data"},
	} {
		s.put(x.file, []byte(x.text))
		waitFor(t, "the log about "+name, func() bool { return strings.Contains(s.log.String(), x.want) })
		if n := s.serial(); n != now {
			t.Errorf("%s: certificate %s, want %s", name, n, now)
		}
		if status, text, _ := s.get("https", "/metrics", "wrong"); status != 401 {
			t.Errorf("%s: wrong password: %d %.100q", name, status, text)
		}
		waitFor(t, "some looks", s.looked())
		if n := strings.Count(s.log.String(), x.want); n != 1 {
			t.Errorf("%s: reported %d times", name, n)
		}
		s.put("web.yml", []byte(tlsOnly+s.users()))
		s.put("key", key)
		waitFor(t, "the log about the end of "+name, func() bool {
			at := strings.LastIndex(s.log.String(), x.want)
			return strings.Contains(s.log.String()[at:], "web configuration is the one in force again")
		})
	}
	if strings.Contains(s.log.String(), s.hash[7:]) {
		t.Error("the log has the hash")
	}

	s.renew()
	renewed("a certificate after mistakes")
	hash, err := bcrypt.GenerateFromPassword([]byte("newer"), 4)
	if err != nil {
		t.Fatal(err)
	}
	s.put("web.yml", fmt.Appendf(nil, "%sbasic_auth_users: {alice: %s}\n", tlsOnly, hash))
	waitFor(t, "the new password", func() bool {
		status, _, _ := s.get("https", "/metrics", "newer")
		return status == 200
	})
	if status, _, _ := s.get("https", "/metrics", "right"); status != 401 {
		t.Errorf("the old password: %d", status)
	}
}

// looked returns a function that is true once the file must have been looked at several times.
func (s *secured) looked() func() bool {
	end := time.Now().Add(100 * time.Millisecond) // for what must not happen
	return func() bool { return time.Now().After(end) }
}

// TestUnsettled: files that differ from one look to the next, as while they are written, neither take effect nor are
// they mistakes.
func TestUnsettled(t *testing.T) {
	s := newSecured(t)
	s.put("web.yml", []byte(tlsOnly+s.users()))
	applied := 0
	f := newRuleFile(s.file(), "", func(*access.Rules) error { applied++; return nil }, s.log.Logger())
	if err := f.first(); err != nil || applied != 1 {
		t.Fatal(applied, err)
	}
	f.look()
	pair := s.ca.Issue(t, "vnicd.example")
	s.put("key", pair.Key)
	f.look()
	s.put("cert", pair.Cert)
	f.look()
	if applied != 1 || s.log.String() != "" {
		t.Errorf("applied %d times; log: %s", applied, s.log)
	}
	f.look()
	f.look()
	if applied != 2 || string(f.inForce.TLS.Cert) != string(pair.Cert) ||
		strings.Count(s.log.String(), "web configuration applied") != 1 {
		t.Errorf("applied %d times; log: %s", applied, s.log)
	}
}

// TestRulesAtStart: the server does not start with a mistake. It warns of passwords in clear text where others may read
// them.
func TestRulesAtStart(t *testing.T) {
	s := newSecured(t)
	for _, x := range []struct{ listen, text, err, warning string }{
		{"127.0.0.1:9469", s.users(), "", ""}, {"/run/x", s.users(), "", ""}, {"[::1]:9469", s.users(), "", ""},
		{"localhost:9469", s.users(), "", ""}, {"0.0.0.0:9469", tlsOnly + s.users(), "", ""},
		{"0.0.0.0:9469", s.users(), "", "clear text"}, {":9469", s.users(), "", "clear text"},
		{"host1:9469", s.users(), "", "clear text"},
		{"127.0.0.1:9469", "basic_auth_users: {a: b}", `web.yml:1: the password of "a"`, ""},
	} {
		s.put("web.yml", []byte(x.text))
		log := &testlog.Log{}
		err := newRuleFile(s.file(), x.listen, func(*access.Rules) error { return nil }, log.Logger()).first()
		if (err == nil) != (x.err == "") || err != nil && !strings.Contains(err.Error(), x.err) ||
			(log.String() == "") != (x.warning == "") || !strings.Contains(log.String(), x.warning) {
			t.Errorf("%s, %.30q: %v, log %q", x.listen, x.text, err, log)
		}
	}
	if _, err := Serve(config.Monitoring{Listen: "127.0.0.1:0", WebConfig: s.file()}, stuck{}, nil,
		s.log.Logger()); err == nil || !strings.Contains(err.Error(), "monitoring: "+s.file()+":1: ") {
		t.Errorf("a server with mistakes: %v", err)
	}
}
