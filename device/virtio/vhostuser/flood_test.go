package vhostuser_test

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// A front end that makes mistakes as fast as it can writes a few lines a second into the log, whatever the mistake.
func TestLogFlood(t *testing.T) {
	const times = 300
	for name, mistake := range map[string]func(t *testing.T, path string){
		"malformed messages": func(t *testing.T, path string) {
			for range times {
				c, err := net.Dial("unix", path)
				if err != nil {
					t.Fatal(err)
				}
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				if _, err := c.Write(make([]byte, 12)); err != nil { // version 0
					t.Fatal(err)
				}
				if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
					t.Fatalf("the connection continues: %d bytes", n)
				}
				c.Close()
			}
		},
		"refused requests": func(t *testing.T, path string) {
			d := open(t, frontend.Config{Path: path, Memory: memory(t), Features: echoFeature})
			for range times {
				if err := d.Client().SetFeatures(d.Features() &^ echoFeature); err == nil {
					t.Fatal("features changed while rings run")
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			log := &testlog.Log{}
			path := filepath.Join(t.TempDir(), "s")
			begin := time.Now()
			s, err := vhostuser.Listen(vhostuser.Config{Path: path, Log: log.Logger()}, newEcho(2), 9)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			mistake(t, path)
			lines := strings.Count(log.String(), "\n")
			if most := loglimit.Burst + int(time.Since(begin)/loglimit.Interval) + 1; lines == 0 || lines > most {
				t.Errorf("%d lines about %d mistakes, want 1 to %d", lines, times, most)
			}
		})
	}
}
