package daemon

import (
	"bufio"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A monitor may appear after vnicd, end and come back. Connecting, and each event that concerns memory, but no others,
// are followed by a Resync.
func TestWatchMemory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qmp")
	resyncs := make(chan struct{}, 10)
	stop := watchMemory(path, func() { resyncs <- struct{}{} }, hclog.NewNullLogger())
	defer stop()
	for round := range 2 {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_ = l.(*net.UnixListener).SetDeadline(time.Now().Add(30 * time.Second))
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(c,
			`{"QMP": {"version": {"qemu": {"micro": 3, "minor": 1, "major": 11}, "package": ""}, "capabilities": []}}`)
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "qmp_capabilities") {
			t.Fatal(line, err)
		}
		fmt.Fprintln(c, `{"return": {}}`)
		await := func() {
			select {
			case <-resyncs:
			case <-time.After(30 * time.Second):
				t.Fatalf("round %d: no resync", round)
			}
		}
		await() // on connecting
		for _, event := range []string{"RTC_CHANGE", "BALLOON_CHANGE", "RTC_CHANGE", "MEMORY_DEVICE_SIZE_CHANGE"} {
			fmt.Fprintf(c, `{"event": %q, "data": {}, "timestamp": {"seconds": 1, "microseconds": 2}}`+"\n", event)
		}
		await()
		await()
		_ = c.Close()
		_ = l.Close()
	}
	stop()
	if len(resyncs) != 0 {
		t.Errorf("%d resyncs too many", len(resyncs))
	}
}
