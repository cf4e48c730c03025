package web

import (
	"io"
	"io/fs"
	"net/http"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
)

// Every file is served with the policy, and only if the request uses one of the server's own names.
func TestPagePolicy(t *testing.T) {
	s := newStage(t, Config{Page: true}, func(_ *query.Query, w *query.Writer) error {
		_, err := io.WriteString(w, "{}")
		return err
	})
	files, _ := fs.Glob(pageFiles, "page/*")
	paths := []string{"/", "/v1/overview"}
	for _, f := range files {
		if fileTypes[path.Ext(f)] == "" {
			t.Errorf("%s has no type", f)
		}
		if name := path.Base(f); name != "index.html" {
			paths = append(paths, "/"+name)
		}
		text, _ := pageFiles.ReadFile(f)
		if m := regexp.MustCompile(`(?i)innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://[^"\s]*`).FindAllString(string(text), -1); len(m) > 0 &&
			!slices.Equal(m, []string{"http://www.w3.org/2000/svg"}) {
			t.Errorf("%s has %q", f, m)
		}
		if strings.HasSuffix(f, ".html") &&
			regexp.MustCompile(`(?i)<style|\sstyle=|\son[a-z]+=|<script[^>]*>[^<]`).Match(text) {
			t.Errorf("%s has script or style in it", f)
		}
	}
	if !regexp.MustCompile(`^[a-z-]+ '(none|self)'(; [a-z-]+ '(none|self)')*$`).MatchString(policy) {
		t.Errorf("policy %q allows more than this server's own files", policy)
	}
	for _, p := range paths {
		for host, want := range map[string]int{"127.0.0.1:9469": 200, "[::1]:9469": 200, "localhost": 200,
			"LOCALHOST:80": 200, "203.0.113.9": 200, "evil.example": 421, "evil.example:9469": 421,
			"127.0.0.1.evil.example": 421, "": 421} {
			req, _ := http.NewRequest("GET", "http://vnicd"+p, nil)
			if req.Host = host; host == "" {
				req.Host = "vnicd"
			}
			resp, err := s.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if got := resp.StatusCode; got != want {
				t.Errorf("%s as %q: %d, want %d", p, host, got, want)
			}
			if csp := resp.Header.Get("Content-Security-Policy"); csp != policy ||
				resp.Header.Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("%s: policy %q", p, csp)
			}
		}
	}
	if own := []string{"monitor.example"}; !ownName("Monitor.example:9469", own) || ownName("x.example", own) ||
		ownName("x.example", nil) || ownName("", own) || ownName("", []string{""}) {
		t.Error("the page is served under a name of the configuration")
	}
}
