package daemon

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/translate"
)

// A VM's `dma` (PF-3): what its devices may do to its memory. Under "ro" they read it and do not write data; under
// "blocked" they do neither, and the VM's port is down. Rings, commands and events are not data (translate.Uplink).

// DMAChange is the answer to a change of a VM's `dma`.
type DMAChange struct {
	VM       string           `json:"vm"`
	DMA      translate.Uplink `json:"dma"`
	Was      translate.Uplink `json:"was"`
	Attached bool             `json:"attached"` // if not, the attribute holds from the beginning of the next attachment
	// Took is the time until the last access under the previous attribute had ended.
	Took time.Duration `json:"took_ns"`
}

// drainLimit bounds the wait for accesses under the previous attribute. They last microseconds; only a stuck loop
// exceeds it. It is shorter than the time that clients wait.
const drainLimit = 20 * time.Second

// SetDMA changes what the devices of a VM or host application may do to its memory. It returns when no access under the
// previous attribute is in progress (EP-3).
func (d *Daemon) SetDMA(name string, u translate.Uplink) (*DMAChange, error) {
	return d.setDMA(name, u, false)
}

// setDMA is SetDMA; file tells that u is the value in the file.
func (d *Daemon) setDMA(name string, u translate.Uplink, file bool) (*DMAChange, error) {
	d.mu.RLock()
	v, err := d.vm(name)
	d.mu.RUnlock()
	if err != nil {
		return nil, err
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	began := time.Now()
	c := &DMAChange{VM: name, DMA: u}
	was := v.attribute.Uplink()
	// Quarantine is called without mu, because it waits for the loops: each ends its batch, so that afterwards none sends
	// for the VM. The connections end before accesses are forbidden: otherwise a request between the two would be
	// answered as an access error of the program.
	if u == translate.UplinkBlocked {
		v.hca.Quarantine(true)
	}
	drains, err := d.adoptDMA(v, c, file)
	if now := v.attribute.Uplink(); (u == translate.UplinkBlocked || was == translate.UplinkBlocked) &&
		now != translate.UplinkBlocked {
		v.hca.Quarantine(false)
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), drainLimit)
	defer cancel()
	for _, drain := range drains {
		err := drain.WaitWarn(ctx, time.Second, func(since time.Duration, held []string) {
			d.log.Warn("change of dma waits: guest memory still in use", "vm", name, "since", since, "held_by", held)
		})
		if err != nil {
			return nil, fmt.Errorf("dma of %s %q is %v for new accesses, but those under %v did not end within %v; held by %s",
				v.cfg.What(), name, u, c.Was, drainLimit, list(drain.Held()))
		}
	}
	c.Took = time.Since(began)
	d.log.Info("VM's dma set", "vm", name, "dma", u, "was", c.Was, "attached", c.Attached, "took", c.Took, "reload", file)
	return c, nil
}

// adoptDMA changes the configuration and the attribute.
func (d *Daemon) adoptDMA(v *vm, c *DMAChange, file bool) (drains []*translate.Drain, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.vms[c.VM] != v {
		return nil, fmt.Errorf("%w: %s %q was removed meanwhile", errNotFound, v.cfg.What(), c.VM)
	}
	c.Was, c.Attached = v.cfg.DMA, v.attached()
	changed := *v.cfg
	changed.DMA = c.DMA
	if file {
		changed.FileDMA = c.DMA
	}
	err = d.changeLocked(func(next *config.Config) {
		next.VMs[slices.Index(next.VMs, v.cfg)] = &changed
	}, func() error {
		drains, err = v.attribute.Set(c.DMA)
		if err == nil {
			v.cfg = &changed
		}
		return err
	})
	return drains, err
}
