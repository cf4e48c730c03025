package abi

// Header of a work or completion ring (struct rxe_queue_buf): geometry for user space, then the two indices, each on
// its own cache line, then the elements. Indices are pre-masked: always below the number of elements. The ring is empty
// if they are equal and full if one more element would make them equal.
//
// The header is shared with a guest's user space: the device uses only the geometry given by command, and masks every
// index that it reads.
const (
	RingLog2ElemSizeOff = 0
	RingIndexMaskOff    = 4
	RingProducerOff     = 128
	RingConsumerOff     = 256
	RingDataOff         = 384
)

// RingLength returns the length in bytes of a ring of numElems elements of
// 1<<log2ElemSize bytes, header included.
func RingLength(numElems uint32, log2ElemSize uint8) uint64 {
	return RingDataOff + uint64(numElems)<<log2ElemSize
}

// Offsets in a send WQE (struct rxe_send_wqe). The fields at 24.. are a union:
// RDMA, atomic, UD and memory-window requests overlay each other.
const (
	SendWQEIDOff         = 0
	SendWQEOpcodeOff     = 12
	SendWQEFlagsOff      = 16
	SendWQEExOff         = 20 // immediate data (network order) or the R_Key to invalidate
	SendWQERemoteAddrOff = 24 // RDMA and atomic
	SendWQERKeyOff       = 32 // RDMA
	SendWQECompareAddOff = 32 // atomic
	SendWQESwapOff       = 40
	SendWQEAtomicRKeyOff = 48
	SendWQEFlushRKeyOff  = 36
	SendWQEFlushTypeOff  = 40
	SendWQEFlushLevelOff = 41
	SendWQERemoteQPNOff  = 24 // UD
	SendWQEQKeyOff       = 28
	SendWQEPKeyIndexOff  = 32
	SendWQEAHNumOff      = 36
	SendWQEMWAddrOff     = 24 // memory window
	SendWQEMWLengthOff   = 32
	SendWQEMWMRLKeyOff   = 40
	SendWQEMWRKeyOff     = 44 // of the window before the bind
	SendWQEMWNewRKeyOff  = 48
	SendWQEMWAccessOff   = 52
	SendWQERegOff        = 24 // REG_MR: a RegWR
	SendWQEStatusOff     = 144
	SendWQEStateOff      = 148
	SendWQEIOVAOff       = 152
	SendWQEDMALengthOff  = 184
	SendWQEResidOff      = 188
	SendWQENumSGEOff     = 196
	SendWQESGEOff        = 208 // SGEs, or the inline data
	SizeSendWQE          = 208 // without SGEs
)

// Offsets in a receive WQE (struct rxe_recv_wqe).
const (
	RecvWQEIDOff        = 0
	RecvWQEDMALengthOff = 16
	RecvWQENumSGEOff    = 28
	RecvWQESGEOff       = 40
	SizeRecvWQE         = 40 // without SGEs
)

// SizeSGE is the size of a scatter/gather element (struct rxe_sge).
const SizeSGE = 16

// SGE is a scatter/gather element.
type SGE struct {
	Addr   uint64
	Length uint32
	LKey   uint32
}

// SendWQE is a view of one slot of a send queue, copied out of guest memory. It must be at least SizeSendWQE bytes
// long. The legacy verbs leave most fields without an accessor here stale, and some providers IOVA and DMALength too:
// compute lengths from the SGEs.
type SendWQE []byte

// ID is the work request's wr_id.
func (w SendWQE) ID() uint64 { return le.Uint64(w[SendWQEIDOff:]) }

// Opcode returns the WR... number.
func (w SendWQE) Opcode() uint32 { return le.Uint32(w[SendWQEOpcodeOff:]) }

// Flags returns the Send... bits.
func (w SendWQE) Flags() uint32 { return le.Uint32(w[SendWQEFlagsOff:]) }

// Imm returns the four bytes of immediate data as in memory, in network order.
func (w SendWQE) Imm() [4]byte { return [4]byte(w[SendWQEExOff:]) }

// InvalidateRKey returns the key of a SEND_WITH_INV or LOCAL_INV; it shares its place with Imm.
func (w SendWQE) InvalidateRKey() uint32 { return le.Uint32(w[SendWQEExOff:]) }

// RemoteAddr is the remote VA of an RDMA or atomic request.
func (w SendWQE) RemoteAddr() uint64 { return le.Uint64(w[SendWQERemoteAddrOff:]) }

// RKey is the remote key of an RDMA request, see AtomicRKey.
func (w SendWQE) RKey() uint32 { return le.Uint32(w[SendWQERKeyOff:]) }

// CompareAdd is the value to compare with (CMP_AND_SWP) or to add (FETCH_AND_ADD).
func (w SendWQE) CompareAdd() uint64 { return le.Uint64(w[SendWQECompareAddOff:]) }

// Swap is the value that CMP_AND_SWP stores.
func (w SendWQE) Swap() uint64 { return le.Uint64(w[SendWQESwapOff:]) }

// AtomicRKey is the remote key of an atomic request.
func (w SendWQE) AtomicRKey() uint32 { return le.Uint32(w[SendWQEAtomicRKeyOff:]) }

// RemoteQPN is the destination of a UD request.
func (w SendWQE) RemoteQPN() uint32 { return le.Uint32(w[SendWQERemoteQPNOff:]) }

// QKey is the Q_Key of a UD request.
func (w SendWQE) QKey() uint32 { return le.Uint32(w[SendWQEQKeyOff:]) }

// PKeyIndex is the P_Key index of a UD request; only the GSI QP uses it.
func (w SendWQE) PKeyIndex() uint16 { return le.Uint16(w[SendWQEPKeyIndexOff:]) }

// AHNum returns the UD request's index in the address handle table.
func (w SendWQE) AHNum() uint32 { return le.Uint32(w[SendWQEAHNumOff:]) }

// MW returns the operands of a BIND_MW request: the range, the region's L_Key, the window's present and new R_Key and
// its access rights.
func (w SendWQE) MW() (addr, length uint64, mrLKey, mwRKey, newRKey, access uint32) {
	return le.Uint64(w[SendWQEMWAddrOff:]), le.Uint64(w[SendWQEMWLengthOff:]), le.Uint32(w[SendWQEMWMRLKeyOff:]),
		le.Uint32(w[SendWQEMWRKeyOff:]), le.Uint32(w[SendWQEMWNewRKeyOff:]), le.Uint32(w[SendWQEMWAccessOff:])
}

// DMALength is the message length that the poster computed: reliable only if SendInline is set, for inline data.
func (w SendWQE) DMALength() uint32 { return le.Uint32(w[SendWQEDMALengthOff:]) }

// NumSGE is the number of SGEs; it is meaningless if SendInline is set.
func (w SendWQE) NumSGE() uint32 { return le.Uint32(w[SendWQENumSGEOff:]) }

// SGE returns element i; the caller has checked that the slot holds it.
func (w SendWQE) SGE(i int) SGE { return getSGE(w[SendWQESGEOff+i*SizeSGE:]) }

// Flush returns the R_Key, placement and selectivity of a FLUSH. The provider keeps its length in DMALength.
func (w SendWQE) Flush() (rkey uint32, placement, selectivity uint8) {
	return le.Uint32(w[SendWQEFlushRKeyOff:]), w[SendWQEFlushTypeOff], w[SendWQEFlushLevelOff]
}

// Inline returns the first n bytes of inline data; the caller has checked that the slot holds them.
func (w SendWQE) Inline(n int) []byte { return w[SendWQESGEOff : SendWQESGEOff+n] }

// The setters below are for the driver's side.

// SetRequest writes the fields of every work request, and clears the rest of the fixed part.
func (w SendWQE) SetRequest(id uint64, opcode, flags uint32) {
	clear(w[:SizeSendWQE])
	le.PutUint64(w[SendWQEIDOff:], id)
	le.PutUint32(w[SendWQEOpcodeOff:], opcode)
	le.PutUint32(w[SendWQEFlagsOff:], flags)
}

// SetImm stores immediate data, given in network order.
func (w SendWQE) SetImm(imm [4]byte) { copy(w[SendWQEExOff:], imm[:]) }

// SetInvalidateRKey stores the key to invalidate, in place of immediate data.
func (w SendWQE) SetInvalidateRKey(key uint32) { le.PutUint32(w[SendWQEExOff:], key) }

// SetRDMA stores the target of a READ or WRITE.
func (w SendWQE) SetRDMA(addr uint64, rkey uint32) {
	le.PutUint64(w[SendWQERemoteAddrOff:], addr)
	le.PutUint32(w[SendWQERKeyOff:], rkey)
	le.PutUint64(w[SendWQEIOVAOff:], addr)
}

// SetFlush stores the operands of a FLUSH, as the rxe provider does.
func (w SendWQE) SetFlush(addr uint64, length, rkey uint32, placement, selectivity uint8) {
	le.PutUint64(w[SendWQERemoteAddrOff:], addr)
	le.PutUint32(w[SendWQEFlushRKeyOff:], rkey)
	w[SendWQEFlushTypeOff], w[SendWQEFlushLevelOff] = placement, selectivity
	le.PutUint64(w[SendWQEIOVAOff:], addr)
	le.PutUint32(w[SendWQEDMALengthOff:], length)
	le.PutUint32(w[SendWQEResidOff:], length)
}

// SetAtomic stores the target and operands of an atomic request.
func (w SendWQE) SetAtomic(addr uint64, rkey uint32, compareAdd, swap uint64) {
	le.PutUint64(w[SendWQERemoteAddrOff:], addr)
	le.PutUint64(w[SendWQECompareAddOff:], compareAdd)
	le.PutUint64(w[SendWQESwapOff:], swap)
	le.PutUint32(w[SendWQEAtomicRKeyOff:], rkey)
	le.PutUint64(w[SendWQEIOVAOff:], addr)
}

// SetUD stores the destination of a UD request.
func (w SendWQE) SetUD(qpn, qkey, ah uint32) {
	le.PutUint32(w[SendWQERemoteQPNOff:], qpn)
	le.PutUint32(w[SendWQEQKeyOff:], qkey)
	le.PutUint32(w[SendWQEAHNumOff:], ah)
}

// SetMW stores the operands of a BIND_MW request.
func (w SendWQE) SetMW(addr, length uint64, mrLKey, mwRKey, newRKey, access uint32) {
	le.PutUint64(w[SendWQEMWAddrOff:], addr)
	le.PutUint64(w[SendWQEMWLengthOff:], length)
	le.PutUint32(w[SendWQEMWMRLKeyOff:], mrLKey)
	le.PutUint32(w[SendWQEMWRKeyOff:], mwRKey)
	le.PutUint32(w[SendWQEMWNewRKeyOff:], newRKey)
	le.PutUint32(w[SendWQEMWAccessOff:], access)
}

// SetSGEs stores the SGEs and their total length; the slot must hold them.
func (w SendWQE) SetSGEs(sgl []SGE) {
	n := putSGEs(w[SendWQESGEOff:], sgl)
	le.PutUint32(w[SendWQEDMALengthOff:], n)
	le.PutUint32(w[SendWQEResidOff:], n)
	le.PutUint32(w[SendWQENumSGEOff:], uint32(len(sgl)))
}

// SetInline stores inline data; the slot must hold it. The caller sets SendInline in the flags.
func (w SendWQE) SetInline(data []byte) {
	copy(w[SendWQESGEOff:], data)
	le.PutUint32(w[SendWQEDMALengthOff:], uint32(len(data)))
	le.PutUint32(w[SendWQEResidOff:], uint32(len(data)))
}

// RecvWQE is a view of one slot of a receive queue or SRQ, at least SizeRecvWQE bytes long.
type RecvWQE []byte

// ID is the work request's wr_id.
func (w RecvWQE) ID() uint64 { return le.Uint64(w[RecvWQEIDOff:]) }

// NumSGE is the number of SGEs.
func (w RecvWQE) NumSGE() uint32 { return le.Uint32(w[RecvWQENumSGEOff:]) }

// SGE returns element i; the caller has checked that the slot holds it.
func (w RecvWQE) SGE(i int) SGE { return getSGE(w[RecvWQESGEOff+i*SizeSGE:]) }

// Set writes a receive request; the slot must hold the SGEs.
func (w RecvWQE) Set(id uint64, sgl []SGE) {
	clear(w[:SizeRecvWQE])
	le.PutUint64(w[RecvWQEIDOff:], id)
	n := putSGEs(w[RecvWQESGEOff:], sgl)
	le.PutUint32(w[RecvWQEDMALengthOff:], n)
	le.PutUint32(w[RecvWQEDMALengthOff+4:], n)
	le.PutUint32(w[RecvWQENumSGEOff:], uint32(len(sgl)))
}

func getSGE(b []byte) SGE {
	_ = b[SizeSGE-1]
	return SGE{Addr: le.Uint64(b), Length: le.Uint32(b[8:]), LKey: le.Uint32(b[12:])}
}

func putSGEs(b []byte, sgl []SGE) (total uint32) {
	for i, s := range sgl {
		e := b[i*SizeSGE:][:SizeSGE]
		le.PutUint64(e, s.Addr)
		le.PutUint32(e[8:], s.Length)
		le.PutUint32(e[12:], s.LKey)
		total += s.Length
	}
	return total
}
