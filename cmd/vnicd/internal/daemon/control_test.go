package daemon

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

// TestIdleClients: clients that hold many connections to the status socket use few descriptors, keep nobody from the
// control socket, and, once they are gone, nobody from the status socket.
func TestIdleClients(t *testing.T) {
	cfg, err := config.Parse("x.yaml", fmt.Appendf(nil, "run-dir: %s\nnetworks: [{name: n, vni: 1}]\n", t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Start(cfg, "v0.0.0", hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	before := openFiles(t)
	var idle []net.Conn
	for range statusClients + 40 {
		c, err := net.Dial("unix", cfg.Status)
		if err != nil {
			t.Fatal(err)
		}
		idle = append(idle, c)
	}
	if err := NewClient(cfg.Control).Do(t.Context(), http.MethodGet, "/v1/ports", nil, nil); err != nil {
		t.Errorf("the control socket: %v", err)
	}
	time.Sleep(100 * time.Millisecond) // for connections to be accepted that must not; otherwise the test shows less
	if n := openFiles(t) - before - len(idle); n > statusClients+2 {
		t.Errorf("the daemon holds %d connections, want at most %d", n, statusClients)
	}
	for _, c := range idle {
		c.Close()
	}
	if err := NewClient(cfg.Status).Do(t.Context(), http.MethodGet, "/v1/ports", nil, nil); err != nil {
		t.Errorf("the status socket: %v", err)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}
