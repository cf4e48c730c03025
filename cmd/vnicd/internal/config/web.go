package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/access"
)

// The web configuration file, which monitoring.web-config names. Its format is that of package web in
// github.com/prometheus/exporter-toolkit, v0.20.0. LoadWeb is stricter where that would serve without the protection
// which the file seems to give, or fail with each client; docs/configuration.md lists the differences.

// maxWebFile bounds that file and each one that it names.
const maxWebFile = 256 << 10

// CheckFiles checks the files that the configuration names and that Load leaves to those who need them: commands that
// only look for a socket may not be able to read them. The error is *Errors.
func (c *Config) CheckFiles() error {
	if c.Monitoring.WebConfig == "" {
		return nil
	}
	_, err := LoadWeb(c.Monitoring.WebConfig)
	var e *Errors
	if !errors.As(err, &e) {
		return err
	}
	e.Files = slices.Concat(c.Files, e.Files)
	for i, x := range e.list {
		if x.Line == 0 { // the file as a whole
			e.list[i] = Error{c.place("monitoring.web-config"), "monitoring web-config: " + x.Msg}
		}
	}
	return e
}

// LoadWeb reads and checks a web configuration file and the files that it names. The error is *Errors.
func LoadWeb(path string) (*access.Rules, error) {
	w := webParser{parser: newParser(), dir: filepath.Dir(path), nodes: map[string]*yaml.Node{}}
	w.errs.Files = []string{path}
	r := &access.Rules{HTTP2: true}
	whole := func(format string, args ...any) { w.errs.add(Place{File: path}, format, args...) }
	var mode fs.FileMode
	data, err := readRegular("it", path, maxWebFile, func(m fs.FileMode) error {
		mode = m
		return unchangedByOthers(path, m)
	})
	if err != nil {
		whole("%v", err)
		return nil, w.errs.orNil()
	}
	switch n := w.decode(source{path, data}); {
	case n != nil && (n.Kind != yaml.MappingNode || len(n.Content) > 0):
		w.section(n, w.top(r))
		w.check(r)
	case len(w.errs.list) == 0:
		whole("%s is empty: it needs `tls_server_config` or `basic_auth_users`; without them omit the key", path)
	}
	if mode&0o004 != 0 && (w.hasKey || len(r.Users) > 0) {
		whole("everybody can read %s, which has a key or hashes of passwords (mode %#o): chmod o-r it", path, mode)
	}
	if err := w.errs.orNil(); err != nil {
		return nil, err
	}
	return r, nil
}

// unchangedByOthers refuses a file that others than its owner may write to.
func unchangedByOthers(path string, m fs.FileMode) error {
	if m&0o022 != 0 {
		return fmt.Errorf("others than its owner may write to %s (mode %#o): chmod go-w it", path, m)
	}
	return nil
}

// webParser reads a web configuration file.
type webParser struct {
	*parser
	dir    string                // of the file, which paths are relative to
	hasKey bool                  // the file itself has a private key
	nodes  map[string]*yaml.Node // of keys that check may have to name, by the path of the key
}

// section reads a mapping. If n is none, the message does not have its value, which may be a misplaced key or hash.
func (w *webParser) section(n *yaml.Node, o object) bool {
	if n = resolve(n); n.Kind != yaml.MappingNode {
		w.fail(n, "%s must be a mapping of keys", o.what)
		return false
	}
	w.mapping(n, o)
	return true
}

// note wraps a field so that failAt finds its node.
func (w *webParser) note(f field) field {
	return field{func(n *yaml.Node) {
		w.nodes[w.key] = n
		f.read(n)
	}, f.is}
}

// failAt reports a mistake in the first of keys that the file has.
func (w *webParser) failAt(keys []string, format string, args ...any) {
	for _, k := range keys {
		if n := w.nodes[k]; n != nil {
			w.under(k, func() { w.fail(n, format, args...) })
			return
		}
	}
}

const tlsSection = "tls_server_config"

func (w *webParser) top(r *access.Rules) object {
	r.Headers = map[string]string{}
	return object{what: "the web configuration", keys: map[string]field{
		tlsSection: w.note(field{read: func(n *yaml.Node) { w.tls(n, r) }}),
		"http_server_config": {read: func(n *yaml.Node) {
			w.section(n, object{what: "http_server_config", keys: map[string]field{
				"http2":   w.boolean("http2", &r.HTTP2),
				"headers": {read: func(n *yaml.Node) { w.section(n, w.headers(r)) }},
			}})
		}},
		"rate_limit": w.note(field{read: func(n *yaml.Node) {
			w.section(n, object{what: "rate_limit", keys: map[string]field{
				"interval": w.duration("interval", 0, time.Hour, "100ms", &r.Interval),
				"burst":    number(w.parser, "burst", 0, 1<<20, &r.Burst),
			}})
		}}),
		"basic_auth_users": {read: func(n *yaml.Node) { w.users(n, r) }},
	}}
}

// headers are those that may be added.
func (w *webParser) headers(r *access.Rules) object {
	some := func(name string) field {
		return field{read: func(n *yaml.Node) {
			s, ok := w.scalar(n, name)
			switch {
			case !ok || s == "":
			case strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c > '~' }):
				w.fail(n, "%s must be printable ASCII, found %q", name, s)
			default:
				r.Headers[name] = s
			}
		}}
	}
	one := func(name string, values ...string) field {
		f := some(name)
		return field{read: func(n *yaml.Node) {
			if s, ok := w.scalar(n, name); ok && !slices.Contains(append(values, ""), s) {
				w.fail(n, "%s must be %s, found %q", name, strings.Join(values, " or "), s)
			} else if ok {
				f.read(n)
			}
		}}
	}
	o := object{what: "headers", keys: map[string]field{
		"X-Content-Type-Options": one("X-Content-Type-Options", "nosniff"),
		"X-Frame-Options":        one("X-Frame-Options", "deny", "sameorigin"),
	}}
	for _, name := range []string{"Strict-Transport-Security", "X-XSS-Protection", "Content-Security-Policy"} {
		o.keys[name] = some(name)
	}
	return o
}

// users reads names and hashes. No message has a hash.
func (w *webParser) users(n *yaml.Node, r *access.Rules) {
	const what = "basic_auth_users"
	if n = resolve(n); n.Kind != yaml.MappingNode || len(n.Content) == 0 {
		w.fail(n, "%s must be a mapping of users to hashes; without users omit the key", what)
		return
	}
	r.Users = map[string]string{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		w.under(join(w.key, k.Value), func() {
			hash, ok := w.scalar(v, fmt.Sprintf("the password of %q", k.Value))
			_, twice := r.Users[k.Value]
			switch {
			case k.Value == "" || strings.Contains(k.Value, ":"): // RFC 7617, section 2
				w.fail(k, "a user of %s must have a name, without colon", what)
			case twice:
				w.fail(k, "user %q is there twice in %s", k.Value, what)
			case ok:
				if err := access.CheckHash(hash); err != nil {
					w.fail(v, "the password of %q: %v", k.Value, err)
				}
				r.Users[k.Value] = hash
			}
		})
	}
}

var clientAuth = map[string]tls.ClientAuthType{
	"NoClientCert": tls.NoClientCert, "RequestClientCert": tls.RequestClientCert,
	"RequireAnyClientCert": tls.RequireAnyClientCert, "RequireClientCert": tls.RequireAnyClientCert, // its older name
	"VerifyClientCertIfGiven": tls.VerifyClientCertIfGiven, "RequireAndVerifyClientCert": tls.RequireAndVerifyClientCert,
}

var curves = map[string]tls.CurveID{
	"CurveP256": tls.CurveP256, "CurveP384": tls.CurveP384, "CurveP521": tls.CurveP521, "X25519": tls.X25519,
}

// tls reads tls_server_config.
func (w *webParser) tls(n *yaml.Node, r *access.Rules) {
	t := &access.TLS{Min: tls.VersionTLS12, Max: tls.VersionTLS13}
	r.TLS = t
	suites, ignored := map[string]uint16{}, false
	for _, s := range tls.CipherSuites() {
		suites[s.Name] = s.ID
	}
	o := object{what: tlsSection, keys: map[string]field{
		"client_auth_type": w.note(named(w, "client_auth_type", clientAuth, func(v tls.ClientAuthType) { t.ClientAuth = v })),
		"client_allowed_sans": w.note(w.list("client_allowed_sans", nil, func(e *yaml.Node) {
			if s, ok := w.scalar(e, "an element of client_allowed_sans"); ok {
				t.ClientSANs = append(t.ClientSANs, s)
			}
		})),
		"min_version": w.note(w.version("min_version", &t.Min)),
		"max_version": w.note(w.version("max_version", &t.Max)),
		"cipher_suites": w.note(w.list("cipher_suites", nil, named(w, "an element of cipher_suites", suites,
			func(v uint16) { t.CipherSuites = append(t.CipherSuites, v) }).read)),
		"curve_preferences": w.list("curve_preferences", nil, named(w, "an element of curve_preferences", curves,
			func(v tls.CurveID) { t.Curves = append(t.Curves, v) }).read),
		"prefer_server_cipher_suites": w.boolean("prefer_server_cipher_suites", &ignored), // by Go, and by the toolkit
	}}
	cert := w.pem(o, "cert", "cert_file", false, &t.Cert)
	key := w.pem(o, "key", "key_file", true, &t.Key)
	ca := w.pem(o, "client_ca", "client_ca_file", false, &t.ClientCAs)
	if !w.section(n, o) {
		return
	}
	if !*cert {
		w.fail(n, "%s needs `cert_file`, the path of a certificate, or `cert`", tlsSection)
	}
	if !*key {
		w.fail(n, "%s needs `key_file`, the path of the certificate's private key, or `key`", tlsSection)
	}
	at := func(keys ...string) (paths []string) {
		for _, k := range append(keys, "") {
			paths = append(paths, strings.TrimSuffix(tlsSection+"."+k, "."))
		}
		return paths
	}
	switch verifies := t.ClientAuth >= tls.VerifyClientCertIfGiven; {
	case *ca && t.ClientAuth == tls.NoClientCert:
		w.failAt(at("client_ca_file", "client_ca"),
			"a client_ca has no effect without `client_auth_type`: want RequireAndVerifyClientCert")
	case !*ca && verifies:
		w.failAt(at("client_auth_type"), "client_auth_type needs `client_ca_file`, the certificates that sign those of "+
			"clients, or `client_ca`")
	case len(t.ClientSANs) > 0 && t.ClientAuth != tls.RequireAndVerifyClientCert:
		w.failAt(at("client_allowed_sans"),
			"client_allowed_sans needs `client_auth_type: RequireAndVerifyClientCert`, which proves the names")
	}
	if t.Max < t.Min {
		w.failAt(at("max_version", "min_version"), "max_version must not be below min_version, which is TLS12 by default")
	}
}

// check makes what the server needs of the rules, unless there are mistakes already.
func (w *webParser) check(r *access.Rules) {
	if r.Interval > 0 && r.Burst == 0 {
		w.failAt([]string{"rate_limit"},
			"rate_limit needs `burst`, the requests that may come at once: with 0 none is served")
	}
	if r.TLS == nil || len(w.errs.list) > 0 {
		return
	}
	t := r.TLS
	// RFC 9113, section 9.2.2: HTTP/2 has these with TLS 1.2, and clients may not accept others.
	if r.HTTP2 && t.Min < tls.VersionTLS13 && len(t.CipherSuites) > 0 &&
		!slices.Contains(t.CipherSuites, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256) &&
		!slices.Contains(t.CipherSuites, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256) {
		w.failAt([]string{tlsSection + ".cipher_suites"}, "cipher_suites must have TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 or "+
			"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, which HTTP/2 needs; or set `http2: false` under `http_server_config`")
	}
	switch _, err := r.Config(); {
	case errors.Is(err, access.ErrClientCAs):
		w.failAt([]string{tlsSection + ".client_ca_file", tlsSection + ".client_ca"},
			"the certificates of client_ca: %v", err)
	case err != nil:
		w.failAt([]string{tlsSection + ".cert_file", tlsSection + ".cert"}, "%v", err)
	}
}

// pem adds two keys to o, one for a text in PEM and one for the path of its file. given is set if either has a value.
func (w *webParser) pem(o object, inline, file string, private bool, dst *[]byte) (given *bool) {
	given = new(bool)
	value := func(n *yaml.Node, what string) (string, bool) {
		s, ok := w.scalar(n, what)
		if !ok || s == "" {
			return "", false
		}
		if *given {
			w.fail(n, "%s and %s exclude each other", inline, file)
			return "", false
		}
		*given = true
		return s, true
	}
	o.keys[inline] = w.note(field{read: func(n *yaml.Node) {
		if s, ok := value(n, inline); ok {
			*dst = []byte(s)
			w.hasKey = w.hasKey || private
		}
	}})
	o.keys[file] = w.note(field{read: func(n *yaml.Node) {
		path, ok := value(n, file)
		if !ok {
			return
		}
		if strings.ContainsAny(path, "\r\n") || strings.HasPrefix(path, "-----") { // a key must not get into messages
			w.fail(n, "%s must be the path of a file; a text in PEM belongs under `%s`", file, inline)
			return
		}
		if !filepath.IsAbs(path) {
			path = filepath.Join(w.dir, path)
		}
		var err error
		*dst, err = readRegular("it", path, maxWebFile, func(m fs.FileMode) error {
			if private && m&0o004 != 0 {
				return fmt.Errorf("everybody can read %s (mode %#o): chmod o-r it, and make a new key if somebody may have read it",
					path, m)
			}
			return unchangedByOthers(path, m)
		})
		if err != nil {
			w.fail(n, "%s: %v", file, err)
		}
	}})
	return given
}

// version accepts a version of TLS.
func (w *webParser) version(what string, dst *uint16) field {
	return field{read: func(n *yaml.Node) {
		switch s, ok := w.scalar(n, what); {
		case !ok:
		case s == "TLS12":
			*dst = tls.VersionTLS12
		case s == "TLS13":
			*dst = tls.VersionTLS13
		default: // RFC 8996
			w.fail(n, "%s must be TLS12 or TLS13, older versions are insecure; found %q", what, s)
		}
	}}
}

// named accepts one of names, and calls set with what it stands for.
func named[T any](w *webParser, what string, names map[string]T, set func(T)) field {
	return field{read: func(n *yaml.Node) {
		s, ok := w.scalar(n, what)
		if !ok {
			return
		}
		v, known := names[s]
		if !known {
			w.fail(n, "%s must be one of %s; found %q", what, strings.Join(slices.Sorted(maps.Keys(names)), ", "), s)
			return
		}
		set(v)
	}}
}
