package guestdrv

import (
	"math"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// SGE is a scatter/gather element: Length bytes from VA Addr on, in the region with LKey. MR.SGE makes one, and checks
// that it is within the region. The device checks that again when it uses the SGE.
type SGE struct {
	Addr   uint64
	Length uint32
	LKey   uint32
}

// Remote is a place in a peer's memory. MR.Remote makes it at the peer.
type Remote struct {
	Addr uint64 // VA as the peer's region defines it
	RKey uint32
}

// Datagram is the destination of a UD message.
type Datagram struct {
	AH   *AH
	QPN  uint32 // of the receiver
	QKey uint32 // of the receiver, see QP.StartUD
}

// SendWR is a send request. A constructor such as NewWrite makes it; the exported fields may then be changed, also
// between posts of the same request. Posting copies everything, so a request may be reused once the posting method has
// returned. A request that is posted without SendSignaled on a QP without QPConfig.SigAll completes silently unless it
// fails.
type SendWR struct {
	ID    uint64 // returned in the completion
	Flags SendFlags
	SGL   []SGE // gathered (WRITE, SEND) or scattered to (READ, atomics) in order; at most QPConfig.MaxSendSGE
	// if not nil, the data of a WRITE, SEND or ATOMIC WRITE in place of SGL; at most QPConfig.MaxInline bytes
	Inline []byte
	Remote Remote // target of WRITE, READ, atomics, ATOMIC WRITE and FLUSH

	op         Opcode
	imm        [4]byte
	key        uint32 // to invalidate
	compareAdd uint64
	swap       uint64
	flush      Flush
	reg        *Registration
	bind       *BindMW
	to         Datagram
}

// Opcode returns the operation.
func (w *SendWR) Opcode() Opcode { return w.op }

// With adds flags to Flags, and returns w.
func (w *SendWR) With(flags SendFlags) *SendWR { w.Flags |= flags; return w }

// NewSend sends the data of sgl to a receive request of the peer (RC, UC).
func NewSend(id uint64, sgl ...SGE) *SendWR { return &SendWR{ID: id, op: WRSend, SGL: sgl} }

// NewSendImm is NewSend with immediate data, in network order, which the peer receives as Completion.Imm.
func NewSendImm(id uint64, imm [4]byte, sgl ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRSendWithImm, imm: imm, SGL: sgl}
}

// NewSendInvalidate is NewSend that also invalidates rkey, which belongs to a FastMR or a window of type 2 of the peer
// (RC).
func NewSendInvalidate(id uint64, rkey uint32, sgl ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRSendWithInv, key: rkey, SGL: sgl}
}

// NewDatagram sends the data of sgl, at most Info.PortMTU bytes, to a UD QP.
func NewDatagram(id uint64, to Datagram, sgl ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRSend, to: to, SGL: sgl}
}

// NewDatagramImm is NewDatagram with immediate data, in network order.
func NewDatagramImm(id uint64, to Datagram, imm [4]byte, sgl ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRSendWithImm, to: to, imm: imm, SGL: sgl}
}

// NewWrite writes the data of sgl to the peer's memory (RC, UC). The peer gets no completion: see NewWriteImm.
func NewWrite(id uint64, to Remote, sgl ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRRDMAWrite, Remote: to, SGL: sgl}
}

// NewWriteImm is NewWrite that also completes a receive request of the peer, with immediate data in network order. The
// buffer of that receive request is not used.
func NewWriteImm(id uint64, to Remote, imm [4]byte, sgl ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRRDMAWriteWithImm, Remote: to, imm: imm, SGL: sgl}
}

// NewRead reads the peer's memory into sgl (RC).
func NewRead(id uint64, from Remote, sgl ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRRDMARead, Remote: from, SGL: sgl}
}

// NewCompareSwap compares the 8 bytes at the aligned address at with compare, and replaces them by swap if they are
// equal (RC). Their former value goes to result, in the order of this machine.
func NewCompareSwap(id uint64, at Remote, compare, swap uint64, result ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRAtomicCmpAndSwp, Remote: at, compareAdd: compare, swap: swap, SGL: result}
}

// NewFetchAdd adds to the 8 bytes at the aligned address at (RC). Their former value goes to result.
func NewFetchAdd(id uint64, at Remote, add uint64, result ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRAtomicFetchAndAdd, Remote: at, compareAdd: add, SGL: result}
}

// NewAtomicWrite writes 8 bytes of sgl to the aligned address to, atomically (RC, CapAtomicWrite; IBTA A19).
func NewAtomicWrite(id uint64, to Remote, sgl ...SGE) *SendWR {
	return &SendWR{ID: id, op: WRAtomicWrite, Remote: to, SGL: sgl}
}

// NewFlush completes once earlier WRITEs of the QP to the peer's memory are visible as f requires (RC, CapFlushGlobal).
func NewFlush(id uint64, at Remote, f Flush) *SendWR {
	return &SendWR{ID: id, op: WRFlush, Remote: at, flush: f}
}

// NewLocalInvalidate invalidates key, which belongs to a FastMR or a window of type 2 of this device.
func NewLocalInvalidate(id uint64, key uint32) *SendWR {
	return &SendWR{ID: id, op: WRLocalInv, key: key}
}

// NewRegister registers memory under a FastMR's key, see FastMR.Map (privileged QPs). r must not change while the
// request is being posted.
func NewRegister(id uint64, r *Registration) *SendWR { return &SendWR{ID: id, op: WRRegMR, reg: r} }

// NewBind binds a window to part of a region, or unbinds it.
func NewBind(id uint64, b *BindMW) *SendWR { return &SendWR{ID: id, op: WRBindMW, bind: b} }

// Flush describes a FLUSH (IBTA A19).
type Flush struct {
	Length      uint32 // bytes from the request's Remote.Addr on
	Placement   uint8  // FlushGlobal
	Selectivity uint8  // FlushRange or FlushMR
}

// Values of Flush.Placement and Flush.Selectivity.
const (
	FlushGlobal = abi.FlushGlobal // global visibility
	FlushRange  = abi.FlushRange  // the range only
	FlushMR     = abi.FlushMR     // the whole region
)

// encode writes the request into a free slot of q's send queue.
func (w *SendWR) encode(q *QP, slot []byte) error {
	e := abi.SendWQE(slot)
	flags := w.Flags &^ sendInline
	if w.Inline != nil {
		flags |= sendInline
	}
	e.SetRequest(w.ID, uint32(w.op), uint32(flags))
	switch w.op {
	case WRSendWithImm, WRRDMAWriteWithImm:
		e.SetImm(w.imm)
	case WRSendWithInv, WRLocalInv, abi.WRRDMAReadWithInv:
		e.SetInvalidateRKey(w.key)
	}
	switch w.op {
	case WRRDMAWrite, WRRDMAWriteWithImm, WRRDMARead, abi.WRRDMAReadWithInv, WRAtomicWrite:
		e.SetRDMA(w.Remote.Addr, w.Remote.RKey)
	case WRFlush:
		e.SetFlush(w.Remote.Addr, w.flush.Length, w.Remote.RKey, w.flush.Placement, w.flush.Selectivity)
		return nil
	case WRAtomicCmpAndSwp, WRAtomicFetchAndAdd:
		e.SetAtomic(w.Remote.Addr, w.Remote.RKey, w.compareAdd, w.swap)
	case WRRegMR:
		if w.reg != nil {
			w.reg.encode(e[abi.SendWQERegOff:])
		}
	case WRBindMW:
		if b := w.bind; b != nil {
			e.SetMW(b.Addr, b.Length, b.Region, b.Key, b.NewKey, uint32(b.Access))
		}
	default:
		if q.typ == QPTypeUD || q.typ == QPTypeGSI {
			if w.to.AH == nil {
				return errNoAH
			}
			e.SetUD(w.to.QPN, w.to.QKey, w.to.AH.num)
		}
	}
	if w.Inline != nil {
		e.SetInline(w.Inline)
		return nil
	}
	n, err := putSGEs(e[abi.SendWQESGEOff:], w.SGL)
	if err != nil {
		return err
	}
	le.PutUint32(e[abi.SendWQEDMALengthOff:], n)
	le.PutUint32(e[abi.SendWQEResidOff:], n)
	le.PutUint32(e[abi.SendWQENumSGEOff:], uint32(len(w.SGL)))
	return nil
}

// RecvWR is a receive request: a place for one incoming message.
type RecvWR struct {
	ID  uint64 // returned in the completion
	SGL []SGE  // filled in order; at most QPConfig.MaxRecvSGE or SRQConfig.MaxSGE
}

// NewRecv makes a receive request.
func NewRecv(id uint64, sgl ...SGE) *RecvWR { return &RecvWR{ID: id, SGL: sgl} }

// encode writes the request into a free slot.
func (w *RecvWR) encode(slot []byte) error {
	clear(slot[:abi.SizeRecvWQE])
	le.PutUint64(slot[abi.RecvWQEIDOff:], w.ID)
	n, err := putSGEs(slot[abi.RecvWQESGEOff:], w.SGL)
	if err != nil {
		return err
	}
	le.PutUint32(slot[abi.RecvWQEDMALengthOff:], n)
	le.PutUint32(slot[abi.RecvWQEDMALengthOff+4:], n)
	le.PutUint32(slot[abi.RecvWQENumSGEOff:], uint32(len(w.SGL)))
	return nil
}

// putSGEs writes sgl and returns its total length, which has 32 bits in a request.
func putSGEs(b []byte, sgl []SGE) (uint32, error) {
	var total uint64
	for i, s := range sgl {
		e := b[i*abi.SizeSGE:][:abi.SizeSGE]
		le.PutUint64(e, s.Addr)
		le.PutUint32(e[8:], s.Length)
		le.PutUint32(e[12:], s.LKey)
		total += uint64(s.Length)
	}
	if total > math.MaxUint32 {
		return 0, errTooLong
	}
	return uint32(total), nil
}

var (
	errTooManySGEs = invalid("more SGEs than the queue was created for")
	errTooLong     = invalid("the SGEs have 4 GiB or more together")
	errInlineLen   = invalid("more inline data than the queue was created for")
	errNoAH        = invalid("a UD request needs an address handle")
)
