// Side: control

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// Commands about the device and its port, and the two lookup tables of the
// loops: GIDs and address handles.

func queryDevice(c *cmd) error {
	a := c.d.attr()
	a.Encode(c.reply(abi.SizeDeviceAttr))
	return nil
}

func queryPort(c *cmd) error {
	mtu := uint32(c.d.data.portMTU())
	// 25 Gbit/s is about what one core copies; it is not a promise. Libraries rank
	// devices by it.
	a := abi.PortAttr{State: abi.PortDown, MaxMTU: 4096, ActiveMTU: mtu, ActiveSpeed: abi.SpeedEDR,
		ActiveWidth: abi.Width1X}
	if c.d.data.link.Load() {
		a.State = abi.PortActive
	}
	a.Encode(c.reply(abi.SizePortAttr))
	return nil
}

func setGID(c *cmd) error {
	var r abi.SetGID
	if err := r.Decode(c.in); err != nil {
		return err
	}
	switch {
	case int(r.Index) >= c.d.lim.GIDs:
		return refuse(abi.StatusInvalid, "GID index %d, the table has %d entries", r.Index, c.d.lim.GIDs)
	case r.Type != abi.GIDRoCEv1 && r.Type != abi.GIDRoCEv2:
		return refuse(abi.StatusInvalid, "GID type %d, must be %d or %d", r.Type, abi.GIDRoCEv1, abi.GIDRoCEv2)
	case r.VLANID != abi.NoVLAN && (r.VLANID == 0 || r.VLANID > 4094):
		return refuse(abi.StatusInvalid, "vlan_id %#x, must be 1..4094 or %#x", r.VLANID, abi.NoVLAN)
	case r.SMAC != c.d.cfg.MAC:
		return refuse(abi.StatusPermission, "source MAC %x is not the device's %x", r.SMAC, c.d.cfg.MAC)
	case r.GID == [16]byte{} || isMulticast(&r.GID):
		return refuse(abi.StatusInvalid, "GID %x is not a unicast GID", r.GID)
	}
	c.d.data.gids.put(int(r.Index), gid{set: true, v1: r.Type == abi.GIDRoCEv1, vlan: r.VLANID, addr: r.GID})
	c.touch(recGID, uint32(r.Index))
	return nil
}

func clearGID(c *cmd) error {
	var r abi.ClearGID
	if err := r.Decode(c.in); err != nil {
		return err
	}
	if int(r.Index) >= c.d.lim.GIDs {
		return refuse(abi.StatusInvalid, "GID index %d, the table has %d entries", r.Index, c.d.lim.GIDs)
	}
	c.d.data.gids.put(int(r.Index), gid{})
	c.touch(recGID, uint32(r.Index))
	return nil
}

func setDoorbells(c *cmd) error {
	var r abi.SetDoorbells
	if err := r.Decode(c.in); err != nil {
		return err
	}
	if int(r.Engine) >= len(c.d.data.engines) {
		return refuse(abi.StatusInvalid, "engine %d, the device has %d", r.Engine, len(c.d.data.engines))
	}
	if r.NPages != abi.DoorbellPages {
		return refuse(abi.StatusInvalid, "doorbell area of %d pages, must be %d", r.NPages, abi.DoorbellPages)
	}
	space := c.d.data.space()
	db := newDoorbells(space, len(c.d.data.qps))
	for i, pa := range r.PA {
		if pa&dbPageOffMask != 0 {
			return refuse(abi.StatusInvalid, "doorbell page %d at PA %#x is not 4 KiB aligned", i, pa)
		}
		if !space.Contains(translate.PA(pa), 1<<dbPageShift) {
			return refuse(abi.StatusFault, "doorbell page %d at PA %#x is not in guest memory", i, pa)
		}
		db.pages[i] = translate.PA(pa)
	}
	e := c.d.data.engines[r.Engine]
	h, err := c.hold(rangesOf(db.pages[:], 1<<dbPageShift, uint64(len(db.pages))<<dbPageShift))
	if err != nil {
		return err
	}
	nonce, err := c.nonceOf(&r)
	if err != nil {
		dropAll(h)
		return err
	}
	err = c.on(e, func() error {
		if n := e.db.qps; n > 0 {
			return refuse(abi.StatusBusy, "engine %d has %d queue pairs", e.id, n)
		}
		if m := db.setWakeup(false); !m.OK() { // the loop is awake
			return &faultError{what: "doorbell area", miss: m}
		}
		e.db, e.armed = db, true
		return nil
	})
	if err != nil {
		dropAll(h)
		return err
	}
	c.t.dbHeld[r.Engine].drop()
	c.t.dbHeld[r.Engine] = h[0]
	if r.Engine == 0 {
		c.t.nonce = nonce
	}
	c.touch(recBells, r.Engine)
	return nil
}

func setAHTable(c *cmd) error {
	var r abi.SetAHTable
	if err := r.Decode(c.in); err != nil {
		return err
	}
	list, err := c.pages(abi.SizeSetAHTable, r.NPages)
	if err != nil {
		return err
	}
	switch {
	case c.d.data.ahs.Load() != nil:
		return refuse(abi.StatusBusy, "the address handle table is set already")
	case r.NumEntries == 0 || r.NPages == 0:
		return refuse(abi.StatusInvalid, "address handle table of %d entries in %d pages", r.NumEntries, r.NPages)
	case r.NumEntries > uint32(c.d.lim.AHs):
		return &limitError{what: "address handles", n: uint64(r.NumEntries), max: uint64(c.d.lim.AHs)}
	}
	mem, err := translate.NewRing(c.d.data.space(), decodePAs(list), 12, uint64(r.NumEntries)*abi.SizeAH)
	if err != nil {
		return memoryError(err)
	}
	h, err := c.hold(rangesOf(decodePAs(list), 1<<12, uint64(r.NumEntries)*abi.SizeAH))
	if err != nil {
		return err
	}
	pages := cost{list: mem.Footprint()}
	if err := pages.charge(c.d.account); err != nil {
		dropAll(h)
		return err
	}
	c.t.ahHeld, c.t.ahCost = h[0], pages
	c.d.data.ahs.Store(&ahTable{mem: mem, n: r.NumEntries})
	c.touch(recAHs, 0)
	return nil
}

func decodePAs(list []byte) []translate.PA {
	pas := make([]translate.PA, len(list)/8)
	for i := range pas {
		pas[i] = translate.PA(abi.PA(list, i))
	}
	return pas
}

func queryStats(c *cmd) error {
	s := c.d.stats(func(e *engine) counters { return e.stats })
	s.Encode(c.reply(abi.SizeStats))
	return nil
}

// resolveGID is RESOLVE.
func resolveGID(c *cmd) error {
	var r abi.Resolve
	if err := r.Decode(c.in); err != nil {
		return err
	}
	g, ok := c.d.data.gids.get(int(r.SGIDIndex))
	switch {
	case !ok:
		return refuse(abi.StatusInvalid, "sgid_index %d is not set", r.SGIDIndex)
	case r.DGID == [16]byte{} || isMulticast(&r.DGID):
		return refuse(abi.StatusInvalid, "GID %x is not a unicast GID", r.DGID)
	case isV4(&g.addr) != isV4(&r.DGID):
		return refuse(abi.StatusInvalid, "dgid and GID %d are of different address families", r.SGIDIndex)
	}
	var resp abi.ResolveResp
	if port := c.d.data.port.Load(); c.d.data.hasAddress(r.DGID, g.vlan) {
		resp.MAC = c.d.cfg.MAC
	} else if port != nil {
		if mac, known := (*port).Owner(r.DGID, networkVLAN(g.vlan)); known {
			resp.MAC = mac
		} else {
			// The request may reach other VMs' memory at once. Their faults are their own: the driver asks again.
			e := c.d.data.engines[0]
			_ = e.visit(func() { c.d.data.sendRequest(e.loop, *port, g, &r.DGID) })
		}
	}
	resp.Encode(c.reply(abi.SizeResolveResp))
	return nil
}

// odpUD is the on-demand paging support of UD (ODP-2, ODP-7). On UC and UD, packets for
// absent memory are lost until it is present (PF-11).
const odpUD = abi.ODPSend | abi.ODPRecv | abi.ODPSRQRecv

// attr is the response to QUERY_DEVICE.
func (d *Device) attr() abi.DeviceAttr {
	l := &d.lim
	return abi.DeviceAttr{
		NodeGUID: eui64(d.cfg.MAC), MaxMRSize: l.MRSize, MaxQP: uint32(l.QPs), MaxQPWR: uint32(l.QPWRs - 1),
		MaxSGE: uint32(l.SGEs), MaxInline: uint32(l.Inline), MaxCQ: uint32(l.CQs), MaxCQE: uint32(l.CQEs - 1),
		MaxMR: uint32(l.MRs), MaxPD: uint32(l.PDs), MaxSRQ: uint32(l.SRQs), MaxSRQWR: uint32(l.SRQWRs - 1),
		MaxSRQSGE: uint32(l.SRQSGEs), MaxAH: uint32(l.AHs), MaxGID: uint32(l.GIDs), MaxQPRdAtom: uint32(l.RdAtomic),
		MaxQPInitRdAtom: uint32(l.RdAtomic), MaxMcastGrp: uint32(l.McastGroups), MaxMcastQPAttach: uint32(l.McastMembers),
		MaxMTT: l.MTTs,
		Caps: abi.CapAtomic | abi.CapAtomicWrite | abi.CapFlushGlobal | abi.CapSRQ | abi.CapUC | abi.CapMcast |
			abi.CapRoCEv1 | abi.CapResizeCQ |
			abi.CapLocalDMALKey | abi.CapMemMgt | abi.CapMW | abi.CapSetMTTResume | abi.CapCountQP | abi.CapModifyCQ,
		ODPRC: odpUD | abi.ODPWrite | abi.ODPRead | abi.ODPAtomic, ODPUC: odpUD | abi.ODPWrite, ODPUD: odpUD,
		MaxMW: uint32(l.MRs), MaxFastReg: abi.MaxFastReg,
	}
}

// eui64 makes the node GUID from the MAC (RFC 4291, appendix A).
func eui64(mac [6]byte) [8]byte {
	return [8]byte{mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]}
}
