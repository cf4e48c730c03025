package daemon

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/rdma/hca"
)

// A VM goes on where its network, addresses and devices are the same, and a QEMU waits for it (CO-5, CO-7).
func TestCapabilitiesTake(t *testing.T) {
	one := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	here := Capabilities{Host: "a", VM: "vm1", VNI: 100, Network: "blue", MAC: "02:00:00:00:00:01", IPs: one, Queues: 1,
		Attached: true, Running: true, HCADevice: config.Ivshmem,
		HCA: &hca.Capabilities{Context: 6, Engines: 1, EventQueues: 2, PortMTU: 1024, Limits: map[string]uint64{"QPs": 64}}}
	for want, change := range map[string]func(*Capabilities){
		"":                            func(*Capabilities) {},
		`VM "vm2"`:                    func(c *Capabilities) { c.VM = "vm2" },
		"VNI 101, here":               func(c *Capabilities) { c.VNI = 101 },
		"MAC is":                      func(c *Capabilities) { c.MAC = "02:00:00:00:00:02" },
		"[10.0.0.2] there":            func(c *Capabilities) { c.IPs = []netip.Addr{netip.MustParseAddr("10.0.0.2")} },
		"may use [] there":            func(c *Capabilities) { c.IPs = []netip.Addr{} },
		"2 queues there":              func(c *Capabilities) { c.Queues = 2 },
		"no QEMU waits":               func(c *Capabilities) { c.Attached = false },
		"a VM runs":                   func(c *Capabilities) { c.Running = true },
		`"vhost-user" there`:          func(c *Capabilities) { c.HCADevice = config.VhostUser },
		"not connected there":         func(c *Capabilities) { c.HCADevice = "" },
		"limit QPs is 2":              func(c *Capabilities) { c.HCA.Limits["QPs"] = 2 },
		"not the capabilities":        func(c *Capabilities) { *c = Capabilities{} },
		"vnicd vm capabilities VM -j": func(c *Capabilities) { c.HCA = nil },
	} {
		b, err := json.Marshal(&here)
		if err != nil {
			t.Fatal(err)
		}
		var there Capabilities
		if err := json.Unmarshal(b, &there); err != nil {
			t.Fatal(err)
		}
		there.Host, there.Network, there.Running = "b", "azure", false
		change(&there)
		err = there.Takes(&here)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", want, err)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: several reasons: %v", want, err)
		}
	}
	there := here
	there.Running, there.IPs = false, nil
	if err := there.Takes(&here); err != nil {
		t.Errorf("any address there: %v", err)
	}
	if err := here.Takes(&there); err == nil || !strings.Contains(err.Error(), "any address here") {
		t.Errorf("any address here: %v", err)
	}
	there.VNI, there.MAC = 1, ""
	if err := there.Takes(&here); err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("two reasons: %v", err)
	}
}
