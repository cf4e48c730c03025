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
}

// ahContext is the table of address handles; no entries: there is none.
type ahContext struct {
	entries uint32
	pages   []translate.PA
}

type keyContext struct {
	state translate.KeyState
	runs  []translate.PageRun
}

// window reports whether the key is a memory window.
func (k *keyContext) window() bool { return k.state.Dynamic && k.state.Kind != translate.FastRegion }

// ringContext describes a ring's memory; no pages: there is no ring.
type ringContext struct {
	length    uint64
	pageShift uint8
	elemShift uint8
	elems     uint32
	pages     []translate.PA
}

// indicesContext are the indices of a workRing.
type indicesContext struct {
	next, done uint32
	stale      bool
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
}

type srqContext struct {
	n, pdn        uint32
	maxSGE, limit uint32
	ring          ringContext
	indices       indicesContext
	failed        bool
	events        uint32
}

type qpContext struct {
	n, index, typ, flags              uint32
	pdn, scq, rcq, srq                uint32
	maxSendSGE, maxRecvSGE, maxInline uint32
	windowPD                          uint32
	engine, bells                     uint32 // engines: the QP's, and that of its doorbell
	sq, rq                            ringContext
	sqIndices, rqIndices              indicesContext
	patience                          uint32
	failing                           bool
	events                            uint32
	faults                            [2]uint32 // number of guest faults of each side so far, for tokens
	unposted                          []abi.WC
	transport                         []byte // roce.QP.Context
	version                           uint32 // of transport
}

// groupContext is the membership of a QP in a multicast group.
type groupContext struct {
	gid [16]byte
	qpn uint32
}

// Bounds of lists: what the limits of a device permit at most.
const (
	mostObjects = 1 << 24
	mostPages   = abi.CmdMax / 8 // a command names no more
	mostEntries = 1 << 32        // MTT entries of a region
)

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
	record.List(c, &x.gids, 1<<16, "GIDs", func(g *gidContext) {
		record.Num(c, &g.index)
		c.Bool(&g.v1)
		record.Num(c, &g.vlan)
		c.Fixed(g.addr[:])
	})
	record.List(c, &x.bells, len(d.data.engines), "doorbell areas", func(b *bellContext) {
		record.Num(c, &b.engine)
		recordPages(c, &b.pages)
		if c.Reading() && len(b.pages) != abi.DoorbellPages {
			c.Fail("doorbell area of %d pages, must be %d", len(b.pages), abi.DoorbellPages)
		}
	})
	record.Num(c, &x.ahs.entries)
	recordPages(c, &x.ahs.pages)
	record.List(c, &x.pds, mostObjects, "protection domains", func(n *uint32) { record.Num(c, n) })
	record.List(c, &x.keys, mostObjects, "keys", func(k *keyContext) { k.record(c) })
	record.List(c, &x.cqs, mostObjects, "completion queues", func(q *cqContext) { q.record(c) })
	record.List(c, &x.srqs, mostObjects, "shared receive queues", func(q *srqContext) { q.record(c) })
	record.List(c, &x.qps, qpIndexes, "queue pairs", func(q *qpContext) { q.record(c) })
	record.List(c, &x.groups, mostObjects, "members of multicast groups", func(g *groupContext) {
		c.Fixed(g.gid[:])
		record.Num(c, &g.qpn)
	})
	if now := d.data.engines[0].loop.Clock().Now(); c.Since(2) {
		record.List(c, &x.conns, mostObjects, "connections", func(n *cm.Conn) { n.Record(c, now) })
	}
}

func recordPages(c *record.Codec, pages *[]translate.PA) {
	record.List(c, pages, mostPages, "pages", func(pa *translate.PA) { record.Num(c, pa) })
}

func (k *keyContext) record(c *record.Codec) {
	s := &k.state
	record.Num(c, &s.Handle)
	c.Bool(&s.Dynamic)
	sp := &s.Spec
	record.Num(c, &sp.PD)
	record.Num(c, &sp.Access)
	record.Num(c, &sp.Flags)
	record.Num(c, &sp.PageShift)
	record.Num(c, &sp.IOVA)
	record.Num(c, &sp.Length)
	record.Num(c, &sp.Offset)
	record.Num(c, &sp.NPages)
	if !s.Dynamic {
		record.List(c, &k.runs, mostEntries, "runs of pages", func(r *translate.PageRun) {
			record.Num(c, &r.N)
			record.Num(c, &r.PA)
		})
		return
	}
	record.Num(c, &s.Kind)
	record.Num(c, &s.Capacity)
	record.Num(c, &s.Key)
	c.Bool(&s.Valid)
	record.Num(c, &s.QP)
	record.Num(c, &s.Base)
	record.List(c, &s.Pages, translate.MaxFastPages, "pages", func(pa *translate.PA) { record.Num(c, pa) })
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

func takeIndices(w *workRing) indicesContext { return indicesContext{w.next, w.done, w.stale} }

// put sets the indices of a new ring. What is posted is found by the next look at the producer index.
func (x *indicesContext) put(w *workRing) {
	w.next, w.done, w.have, w.stale = x.next&w.mask, x.done&w.mask, 0, x.stale
}

func (x *indicesContext) record(c *record.Codec) {
	record.Num(c, &x.next)
	record.Num(c, &x.done)
	c.Bool(&x.stale)
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
}

func (x *srqContext) record(c *record.Codec) {
	record.Num(c, &x.n)
	record.Num(c, &x.pdn)
	record.Num(c, &x.maxSGE)
	record.Num(c, &x.limit)
	x.ring.record(c)
	x.indices.record(c)
	c.Bool(&x.failed)
	record.Num(c, &x.events)
}

func (x *qpContext) record(c *record.Codec) {
	for _, p := range []*uint32{&x.n, &x.index, &x.typ, &x.flags, &x.pdn, &x.scq, &x.rcq, &x.srq, &x.maxSendSGE,
		&x.maxRecvSGE, &x.maxInline, &x.windowPD, &x.engine, &x.bells} {
		record.Num(c, p)
	}
	x.sq.record(c)
	x.rq.record(c)
	x.sqIndices.record(c)
	x.rqIndices.record(c)
	record.Num(c, &x.patience)
	c.Bool(&x.failing)
	record.Num(c, &x.events)
	record.Num(c, &x.faults[0])
	record.Num(c, &x.faults[1])
	record.List(c, &x.unposted, maxUnposted, "completions", func(w *abi.WC) {
		var b [abi.SizeWC]byte
		w.Encode(b[:])
		c.Fixed(b[:])
		if err := w.Decode(b[:]); c.Reading() && err != nil {
			c.Fail("completion: %v", err)
		}
	})
	c.Blob(&x.transport, maxContext, "bytes of transport state")
	x.version = c.Written()
}
