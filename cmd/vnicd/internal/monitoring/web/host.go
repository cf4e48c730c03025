package web

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// ownHost passes on requests whose Host names this server, for every path that h has or lacks. Otherwise a foreign page
// whose name is made to resolve to our address (DNS rebinding) would be of our origin, and its script could read the
// answers. The answer to others is 421 Misdirected Request (RFC 9110, section 15.5.20).
func ownHost(names []string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Health checks in HTTP/1.0 have no Host; a browser always sends one.
		if r.Host != "" && !ownName(r.Host, names) {
			setPolicy(w.Header())
			http.Error(w, fmt.Sprintf("%q is not a name of this server: address it by its IP address, as localhost, or by a "+
				"name that is listed under `monitoring.names`", r.Host), http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// ownName reports whether a Host header names this server: by an IP address, which needs no name service, as localhost,
// or by one of names.
func ownName(host string, names []string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	if _, err := netip.ParseAddr(host); err == nil || strings.EqualFold(host, "localhost") {
		return true
	}
	for _, n := range names {
		if host != "" && strings.EqualFold(host, n) {
			return true
		}
	}
	return false
}
