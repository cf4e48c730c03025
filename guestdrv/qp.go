package guestdrv

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
)

// QPConfig describes a QP to be made.
type QPConfig struct {
	Type           uint32 // abi.QPType...
	SendCQ, RecvCQ *CQ
	SRQ            *SRQ // in place of a receive queue, or nil
	MaxSendWR      int
	MaxRecvWR      int
	MaxSendSGE     int // 0 means 1
	MaxRecvSGE     int // 0 means 1
	MaxInline      int // bytes
	SigAll         bool
	Privileged     bool // may use abi.DMALKey with PAs (RA-2)
}

// QP is a queue pair. One goroutine at a time posts sends, one posts receives.
type QP struct {
	recvQueue // of no use with an SRQ
	d         *Device
	num       uint32
	typ       uint32
	sq        *ring
	maxSGE    int
	maxInline int
	db        *doorbell
	slot      uint32
}

// CreateQP makes a QP in state RESET.
func (p *PD) CreateQP(c QPConfig) (*QP, error) {
	if err := p.d.users.enter(); err != nil {
		return nil, err
	}
	defer p.d.users.leave()
	d := p.d
	if c.SendCQ == nil || c.RecvCQ == nil {
		return nil, invalid("a QP needs a send and a receive CQ")
	}
	c.MaxSendSGE, c.MaxRecvSGE = max(c.MaxSendSGE, 1), max(c.MaxRecvSGE, 1)
	c.MaxSendWR, c.MaxRecvWR = max(c.MaxSendWR, 1), max(c.MaxRecvWR, 1)
	if most := int64(d.attr.MaxQPWR); int64(c.MaxSendWR) > most || int64(c.MaxRecvWR) > most {
		return nil, invalid("%d send and %d receive requests, at most %d", c.MaxSendWR, c.MaxRecvWR, most)
	}
	if most := int64(d.attr.MaxSGE); int64(c.MaxSendSGE) > most || int64(c.MaxRecvSGE) > most {
		return nil, invalid("%d send and %d receive SGEs, at most %d", c.MaxSendSGE, c.MaxRecvSGE, most)
	}
	if c.MaxInline < 0 || int64(c.MaxInline) > int64(d.attr.MaxInline) {
		return nil, invalid("%d bytes of inline data, expected 0..%d", c.MaxInline, d.attr.MaxInline)
	}
	sq, err := newRing(d.mem, c.MaxSendWR, abi.SizeSendWQE+max(c.MaxSendSGE*abi.SizeSGE, c.MaxInline), 0)
	if err != nil {
		return nil, err
	}
	q := &QP{d: d, typ: c.Type, sq: sq, maxSGE: c.MaxSendSGE, maxInline: c.MaxInline}
	req := abi.CreateQP{
		Type: c.Type, PDN: p.num, SendCQN: c.SendCQ.num, RecvCQN: c.RecvCQ.num,
		MaxSendSGE: uint32(c.MaxSendSGE), MaxInline: uint32(c.MaxInline), SQ: sq.desc(),
	}
	pages := sq.pages()
	if c.SigAll {
		req.Flags |= abi.QPSigAll
	}
	if c.Privileged {
		req.Flags |= abi.QPPrivileged
	}
	if c.SRQ != nil {
		req.Flags |= abi.QPHasSRQ
		req.SRQN = c.SRQ.num
	} else {
		if q.recvQueue, err = newRecvQueue(d.mem, c.MaxRecvWR, c.MaxRecvSGE); err != nil {
			sq.free()
			return nil, err
		}
		req.MaxRecvSGE, req.RQ = uint32(c.MaxRecvSGE), q.ring.desc()
		pages = append(pages, q.ring.pages()...)
	}
	var resp abi.CreateQPResp
	err = d.do(abi.CmdCreateQP, &req, abi.SizeCreateQP, &resp, pages...)
	if err == nil && (int64(resp.Engine) >= int64(len(d.dbs)) || resp.DBSlot >= abi.DoorbellSlots) {
		err = invalid("device answered CREATE_QP with engine %d, doorbell %d", resp.Engine, resp.DBSlot)
	}
	if err != nil {
		q.freeRings()
		return nil, err
	}
	q.num, q.db, q.slot = resp.QPN, d.dbs[resp.Engine], resp.DBSlot
	return q, nil
}

func (q *QP) freeRings() {
	q.sq.free()
	if q.ring != nil {
		q.ring.free()
	}
}

// Number is the QP's number on the wire.
func (q *QP) Number() uint32 { return q.num }

// Destroy ends the QP without completing what is in its queues.
func (q *QP) Destroy() error {
	if err := q.d.onHandle(abi.CmdDestroyQP, q.num, nil); err != nil {
		return err
	}
	q.freeRings()
	return nil
}

// SendWR is a send request. Which fields count depends on Opcode, as with verbs.
type SendWR struct {
	ID     uint64
	Opcode uint32    // abi.WR...
	Flags  uint32    // abi.Send...; SendInline takes the data from Inline, not SGL
	SGL    []abi.SGE // gathered (or, for READ and atomics, scattered to) in order
	Inline []byte

	Imm           [4]byte // SEND_WITH_IMM, WRITE_WITH_IMM: in network order
	InvalidateKey uint32  // SEND_WITH_INV, LOCAL_INV

	RemoteAddr uint64 // READ, WRITE, FLUSH, atomics, ATOMIC WRITE (8 bytes)
	RKey       uint32
	CompareAdd uint64 // what to compare with, or to add
	Swap       uint64
	Flush      Flush

	Reg  *abi.RegWR // REG_MR, of privileged QPs only: see FastMR.Map
	Bind *BindMW    // BIND_MW

	AH        *AH // UD
	RemoteQPN uint32
	QKey      uint32
}

// Flush is what a FLUSH asks for (IBTA A19).
type Flush struct {
	Length      uint32 // from RemoteAddr on
	Placement   uint8  // abi.FlushGlobal
	Selectivity uint8  // abi.FlushRange, abi.FlushMR
}

// PostSend queues a request and rings the doorbell. It fails with ErrFull if as
// many requests as the queue holds have not completed, or with ErrInvalid.
func (q *QP) PostSend(wr *SendWR) error {
	if err := q.QueueSend(wr); err != nil {
		return err
	}
	q.Ring()
	return nil
}

// QueueSend is PostSend without the doorbell: queue several requests, then Ring once.
// The device may begin with them before.
func (q *QP) QueueSend(wr *SendWR) error {
	inline := wr.Flags&abi.SendInline != 0
	switch {
	case inline && len(wr.Inline) > q.maxInline:
		return errInlineLen
	case !inline && len(wr.SGL) > q.maxSGE:
		return errTooManySGEs
	}
	slot := q.sq.room()
	if slot == nil {
		return ErrFull
	}
	w := abi.SendWQE(slot)
	w.SetRequest(wr.ID, wr.Opcode, wr.Flags)
	switch wr.Opcode {
	case abi.WRSendWithImm, abi.WRRDMAWriteWithImm:
		w.SetImm(wr.Imm)
	case abi.WRSendWithInv, abi.WRLocalInv, abi.WRRDMAReadWithInv:
		w.SetInvalidateRKey(wr.InvalidateKey)
	}
	switch wr.Opcode {
	case abi.WRRDMAWrite, abi.WRRDMAWriteWithImm, abi.WRRDMARead, abi.WRRDMAReadWithInv, abi.WRAtomicWrite:
		w.SetRDMA(wr.RemoteAddr, wr.RKey)
	case abi.WRFlush:
		w.SetFlush(wr.RemoteAddr, wr.Flush.Length, wr.RKey, wr.Flush.Placement, wr.Flush.Selectivity)
		q.sq.publish()
		return nil
	case abi.WRAtomicCmpAndSwp, abi.WRAtomicFetchAndAdd:
		w.SetAtomic(wr.RemoteAddr, wr.RKey, wr.CompareAdd, wr.Swap)
	case abi.WRRegMR:
		if wr.Reg != nil {
			wr.Reg.Encode(w[abi.SendWQERegOff:])
		}
	case abi.WRBindMW:
		if b := wr.Bind; b != nil {
			w.SetMW(b.Addr, b.Length, b.Region, b.Key, b.NewKey, b.Access)
		}
	default:
		if q.typ == abi.QPTypeUD || q.typ == abi.QPTypeGSI {
			if wr.AH == nil {
				return errNoAH
			}
			w.SetUD(wr.RemoteQPN, wr.QKey, wr.AH.num)
		}
	}
	if inline {
		w.SetInline(wr.Inline)
	} else {
		w.SetSGEs(wr.SGL)
	}
	q.sq.publish()
	return nil
}

// Ring tells the device that requests were queued.
func (q *QP) Ring() { q.db.ring(q.slot) }

// Outstanding is the number of send requests that have not completed.
func (q *QP) Outstanding() int { return q.sq.pending() }
