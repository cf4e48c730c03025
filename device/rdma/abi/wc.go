package abi

import "encoding/binary"

var le = binary.LittleEndian

// Sizes of a completion: the structure, and its ring slot.
const (
	SizeWC         = 48
	WCLog2ElemSize = 6
	wcStatusOff    = 8
	wcOpcodeOff    = 12
	wcVendorErrOff = 16
	wcByteLenOff   = 20
	wcExOff        = 24
	wcQPNOff       = 28
	wcSrcQPOff     = 32
	wcFlagsOff     = 36
	wcPKeyIndexOff = 40
	wcSLIDOff      = 42
	wcSLOff        = 44
	wcDLIDPathOff  = 45
	wcPortOff      = 46
)

// WC is a completion as it is in a CQ (struct ib_uverbs_wc).
type WC struct {
	ID           uint64  `c:"wr_id"`
	Status       uint32  `c:"status"` // WC... status; of a failed WC only ID, Status, VendorErr and QPN are valid
	Opcode       uint32  `c:"opcode"` // WCOp...
	VendorErr    uint32  `c:"vendor_err"`
	ByteLen      uint32  `c:"byte_len"`
	Ex           [4]byte `c:"ex"` // immediate data in network order, or the invalidated R_Key (little-endian)
	QPN          uint32  `c:"qp_num"`
	SrcQP        uint32  `c:"src_qp"`
	Flags        uint32  `c:"wc_flags"` // WCFlag...
	PKeyIndex    uint16  `c:"pkey_index"`
	SLID         uint16  `c:"slid"`
	SL           uint8   `c:"sl"`
	DLIDPathBits uint8   `c:"dlid_path_bits"`
	PortNum      uint8   `c:"port_num"`
}

// Encode writes SizeWC bytes to b; it panics if b is shorter.
func (w *WC) Encode(b []byte) {
	b = b[:SizeWC]
	le.PutUint64(b, w.ID)
	le.PutUint32(b[wcStatusOff:], w.Status)
	le.PutUint32(b[wcOpcodeOff:], w.Opcode)
	le.PutUint32(b[wcVendorErrOff:], w.VendorErr)
	le.PutUint32(b[wcByteLenOff:], w.ByteLen)
	copy(b[wcExOff:wcExOff+4], w.Ex[:])
	le.PutUint32(b[wcQPNOff:], w.QPN)
	le.PutUint32(b[wcSrcQPOff:], w.SrcQP)
	le.PutUint32(b[wcFlagsOff:], w.Flags)
	le.PutUint16(b[wcPKeyIndexOff:], w.PKeyIndex)
	le.PutUint16(b[wcSLIDOff:], w.SLID)
	b[wcSLOff], b[wcDLIDPathOff], b[wcPortOff], b[wcPortOff+1] = w.SL, w.DLIDPathBits, w.PortNum, 0
}

// Decode reads SizeWC bytes from b and fails with a *DecodeError if b is
// shorter. The reserved byte is ignored: the C consumer does not look at it.
func (w *WC) Decode(b []byte) error {
	if len(b) < SizeWC {
		return short("ib_uverbs_wc", b, SizeWC)
	}
	b = b[:SizeWC]
	*w = WC{
		ID: le.Uint64(b), Status: le.Uint32(b[wcStatusOff:]), Opcode: le.Uint32(b[wcOpcodeOff:]),
		VendorErr: le.Uint32(b[wcVendorErrOff:]), ByteLen: le.Uint32(b[wcByteLenOff:]), Ex: [4]byte(b[wcExOff:]),
		QPN: le.Uint32(b[wcQPNOff:]), SrcQP: le.Uint32(b[wcSrcQPOff:]), Flags: le.Uint32(b[wcFlagsOff:]),
		PKeyIndex: le.Uint16(b[wcPKeyIndexOff:]), SLID: le.Uint16(b[wcSLIDOff:]),
		SL: b[wcSLOff], DLIDPathBits: b[wcDLIDPathOff], PortNum: b[wcPortOff],
	}
	return nil
}
