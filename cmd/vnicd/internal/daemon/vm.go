package daemon

import (
	"fmt"
	"os"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/hca"
	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/vhostuser"
	"github.com/vnicd/vnicd/device/vnet"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// vm is one guest's NIC: a port of its network with two faces, each behind a
// vhost-user socket.
type vm struct {
	cfg  *config.VM
	port *lfe.VMPort
	net  *vnet.Device
	hca  *hca.Device

	budget *hostdriver.Budget // of both sockets
}

func (d *Daemon) makeVM(c *config.VM, loop *engine.Loop, gvmi uint32) (*vm, error) {
	network := d.nets[c.Network]
	log := d.log.With("vm", c.Name)
	port, err := lfe.NewVMPort(network, lfe.VMPortConfig{Name: c.Name, MAC: lfe.MAC(c.MAC), IPs: c.IPs, Rate: c.Rate, Storm: c.Storm, Loop: loop})
	if err != nil {
		return nil, err
	}
	d.onClose(port.Close)
	v := &vm{cfg: c, port: port, budget: hostdriver.NewBudget(c.MemoryBudget)}
	if c.QMP != "" {
		d.onClose(watchMemory(c.QMP, v.budget.Resync, log.Named("qmp")))
	}

	if v.net, err = vnet.New(vnet.Config{
		Name: c.Name, MAC: lfe.MAC(c.MAC), Loops: []*engine.Loop{loop}, Pool: d.pool, Port: port, Log: log.Named("net"),
	}); err != nil {
		return nil, err
	}
	d.onClose(v.net.Close)
	if v.hca, err = hca.New(hca.Config{
		Name: "vnic0", MAC: [6]byte(c.MAC), Loops: d.loops, Pool: d.pool, MTU: network.MTU, Version: d.version, Log: log.Named("hca"),
		Limits: hca.Limits{QPs: c.Limits.QPs, CQs: c.Limits.CQs, MRs: c.Limits.MRs, MTTs: c.Limits.Pages},
	}); err != nil {
		return nil, err
	}
	d.onClose(v.hca.Close)

	v.hca.SetUplink(port.InputHCA)
	port.SetNet(v.net)
	port.SetHCA(v.hca)
	// The path MTU follows the network's; the driver looks again.
	d.onClose(network.OnMTU(func(int) { v.hca.PortChanged() }))
	// Undone before the devices close: nothing is delivered to a closed device.
	d.onClose(func() { port.SetHCA(nil); port.SetNet(nil) })

	for _, s := range []struct {
		path string
		dev  vhostuser.Device
	}{{d.cfg.NetSocket(c), v.net}, {d.cfg.HCASocket(c), v.hca}} {
		srv, err := vhostuser.Listen(vhostuser.Config{
			Path: s.path, Mode: os.FileMode(d.cfg.SocketMode), UID: -1, GID: -1, Log: log, VMs: d.gvms, Budget: v.budget, SlotName: d.slotName,
		}, s.dev, translate.GVMI(gvmi))
		if err != nil {
			return nil, fmt.Errorf("socket %s: %w", s.path, err)
		}
		d.onClose(func() { _ = srv.Close() })
	}
	return v, nil
}

// slotName names an epoch's reader slot: loops have those of their IDs, the rest
// is for goroutines that handle commands and vhost-user messages.
func (d *Daemon) slotName(slot int) string {
	if slot < len(d.loops) {
		return d.loops[slot].String()
	}
	return "command or message"
}
