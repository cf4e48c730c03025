package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

// Where something stands in the file is no change; what it says is one.
func TestFixed(t *testing.T) {
	const text = `engines: 2
vtep: {local: 192.0.2.1}
monitoring: {listen: "127.0.0.1:9469"}
evpn:
  as: 65001
  neighbours:
    - {address: 192.0.2.254, password: secret}
`
	parse := func(text string) *config.Config {
		t.Helper()
		c, err := config.Parse("x.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	was := parse(text)
	elsewhere := strings.ReplaceAll(text, "2.1}", "2.2}") // the router id, too
	for changed, want := range map[string][]string{
		text:                                  nil,
		"# A comment.\nnetworks: []\n" + text: nil,
		strings.Replace(text, "  neighbours", "  port: 179 # the default\n  neighbours", 1): nil,
		strings.Replace(text, "secret", "other", 1):                                         {"evpn"},
		strings.Replace(text, "65001", "65002", 1):                                          {"evpn"},
		elsewhere:                          {"vtep", "evpn"},
		text[:strings.Index(text, "evpn")]: {"evpn"},
		"journal: off\n" + text:            {"journal"},
	} {
		if got := fixed(was, parse(changed)); !slices.Equal(got, want) {
			t.Errorf("%v differ, want %v:\n%s", got, want, changed)
		}
	}
}

// A web configuration with a mistake refuses a reload; what it says is no change of the configuration.
func TestReloadWebConfig(t *testing.T) {
	dir := t.TempDir()
	path, web := filepath.Join(dir, "vnicd.yaml"), filepath.Join(dir, "web.yml")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(path, fmt.Sprintf("run-dir: %s\nmonitoring: {listen: %s/mon, web-config: %s}\nnetworks: []\n", dir, dir, web))
	c, err := config.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	d, err := Start(c, "v0.0.0", hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	for text, want := range map[string]string{
		"rate_limit: {interval: 1s, burst: 1}":    "",
		"http_server_config: {http2: false}":      "",
		"basic_auth_users: {alice: not-a-hash}\n": web + `:1: the password of "alice": want a bcrypt hash`,
	} {
		write(web, text)
		done, err := d.Reload()
		if len(done) != 0 || (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q, %v; want %q", text, done, err, want)
		}
	}
}
