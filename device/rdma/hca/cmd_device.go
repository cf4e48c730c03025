package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// Commands about the device and its port, and the two tables that loops look
// things up in: GIDs and address handles.

func queryDevice(c *cmd) error {
	a := c.d.attr()
	a.Encode(c.reply(abi.SizeDeviceAttr))
	return nil
}

func queryPort(c *cmd) error {
	mtu := uint32(c.d.portMTU())
	// 25 Gbit/s: what copying by one core comes to, and no promise. Libraries rank
	// devices by it.
	a := abi.PortAttr{State: abi.PortDown, MaxMTU: 4096, ActiveMTU: mtu, ActiveSpeed: abi.SpeedEDR, ActiveWidth: abi.Width1X}
	if c.d.link.Load() {
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
	c.d.gids.put(int(r.Index), gid{set: true, v1: r.Type == abi.GIDRoCEv1, vlan: r.VLANID, addr: r.GID})
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
	c.d.gids.put(int(r.Index), gid{})
	return nil
}

func setDoorbells(c *cmd) error {
	var r abi.SetDoorbells
	if err := r.Decode(c.in); err != nil {
		return err
	}
	if int(r.Engine) >= len(c.d.engines) {
		return refuse(abi.StatusInvalid, "engine %d, the device has %d", r.Engine, len(c.d.engines))
	}
	if r.NPages != abi.DoorbellPages {
		return refuse(abi.StatusInvalid, "doorbell area of %d pages, must be %d", r.NPages, abi.DoorbellPages)
	}
	space := c.d.space()
	db := newDoorbells(space, len(c.d.qps))
	for i, pa := range r.PA {
		if pa&dbPageOffMask != 0 {
			return refuse(abi.StatusInvalid, "doorbell page %d at PA %#x is not 4 KiB aligned", i, pa)
		}
		if !space.Contains(translate.PA(pa), 1<<dbPageShift) {
			return refuse(abi.StatusFault, "doorbell page %d at PA %#x is not in guest memory", i, pa)
		}
		db.pages[i] = translate.PA(pa)
	}
	e := c.d.engines[r.Engine]
	var h holds
	for _, pa := range db.pages {
		if err := c.holdMemory(&h, pa, 1<<dbPageShift); err != nil {
			h.release()
			return err
		}
	}
	err := c.on(e, func() error {
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
		h.release()
		return err
	}
	c.t.dbHeld[r.Engine].release()
	c.t.dbHeld[r.Engine] = h
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
	case c.d.ahs.Load() != nil:
		return refuse(abi.StatusBusy, "the address handle table was given before")
	case r.NumEntries == 0 || r.NPages == 0:
		return refuse(abi.StatusInvalid, "address handle table of %d entries in %d pages", r.NumEntries, r.NPages)
	case r.NumEntries > uint32(c.d.lim.AHs):
		return &limitError{what: "address handles", n: uint64(r.NumEntries), max: uint64(c.d.lim.AHs)}
	}
	mem, err := translate.NewRing(c.d.space(), decodePAs(list), 12, uint64(r.NumEntries)*abi.SizeAH)
	if err != nil {
		return memoryError(err)
	}
	if err := c.holdPages(&c.t.ahHeld, list, 12, uint64(r.NumEntries)*abi.SizeAH); err != nil {
		c.t.ahHeld.release()
		return err
	}
	c.d.ahs.Store(&ahTable{mem: mem, n: r.NumEntries})
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
	s := c.d.stats()
	s.Encode(c.reply(abi.SizeStats))
	return nil
}
