// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
)

// counters count what QPs of one loop did.
type counters struct {
	roce.Stats
	hostFaults, guestFaults uint64 // raised (PF-7)
}

func (c *counters) add(o *counters) {
	c.Stats.Add(&o.Stats)
	c.hostFaults += o.hostFaults
	c.guestFaults += o.guestFaults
}

// report adds the counters that a driver may read to s.
func (c *counters) report(s *abi.Stats) {
	for _, x := range []struct {
		i abi.Stat
		n uint64
	}{
		{abi.StatTxPackets, c.TxPackets}, {abi.StatTxBytes, c.TxBytes}, {abi.StatRxPackets, c.RxPackets},
		{abi.StatRxBytes, c.RxBytes}, {abi.StatTxAcks, c.TxAcks}, {abi.StatTxNaks, c.TxNaks}, {abi.StatTxRNR, c.TxRNR},
		{abi.StatRxRNR, c.RxRNR}, {abi.StatRetransmits, c.Retransmits}, {abi.StatTimeouts, c.Timeouts},
		{abi.StatOutOfSequence, c.OutOfSequence}, {abi.StatDuplicates, c.Duplicates}, {abi.StatRxDropped, c.RxDropped},
		{abi.StatAccessErrors, c.AccessErrors}, {abi.StatGuestFaults, c.guestFaults}, {abi.StatHostFaults, c.hostFaults},
		{abi.StatFaultDrops, c.FaultDrops},
	} {
		s.Value[x.i] += x.n
	}
}

// A QP counts in its engine's counters or, if the driver has asked for it (COUNT_QP), apart: in counters of its own,
// which takeCounts returns and which move to the engine's past with that. So what the driver reads of the device and
// what it has read of the QPs that count apart make up the whole, as the kernel's rdma_counter wants it, and the host
// sees the whole with total.

// countIn makes the QP count apart, or in its engine's counters; on its engine.
func (q *qp) countIn(apart bool) {
	if apart == (q.own != nil) {
		return
	}
	e, to := q.engine, &q.engine.stats
	if apart {
		q.own = new(counters)
		e.apart[q] = struct{}{}
		to = q.own
	} else {
		e.past.add(q.own)
		q.own = nil
		delete(e.apart, q)
	}
	q.t.CountIn(&to.Stats)
}

// takeCounts returns what the QP has counted apart since the last call; on its engine.
func (q *qp) takeCounts() (c counters) {
	if q.own != nil {
		c = *q.own
		q.engine.past.add(q.own)
		*q.own = counters{}
	}
	return c
}

// counts is where the QP counts; on its engine.
func (q *qp) counts() *counters {
	if q.own != nil {
		return q.own
	}
	return &q.engine.stats
}

// total returns the counters of all QPs that the engine has or had; on the engine.
func (e *engine) total() counters {
	c := e.stats
	c.add(&e.past)
	for q := range e.apart {
		c.add(q.own)
	}
	return c
}
