package guestdrv

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
)

// RecvWR is a receive request: a place for one incoming message.
type RecvWR struct {
	ID  uint64
	SGL []abi.SGE
}

// recvQueue is the posting side of an RQ or SRQ.
type recvQueue struct {
	ring   *ring
	maxSGE int
}

func newRecvQueue(mem *memory, n, maxSGE int) (recvQueue, error) {
	r, err := newRing(mem, n, abi.SizeRecvWQE+maxSGE*abi.SizeSGE, 0)
	return recvQueue{r, maxSGE}, err
}

// PostRecv queues a receive request. It fails with ErrFull, or with ErrInvalid
// if there are too many SGEs. There is no doorbell: the device looks when a
// message arrives.
func (q *recvQueue) PostRecv(wr *RecvWR) error {
	if len(wr.SGL) > q.maxSGE {
		return errTooManySGEs
	}
	e := q.ring.room()
	if e == nil {
		return ErrFull
	}
	abi.RecvWQE(e).Set(wr.ID, wr.SGL)
	q.ring.publish()
	return nil
}

var (
	errTooManySGEs = invalid("more SGEs than the queue was made for")
	errInlineLen   = invalid("more inline data than the queue was made for")
	errNoAH        = invalid("a UD request needs an address handle")
)

// SRQ is a shared receive queue. One goroutine at a time posts to it.
type SRQ struct {
	recvQueue
	d   *Device
	num uint32
}

// SRQConfig says how large an SRQ is.
type SRQConfig struct {
	MaxWR, MaxSGE int
	Limit         uint32 // see SetLimit
}

// CreateSRQ makes a shared receive queue.
func (p *PD) CreateSRQ(c SRQConfig) (*SRQ, error) {
	if err := p.d.users.enter(); err != nil {
		return nil, err
	}
	defer p.d.users.leave()
	a := &p.d.attr
	if c.MaxWR < 1 || int64(c.MaxWR) > int64(a.MaxSRQWR) || c.MaxSGE < 0 || int64(c.MaxSGE) > int64(a.MaxSRQSGE) {
		return nil, invalid("SRQ of %d requests with %d SGEs, at most %d with %d", c.MaxWR, c.MaxSGE, a.MaxSRQWR, a.MaxSRQSGE)
	}
	q, err := newRecvQueue(p.d.mem, c.MaxWR, c.MaxSGE)
	if err != nil {
		return nil, err
	}
	req := abi.CreateSRQ{PDN: p.num, MaxSGE: uint32(c.MaxSGE), Limit: c.Limit, Ring: q.ring.desc()}
	var h abi.Handle
	if err := p.d.do(abi.CmdCreateSRQ, &req, abi.SizeCreateSRQ, &h, q.ring.pages()...); err != nil {
		q.ring.free()
		return nil, err
	}
	return &SRQ{q, p.d, h.Handle}, nil
}

// Number is the SRQ's number in the device.
func (s *SRQ) Number() uint32 { return s.num }

// SetLimit arms the limit: when fewer than limit requests are left, the device
// raises one SRQ limit event and disarms it. 0 disarms.
func (s *SRQ) SetLimit(limit uint32) error {
	req := abi.ModifySRQ{SRQN: s.num, Flags: abi.SRQLimit, Limit: limit}
	return s.d.do(abi.CmdModifySRQ, &req, abi.SizeModifySRQ, nil)
}

// Limit asks for the armed limit, 0 if none.
func (s *SRQ) Limit() (uint32, error) {
	var a abi.SRQAttr
	err := s.d.onHandle(abi.CmdQuerySRQ, s.num, &a)
	return a.Limit, err
}

// Resize moves the SRQ to a ring for at least n requests. Nobody may post meanwhile.
func (s *SRQ) Resize(n int) error {
	if err := s.d.users.enter(); err != nil {
		return err
	}
	defer s.d.users.leave()
	if n < 1 || int64(n) > int64(s.d.attr.MaxSRQWR) {
		return invalid("SRQ of %d requests, expected 1..%d", n, s.d.attr.MaxSRQWR)
	}
	q, err := newRecvQueue(s.d.mem, n, s.maxSGE)
	if err != nil {
		return err
	}
	req := abi.ModifySRQ{SRQN: s.num, Flags: abi.SRQResize, Ring: q.ring.desc()}
	if err := s.d.do(abi.CmdModifySRQ, &req, abi.SizeModifySRQ, nil, q.ring.pages()...); err != nil {
		q.ring.free()
		return err
	}
	s.ring.free()
	s.recvQueue = q
	return nil
}

// Destroy fails with abi.StatusBusy while a QP uses the SRQ.
func (s *SRQ) Destroy() error {
	if err := s.d.onHandle(abi.CmdDestroySRQ, s.num, nil); err != nil {
		return err
	}
	s.ring.free()
	return nil
}
