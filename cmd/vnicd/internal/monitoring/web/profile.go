package web

import (
	"fmt"
	"html"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
)

// profileIndex lists the profiles.
func profileIndex(w http.ResponseWriter, _ *http.Request) {
	var b strings.Builder
	b.WriteString("<!DOCTYPE html>\n<title>vnicd: profiles</title>\n<ul>\n")
	for _, name := range query.Profiles {
		fmt.Fprintf(&b, "<li><a href=\"%[1]s\">%[1]s</a>\n", html.EscapeString(name))
	}
	b.WriteString("</ul>\n<p>Arguments: debug=1 or 2 for text, seconds for the duration, gc=1 (heap).\n")
	setPolicy(w.Header())
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write([]byte(b.String()))
}

// profile serves the paths and arguments of net/http/pprof, except symbol: profiles have their symbols.
func (d *daemon) profile(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	i := slices.Index(query.Profiles[:], name)
	if i < 0 {
		http.Error(w, fmt.Sprintf("%.50q is no profile; there are %s", name, strings.Join(query.Profiles[:], ", ")),
			http.StatusNotFound)
		return
	}
	q := query.Query{Kind: query.Profile, Profile: uint8(i)}
	args := r.URL.Query()
	seconds, err := number(args, "seconds", query.MaxSeconds)
	debug, err2 := number(args, "debug", query.MaxDebug)
	gc, err3 := number(args, "gc", 1)
	for _, err := range []error{err, err2, err3} {
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	q.Seconds, q.Debug, q.GC = uint16(seconds), uint8(debug), gc != 0
	a, err := d.ask(r.Context(), &q, q.Duration()+scrapeTime)
	if err != nil {
		refuse(w, err)
		return
	}
	defer a.Close()
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if a.ContentType == "application/octet-stream" {
		w.Header().Set("Content-Disposition", fmt.Sprintf("attachment; filename=%q", name))
	}
	send(w, a, q.Duration()+query.SendTime)
}

// number returns an argument of a request, rounded up; 0 if it is absent.
func number(args url.Values, name string, most int) (int, error) {
	t := args.Get(name)
	if t == "" {
		return 0, nil
	}
	v, err := strconv.ParseFloat(t, 64)
	if err != nil || !(v >= 0 && v <= float64(most)) {
		return 0, fmt.Errorf("%s must be a number from 0 to %d", name, most)
	}
	return int(math.Ceil(v)), nil
}
