// Side: control

package hca

import (
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// resumeFault is the guest driver's answer to a page fault event that SET_MTT has not answered.
func resumeFault(c *cmd) error {
	var r abi.ResumeFault
	if err := r.Decode(c.in); err != nil {
		return err
	}
	if !c.d.answerFault(r.Token, r.Status == abi.StatusOK) {
		return notFound("fault", r.Token)
	}
	return nil
}

// answerFault resumes the operation that waits for the fault named by token. It returns false, without effect, if the
// driver has no such fault to answer: tokens are looked up among this VM's QPs only (PF-5), and a fault is
// answered once, after its event was posted. The caller holds d.mu.
func (d *Device) answerFault(token uint32, ok bool) bool {
	q := d.data.qpAt(int(token & qpIndexMask))
	if q == nil {
		return false
	}
	s := &q.waiters[token>>tokenSideShift&1]
	from := uint64(token) << tokenShift
	if !s.guest.state.CompareAndSwap(from|faultPosted, from|faultAnswered) {
		return false
	}
	bit := uint32(answerGuest)
	if !ok {
		bit = answerGuestFailed
	}
	if pa, ok := d.data.vm.Lookup(s.guest.key, s.guest.va); ok {
		d.faults.heat.Add(pa)
	}
	d.countFault(time.Duration(q.engine.loop.Clock().Now()-s.guest.since), ok)
	q.engine.postAnswer(&s.answers, bit)
	return true
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
