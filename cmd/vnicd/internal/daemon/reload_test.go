package daemon

import (
	"slices"
	"strings"
	"testing"

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
