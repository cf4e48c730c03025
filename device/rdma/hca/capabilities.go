// Side: control

package hca

import (
	"fmt"
	"maps"
	"slices"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// Capabilities are what a device has for the context of another one (Save, Restore) whose driver goes on to rely on
// what it was told. Hosts compare them before a VM migrates (CO-5, CO-7).
type Capabilities struct {
	Context     uint32            `json:"context"` // newest version of contexts that is known, and the one that is written
	Engines     int               `json:"engines"`
	EventQueues int               `json:"event_queues"`       // for completions
	PortMTU     int               `json:"port_mtu"`           // bytes of an RDMA packet's payload
	Features    uint64            `json:"features"`           // that are offered, without those of virtio
	Accepted    uint64            `json:"accepted,omitempty"` // of them, by the driver; 0: or there is none
	Limits      map[string]uint64 `json:"limits"`             // by their names in Limits
}

// Capabilities returns the device's. Callable from any goroutine.
func (d *Device) Capabilities() *Capabilities {
	c := &Capabilities{
		Context: contextVersion, Engines: len(d.data.engines), EventQueues: len(d.data.ceqs), PortMTU: d.data.portMTU(),
		Features: abi.Features, Accepted: d.features.Load() & abi.Features,
		Limits: map[string]uint64{"MRSize": d.lim.MRSize, "MTTs": d.lim.MTTs, "Memory": d.account.Status().Limit},
	}
	for _, b := range d.lim.bounds() {
		c.Limits[b.name] = uint64(*b.v)
	}
	return c
}

// Lacks returns what c has not for a device with those of from to go on there, in words about c; nil: nothing.
func (c *Capabilities) Lacks(from *Capabilities) (out []string) {
	lack := func(what string, has, needs any) {
		out = append(out, fmt.Sprintf("%s is %v, needed is %v", what, has, needs))
	}
	if c.Context < from.Context {
		lack("the newest known version of an HCA's state", c.Context, from.Context)
	}
	if c.Engines != from.Engines {
		lack("the number of engines", c.Engines, from.Engines)
	} else if c.EventQueues != from.EventQueues {
		lack("the number of event queues", c.EventQueues, from.EventQueues)
	}
	if c.PortMTU < from.PortMTU {
		lack("the HCA's MTU", c.PortMTU, from.PortMTU)
	}
	if missing := from.Accepted &^ c.Features; missing != 0 {
		out = append(out, fmt.Sprintf("features %#x, which the driver uses, are not offered", missing))
	}
	for _, name := range slices.Sorted(maps.Keys(from.Limits)) {
		if has, ok := c.Limits[name]; ok && has < from.Limits[name] {
			lack("the HCA's limit "+name, has, from.Limits[name])
		}
	}
	return out
}
