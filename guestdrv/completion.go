package guestdrv

import "github.com/vnicd/vnicd/device/rdma/abi"

// Completion reports a finished work request. If Status is not WCSuccess, only ID, Status, VendorErr and QPN are valid.
type Completion struct {
	ID        uint64 // of the work request
	Status    WCStatus
	Opcode    WCOpcode
	VendorErr uint32 // of a failed request: more about Status, for logs
	ByteLen   uint32 // bytes received, READ or returned by an atomic; with WCFlagGRH including the 40 bytes of the GRH
	Flags     WCFlags
	Imm       [4]byte // WCFlagWithImm: immediate data in network order; otherwise see InvalidatedKey
	QPN       uint32  // of the local QP
	SrcQPN    uint32  // UD: of the sender
	SL        uint8   // UD: packet type in the low four bits, see WCSLIPv4
	PKeyIndex uint16
}

// Packet types in Completion.SL.
const (
	WCSLRoCEv1 = abi.WCSLRoCEv1
	WCSLIPv6   = abi.WCSLIPv6 // RoCEv2
	WCSLIPv4   = abi.WCSLIPv4 // RoCEv2
)

// Err returns nil for a successful completion. For any other it returns a *CompletionError, which matches its Status:
// errors.Is(err, WCRemAccessErr).
func (c *Completion) Err() error {
	if c.Status == WCSuccess {
		return nil
	}
	return &CompletionError{ID: c.ID, QPN: c.QPN, Status: c.Status}
}

// InvalidatedKey returns the R_Key that the received message invalidated, and whether it invalidated one.
func (c *Completion) InvalidatedKey() (key uint32, ok bool) {
	return le.Uint32(c.Imm[:]), c.Flags&WCFlagWithInvalidate == WCFlagWithInvalidate
}

// decode reads a slot of a CQ.
func (c *Completion) decode(slot []byte) {
	var wc abi.WC
	_ = wc.Decode(slot) // a slot is never too short
	*c = Completion{
		ID: wc.ID, Status: WCStatus(wc.Status), Opcode: WCOpcode(wc.Opcode), VendorErr: wc.VendorErr, ByteLen: wc.ByteLen,
		Flags: WCFlags(wc.Flags), Imm: wc.Ex, QPN: wc.QPN, SrcQPN: wc.SrcQP, SL: wc.SL, PKeyIndex: wc.PKeyIndex,
	}
}
