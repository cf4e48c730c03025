package translate

// Reclaiming entries (HF-3). When a VM's quota (Limits.MaxPages) is reached, groups of its demand regions that were not
// used lately are removed to make room. A clock hand passes over the groups and marks each one mttIdle; a lookup clears
// the mark. A group that still has it when the hand comes again is removed. The newest groups are passed over, so that
// a page which a fault has brought is still present when the access is repeated, wherever in its table the group
// stands. Entries of pinned regions stay.
//
// To the guest's driver the pages are still the device's: the next access is a GuestFault, and the driver gives them
// again. This is safe although no command asked for it (EP-3, TR-5). The guest frees a page only when CLEAR_MTT or
// DESTROY_MR was answered, and it sends one for each page that it gave. That command's Drain also waits for the readers
// of entries that were reclaimed before: either they were flipped for then (VM.clearing), or StartClear flips because
// VM.undrained is set. The entries' memory is reused only after such a Drain (mttSpare); otherwise it is left to the
// garbage collector.

// demandPool is what the demand regions of a VM share. Guarded by VM.mu.
type demandPool struct {
	spare   mttSpare
	groups  int          // that exist, in all regions
	leaves  int          // of these, with entries
	made    uint64       // number of groups made so far
	regions []*sparseMTT // that have a group

	// The hand: the slot of regions[region] that it comes to next. Rebuilding a table moves groups before or behind it.
	region, slot int
	reclaimed    uint64
}

// reclaimLook bounds the groups that the hand passes to find one that was not used. If all were, the first one is
// removed, as the one that the hand has not visited for longest.
const reclaimLook = 64

// reclaimNewest is the number of groups made last that are removed only if there are no others.
const reclaimNewest = 32

func (p *demandPool) listLocked(m *sparseMTT) {
	m.place = len(p.regions)
	p.regions = append(p.regions, m)
}

func (p *demandPool) unlistLocked(m *sparseMTT) {
	last := len(p.regions) - 1
	p.regions[m.place] = p.regions[last]
	p.regions[m.place].place = m.place
	p.regions[last] = nil
	p.regions = p.regions[:last]
}

// forgetLocked removes a region that is being destroyed.
func (p *demandPool) forgetLocked(m *sparseMTT) {
	if m.live > 0 {
		p.unlistLocked(m)
	}
	p.groups -= m.live
	p.leaves -= m.leaves
}

// nextLocked moves the hand to the next group. There is one.
func (p *demandPool) nextLocked() (m *sparseMTT, s *sparseSlot) {
	for {
		if p.region >= len(p.regions) {
			p.region, p.slot = 0, 0
		}
		m = p.regions[p.region]
		for slots := m.table.Load().slots; p.slot < len(slots); {
			s = &slots[p.slot]
			if p.slot++; s.existsLocked() {
				return m, s
			}
		}
		p.region, p.slot = p.region+1, 0
	}
}

// victimLocked returns a group that may be removed: not one of keep. It takes time in proportion to reclaimLook,
// reclaimNewest and the number of groups that keep contains.
func (p *demandPool) victimLocked(keep *groupRange) (m *sparseMTT, n uint64, ok bool) {
	newest := true // m is one of reclaimNewest
	for passed, looked := 0, 0; passed < p.groups+reclaimLook && looked < reclaimLook; passed++ {
		at, s := p.nextLocked()
		group := s.tag.Load() - 1
		if keep.contains(at.r, group) {
			continue
		}
		if p.made-s.made < reclaimNewest {
			if !ok {
				m, n, ok = at, group, true
			}
			continue
		}
		if s.run.Or(mttIdle)&mttIdle != 0 {
			return at, group, true
		}
		if looked++; newest {
			m, n, ok, newest = at, group, true, false
		}
	}
	return m, n, ok
}

// groupRange are groups of a region that must not be removed now.
type groupRange struct {
	r           *Region
	first, last uint64
}

func (k *groupRange) contains(r *Region, n uint64) bool {
	return k.r == r && n >= k.first && n <= k.last
}

// roomLocked makes room for need more entries, and for that many bytes in the account, if it can, by removing at most
// as many groups as that takes.
func (vm *VM) roomLocked(need, bytes uint64, keep groupRange) bool {
	p, account := &vm.demand, vm.lim.Account
	enough := func() bool { return need <= vm.lim.MaxPages-vm.pages && bytes <= account.Room() }
	if enough() {
		return true
	}
	most := uint64(p.groups)*sparseGroupCharge + uint64(p.leaves)*mttGroupSize
	if need > vm.lim.MaxPages-vm.pages+most || bytes > account.Room()+most*entrySize {
		return false // all groups would not suffice
	}
	for !enough() {
		m, n, ok := p.victimLocked(&keep)
		if !ok {
			break
		}
		before := m.chargeLocked()
		m.dropLocked(n)
		vm.chargedLocked(m.r, before)
		m.r.generation.Add(1)
		p.reclaimed++
		vm.undrained = true
	}
	if vm.undrained && (vm.clearing == nil || vm.clearing.Done()) {
		vm.releaseLocked()
	}
	return enough()
}

// Reclaimed returns how many groups of up to 512 entries of demand regions were removed to make room for others.
func (vm *VM) Reclaimed() uint64 {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	return vm.demand.reclaimed
}
