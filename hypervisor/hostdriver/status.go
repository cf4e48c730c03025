package hostdriver

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/translate"
)

// Status is the host level of one VM's paging, in bytes and in events since the start.
type Status struct {
	Budget      uint64 `json:"budget_bytes"`       // 0: no limit
	Target      uint64 `json:"target_bytes"`       // what the VM may keep while the host is short of memory; 0: any amount
	Resident    uint64 `json:"resident_bytes"`     // for the device, by any socket of the VM; at most Budget
	Inactive    uint64 `json:"inactive_bytes"`     // of these, next to be evicted
	Held        uint64 `json:"held_bytes"`         // of these, not evictable while in use (rings)
	HugeTLB     uint64 `json:"hugetlb_bytes"`      // also resident: never swapped, so not counted
	Mapped      uint64 `json:"mapped_bytes"`       // that the VM shares, resident or not
	Shared      uint64 `json:"shared_limit_bytes"` // bound of Mapped; 0: that of all VMs together
	Evictions   uint64 `json:"evictions"`          // granules evicted for others
	Withdrawals uint64 `json:"withdrawals"`        // granules that became inactive
	Refaults    uint64 `json:"refaults"`           // of these, used again (second chance)
	Discarded   uint64 `json:"discarded"`          // granules that a balloon or an unplugged device took
	Unlocked    string `json:"unlocked,omitempty"` // why the kernel may swap memory that the device uses; "": it may not

	HostFaults   uint64 `json:"host_faults"`   // served, or failed
	FailedFaults uint64 `json:"failed_faults"` // address invalid, memory gone

	// Faults and holds of connected sockets that found memory short: those that wait at present, for how long the oldest
	// has waited, and why; and all of them since the start (HF-2).
	Short       int           `json:"short"`
	ShortFor    time.Duration `json:"short_for_ns"`
	ShortReason string        `json:"short_reason,omitempty"`
	Delayed     uint64        `json:"delayed_faults"`

	LongestDrain time.Duration `json:"longest_drain_ns"`

	// Fault times of connected sockets, from raising to service.
	FaultTime translate.Histogram `json:"fault_time"`

	Heat translate.HeatMap `json:"-"` // places of faults
	// Areas of guest memory of connected sockets, by address.
	Areas []Area `json:"-"`
}

// Area is a contiguous piece of guest physical memory.
type Area struct {
	GuestPA uint64 `json:"guest_pa"`
	Size    uint64 `json:"bytes"`
}

// Status returns the VM's status; the fault times are this driver's.
func (d *Driver) Status() Status {
	s := d.opts.Budget.Status()
	s.FaultTime = d.space.Faults().Stats().Time
	return s
}

// Status returns the VM's status.
func (b *Budget) Status() Status {
	s, drivers := b.status()
	for _, d := range drivers {
		s.Areas = append(s.Areas, d.areas()...)
	}
	s.Areas = joined(s.Areas)
	return s
}

func (d *Driver) areas() (out []Area) {
	for _, s := range d.Slots() {
		out = append(out, Area{s.GuestPA, s.Size})
	}
	return out
}

// joined sorts areas and merges those that touch or overlap: the sockets of a VM share its memory.
func joined(in []Area) (out []Area) {
	slices.SortFunc(in, func(a, b Area) int { return cmp.Compare(a.GuestPA, b.GuestPA) })
	for _, a := range in {
		if n := len(out) - 1; n >= 0 && a.GuestPA <= out[n].GuestPA+out[n].Size {
			out[n].Size = max(out[n].Size, a.GuestPA+a.Size-out[n].GuestPA)
			continue
		}
		out = append(out, a)
	}
	return out
}

func (b *Budget) status() (Status, []*Driver) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.counters
	s := Status{
		Budget: b.limit, Target: b.target, Resident: b.used, Inactive: b.inactive.bytes, Held: b.held, HugeTLB: b.huge,
		Mapped: b.mapped, Shared: b.shared,
		Evictions: c.evictions, Withdrawals: c.withdrawals, Refaults: c.refaults, Discarded: c.discarded,
		Unlocked: c.unlocked, HostFaults: c.faults, FailedFaults: c.failed, LongestDrain: c.longest, Heat: c.heat,
		Delayed: c.delayed,
	}
	for d := range b.drivers {
		f := d.space.Faults().Stats()
		s.HostFaults += f.Served + f.Failed
		s.FailedFaults += f.Failed
		s.LongestDrain = max(s.LongestDrain, d.space.Epochs().Stats().Longest)
		s.FaultTime.Merge(&f.Time)
		short := d.late.status()
		s.Short += short.waiting
		s.Delayed += short.total
		if short.oldest >= s.ShortFor && short.reason != "" {
			s.ShortFor, s.ShortReason = short.oldest, short.reason
		}
	}
	return s, slices.Collect(maps.Keys(b.drivers))
}

// faultAt records the place of a fault, an address in a slot.
func (b *Budget) faultAt(pa translate.PA) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.counters.heat.Add(pa)
}

func (b *Budget) join(d *Driver) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drivers[d] = struct{}{}
}

// leave adds the counts of d to those of closed drivers.
func (b *Budget) leave(d *Driver) {
	f, e := d.space.Faults().Stats(), d.space.Epochs().Stats()
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.drivers[d]; !ok {
		return
	}
	if delete(b.drivers, d); len(b.drivers) == 0 {
		b.unit = 0
	}
	b.counters.faults += f.Served + f.Failed
	b.counters.failed += f.Failed
	b.counters.delayed += d.late.status().total
	b.counters.longest = max(b.counters.longest, e.Longest)
}

// notLocked records, and logs once, that the kernel may swap the memory.
func (b *Budget) notLocked(log hclog.Logger, err error) {
	b.mu.Lock()
	first := b.counters.unlocked == ""
	b.counters.unlocked = err.Error()
	b.mu.Unlock()
	if first {
		log.Warn("guest memory cannot be locked: an engine stalls while the host swaps it in", "reason", err)
	}
}
