// Side: control

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/translate"
)

// The parts of a context, and their encoding. See context.go.

type deviceContext struct {
	generation                            uint32
	position                              uint16 // of the command queue
	lastPD, lastCQ, lastSRQ, lastWindowPD uint32
	gids                                  []gidContext
	bells                                 []bellContext
	ahs                                   ahContext
	pds                                   []uint32
	keys                                  []keyContext // regions and fast registrations, then windows
	cqs                                   []cqContext
	srqs                                  []srqContext
	qps                                   []qpContext
	groups                                []groupContext
	conns                                 []cm.Conn // since version 2
}

type gidContext struct {
	index uint16
	v1    bool
	vlan  uint16
	addr  [16]byte
}

// bellContext is the doorbell area of an engine.
type bellContext struct {
	engine uint32
	pages  []translate.PA
	nonce  uint64 // of the driver, in the area of engine 0; since version 4
}

// ahContext is the table of address handles; no entries: there is none.
type ahContext struct {
	entries uint32
	pages   []translate.PA
}

// ringContext describes a ring's memory; no pages: there is no ring.
type ringContext struct {
	length    uint64
	pageShift uint8
	elemShift uint8
	elems     uint32
	pages     []translate.PA
}

type cqContext struct {
	n           uint32
	ring        ringContext
	arm         translate.PA
	ceq         uint32
	prod, cons  uint32
	failed      bool
	completions uint32 // completion events that were not posted, bits
	events      uint32 // asynchronous events that were not posted, bits

	count, period uint16 // MODIFY_CQ; since version 7
}

type srqContext struct {
	n, pdn uint32
	maxSGE uint32
	ring   ringContext
	srqState
}

type qpContext struct {
	n, index, typ, flags              uint32
	pdn, scq, rcq, srq                uint32
	maxSendSGE, maxRecvSGE, maxInline uint32
	windowPD                          uint32
	engine, bells                     uint32 // engines: the QP's, and that of its doorbell
	sq, rq                            ringContext
	qpState
}

// groupContext is the membership of a QP in a multicast group.
type groupContext struct {
	gid [16]byte
	qpn uint32
}

// record describes all of it.
func (x *deviceContext) record(c *record.Codec, d *Device) {
	c.Version(contextMagic, contextVersion)
	engines, ceqs := uint32(len(d.data.engines)), uint32(len(d.data.ceqs))
	record.Num(c, &engines)
	record.Num(c, &ceqs)
	if engines != uint32(len(d.data.engines)) || ceqs != uint32(len(d.data.ceqs)) {
		c.Fail("%d engines and %d completion event queues, the device has %d and %d", engines, ceqs, len(d.data.engines),
			len(d.data.ceqs))
	}
	for _, p := range []*uint32{&x.generation, &x.lastPD, &x.lastCQ, &x.lastSRQ, &x.lastWindowPD} {
		record.Num(c, p)
	}
	record.Num(c, &x.position)
	record.List(c, &x.gids, 1<<16, "GIDs", func(g *gidContext) { g.record(c) })
	record.List(c, &x.bells, len(d.data.engines), "doorbell areas", func(b *bellContext) { b.record(c) })
	x.ahs.record(c)
	record.List(c, &x.pds, mostObjects, "protection domains", func(n *uint32) { record.Num(c, n) })
	record.List(c, &x.keys, mostObjects, "keys", func(k *keyContext) { k.record(c) })
	record.List(c, &x.cqs, mostObjects, "completion queues", func(q *cqContext) { q.record(c) })
	record.List(c, &x.srqs, mostObjects, "shared receive queues", func(q *srqContext) { q.record(c) })
	record.List(c, &x.qps, qpIndexes, "queue pairs", func(q *qpContext) { q.record(c) })
	recordGroups(c, &x.groups)
	if now := d.data.engines[0].loop.Clock().Now(); c.Since(2) {
		record.List(c, &x.conns, mostObjects, "connections", func(n *cm.Conn) { n.Record(c, now) })
	}
}

func (g *gidContext) record(c *record.Codec) {
	record.Num(c, &g.index)
	c.Bool(&g.v1)
	record.Num(c, &g.vlan)
	c.Fixed(g.addr[:])
}

func (b *bellContext) record(c *record.Codec) {
	record.Num(c, &b.engine)
	recordPages(c, &b.pages)
	if c.Reading() && len(b.pages) != abi.DoorbellPages {
		c.Fail("doorbell area of %d pages, must be %d", len(b.pages), abi.DoorbellPages)
	}
	if c.Since(4) {
		record.Num(c, &b.nonce)
		if b.engine != 0 && b.nonce != 0 {
			c.Fail("nonce in the doorbell area of engine %d", b.engine)
		}
	}
}

func (a *ahContext) record(c *record.Codec) {
	record.Num(c, &a.entries)
	recordPages(c, &a.pages)
}

func recordGroups(c *record.Codec, groups *[]groupContext) {
	record.List(c, groups, mostObjects, "members of multicast groups", func(g *groupContext) {
		c.Fixed(g.gid[:])
		record.Num(c, &g.qpn)
	})
}

func recordPages(c *record.Codec, pages *[]translate.PA) {
	record.List(c, pages, mostPages, "pages", func(pa *translate.PA) { record.Num(c, pa) })
}

func takeRing(r *ring) ringContext {
	x := ringContext{length: r.mem.Len(), elemShift: r.shift, elems: r.mask + 1}
	x.pages, x.pageShift = r.mem.Pages()
	return x
}

// geometry is the ring as a command names it.
func (x *ringContext) geometry() abi.Ring {
	return abi.Ring{
		Length: x.length, NPages: uint32(len(x.pages)), PageShift: x.pageShift, Log2ElemSize: x.elemShift, NumElems: x.elems,
	}
}

func (x *ringContext) record(c *record.Codec) {
	record.Num(c, &x.length)
	record.Num(c, &x.pageShift)
	record.Num(c, &x.elemShift)
	record.Num(c, &x.elems)
	recordPages(c, &x.pages)
}

func (x *cqContext) record(c *record.Codec) {
	record.Num(c, &x.n)
	x.ring.record(c)
	record.Num(c, &x.arm)
	record.Num(c, &x.ceq)
	record.Num(c, &x.prod)
	record.Num(c, &x.cons)
	c.Bool(&x.failed)
	record.Num(c, &x.completions)
	record.Num(c, &x.events)
	if c.Since(7) {
		record.Num(c, &x.count)
		record.Num(c, &x.period)
	}
}

func (x *srqContext) record(c *record.Codec) {
	record.Num(c, &x.n)
	record.Num(c, &x.pdn)
	record.Num(c, &x.maxSGE)
	record.Num(c, &x.limit)
	x.ring.record(c)
	x.recordRest(c)
}

func (x *qpContext) record(c *record.Codec) {
	for _, p := range []*uint32{&x.n, &x.index, &x.typ, &x.flags, &x.pdn, &x.scq, &x.rcq, &x.srq, &x.maxSendSGE,
		&x.maxRecvSGE, &x.maxInline, &x.windowPD, &x.engine, &x.bells} {
		record.Num(c, p)
	}
	x.sq.record(c)
	x.rq.record(c)
	x.qpState.record(c)
}
