// Package access has the rules of access to the monitoring server: TLS, client certificates, passwords, a rate of
// requests, headers of responses. Package config reads them from a file, and package web enforces them. Both make the
// configuration of TLS by Rules.Config, so that rules which pass the check can be served.
package access

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Rules are the contents of a web configuration file and of the files that it names. The zero value permits everything.
type Rules struct {
	// TLS is nil for plain HTTP.
	TLS *TLS
	// HTTP2 permits HTTP/2 besides HTTP/1.1. Only connections with TLS can use it.
	HTTP2 bool
	// Headers are added to all responses.
	Headers map[string]string
	// Users are the bcrypt hashes of passwords by the user's name. Empty: no password is asked for.
	Users map[string]string
	// Interval is the time between two requests in the long run, Burst the number of requests that may come at once.
	// Interval 0: no limit.
	Interval time.Duration
	Burst    int
}

// TLS are the settings of TLS. Certificates and keys are in PEM.
type TLS struct {
	Cert, Key  []byte
	ClientCAs  []byte // that sign certificates of clients; nil: none
	ClientAuth tls.ClientAuthType
	// ClientSANs, if not empty, are names of which the certificate of a client must have one.
	ClientSANs   []string
	Min, Max     uint16 // versions of the protocol
	CipherSuites []uint16
	Curves       []tls.CurveID
}

// Errors of Config.
var (
	ErrKeyPair   = errors.New("certificate and key")
	ErrClientCAs = errors.New("no certificate in PEM was found")
)

// Config returns the configuration for the server's connections. It reads no files.
func (r *Rules) Config() (*tls.Config, error) {
	t := r.TLS
	cert, err := tls.X509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKeyPair, err)
	}
	c := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: t.Min, MaxVersion: t.Max,
		CipherSuites: t.CipherSuites, CurvePreferences: t.Curves, ClientAuth: t.ClientAuth,
		ClientCAs:  x509.NewCertPool(), // an empty one accepts nobody; none would mean the system's
		NextProtos: []string{"http/1.1"}}
	if r.HTTP2 {
		c.NextProtos = []string{"h2", "http/1.1"}
	}
	if t.ClientCAs != nil && !c.ClientCAs.AppendCertsFromPEM(t.ClientCAs) {
		return nil, ErrClientCAs
	}
	if len(t.ClientSANs) > 0 {
		c.VerifyConnection = t.checkSANs // also of connections that resume a session
	}
	return c, nil
}

// Expires returns when the first of the certificates that the server sends expires: its own and those that sign it. ok
// is false without TLS.
func (r *Rules) Expires() (first time.Time, ok bool) {
	if r.TLS == nil {
		return first, false
	}
	cert, err := tls.X509KeyPair(r.TLS.Cert, r.TLS.Key)
	if err != nil {
		return first, false
	}
	for _, der := range cert.Certificate {
		if c, err := x509.ParseCertificate(der); err == nil && (!ok || c.NotAfter.Before(first)) {
			first, ok = c.NotAfter, true
		}
	}
	return first, ok
}

// checkSANs refuses clients without a certificate that has one of ClientSANs: exact DNS names, e-mail addresses, IP
// addresses or URIs.
func (t *TLS) checkSANs(s tls.ConnectionState) error {
	if len(s.PeerCertificates) == 0 {
		return errors.New("the client has no certificate")
	}
	cert := s.PeerCertificates[0]
	names := slices.Concat(cert.DNSNames, cert.EmailAddresses)
	for _, a := range cert.IPAddresses {
		names = append(names, a.String())
	}
	for _, u := range cert.URIs {
		names = append(names, u.String())
	}
	if !slices.ContainsFunc(names, func(n string) bool { return slices.Contains(t.ClientSANs, n) }) {
		return fmt.Errorf("the client's certificate has none of the allowed names: %q", names)
	}
	return nil
}

// Weaker returns which protection of was r lacks; "": none. A running server does not weaken its rules, because the
// file may just be half written.
func (r *Rules) Weaker(was *Rules) string {
	switch {
	case was.TLS != nil && r.TLS == nil:
		return "TLS"
	case len(was.Users) > 0 && len(r.Users) == 0:
		return "passwords"
	case was.TLS != nil && r.TLS.ClientAuth < was.TLS.ClientAuth:
		return "client certificates"
	case was.TLS != nil && len(was.TLS.ClientSANs) > 0 && len(r.TLS.ClientSANs) == 0:
		return "names in client certificates"
	}
	return ""
}
