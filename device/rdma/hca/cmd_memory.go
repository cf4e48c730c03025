// Side: control

package hca

import (
	"slices"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// Commands about protection domains and memory regions (stage one, PF-1, PF-2).

func createPD(c *cmd) error {
	if n := len(c.t.pds); n >= c.d.lim.PDs {
		return &limitError{what: "protection domains", n: uint64(n) + 1, max: uint64(c.d.lim.PDs)}
	}
	if err := pdCost().charge(c.d.account); err != nil {
		return err
	}
	n := takeID(c, c.t.pds, &c.t.lastPD)
	c.t.pds[n] = &pd{}
	c.touch(recPD, n)
	(&abi.Handle{Handle: n}).Encode(c.reply(abi.SizeHandle))
	return nil
}

func destroyPD(c *cmd) error {
	n, err := c.handle()
	if err != nil {
		return err
	}
	p, err := c.t.pd(n)
	if err != nil {
		return err
	}
	if p.refs > 0 {
		return refuse(abi.StatusBusy, "protection domain %d is used by %d objects", n, p.refs)
	}
	delete(c.t.pds, n)
	c.touch(recPD, n)
	pdCost().credit(c.d.account)
	return nil
}

// handle decodes a request that consists of a handle only.
func (c *cmd) handle() (uint32, error) {
	var h abi.Handle
	err := h.Decode(c.in)
	return h.Handle, err
}

func createMR(c *cmd) error {
	var r abi.CreateMR
	if err := r.Decode(c.in); err != nil {
		return err
	}
	p, err := c.t.pd(r.PDN)
	switch {
	case err != nil:
		return err
	case r.Flags == abi.MRFast:
		return c.createFast(&r, p)
	case r.Flags&^uint32(abi.MRPhys|abi.MROnDemand|abi.MRImplicit) != 0:
		return refuse(abi.StatusUnsupported, "region flags %#x, known are %#x, and %#x alone", r.Flags,
			abi.MRPhys|abi.MROnDemand|abi.MRImplicit, abi.MRFast)
	case r.Access&abi.AccessOnDemand != 0 && r.Flags&abi.MROnDemand == 0:
		return refuse(abi.StatusInvalid, "access %#x is on demand, flags %#x are not", r.Access, r.Flags)
	case r.Flags&abi.MROnDemand != 0 && r.PageShift != translate.PageShift:
		return refuse(abi.StatusInvalid, "page_shift %d of a region on demand, must be %d", r.PageShift, translate.PageShift)
	case r.Length > c.d.lim.MRSize && r.Flags&abi.MRImplicit == 0:
		return &limitError{what: "bytes of a memory region", n: r.Length, max: c.d.lim.MRSize}
	}
	reg, err := c.d.data.vm.CreateRegion(translate.RegionSpec{
		PD: translate.PD(r.PDN), Access: translate.Access(r.Access), Flags: translate.RegionFlags(r.Flags),
		PageShift: r.PageShift, IOVA: translate.VA(r.IOVA), Length: r.Length, Offset: r.Offset, NPages: r.NPages,
	})
	if err != nil {
		return memoryError(err)
	}
	p.refs++
	c.t.mrs[reg.Handle()] = r.PDN
	c.touch(recKey, reg.Handle())
	resp := abi.CreateMRResp{LKey: uint32(reg.LKey()), RKey: uint32(reg.RKey()), Handle: reg.Handle()}
	resp.Encode(c.reply(abi.SizeCreateMRResp))
	return nil
}

// createFast makes a key for REG_MR requests.
func (c *cmd) createFast(r *abi.CreateMR, p *pd) error {
	if r.Access != 0 || r.IOVA != 0 || r.Length != 0 || r.Offset != 0 || r.PageShift != translate.PageShift {
		return refuse(abi.StatusInvalid,
			"region for fast registration with access %#x, iova %#x, length %d, offset %d, page_shift %d, must be 0 and %d",
			r.Access, r.IOVA, r.Length, r.Offset, r.PageShift, translate.PageShift)
	}
	key, err := c.d.data.vm.CreateDynamic(translate.FastRegion, translate.PD(r.PDN), r.NPages)
	if err != nil {
		return memoryError(err)
	}
	p.refs++
	c.t.mrs[uint32(key)] = r.PDN
	c.touch(recKey, uint32(key))
	resp := abi.CreateMRResp{LKey: uint32(key), RKey: uint32(key), Handle: uint32(key)}
	resp.Encode(c.reply(abi.SizeCreateMRResp))
	return nil
}

func setMTT(c *cmd) error {
	var r abi.SetMTT
	if err := r.Decode(c.in); err != nil {
		return err
	}
	if r.Flags&^uint16(abi.SetMTTResume) != 0 {
		return refuse(abi.StatusUnsupported, "flags %#x, known are %#x", r.Flags, abi.SetMTTResume)
	}
	list, err := c.pages(abi.SizeSetMTT, uint32(r.Count), uint32(r.Flags)) // SetMTTResume, 1, stands for one word
	if err != nil {
		return err
	}
	pas, token := decodePAs(list[:8*int(r.Count)]), uint64(0)
	if r.Flags != 0 {
		if token = abi.PA(list, int(r.Count)); token>>32 != 0 {
			return refuse(abi.StatusInvalid, "token %#x has more than 32 bits", token)
		}
	}
	if c.overtaken(r.Handle) {
		return refuse(abi.StatusNoMemory, "a CLEAR_MTT of region %#x overtook it, as its request was absent", r.Handle)
	}
	for i, pa := range pas {
		// Every access is checked again; this check reports the driver's mistake at once.
		if pa&abi.MTTAbsent == 0 && !c.d.data.space().Contains(pa&^abi.MTTReadOnly, translate.PageSize) {
			return refuse(abi.StatusFault, "page %d at %v is not in guest memory", r.First+uint64(i), pa)
		}
	}
	if err := c.d.data.vm.SetPages(r.Handle, r.First, pas); err != nil {
		return memoryError(err)
	}
	if reg, err := c.d.data.vm.Region(r.Handle); err == nil && !reg.Demand() {
		c.touchPages(r.Handle, r.First, uint64(len(pas)))
		c.warm(pas, reg.PageSize())
	}
	if r.Flags != 0 {
		// The loops see the entries from here on. A token that names no fault has no effect, as in
		// RESUME_FAULT; it is no error, because the status tells the driver whether the entries are set.
		c.d.answerFault(uint32(token), true)
	}
	return nil
}

const (
	// maxWarm bounds the bytes that one command makes present. The guest chooses the page
	// size and may repeat a page: a list could name terabytes.
	maxWarm = 4 << 30
	// maxPresent bounds the lookups by which a command finds out that nothing has to be made present.
	maxPresent = 1 << 14
)

// warm asks the host to make pages present that the guest has pinned: they will be used
// soon, and a burst of datagrams to absent pages would lose some (PF-11). Pages beyond
// maxWarm, and all pages under a budget, are left to page faults. The command is answered when they are present.
func (c *cmd) warm(pas []translate.PA, size uint64) {
	if c.t.conn.Memory().Budget != 0 {
		return
	}
	pas = slices.DeleteFunc(pas, func(pa translate.PA) bool { return pa&abi.MTTAbsent != 0 })
	absent, lookups := spansOf(pas, size, maxWarm), maxPresent
	_ = c.epoch(func() error {
		absent = slices.DeleteFunc(absent, func(x translate.Range) bool { return c.present(x, &lookups) })
		return nil
	})
	if len(absent) == 0 {
		return
	}
	// What fails is left to page faults, also if there is no room for the list.
	if list, err := newHeld(c.d.account, absent); err == nil {
		c.warming = &hostWait{ranges: [][]translate.Range{absent}, holds: []held{list}, warm: true}
	}
}

// present reports whether all of x is present on the host, as far as lookups suffice to know; inside an epoch.
func (c *cmd) present(x translate.Range, lookups *int) bool {
	for ; x.N > 0 && *lookups > 0; *lookups-- {
		b, m := c.d.data.space().HostRead(x.PA, int(min(x.N, maxWarm)))
		if !m.OK() {
			return false
		}
		x.PA, x.N = x.PA+translate.PA(len(b)), x.N-uint64(len(b))
	}
	return x.N == 0
}

// clearMTT makes entries absent at once. It is answered when no access uses the pages
// any more (ODP-5, EP-3); the guest then frees them.
func clearMTT(c *cmd) error {
	var r abi.ClearMTT
	if err := r.Decode(c.in); err != nil {
		return err
	}
	var err error
	if c.drain, err = c.d.data.vm.StartClear(r.Handle, r.First, r.Count); err != nil {
		return memoryError(err)
	}
	c.d.invalidations.Add(1)
	c.cleared, c.clears = r.Handle, true
	if reg, err := c.d.data.vm.Region(r.Handle); err == nil && !reg.Demand() {
		c.touchPages(r.Handle, r.First, r.Count)
	}
	return nil
}

// destroyMR revokes the key at once. It is answered when no access uses the memory any
// more (EP-3).
func destroyMR(c *cmd) error {
	h, err := c.handle()
	if err != nil {
		return err
	}
	return c.destroyKey(c.t.mrs, "memory region", h)
}

// destroyKey destroys the key that has handle h in keys, one of the maps of tables.
func (c *cmd) destroyKey(keys map[uint32]uint32, what string, h uint32) (err error) {
	pdn, ok := keys[h]
	if !ok {
		return notFound(what, h)
	}
	if c.drain, err = c.d.data.vm.StartDestroy(h); err != nil {
		return memoryError(err)
	}
	delete(keys, h)
	c.touch(recKey, h)
	c.t.pds[pdn].refs--
	return nil
}

func createMW(c *cmd) error {
	var r abi.CreateMW
	if err := r.Decode(c.in); err != nil {
		return err
	}
	p, err := c.t.pd(r.PDN)
	switch {
	case err != nil:
		return err
	case r.Type != uint32(translate.Window1) && r.Type != uint32(translate.Window2):
		return refuse(abi.StatusInvalid, "memory window of type %d, must be 1 or 2", r.Type)
	}
	key, err := c.d.data.vm.CreateDynamic(translate.Kind(r.Type), translate.PD(r.PDN), 0)
	if err != nil {
		return memoryError(err)
	}
	p.refs++
	c.t.mws[uint32(key)] = r.PDN
	c.touch(recKey, uint32(key))
	(&abi.Handle{Handle: uint32(key)}).Encode(c.reply(abi.SizeHandle))
	return nil
}

func destroyMW(c *cmd) error {
	h, err := c.handle()
	if err != nil {
		return err
	}
	return c.destroyKey(c.t.mws, "memory window", h)
}
