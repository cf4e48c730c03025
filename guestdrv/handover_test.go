package guestdrv_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// TestHandover: the devices of both ends are replaced in turns while programs at both use the connection for all kinds
// of operations: each completes once and in order, all bytes are right, and fetch-and-adds add up (CO-1).
func TestHandover(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  rigConfig
	}{
		{"one loop", rigConfig{loops: 1}},
		{"two loops", rigConfig{loops: 2}},
		{"two hosts", rigConfig{loops: 2, vxlan: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, tc.cfg)
			a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{Timeout: 14})
			var ended atomic.Bool
			var replaced atomic.Int64
			done := make(chan struct{})
			go func() {
				defer close(done)
				for last := int64(0); !ended.Load(); time.Sleep(time.Millisecond) {
					if n := a.completed.Load() + b.completed.Load(); n >= last+10 {
						r.hosts[replaced.Load()%2].replace()
						replaced.Add(1)
						last = n
					}
				}
			}()
			for round := uint64(0); replaced.Load() < 10 && !t.Failed(); round++ {
				t.Run("traffic", func(t *testing.T) {
					for i, ends := range [][2]*end{{a, b}, {b, a}} {
						t.Run(fmt.Sprint("direction ", i), func(t *testing.T) {
							t.Parallel()
							mixedTraffic(t, ends[0], ends[1], 200, 2*round+uint64(i))
						})
					}
				})
			}
			ended.Store(true)
			<-done
			destroy(t, a, b)
		})
	}
}
