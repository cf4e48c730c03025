package fastpath

import (
	"encoding/binary"
	"net/netip"

	"github.com/cilium/ebpf"
)

// Way is what an entry is for: frames between two MACs of a network, from a host port to a far end (Out) or back.
type Way struct {
	Out      bool
	Host     int // interface
	VNI      uint32
	Peer     netip.Addr // without zone
	Dst, Src MAC
}

// Terms are what else an entry says.
type Terms struct {
	Network    int // number, and the generation that the entry is of
	Generation uint64
	Host       *Host
	Underlay   int // interface that leads to the far end; on the way out
	MaxFrame   int // bytes, Ethernet header included
	Tick       uint32
}

const (
	sendKeyLen    = 16
	sendValueLen  = valueOuter + 56
	receiveKeyLen = 32
	ttl           = 64
)

// key is an entry's, in the map of its direction.
func (t *Table) key(w *Way) (*ebpf.Map, []byte) {
	if w.Out {
		k := make([]byte, sendKeyLen)
		binary.NativeEndian.PutUint32(k, uint32(w.Host))
		copy(k[4:], w.Dst[:])
		copy(k[10:], w.Src[:])
		return t.maps.send, k
	}
	k := make([]byte, receiveKeyLen)
	binary.BigEndian.PutUint32(k, w.VNI<<8)
	copy(k[4:], w.Peer.AsSlice())
	copy(k[20:], w.Dst[:])
	copy(k[26:], w.Src[:])
	return t.maps.receive, k
}

func (t *Table) value(w *Way, x *Terms) []byte {
	v := make([]byte, sendValueLen)
	ne := binary.NativeEndian
	ne.PutUint64(v[valueGen:], x.Generation)
	ne.PutUint32(v[valueUsed:], x.Tick)
	ne.PutUint32(v[valueNet:], uint32(x.Network))
	ne.PutUint32(v[valueMax:], uint32(x.MaxFrame))
	ne.PutUint32(v[valueHost:], uint32(x.Host.number))
	if !w.Out {
		ne.PutUint32(v[valueIf:], uint32(x.Host.index))
		return v[:valueOuter]
	}
	ne.PutUint32(v[valueIf:], uint32(x.Underlay))
	// The outer headers, but for lengths, source port, ECN and IPv4's checksum, which the program writes. As UDP sockets
	// have them: DF, no checksum (RFC 7348, section 5; RFC 6935), best effort.
	o := v[valueOuter:]
	if t.cfg.Local.Is6() {
		o[0], o[6], o[7] = 0x60, protoUDP, ttl
		copy(o[8:], t.cfg.Local.AsSlice())
		copy(o[24:], w.Peer.AsSlice())
		o = o[40:]
	} else {
		o[0], o[6], o[8], o[9] = 0x45, 0x40, ttl, protoUDP
		copy(o[12:], t.cfg.Local.AsSlice())
		copy(o[16:], w.Peer.AsSlice())
		o = o[20:]
	}
	binary.BigEndian.PutUint16(o[2:], t.cfg.Port)
	o[8] = 0x08 // VXLAN's I flag
	binary.BigEndian.PutUint32(o[12:], w.VNI<<8)
	return v
}

// Put makes an entry, or makes it anew.
func (t *Table) Put(w Way, x Terms) error {
	m, k := t.key(&w)
	return m.Put(k, t.value(&w, &x))
}

// Used returns the tick in which an entry was used last; false: it is no more.
func (t *Table) Used(w Way) (tick uint32, ok bool) {
	m, k := t.key(&w)
	v, err := m.LookupBytes(k)
	if err != nil || v == nil {
		return 0, false
	}
	return binary.NativeEndian.Uint32(v[valueUsed:]), true
}

// Delete ends an entry. It may be gone already.
func (t *Table) Delete(w Way) {
	m, k := t.key(&w)
	_ = m.Delete(k)
}
