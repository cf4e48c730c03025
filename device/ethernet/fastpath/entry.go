package fastpath

import (
	"encoding/binary"
	"net/netip"

	"github.com/cilium/ebpf"
)

// flow is the key of an entry: frames between two MACs of a network, from a host port to a peer (out) or back.
type flow struct {
	out      bool
	host     int // interface index of the host port
	vni      uint32
	peer     netip.Addr // without zone
	dst, src mac
}

// terms are the values of an entry.
type terms struct {
	network    int    // number
	generation uint64 // of the network; in any other the entry is void
	host       *hostPort
	underlay   int    // interface index of the route to the peer; out only
	maxFrame   int    // bytes, Ethernet header included
	lastPort   uint16 // highest UDP source port that is accepted; back only
	tick       uint32
}

const (
	sendKeyLen    = 16
	sendValueLen  = valueOuter + 56
	receiveKeyLen = 32
	receiveValLen = valuePort + 8
	ttl           = 64
)

// key returns the map of a flow's direction and the flow's key in it.
func (t *table) key(f *flow) (*ebpf.Map, []byte) {
	if f.out {
		k := make([]byte, sendKeyLen)
		binary.NativeEndian.PutUint32(k, uint32(f.host))
		copy(k[4:], f.dst[:])
		copy(k[10:], f.src[:])
		return t.maps.send, k
	}
	k := make([]byte, receiveKeyLen)
	binary.BigEndian.PutUint32(k, f.vni<<8)
	copy(k[4:], f.peer.AsSlice())
	copy(k[20:], f.dst[:])
	copy(k[26:], f.src[:])
	return t.maps.receive, k
}

func (t *table) value(f *flow, x *terms) []byte {
	v := make([]byte, sendValueLen)
	ne := binary.NativeEndian
	ne.PutUint64(v[valueGen:], x.generation)
	ne.PutUint32(v[valueUsed:], x.tick)
	ne.PutUint32(v[valueNet:], uint32(x.network))
	ne.PutUint32(v[valueMax:], uint32(x.maxFrame))
	ne.PutUint32(v[valueHost:], uint32(x.host.number))
	if !f.out {
		ne.PutUint32(v[valueIf:], uint32(x.host.index))
		ne.PutUint32(v[valuePort:], uint32(x.lastPort))
		return v[:receiveValLen]
	}
	ne.PutUint32(v[valueIf:], uint32(x.underlay))
	// The outer headers, except lengths, source port, ECN and IPv4 checksum, which the program writes. They equal those of
	// the VTEP's UDP sockets: DF, no UDP checksum (RFC 7348, section 5; RFC 6935), best effort.
	o := v[valueOuter:]
	if t.cfg.local.Is6() {
		o[0], o[6], o[7] = 0x60, protoUDP, ttl
		copy(o[8:], t.cfg.local.AsSlice())
		copy(o[24:], f.peer.AsSlice())
		o = o[40:]
	} else {
		o[0], o[6], o[8], o[9] = 0x45, 0x40, ttl, protoUDP
		copy(o[12:], t.cfg.local.AsSlice())
		copy(o[16:], f.peer.AsSlice())
		o = o[20:]
	}
	binary.BigEndian.PutUint16(o[2:], t.cfg.port)
	o[8] = 0x08 // VXLAN's I flag
	binary.BigEndian.PutUint32(o[12:], f.vni<<8)
	return v
}

// put writes an entry, replacing an older one of the same flow.
func (t *table) put(f flow, x terms) error {
	m, k := t.key(&f)
	return m.Put(k, t.value(&f, &x))
}

// used returns the tick in which an entry was last used; ok is false if there is none.
func (t *table) used(f flow) (tick uint32, ok bool) {
	m, k := t.key(&f)
	v, err := m.LookupBytes(k)
	if err != nil || v == nil {
		return 0, false
	}
	return binary.NativeEndian.Uint32(v[valueUsed:]), true
}

// remove removes an entry, if there is one.
func (t *table) remove(f flow) {
	m, k := t.key(&f)
	_ = m.Delete(k)
}
