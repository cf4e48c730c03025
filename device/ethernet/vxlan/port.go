package vxlan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

// NetworkOption adjusts one network of a VTEP.
type NetworkOption func(*port)

// MaxPeers bounds the peers of the network, configured and learnt; the default is DefaultMaxPeers.
func MaxPeers(n int) NetworkOption { return func(p *port) { p.maxPeers = n } }

// port is the VTEP's port of one network.
type port struct {
	vt         *VTEP
	net        *vswitch.Network
	att        *vswitch.Attachment
	header     [HeaderLen]byte // the same for all frames of the network
	learn      atomic.Bool
	segments   atomic.Bool // segmented messages are not refused
	maxPeers   int
	peers      atomic.Pointer[peerSet]
	configured []netip.Addr // with zones, as given; guarded by VTEP.mu
	mtu        int          // that the underlay allows; guarded by VTEP.mu
}

// peer is another host's VTEP. Immutable.
type peer struct {
	addr    netip.Addr // without zone
	origin  *origin    // shared by the peers of that address
	id      vswitch.Remote
	learnt  bool
	scope   uint32 // interface index of a link-local address
	retired bool   // its number may not be reused before vswitch has removed it
	raw     rawAddr
	rawLen  uint32
}

// peerSet is an immutable snapshot of a network's peers.
type peerSet struct {
	byAddr map[netip.Addr]*peer
	byID   []*peer // by number; 0 is not used; nil = free
	list   []*peer // without the retired ones
}

func newPort(vt *VTEP, net *vswitch.Network) *port {
	p := &port{vt: vt, net: net, maxPeers: DefaultMaxPeers}
	putHeader(&p.header, net.VNI())
	p.peers.Store(newPeerSet([]*peer{nil}))
	return p
}

// drop counts frames lost in this port.
func (p *port) drop(l *loop.Loop, r vswitch.Reason, n int) {
	p.att.Counters.Drop(l, r, n)
}

// newPeerSet builds the indices over the numbered peers.
func newPeerSet(byID []*peer) *peerSet {
	s := &peerSet{byAddr: make(map[netip.Addr]*peer, len(byID)), byID: byID}
	for _, x := range byID {
		if x != nil && !x.retired {
			s.byAddr[x.addr] = x
			s.list = append(s.list, x)
		}
	}
	return s
}

// with returns a copy with x under the lowest free number; ok is false if there is none below limit.
func (s *peerSet) with(x *peer, limit int) (*peerSet, bool) {
	if len(s.list) >= limit {
		return nil, false
	}
	byID := slices.Clone(s.byID)
	i := slices.Index(byID[1:], nil) + 1
	if i == 0 {
		i = len(byID)
		if i > maxMaxPeers {
			return nil, false
		}
		byID = append(byID, nil)
	}
	x.id = vswitch.Remote(i)
	byID[i] = x
	return newPeerSet(byID), true
}

func (vt *VTEP) newPeer(a netip.Addr, learnt bool) (*peer, error) {
	a = a.Unmap()
	switch {
	case !a.IsValid() || a.IsUnspecified() || a.IsMulticast():
		return nil, fmt.Errorf("%w: %v is not a unicast address", ErrPeer, a)
	case a.Is4() == vt.v6:
		return nil, fmt.Errorf("%w: peer %v, local %v", ErrPeerFamily, a, vt.cfg.Local)
	case a.WithZone("") == vt.cfg.Local.WithZone(""):
		return nil, fmt.Errorf("%w: %v is this host itself", ErrPeer, a)
	}
	x := &peer{addr: a.WithZone(""), learnt: learnt}
	if a.IsLinkLocalUnicast() && vt.v6 {
		zoned := a
		if a.Zone() == "" {
			zoned = a.WithZone(vt.cfg.Local.Zone())
		}
		var err error
		if x.scope, err = scopeOf(vt.nl, zoned); err != nil {
			return nil, err
		}
	}
	x.rawLen = putRawAddr(&x.raw, netip.AddrPortFrom(x.addr, vt.cfg.Port), x.scope)
	return x, nil
}

// setPeersLocked replaces the configured peers by want, or changes nothing on an error. vt.mu is held; loops may learn
// peers meanwhile.
func (p *port) setPeersLocked(want []netip.Addr) error {
	fresh := make(map[netip.Addr]*peer, len(want))
	for _, a := range want {
		x, err := p.vt.newPeer(a, false)
		if err != nil {
			return fmt.Errorf("network %q: %w", p.net.Name(), err)
		}
		fresh[x.addr] = x
	}
	if len(fresh) > p.maxPeers {
		return fmt.Errorf("%w: network %q: %d peers; want at most %d", ErrTooManyPeers, p.net.Name(), len(fresh), p.maxPeers)
	}
	for _, x := range fresh {
		x.origin = p.vt.origins.use(x.addr)
	}
	var retired, kept []*peer
	for {
		old := p.peers.Load()
		byID := slices.Clone(old.byID)
		todo := maps.Clone(fresh)
		retired, kept = retired[:0], kept[:0]
		for i, x := range byID {
			switch {
			case x == nil || x.retired:
			case todo[x.addr] != nil: // keeps its number
				y := *todo[x.addr]
				y.id = x.id
				byID[i] = &y
				kept = append(kept, x)
				delete(todo, x.addr)
			case !x.learnt:
				y := *x
				y.retired = true
				byID[i] = &y
				retired = append(retired, &y)
			}
		}
		s := newPeerSet(byID)
		for _, a := range slices.SortedFunc(maps.Keys(todo), netip.Addr.Compare) {
			x := *todo[a]
			var ok bool
			if s, ok = s.with(&x, p.maxPeers); !ok {
				p.vt.origins.drop(slices.Collect(maps.Values(fresh))...)
				return fmt.Errorf("%w: network %q: more than %d, configured and learnt", ErrTooManyPeers, p.net.Name(), p.maxPeers)
			}
		}
		if p.peers.CompareAndSwap(old, s) {
			break
		}
	}
	p.vt.origins.drop(kept...) // the new ones use them
	if len(retired) == 0 {
		return nil
	}
	// A running handler may still teach vswitch a number that was just freed.
	p.vt.barrier()
	for _, x := range retired {
		p.net.FlushRemote(p.att, x.id)
	}
	for {
		old := p.peers.Load()
		byID := slices.Clone(old.byID)
		for _, x := range retired {
			byID[x.id] = nil
		}
		if p.peers.CompareAndSwap(old, newPeerSet(byID)) {
			p.vt.origins.drop(retired...)
			return nil
		}
	}
}

// learnPeer adds the sender of a frame as a peer; nil if the limit is reached. It is rare, so it may allocate.
func (p *port) learnPeer(a netip.Addr) *peer {
	for {
		old := p.peers.Load()
		if x := old.byAddr[a]; x != nil {
			return x
		}
		if len(old.list) >= p.maxPeers {
			return nil
		}
		x, err := p.vt.newPeer(a, true)
		if err != nil {
			return nil
		}
		s, ok := old.with(x, p.maxPeers)
		if !ok {
			return nil
		}
		x.origin = p.vt.origins.use(a)
		if p.peers.CompareAndSwap(old, s) {
			p.vt.recompute()
			go p.vt.log.Info("learnt a peer", "vni", p.net.VNI(), "peer", a)
			return x
		}
		p.vt.origins.drop(x)
	}
}

// Deliver implements vswitch.Port: it sends to one peer, or to all (head-end replication).
func (p *port) Deliver(l *loop.Loop, b *frame.Buf, to vswitch.Destination) {
	s := p.vt.tx[l.ID()]
	if s == nil || s.l != l {
		p.drop(l, vswitch.NotReady, 1) // a loop that the VTEP does not know
		return
	}
	set := p.peers.Load()
	if !to.Flood {
		if int(to.Remote) < len(set.byID) {
			if x := set.byID[to.Remote]; x != nil && !x.retired {
				s.put(b, p, x, classify(b.Bytes(), b.Layout()))
				return
			}
		}
		p.drop(l, vswitch.UnknownPeer, 1)
		return
	}
	if len(set.list) == 0 {
		p.drop(l, vswitch.NoPeers, 1)
		return
	}
	fl := classify(b.Bytes(), b.Layout())
	for _, x := range set.list {
		s.put(b, p, x, fl)
	}
}
