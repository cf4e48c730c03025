package web

import (
	"compress/gzip"
	"net/http"
	"strconv"
	"strings"
)

// compressed returns a writer for the response that compresses, if the client accepts that. It has to be closed.
func compressed(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
	w.Header().Add("Vary", "Accept-Encoding")
	if !accepts(r.Header.Values("Accept-Encoding"), "gzip") {
		return w
	}
	w.Header().Set("Content-Encoding", "gzip")
	return &gzipped{w, gzip.NewWriter(w)}
}

type gzipped struct {
	http.ResponseWriter
	z *gzip.Writer
}

func (g *gzipped) Write(p []byte) (int, error) { return g.z.Write(p) }

func (g *gzipped) Close() error { return g.z.Close() }

// Unwrap is for http.ResponseController.
func (g *gzipped) Unwrap() http.ResponseWriter { return g.ResponseWriter }

// accepts reports whether the values of Accept-Encoding name a coding, with a quality other than 0 (RFC 9110, section
// 12.5.3).
func accepts(values []string, coding string) bool {
	for _, v := range values {
		for e := range strings.SplitSeq(v, ",") {
			name, q, _ := strings.Cut(e, ";")
			if !strings.EqualFold(strings.TrimSpace(name), coding) {
				continue
			}
			_, weight, ok := strings.Cut(q, "=")
			if !ok {
				return true
			}
			v, err := strconv.ParseFloat(strings.TrimSpace(weight), 64)
			return err == nil && v > 0
		}
	}
	return false
}
