package guestdrv

import (
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// Modify changes the attributes that mask (abi.QPAttr... bits) names. The device
// refuses what the QP's state and type do not permit (IBTA 10.3.1) with
// abi.StatusInvalid.
func (q *QP) Modify(attr abi.QPAttr, mask uint32) error {
	if err := q.d.users.enter(); err != nil {
		return err
	}
	defer q.d.users.leave()
	attr.QPN, attr.AttrMask = q.num, mask
	if err := q.d.do(abi.CmdModifyQP, &attr, abi.SizeQPAttr, nil); err != nil {
		return fmt.Errorf("QP %d: %w", q.num, err)
	}
	if mask&abi.QPAttrState != 0 && attr.QPState == abi.QPReset {
		// RESET empties the queues; the driver owns the producers, the device the consumers.
		q.sq.prod.Store(q.sq.cons.Load() & q.sq.mask)
		if q.ring != nil {
			q.ring.prod.Store(q.ring.cons.Load() & q.ring.mask)
		}
	}
	return nil
}

// Query asks for the QP's attributes.
func (q *QP) Query() (abi.QPAttr, error) {
	var a abi.QPAttr
	err := q.d.onHandle(abi.CmdQueryQP, q.num, &a)
	return a, err
}

// DefaultQKey is the Q_Key of UD QPs that ask for no other.
const DefaultQKey = 0x11111111

// ToInit takes the QP from RESET to INIT. access are the rights of remote peers
// (RC, UC), qkey is for UD.
func (q *QP) ToInit(access, qkey uint32) error {
	a := abi.QPAttr{QPState: abi.QPInit, PortNum: 1, AccessFlags: access, QKey: qkey}
	mask := uint32(abi.QPAttrState | abi.QPAttrPKeyIndex | abi.QPAttrPort)
	switch q.typ {
	case abi.QPTypeUD:
		mask |= abi.QPAttrQKey
	case abi.QPTypeGSI:
		mask = abi.QPAttrState | abi.QPAttrPKeyIndex | abi.QPAttrQKey
	default:
		mask |= abi.QPAttrAccessFlags
	}
	return q.Modify(a, mask)
}

// Peer is the other end of a connection.
type Peer struct {
	QPN uint32
	PSN uint32 // the peer's first send PSN
	Path
}

// ConnectOptions of a connection. The zero value is usable.
type ConnectOptions struct {
	PSN         uint32 // first send PSN; the peer's Peer.PSN
	Access      uint32 // rights of the peer; 0 means all
	MTU         uint8  // abi.MTU...; 0 means the largest that the port carries
	Timeout     uint8  // 4.096 us * 2^Timeout; 0 means 14 (67 ms)
	RetryCnt    uint8  // 0 means 7; see NoRetry
	RNRRetry    uint8  // 0 means 7, for ever; see NoRetry
	MinRNRTimer uint8  // 0 means 12 (0.64 ms)
	RdAtomic    uint8  // READs and atomics at once, each way; 0 means what the device offers, at most 16
}

// NoRetry in RetryCnt and RNRRetry means none at all.
const NoRetry = 0xff

func retries(n uint8) uint8 {
	switch n {
	case 0:
		return 7
	case NoRetry:
		return 0
	}
	return n
}

func (o ConnectOptions) withDefaults(d *Device) (ConnectOptions, error) {
	if o.Access == 0 {
		o.Access = abi.AccessRemoteRead | abi.AccessRemoteWrite | abi.AccessRemoteAtomic
		if d.attr.Caps&abi.CapFlushGlobal != 0 {
			o.Access |= abi.AccessFlushGlobal
		}
	}
	if o.MTU == 0 {
		c, err := d.ReadConfig()
		if err != nil {
			return o, err
		}
		if o.MTU = abi.MTUFromBytes(int(c.PortMTU)); o.MTU == 0 {
			return o, invalid("the port's MTU of %d bytes carries no RoCE", c.PortMTU)
		}
	}
	if o.Timeout == 0 {
		o.Timeout = 14
	}
	if o.MinRNRTimer == 0 {
		o.MinRNRTimer = 12
	}
	if o.RdAtomic == 0 {
		o.RdAtomic = uint8(min(d.attr.MaxQPRdAtom, d.attr.MaxQPInitRdAtom, 16))
	}
	o.RetryCnt, o.RNRRetry = retries(o.RetryCnt), retries(o.RNRRetry)
	return o, nil
}

// ToRTR takes an RC or UC QP from INIT to RTR: it can receive from peer.
func (q *QP) ToRTR(peer Peer, o ConnectOptions) error {
	o, err := o.withDefaults(q.d)
	if err != nil {
		return err
	}
	a := abi.QPAttr{
		QPState: abi.QPRTR, PathMTU: o.MTU, DestQPN: peer.QPN, RQPSN: peer.PSN, MaxDestRdAtomic: o.RdAtomic, MinRNRTimer: o.MinRNRTimer,
		AV: abi.AV{
			DGID: peer.GID, DMAC: peer.MAC, SGIDIndex: peer.SGIDIndex, VLANID: vlanID(peer.VLAN), TrafficClass: peer.TrafficClass,
			HopLimit: peer.hopLimit(), FlowLabel: peer.FlowLabel, SL: peer.SL,
		},
	}
	mask := uint32(abi.QPAttrState | abi.QPAttrAV | abi.QPAttrPathMTU | abi.QPAttrDestQPN | abi.QPAttrRQPSN)
	if q.typ == abi.QPTypeRC {
		mask |= abi.QPAttrMaxDestRdAtomic | abi.QPAttrMinRNRTimer
	}
	return q.Modify(a, mask)
}

// ToRTS takes an RC or UC QP from RTR to RTS: it can send.
func (q *QP) ToRTS(o ConnectOptions) error {
	o, err := o.withDefaults(q.d)
	if err != nil {
		return err
	}
	a := abi.QPAttr{
		QPState: abi.QPRTS, SQPSN: o.PSN, Timeout: o.Timeout, RetryCnt: o.RetryCnt, RNRRetry: o.RNRRetry, MaxRdAtomic: o.RdAtomic,
	}
	mask := uint32(abi.QPAttrState | abi.QPAttrSQPSN)
	if q.typ == abi.QPTypeRC {
		mask |= abi.QPAttrTimeout | abi.QPAttrRetryCnt | abi.QPAttrRNRRetry | abi.QPAttrMaxQPRdAtomic
	}
	return q.Modify(a, mask)
}

// Connect takes a fresh RC or UC QP to RTS, connected to peer, whose side does the same.
func (q *QP) Connect(peer Peer, o ConnectOptions) error {
	o, err := o.withDefaults(q.d)
	if err != nil {
		return err
	}
	if err := q.ToInit(o.Access, 0); err != nil {
		return err
	}
	// The defaults were filled in: 0 and NoRetry must not be read anew.
	again := o
	if again.RetryCnt == 0 {
		again.RetryCnt = NoRetry
	}
	if again.RNRRetry == 0 {
		again.RNRRetry = NoRetry
	}
	if err := q.ToRTR(peer, again); err != nil {
		return err
	}
	return q.ToRTS(again)
}

// StartUD takes a fresh UD or GSI QP to RTS.
func (q *QP) StartUD(qkey uint32) error {
	if err := q.ToInit(0, qkey); err != nil {
		return err
	}
	if err := q.Modify(abi.QPAttr{QPState: abi.QPRTR}, abi.QPAttrState); err != nil {
		return err
	}
	return q.Modify(abi.QPAttr{QPState: abi.QPRTS}, abi.QPAttrState|abi.QPAttrSQPSN)
}

// ToErr takes the QP to ERR: everything in its queues completes with abi.WCWRFlushErr.
func (q *QP) ToErr() error { return q.Modify(abi.QPAttr{QPState: abi.QPErr}, abi.QPAttrState) }

// Reset takes the QP to RESET: its queues are empty, nothing completes.
func (q *QP) Reset() error { return q.Modify(abi.QPAttr{QPState: abi.QPReset}, abi.QPAttrState) }
