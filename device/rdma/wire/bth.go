package wire

import "encoding/binary"

// Sizes of the transport headers in bytes (IBTA 9.2, 9.3).
const (
	BTHLen       = 12
	DETHLen      = 8
	FETHLen      = 4
	RETHLen      = 16
	AtomicLen    = 28
	AETHLen      = 4
	AtomicAckLen = 8
	ImmLen       = 4
	IETHLen      = 4
	CNPLen       = 16 // reserved, zeros (A17.9.3)
	ArrivalsLen  = ArrivalsSpan / 8
	ICRCLen      = 4
)

// Field limits.
const (
	QPNMask     = 0xffffff
	PSNMask     = 0xffffff
	DefaultPKey = 0xffff
	pkeyOffset  = 2

	// SelectiveMark is the value of the seven reserved bits beside AckReq, which other implementations send as zero and
	// ignore (IBTA 9.2). All seven bits must match, so that a peer that uses one of them otherwise is not taken for a
	// vnicd.
	SelectiveMark = 0x35
)

// Patience is the value of the six reserved bits beside BECN in the BTH of a request: what its sender does after RNR
// NAKs. Other implementations send zeros there and ignore them (IBTA 9.2). The ICRC does not cover these bits, so no
// two values differ in fewer than three.
type Patience uint8

// The values. Any other is the same as PatienceUnknown.
const (
	PatienceUnknown Patience = 0
	PatienceEnds    Patience = 0x15 // it gives up after rnr_retry of them
	PatienceForever Patience = 0x2a // rnr_retry 7

	patienceMask = 0x3f
)

// BTH is the base transport header (IBTA 9.2). The header version is 0.
type BTH struct {
	Opcode    Opcode
	Solicited bool
	Migrated  bool  // MigReq: set on every packet unless paths migrate
	Pad       uint8 // 0..3 bytes after the payload
	PKey      uint16
	FECN      bool // congestion bits: not covered by the ICRC
	BECN      bool
	Patience  Patience // of a request's sender; only vnicd sets it
	DestQP    uint32   // 24 bits
	AckReq    bool
	// Selective: the sender of a request understands OpRCSelectiveAck; the sender of a response repeats READ
	// responses one by one. Only vnicd sets it.
	Selective bool
	PSN       uint32 // 24 bits
}

// Decode reads the header at the start of b and returns its size, 12. Other
// reserved bits are ignored. ErrVersion unless the version is 0.
func (h *BTH) Decode(b []byte) (int, error) {
	if len(b) < BTHLen {
		return 0, ErrShort
	}
	if b[1]&0xf != 0 {
		return 0, ErrVersion
	}
	h.Opcode = Opcode(b[0])
	h.Solicited, h.Migrated, h.Pad = b[1]&0x80 != 0, b[1]&0x40 != 0, b[1]>>4&3
	h.PKey = binary.BigEndian.Uint16(b[pkeyOffset:])
	w := binary.BigEndian.Uint32(b[4:])
	h.FECN, h.BECN, h.DestQP = w>>31 != 0, w>>30&1 != 0, w&QPNMask
	h.Patience = Patience(w >> 24 & patienceMask)
	w = binary.BigEndian.Uint32(b[8:])
	h.AckReq, h.Selective, h.PSN = w>>31 != 0, w>>24&0x7f == SelectiveMark, w&PSNMask
	return BTHLen, nil
}

// Encode writes the header to b (12 bytes).
func (h *BTH) Encode(b []byte) int {
	b = b[:BTHLen]
	b[0] = byte(h.Opcode)
	b[1] = bit(h.Solicited, 0x80) | bit(h.Migrated, 0x40) | h.Pad&3<<4
	binary.BigEndian.PutUint16(b[pkeyOffset:], h.PKey)
	binary.BigEndian.PutUint32(b[4:], h.DestQP&QPNMask)
	b[4] = bit(h.FECN, 0x80) | bit(h.BECN, 0x40) | byte(h.Patience)&patienceMask
	binary.BigEndian.PutUint32(b[8:], h.PSN&PSNMask)
	b[8] = bit(h.AckReq, 0x80) | bit(h.Selective, SelectiveMark)
	return BTHLen
}

func bit(on bool, b byte) byte {
	if on {
		return b
	}
	return 0
}

// RETH is the RDMA extended transport header (IBTA 9.3.3).
type RETH struct {
	VA     uint64
	RKey   uint32
	Length uint32 // of the whole message
}

// Decode reads the header at the start of b and returns its size, 16.
func (h *RETH) Decode(b []byte) (int, error) {
	if len(b) < RETHLen {
		return 0, ErrShort
	}
	h.VA = binary.BigEndian.Uint64(b)
	h.RKey, h.Length = binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])
	return RETHLen, nil
}

// Encode writes the header to b (16 bytes).
func (h *RETH) Encode(b []byte) int {
	b = b[:RETHLen]
	binary.BigEndian.PutUint64(b, h.VA)
	binary.BigEndian.PutUint32(b[8:], h.RKey)
	binary.BigEndian.PutUint32(b[12:], h.Length)
	return RETHLen
}

// FETH is the FLUSH extended transport header (IBTA A19.4). The values are those of enum ib_placement_type and
// ib_selectivity_level.
type FETH struct {
	Placement   uint8 // FlushGlobal, FlushPersistent: 4 bits
	Selectivity uint8 // FlushRange, FlushRegion: 2 bits
}

// Placement and selectivity of a FLUSH.
const (
	FlushGlobal     = 1 << 0 // global visibility
	FlushPersistent = 1 << 1 // persistence: the data survives a loss of power
	FlushRange      = 0      // the range that RETH names
	FlushRegion     = 1      // the whole region
)

// Decode reads the header at the start of b and returns its size, 4.
func (h *FETH) Decode(b []byte) (int, error) {
	if len(b) < FETHLen {
		return 0, ErrShort
	}
	h.Placement, h.Selectivity = b[3]&0xf, b[3]>>4&3
	return FETHLen, nil
}

// Encode writes the header to b (4 bytes).
func (h *FETH) Encode(b []byte) int {
	binary.BigEndian.PutUint32(b, uint32(h.Selectivity&3)<<4|uint32(h.Placement&0xf))
	return FETHLen
}

// AtomicETH is the atomic extended transport header (IBTA 9.3.4).
type AtomicETH struct {
	VA      uint64
	RKey    uint32
	SwapAdd uint64 // the value to store or to add
	Compare uint64 // CmpSwap only
}

// Decode reads the header at the start of b and returns its size, 28.
func (h *AtomicETH) Decode(b []byte) (int, error) {
	if len(b) < AtomicLen {
		return 0, ErrShort
	}
	h.VA, h.RKey = binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])
	h.SwapAdd, h.Compare = binary.BigEndian.Uint64(b[12:]), binary.BigEndian.Uint64(b[20:])
	return AtomicLen, nil
}

// Encode writes the header to b (28 bytes).
func (h *AtomicETH) Encode(b []byte) int {
	b = b[:AtomicLen]
	binary.BigEndian.PutUint64(b, h.VA)
	binary.BigEndian.PutUint32(b[8:], h.RKey)
	binary.BigEndian.PutUint64(b[12:], h.SwapAdd)
	binary.BigEndian.PutUint64(b[20:], h.Compare)
	return AtomicLen
}

// AETH is the ACK extended transport header (IBTA 9.3.5).
type AETH struct {
	Syndrome Syndrome
	MSN      uint32 // 24 bits
}

// Decode reads the header at the start of b and returns its size, 4.
func (h *AETH) Decode(b []byte) (int, error) {
	if len(b) < AETHLen {
		return 0, ErrShort
	}
	w := binary.BigEndian.Uint32(b)
	h.Syndrome, h.MSN = Syndrome(w>>24), w&0xffffff
	return AETHLen, nil
}

// Encode writes the header to b (4 bytes).
func (h *AETH) Encode(b []byte) int {
	binary.BigEndian.PutUint32(b[:AETHLen], uint32(h.Syndrome)<<24|h.MSN&0xffffff)
	return AETHLen
}

// Syndrome is AETH's syndrome (IBTA 9.3.5): two bits of kind (the top bit
// is zero), five of value.
type Syndrome uint8

// Kinds of syndromes, in the bits of SyndromeKind.
const (
	SyndromeACK Syndrome = 0x00 // value: credit count, 0x1f: none given
	SyndromeRNR Syndrome = 0x20 // value: timer code 0..31
	SyndromeNAK Syndrome = 0x60 // value: one of the NAK codes

	SyndromeKind  Syndrome = 0xe0
	SyndromeValue Syndrome = 0x1f
	NoCredits     Syndrome = 0x1f
)

// NAK syndromes (IBTA 9.7.5.2).
const (
	NAKSequence       Syndrome = 0x60 // PSN sequence error
	NAKInvalidRequest Syndrome = 0x61
	NAKRemoteAccess   Syndrome = 0x62
	NAKRemoteOp       Syndrome = 0x63
	NAKInvalidRD      Syndrome = 0x64
)

// Kind returns SyndromeACK, SyndromeRNR or SyndromeNAK; anything else is reserved.
func (s Syndrome) Kind() Syndrome { return s & SyndromeKind }

// Value returns the low five bits.
func (s Syndrome) Value() uint8 { return uint8(s & SyndromeValue) }

// DETH is the datagram extended transport header (IBTA 9.3).
type DETH struct {
	QKey  uint32
	SrcQP uint32 // 24 bits
}

// Decode reads the header at the start of b and returns its size, 8.
func (h *DETH) Decode(b []byte) (int, error) {
	if len(b) < DETHLen {
		return 0, ErrShort
	}
	h.QKey, h.SrcQP = binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])&QPNMask
	return DETHLen, nil
}

// Encode writes the header to b (8 bytes).
func (h *DETH) Encode(b []byte) int {
	b = b[:DETHLen]
	binary.BigEndian.PutUint32(b, h.QKey)
	binary.BigEndian.PutUint32(b[4:], h.SrcQP&QPNMask)
	return DETHLen
}

// PutAtomicAck writes the original value of an atomic (IBTA 9.3) to b.
func PutAtomicAck(b []byte, original uint64) int {
	binary.BigEndian.PutUint64(b[:AtomicAckLen], original)
	return AtomicAckLen
}

// PutImm writes immediate data (IBTA 9.3) to b: imm is in network order
// already, as the four bytes that the application gave.
func PutImm(b []byte, imm [4]byte) int { return copy(b[:ImmLen], imm[:]) }

// PutIETH writes the R_Key to invalidate (IBTA 9.3) to b.
func PutIETH(b []byte, rkey uint32) int {
	binary.BigEndian.PutUint32(b[:IETHLen], rkey)
	return IETHLen
}

// ArrivalsSpan is the number of PSNs that Arrivals covers.
const ArrivalsSpan = 256

// Arrivals is the extension header of OpRCSelectiveAck, vnicd's own. Bit i (of word i/64, lowest bit first) says that
// the packet with the PSN i after the expected one, which is the BTH's, has arrived and is in the reorder queue. A READ
// request sets the bits of the PSNs of all its responses. Bit 0 alone says that the packet with the expected PSN itself
// has arrived and waits for a page that is absent on the host. vnicds before this meaning drop such a packet.
type Arrivals [ArrivalsSpan / 64]uint64

// Decode reads the header at the start of b and returns its size, 32.
func (a *Arrivals) Decode(b []byte) (int, error) {
	if len(b) < ArrivalsLen {
		return 0, ErrShort
	}
	for i := range a {
		a[i] = binary.BigEndian.Uint64(b[8*i:])
	}
	return ArrivalsLen, nil
}

// Encode writes the header to b (32 bytes).
func (a *Arrivals) Encode(b []byte) int {
	for i, w := range a {
		binary.BigEndian.PutUint64(b[8*i:], w)
	}
	return ArrivalsLen
}

// Any reports whether any bit is set.
func (a *Arrivals) Any() bool { return *a != Arrivals{} }

// Has reports whether bit i is set. Bits beyond the span are not.
func (a *Arrivals) Has(i uint64) bool { return i < ArrivalsSpan && a[i/64]>>(i%64)&1 != 0 }

// Set sets n bits from i on, within the span.
func (a *Arrivals) Set(i, n uint64) {
	for end := min(i+n, ArrivalsSpan); i < end; i++ {
		a[i/64] |= 1 << (i % 64)
	}
}

// Shift moves all bits down by n: the expected PSN has moved on by n.
func (a *Arrivals) Shift(n uint64) {
	from := *a
	word := func(i uint64) uint64 {
		if i < uint64(len(from)) {
			return from[i]
		}
		return 0
	}
	for i := range uint64(len(a)) {
		at := i + n/64
		a[i] = word(at)>>(n%64) | word(at+1)<<(64-n%64) // a shift by 64 gives 0
	}
}
