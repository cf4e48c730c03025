package vswitch

import (
	"fmt"
	"slices"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// setStatic stores a static entry, replacing a learnt or yielding one. One that is there already disturbs nobody.
func (n *Network) setStatic(m Address, a *Attachment, remote uint16, yields bool) error {
	now := n.seconds()
	fresh := makeValue(a.id, true, remote, now)
	if yields {
		fresh = fresh.yielding()
	}
	expired := func(v value) bool { return v.expired(now, n.age) }
	var old value
	var conflict, same bool
	res := n.fdb.put(m.key(), fresh, true, expired, func(v value) bool {
		old = v
		conflict = v != 0 && v.static() && !v.yields() && v.port() != a.id && !(yields && n.away(m.key(), v))
		same = v.place() == fresh.place()
		return !conflict && !same
	}, n.gone)
	switch {
	case conflict:
		return ErrMACInUse
	case same:
		return nil
	case res == putNoSpace:
		return fmt.Errorf("vswitch: forwarding table has no room for static entry %v", m)
	}
	if m.VLAN == 0 { // it applies to all VLANs
		n.fdb.tagged(m.key(), func(k uint64) { n.remove(k, func(v value) bool { return !v.static() }) })
	}
	if old != 0 {
		n.gone(old)
		if old.place() != fresh.place() {
			n.relocated(a, now)
		}
	}
	n.entries.Add(1)
	n.statics.Add(1)
	n.advance() // it may shadow an entry for all VLANs
	return nil
}

// SetStatic makes an address reachable at a port, and for tunnel ports behind a remote, without learning; it neither
// ages nor moves. Without a VLAN it applies to all VLANs. It replaces a learnt entry, or an earlier static one of the
// same port. ErrMACInUse: it is static at another port.
func (n *Network) SetStatic(m Address, a *Attachment, remote Remote) error {
	if m.MAC.IsGroup() || m.MAC.IsZero() || m.VLAN > maxVLAN {
		return fmt.Errorf("vswitch: network %q: %v cannot be a static entry", n.cfg.Name, m)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if a.closed.Load() {
		return ErrClosed
	}
	return n.setStatic(m, a, uint16(remote), false)
}

// SetYielding is SetStatic for a control plane's entry of an address behind a tunnel: frames from tunnels do not move
// it, but a port of this host takes it over by sending from it (RoCE frames excepted), by being attached with it, or by
// claiming it (VMPort.Claim). It may replace the own entry of a port behind which nothing runs.
func (n *Network) SetYielding(m Address, a *Attachment, remote Remote) error {
	if m.MAC.IsGroup() || m.MAC.IsZero() || m.VLAN > maxVLAN {
		return fmt.Errorf("vswitch: network %q: %v cannot be a static entry", n.cfg.Name, m)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if a.closed.Load() {
		return ErrClosed
	}
	return n.setStatic(m, a, uint16(remote), true)
}

// RemoveStatic removes a port's static entry, and reports whether there was one. The port's own addresses stay.
func (n *Network) RemoveStatic(m Address, a *Attachment) bool {
	if slices.Contains(a.cfg.MACs, m.MAC) {
		return false
	}
	return n.remove(m.key(), func(v value) bool { return v.static() && v.port() == a.id })
}

// Forget removes a learnt entry and reports whether there was one.
func (n *Network) Forget(m Address) (ok bool) {
	n.forgetHomes(func(s *flap) bool { return s.key == m.key() }, func() {
		ok = n.remove(m.key(), func(v value) bool { return !v.static() })
	})
	return ok
}

func (n *Network) remove(key uint64, match func(value) bool) bool {
	removed := 0
	x, y := n.fdb.pair(key)
	for _, b := range [2]*bucket{x, y} {
		removed += b.removeIf(true, func(k uint64, v value) bool { return k == key && match(v) }, n.gone)
	}
	return removed > 0
}

// FlushRemote removes all entries, static ones included, behind one remote of a tunnel port.
func (n *Network) FlushRemote(a *Attachment, remote Remote) {
	gone := func(v value) bool { return v.port() == a.id && v.remote() == uint16(remote) }
	all := func() { n.purge(func(_ uint64, v value) bool { return gone(v) }) }
	all()
	n.forgetPeer(a, remote)
	n.Quiesce() // a loop that has just moved an address away from there has recorded that
	n.forgetHomes(func(s *flap) bool { return gone(s.home) }, all)
}

// FlushPort removes the learnt entries of a port.
func (n *Network) FlushPort(a *Attachment) {
	gone := func(v value) bool { return v.port() == a.id && !v.static() }
	n.forgetHomes(func(s *flap) bool { return gone(s.home) },
		func() { n.purge(func(_ uint64, v value) bool { return gone(v) }) })
}

// learn records the place of a source address. It returns false if the frame must be dropped, which it counts: because
// the address has a static entry elsewhere (otherwise one port could pose as another), flaps and is held elsewhere, or
// because the frame has returned from elsewhere, or is a RoCE frame from which nothing may be learnt.
//
// RoCE frames write to memory, and any host that can forge an outer header can send many, so they are trusted least
// (MT-6): one from another place than its address's known one is dropped; an address moves by ARP, neighbour discovery
// or any other frame, or by a table source. A new address is learnt from a RoCE frame only if its receiver would accept
// the frame.
func (n *Network) learn(l *loop.Loop, a *Attachment, b *frame.Buf, remote uint16, now uint32) bool {
	f, h := b.Bytes(), b.Layout()
	src := macKey(f[6:]) | vlanKey(h.VLAN)
	fresh := makeValue(a.id, false, remote, now)
	bucket, slot, v, ok := n.fdb.find(src)
	if ok {
		switch {
		case v.place() == fresh.place():
			if v.seen() != now {
				bucket.vals[slot].CompareAndSwap(uint64(v), uint64(fresh))
			}
			return true
		case v.static() && !a.takesOver(src, v, h):
			return a.mayMove(l, v, fresh, h)
		case v.static(): // the table source that set it decides whether it flaps
			if !n.cfg.noHold && n.echoes.echo(f, now) {
				a.looped(l, now)
				return false
			}
		case v.expired(now, n.age):
		case h.Is(header.IsRoCE):
			a.Counters.Drop(l, Misplaced, 1)
			return false
		case !a.learns():
			return true
		case !n.cfg.noHold && n.echoes.echo(f, now):
			a.looped(l, now)
			return false
		default:
			switch n.mayFlap(src, v, fresh, now) {
			case moveHeld:
				a.Counters.Drop(l, FlapHeld, 1)
				return false
			case moveLater:
				return true
			}
		}
	}
	if src&^macBits != 0 {
		if _, _, v, ok := n.fdb.find(src & macBits); ok && v.static() && !a.takesOver(src, v, h) {
			return a.mayMove(l, v, fresh, h)
		}
	}
	if h.Is(header.IsRoCE) && !n.wanted(l, b, now) {
		a.Counters.Drop(l, Unwanted, 1)
		return false
	}
	return !a.learns() || n.learnSlow(l, a, src, fresh, h, now)
}

// takesOver reports whether a frame lets a port take over the static entry of its source: a yielding one, by a port of
// this host; or a VM's own while that is away, by a tunnel, because it may have migrated to the host behind it. RoCE
// frames do neither.
func (a *Attachment) takesOver(src uint64, v value, h *header.Layout) bool {
	switch {
	case h.Is(header.IsRoCE):
		return false
	case a.cfg.Kind != KindVTEP:
		return v.yields()
	}
	return a.net.away(src, v)
}

// traveller is a port whose addresses can move to other hosts.
type traveller interface {
	away() bool    // nothing behind the port runs
	claimed() bool // something did, since the port is in its network
}

// away reports whether an entry is the own one of a port behind which nothing runs.
func (n *Network) away(key uint64, v value) bool {
	owner := n.byID(v.port())
	if owner == nil || !slices.Contains(owner.keys, key&macBits) {
		return false
	}
	p, ok := owner.port.(traveller)
	return ok && p.away()
}

// claim makes a port's MACs its own again if they have been taken over, see takesOver, and reports whether any had. A
// loop that is about to take one over, because the port was away a moment ago, stores that before this does.
func (n *Network) claim(a *Attachment) (moved bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if a.closed.Load() {
		return false, ErrClosed
	}
	for _, m := range a.cfg.MACs {
		_, _, v, ok := n.fdb.find(m.key())
		moved = moved || !ok || !v.static() || v.port() != a.id
		if err := n.setStatic(Address{MAC: m}, a, 0, false); err != nil {
			return moved, fmt.Errorf("network %q, port %q, MAC %v: %w", n.cfg.Name, a.cfg.Name, m, err)
		}
	}
	return moved, nil
}

// learns reports whether addresses are learnt from the port's frames.
func (a *Attachment) learns() bool {
	return a.cfg.Kind != KindVTEP || a.net.tunnels.Load()&noTunnelLearn == 0
}

// wanted asks the receiver of a RoCE frame, if its port can tell, whether it would accept the frame.
func (n *Network) wanted(l *loop.Loop, b *frame.Buf, now uint32) bool {
	out, _ := n.lookup(macKey(b.Bytes()), vlanKey(b.Layout().VLAN), now)
	if out == nil {
		return true
	}
	j, ok := out.port.(judge)
	return !ok || j.wants(l, b)
}

// judge is a port that can tell whether it would accept a RoCE frame.
type judge interface {
	wants(l *loop.Loop, b *frame.Buf) bool
}

// learnSlow inserts a new address or moves a known one.
func (n *Network) learnSlow(l *loop.Loop, a *Attachment, src uint64, fresh value, h *header.Layout, now uint32) bool {
	// Count the entry first and undo that if it is not inserted: several loops insert at once, and the limits must
	// hold.
	if a.entries.Add(1) > a.maxEntries {
		a.entries.Add(-1)
		a.Counters.Drop(l, PortFull, 1)
		return true
	}
	if n.entries.Add(1) > int64(n.cfg.MaxEntries) {
		n.sweepSome(now, fullSweep)
		if n.entries.Load() > int64(n.cfg.MaxEntries) && !n.displace(a) {
			n.entries.Add(-1)
			a.entries.Add(-1)
			a.Counters.Drop(l, TableFull, 1)
			return true
		}
	}
	var old value
	static, held := false, false
	res := n.fdb.put(src, fresh, false, func(v value) bool { return v.expired(now, n.age) }, func(v value) bool {
		old = v
		static = v != 0 && v.static() && !a.takesOver(src, v, h)
		return !static
	}, n.gone)
	if res == putDone && a.cfg.Kind != KindVTEP {
		n.tell()
	}
	switch {
	case res == putDone && old == 0:
	case res == putDone:
		if old.place() != fresh.place() {
			n.relocated(a, now)
		}
		if old.place() != fresh.place() && !old.static() && !old.expired(now, n.age) {
			held = n.moved(src, old, fresh, now)
		}
		n.gone(old)
	default:
		n.entries.Add(-1)
		a.entries.Add(-1)
		if res == putNoSpace {
			a.Counters.Drop(l, TableFull, 1)
		}
	}
	if held {
		a.Counters.Drop(l, FlapHeld, 1)
		return false
	}
	return !static || a.mayMove(l, old, fresh, h)
}

// mayMove reports whether a frame whose source has a static entry may come from its place: from the entry's port, and
// for RoCE also from the entry's remote. Otherwise it counts a drop.
func (a *Attachment) mayMove(l *loop.Loop, static, from value, h *header.Layout) bool {
	switch {
	case static.port() != from.port():
		a.Counters.Drop(l, StaticMoved, 1)
	case static.remote() != from.remote() && h.Is(header.IsRoCE):
		a.Counters.Drop(l, Misplaced, 1)
	default:
		return true
	}
	return false
}

// sweep removes expired entries from the next part of the table, once per second on whichever loop comes first.
func (n *Network) sweep(now uint32) {
	last := n.tick.Load()
	if int32(now-last) <= 0 || !n.tick.CompareAndSwap(last, now) {
		return
	}
	n.sweepSome(now, n.sweepBy)
}

func (n *Network) sweepSome(now uint32, count int) {
	start := n.fdb.hand.Add(uint64(count)) - uint64(count)
	for i := range uint64(min(count, len(n.fdb.buckets))) {
		b := &n.fdb.buckets[(start+i)&n.fdb.mask]
		if k := b.removeIf(false, func(_ uint64, v value) bool { return v.expired(now, n.age) }, n.gone); k > 0 {
			n.evicted.Add(uint64(k))
		}
	}
}

// displaceTries bounds the buckets that displace examines.
const displaceTries = 64

// displace makes room for a port below its share of a full table by removing an entry of a port above it: a flood of
// addresses at one port does not prevent others from being learnt. It returns false if it finds no such entry.
func (n *Network) displace(a *Attachment) bool {
	t := n.table.Load()
	share := (int64(n.cfg.MaxEntries) - n.statics.Load()) / int64(max(t.learn, 1))
	if a.entries.Load() > share {
		return false
	}
	done := false
	greedy := func(_ uint64, v value) bool {
		if done || v.static() || int(v.port()) >= len(t.byID) {
			return false
		}
		x := t.byID[v.port()]
		done = x != nil && x != a && x.entries.Load() > share
		return done
	}
	start := n.fdb.hand.Add(displaceTries) - displaceTries
	for i := range uint64(min(displaceTries, len(n.fdb.buckets))) {
		n.fdb.buckets[(start+i)&n.fdb.mask].removeIf(false, greedy, n.gone)
		if done {
			n.displaced.Add(1)
			return true
		}
	}
	return false
}
