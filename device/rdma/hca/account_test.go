package hca

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// The account of what a guest makes the host allocate, compared with the heap.

// pagedGuest returns a guest whose memory a real host driver serves.
func pagedGuest(t *testing.T, lim Limits) *guest {
	w := newWorld(t, 1, 1, lim)
	g := w.guests[0]
	g.disconnect()
	g.paged = true
	g.connect()
	return g
}

// heap returns the bytes of live objects.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what finalizers held
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// scattered returns n pages no two of which are adjacent.
func scattered(n int) []uint64 {
	pas := make([]uint64, n)
	for i := range pas {
		const pages = memSize / 4096
		pas[i] = uint64(memBase) + uint64(i*2%pages+i*2/pages%2)*4096
	}
	return pas
}

func equal(n int) []uint64 {
	pas := make([]uint64, n)
	for i := range pas {
		pas[i] = uint64(memBase)
	}
	return pas
}

// cqOf returns a CREATE_CQ for a ring of that many elements in these pages.
func cqOf(elems uint32, shift uint8, length uint64, pas []uint64) []byte {
	return enc(abi.SizeCreateCQ, &abi.CreateCQ{ArmPA: uint64(memBase) + 4096 - 64, Ring: abi.Ring{Length: length,
		NPages: uint32(len(pas)), PageShift: shift, Log2ElemSize: abi.WCLog2ElemSize, NumElems: elems}}, pas...)
}

// A completion ring of large pages that are all the same one, and whose list covers far more than its elements: a guest
// with 16 MiB describes 128 GiB, and one with 1 GiB 8 TiB. What is held is what the device accesses, and a page that is
// listed twice costs nothing more.
func TestHostileRingPages(t *testing.T) {
	g := pagedGuest(t, Limits{})
	const tolerance = 1 << 20
	try := func(what string, want abi.Status, req []byte) {
		t.Helper()
		before := heap()
		s, r := g.do(abi.CmdCreateCQ, req)
		if grown := heap() - before; grown > tolerance {
			t.Errorf("%s: the heap has grown by %d bytes", what, grown)
		}
		if s != want {
			t.Errorf("%s: %v, want %v", what, s, want)
		}
		if s == abi.StatusOK {
			g.must(abi.CmdDestroyCQ, handle(binary.LittleEndian.Uint32(r)))
		}
	}
	const shift = 24
	try("8000 equal pages of 16 MiB for 16 elements", abi.StatusInvalid, cqOf(16, shift, 8000<<shift, equal(8000)))
	long := cqOf(1<<20, shift, abi.RingLength(1<<20, 12), equal(257))
	long[13] = 12 // log2_elem_size
	if r := (abi.Ring{}); r.Decode(long) != nil || r.Log2ElemSize != 12 {
		t.Fatalf("%+v", r)
	}
	try("4 GiB of elements that are larger than completions", abi.StatusInvalid, long)
	length := abi.RingLength(1<<18, abi.WCLog2ElemSize)
	try("4097 equal pages", abi.StatusOK, cqOf(1<<18, 12, length, equal(int(length+4095)/4096)))
	try("equal pages of 16 MiB, as many as the elements need", abi.StatusOK,
		cqOf(1<<22, shift, abi.RingLength(1<<22, abi.WCLog2ElemSize), equal(17)))
}

// kind is a kind of object of which TestAccount makes many.
type kind struct {
	n    int
	make func(g *guest, pd uint32, i int)
	// slack is how often the charge may exceed what the objects occupy: bounds are charged where the true figure is not
	// known, and what is made later is charged at once.
	slack float64
}

var kinds = map[string]kind{
	"protection domains":     {n: 4000, slack: 3, make: func(g *guest, _ uint32, _ int) { g.pd() }},
	"CQs of one page":        {n: 4000, slack: 2, make: manyCQs(16, equal(1))},
	"CQs of scattered pages": {n: 500, slack: 2, make: manyCQs(1<<16, scattered(1025))},
	"CQs of equal pages":     {n: 200, slack: 2, make: manyCQs(1<<18, equal(4097))},
	"moderated CQs": {n: 4000, slack: 2, make: func(g *guest, pd uint32, i int) {
		manyCQs(16, equal(1))(g, pd, i)
		g.must(abi.CmdModifyCQ, enc(abi.SizeModifyCQ, &abi.ModifyCQ{CQN: g.tables.lastCQ, Count: 9, Period: 9}))
	}},
	"SRQs": {n: 1000, slack: 2, make: func(g *guest, pd uint32, _ int) {
		g.must(abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: pd, MaxSGE: 32, Ring: abi.Ring{
			Length: abi.RingLength(1024, 10), NPages: 257, PageShift: 12, Log2ElemSize: 10, NumElems: 1024}},
			scattered(257)...))
	}},
	"regions of one page":           {n: 20000, slack: 2, make: regionOf(1, 0)},
	"regions of two pages":          {n: 5000, slack: 2, make: regionOf(2, 0)},
	"regions of 700 pages":          {n: 500, slack: 2, make: regionOf(700, 0)},
	"on-demand regions with a page": {n: 5000, slack: 3, make: regionOf(1, abi.MROnDemand)},
	"on-demand regions with pages":  {n: 2000, slack: 2, make: regionOf(512, abi.MROnDemand)},
	"fast regions": {n: 2000, slack: 2, make: func(g *guest, pd uint32, _ int) {
		g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Flags: abi.MRFast, PageShift: 12, NPages: 512}))
	}},
	"memory windows": {n: 20000, slack: 2, make: func(g *guest, pd uint32, i int) {
		g.must(abi.CmdCreateMW, enc(abi.SizeCreateMW, &abi.CreateMW{PDN: pd, Type: uint32(1 + i%2)}))
	}},
	// A QP is charged from the beginning with what it occupies at most, when all its rings are in use (TestFootprint of
	// roce).
	"idle QPs":                {n: 300, slack: 20, make: qpOf(abi.QPTypeRC, 4, 64, false)},
	"connected QPs":           {n: 300, slack: 12, make: qpOf(abi.QPTypeRC, 4, 64, true)},
	"connected QPs, largest":  {n: 200, slack: 12, make: qpOf(abi.QPTypeRC, 32, 512, true)},
	"datagram QPs in a group": {n: 300, slack: 4, make: qpOf(abi.QPTypeUD, 32, 512, true)},
}

// manyCQs makes CQs by one and the same request, which is long.
func manyCQs(elems uint32, pas []uint64) func(g *guest, pd uint32, i int) {
	req := cqOf(elems, 12, abi.RingLength(elems, abi.WCLog2ElemSize), pas)
	return func(g *guest, _ uint32, _ int) { g.must(abi.CmdCreateCQ, req) }
}

// regionOf makes regions of that many scattered pages.
func regionOf(pages int, flags uint32) func(g *guest, pd uint32, i int) {
	pas := scattered(pages)
	return func(g *guest, pd uint32, _ int) {
		var r abi.CreateMRResp
		access := uint32(0)
		if flags&abi.MROnDemand != 0 {
			access = abi.AccessOnDemand
		}
		if err := r.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Flags: flags, Access: access,
			PageShift: 12, IOVA: 1 << 30, Length: uint64(pages) << 12, NPages: uint64(pages)}))); err != nil {
			g.tb.Fatal(err)
		}
		g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, Count: uint16(pages)}, pas...))
	}
}

// qpOf makes QPs with scattered rings; ready ones have left RESET, and the rings of the transport exist.
func qpOf(typ, sges, inline uint32, ready bool) func(g *guest, pd uint32, i int) {
	var cq uint32
	return func(g *guest, pd uint32, i int) {
		if i == 0 {
			cq = g.mustHandle(abi.CmdCreateCQ, cqOf(16, 12, abi.RingLength(16, 6), equal(1)))
		}
		ring := abi.Ring{Length: abi.RingLength(64, 11), NPages: 33, PageShift: 12, Log2ElemSize: 11, NumElems: 64}
		var resp abi.CreateQPResp
		r := abi.CreateQP{Type: typ, PDN: pd, SendCQN: cq, RecvCQN: cq, MaxSendSGE: sges, MaxRecvSGE: sges, MaxInline: inline,
			SQ: ring, RQ: ring}
		if err := resp.Decode(g.must(abi.CmdCreateQP, enc(abi.SizeCreateQP, &r, scattered(66)...))); err != nil {
			g.tb.Fatal(err)
		}
		q := &tqp{g: g, n: resp.QPN}
		switch {
		case ready && typ == abi.QPTypeRC:
			q.modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrAccessFlags, abi.QPAttr{AccessFlags: remoteAll})
			q.modify(abi.QPRTR, abi.QPAttrAV|abi.QPAttrPathMTU|abi.QPAttrDestQPN|abi.QPAttrRQPSN|
				abi.QPAttrMaxDestRdAtomic|abi.QPAttrMinRNRTimer,
				abi.QPAttr{PathMTU: abi.MTU4096, DestQPN: 0x654321, MaxDestRdAtomic: 128, AV: g.av()})
		case ready:
			q.modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrQKey, abi.QPAttr{QKey: 1})
			group := abi.Mcast{QPN: q.n, GID: [16]byte{0: 0xff, 1: 2, 15: byte(i / 64)}}
			g.must(abi.CmdAttachMcast, enc(abi.SizeMcast, &group))
		}
	}
}

// The account never shows less than the heap has grown by, and not much more (TR-1).
func TestAccount(t *testing.T) {
	movesNoData(t)
	// The garbage that one collection leaves, and the tables of maps that have just grown.
	const tolerance = 256 << 10
	for name, k := range kinds {
		t.Run(name, func(t *testing.T) {
			g := pagedGuest(t, Limits{Memory: 1 << 30, MRs: 21000}) // one kind has 20000
			pd := g.pd()
			// The table of keys is charged to the device as a whole, and made in parts as keys fall into them, at random: for
			// this limit in 256 parts, so that it is nearly certain that each gets one.
			for range 3750 {
				g.must(abi.CmdDestroyMW, handle(g.mustHandle(abi.CmdCreateMW, enc(abi.SizeCreateMW,
					&abi.CreateMW{PDN: pd, Type: 1}))))
			}
			before, charged := heap(), int64(g.accounted().Used)
			for i := range k.n {
				k.make(g, pd, i)
			}
			grown, s := heap()-before, g.accounted()
			charged = int64(s.Used) - charged
			t.Logf("%d: %d bytes each, %d charged: %v", k.n, grown/int64(k.n), charged/int64(k.n), s.By)
			if grown > charged+tolerance {
				t.Errorf("the heap has grown by %d bytes, %d were charged", grown, charged)
			}
			if float64(charged) > k.slack*float64(grown)+tolerance {
				t.Errorf("%d bytes were charged, the heap has grown by %d", charged, grown)
			}
			g.disconnect()
			g.checkEmpty()
		})
	}
}

// accounted is the account without what a journal takes, which is not heap (TestJournalMemory measures it). Of a
// journal that is closed nothing may be left.
func (g *guest) accounted() translate.AccountStatus {
	s := g.account.Status()
	if g.Device.journal != nil {
		s.Used -= s.By["journal"]
		delete(s.By, "journal")
	}
	return s
}

// checkEmpty checks that nothing but the device itself is charged.
func (g *guest) checkEmpty() {
	g.tb.Helper()
	if s := g.accounted(); s.Used != g.lim.fixed(len(g.engines)) || s.Miscounted != 0 || len(s.By) != 1 {
		g.tb.Errorf("all objects are destroyed: %+v", s)
	}
}

// checkAccount compares the account with the tables; no command is in progress or waits.
func (g *guest) checkAccount() {
	g.tb.Helper()
	t, want := &g.tables, map[string]uint64{}
	add := func(c cost) {
		want[c.kind.String()] += c.object
		want["page-lists"] += c.list
	}
	hold := func(hs ...held) {
		for _, h := range hs {
			want["holds"] += h.cost
			if h.waiting != 0 {
				g.tb.Errorf("%+v is charged for waiting", h)
			}
		}
	}
	for range t.pds {
		add(pdCost())
	}
	for _, o := range t.cqs {
		add(o.cost)
		hold(o.ring, o.arm)
	}
	for _, o := range t.srqs {
		add(o.cost)
	}
	for _, o := range t.qpList {
		add(o.cost)
	}
	for _, x := range t.lingering {
		add(x.cost)
	}
	add(t.ahCost)
	hold(t.ahHeld)
	hold(t.dbHeld[:]...)
	want["objects"] += g.groups.Load().cost()
	have := g.account.Status()
	for _, kind := range []string{"objects", "qps", "page-lists", "holds"} {
		if have.By[kind] != want[kind] {
			g.tb.Errorf("%s: %d bytes are charged, %d exist", kind, have.By[kind], want[kind])
		}
	}
	if have.Miscounted != 0 {
		g.tb.Errorf("%+v", have)
	}
}

// What a device reserves for its tables is at least what it takes.
func TestAccountOfDevice(t *testing.T) {
	before := heap()
	g := pagedGuest(t, Limits{})
	pool := int64(16 << 20) // frame buffers and loops of the world
	if grown := heap() - before; grown > int64(g.account.Status().Used)+pool {
		t.Errorf("the heap has grown by %d bytes, %d are reserved", grown, g.account.Status().Used)
	}
	if n := g.lim.fixed(1); n > DefaultMemory/16 {
		t.Errorf("%d bytes are reserved for a device without objects", n)
	}
}

// At the limit every command that makes something ends with ENOMEM and without an effect, and what exists goes on.
func TestAccountLimit(t *testing.T) {
	g := pagedGuest(t, Limits{})
	pd, cq := g.pd(), g.cq(16)
	srqRing := abi.Ring{Length: abi.RingLength(64, 9), NPages: 9, PageShift: 12, Log2ElemSize: 9, NumElems: 64}
	createSRQ := enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: pd, MaxSGE: 4, Ring: srqRing}, scattered(9)...)
	srq := g.mustHandle(abi.CmdCreateSRQ, createSRQ)
	ud := g.qp(qpSpec{typ: abi.QPTypeUD, pd: pd, scq: cq})
	_, _, createQP := g.qpRequest(&qpSpec{pd: pd, scq: cq})
	var r abi.CreateMRResp
	demand := enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Flags: abi.MROnDemand, Access: abi.AccessOnDemand,
		PageShift: 12, IOVA: 1 << 30, Length: 1 << 30, NPages: 1 << 18})
	if err := r.Decode(g.must(abi.CmdCreateMR, demand)); err != nil {
		t.Fatal(err)
	}
	room := uint64(0)
	for n := uint64(1 << 40); n > 0; n /= 2 {
		for g.account.Charge(translate.CostObjects, n) == nil {
			room += n
		}
	}
	full := g.account.Status()
	if full.Used != full.Limit || full.Limit != DefaultMemory {
		t.Fatalf("%+v", full)
	}
	cqRing := abi.Ring{Length: abi.RingLength(1024, 6), NPages: 17, PageShift: 12, Log2ElemSize: 6, NumElems: 1024}
	ahs := make([]uint64, 8)
	for i := range ahs {
		ahs[i] = uint64(memBase) + uint64(i)<<17
	}
	for _, x := range []struct {
		op  abi.Opcode
		req []byte
	}{
		{abi.CmdCreatePD, nil},
		{abi.CmdCreateCQ, cqOf(16, 12, abi.RingLength(16, 6), equal(1))},
		{abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: cq.n, Ring: cqRing}, scattered(17)...)},
		{abi.CmdCreateSRQ, createSRQ},
		{abi.CmdModifySRQ, enc(abi.SizeModifySRQ, &abi.ModifySRQ{SRQN: srq, Flags: abi.SRQResize, Ring: srqRing},
			scattered(9)...)},
		{abi.CmdCreateQP, createQP},
		{abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, PageShift: 12, Length: 4096, NPages: 1})},
		{abi.CmdCreateMR, demand},
		{abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Flags: abi.MRFast, PageShift: 12, NPages: 1})},
		{abi.CmdCreateMW, enc(abi.SizeCreateMW, &abi.CreateMW{PDN: pd, Type: 1})},
		{abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, Count: 2}, scattered(2)...)},
		{abi.CmdAttachMcast, enc(abi.SizeMcast, &abi.Mcast{QPN: ud.n, GID: [16]byte{0: 0xff, 1: 2, 15: 1}})},
		{abi.CmdSetAHTable, enc(abi.SizeSetAHTable, &abi.SetAHTable{NumEntries: 8 * 4096 / abi.SizeAH, NPages: 8}, ahs...)},
		{abi.CmdSetDoorbells, enc(abi.SizeSetDoorbells, &abi.SetDoorbells{NPages: 3,
			PA: [3]uint64{uint64(memBase), uint64(memBase) + 1<<17, uint64(memBase) + 1<<18}})},
	} {
		g.refused(abi.StatusNoMemory, x.op, x.req)
		if now := g.account.Status(); now.Used != full.Used || now.Refused <= full.Refused {
			t.Errorf("%v: %+v, before %+v", x.op, now, full)
		}
		full = g.account.Status()
	}
	g.must(abi.CmdQueryPort, nil)
	if s := ud.state(); s != abi.QPReset {
		t.Errorf("state %d of the QP", s)
	}
	g.must(abi.CmdDestroySRQ, handle(srq)) // its room is enough for another
	g.must(abi.CmdCreateSRQ, createSRQ)
	g.refused(abi.StatusNoMemory, abi.CmdCreateSRQ, createSRQ)
	g.account.Credit(translate.CostObjects, room)
	g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, Count: 2}, scattered(2)...))
	g.disconnect()
	g.checkEmpty()
}

// resident returns the process's resident memory without that of files, which guest memory is.
func resident(t *testing.T) int64 {
	t.Helper()
	debug.FreeOSMemory()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(b), "RssAnon:")
	kib, err := strconv.ParseInt(strings.Fields(after)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// A guest that makes as much as it can, in the way that costs most beside what limits count: the heap grows by no more
// than the limit, and so does the process, but for stacks and what the collector needs.
func TestAccountFull(t *testing.T) {
	movesNoData(t)
	lim := Limits{}
	if err := lim.complete(); err != nil {
		t.Fatal(err)
	}
	lim.Memory = lim.fixed(1) + 48<<20
	g := pagedGuest(t, lim)
	pd := g.pd()
	began, before := resident(t), heap()
	cq := g.mustHandle(abi.CmdCreateCQ, cqOf(16, 12, abi.RingLength(16, 6), equal(1)))
	ring := abi.Ring{Length: abi.RingLength(64, 11), NPages: 33, PageShift: 12, Log2ElemSize: 11, NumElems: 64}
	made := map[abi.Opcode]int{}
	try := func(op abi.Opcode, req []byte, then func(resp []byte)) bool {
		s, resp := g.do(op, req)
		switch s {
		case abi.StatusOK:
			made[op]++
			if then != nil {
				then(resp)
			}
			return true
		case abi.StatusNoMemory:
			return false
		}
		t.Fatalf("%v: %v", op, s)
		return false
	}
	for more := true; more; {
		more = try(abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, PageShift: 12, Length: 8192, NPages: 2}),
			func(resp []byte) {
				var r abi.CreateMRResp
				if err := r.Decode(resp); err != nil {
					t.Fatal(err)
				}
				g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, Count: 2}, scattered(2)...))
			})
		more = made[abi.CmdCreateMR]%50 == 0 && try(abi.CmdCreateCQ, cqOf(1<<16, 12, abi.RingLength(1<<16, 6),
			scattered(1025)), nil) || more
		more = made[abi.CmdCreateMR]%50 == 1 && try(abi.CmdCreateQP, enc(abi.SizeCreateQP, &abi.CreateQP{
			Type: abi.QPTypeRC, PDN: pd, SendCQN: cq, RecvCQN: cq, MaxSendSGE: 32, MaxRecvSGE: 32, MaxInline: 512, SQ: ring,
			RQ: ring}, scattered(66)...), func(resp []byte) {
			var r abi.CreateQPResp
			if err := r.Decode(resp); err != nil {
				t.Fatal(err)
			}
			(&tqp{g: g, n: r.QPN}).modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrAccessFlags, abi.QPAttr{})
		}) || more
	}
	grown, s := heap()-before, g.account.Status()
	t.Logf("%v: the heap has grown by %d bytes: %+v", made, grown, s)
	const overhead = 8 << 20
	if n := resident(t) - began; n > 48<<20+overhead && !raceEnabled {
		t.Errorf("the process has grown by %d bytes", n)
	} else {
		t.Logf("the process has grown by %d bytes", n)
	}
	least := (48<<20 - int64(s.By["qps"])) / 4 * 3 // QPs that are not used take little of what they are charged with
	if grown > 48<<20 || grown < least || s.Used > s.Limit || s.Refused == 0 {
		t.Errorf("the heap has grown by %d bytes: %+v", grown, s)
	}
	g.must(abi.CmdQueryPort, nil)
	g.disconnect()
	g.checkEmpty()
}

// At the limit groups of on-demand regions make room for others, as they do for the quota of entries.
func TestAccountReclaims(t *testing.T) {
	lim := Limits{}
	if err := lim.complete(); err != nil {
		t.Fatal(err)
	}
	lim.Memory = lim.fixed(1) + 64<<10
	if Journaled {
		lim.Memory += 256 << 10 // of two shards: words, heads, and logs of up to 64 KiB
	}
	g := pagedGuest(t, lim)
	pd := g.pd()
	var r abi.CreateMRResp
	if err := r.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Flags: abi.MROnDemand,
		Access: abi.AccessOnDemand, PageShift: 12, IOVA: 1 << 30, Length: 1 << 32, NPages: 1 << 20}))); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(1000) {
		g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, First: i << 9, Count: 2}, scattered(2)...))
	}
	g.mr(pd, memBase, 8192, 0)
	if s := g.account.Status(); s.Most > lim.Memory || g.Describe().MTTsReclaimed < 900 {
		t.Errorf("%+v, %d groups reclaimed", s, g.Describe().MTTsReclaimed)
	}
	g.must(abi.CmdDestroyMR, handle(r.Handle))
}

// Random commands that make, change and destroy objects of all kinds, with a limit that is often reached. What is
// destroyed is credited with what it was charged: in the end the account is where it began.
func TestAccountRandom(t *testing.T) {
	movesNoData(t)
	for seed := range uint64(12 / raceDivisor) {
		lim := Limits{MTTs: 1 << 16}
		if err := lim.complete(); err != nil {
			t.Fatal(err)
		}
		lim.Memory = lim.fixed(2) + 512<<10
		g := newWorld(t, 2, 1, lim).guests[0]
		began := g.account.Status().Used
		x := randomObjects{guest: g, r: rand.New(rand.NewPCG(seed, 23)), done: map[abi.Status]int{}}
		for i := range 4000 {
			if x.step(); i%500 == 0 {
				g.checkAccount()
			}
		}
		if s := g.account.Status(); s.Most > lim.Memory || s.Refused == 0 || x.done[abi.StatusOK] < 1000 {
			t.Errorf("seed %d: %+v, %v", seed, s, x.done)
		}
		switch seed % 3 {
		case 0:
			x.destroyAll()
			if s := g.account.Status(); s.Used != began || s.Miscounted != 0 {
				t.Errorf("seed %d: %+v, began with %d", seed, s, began)
			}
		case 1:
			g.Reset()
			g.checkEmpty()
		default:
			g.disconnect()
			g.checkEmpty()
		}
	}
}

// randomObjects is a guest that sends random commands.
type randomObjects struct {
	*guest
	r    *rand.Rand
	done map[abi.Status]int
}

func (x *randomObjects) send(op abi.Opcode, b []byte) {
	s, _ := x.do(op, b)
	x.done[s]++
}

// pages returns n pages: scattered, equal, or contiguous.
func (x *randomObjects) pages(n uint32) []uint64 {
	pas := [][]uint64{scattered(int(n)), equal(int(n)), equal(int(n))}[x.r.IntN(3)]
	if x.r.IntN(3) == 0 {
		for i := range pas {
			pas[i] = uint64(memBase) + uint64(i)<<12
		}
	}
	return pas
}

// aRing returns a ring of a random size.
func (x *randomObjects) aRing(log2 uint8) (abi.Ring, []uint64) {
	r := abi.Ring{PageShift: 12, Log2ElemSize: log2, NumElems: 2 << x.r.UintN(12)}
	r.Length = abi.RingLength(r.NumElems, log2)
	r.NPages = uint32((r.Length + 4095) / 4096)
	return r, x.pages(r.NPages)
}

func (x *randomObjects) one(of []uint32) uint32 {
	if len(of) == 0 {
		return 0
	}
	return of[x.r.IntN(len(of))]
}

func (x *randomObjects) step() {
	r, tb := x.r, &x.tables
	pd, cq, srq, qp := x.one(keys(tb.pds)), x.one(keys(tb.cqs)), x.one(keys(tb.srqs)), x.one(keys(tb.qpList))
	mr := x.one(keys(tb.mrs))
	switch r.IntN(20) {
	case 0:
		x.send(abi.CmdCreatePD, nil)
	case 1:
		x.send(abi.CmdDestroyPD, handle(pd))
	case 2:
		ring, pas := x.aRing(6)
		x.send(abi.CmdCreateCQ, enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: ring, ArmPA: uint64(memBase) + 4*r.Uint64N(9)},
			pas...))
	case 3:
		x.send(abi.CmdDestroyCQ, handle(cq))
	case 4:
		ring, pas := x.aRing(6)
		x.send(abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: cq, Ring: ring}, pas...))
	case 5:
		ring, pas := x.aRing(8)
		x.send(abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: pd, MaxSGE: 1 + r.Uint32N(8), Ring: ring},
			pas...))
	case 6:
		x.send(abi.CmdDestroySRQ, handle(srq))
	case 7:
		ring, pas := x.aRing(8)
		x.send(abi.CmdModifySRQ, enc(abi.SizeModifySRQ, &abi.ModifySRQ{SRQN: srq, Flags: abi.SRQResize, Ring: ring}, pas...))
	case 8, 9:
		q := abi.CreateQP{Type: 2 + r.Uint32N(3), PDN: pd, SendCQN: cq, RecvCQN: cq, MaxSendSGE: r.Uint32N(4),
			MaxRecvSGE: r.Uint32N(4), MaxInline: r.Uint32N(100)}
		var sq, rq []uint64
		q.SQ, sq = x.aRing(9)
		if r.IntN(2) == 0 {
			q.RQ, rq = x.aRing(8)
		} else {
			q.Flags, q.SRQN = abi.QPHasSRQ, srq
		}
		x.send(abi.CmdCreateQP, enc(abi.SizeCreateQP, &q, append(sq[:len(sq):len(sq)], rq...)...))
	case 10:
		x.send(abi.CmdDestroyQP, handle(qp))
	case 11:
		x.send(abi.CmdModifyQP, enc(abi.SizeQPAttr, &abi.QPAttr{QPN: qp, PortNum: 1, QPState: []uint8{abi.QPInit, abi.QPErr,
			abi.QPReset}[r.IntN(3)], AttrMask: abi.QPAttrState | abi.QPAttrPKeyIndex | abi.QPAttrPort |
			abi.QPAttrAccessFlags}))
	case 12, 13:
		n := 1 + r.Uint64N(1500)
		x.send(abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, PageShift: 12, IOVA: 1 << 30, Length: n << 12,
			NPages: n, Flags: []uint32{0, abi.MROnDemand, abi.MRPhys}[r.IntN(2)]}))
	case 14:
		x.send(abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Flags: abi.MRFast, PageShift: 12,
			NPages: 1 + r.Uint64N(512)}))
	case 15:
		x.send(abi.CmdCreateMW, enc(abi.SizeCreateMW, &abi.CreateMW{PDN: pd, Type: 1 + r.Uint32N(2)}))
	case 16:
		if r.IntN(2) == 0 {
			x.send(abi.CmdDestroyMW, handle(x.one(keys(tb.mws))))
		} else {
			x.send(abi.CmdDestroyMR, handle(mr))
		}
	case 17:
		n := 1 + r.Uint32N(600)
		x.send(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: mr, First: r.Uint64N(900), Count: uint16(n)},
			x.pages(n)...))
	case 18:
		x.send(abi.CmdClearMTT, enc(abi.SizeClearMTT, &abi.ClearMTT{Handle: mr, First: r.Uint64N(900),
			Count: r.Uint64N(900)}))
	default:
		x.send([]abi.Opcode{abi.CmdAttachMcast, abi.CmdDetachMcast}[r.IntN(2)], enc(abi.SizeMcast, &abi.Mcast{QPN: qp,
			GID: [16]byte{0: 0xff, 1: 2, 15: byte(r.UintN(5))}}))
	}
}

// destroyAll destroys every object by command.
func (x *randomObjects) destroyAll() {
	tb := &x.tables
	for gid, qps := range x.groups.Load().groups {
		for _, q := range qps {
			x.must(abi.CmdDetachMcast, enc(abi.SizeMcast, &abi.Mcast{QPN: q.n, GID: gid}))
		}
	}
	for _, of := range []struct {
		op abi.Opcode
		n  []uint32
	}{
		{abi.CmdDestroyQP, keys(tb.qpList)}, {abi.CmdDestroySRQ, keys(tb.srqs)}, {abi.CmdDestroyCQ, keys(tb.cqs)},
		{abi.CmdDestroyMR, keys(tb.mrs)}, {abi.CmdDestroyMW, keys(tb.mws)}, {abi.CmdDestroyPD, keys(tb.pds)},
	} {
		for _, n := range of.n {
			x.must(of.op, handle(n))
		}
	}
}
