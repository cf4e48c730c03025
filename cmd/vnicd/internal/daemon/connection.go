package daemon

import (
	"net/netip"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/rdma/hca"
)

// VMConnection is one connection of a VM, with its path on the underlay.
type VMConnection struct {
	VM string `json:"vm"`
	hca.Connection
}

// Connections lists the connections of one VM, or of all if name is empty.
func (d *Daemon) Connections(name string) ([]VMConnection, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if name != "" {
		if _, err := d.vm(name); err != nil {
			return nil, err
		}
	}
	out := []VMConnection{}
	behind := map[uint32]map[vswitch.Remote]netip.Addr{} // by VNI
	for _, c := range d.cfg.VMs {
		if name != "" && c.Name != name {
			continue
		}
		for _, x := range d.vms[c.Name].hca.Connections() {
			if x.Tuple != nil {
				d.encapsulation(x.Tuple, behind)
			}
			out = append(out, VMConnection{c.Name, x})
		}
	}
	return out, nil
}

// encapsulation fills in the outer header of a tuple that leads to a tunnel.
func (d *Daemon) encapsulation(t *hca.Tuple, behind map[uint32]map[vswitch.Remote]netip.Addr) {
	if t.Kind != vswitch.KindVTEP.String() || d.vtep == nil {
		return
	}
	far := behind[t.VNI]
	if far == nil {
		far = map[vswitch.Remote]netip.Addr{}
		for _, p := range d.vtep.Peers(t.VNI) {
			far[p.Remote] = p.Addr
		}
		behind[t.VNI] = far
	}
	v := d.cfg.VTEP
	t.VTEP, t.Source, t.UDPPort, t.DSCP = far[t.Far], v.Local, v.Port, v.DSCP
}
