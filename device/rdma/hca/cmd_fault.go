package hca

import (
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// resumeFault is the guest driver's answer to a page fault event.
func resumeFault(c *cmd) error {
	var r abi.ResumeFault
	if err := r.Decode(c.in); err != nil {
		return err
	}
	q := c.d.qpAt(int(r.Token & qpIndexMask))
	if q == nil {
		return notFound("fault", r.Token)
	}
	s := &q.waiters[r.Token>>tokenSideShift&1]
	from := uint64(r.Token) << tokenShift
	if !s.guest.state.CompareAndSwap(from|faultPosted, from|faultAnswered) {
		return notFound("fault", r.Token)
	}
	bit := uint32(answerGuest)
	if r.Status != abi.StatusOK {
		bit = answerGuestFailed
	}
	if pa, ok := c.d.vm.Lookup(s.guest.key, s.guest.va); ok {
		c.d.faults.heat.Add(pa)
	}
	c.d.faults.count(time.Duration(q.engine.loop.Clock().Now()-s.guest.since), r.Status == abi.StatusOK)
	q.engine.postAnswer(&s.answers, bit)
	return nil
}
