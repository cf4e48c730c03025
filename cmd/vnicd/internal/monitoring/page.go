package monitoring

import (
	"embed"
	"encoding/json"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"path"
	"strconv"
	"strings"
	"time"
)

//go:embed page
var pageFiles embed.FS

// policy lets the page load only its own files and connect only to this server: no inline script or style, no other
// origin, no embedding in frames.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// fileTypes are the types of the page's files.
var fileTypes = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
	".svg": "image/svg+xml",
}

// servePage adds the page and its data to mux. where is the server's address.
func servePage(mux *http.ServeMux, s *sampler, where string) {
	files, _ := fs.Sub(pageFiles, "page")
	entries, _ := fs.ReadDir(files, ".")
	for _, e := range entries {
		name := e.Name()
		text, _ := fs.ReadFile(files, name)
		pattern := "GET /" + name
		if name == "index.html" {
			pattern = "GET /{$}"
		}
		mux.Handle(pattern, guarded(where, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", fileTypes[path.Ext(name)])
			_, _ = w.Write(text)
		}))
	}
	mux.Handle("GET /v1/overview", guarded(where, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		var since uint64
		if t := q.Get("since"); t != "" {
			var err error
			if since, err = strconv.ParseUint(t, 10, 64); err != nil {
				http.Error(w, "since must be the number of a sample", http.StatusBadRequest)
				return
			}
		}
		v := s.view()
		if v == nil {
			http.Error(w, "the first snapshot is not complete", http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v.overview(time.Now(), since, q.Get("vm")))
	}))
}

// guarded refuses requests whose Host is not this server's. Otherwise a foreign page whose name is made to resolve to
// our address (DNS rebinding) would be of our origin.
func guarded(where string, h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head := w.Header()
		head.Set("Content-Security-Policy", policy)
		head.Set("X-Content-Type-Options", "nosniff")
		head.Set("Referrer-Policy", "no-referrer")
		head.Set("Cross-Origin-Resource-Policy", "same-origin")
		head.Set("Cross-Origin-Opener-Policy", "same-origin")
		head.Set("Cache-Control", "no-store")
		if !ownName(r.Host, where) {
			http.Error(w, "address this server by its IP address, as localhost, or by the name in monitoring.listen",
				http.StatusForbidden)
			return
		}
		h(w, r)
	})
}

// ownName reports whether a Host header names this server: by an IP address, which needs no name service, as localhost,
// or by the name in the configured address.
func ownName(host, where string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	name = strings.Trim(name, "[]")
	if _, err := netip.ParseAddr(name); err == nil || strings.EqualFold(name, "localhost") {
		return true
	}
	own, _, err := net.SplitHostPort(where)
	return err == nil && own != "" && strings.EqualFold(name, own)
}
