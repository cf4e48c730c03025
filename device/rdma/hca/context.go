// Side: control

package hca

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// The context of a device: all that the guest's driver and its peers know of it, so that another process can continue
// it (CO-1). Save writes it while the command queue is stopped, as in a pause: no command is under way, the engines
// are frozen, and guest memory does not change. Restore reads it into a new device with the same memory, whose
// engines are frozen then; the command queue's start ends the pause.
//
// The context is a record (device/rdma/record). Each object is made again by the command that makes it, with its
// former handle, and so passes the same checks and limits as a guest's command (CO-7); then its indices and states
// are set. Guest memory stays as it is. What is not in the context, and how it comes back:
//
//	entries of on-demand regions   guest faults
//	guest faults under way         raised again, with other tokens; late answers to the old ones have no effect
//	paths of connections           found by address
//	counters                       begin at 0

const (
	contextMagic = "vnicd HCA context"
	// restoreTime bounds the wait for host memory while a device is restored.
	restoreTime = 20 * time.Second
)

// errRunning: Save while the driver's commands are served.
var errRunning = errors.New("hca: the command queue runs")

// Save returns the context of a device whose queues are stopped; nil if it has no objects, an error if it is longer
// than most bytes. It implements virtio.Continuer.
func (d *Device) Save(most int) ([]byte, error) {
	switch {
	case d.commands != nil:
		return nil, errRunning
	case d.data.broken.Load():
		return nil, errors.New("hca: the device has stopped")
	case d.data.vm == nil:
		return nil, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.tables.any(d.data) {
		return nil, nil
	}
	var x deviceContext
	if err := x.take(d); err != nil {
		return nil, err
	}
	c := record.Writer().AtMost(most)
	x.record(c, d)
	return c.Bytes(), c.End()
}

// any reports whether the driver has set up anything.
func (t *tables) any(d *dataSide) bool {
	return t.qps+len(t.cqs)+len(t.srqs)+len(t.mrs)+len(t.mws)+len(t.pds)+len(d.gids.snap.Load().used) > 0 ||
		d.ahs.Load() != nil || slices.ContainsFunc(t.dbHeld[:], func(h held) bool { return h.release != nil })
}

// Restore makes the objects of a context, in a device that is connected and has none. After an error the device is as
// it was. It implements virtio.Continuer.
func (d *Device) Restore(b []byte) (err error) {
	d.driver.Lock()
	defer d.driver.Unlock()
	if d.data.vm == nil || d.commands != nil {
		return errRunning
	}
	defer func() {
		if err != nil {
			d.wipe()
			err = fmt.Errorf("hca: context: %w", err)
		} else {
			d.pauses()
		}
	}()
	if len(b) > maxContext {
		return fmt.Errorf("%d bytes, at most %d", len(b), maxContext)
	}
	var x deviceContext
	c := record.Reader(b)
	x.record(c, d)
	if err := c.End(); err != nil {
		return err
	}
	return d.resume(&x)
}

// resume makes the objects of x, and gives them their states.
func (d *Device) resume(x *deviceContext) error {
	ctx, cancel := context.WithTimeout(context.Background(), restoreTime)
	defer cancel()
	r := restorer{d: d, t: &d.tables, ctx: ctx}
	if err := r.objects(x); err != nil {
		return err
	}
	if err := r.states(x); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tables.numbered(x)
	d.generation.Store(x.generation)
	d.position = x.position
	d.PortChanged() // link and MTU may not be those that the driver has read
	d.renewJournal()
	d.log.Info("resumed the objects of the previous vnicd", "qps", d.tables.qps, "cqs", len(d.tables.cqs), "regions",
		len(d.tables.mrs))
	return nil
}

// numbered restores what decides about the numbers of objects to come.
func (t *tables) numbered(x *deviceContext) {
	t.lastPD, t.lastCQ, t.lastSRQ, t.lastWindowPD = x.lastPD, x.lastCQ, x.lastSRQ, x.lastWindowPD
	used := map[int]bool{}
	for i := range x.qps {
		index := int(x.qps[i].index)
		used[index], t.nextQP = true, max(t.nextQP, index+1)
	}
	for i := firstQPIndex; i < t.nextQP; i++ {
		if !used[i] {
			t.free = append(t.free, uint16(i))
		}
	}
}

// restorer makes the objects of a context.
type restorer struct {
	d   *Device
	t   *tables
	ctx context.Context
}

// replay runs a command of which in is the payload, for the object that as identifies. If host memory is absent, it
// waits: nobody else uses the device.
func (r *restorer) replay(op abi.Opcode, in []byte, as *identity) error {
	var out [maxReply]byte
	var waited *hostWait
	for range fetchTries {
		c := cmd{d: r.d, t: r.t, op: op, in: in, out: out[:], as: as, waited: waited}
		waited = nil
		r.d.mu.Lock()
		err := translate.Guard(func() error { return commandTable[op].run(&c) })
		r.d.mu.Unlock()
		if c.waited != nil {
			c.waited.drop()
		}
		var aside *waitError
		m, absent := hostMiss(err)
		switch {
		case errors.As(err, &aside):
			if aside.wait.do(r.ctx, r.d.conn); aside.wait.err != nil {
				return fmt.Errorf("%v: %w", op, aside.wait.failure())
			}
			waited = aside.wait
		case absent:
			if err := r.d.data.space().Fetch(r.ctx, m, true); err != nil {
				return fmt.Errorf("%v: %w", op, err)
			}
		case err != nil:
			return fmt.Errorf("%v: %w", op, err)
		default:
			return nil
		}
	}
	return errVanishes
}

// payload is the payload of a command: the fixed part, which encode fills in, and lists of pages.
func payload(fixed int, encode func([]byte), lists ...[]translate.PA) []byte {
	n := fixed
	for _, l := range lists {
		n += 8 * len(l)
	}
	b := make([]byte, n)
	encode(b[:fixed])
	at := b[fixed:]
	for _, l := range lists {
		for _, pa := range l {
			le.PutUint64(at, uint64(pa))
			at = at[8:]
		}
	}
	return b
}

// objects makes all objects, users after the objects that they use.
func (r *restorer) objects(x *deviceContext) error {
	d := r.d
	for i := range x.gids {
		g := &x.gids[i]
		s := abi.SetGID{Index: g.index, Type: abi.GIDRoCEv2, VLANID: g.vlan, SMAC: d.cfg.MAC, GID: g.addr}
		if g.v1 {
			s.Type = abi.GIDRoCEv1
		}
		if err := r.replay(abi.CmdSetGID, payload(abi.SizeSetGID, s.Encode), nil); err != nil {
			return err
		}
	}
	for i := range x.bells {
		s := abi.SetDoorbells{Engine: x.bells[i].engine, NPages: abi.DoorbellPages}
		for k, pa := range x.bells[i].pages {
			s.PA[k] = uint64(pa)
		}
		as := &identity{nonce: x.bells[i].nonce}
		if err := r.replay(abi.CmdSetDoorbells, payload(abi.SizeSetDoorbells, s.Encode), as); err != nil {
			return err
		}
	}
	if a := &x.ahs; a.entries > 0 {
		s := abi.SetAHTable{NumEntries: a.entries, NPages: uint32(len(a.pages))}
		if err := r.replay(abi.CmdSetAHTable, payload(abi.SizeSetAHTable, s.Encode, a.pages), nil); err != nil {
			return err
		}
	}
	for _, n := range x.pds {
		if err := r.unused("protection domain", n, r.t.pds[n] != nil); err != nil {
			return err
		}
		if err := r.replay(abi.CmdCreatePD, nil, &identity{n: n}); err != nil {
			return err
		}
	}
	for i := range x.keys {
		if err := r.key(&x.keys[i]); err != nil {
			return err
		}
	}
	for i := range x.cqs {
		if err := r.cq(&x.cqs[i]); err != nil {
			return err
		}
	}
	for i := range x.srqs {
		if err := r.srq(&x.srqs[i]); err != nil {
			return err
		}
	}
	for i := range x.qps {
		if err := r.qp(&x.qps[i]); err != nil {
			return err
		}
	}
	// Their queue pairs bind them when they get their states.
	if err := r.d.data.conns.restore(d.data.engines[0].loop.Clock().Now(), x.conns); err != nil {
		return fmt.Errorf("%w: %w", record.ErrInvalid, err)
	}
	for i := range x.groups {
		g := &x.groups[i]
		s := abi.Mcast{QPN: g.qpn, GID: g.gid}
		if err := r.replay(abi.CmdAttachMcast, payload(abi.SizeMcast, s.Encode), nil); err != nil {
			return err
		}
	}
	return nil
}

// unused checks the handle of an object that is to be made.
func (r *restorer) unused(what string, n uint32, exists bool) error {
	if exists || n == 0 || n >= firstWindowPD {
		return fmt.Errorf("%s %d exists already, or is no handle: %w", what, n, record.ErrInvalid)
	}
	return nil
}

// key makes a region, a fast registration or a window.
func (r *restorer) key(k *keyContext) error {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	h := uint32(k.state.Handle)
	p, err := r.t.pd(uint32(k.state.Spec.PD))
	if err != nil {
		return err
	}
	if err := r.d.data.vm.Restore(&k.state); err != nil {
		return err
	}
	p.refs++
	if keys := r.t.mrs; !k.window() {
		keys[h] = uint32(k.state.Spec.PD)
	} else {
		r.t.mws[h] = uint32(k.state.Spec.PD)
	}
	return r.pages(h, k)
}

// pages sets the entries of a pinned region.
func (r *restorer) pages(handle uint32, k *keyContext) error {
	if len(k.runs) == 0 {
		return nil
	}
	if k.state.Dynamic || k.state.Spec.Flags&(translate.DemandPaging|translate.Phys) != 0 { // nothing bounds their pages
		return fmt.Errorf("key %#x has no pages of its own: %w", handle, record.ErrInvalid)
	}
	const atOnce = 1 << 16
	size := translate.PA(1) << (k.state.Spec.PageShift & 63)
	pas, first := make([]translate.PA, 0, min(k.state.Spec.NPages, atOnce)), uint64(0)
	flush := func() error {
		err := r.d.data.vm.SetPages(handle, first, pas)
		first, pas = first+uint64(len(pas)), pas[:0]
		return err
	}
	for _, run := range k.runs {
		if run.N > k.state.Spec.NPages-first-uint64(len(pas)) {
			return fmt.Errorf("key %#x: more than %d pages: %w", handle, k.state.Spec.NPages, record.ErrInvalid)
		}
		for i := translate.PA(0); i < translate.PA(run.N); i++ {
			pa := run.PA
			if pa&abi.MTTAbsent == 0 {
				pa += i * size
			}
			if pas = append(pas, pa); len(pas) == atOnce {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	if len(pas) == 0 {
		return nil
	}
	return flush()
}

func (r *restorer) cq(x *cqContext) error {
	if err := r.unused("completion queue", x.n, r.t.cqs[x.n] != nil); err != nil {
		return err
	}
	s := abi.CreateCQ{Ring: x.ring.geometry(), ArmPA: uint64(x.arm), CEQ: x.ceq}
	if err := r.replay(abi.CmdCreateCQ, payload(abi.SizeCreateCQ, s.Encode, x.ring.pages), &identity{n: x.n}); err != nil {
		return err
	}
	q := r.t.cqs[x.n].q // no QP uses it yet
	q.prod, q.cons = x.prod&q.r.mask, x.cons&q.r.mask
	if q.failed.Store(x.failed); x.failed {
		r.d.data.cqFailures.Add(1) // its QPs may not have noticed
		if x.events&(1<<abi.EventCQErr) != 0 {
			q.setNotice(cqUntold, 0)
		}
	}
	if x.completions != 0 {
		q.ceq.post(&q.comp, eventNow)
	}
	r.t.cqs[x.n].moderate(x.count, x.period)
	r.events(&q.asyn, x.events)
	return nil
}

// events posts events that the driver has not seen.
func (r *restorer) events(n *eventNode, bits uint32) {
	if bits &= 1<<abi.EventPageFault - 1; bits != 0 {
		r.d.data.async.post(n, bits)
	}
}

func (r *restorer) srq(x *srqContext) error {
	if err := r.unused("shared receive queue", x.n, r.t.srqs[x.n] != nil); err != nil {
		return err
	}
	s := abi.CreateSRQ{PDN: x.pdn, MaxSGE: x.maxSGE, Ring: x.ring.geometry()}
	in := payload(abi.SizeCreateSRQ, s.Encode, x.ring.pages)
	if err := r.replay(abi.CmdCreateSRQ, in, &identity{n: x.n}); err != nil {
		return err
	}
	q := r.t.srqs[x.n].q // no QP uses it yet
	q.limit = x.limit    // which a ring that was resized may not reach
	x.indices.put(&q.wr)
	q.failed.Store(x.failed)
	r.events(&q.asyn, x.events)
	return nil
}

func (r *restorer) qp(x *qpContext) error {
	d := r.d.data
	gsi := x.typ == abi.QPTypeGSI
	switch {
	case int(x.engine) >= len(d.engines) || int(x.bells) >= len(d.engines):
		return fmt.Errorf("queue pair %#x of engines %d and %d, the device has %d: %w", x.n, x.engine, x.bells, len(d.engines),
			record.ErrInvalid)
	case gsi && (x.n != gsiQPN || x.index != gsiQPN),
		!gsi && (x.index < firstQPIndex || int(x.index) >= len(d.qps) || d.qps[x.index].Load() != nil),
		!gsi && (x.n == 0 || x.n >= mcastQPN || d.numberPlace(x.n) == gsiQPN || d.numbers[d.numberPlace(x.n)].Load() != nil),
		x.windowPD < firstWindowPD:
		return fmt.Errorf("queue pair number %#x, index %d or domain %#x is reserved or in use: %w", x.n, x.index, x.windowPD,
			record.ErrInvalid)
	}
	s := abi.CreateQP{
		Type: x.typ, Flags: x.flags, PDN: x.pdn, SendCQN: x.scq, RecvCQN: x.rcq, SRQN: x.srq, MaxSendSGE: x.maxSendSGE,
		MaxRecvSGE: x.maxRecvSGE, MaxInline: x.maxInline, SQ: x.sq.geometry(), RQ: x.rq.geometry(),
	}
	e := d.engines[x.engine]
	if o := r.t.srqs[x.srq]; x.flags&abi.QPHasSRQ != 0 && o != nil && o.owner != nil && o.owner != e {
		return fmt.Errorf("queue pair %#x is not on the engine of its shared receive queue: %w", x.n, record.ErrInvalid)
	}
	as := identity{n: x.n, index: int(x.index), engine: e}
	if err := r.replay(abi.CmdCreateQP, payload(abi.SizeCreateQP, s.Encode, x.sq.pages, x.rq.pages), &as); err != nil {
		return err
	}
	o := r.t.qpList[x.n]
	o.q.windowPD = translate.PD(x.windowPD) // the QP is in RESET: its engine does not use it
	if bells := d.engines[x.bells]; bells != e {
		armed := false
		if bells.onLoop(func() { armed = bells.armed }); !armed {
			return fmt.Errorf("queue pair %#x has its doorbell on engine %d, which has none: %w", x.n, x.bells,
				record.ErrInvalid)
		}
		e.onLoop(func() { e.db.leave(o.q.index) })
		bells.onLoop(func() { bells.db.join(o.q.index) })
		o.bells = bells
	}
	return nil
}

// states freezes the engines, and sets the states of their QPs in the same turn: none of them runs in between.
func (r *restorer) states(x *deviceContext) error {
	for _, e := range r.d.data.engines {
		var failed error
		if err := e.visit(func() {
			e.freeze()
			for i := range x.qps {
				if s := &x.qps[i]; failed == nil && int(s.engine) == e.id {
					failed = s.put(r.t.qpList[s.n].q)
				}
			}
			if failed == nil && !r.d.data.link.Load() { // the VM was quarantined before it had these queue pairs
				e.disconnect()
			}
		}); err != nil {
			return err
		}
		if failed != nil {
			return failed
		}
	}
	for i := range x.qps {
		r.events(&r.t.qpList[x.qps[i].n].q.asyn, x.qps[i].events)
	}
	return nil
}

// put sets the state of a QP that was just made; on its engine, which is frozen.
func (x *qpContext) put(q *qp) error {
	x.sqIndices.put(&q.sq)
	if q.hasRQ {
		x.rqIndices.put(&q.rq)
	}
	q.failing = x.failing
	q.unpostedCQEs = append(q.unpostedCQEs[:0], x.unposted...)
	q.past = x.past
	for side := range x.faults {
		q.dev.faultCounts[q.index<<1|side] = x.faults[side]
	}
	c := record.Reader(x.transport).Of(x.version)
	q.t.Context(c, q.engine.loop.Now(), func(av *roce.AddressVector) bool { return av.SMAC == q.dev.mac })
	if err := c.End(); err != nil {
		return fmt.Errorf("queue pair %#x: %w", q.n, err)
	}
	if q.t.Refetches() {
		q.sq.next = q.sq.done
	}
	q.attributesChanged(roce.MaskState | roce.MaskAV | roce.MaskQKey)
	if q.patience.Load() == uint32(wire.PatienceUnknown) { // the connection is not in the context
		q.patience.Store(x.patience)
	}
	return nil
}

// take fills x with the state of d. The caller holds d.mu.
func (x *deviceContext) take(d *Device) error {
	t := &d.tables
	x.generation, x.position = d.generation.Load(), d.position
	x.lastPD, x.lastCQ, x.lastSRQ, x.lastWindowPD = t.lastPD, t.lastCQ, t.lastSRQ, t.lastWindowPD
	for i := range d.data.gids.snap.Load().all {
		if g, ok := d.takeGID(uint32(i)); ok {
			x.gids = append(x.gids, g)
		}
	}
	for _, e := range d.data.engines {
		if b, ok := d.takeBells(e); ok {
			x.bells = append(x.bells, b)
		}
	}
	x.ahs = d.takeAHs()
	x.pds = slices.Sorted(maps.Keys(t.pds))
	for _, h := range slices.Concat(slices.Sorted(maps.Keys(t.mrs)), slices.Sorted(maps.Keys(t.mws))) {
		k, err := d.takeKey(h)
		if err != nil {
			return err
		}
		x.keys = append(x.keys, k)
	}
	for _, n := range slices.Sorted(maps.Keys(t.cqs)) {
		x.cqs = append(x.cqs, takeCQ(d.data, t.cqs[n].q))
	}
	for _, n := range slices.Sorted(maps.Keys(t.srqs)) {
		x.srqs = append(x.srqs, takeSRQ(t.srqs[n]))
	}
	x.takeQPs(d)
	x.conns = d.data.conns.copy(d.data.engines[0].loop.Clock().Now())
	x.groups = d.takeGroups()
	return nil
}

// takeGID returns an entry of the GID table; false if it is not set.
func (d *Device) takeGID(i uint32) (x gidContext, ok bool) {
	if all := d.data.gids.snap.Load().all; int(i) < len(all) && all[i].set {
		g := all[i]
		return gidContext{index: uint16(i), v1: g.v1, vlan: g.vlan, addr: g.addr}, true
	}
	return x, false
}

// takeBells returns the doorbell area of an engine; false if it has none.
func (d *Device) takeBells(e *engine) (x bellContext, ok bool) {
	if d.tables.dbHeld[e.id].release == nil {
		return x, false
	}
	e.onLoop(func() { x = bellContext{engine: uint32(e.id), pages: slices.Clone(e.db.pages[:])} })
	if e.id == 0 {
		x.nonce = d.tables.nonce.value
	}
	return x, true
}

func (d *Device) takeAHs() (x ahContext) {
	if a := d.data.ahs.Load(); a != nil {
		x.entries = a.n
		x.pages, _ = a.mem.Pages()
	}
	return x
}

// takeKey returns the state of a region or window, with the pages of a pinned region.
func (d *Device) takeKey(handle uint32) (k keyContext, err error) {
	if k.state, err = d.data.vm.State(handle); err != nil || k.state.Dynamic {
		return k, err
	}
	reg, err := d.data.vm.Region(handle)
	if err != nil {
		return k, err
	}
	k.runs = slices.AppendSeq(k.runs, reg.Pages(0, math.MaxUint64))
	return k, nil
}

// takeSRQ returns the state of a shared receive queue; where no QP uses it.
func takeSRQ(o *srqObject) srqContext {
	q := o.q
	return srqContext{n: q.n, pdn: o.pdn, maxSGE: uint32(q.maxSGE), ring: takeRing(&q.wr.ring), srqState: q.state()}
}

func (d *Device) takeGroups() (out []groupContext) {
	for gid, qs := range d.data.groups.Load().groups {
		for _, q := range qs {
			out = append(out, groupContext{gid: gid, qpn: q.n})
		}
	}
	slices.SortStableFunc(out, func(a, b groupContext) int { return cmp.Compare(string(a.gid[:]), string(b.gid[:])) })
	return out
}

func takeCQ(d *dataSide, q *cq) cqContext {
	x := cqContext{
		n: q.n, ring: takeRing(&q.r), arm: q.arm, ceq: uint32(slices.Index(d.ceqs, q.ceq)), prod: q.prod, cons: q.cons,
		failed: q.failed.Load(), completions: q.comp.bits.Load(), events: q.asyn.bits.Load(),
	}
	if q.delayed.Load() {
		x.completions |= eventLater
	}
	if m := q.moderation.Load(); m != nil {
		x.count, x.period = m.count, m.period
	}
	return x
}

// takeQPs adds the states of all QPs, each on its engine.
func (x *deviceContext) takeQPs(d *Device) {
	t := &d.tables
	numbers := slices.Sorted(maps.Keys(t.qpList))
	states := make(map[uint32]qpContext, len(numbers))
	for _, e := range d.data.engines {
		e.onLoop(func() {
			for _, n := range numbers {
				if o := t.qpList[n]; o.q.engine == e {
					states[n] = takeQP(o)
				}
			}
		})
	}
	for _, n := range numbers {
		x.qps = append(x.qps, states[n])
	}
}

// takeQP returns the state of a QP; on its engine, which is frozen.
func takeQP(o *qpObject) qpContext {
	q := o.q
	x := qpContext{
		n: q.n, index: uint32(q.index), typ: uint32(q.typ), pdn: uint32(q.pd), scq: q.scq.n, rcq: q.rcq.n,
		maxSendSGE: uint32(q.maxSendSGE), maxRecvSGE: uint32(q.maxRecvSGE), maxInline: uint32(q.maxInline),
		windowPD: uint32(q.windowPD), engine: uint32(q.engine.id), bells: uint32(o.bells.id), sq: takeRing(&q.sq.ring),
		qpState: q.state(),
	}
	x.unposted, x.past = slices.Clone(q.unpostedCQEs), slices.Clone(q.past)
	if o.uses.srq != nil {
		x.srq = o.uses.srq.q.n
	}
	for _, f := range []struct {
		flag uint32
		set  bool
	}{{abi.QPSigAll, q.sigAll}, {abi.QPPrivileged, q.privileged}, {abi.QPHasSRQ, q.srq != nil}} {
		if f.set {
			x.flags |= f.flag
		}
	}
	if q.hasRQ {
		x.rq = takeRing(&q.rq.ring)
	}
	c := record.Writer().Of(contextVersion)
	q.t.Context(c, q.engine.loop.Now(), nil)
	x.transport = c.Bytes()
	return x
}
