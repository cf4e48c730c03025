package translate

import "fmt"

// Sizes of stage-two pages. Stage one has its own page size per region.
const (
	PageShift = 12             // smallest page of either stage
	PageSize  = 1 << PageShift // bytes
	pageMask  = PageSize - 1

	// MaxPA bounds guest physical addresses (exclusive). 2^48 also holds front ends that use their own virtual
	// addresses as guest physical ones, as DPDK's virtio-user does.
	MaxPA PA = 1 << 48
)

// PA is a guest physical address: the result of stage one, the input of stage two.
type PA uint64

// Add returns p+n, and false if that wraps around.
func (p PA) Add(n uint64) (PA, bool) {
	q := p + PA(n)
	return q, q >= p
}

// String returns the address in hexadecimal.
func (p PA) String() string { return fmt.Sprintf("PA %#x", uint64(p)) }

// VA is an address as users of a memory key write it.
type VA uint64

// Add returns v+n, and false if that wraps around.
func (v VA) Add(n uint64) (VA, bool) {
	w := v + VA(n)
	return w, w >= v
}

// String returns the address in hexadecimal.
func (v VA) String() string { return fmt.Sprintf("VA %#x", uint64(v)) }

// Range is N bytes of guest-physical memory from PA on.
type Range struct {
	PA PA
	N  uint64
}

// Key is an L_Key or R_Key (IBTA 10.6.3): 24 bits of index, 8 bits of variant that change each time the index is
// reused. The low bits of the index are the place in the memory protection table. All bits are random.
type Key uint32

// Index returns the key's upper 24 bits.
func (k Key) Index() uint32 { return uint32(k) >> keyVariantBits }

// Variant returns the low 8 bits.
func (k Key) Variant() uint8 { return uint8(k) }

const (
	keyVariantBits = 8
	maxKeyIndex    = 1<<24 - 1
)

// PD numbers a protection domain within one VM.
type PD uint32

// GVMI identifies a guest VM (PF-1). GVMI 0 stands for host applications (PF-4).
type GVMI uint32

// HostGVMI is the identifier of host applications (PF-4).
const HostGVMI GVMI = 0

// Access is a set of rights: the bits of enum ib_access_flags.
type Access uint32

// Rights of a region, or needed by an access.
const (
	LocalWrite   Access = 0x01
	RemoteWrite  Access = 0x02
	RemoteRead   Access = 0x04
	RemoteAtomic Access = 0x08
	MWBind       Access = 0x10
	ZeroBased    Access = 0x20
	OnDemand     Access = 0x40
	FlushGlobal  Access = 0x100
	// LocalRead is granted by every region and by no memory window: a window's key is not an L_Key (IBTA 10.6.7.1).
	LocalRead Access = 1 << 31

	// FlushPersistent is never granted: guest memory is not persistent.
	FlushPersistent Access = 0x200

	accessHugeTLB Access = 0x80       // a hint to the guest driver; no meaning here
	accessHints   Access = 0x3ff00000 // IB_UVERBS_ACCESS_OPTIONAL_RANGE: may be ignored
	accessKnown          = LocalWrite | RemoteWrite | RemoteRead | RemoteAtomic | MWBind | ZeroBased | OnDemand |
		FlushGlobal
	accessWrites = LocalWrite | RemoteWrite | RemoteAtomic
)

// Writes reports whether an access that needs a changes memory.
func (a Access) Writes() bool { return a&accessWrites != 0 }
