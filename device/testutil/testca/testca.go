// Package testca has throw-away certification authorities for tests.
package testca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"
)

// CA is an authority.
type CA struct {
	// Cert is its certificate in PEM.
	Cert []byte
	// Life is for how long the certificates that it issues are valid.
	Life time.Duration

	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	last int64 // serial number
}

// New makes an authority.
func New(t testing.TB) *CA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &CA{key: key, Life: time.Hour}
	now := time.Now()
	c.cert = &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign}
	c.last = 1
	c.Cert = c.sign(t, c.cert, &key.PublicKey)
	return c
}

// Pair is a certificate and its key, in PEM.
type Pair struct{ Cert, Key []byte }

// Issue makes a certificate for servers and clients with these DNS names or IP addresses.
func (c *CA) Issue(t testing.TB, names ...string) Pair {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c.last++
	now := time.Now()
	x := &x509.Certificate{SerialNumber: big.NewInt(c.last), Subject: pkix.Name{CommonName: "test"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(c.Life), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			x.IPAddresses = append(x.IPAddresses, ip)
		} else {
			x.DNSNames = append(x.DNSNames, n)
		}
	}
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return Pair{c.sign(t, x, &k.PublicKey), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})}
}

// Client returns the configuration of a client that trusts this authority and expects the server's name. The client
// presents cert, if it is not nil, whatever authority the server asks for.
func (c *CA) Client(t testing.TB, name string, cert *Pair) *tls.Config {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(c.Cert)
	config := &tls.Config{RootCAs: pool, ServerName: name}
	if cert != nil {
		pair, err := tls.X509KeyPair(cert.Cert, cert.Key)
		if err != nil {
			t.Fatal(err)
		}
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return config
}

func (c *CA) sign(t testing.TB, x *x509.Certificate, public *ecdsa.PublicKey) []byte {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, x, c.cert, public, c.key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
