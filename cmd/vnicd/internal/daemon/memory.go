package daemon

import (
	"context"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/qmp"
)

// memoryEvents tell that QEMU gave memory of a VM back to the host, or may have.
var memoryEvents = map[string]bool{"BALLOON_CHANGE": true, "MEMORY_DEVICE_SIZE_CHANGE": true}

// qmpRetry is how long a VM that does not run is left alone.
const qmpRetry = 2 * time.Second

// watchMemory listens to the monitor at path, whenever a QEMU serves it, and
// calls resync then, and after each event that concerns memory. The function that it
// returns ends that.
func watchMemory(path string, resync func(), log hclog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if c, err := qmp.Dial(ctx, path); err != nil {
				log.Debug("no monitor", "error", err)
			} else {
				log.Info("connected to QEMU's monitor", "socket", path, "version", c.Version())
				resync() // for what came before
				followMemory(ctx, c, resync)
				_ = c.Close()
			}
			t := time.NewTimer(qmpRetry)
			select {
			case <-t.C:
			case <-ctx.Done():
			}
			t.Stop()
		}
	}()
	return func() { cancel(); <-done }
}

func followMemory(ctx context.Context, c *qmp.Client, resync func()) {
	for {
		select {
		case e, ok := <-c.Events():
			if !ok {
				return
			}
			if memoryEvents[e.Event] {
				resync()
			}
		case <-ctx.Done():
			return
		}
	}
}

// raiseLockLimit lets this process lock as much memory as it ever may: guest
// memory that the device uses is locked. What is missing then is told when it
// is missed.
func raiseLockLimit() {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) == nil && lim.Cur < lim.Max {
		lim.Cur = lim.Max
		_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &lim)
	}
}
