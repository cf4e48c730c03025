// Side: data

package hca

import (
	"slices"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// gid is one entry of the GID table. smac is always the device's own MAC: SET_GID
// refuses others, so a guest cannot send with another MAC.
type gid struct {
	set  bool
	v1   bool // RoCE v1: GRH behind ethertype 0x8915
	vlan uint16
	addr [16]byte
}

// gidTable is read by every loop and written by the command goroutine, which
// replaces the whole snapshot: a reader sees either the old or the new entry.
type gidTable struct {
	snap atomic.Pointer[gidSnap]
}

type gidSnap struct {
	all  []gid // by index
	used []gid // the set entries, for has
}

func (t *gidTable) reset(n int) { t.snap.Store(&gidSnap{all: make([]gid, n)}) }

// put replaces entry i, which is below the table's size.
func (t *gidTable) put(i int, g gid) {
	s := &gidSnap{all: slices.Clone(t.snap.Load().all)}
	s.all[i] = g
	for _, x := range s.all {
		if x.set {
			s.used = append(s.used, x)
		}
	}
	t.snap.Store(s)
}

// get returns entry i if it is in use.
func (t *gidTable) get(i int) (*gid, bool) {
	s := t.snap.Load().all
	if i >= len(s) || !s[i].set {
		return nil, false
	}
	return &s[i], true
}

// has reports whether frames to addr, of the given version and VLAN, are for the device.
func (t *gidTable) has(addr *[16]byte, v1 bool, vlan uint16) bool {
	s := t.snap.Load().used
	for i := range s {
		if g := &s[i]; g.v1 == v1 && g.vlan == vlan && g.addr == *addr {
			return true
		}
	}
	return false
}

// isV4 reports whether a GID is an IPv4-mapped address (::ffff:a.b.c.d).
func isV4(a *[16]byte) bool {
	for _, x := range a[:10] {
		if x != 0 {
			return false
		}
	}
	return a[10] == 0xff && a[11] == 0xff
}

// isMulticast reports whether a GID names a group: ff00::/8 or, mapped, 224.0.0.0/4.
func isMulticast(a *[16]byte) bool {
	return a[0] == 0xff || isV4(a) && a[12]&0xf0 == 0xe0
}

// resolve completes an address handle with the GID table's entry for its
// source. It refuses handles that contradict the table: the tenant's administrator
// chooses the VLAN, not the application.
func (d *dataSide) resolve(av *abi.AV, out *roce.AddressVector) error {
	g, ok := d.gids.get(int(av.SGIDIndex))
	switch {
	case !ok:
		return refuse(abi.StatusInvalid, "sgid_index %d is not set", av.SGIDIndex)
	case av.VLANID != g.vlan:
		return refuse(abi.StatusInvalid, "vlan_id %#x, that of GID %d is %#x", av.VLANID, av.SGIDIndex, g.vlan)
	case av.FlowLabel > 0xfffff:
		return refuse(abi.StatusInvalid, "flow_label %#x, must be below 2^20", av.FlowLabel)
	case av.DMAC == [6]byte{}:
		return refuse(abi.StatusInvalid, "dmac is zero")
	case av.DGID == [16]byte{}:
		return refuse(abi.StatusInvalid, "dgid is zero")
	case !g.v1 && isV4(&g.addr) != isV4(&av.DGID):
		return refuse(abi.StatusInvalid, "dgid and GID %d are of different address families", av.SGIDIndex)
	}
	*out = roce.AddressVector{
		DMAC: av.DMAC, SMAC: d.mac, VLAN: g.vlan, SGID: g.addr, DGID: av.DGID, TrafficClass: av.TrafficClass,
		HopLimit: av.HopLimit, SL: av.SL & 0xf, FlowLabel: av.FlowLabel, RoCEv1: g.v1, SGIDIndex: av.SGIDIndex,
	}
	if out.HopLimit == 0 {
		out.HopLimit = 64 // the kernel's default; packets with 0 would not leave the host
	}
	return nil
}

// ahTable is the table of address handles in guest memory that SET_AH_TABLE
// names. Only the guest's kernel writes it, but the device does not trust it.
type ahTable struct {
	mem translate.Ring
	n   uint32
}

// lookup copies entry i in once and resolves it for a QP of the given PD.
func (d *dataSide) lookup(i uint32, pd uint32, tmp *[abi.SizeAH]byte, out *roce.AddressVector) (translate.Miss, bool) {
	t := d.ahs.Load()
	if t == nil || i == 0 || i >= t.n {
		return translate.Miss{}, false
	}
	if m := t.mem.Read(tmp[:], uint64(i)*abi.SizeAH); !m.OK() {
		return m, false
	}
	var ah abi.AH
	if err := ah.Decode(tmp[:]); err != nil || ah.Valid != 1 || ah.PDN != pd {
		return translate.Miss{}, false
	}
	av := abi.AV{
		DGID: ah.DGID, DMAC: ah.DMAC, SGIDIndex: ah.SGIDIndex, VLANID: ah.VLANID, TrafficClass: ah.TrafficClass,
		HopLimit: ah.HopLimit, FlowLabel: ah.FlowLabel, SL: ah.SL,
	}
	return translate.Miss{}, d.resolve(&av, out) == nil
}
