package hostdriver

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/translate"
)

// Status is what the host level of one VM's paging does, in bytes and events
// since the start.
type Status struct {
	Budget      uint64 `json:"budget_bytes"`       // 0: no limit
	Resident    uint64 `json:"resident_bytes"`     // for the device, by all sockets of the VM; at most Budget
	Inactive    uint64 `json:"inactive_bytes"`     // of these, next to be given back
	Held        uint64 `json:"held_bytes"`         // of these, not to be given back while in use (rings)
	HugeTLB     uint64 `json:"hugetlb_bytes"`      // resident besides: never swapped, so not counted
	Evictions   uint64 `json:"evictions"`          // granules given back for others
	Withdrawals uint64 `json:"withdrawals"`        // granules that became inactive
	Refaults    uint64 `json:"refaults"`           // of these, used again: their second chance
	Discarded   uint64 `json:"discarded"`          // granules that a balloon or an unplugged device took
	Unlocked    string `json:"unlocked,omitempty"` // why the kernel may swap memory under the device, if it may

	HostFaults   uint64        `json:"host_faults"`   // served, or failed
	FailedFaults uint64        `json:"failed_faults"` // address invalid, memory gone
	LongestDrain time.Duration `json:"longest_drain_ns"`

	// Of the faults of sockets that are connected, from raising to service.
	FaultTime translate.Histogram `json:"fault_time"`

	Heat translate.HeatMap `json:"-"` // where faults were raised
	// Areas of guest memory, by address; of sockets that are connected.
	Areas []Area `json:"-"`
}

// Area is a contiguous piece of guest memory, as the guest's physical addresses go.
type Area struct {
	GuestPA uint64 `json:"guest_pa"`
	Size    uint64 `json:"bytes"`
}

// Status returns the figures of the VM; the fault times are this driver's.
func (d *Driver) Status() Status {
	s := d.opts.Budget.Status()
	s.FaultTime = d.space.Faults().Stats().Time
	return s
}

// Status returns the figures of the VM.
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

// joined sorts areas, and makes one of those that touch or overlap: the sockets of a VM share its memory.
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
		Budget: b.limit, Resident: b.used, Inactive: b.inactive.bytes, Held: b.held, HugeTLB: b.huge,
		Evictions: c.evictions, Withdrawals: c.withdrawals, Refaults: c.refaults, Discarded: c.discarded,
		Unlocked: c.unlocked, HostFaults: c.faults, FailedFaults: c.failed, LongestDrain: c.longest, Heat: c.heat,
	}
	for d := range b.drivers {
		f := d.space.Faults().Stats()
		s.HostFaults += f.Served + f.Failed
		s.FailedFaults += f.Failed
		s.LongestDrain = max(s.LongestDrain, d.space.Epochs().Stats().Longest)
		s.FaultTime.Merge(&f.Time)
	}
	return s, slices.Collect(maps.Keys(b.drivers))
}

// faultAt notes where a fault was raised, an address in a slot.
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

// leave keeps what d has counted.
func (b *Budget) leave(d *Driver) {
	f, e := d.space.Faults().Stats(), d.space.Epochs().Stats()
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.drivers[d]; !ok {
		return
	}
	delete(b.drivers, d)
	b.counters.faults += f.Served + f.Failed
	b.counters.failed += f.Failed
	b.counters.longest = max(b.counters.longest, e.Longest)
}

// notLocked notes, and says once, that the kernel does not keep memory for us.
func (b *Budget) notLocked(log hclog.Logger, err error) {
	b.mu.Lock()
	first := b.counters.unlocked == ""
	b.counters.unlocked = err.Error()
	b.mu.Unlock()
	if first {
		log.Warn("guest memory cannot be locked: an engine stalls while the host swaps it in", "reason", err)
	}
}
