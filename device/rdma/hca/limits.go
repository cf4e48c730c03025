// Side: control

package hca

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// ErrConfig is wrapped by every error of New about its Config.
var ErrConfig = errors.New("hca: configuration")

// Limits bound the resources that one VM can use. They are reported by
// QUERY_DEVICE and enforced by every command. A zero field takes its default;
// bounds lists the range of each field.
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

	// Memory bounds the bytes of this process that the VM's objects occupy, of all kinds together (translate.Account).
	// It is checked beside the numbers above, which may allow more. 0: DefaultMemory, and in proportion more if QPs, MRs
	// or MTTs is larger than its default.
	Memory uint64
}

// DefaultMemory is the default of Limits.Memory, in bytes.
const DefaultMemory = 300 << 20

// MaxMessages bounds Limits.Messages.
const MaxMessages = 100_000_000

// DefaultLimits suit a VM that runs a few hundred connections. Memory is enough for all QPs with a few segments in a
// request (75 KiB each, most of it the transport's copies of work requests) and all MTT entries in dense groups (8
// bytes each), or for all MRs at 4.4 KiB. Rings and the address handle table are the guest's own memory.
func DefaultLimits() Limits {
	return Limits{
		QPs: 2048, QPWRs: 16384, SGEs: 32, Inline: 512, CQs: 4096, CQEs: 1 << 22, MRs: 65536, MRSize: 1 << 46,
		MTTs: 1 << 24, PDs: 4096, SRQs: 1024, SRQWRs: 32768, SRQSGEs: 32, AHs: 16384, GIDs: 256,
		// Same as Linux rxe: programs (perftest) set the peer's figure on both ends.
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
	if l.Memory == 0 {
		more := max(1, float64(l.QPs)/float64(def.QPs), float64(l.MRs)/float64(def.MRs), float64(l.MTTs)/float64(def.MTTs))
		l.Memory = uint64(more * DefaultMemory)
	}
	if least := l.fixed(abi.MaxEngines); l.Memory < least {
		return fmt.Errorf("%w: limit Memory is %d bytes, the tables for the other limits take %d", ErrConfig, l.Memory, least)
	}
	if l.MRSize > 1<<56 || l.MTTs > 1<<32 {
		return fmt.Errorf("%w: limit MRSize is %d (at most 2^56), MTTs is %d (at most 2^32)", ErrConfig, l.MRSize, l.MTTs)
	}
	return nil
}

// NewAccount returns an account with the limit of l, whose zero fields take their defaults. Errors wrap ErrConfig.
func NewAccount(l Limits) (*translate.Account, error) {
	if err := l.complete(); err != nil {
		return nil, err
	}
	return translate.NewAccount(l.Memory), nil
}
