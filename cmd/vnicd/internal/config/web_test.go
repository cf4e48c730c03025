package config

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil/testca"
)

const aHash = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"

// webFiles makes a directory with certificates, and files in states that are refused.
func webFiles(t *testing.T) (dir string, server, other testca.Pair, ca *testca.CA) {
	t.Helper()
	dir, ca = t.TempDir(), testca.New(t)
	server, other = ca.Issue(t, "vnicd.example"), ca.Issue(t, "other.example")
	for name, x := range map[string]struct {
		data []byte
		mode os.FileMode
	}{
		"cert": {server.Cert, 0o644}, "key": {server.Key, 0o640}, "other.key": {other.Key, 0o600}, "ca": {ca.Cert, 0o444},
		"open.key": {server.Key, 0o644}, "group.key": {server.Key, 0o660}, "writable": {ca.Cert, 0o666},
		"large": {make([]byte, maxWebFile+1), 0o644}, "empty": {nil, 0o600},
	} {
		put(t, filepath.Join(dir, name), string(x.data), x.mode)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir, server, other, ca
}

// put writes a file with a mode, whatever the umask.
func put(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func TestLoadWeb(t *testing.T) {
	dir, server, _, ca := webFiles(t)
	path := filepath.Join(dir, "web.yml")
	put(t, path, `
tls_server_config:
  cert_file: cert
  key_file: `+dir+`/key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ./ca
  client_allowed_sans: [prometheus.example, 192.0.2.1]
  min_version: TLS12
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: true
  curve_preferences: [X25519, CurveP256, CurveP384, CurveP521]
http_server_config:
  http2: false
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: deny
    X-Content-Type-Options: nosniff
    X-XSS-Protection: ""
rate_limit: {interval: 100ms, burst: 20}
basic_auth_users:
  alice: `+aHash+`
  b: "`+aHash+`"
`, 0o640)
	r, err := LoadWeb(path)
	if err != nil {
		t.Fatal(err)
	}
	x := r.TLS
	if string(x.Cert) != string(server.Cert) || string(x.Key) != string(server.Key) ||
		string(x.ClientCAs) != string(ca.Cert) ||
		x.ClientAuth != tls.RequireAndVerifyClientCert || len(x.ClientSANs) != 2 || x.Min != tls.VersionTLS12 ||
		x.Max != tls.VersionTLS13 || len(x.CipherSuites) != 2 ||
		!reflect.DeepEqual(x.Curves, []tls.CurveID{tls.X25519, tls.CurveP256, tls.CurveP384, tls.CurveP521}) {
		t.Errorf("TLS %+v", x)
	}
	if r.HTTP2 || len(r.Headers) != 3 || r.Headers["X-Frame-Options"] != "deny" || r.Interval != 100*time.Millisecond ||
		r.Burst != 20 || !reflect.DeepEqual(r.Users, map[string]string{"alice": aHash, "b": aHash}) {
		t.Errorf("%+v", r)
	}

	// Texts in the file, and defaults.
	indent := func(b []byte) string {
		return "|\n    " + strings.ReplaceAll(strings.TrimSpace(string(b)), "\n", "\n    ")
	}
	put(t, path, "tls_server_config:\n  cert: "+indent(server.Cert)+"\n  key: "+indent(server.Key)+"\n  client_ca: "+
		indent(ca.Cert)+"\n  client_auth_type: VerifyClientCertIfGiven\n  key_file: \"\"\n", 0o600)
	if r, err = LoadWeb(path); err != nil {
		t.Fatal(err)
	}
	if c, err := r.Config(); err != nil || !r.HTTP2 || c.MinVersion != tls.VersionTLS12 || c.ClientCAs == nil ||
		len(r.Users) != 0 || r.Interval != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	// Without secrets everybody may read it.
	put(t, path, "http_server_config: {headers: {X-Frame-Options: sameorigin}}\n", 0o644)
	if r, err := LoadWeb(path); err != nil || r.TLS != nil {
		t.Errorf("%+v, %v", r, err)
	}
}

// Each mistake is reported with its line and key, and what was expected; no message has a hash or a key.
func TestWebMistakes(t *testing.T) {
	dir, server, other, _ := webFiles(t)
	path := filepath.Join(dir, "web.yml")
	pair := "tls_server_config:\n  cert_file: cert\n  key_file: key\n"
	for _, x := range []struct{ name, text, key, want string }{
		{"empty", "# nothing\n", "", "web.yml is empty: it needs `tls_server_config` or `basic_auth_users`"},
		{"empty mapping", "{}", "", "is empty"},
		{"not YAML", "a: [", "", "web.yml:1: not YAML"},
		{"no mapping", "junk", "", "the web configuration must be a mapping"},
		{"two documents", pair + "---\n" + pair, "", "one YAML document"},
		{"unknown", "tls_config: {}", "tls_config",
			`web.yml:1: unknown key "tls_config" in the web configuration; known: basic_auth_users, http_server_config`},
		{"unknown in TLS", pair + "  cert_filse: x\n", "tls_server_config.cert_filse",
			`web.yml:4: unknown key "cert_filse" in tls_`},
		{"twice", pair + "  key_file: key\n", "tls_server_config.key_file", `web.yml:4: key "key_file" is there twice`},

		{"TLS without all", "tls_server_config:\n", "tls_server_config", "tls_server_config must be a mapping of keys"},
		{"no certificate", "tls_server_config: {key_file: key}", "tls_server_config", "tls_server_config needs `cert_file`"},
		{"no key", "tls_server_config: {cert_file: cert, key_file: \"\"}", "tls_server_config",
			"tls_server_config needs `key_file`"},
		{"both", pair + "  cert: x\n", "tls_server_config.cert", "web.yml:4: cert and cert_file exclude each other"},
		{"missing", "tls_server_config: {cert_file: none, key_file: key}", "tls_server_config.cert_file",
			"web.yml:1: cert_file: cannot read it: open " + dir + "/none: no such file"},
		{"directory", "tls_server_config: {cert_file: ., key_file: key}", "tls_server_config.cert_file",
			"must be a regular file"},
		{"FIFO", "tls_server_config: {cert_file: fifo, key_file: key}", "tls_server_config.cert_file",
			"must be a regular file"},
		{"large", "tls_server_config: {cert_file: large, key_file: key}", "tls_server_config.cert_file",
			"large must have at most 262144 bytes"},
		{"no PEM", "tls_server_config: {cert_file: empty, key_file: key}", "tls_server_config.cert_file",
			"web.yml:1: certificate and key: tls: failed to find any PEM data"},
		{"other key", "tls_server_config:\n  cert_file: cert\n  key_file: other.key\n", "tls_server_config.cert_file",
			"web.yml:2: certificate and key: tls: private key does not match public key"},
		{"swapped", "tls_server_config: {cert_file: key, key_file: cert}", "tls_server_config.key_file",
			"key_file: everybody can read " + dir + "/cert (mode 0644): chmod o-r it, and make a new key"},
		{"key for all", "tls_server_config: {cert_file: cert, key_file: open.key}", "tls_server_config.key_file",
			"everybody can read " + dir + "/open.key"},
		{"key of a group", "tls_server_config: {cert_file: cert, key_file: group.key}", "tls_server_config.key_file",
			"others than its owner may write to " + dir + "/group.key (mode 0660): chmod go-w it"},
		{"key as path", "tls_server_config:\n  cert_file: cert\n  key_file: |\n    " +
			strings.ReplaceAll(string(server.Key), "\n", "\n    "), "tls_server_config.key_file", "belongs under `key`"},
		{"key as section", "tls_server_config: |\n    " + strings.ReplaceAll(string(server.Key), "\n", "\n    "),
			"tls_server_config", "tls_server_config must be a mapping"},

		{"client CA writable", pair + "  client_ca_file: writable\n  client_auth_type: RequireAndVerifyClientCert\n",
			"tls_server_config.client_ca_file", "web.yml:4: client_ca_file: others than its owner may write"},
		{"client CA empty", pair + "  client_ca_file: empty\n  client_auth_type: RequireAndVerifyClientCert\n",
			"tls_server_config.client_ca_file", "web.yml:4: the certificates of client_ca: no certificate in PEM was found"},
		{"client CA alone", pair + "  client_ca_file: ca\n", "tls_server_config.client_ca_file",
			"web.yml:4: a client_ca has no effect without `client_auth_type`"},
		{"no client CA", pair + "  client_auth_type: RequireAndVerifyClientCert\n", "tls_server_config.client_auth_type",
			"web.yml:4: client_auth_type needs `client_ca_file`"},
		{"client_auth_type", pair + "  client_auth_type: Require\n", "tls_server_config.client_auth_type",
			"web.yml:4: client_auth_type must be one of NoClientCert, RequestClientCert, Require"},

		{"unproved names", pair + "  client_ca_file: ca\n  client_auth_type: VerifyClientCertIfGiven\n" +
			"  client_allowed_sans: [a]\n",
			"tls_server_config.client_allowed_sans", "web.yml:6: client_allowed_sans needs `client_auth_type: RequireAnd"},
		{"old TLS", pair + "  min_version: TLS11\n", "tls_server_config.min_version",
			`web.yml:4: min_version must be TLS12 or TLS13, older versions are insecure; found "TLS11"`},
		{"versions", pair + "  min_version: TLS13\n  max_version: TLS12\n", "tls_server_config.max_version",
			"web.yml:5: max_version must not be below min_version"},
		{"cipher", pair + "  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]\n", "tls_server_config.cipher_suites[0]",
			"web.yml:4: an element of cipher_suites must be one of TLS_"},
		{"HTTP/2 cipher", pair + "  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]\n",
			"tls_server_config.cipher_suites",
			"web.yml:4: cipher_suites must have TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"},
		{"curve", pair + "  curve_preferences: [CurveP257]\n", "tls_server_config.curve_preferences[0]",
			"must be one of CurveP256"},

		{"header", "http_server_config: {headers: {Content-Type: foo}}", "http_server_config.headers.Content-Type",
			`unknown key "Content-Type" in headers`},
		{"sniff", "http_server_config: {headers: {X-Content-Type-Options: sniff}}",
			"http_server_config.headers.X-Content-Type-Options", `must be nosniff, found "sniff"`},
		{"frames", "http_server_config: {headers: {X-Frame-Options: foo}}", "http_server_config.headers.X-Frame-Options",
			"must be deny or sameorigin"},
		{"control character", "http_server_config: {headers: {X-XSS-Protection: \"a\\r\\nSet-Cookie: b\"}}",
			"http_server_config.headers.X-XSS-Protection", "must be printable ASCII"},
		{"http2", "http_server_config: {http2: maybe}", "http_server_config.http2", "http2 must be true or false"},
		{"no burst", "rate_limit: {interval: 1s}", "rate_limit", "web.yml:1: rate_limit needs `burst`"},
		{"interval", "rate_limit: {interval: 5, burst: 1}", "rate_limit.interval", "interval must be a duration"},

		{"no users", "basic_auth_users:\n", "basic_auth_users", "basic_auth_users must be a mapping of users to hashes"},
		{"user list", "basic_auth_users:\n  - \"alice:" + aHash + "\"\n", "basic_auth_users",
			"must be a mapping of users to hashes"},
		{"htpasswd", "basic_auth_users: \"alice:" + aHash + "\"\n", "basic_auth_users",
			"must be a mapping of users to hashes"},
		{"colon", "basic_auth_users: {\"alice:" + aHash + "\": x}\n", "", "must have a name, without colon"},
		{"no hash", "basic_auth_users:\n  alice: secret\n", "basic_auth_users.alice",
			`web.yml:2: the password of "alice": want a bcrypt hash, as ` + "`htpasswd -nBC 10 USER`"},
		{"no value", "basic_auth_users:\n  alice:\n", "basic_auth_users.alice", `the password of "alice" needs a value`},
		{"cost", "basic_auth_users:\n  alice: " + strings.Replace(aHash, "$10$", "$18$", 1) + "\n", "basic_auth_users.alice",
			"the hash has cost 18: each check would take seconds; want at most 14"},
		{"user twice", "basic_auth_users: {a: " + aHash + ", a: " + aHash + "}", "basic_auth_users.a",
			`user "a" is there twice`},
	} {
		put(t, path, x.text, 0o600)
		r, err := LoadWeb(path)
		if err == nil {
			t.Errorf("%s: accepted: %+v", x.name, r)
			continue
		}
		if !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s:\n%v\nwant it to contain:\n%s", x.name, err, x.want)
		}
		if e := err.(*Errors).List()[0]; x.key != "" && e.Key != x.key {
			t.Errorf("%s: key %q, want %q", x.name, e.Key, x.key)
		}
		for _, secret := range []string{aHash[7:], "secret", string(server.Key[30:50]), string(other.Key[30:50])} {
			if strings.Contains(err.Error(), secret) {
				t.Errorf("%s: the message has a secret: %v", x.name, err)
			}
		}
	}
}

// The documented example is one.
func TestWebExample(t *testing.T) {
	dir, server, _, ca := webFiles(t)
	text, err := os.ReadFile(filepath.Join(root, "docs/configuration.md"))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```yml\n(# /etc/vnicd/web.yml.*?)```").FindSubmatch(text)
	if m == nil {
		t.Fatal("docs/configuration.md has no web.yml")
	}
	for name, data := range map[string][]byte{"web.yml": m[1], "host1.crt": server.Cert, "host1.key": server.Key,
		"monitoring-ca.crt": ca.Cert} {
		put(t, filepath.Join(dir, name), string(data), 0o640)
	}
	if r, err := LoadWeb(filepath.Join(dir, "web.yml")); err != nil || r.TLS == nil || len(r.Users) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

// Others may not write to the file, and not read hashes. What concerns the file as a whole is reported at the key that
// names it; Load leaves the file alone.
func TestWebConfigKey(t *testing.T) {
	dir, _, _, _ := webFiles(t)
	path, main := filepath.Join(dir, "web.yml"), filepath.Join(dir, "vnicd.yaml")
	put(t, main, "networks: [{name: n, vni: 1}]\nmonitoring:\n  listen: /run/m\n  web-config: "+path+"\n", 0o644)
	users := "basic_auth_users: {a: " + aHash + "}\n"
	for _, x := range []struct {
		text, want string
		mode       os.FileMode
	}{
		{users, "", 0o640}, {users, "", 0o400},
		{users,
			main + ":4: monitoring web-config: others than its owner may write to " + path + " (mode 0620): chmod go-w it",
			0o620},
		{users, main + ":4: monitoring web-config: others than its owner may write", 0o602},
		{users,
			main + ":4: monitoring web-config: everybody can read " + path + ", which has a key or hashes of passwords", 0o644},
		{"basic_auth_users: {a: b}", path + `:1: the password of "a": want a bcrypt hash`, 0o600},
		{"", main + ":4: monitoring web-config: " + path + " is empty", 0o600},
	} {
		put(t, path, x.text, x.mode)
		c, err := Load(main)
		if err != nil || c.Monitoring.WebConfig != path {
			t.Fatalf("%+v, %v", c, err)
		}
		if err = c.CheckFiles(); (err == nil) != (x.want == "") || err != nil && !strings.HasPrefix(err.Error(), x.want) {
			t.Errorf("%v\nwant\n%s", err, x.want)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	c, err := Load(main)
	if err != nil {
		t.Fatal(err)
	}
	err = c.CheckFiles()
	want := main + ":4: monitoring web-config: cannot read it: open " + path
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v\nwant\n%s", err, want)
	}
	if c, err = Parse("x.yaml", []byte("monitoring: {listen: /x, web-config: web.yml}")); err == nil ||
		!strings.Contains(err.Error(), `x.yaml:1: monitoring web-config must be an absolute path, found "web.yml"`) {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err = Parse("x.yaml", []byte("monitoring: {listen: /x}")); err != nil || c.CheckFiles() != nil {
		t.Errorf("without a file: %v", err)
	}
}
