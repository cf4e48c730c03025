package web

import (
	"embed"
	"io/fs"
	"net/http"
	"path"
	"strconv"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
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

// servePage adds the page and its data to mux.
func (d *daemon) servePage(mux *http.ServeMux) {
	files, _ := fs.Sub(pageFiles, "page")
	entries, _ := fs.ReadDir(files, ".")
	for _, e := range entries {
		name := e.Name()
		text, _ := fs.ReadFile(files, name)
		pattern := "GET /" + name
		if name == "index.html" {
			pattern = "GET /{$}"
		}
		mux.Handle(pattern, withPolicy(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", fileTypes[path.Ext(name)])
			_, _ = w.Write(text)
		}))
	}
	mux.Handle("GET /v1/overview", withPolicy(d.overview))
}

func (d *daemon) overview(w http.ResponseWriter, r *http.Request) {
	q := query.Query{Kind: query.Overview, VM: r.URL.Query().Get("vm")}
	if t := r.URL.Query().Get("since"); t != "" {
		var err error
		if q.Since, err = strconv.ParseUint(t, 10, 64); err != nil {
			http.Error(w, "since must be the number of a sample", http.StatusBadRequest)
			return
		}
	}
	if len(q.VM) > query.MaxVM {
		q.VM = "" // there is no such VM, hence no detail
	}
	a, err := d.ask(r.Context(), &q, viewTime)
	if err != nil {
		refuse(w, err)
		return
	}
	defer a.Close()
	send(w, a, query.SendTime)
}

// withPolicy sends a file or data of the page.
func withPolicy(h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setPolicy(w.Header())
		h(w, r)
	})
}

// setPolicy sets the headers that confine the page.
func setPolicy(head http.Header) {
	head.Set("Content-Security-Policy", policy)
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("Referrer-Policy", "no-referrer")
	head.Set("Cross-Origin-Resource-Policy", "same-origin")
	head.Set("Cross-Origin-Opener-Policy", "same-origin")
	head.Set("Cache-Control", "no-store")
}
