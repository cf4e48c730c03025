package translate

// What keys cost the host (Account). The quota Limits.MaxPages counts entries; these figures are bytes, and include
// what the quota does not know: the objects, and that a group of two pages has entries for 512.

// entrySize is the size of an MTT entry; chargeLocked counts in them.
const entrySize = 8

// keyCost is what a key occupies, in bytes.
type keyCost struct {
	object  uint64 // region, window, groups, and the owner's record of the key
	entries uint64
}

// cost returns what the region costs when it is new. A pinned region costs the entries of all its pages from the
// beginning, so that SetPages does not fail for memory; that is what it occupies unless pages lie alone.
func (r *Region) cost() keyCost {
	c := keyCost{object: AllocatedFor[Region](1) + MapEntry}
	switch {
	case r.demand:
		c.object += AllocatedFor[sparseMTT](1) + AllocatedFor[sparseTable](1) + 2*entrySize // a place in demandPool.regions
	case !r.phys:
		c.object += AllocatedFor[mttGroup](int((r.npages + mttGroupMask) >> mttGroupShift))
		c.entries = r.npages >> mttGroupShift * mttGroupSize * entrySize
		if r.npages&mttGroupMask > 1 { // the last group; one page needs no entries
			c.entries += mttGroupSize * entrySize
		}
	}
	return c
}

// costLocked returns what the region costs now.
func (r *Region) costLocked() keyCost {
	c := r.cost()
	if r.demand {
		c.entries = r.chargeLocked() * entrySize
	}
	return c
}

// cost returns what the key costs.
func (d *Dynamic) cost() keyCost {
	c := keyCost{object: AllocatedFor[Dynamic](1) + MapEntry}
	if d.kind == FastRegion {
		c.object += AllocatedFor[mttGroup](1)
		c.entries = mttGroupSize * entrySize
	}
	return c
}

// Fixed returns what a VM with these limits occupies before it has regions, and keeps: the table of keys, filled as far
// as MaxRegions keys need it.
func (l Limits) Fixed() uint64 {
	l.complete()
	groups := l.mptGroups()
	return AllocatedFor[*mptGroup](groups) + uint64(groups)*AllocatedFor[mptGroup](1) +
		AllocatedFor[VM](1) + 2*mttGroupSize*entrySize // and spare entries
}

// chargeKey charges both parts of a key's cost, or none.
func (a *Account) chargeKey(c keyCost) error {
	if err := a.Charge(CostRegions, c.object); err != nil {
		return err
	}
	if err := a.Charge(CostEntries, c.entries); err != nil {
		a.Credit(CostRegions, c.object)
		return err
	}
	return nil
}

// chargedLocked records that the charge of r, which was before, has changed. roomLocked has made the room.
func (vm *VM) chargedLocked(r *Region, before uint64) {
	now := r.chargeLocked()
	vm.pages += now - before
	if now > before {
		vm.lim.Account.Take(CostEntries, (now-before)*entrySize)
	} else {
		vm.lim.Account.Credit(CostEntries, (before-now)*entrySize)
	}
}
