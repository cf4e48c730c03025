package guestdrv

import (
	"context"
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// QPAttr are the attributes of a QP, as in ibv_modify_qp. QP.Modify sets those in its mask; QP.Query returns all.
type QPAttr struct {
	State            QPState
	CurState         QPState
	PathMTU          MTU
	Timeout          uint8 // of an ACK: 4.096 us * 2^Timeout, 0..31; 0: never
	RetryCnt         uint8 // 0..7
	RNRRetry         uint8 // 0..7; 7: without limit
	MinRNRTimer      uint8 // 0..31, IBTA table 45
	MaxRdAtomic      uint8 // concurrent READs and atomics as requester
	MaxDestRdAtomic  uint8 // concurrent READs and atomics as responder
	EnSQDAsyncNotify bool  // with State QPSQD: raise EventSQDrained
	SQDraining       bool  // Query only
	PKeyIndex        uint16
	Port             uint16 // always 1
	Access           Access // rights of remote peers
	QKey             uint32
	DestQPN          uint32
	RQPSN            uint32 // first PSN to receive
	SQPSN            uint32 // first PSN to send
	Path             Path
}

// Modify changes the attributes in mask. The device refuses changes that the QP's state and type do not permit with
// StatusInvalid (IBTA 10.3.1). If Modify ends with its context or with ErrTimeout, the device may execute the change
// later. No goroutine may post while State becomes QPReset.
func (q *QP) Modify(ctx context.Context, attr QPAttr, mask QPAttrMask) error {
	if mask&QPAttrAV != 0 {
		if err := q.d.checkGIDIndex(attr.Path.SGIDIndex); err != nil {
			return fmt.Errorf("QP %d: %w", q.num, err)
		}
	}
	if err := q.d.users.enter(); err != nil {
		return err
	}
	defer q.d.users.leave()
	req := abi.QPAttr{
		QPN: q.num, AttrMask: uint32(mask), QPState: uint8(attr.State), CurQPState: uint8(attr.CurState),
		PathMTU: uint8(attr.PathMTU), Timeout: attr.Timeout, RetryCnt: attr.RetryCnt, RNRRetry: attr.RNRRetry,
		MinRNRTimer: attr.MinRNRTimer, MaxRdAtomic: attr.MaxRdAtomic, MaxDestRdAtomic: attr.MaxDestRdAtomic,
		PKeyIndex: attr.PKeyIndex, PortNum: attr.Port, AccessFlags: uint32(attr.Access), QKey: attr.QKey,
		DestQPN: attr.DestQPN, RQPSN: attr.RQPSN, SQPSN: attr.SQPSN,
	}
	if attr.EnSQDAsyncNotify {
		req.EnSQDAsyncNotify = 1
	}
	if mask&QPAttrAV != 0 {
		req.AV = attr.Path.av()
	}
	if err := q.d.do(ctx, abi.CmdModifyQP, &req, abi.SizeQPAttr, nil); err != nil {
		return fmt.Errorf("QP %d: %w", q.num, err)
	}
	if mask&QPAttrState != 0 && attr.State == QPReset {
		// RESET empties the queues. The driver owns the producer indices, the device the consumer indices.
		q.sq.prod.Store(q.sq.cons.Load() & q.sq.mask)
		if q.ring != nil {
			q.ring.prod.Store(q.ring.cons.Load() & q.ring.mask)
		}
	}
	return nil
}

// Query returns the QP's attributes.
func (q *QP) Query(ctx context.Context) (QPAttr, error) {
	var a abi.QPAttr
	if err := q.d.onHandle(ctx, abi.CmdQueryQP, q.num, &a); err != nil {
		return QPAttr{}, err
	}
	return QPAttr{
		State: QPState(a.QPState), CurState: QPState(a.CurQPState), PathMTU: MTU(a.PathMTU), Timeout: a.Timeout,
		RetryCnt: a.RetryCnt, RNRRetry: a.RNRRetry, MinRNRTimer: a.MinRNRTimer, MaxRdAtomic: a.MaxRdAtomic,
		MaxDestRdAtomic: a.MaxDestRdAtomic, EnSQDAsyncNotify: a.EnSQDAsyncNotify != 0, SQDraining: a.SQDraining != 0,
		PKeyIndex: a.PKeyIndex, Port: a.PortNum, Access: Access(a.AccessFlags), QKey: a.QKey, DestQPN: a.DestQPN,
		RQPSN: a.RQPSN, SQPSN: a.SQPSN, Path: pathOf(&a.AV),
	}, nil
}

// DefaultQKey is a Q_Key for UD QPs that need no particular one.
const DefaultQKey = 0x11111111

// ToInit moves the QP from RESET to INIT. access are the rights of remote peers (RC, UC); qkey is for UD.
func (q *QP) ToInit(ctx context.Context, access Access, qkey uint32) error {
	a := QPAttr{State: QPInit, Port: 1, Access: access, QKey: qkey}
	mask := QPAttrState | QPAttrPKeyIndex | QPAttrPort
	switch q.typ {
	case QPTypeUD:
		mask |= QPAttrQKey
	case QPTypeGSI:
		mask = QPAttrState | QPAttrPKeyIndex | QPAttrQKey
	default:
		mask |= QPAttrAccessFlags
	}
	return q.Modify(ctx, a, mask)
}

// Peer is the other end of a connection.
type Peer struct {
	QPN uint32
	PSN uint32 // first PSN that the peer sends
	Path
}

// ConnectOptions are options of Connect, ToRTR and ToRTS. The zero value is usable. Timeout and the fields after it
// concern RC only.
type ConnectOptions struct {
	PSN         uint32 // first PSN to send; the peer needs it as Peer.PSN
	Access      Access // rights of the peer, within those of each region; 0: it can only send messages; Connect only
	MTU         MTU    // 0 means the largest that the port carries
	Timeout     uint8  // of an ACK: 4.096 us * 2^Timeout; 0 means 14 (67 ms)
	RetryCnt    uint8  // 1..7 or NoRetry; 0 means 7
	RNRRetry    uint8  // 1..7 or NoRetry; 0 means 7, without limit
	MinRNRTimer uint8  // 0 means 12 (0.64 ms)
	RdAtomic    uint8  // concurrent READs and atomics in each direction; 0 means the device's limit, at most 16
}

// NoRetry in ConnectOptions.RetryCnt or RNRRetry disables retries.
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

func (o ConnectOptions) withDefaults(ctx context.Context, d *Device) (ConnectOptions, error) {
	if o.MTU == 0 {
		c, err := d.readConfig(ctx)
		if err != nil {
			return o, err
		}
		if o.MTU = MTUFromBytes(int(c.PortMTU)); o.MTU == 0 {
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

// ToRTR moves an RC or UC QP from INIT to RTR, in which it receives from peer.
func (q *QP) ToRTR(ctx context.Context, peer Peer, o ConnectOptions) error {
	o, err := o.withDefaults(ctx, q.d)
	if err != nil {
		return err
	}
	a := QPAttr{
		State: QPRTR, PathMTU: o.MTU, DestQPN: peer.QPN, RQPSN: peer.PSN, MaxDestRdAtomic: o.RdAtomic,
		MinRNRTimer: o.MinRNRTimer, Path: peer.Path,
	}
	mask := QPAttrState | QPAttrAV | QPAttrPathMTU | QPAttrDestQPN | QPAttrRQPSN
	if q.typ == QPTypeRC {
		mask |= QPAttrMaxDestRdAtomic | QPAttrMinRNRTimer
	}
	return q.Modify(ctx, a, mask)
}

// ToRTS moves an RC or UC QP from RTR to RTS, in which it also sends.
func (q *QP) ToRTS(ctx context.Context, o ConnectOptions) error {
	o, err := o.withDefaults(ctx, q.d)
	if err != nil {
		return err
	}
	a := QPAttr{
		State: QPRTS, SQPSN: o.PSN, Timeout: o.Timeout, RetryCnt: o.RetryCnt, RNRRetry: o.RNRRetry, MaxRdAtomic: o.RdAtomic,
	}
	mask := QPAttrState | QPAttrSQPSN
	if q.typ == QPTypeRC {
		mask |= QPAttrTimeout | QPAttrRetryCnt | QPAttrRNRRetry | QPAttrMaxQPRdAtomic
	}
	return q.Modify(ctx, a, mask)
}

// Connect moves a new RC or UC QP through INIT and RTR to RTS, connected to peer. The peer does the same with its QP.
// A peer that is to access regions of this end needs rights in ConnectOptions.Access: without them its requests fail
// with WCRemInvReqErr. Connect exchanges no packet: it succeeds even if there is no such peer. A message that arrives
// before the peer is ready is sent again (RC) or lost (UC). After an error, Reset the QP before the next attempt.
func (q *QP) Connect(ctx context.Context, peer Peer, o ConnectOptions) error {
	o, err := o.withDefaults(ctx, q.d)
	if err != nil {
		return err
	}
	if err := q.ToInit(ctx, o.Access, 0); err != nil {
		return err
	}
	// The defaults have been applied: 0 must not become a default again.
	again := o
	if again.RetryCnt == 0 {
		again.RetryCnt = NoRetry
	}
	if again.RNRRetry == 0 {
		again.RNRRetry = NoRetry
	}
	if err := q.ToRTR(ctx, peer, again); err != nil {
		return err
	}
	return q.ToRTS(ctx, again)
}

// StartUD moves a new UD or GSI QP through INIT and RTR to RTS. Peers need qkey to send to it.
func (q *QP) StartUD(ctx context.Context, qkey uint32) error {
	if err := q.ToInit(ctx, 0, qkey); err != nil {
		return err
	}
	if err := q.Modify(ctx, QPAttr{State: QPRTR}, QPAttrState); err != nil {
		return err
	}
	return q.Modify(ctx, QPAttr{State: QPRTS}, QPAttrState|QPAttrSQPSN)
}

// ToErr moves the QP to ERR: all outstanding requests complete with WCWRFlushErr.
func (q *QP) ToErr(ctx context.Context) error {
	return q.Modify(ctx, QPAttr{State: QPErr}, QPAttrState)
}

// Reset moves the QP to RESET: its queues become empty, and the requests in them do not complete.
func (q *QP) Reset(ctx context.Context) error {
	return q.Modify(ctx, QPAttr{State: QPReset}, QPAttrState)
}
