// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// Memory management by work requests (IBTA 10.6, 11.4.4): registration,
// invalidation, memory windows. The tables are translate's; this file has the part of
// queue pairs, and how they wait.
//
// An invalidation completes when no access uses the memory any more (EP-3), usually at
// once. Otherwise the transport's timer retries a request of the send queue; a packet
// that invalidates is kept, with the packets behind it, and retried once per iteration
// of the loop: leaving this loop's own epoch takes one.

// Manage implements roce.Adapter.
func (q *qp) Manage(w *roce.WQE) (translate.Outcome, translate.Miss) {
	vm, slot, m := q.dev.vm, q.engine.loop.ID(), &w.Manage
	q.engine.touchKey(m.Key)
	switch w.Opcode {
	case roce.WRLocalInv:
		return vm.Invalidate(slot, q.pd, m.Key), translate.Miss{}
	case roce.WRBindMW:
		return vm.Bind(slot, q.pd, q.windowPD, &translate.BindSpec{
			Window: m.Key, NewKey: m.NewKey, Region: m.Region, Access: m.Access, VA: m.VA, Length: m.Length,
		}), translate.Miss{}
	case roce.WRRegMR:
		return q.register(m)
	}
	return translate.Refused, translate.Miss{}
}

// register copies the page list in, once, and passes it on; every page is checked
// again when it is used.
func (q *qp) register(m *roce.Manage) (translate.Outcome, translate.Miss) {
	const listPage = 1 << translate.PageShift
	n := uint64(m.NPages)
	if n == 0 || n > abi.MaxFastReg || m.List%8 != 0 || uint64(m.List)%listPage+8*n > listPage {
		return translate.Refused, translate.Miss{}
	}
	e := q.engine
	raw := e.listRaw[:8*n]
	if miss := e.space.Read(raw, m.List); !miss.OK() {
		return translate.Refused, miss
	}
	e.steps += n
	for i := range n {
		e.list[i] = translate.PA(le.Uint64(raw[8*i:]))
	}
	return q.dev.vm.Register(e.loop.ID(), q.pd, &translate.FastSpec{
		Key: m.Key, Access: m.Access, PageShift: m.PageShift, IOVA: m.VA, Length: m.Length, Offset: uint64(m.Offset),
	}, e.list[:n]), translate.Miss{}
}

// InvalidateRemote implements roce.Adapter.
func (q *qp) InvalidateRemote(key translate.Key) translate.Outcome {
	q.engine.touchKey(key)
	out := q.dev.vm.InvalidateRemote(q.engine.loop.ID(), q.pd, q.windowPD, key)
	// If the packet cannot be kept it is dropped; its retransmission finds the memory unused.
	if out == translate.Again && q.keepThis() {
		q.draining = true
		q.engine.schedule(q)
	}
	return out
}

// drainDone receives the packets again that were kept for an invalidation, and reports
// whether the invalidation has completed.
func (q *qp) drainDone(now int64) bool {
	if q.drainAt == now {
		return false
	}
	q.drainAt, q.draining = now, false
	q.redeliver()
	q.engine.current = q // redeliver cleared it
	return !q.draining
}
