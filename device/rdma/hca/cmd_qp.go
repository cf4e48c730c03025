// Side: control

package hca

import (
	"errors"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// Commands about queue pairs.

// qpParts are the objects that a new QP refers to.
type qpParts struct {
	pd       *pd
	scq, rcq *cqObject
	srq      *srqObject // nil: none
}

func (c *cmd) qpParts(r *abi.CreateQP) (p qpParts, err error) {
	if p.pd, err = c.t.pd(r.PDN); err != nil {
		return p, err
	}
	if p.scq, err = c.t.cq(r.SendCQN); err != nil {
		return p, err
	}
	if p.rcq, err = c.t.cq(r.RecvCQN); err != nil {
		return p, err
	}
	if r.Flags&abi.QPHasSRQ == 0 {
		if r.SRQN != 0 {
			return p, refuse(abi.StatusInvalid, "srqn %d without VNICD_QP_HAS_SRQ", r.SRQN)
		}
		return p, nil
	}
	if p.srq, err = c.t.srq(r.SRQN); err != nil {
		return p, err
	}
	if r.RQ.NPages != 0 {
		return p, refuse(abi.StatusInvalid, "a QP with an SRQ has no receive ring")
	}
	return p, nil
}

func (c *cmd) checkQP(r *abi.CreateQP) error {
	l := &c.d.lim
	switch {
	case r.Type < abi.QPTypeGSI || r.Type > abi.QPTypeUD:
		return refuse(abi.StatusUnsupported, "QP type %d, known are %d..%d", r.Type, abi.QPTypeGSI, abi.QPTypeUD)
	case r.Flags&^uint32(abi.QPSigAll|abi.QPPrivileged|abi.QPHasSRQ) != 0:
		return refuse(abi.StatusInvalid, "unknown QP flags %#x", r.Flags)
	case r.MaxSendSGE > uint32(l.SGEs):
		return &limitError{what: "segments of a send request", n: uint64(r.MaxSendSGE), max: uint64(l.SGEs)}
	case r.MaxRecvSGE > uint32(l.SGEs):
		return &limitError{what: "segments of a receive request", n: uint64(r.MaxRecvSGE), max: uint64(l.SGEs)}
	case r.MaxInline > uint32(l.Inline):
		return &limitError{what: "bytes of inline data", n: uint64(r.MaxInline), max: uint64(l.Inline)}
	case r.Type == abi.QPTypeGSI && c.t.qpList[gsiQPN] != nil:
		return refuse(abi.StatusBusy, "the GSI QP exists already")
	case r.Type == abi.QPTypeGSI && r.Flags&abi.QPHasSRQ != 0:
		return refuse(abi.StatusInvalid, "the GSI QP cannot use an SRQ")
	}
	return nil
}

func createQP(c *cmd) (failed error) {
	var r abi.CreateQP
	if err := r.Decode(c.in); err != nil {
		return err
	}
	list, err := c.pages(abi.SizeCreateQP, r.SQ.NPages, r.RQ.NPages)
	if err != nil {
		return err
	}
	if err := c.checkQP(&r); err != nil {
		return err
	}
	parts, err := c.qpParts(&r)
	if err != nil {
		return err
	}
	q := &qp{
		dev: c.d.data, typ: roce.Type(r.Type), pd: translate.PD(r.PDN), privileged: r.Flags&abi.QPPrivileged != 0,
		sigAll: r.Flags&abi.QPSigAll != 0, maxSendSGE: int(r.MaxSendSGE), maxRecvSGE: int(r.MaxRecvSGE),
		maxInline: int(r.MaxInline), scq: parts.scq.q, rcq: parts.rcq.q,
	}
	if parts.srq != nil {
		q.srq = parts.srq.q
	}
	if q.typ == roce.RC {
		// ATOMIC WRITE stores its operand inline, whatever max_inline the guest asked for; the smallest slot holds it.
		q.maxInline = max(q.maxInline, abi.AtomicLen)
	}
	c.t.lastWindowPD = (c.t.lastWindowPD + 1) % firstWindowPD
	q.windowPD = translate.PD(firstWindowPD + c.t.lastWindowPD)
	sendSize := sendWQESize(q.maxSendSGE, q.maxInline)
	if q.sq.ring, err = c.ring(&r.SQ, list[:8*r.SQ.NPages], sendSize, c.d.lim.QPWRs); err != nil {
		return err
	}
	if r.RQ.NPages > 0 {
		if q.rq.ring, err = c.ring(&r.RQ, list[8*r.SQ.NPages:], recvWQESize(q.maxRecvSGE), c.d.lim.QPWRs); err != nil {
			return err
		}
		q.hasRQ = true
	}
	if err := c.t.checkQPLimit(c.d); err != nil {
		return err
	}
	// The command may step aside for the rings, and must not take an engine's turn or a number each time.
	if err := c.epoch(q.adoptIndices); err != nil {
		return err
	}
	cost := qpCost(q)
	if err := cost.charge(c.d.account); err != nil {
		return err
	}
	defer func() {
		if failed != nil {
			cost.credit(c.d.account)
		}
	}()
	q.engine = c.place(parts)
	if q.index, q.n, err = c.numberQP(q.typ); err != nil {
		return err
	}
	q.init()
	if j := c.d.journaled(); j != nil {
		j.giveStored(c.d, q)
		q.Stored(0)
	}
	c.addUser(&parts, q.engine)
	err = c.on(q.engine, q.start)
	if err != nil {
		c.t.freeQPIndex(q.index)
		c.removeUser(&parts)
		return err
	}
	parts.pd.refs++
	c.t.qps++
	c.t.qpList[q.n] = &qpObject{q: q, uses: parts, bells: q.engine, cost: cost}
	c.touch(recQPObject, q.n)
	resp := abi.CreateQPResp{QPN: q.n, Engine: uint32(q.engine.id), DBSlot: uint32(q.index)}
	resp.Encode(c.reply(abi.SizeCreateQPResp))
	return nil
}

const knownAttrs = abi.QPAttrState | abi.QPAttrCurState | abi.QPAttrEnSQDAsyncNotify | abi.QPAttrAccessFlags |
	abi.QPAttrPKeyIndex | abi.QPAttrPort | abi.QPAttrQKey | abi.QPAttrAV | abi.QPAttrPathMTU | abi.QPAttrTimeout |
	abi.QPAttrRetryCnt | abi.QPAttrRNRRetry | abi.QPAttrRQPSN | abi.QPAttrMaxQPRdAtomic | abi.QPAttrMinRNRTimer |
	abi.QPAttrSQPSN | abi.QPAttrMaxDestRdAtomic | abi.QPAttrPathMigState | abi.QPAttrDestQPN

func modifyQP(c *cmd) error {
	var r abi.QPAttr
	if err := r.Decode(c.in); err != nil {
		return err
	}
	o, err := c.t.qp(r.QPN)
	switch {
	case err != nil:
		return err
	case r.AttrMask&^uint32(knownAttrs) != 0:
		return refuse(abi.StatusUnsupported,
			"attributes %#x of mask %#x (alternate path, capabilities, rate) cannot be modified", r.AttrMask&^uint32(knownAttrs),
			r.AttrMask)
	case r.AttrMask&abi.QPAttrPort != 0 && r.PortNum != 1:
		return refuse(abi.StatusInvalid, "port %d, there is only port 1", r.PortNum)
	case r.AttrMask&abi.QPAttrPKeyIndex != 0 && r.PKeyIndex != 0:
		return refuse(abi.StatusInvalid, "pkey_index %d, the table has one entry", r.PKeyIndex)
	}
	a := roce.Attr{
		State: roce.State(r.QPState), CurState: roce.State(r.CurQPState), PathMTU: r.PathMTU, Timeout: r.Timeout,
		RetryCnt: r.RetryCnt, RNRRetry: r.RNRRetry, MinRNRTimer: r.MinRNRTimer, MaxRdAtomic: r.MaxRdAtomic,
		MaxDestRdAtomic: r.MaxDestRdAtomic, SQDNotify: r.EnSQDAsyncNotify != 0, PKeyIndex: r.PKeyIndex, Port: r.PortNum,
		Access: translate.Access(r.AccessFlags), QKey: r.QKey, DestQPN: r.DestQPN, RQPSN: r.RQPSN, SQPSN: r.SQPSN,
	}
	if r.AttrMask&abi.QPAttrAV != 0 {
		if err := c.d.data.resolve(&r.AV, &a.AV); err != nil {
			return err
		}
	}
	q := o.q
	err = q.engine.on(func() error {
		q.engine.commitNow()
		err := q.modify(&a, roce.Mask(r.AttrMask))
		if err == nil && (r.AttrMask&abi.QPAttrState == 0 || a.State != roce.Reset) { // to RESET it may be executed twice
			c.effect(func(j *controlJournal) { j.addQP(o) })
		}
		return err
	})
	c.touch(recQPObject, r.QPN)
	switch {
	case err == nil && r.AttrMask&abi.QPAttrState != 0 && a.State == roce.Reset:
		return c.discard(q)
	case err == nil && r.AttrMask&abi.QPAttrState != 0 && a.State == roce.RTR:
		c.colocate(o)
	case err != nil && !errors.Is(err, roce.ErrModify) && statusOf(err) == abi.StatusInvalid:
		return &statusError{status: abi.StatusIO, msg: err.Error()}
	}
	return err
}

// discard empties the work queues of a QP that has just entered RESET. If their memory is absent the command steps
// aside; the new state has taken effect then.
func (c *cmd) discard(q *qp) error {
	c.touch(recQPObject, q.n)
	err := c.on(q.engine, func() error {
		var a roce.Attr
		if q.t.Query(&a); a.State != roce.Reset {
			return nil // another command has changed the state meanwhile
		}
		return q.discard()
	})
	if m, absent := hostMiss(err); absent {
		return &waitError{&hostWait{miss: m}, func(c *cmd, failed error) error {
			switch o := c.t.qpList[q.n]; {
			case o == nil || o.q != q: // destroyed meanwhile
			case failed != nil:
				c.d.data.warn("work queue not flushed", "qp", q.n, "reason", failed)
			default:
				return c.discard(q)
			}
			c.touch(recQPObject, q.n)
			return nil
		}}
	}
	if err != nil {
		c.d.data.warn("work queue not flushed", "qp", q.n, "reason", err)
	}
	return nil
}

func queryQP(c *cmd) error {
	n, err := c.handle()
	if err != nil {
		return err
	}
	o, err := c.t.qp(n)
	if err != nil {
		return err
	}
	var a roce.Attr
	o.q.engine.onLoop(func() { o.q.t.Query(&a) })
	r := abi.QPAttr{
		QPN: n, QPState: uint8(a.State), CurQPState: uint8(a.CurState), PathMTU: a.PathMTU, Timeout: a.Timeout,
		RetryCnt: a.RetryCnt, RNRRetry: a.RNRRetry, MinRNRTimer: a.MinRNRTimer, MaxRdAtomic: a.MaxRdAtomic,
		MaxDestRdAtomic: a.MaxDestRdAtomic, PKeyIndex: a.PKeyIndex, PortNum: 1, AccessFlags: uint32(a.Access), QKey: a.QKey,
		DestQPN: a.DestQPN, RQPSN: a.RQPSN, SQPSN: a.SQPSN, AttrMask: knownAttrs,
		AV: abi.AV{
			DGID: a.AV.DGID, DMAC: a.AV.DMAC, SGIDIndex: a.AV.SGIDIndex, VLANID: a.AV.VLAN, TrafficClass: a.AV.TrafficClass,
			HopLimit: a.AV.HopLimit, FlowLabel: a.AV.FlowLabel, SL: a.AV.SL,
		},
	}
	if a.SQDNotify {
		r.EnSQDAsyncNotify = 1
	}
	if a.SQDraining {
		r.SQDraining = 1
	}
	r.Encode(c.reply(abi.SizeQPAttr))
	return nil
}

// countQP is COUNT_QP.
func countQP(c *cmd) error {
	var r abi.CountQP
	if err := r.Decode(c.in); err != nil {
		return err
	}
	o, err := c.t.qp(r.QPN)
	switch {
	case err != nil:
		return err
	case r.Flags&^uint32(abi.CountApart) != 0:
		return refuse(abi.StatusUnsupported, "flags %#x, known is %#x", r.Flags, abi.CountApart)
	}
	var s abi.Stats
	o.q.engine.onLoop(func() {
		n := o.q.takeCounts()
		n.report(&s)
		o.q.countIn(r.Flags&abi.CountApart != 0)
	})
	s.Encode(c.reply(abi.SizeStats))
	return nil
}

func destroyQP(c *cmd) error {
	n, err := c.handle()
	if err != nil {
		return err
	}
	o, err := c.t.qp(n)
	if err != nil {
		return err
	}
	if o.mcast > 0 {
		return refuse(abi.StatusBusy, "QP %#x is attached to %d multicast groups", n, o.mcast)
	}
	q := o.q
	q.engine.onLoop(func() {
		q.close()
		if o.bells == q.engine {
			o.bells.db.leave(q.index)
		}
	})
	if o.bells != q.engine {
		o.bells.onLoop(func() { o.bells.db.leave(q.index) })
	}
	c.d.data.async.drop(&q.asyn, &q.waiters[roce.Requester].guest.node, &q.waiters[roce.Responder].guest.node)
	c.t.lingering = o.end(c.d.account, c.t.lingering)
	delete(c.t.qpList, n)
	c.touch(recQPObject, n)
	if o.uses.srq != nil { // it may have no user any more
		c.touch(recSRQObject, o.uses.srq.q.n)
	}
	c.t.qps--
	c.t.freeQPIndex(q.index)
	c.t.pds[uint32(q.pd)].refs--
	c.removeUser(&o.uses)
	return nil
}
