package hca

import (
	"maps"
	"strings"
	"testing"
)

// A device goes on where each figure is as large as where it comes from, and the number of its queues is the same
// (CO-5, CO-7).
func TestCapabilities(t *testing.T) {
	movesNoData(t)
	of := func(l Limits) *Capabilities { return newWorld(t, 1, 1, l).guests[0].Capabilities() }
	from := of(Limits{})
	if lacks := from.Lacks(from); lacks != nil {
		t.Errorf("its own: %q", lacks)
	}
	for name, l := range map[string]Limits{"QPs": {QPs: 100}, "MRSize": {MRSize: 1 << 30}, "MTTs": {MTTs: 1 << 20},
		"Memory": {Memory: 200 << 20}, "GIDs": {GIDs: 8}} {
		less := of(l)
		if lacks := less.Lacks(from); len(lacks) != 1 || !strings.Contains(lacks[0], "limit "+name+" is ") {
			t.Errorf("%s: %q", name, lacks)
		}
		if lacks := from.Lacks(less); lacks != nil {
			t.Errorf("a larger %s: %q", name, lacks)
		}
	}
	for want, change := range map[string]func(*Capabilities){
		"version":      func(c *Capabilities) { c.Context-- },
		"engines":      func(c *Capabilities) { c.Engines++ },
		"event queues": func(c *Capabilities) { c.EventQueues++ },
		"MTU":          func(c *Capabilities) { c.PortMTU /= 2 },
		"features":     func(c *Capabilities) { c.Features = 0 },
	} {
		used, there := *from, *from
		used.Accepted, there.Limits = from.Features, maps.Clone(from.Limits)
		change(&there)
		if lacks := there.Lacks(&used); len(lacks) != 1 || !strings.Contains(lacks[0], want) {
			t.Errorf("%s: %q", want, lacks)
		}
	}
	newer := *from
	newer.Context++
	newer.Limits = maps.Clone(from.Limits)
	newer.Limits["QPs"], newer.Limits["a limit that this vnicd has not"] = 1<<20, 1
	if lacks := newer.Lacks(from); lacks != nil {
		t.Errorf("a newer one: %q", lacks)
	}
}
