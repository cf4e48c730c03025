package web

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// TestErrorLogFlood: lines of the HTTP server about its clients are limited, whatever mistakes its release reports.
func TestErrorLogFlood(t *testing.T) {
	log, begin := &testlog.Log{}, time.Now()
	var slots []net.Conn
	for range query.Slots(false, false) {
		a, b := pair(t)
		defer a.Close()
		slots = append(slots, b)
	}
	s, err := New(Config{}, slots, log.Logger())
	if err != nil {
		t.Fatal(err)
	}
	defer s.daemon.close()
	for range 300 {
		s.srv.ErrorLog.Print("a client's mistake")
	}
	lines := strings.Count(log.String(), "a client's mistake")
	if most := loglimit.Burst + int(time.Since(begin)/loglimit.Interval) + 1; lines == 0 || lines > most {
		t.Errorf("%d lines about 300 mistakes, want 1 to %d", lines, most)
	}
}
