package guestdrv_test

import (
	"context"

	"github.com/vnicd/vnicd/guestdrv"
)

// bg is for calls that only Config.Timeout bounds.
var bg = context.Background()

// request describes a send request by fields, for tests that vary the operation or need an invalid one. Its wr uses the
// operation's constructor.
type request struct {
	ID     uint64
	Opcode guestdrv.Opcode
	Flags  guestdrv.SendFlags // with sendInline: Inline replaces SGL
	SGL    []guestdrv.SGE
	Inline []byte

	Imm           [4]byte
	InvalidateKey uint32
	RemoteAddr    uint64
	RKey          uint32
	CompareAdd    uint64
	Swap          uint64
	Flush         guestdrv.Flush
	Reg           *guestdrv.Registration
	Bind          *guestdrv.BindMW
	AH            *guestdrv.AH
	RemoteQPN     uint32
	QKey          uint32
}

const sendInline guestdrv.SendFlags = 1 << 3 // the device ABI's flag

func (r *request) wr() *guestdrv.SendWR {
	w := r.construct()
	w.Flags = r.Flags &^ sendInline
	if r.Flags&sendInline != 0 {
		if w.Inline, w.SGL = r.Inline, nil; w.Inline == nil {
			w.Inline = []byte{}
		}
	}
	return w
}

func (r *request) construct() *guestdrv.SendWR {
	remote := guestdrv.Remote{Addr: r.RemoteAddr, RKey: r.RKey}
	to := guestdrv.Datagram{AH: r.AH, QPN: r.RemoteQPN, QKey: r.QKey}
	switch r.Opcode {
	case guestdrv.WRSend:
		if r.AH != nil {
			return guestdrv.NewDatagram(r.ID, to, r.SGL...)
		}
		return guestdrv.NewSend(r.ID, r.SGL...)
	case guestdrv.WRSendWithImm:
		if r.AH != nil {
			return guestdrv.NewDatagramImm(r.ID, to, r.Imm, r.SGL...)
		}
		return guestdrv.NewSendImm(r.ID, r.Imm, r.SGL...)
	case guestdrv.WRSendWithInv:
		return guestdrv.NewSendInvalidate(r.ID, r.InvalidateKey, r.SGL...)
	case guestdrv.WRRDMAWrite:
		return guestdrv.NewWrite(r.ID, remote, r.SGL...)
	case guestdrv.WRRDMAWriteWithImm:
		return guestdrv.NewWriteImm(r.ID, remote, r.Imm, r.SGL...)
	case guestdrv.WRRDMARead:
		return guestdrv.NewRead(r.ID, remote, r.SGL...)
	case guestdrv.WRAtomicCmpAndSwp:
		return guestdrv.NewCompareSwap(r.ID, remote, r.CompareAdd, r.Swap, r.SGL...)
	case guestdrv.WRAtomicFetchAndAdd:
		return guestdrv.NewFetchAdd(r.ID, remote, r.CompareAdd, r.SGL...)
	case guestdrv.WRAtomicWrite:
		return guestdrv.NewAtomicWrite(r.ID, remote, r.SGL...)
	case guestdrv.WRFlush:
		return guestdrv.NewFlush(r.ID, remote, r.Flush)
	case guestdrv.WRLocalInv:
		return guestdrv.NewLocalInvalidate(r.ID, r.InvalidateKey)
	case guestdrv.WRRegMR:
		return guestdrv.NewRegister(r.ID, r.Reg)
	case guestdrv.WRBindMW:
		return guestdrv.NewBind(r.ID, r.Bind)
	}
	w := guestdrv.RawSendWR(r.ID, r.Opcode, r.InvalidateKey, to)
	w.SGL, w.Remote = r.SGL, remote
	return w
}

func postSend(q *guestdrv.QP, r *request) error { return q.PostSend(r.wr()) }

func queueSend(q *guestdrv.QP, r *request) error { return q.QueueSend(r.wr()) }
