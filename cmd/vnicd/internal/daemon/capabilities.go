package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/hca"
)

// Capabilities are what a host has for a VM. The VM can migrate to another host if that has as much (CO-5, CO-7).
type Capabilities struct {
	Host    string       `json:"host"`
	Version string       `json:"version"` // vnicd's
	VM      string       `json:"vm"`
	VNI     uint32       `json:"vni"` // of its network
	Network string       `json:"network"`
	MAC     string       `json:"mac"`
	IPs     []netip.Addr `json:"ips"`    // nil: any
	Queues  int          `json:"queues"` // virtio-net's queue pairs
	// Attached: a QEMU has connected. Running: its VM runs.
	Attached bool `json:"attached"`
	Running  bool `json:"running"`
	// HCADevice is as in VMStatus.
	HCADevice string            `json:"hca_device,omitempty"`
	HCA       *hca.Capabilities `json:"hca"`
}

// Capabilities returns those for a VM.
func (d *Daemon) Capabilities(name string) (*Capabilities, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	v, err := d.vm(name)
	switch {
	case err != nil:
		return nil, err
	case v.cfg.Application != nil:
		return nil, badRequest{fmt.Errorf("%q is an application, which no other host can have", name)}
	}
	net, rdma := v.net.Describe(), v.hca.Describe()
	c := &Capabilities{
		Host: d.cfg.Host, Version: d.version, VM: name, VNI: d.nets[v.cfg.Network].sw.VNI(), Network: v.cfg.Network,
		MAC: v.cfg.MAC.String(), IPs: v.cfg.IPs, Queues: v.cfg.Queues, Attached: net.Connected, Running: net.Up(),
		HCADevice: v.device(rdma.Connected), HCA: v.hca.Capabilities(),
	}
	if !d.cfg.Debug.GuestFeatures {
		c.HCA.Features &^= abi.Features
	}
	return c, nil
}

// Takes returns why the VM cannot go on at c as it does at from: an error for each reason, joined. c comes from another
// host: anything may be in it.
func (c *Capabilities) Takes(from *Capabilities) error {
	if c.VM == "" || c.HCA == nil {
		return errors.New("these are not the capabilities of a VM, as `vnicd vm capabilities VM -j` prints them")
	}
	var errs []error
	no := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.VM != from.VM {
		no("they are those of VM %q", c.VM)
	}
	if c.VNI != from.VNI {
		no("its network %q has VNI %d, here %q has %d", c.Network, c.VNI, from.Network, from.VNI)
	}
	if c.MAC != from.MAC {
		no("the VM's MAC is %q there, %q here", c.MAC, from.MAC)
	}
	if !covers(c.IPs, from.IPs) {
		no("the VM may use %s there, %s here", addresses(c.IPs), addresses(from.IPs))
	}
	if c.Queues != from.Queues {
		no("the VM has %d queues there, %d here", c.Queues, from.Queues)
	}
	switch {
	case !c.Attached:
		no("no QEMU waits there: start it with the options of `vnicd qemu-args --migratable %s` and -incoming", from.VM)
	case c.Running:
		no("a VM runs there")
	case c.HCADevice != from.HCADevice:
		no("the HCA is %s there, %s here", device(c.HCADevice), device(from.HCADevice))
	}
	if from.HCADevice == config.Ivshmem {
		for _, what := range c.HCA.Lacks(from.HCA) {
			no("%s", what)
		}
	}
	return errors.Join(errs...)
}

// covers reports whether a list of addresses, nil for any, has all those of another one.
func covers(list, of []netip.Addr) bool {
	missing := func(a netip.Addr) bool { return !slices.Contains(list, a) }
	return list == nil || of != nil && !slices.ContainsFunc(of, missing)
}

func addresses(list []netip.Addr) string {
	if list == nil {
		return "any address"
	}
	return fmt.Sprint(list)
}

func device(kind string) string {
	if kind == "" {
		return "not connected"
	}
	return strconv.Quote(kind)
}
