package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
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

// checkMemory returns why the VM cannot have that memory-budget now; "": it can. mu is held for reading.
func (v *vm) checkMemory(c *config.VM) string {
	least := v.budget.Least()
	if c.MemoryBudget == 0 || c.MemoryBudget == v.cfg.MemoryBudget || c.MemoryBudget >= least {
		return ""
	}
	return fmt.Sprintf("%v: %s %q: memory-budget %s: want at least %s while it is attached", c.At, c.What(),
		c.Name, sizeText(c.MemoryBudget), sizeText(least))
}

// memoryText describes the change of a VM's memory.
func memoryText(old, c *config.VM) string {
	var what []string
	if c.MemoryBudget != old.MemoryBudget {
		what = append(what, "memory-budget "+sizeText(c.MemoryBudget))
	}
	if c.MemoryWeight != old.MemoryWeight {
		what = append(what, fmt.Sprintf("memory-weight %d", c.MemoryWeight))
	}
	return fmt.Sprintf("VM %s %s", c.Name, strings.Join(what, ", "))
}

// sizeText returns a number of bytes as the configuration has it, rounded up to KiB.
func sizeText(n uint64) string {
	if n == 0 {
		return "none"
	}
	units := []string{"KiB", "MiB", "GiB", "TiB"}
	n = (n + 1<<10 - 1) >> 10
	for len(units) > 1 && n&(1<<10-1) == 0 {
		n, units = n>>10, units[1:]
	}
	return fmt.Sprint(n, units[0])
}

// setMemory changes the memory-budget and memory-weight of a VM, for both of its sockets. reloading is held; settle has
// to follow.
func (d *Daemon) setMemory(name string, budget uint64, weight int) error {
	v, err := d.adoptMemory(name, budget, weight)
	if err != nil {
		return err
	}
	d.settling[name] = v
	d.log.Info("VM's memory set", "vm", name, "budget", budget, "weight", weight)
	return nil
}

// settle returns when no VM keeps more resident than its new memory-budget permits, or after drainLimit: memory that
// stays in use is released later. reloading is held.
func (d *Daemon) settle() {
	ctx, cancel := context.WithTimeout(context.Background(), drainLimit)
	defer cancel()
	var all sync.WaitGroup
	for name, v := range d.settling {
		all.Go(func() {
			if v.budget.Settle(ctx) != nil {
				d.log.Warn("more memory is resident than the new memory-budget permits, and in use: faults release it",
					"vm", name, "resident", v.budget.Status().Resident)
			}
		})
	}
	all.Wait()
	clear(d.settling)
}

// adoptMemory changes the configuration, and the account of the VM.
func (d *Daemon) adoptMemory(name string, budget uint64, weight int) (*vm, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v, err := d.vm(name)
	if err != nil {
		return nil, err
	}
	changed := *v.cfg
	changed.MemoryBudget, changed.MemoryWeight = budget, weight
	err = d.changeLocked(func(next *config.Config) {
		next.VMs[slices.Index(next.VMs, v.cfg)] = &changed
	}, func() error {
		if err := v.budget.SetLimit(budget); err != nil {
			return err
		}
		if d.memory != nil {
			d.memory.SetWeight(v.budget, weight)
		}
		v.cfg = &changed
		return nil
	})
	return v, err
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
