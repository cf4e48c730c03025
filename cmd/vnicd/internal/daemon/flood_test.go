package daemon

import (
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// TestLogFlood: whatever a VM's front ends and guest do, and over whichever of its sockets, the VM's lines in the log
// have one limit for each level; another VM's are not suppressed for it. Clients of the status socket are limited, too.
func TestLogFlood(t *testing.T) {
	cfg, err := config.Parse("x.yaml", fmt.Appendf(nil, `
run-dir: %s
networks: [{name: n, vni: 1, mtu: 1500}]
vms:
  - {name: loud, network: n, mac: "02:00:00:00:00:0a"}
  - {name: quiet, network: n, mac: "02:00:00:00:00:0b"}
`, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	log, begin := &testlog.Log{}, time.Now()
	d, err := Start(cfg, "v0.0.0", log.Logger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	malformed := func(socket string) {
		c, err := net.Dial("unix", filepath.Join(cfg.RunDir, socket))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, _ = c.Write(make([]byte, 12))
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Fatalf("%s: the connection continues", socket)
		}
	}
	const times = 100
	for range times {
		malformed("loud.net")
		malformed("loud.hca")
	}
	malformed("quiet.net")
	for i := range times {
		c := NewClient(cfg.Status)
		for _, url := range []string{"/v1/none", "/v1/status?a;b", "/v1/capture?port=one"} {
			if err := c.Do(t.Context(), http.MethodGet, url, nil, nil); (err == nil) != strings.Contains(url, "status") {
				t.Fatalf("request %d of %s: %v", i, url, err)
			}
		}
	}
	of := map[string]map[string]int{} // lines by VM ("": none) and level
	for line := range strings.Lines(log.String()) {
		vm := ""
		for _, name := range []string{"loud", "quiet"} {
			if strings.Contains(line, "vm="+name) {
				vm = name
			}
		}
		_, rest, _ := strings.Cut(line, "[")
		level, _, _ := strings.Cut(rest, "]")
		if of[vm] == nil {
			of[vm] = map[string]int{}
		}
		of[vm][level]++
	}
	most := loglimit.Burst + int(time.Since(begin)/loglimit.Interval) + 1
	for level, n := range of["loud"] {
		if n > most {
			t.Errorf("%d lines of level %s about one VM, want at most %d", n, level, most)
		}
	}
	if of["loud"]["ERROR"] == 0 || of["quiet"]["ERROR"] != 1 || of[""]["WARN"]+of[""]["ERROR"] > most {
		t.Errorf("lines by VM and level: %v", of)
	}
}

// TestErrorLogFlood: lines of a control socket's HTTP server about its clients are limited, whatever mistakes the
// server's release reports.
func TestErrorLogFlood(t *testing.T) {
	log, begin := &testlog.Log{}, time.Now()
	c, err := startControl("test", filepath.Join(t.TempDir(), "s"), localsocket.None, 0, http.NewServeMux(), log.Logger())
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	for range 300 {
		c.srv.ErrorLog.Print("a client's mistake")
	}
	lines := strings.Count(log.String(), "a client's mistake")
	if most := loglimit.Burst + int(time.Since(begin)/loglimit.Interval) + 1; lines == 0 || lines > most {
		t.Errorf("%d lines about 300 mistakes, want 1 to %d", lines, most)
	}
}
