package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/ethernet/overlay"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// Changes at run time. Each is checked as a whole before it starts, exactly as the files would be. It takes effect
// entirely or not at all. The daemon writes no file: a client may have (cli/save.go).

// Errors that name the kind of refusal.
var (
	errNotFound = errors.New("not found")
	errConflict = errors.New("conflict")
)

func (d *Daemon) network(name string) (*network, error) {
	if n := d.nets[name]; n != nil {
		return n, nil
	}
	var names []string
	for _, c := range d.cfg.Networks {
		names = append(names, c.Name)
	}
	return nil, fmt.Errorf("%w: no network %q; there are: %s", errNotFound, name, list(names))
}

func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// changeLocked checks the configuration that edit produces, and adopts it if do succeeds. mu is held.
func (d *Daemon) changeLocked(edit func(*config.Config), do func() error) error {
	next := d.cfg.Clone()
	edit(next)
	if err := next.Check(); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	d.cfg = next
	return nil
}

// AddNetwork makes a network that no file has.
func (d *Daemon) AddNetwork(c *config.Network) error { return d.addNetwork(c, config.Runtime) }

// addNetwork is AddNetwork for a network from a file.
func (d *Daemon) addNetwork(c *config.Network, at config.Place) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var n *network
	err := d.changeLocked(func(next *config.Config) { next.Networks = append(next.Networks, c) }, func() (err error) {
		n, err = d.newNetwork(c)
		return err
	})
	if err != nil {
		return err
	}
	if c.TAP != nil && c.At != at { // otherwise its place in the file is known
		c.TAP.At = at
	}
	c.At = at
	d.nets[c.Name] = n
	d.log.Info("network added", "network", c.Name, "vni", c.VNI)
	return nil
}

// RemoveNetwork removes a network that has no VMs, its host port included.
func (d *Daemon) RemoveNetwork(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	var vms []string
	for _, c := range d.cfg.VMs {
		if c.Network == name {
			vms = append(vms, c.Name)
		}
	}
	if len(vms) > 0 {
		return fmt.Errorf("%w: network %q has VMs: %s; move or remove them first", errConflict, name, list(vms))
	}
	return d.changeLocked(func(next *config.Config) {
		next.Networks = slices.DeleteFunc(next.Networks, func(c *config.Network) bool { return c.Name == name })
	}, func() error {
		n.undo.run()
		delete(d.nets, name)
		d.log.Info("network removed", "network", name)
		return nil
	})
}

// replaceNetwork replaces a network's configuration by a changed copy.
func replaceNetwork(next *config.Config, name string, edit func(*config.Network)) {
	for i, c := range next.Networks {
		if c.Name == name {
			n := *c
			edit(&n)
			next.Networks[i] = &n
		}
	}
}

// AddTAP gives a network its host port.
func (d *Daemon) AddTAP(name string, c *config.TAP) error { return d.addTAP(name, c, config.Runtime) }

func (d *Daemon) addTAP(name string, c *config.TAP, at config.Place) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	if n.tap != nil {
		return fmt.Errorf("%w: network %q has the host port %q", errConflict, name, n.tap.Name())
	}
	err = d.changeLocked(func(next *config.Config) { replaceNetwork(next, name, func(x *config.Network) { x.TAP = c }) },
		func() error { return n.openTAP(d, c) })
	if err == nil {
		c.At = at
		d.portsChanged(n)
		d.log.Info("host port added", "network", name, "interface", c.Name)
	}
	return err
}

// RemoveTAP removes a network's host port.
func (d *Daemon) RemoveTAP(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	if n.tap == nil {
		return fmt.Errorf("%w: network %q has no host port", errNotFound, name)
	}
	return d.changeLocked(func(next *config.Config) {
		replaceNetwork(next, name, func(x *config.Network) { x.TAP = nil })
	}, func() error {
		n.closeTAP()
		d.portsChanged(n)
		d.log.Info("host port removed", "network", name)
		return nil
	})
}

// AddVM makes the sockets of a VM that no file has.
func (d *Daemon) AddVM(c *config.VM) error { return d.addVM(c, config.Runtime) }

func (d *Daemon) addVM(c *config.VM, at config.Place) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var v *vm
	err := d.changeLocked(func(next *config.Config) { next.VMs = append(next.VMs, c) }, func() (err error) {
		v, err = d.newVM(c)
		return err
	})
	if err != nil {
		return err
	}
	c.At = at
	d.vms[c.Name] = v
	d.portsChanged(d.nets[c.Network])
	d.log.Info("VM added", "vm", c.Name, "network", c.Network, "mac", c.MAC)
	return nil
}

func (d *Daemon) vm(name string) (*vm, error) {
	if v := d.vms[name]; v != nil {
		return v, nil
	}
	if d.going[name] != nil {
		return nil, fmt.Errorf("%w: %w", errNotFound, beingRemoved(name))
	}
	var names []string
	for _, c := range d.cfg.VMs {
		names = append(names, c.Name)
	}
	return nil, fmt.Errorf("%w: no VM %q; there are: %s", errNotFound, name, list(names))
}

// beingRemoved is the error for a VM whose removal is in progress: neither the VM nor its name can be used.
func beingRemoved(name string) error {
	return fmt.Errorf("VM %q is being removed: its memory is still in use, see the log", name)
}

// RemoveVM disconnects a VM and removes its sockets. It leaves its network and the configuration at once; then its
// memory is released (EP-3), which waits until nothing uses it. Only this call and a request for the VM's name wait for
// that.
func (d *Daemon) RemoveVM(name string) error {
	v, err := d.takeVM(name)
	if err != nil {
		return err
	}
	defer d.removals.Done()
	v.undo.run()
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.going, name)
	d.log.Info("VM removed", "vm", name)
	return nil
}

// takeVM moves a VM to those that are being removed.
func (d *Daemon) takeVM(name string) (*vm, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v, err := d.vm(name)
	if err != nil {
		return nil, err
	}
	return v, d.changeLocked(func(next *config.Config) {
		next.VMs = slices.DeleteFunc(next.VMs, func(c *config.VM) bool { return c.Name == name })
	}, func() error {
		delete(d.vms, name)
		d.going[name] = v
		d.removals.Add(1)
		v.port.Close()
		d.portsChanged(d.nets[v.cfg.Network])
		return nil
	})
}

// MoveVM moves a running VM's port to another network.
func (d *Daemon) MoveVM(name, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	v, err := d.vm(name)
	if err != nil {
		return err
	}
	n, err := d.network(to)
	if err != nil {
		return err
	}
	from := v.cfg.Network
	moved := *v.cfg
	moved.Network = to
	err = d.changeLocked(func(next *config.Config) {
		next.VMs[slices.Index(next.VMs, v.cfg)] = &moved
	}, func() error { return v.move(n, &moved) })
	if err == nil {
		d.portsChanged(n)
		d.portsChanged(d.nets[from])
		d.log.Info("VM moved", "vm", name, "from", from, "to", to)
	}
	return err
}

// SetRoute sets an entry of a network's table: a peer, a MAC or an IP address. It replaces an entry that an earlier
// call set.
func (d *Daemon) SetRoute(name string, r overlay.Route) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	before, had := n.table.Said(d.source, r.Key)
	if err = n.table.Set(d.source, r); err != nil {
		// On an error the table must be as before.
		if n.table.Withdraw(d.source, r.Key); had {
			_ = n.table.Set(d.source, before) // the best that can be done
		}
		return err
	}
	if r.Kind == overlay.Peer {
		n.hand[r.VTEP.Unmap()] = true
		n.setTunnels(d.cfg.Network(name))
	}
	return nil
}

// RemoveRoute removes an entry that SetRoute has set, or a learnt MAC.
func (d *Daemon) RemoveRoute(name string, k overlay.Key) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	if k.Kind == overlay.Peer {
		delete(n.hand, k.VTEP.Unmap())
		n.setTunnels(d.cfg.Network(name))
	}
	if n.table.Withdraw(d.source, k) || k.Kind == overlay.MAC && n.sw.Forget(vswitch.Address{MAC: k.MAC, VLAN: k.VLAN}) {
		return nil
	}
	return fmt.Errorf("%w: no such %s was added at run time to network %q (entries from the configuration or from VMs cannot be removed)", errNotFound, k.Kind, name)
}

// FDBEntry is one entry of a network's forwarding table, with its source.
type FDBEntry struct {
	Network string `json:"network"`
	vswitch.Entry
	VTEP   netip.Addr `json:"vtep,omitzero"`
	Source string     `json:"source"` // learnt, port (the port's own MAC), or a table source
}

// FDB lists the forwarding table of one network, or of all if name is empty.
func (d *Daemon) FDB(name string) ([]FDBEntry, error) {
	return each(d, name, func(c *config.Network, n *network) (out []FDBEntry) {
		behind := map[vswitch.Remote]netip.Addr{}
		if d.vtep != nil {
			for _, p := range d.vtep.Peers(c.VNI) {
				behind[p.Remote] = p.Addr
			}
		}
		sources := map[overlay.Key]string{}
		for _, r := range n.table.Routes() {
			if r.Active && r.Kind == overlay.MAC {
				sources[overlay.Key{Kind: r.Kind, MAC: r.MAC, VLAN: r.VLAN}] = r.Source
			}
		}
		for _, e := range n.sw.Entries() {
			x := FDBEntry{Network: c.Name, Entry: e, VTEP: behind[e.Remote], Source: "learnt"}
			if e.Static {
				if x.Source = sources[overlay.Key{Kind: overlay.MAC, MAC: e.MAC, VLAN: e.VLAN}]; x.Source == "" {
					x.Source = "port"
				}
			}
			out = append(out, x)
		}
		return out
	})
}

// NetworkNeighbour is one IP address that a network knows.
type NetworkNeighbour struct {
	Network string `json:"network"`
	vswitch.Neighbour
}

// Neighbours lists the IP addresses that one network knows, or all networks if name is empty.
func (d *Daemon) Neighbours(name string) ([]NetworkNeighbour, error) {
	return each(d, name, func(c *config.Network, n *network) (out []NetworkNeighbour) {
		for _, x := range n.sw.Neighbours() {
			out = append(out, NetworkNeighbour{c.Name, x})
		}
		return out
	})
}

// NetworkPort is one port of a network.
type NetworkPort struct {
	Network string `json:"network"`
	vswitch.PortStatus
}

// Ports lists the ports of one network, or of all if name is empty.
func (d *Daemon) Ports(name string) ([]NetworkPort, error) {
	return each(d, name, func(c *config.Network, n *network) (out []NetworkPort) {
		for _, x := range n.sw.Ports() {
			out = append(out, NetworkPort{c.Name, x})
		}
		return out
	})
}

// NetworkRoute is one entry that a table source has given to a network.
type NetworkRoute struct {
	Network string `json:"network"`
	overlay.RouteStatus
}

// Routes lists the entries of table sources for one network, or for all if name is empty.
func (d *Daemon) Routes(name string) ([]NetworkRoute, error) {
	return each(d, name, func(c *config.Network, n *network) (out []NetworkRoute) {
		for _, x := range n.table.Routes() {
			out = append(out, NetworkRoute{c.Name, x})
		}
		return out
	})
}

// each collects f's results for one network, or for all. The result is never nil, so that JSON has an empty list.
func each[T any](d *Daemon, name string, f func(*config.Network, *network) []T) ([]T, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	out := []T{}
	if name != "" {
		if _, err := d.network(name); err != nil {
			return nil, err
		}
	}
	for _, c := range d.cfg.Networks {
		if name == "" || c.Name == name {
			out = append(out, f(c, d.nets[c.Name])...)
		}
	}
	return out, nil
}
