package daemon

import (
	"context"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/pressure"
	"github.com/vnicd/vnicd/hypervisor/qmp"
)

// memoryEvents are the events after which QEMU has, or may have, returned memory of a VM to the host.
var memoryEvents = map[string]bool{"BALLOON_CHANGE": true, "MEMORY_DEVICE_SIZE_CHANGE": true}

// qmpRetry is the time between attempts to connect to a VM that does not run.
const qmpRetry = 2 * time.Second

// watchMemory connects to the monitor at path whenever a QEMU serves it, and calls resync after each connect and each
// event that concerns memory. The returned function ends that.
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
				resync() // for events before the connection
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

// watchHost starts to watch the host's memory (HF-4). Where that is impossible vnicd works, without.
func (d *Daemon) watchHost() error {
	c := d.cfg.MemoryPressure
	if !c.Watch {
		return nil
	}
	r := pressure.NewReader("/")
	log := d.log.Named("memory")
	if name := r.Hidden(); name != "" {
		log.Warn("no mounted file system shows the memory cgroup that vnicd is in: its limit, if it has one, is not known."+
			" Mount the cgroups (ip netns exec hides them), or give each VM a memory-budget", "cgroup", name)
	}
	h, err := hostdriver.NewHost(hostdriver.HostOptions{Read: r.Read, Watch: r.Stalls(), Limit: float64(c.Limit) / 100,
		Log: log})
	if err != nil {
		log.Warn("the host's memory cannot be watched: VMs without memory-budget keep what their devices touched",
			"reason", err)
		return nil
	}
	d.memory = h
	d.onClose(h.Close)
	return nil
}

// share makes the host bound the VM's memory; the returned function ends that.
func (v *vm) share(h *hostdriver.Host) (end func()) {
	if h == nil {
		return func() {}
	}
	h.Add(v.budget, v.cfg.MemoryWeight)
	return func() { h.Remove(v.budget) }
}

// raiseLockLimit raises the soft limit of locked memory to the hard limit, because guest memory in use by the device is
// locked. If the limit is too low, the memory's status reports it.
func raiseLockLimit() {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) == nil && lim.Cur < lim.Max {
		lim.Cur = lim.Max
		_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &lim)
	}
}
