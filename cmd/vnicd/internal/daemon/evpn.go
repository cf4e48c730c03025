package daemon

import (
	"fmt"

	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

var errNoEVPN = fmt.Errorf("%w: this host has no `evpn` section", errNotFound)

// EVPN returns the BGP sessions, and what each network gets from them.
func (d *Daemon) EVPN() (*evpn.Status, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.evpn == nil {
		return nil, errNoEVPN
	}
	return d.evpn.Status(), nil
}

// EVPNRoutes lists received and advertised routes of one network, or of all if name is empty.
func (d *Daemon) EVPNRoutes(name string) ([]evpn.RouteStatus, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.evpn == nil {
		return nil, errNoEVPN
	}
	if name != "" {
		if _, err := d.network(name); err != nil {
			return nil, err
		}
	}
	return d.evpn.Routes(name), nil
}

// ClearDuplicate lets EVPN use a MAC again that was held as a duplicate.
func (d *Daemon) ClearDuplicate(name string, m vswitch.MAC) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	if n.evpn == nil || !n.evpn.ClearDuplicate(m) {
		return fmt.Errorf("%w: %v is not a duplicate in network %q", errNotFound, m, name)
	}
	return nil
}
