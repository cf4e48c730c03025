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

// GRHLen is the number of bytes before the data of a message that a UD QP receives: a GRH, or in its last 20 bytes the
// header of IPv4.
const GRHLen = 40

// Addresses returns the source and destination of a message that a UD QP has received. buf is its receive buffer. ok is
// false if the message has no header (WCFlagGRH). With RoCEv2 over IPv4 the header is in the last 20 bytes of the GRH's
// place (IBTA A17.4.5.2); the GRH of RoCEv1 has its addresses where IPv6 has them.
func (c *Completion) Addresses(buf []byte) (from, to GID, ok bool) {
	switch {
	case c.Flags&WCFlagGRH == 0 || len(buf) < GRHLen:
	case buf[0]>>4 == 6:
		return GID(buf[8:24]), GID(buf[24:40]), true
	case buf[20]>>4 == 4:
		mapped := GID{10: 0xff, 11: 0xff}
		from, to = mapped, mapped
		copy(from[12:], buf[32:36])
		copy(to[12:], buf[36:40])
		return from, to, true
	}
	return from, to, false
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
