package hca

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// ErrConfig is wrapped by every complaint of New about its Config.
var ErrConfig = errors.New("hca: configuration")

// Limits bound what one VM can make the device hold. They are reported by
// QUERY_DEVICE and enforced by every command. A zero field takes its default;
// the bounds of each field are those that bounds lists.
type Limits struct {
	QPs          int // queue pairs, the GSI QP included
	QPWRs        int // elements of a send or receive ring
	SGEs         int // scatter/gather elements of a work request
	Inline       int // bytes of inline data in a send work request
	CQs          int
	CQEs         int    // elements of a completion ring
	MRs          int    // memory regions and windows
	MRSize       uint64 // bytes of one region
	MTTs         uint64 // table entries (pages) over all regions
	PDs          int
	SRQs         int
	SRQWRs       int
	SRQSGEs      int
	AHs          int // entries of the address handle table
	GIDs         int
	RdAtomic     int // outstanding READs and atomics of a QP, either side
	McastGroups  int
	McastMembers int // QPs of one group
	Messages     int // send requests a second, over all QPs; 0: any number
}

// MaxMessages bounds Limits.Messages.
const MaxMessages = 100_000_000

// DefaultLimits suit a VM that runs a few hundred connections. What a guest can
// make the host allocate is about 80 KiB per QP (the transport's copies of work
// requests) and 8 bytes per MTT entry: 300 MiB at most with these; rings and the
// address handle table are the guest's own memory.
func DefaultLimits() Limits {
	return Limits{
		QPs: 2048, QPWRs: 16384, SGEs: 32, Inline: 512, CQs: 4096, CQEs: 1 << 22, MRs: 65536, MRSize: 1 << 46,
		MTTs: 1 << 24, PDs: 4096, SRQs: 1024, SRQWRs: 32768, SRQSGEs: 32, AHs: 16384, GIDs: 256,
		// As Linux rxe has it: programs (perftest) set the peer's figure on both ends.
		RdAtomic:    128,
		McastGroups: 256, McastMembers: 64,
	}
}

// bounds lists every limit with the range that the tables, the ABI and the
// memory of the host allow.
func (l *Limits) bounds() []struct {
	name     string
	v        *int
	min, max int
} {
	return []struct {
		name     string
		v        *int
		min, max int
	}{
		{"QPs", &l.QPs, 2, qpIndexes - 2}, {"QPWRs", &l.QPWRs, 2, 1 << 16}, {"SGEs", &l.SGEs, 1, 64},
		{"Inline", &l.Inline, 0, 4096}, {"CQs", &l.CQs, 1, 1 << 20}, {"CQEs", &l.CQEs, 2, 1 << 22},
		{"MRs", &l.MRs, 1, 1 << 20}, {"PDs", &l.PDs, 1, 1 << 20}, {"SRQs", &l.SRQs, 1, 1 << 20},
		{"SRQWRs", &l.SRQWRs, 2, 1 << 16}, {"SRQSGEs", &l.SRQSGEs, 1, 64}, {"AHs", &l.AHs, 2, 1 << 18},
		{"GIDs", &l.GIDs, 1, 256}, {"RdAtomic", &l.RdAtomic, 1, 128}, {"McastGroups", &l.McastGroups, 1, 4096},
		{"McastMembers", &l.McastMembers, 1, 1024},
	}
}

// complete fills zero fields with their defaults and checks the others.
func (l *Limits) complete() error {
	def := DefaultLimits()
	d := def.bounds()
	for i, b := range l.bounds() {
		if *b.v == 0 {
			*b.v = *d[i].v
		}
		if *b.v < b.min || *b.v > b.max {
			return fmt.Errorf("%w: limit %s is %d, must be %d..%d", ErrConfig, b.name, *b.v, b.min, b.max)
		}
	}
	if l.MRSize == 0 {
		l.MRSize = def.MRSize
	}
	if l.MTTs == 0 {
		l.MTTs = def.MTTs
	}
	if l.Messages < 0 || l.Messages > MaxMessages {
		return fmt.Errorf("%w: limit Messages is %d, must be 0..%d", ErrConfig, l.Messages, MaxMessages)
	}
	if l.MRSize > 1<<56 || l.MTTs > 1<<32 {
		return fmt.Errorf("%w: limit MRSize is %d (at most 2^56), MTTs is %d (at most 2^32)", ErrConfig, l.MRSize, l.MTTs)
	}
	return nil
}

// odpUD is what UD pages on demand (ODP-2, ODP-7). On UC and UD what arrives for
// absent memory is lost until it is there (PF-11).
const odpUD = abi.ODPSend | abi.ODPRecv | abi.ODPSRQRecv

// attr is QUERY_DEVICE's answer.
func (d *Device) attr() abi.DeviceAttr {
	l := &d.lim
	return abi.DeviceAttr{
		NodeGUID: eui64(d.cfg.MAC), MaxMRSize: l.MRSize, MaxQP: uint32(l.QPs), MaxQPWR: uint32(l.QPWRs - 1),
		MaxSGE: uint32(l.SGEs), MaxInline: uint32(l.Inline), MaxCQ: uint32(l.CQs), MaxCQE: uint32(l.CQEs - 1),
		MaxMR: uint32(l.MRs), MaxPD: uint32(l.PDs), MaxSRQ: uint32(l.SRQs), MaxSRQWR: uint32(l.SRQWRs - 1),
		MaxSRQSGE: uint32(l.SRQSGEs), MaxAH: uint32(l.AHs), MaxGID: uint32(l.GIDs), MaxQPRdAtom: uint32(l.RdAtomic),
		MaxQPInitRdAtom: uint32(l.RdAtomic), MaxMcastGrp: uint32(l.McastGroups), MaxMcastQPAttach: uint32(l.McastMembers),
		MaxMTT: l.MTTs,
		Caps: abi.CapAtomic | abi.CapAtomicWrite | abi.CapFlushGlobal | abi.CapSRQ | abi.CapUC | abi.CapMcast | abi.CapRoCEv1 | abi.CapResizeCQ |
			abi.CapLocalDMALKey | abi.CapMemMgt | abi.CapMW,
		ODPRC: odpUD | abi.ODPWrite | abi.ODPRead | abi.ODPAtomic, ODPUC: odpUD | abi.ODPWrite, ODPUD: odpUD,
		MaxMW: uint32(l.MRs), MaxFastReg: abi.MaxFastReg,
	}
}

// eui64 makes the node GUID from the MAC (RFC 4291, appendix A).
func eui64(mac [6]byte) [8]byte {
	return [8]byte{mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]}
}
