// Side: control

package hca

import (
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// resumeFault is the guest driver's answer to a page fault event.
func resumeFault(c *cmd) error {
	var r abi.ResumeFault
	if err := r.Decode(c.in); err != nil {
		return err
	}
	q := c.d.data.qpAt(int(r.Token & qpIndexMask))
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
	if pa, ok := c.d.data.vm.Lookup(s.guest.key, s.guest.va); ok {
		c.d.faults.heat.Add(pa)
	}
	c.d.countFault(time.Duration(q.engine.loop.Clock().Now()-s.guest.since), r.Status == abi.StatusOK)
	q.engine.postAnswer(&s.answers, bit)
	return nil
}

// guestFaults counts the faults that the guest's driver served.
type guestFaults struct {
	resumed atomic.Uint64
	failed  atomic.Uint64
	times   translate.Histogram // guarded by Device.mu
	heat    translate.HeatMap   // where they were answered; guarded by Device.mu
}

// countFault counts a served fault; under mu.
func (d *Device) countFault(took time.Duration, ok bool) {
	f, delay := &d.faults, &d.data.faultDelay
	f.times.Add(took)
	// Smoothed as round-trip times are.
	if old := delay.Load(); f.times.Count > 1 {
		took = time.Duration(old + (int64(took)-old)/8)
	}
	delay.Store(int64(took))
	if ok {
		f.resumed.Add(1)
	} else {
		f.failed.Add(1)
	}
}
