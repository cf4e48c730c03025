package guestdrv

import (
	"context"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// recvQueue is the posting side of a receive queue or an SRQ.
type recvQueue struct {
	ring   *ring
	maxSGE int
}

func newRecvQueue(mem *memory, n, maxSGE int) (recvQueue, error) {
	r, err := newRing(mem, n, abi.SizeRecvWQE+maxSGE*abi.SizeSGE, 0)
	return recvQueue{r, maxSGE}, err
}

// PostRecv queues a receive request. It fails with ErrFull, or with ErrInvalid if there are too many SGEs or they have
// 4 GiB or more together. There is no doorbell: the device reads the queue when a message arrives. PostRecv copies the
// request, neither blocks nor allocates, and takes no lock.
func (q *recvQueue) PostRecv(wr *RecvWR) error {
	if len(wr.SGL) > q.maxSGE {
		return errTooManySGEs
	}
	e := q.ring.room()
	if e == nil {
		return ErrFull
	}
	if err := wr.encode(e); err != nil {
		return err
	}
	q.ring.publish()
	return nil
}

// SRQ is a shared receive queue. One goroutine at a time posts to it.
type SRQ struct {
	*object
	recvQueue
	spare *ring // the other ring of an unanswered Resize, see there
}

// SRQConfig describes an SRQ. DeviceAttr has the limits of the numbers.
type SRQConfig struct {
	MaxWR  int    // outstanding requests, 1 or more
	MaxSGE int    // of a request
	Limit  uint32 // see SRQ.SetLimit
}

// CreateSRQ makes a shared receive queue, for QPs with QPConfig.SRQ.
func (p *PD) CreateSRQ(ctx context.Context, c SRQConfig) (*SRQ, error) {
	d := p.d
	if err := d.users.enter(); err != nil {
		return nil, err
	}
	defer d.users.leave()
	a := &d.attr
	if c.MaxWR < 1 || int64(c.MaxWR) > int64(a.MaxSRQWR) || c.MaxSGE < 0 || int64(c.MaxSGE) > int64(a.MaxSRQSGE) {
		return nil, invalid("SRQ of %d requests with %d SGEs, at most %d with %d", c.MaxWR, c.MaxSGE, a.MaxSRQWR, a.MaxSRQSGE)
	}
	q, err := newRecvQueue(d.mem, c.MaxWR, c.MaxSGE)
	if err != nil {
		return nil, err
	}
	s := &SRQ{recvQueue: q}
	req := abi.CreateSRQ{PDN: p.handle, MaxSGE: uint32(c.MaxSGE), Limit: c.Limit, Ring: q.ring.desc()}
	var h abi.Handle
	err = d.create(ctx, creation{
		request: request{op: abi.CmdCreateSRQ, fixed: &req, size: abi.SizeCreateSRQ, words: q.ring.pages()},
		resp:    &h, destroy: abi.CmdDestroySRQ, free: s.freeRings,
	})
	if err != nil {
		return nil, err
	}
	s.object = &object{d: d, destroy: abi.CmdDestroySRQ, handle: h.Handle, free: s.freeRings}
	return s, nil
}

func (s *SRQ) freeRings() {
	s.ring.free()
	if s.spare != nil {
		s.spare.free()
	}
}

// Number returns the SRQ's number in the device, as in Event.Handle.
func (s *SRQ) Number() uint32 { return s.handle }

// SetLimit arms the limit: when fewer than limit requests are left, the device raises one EventSRQLimit and disarms it.
// 0 disarms.
func (s *SRQ) SetLimit(ctx context.Context, limit uint32) error {
	req := abi.ModifySRQ{SRQN: s.handle, Flags: abi.SRQLimit, Limit: limit}
	return s.d.do(ctx, abi.CmdModifySRQ, &req, abi.SizeModifySRQ, nil)
}

// Limit queries the armed limit, 0 if there is none.
func (s *SRQ) Limit(ctx context.Context) (uint32, error) {
	var a abi.SRQAttr
	err := s.d.onHandle(ctx, abi.CmdQuerySRQ, s.handle, &a)
	return a.Limit, err
}

// Resize moves the SRQ to a ring for at least n requests. No goroutine may post meanwhile. If Resize ends with its
// context or with ErrTimeout, it is unknown which ring the device uses: the SRQ can only be closed, which releases
// both.
func (s *SRQ) Resize(ctx context.Context, n int) error {
	d := s.d
	if err := d.users.enter(); err != nil {
		return err
	}
	defer d.users.leave()
	if n < 1 || int64(n) > int64(d.attr.MaxSRQWR) {
		return invalid("SRQ of %d requests, expected 1..%d", n, d.attr.MaxSRQWR)
	}
	if s.spare != nil {
		return invalid("the outcome of an earlier Resize is unknown")
	}
	q, err := newRecvQueue(d.mem, n, s.maxSGE)
	if err != nil {
		return err
	}
	req := abi.ModifySRQ{SRQN: s.handle, Flags: abi.SRQResize, Ring: q.ring.desc()}
	r := request{op: abi.CmdModifySRQ, fixed: &req, size: abi.SizeModifySRQ, words: q.ring.pages()}
	abandoned, err := d.call(ctx, r, nil)
	switch {
	case abandoned:
		s.spare = q.ring
		return err
	case err != nil:
		q.ring.free()
		return err
	}
	s.ring.free()
	s.recvQueue = q
	return nil
}

// Close destroys the SRQ. It fails with StatusBusy while a QP uses the SRQ.
func (s *SRQ) Close() error { return s.close() }
