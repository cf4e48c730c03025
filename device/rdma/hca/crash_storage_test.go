package hca

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// storage is what a storage target and its initiator do (NVMe over RDMA): the initiator registers memory and SENDs
// commands, several at a time. The target READs the data of a write from there, or WRITEs those of a read, and then
// SENDs the response, which invalidates the key; else the initiator does. Both sleep until a completion event comes,
// and compare the data. Either device ends at random points, again and again; the next one is without a network
// at first, and frozen for a while; its pages may be absent.
type storage struct {
	t      testing.TB
	w      *world
	rng    *rand.Rand
	ends   [2]*storageEnd // initiator, target
	total  int
	issued int
	done   int
	busy   [storageDepth]bool
	keys   [storageDepth]uint32       // the initiator's, of fast registrations
	lists  [storageDepth]translate.PA // of their pages
	quiet  int                        // steps without progress

	victim int // the next
	until  int // points until it ends
	kills  int
	left   *corpse
	asleep [2]storageSleep
}

// storageSleep is how many steps more a device that continues is cut off, and then frozen.
type storageSleep struct {
	is, eventsFirst bool
	alone, frozen   int
}

// storageEnd is a queue pair, its event queue, and memory for commands, responses and data.
type storageEnd struct {
	*tqp
	events          *drvq
	cmd, resp, data translate.PA
	key             uint32
}

const (
	storageDepth = 8
	storageMax   = 64 << 10 // bytes of a command's data
	storagePages = storageMax/4096 + 1
	storageSlot  = 64 // bytes of a command or response
)

func newStorage(t testing.TB, seed uint64, loops, total int) *storage {
	s := &storage{t: t, rng: rand.New(rand.NewPCG(seed, 1)), total: total}
	s.w = newWorld(t, loops, 2, Limits{})
	for i, g := range s.w.guests {
		if seed%4 < 2 {
			g.disconnect()
			g.paged = true
			g.connect()
		}
		g.cfg.Journal = true
		if _, err := g.Journal(); err != nil {
			t.Fatal(err)
		}
		e := &storageEnd{events: g.eventQueue(abi.CEQQueue(0), 16, abi.SizeCEQE)}
		e.events.add(16)
		e.tqp = g.qp(qpSpec{pd: g.pd(), elems: 64, scq: g.cq(256), flags: abi.QPPrivileged})
		n := storageDepth * (storageMax + 2*storageSlot)
		e.cmd = g.alloc(n)
		e.resp = e.cmd + storageDepth*storageSlot
		e.data = e.resp + storageDepth*storageSlot
		e.key = g.mr(1, e.cmd, n, abi.AccessLocalWrite|remoteAll)
		g.u32(e.scq.arm).Store(abi.ArmNext)
		s.ends[i] = e
	}
	for slot := range storageDepth {
		s.keys[slot], s.lists[slot] = s.w.guests[0].fastRegion(1, storagePages)
	}
	mtu := []uint8{abi.MTU256, abi.MTU1024, abi.MTU4096}[s.rng.IntN(3)]
	s.ends[0].connectMTU(s.ends[1].tqp, mtu)
	s.ends[1].connectMTU(s.ends[0].tqp, mtu)
	for slot := range storageDepth {
		s.ends[0].receive(slot, s.ends[0].resp)
		s.ends[1].receive(slot, s.ends[1].cmd)
	}
	s.next()
	return s
}

// receive posts a receive request for a command or response.
func (e *storageEnd) receive(slot int, area translate.PA) {
	e.recv(uint64(slot), abi.SGE{Addr: uint64(area) + uint64(slot*storageSlot), Length: storageSlot, LKey: e.key})
}

// request posts a request about n bytes at an address.
func (e *storageEnd) request(id uint64, op, flags uint32, from translate.PA, n int, remote uint64, rkey uint32) {
	s := e.wqe()
	s.SetRequest(id, op, flags)
	if op != abi.WRSend {
		s.SetRDMA(remote, rkey)
	}
	s.SetSGEs([]abi.SGE{{Addr: uint64(from), Length: uint32(n), LKey: e.key}})
	e.post()
}

func (e *storageEnd) slot(area translate.PA, slot int) translate.PA {
	return area + translate.PA(slot*storageSlot)
}
func (e *storageEnd) buffer(slot int) translate.PA { return e.data + translate.PA(slot*storageMax) }

// next chooses when who ends.
func (s *storage) next() { s.victim, s.until = s.rng.IntN(2), 1+s.rng.IntN(1+s.rng.IntN(1500)) }

func (s *storage) point() {
	if s.left != nil {
		return
	}
	if s.until--; s.until > 0 {
		return
	}
	g := s.w.guests[s.victim]
	c := g.remains()
	s.left = &c
	s.w.lose = func([]byte) bool { return true }
}

// completions returns the completions of an end: none if no event has come.
func (s *storage) completions(e *storageEnd) []abi.WC {
	woken := false
	for range e.events.get() {
		woken = true
	}
	e.events.add(len(e.events.free))
	if !woken {
		return nil
	}
	out := e.scq.poll()
	e.g.u32(e.scq.arm).Store(abi.ArmNext)
	return append(out, e.scq.poll()...)
}

// storageFill writes the data of command i.
func storageFill(b []byte, i int) { fill(b, byte(i*37)) }

// storageRight reports whether b has the data of command i.
func storageRight(b []byte, i int) bool {
	want := make([]byte, len(b))
	storageFill(want, i)
	return bytes.Equal(b, want)
}

// storageCmd is what a SEND to the target has.
type storageCmd struct{ i, slot, n, write, key uint32 }

func (c *storageCmd) put(b []byte) {
	for k, v := range []uint32{c.i, c.slot, c.n, c.write, c.key} {
		binary.LittleEndian.PutUint32(b[4*k:], v)
	}
}

func (c *storageCmd) get(b []byte) {
	for k, v := range []*uint32{&c.i, &c.slot, &c.n, &c.write, &c.key} {
		*v = binary.LittleEndian.Uint32(b[4*k:])
	}
}

// In the identifier of a request: the target's READ, the initiator's invalidation.
const (
	storageRead = 1 << 16
	storageInv  = 1 << 17
)

// program is what the programs at both ends do at any time.
func (s *storage) program() {
	a, b := s.ends[0], s.ends[1]
	var c storageCmd
	for _, wc := range s.completions(b) {
		s.quiet = 0
		slot := int(wc.ID & 0xffff)
		if wc.Status != abi.WCSuccess {
			s.t.Fatalf("target: %+v", wc)
		}
		switch {
		case wc.Opcode == abi.WCOpRecv:
			c.get(b.g.at(b.slot(b.cmd, slot), 20))
			remote := uint64(a.buffer(int(c.slot)))
			if c.write != 0 {
				b.request(storageRead|uint64(slot), abi.WRRDMARead, abi.SendSignaled, b.buffer(slot), int(c.n), remote, c.key)
				continue
			}
			storageFill(b.g.at(b.buffer(slot), int(c.n)), int(c.i))
			b.request(0, abi.WRRDMAWrite, 0, b.buffer(slot), int(c.n), remote, c.key)
			s.respond(slot)
		case wc.ID&storageRead != 0:
			c.get(b.g.at(b.slot(b.cmd, slot), 20))
			if !storageRight(b.g.at(b.buffer(slot), int(c.n)), int(c.i)) {
				s.t.Fatalf("command %d: the target got other data", c.i)
			}
			s.respond(slot)
		}
	}
	for _, wc := range s.completions(a) {
		s.quiet = 0
		slot := int(wc.ID & 0xffff)
		if wc.Status != abi.WCSuccess {
			s.t.Fatalf("initiator: %+v", wc)
		}
		if wc.Opcode != abi.WCOpRecv {
			if wc.ID&storageInv != 0 {
				s.busy[slot] = false
				s.done++
			}
			continue
		}
		c.get(a.g.at(a.slot(a.resp, slot), 20))
		a.receive(slot, a.resp)
		if !s.busy[c.slot] {
			s.t.Fatalf("a second response to command %d", c.i)
		}
		if c.write == 0 && !storageRight(a.g.at(a.buffer(int(c.slot)), int(c.n)), int(c.i)) {
			s.t.Fatalf("command %d: the initiator got other data", c.i)
		}
		if wc.Flags&abi.WCFlagsInvalidate == 0 {
			q := a.wqe()
			q.SetRequest(uint64(storageInv|c.slot), abi.WRLocalInv, abi.SendSignaled)
			q.SetInvalidateRKey(c.key)
			a.post()
			continue
		}
		s.busy[c.slot] = false
		s.done++
	}
	for slot := range s.busy {
		if s.busy[slot] || s.issued == s.total || full(&a.sq) {
			continue
		}
		c = storageCmd{i: uint32(s.issued), slot: uint32(slot), n: uint32(512 * (1 + s.rng.IntN(storageMax/512))),
			write: uint32(s.rng.IntN(2)), key: s.keys[slot]&^0xff | uint32(s.issued&0xff)}
		if b := a.g.at(a.buffer(slot), int(c.n)); c.write != 0 {
			storageFill(b, s.issued)
		} else {
			clear(b)
		}
		c.put(a.g.at(a.slot(a.cmd, slot), 20))
		s.busy[slot] = true
		s.issued++
		s.register(slot, c.key)
		a.request(uint64(slot), abi.WRSend, uint32(s.rng.IntN(2))*abi.SendSignaled, a.slot(a.cmd, slot), storageSlot, 0, 0)
	}
}

// register posts the registration of a command's buffer.
func (s *storage) register(slot int, key uint32) {
	a, at := s.ends[0], s.ends[0].buffer(slot)
	for k := range storagePages {
		page := uint64(at)&^4095 + uint64(4096*k)
		binary.LittleEndian.PutUint64(a.g.at(s.lists[slot]+translate.PA(8*k), 8), page)
	}
	q := a.wqe()
	setReg(q, 0, 0, abi.RegWR{IOVA: uint64(at), Length: storageMax, PageList: uint64(s.lists[slot]),
		NPages: storagePages, Offset: uint32(at & 4095), RKey: key, Access: abi.AccessLocalWrite | remoteAll})
	a.post()
}

// respond gives the command's receive request back, and sends the response.
func (s *storage) respond(slot int) {
	b := s.ends[1]
	copy(b.g.at(b.slot(b.resp, slot), 20), b.g.at(b.slot(b.cmd, slot), 20))
	b.receive(slot, b.cmd)
	var c storageCmd
	c.get(b.g.at(b.slot(b.cmd, slot), 20))
	q := b.wqe()
	q.SetRequest(uint64(slot), abi.WRSend, abi.SendSignaled)
	if c.i%3 != 0 {
		q.SetRequest(uint64(slot), abi.WRSendWithInv, abi.SendSignaled)
		q.SetInvalidateRKey(c.key)
	}
	q.SetSGEs([]abi.SGE{{Addr: uint64(b.slot(b.resp, slot)), Length: storageSlot, LKey: b.key}})
	b.post()
}

// storagePatience is for how many steps of a millisecond nothing may happen.
const storagePatience = 20000

func (s *storage) run() {
	stop := endAt(s.point)
	defer stop()
	for s.done < s.total {
		if s.left != nil {
			stop()
			s.resurrect()
			stop = endAt(s.point)
		}
		s.goOn()
		s.program()
		s.w.step(1)
		s.w.clock.Advance(1e6)
		if s.quiet > 10 && s.ends[0].g.paged {
			runtime.Gosched() // the hosts' drivers work
		}
		if s.quiet++; s.quiet > storagePatience {
			for i, e := range s.ends {
				s.t.Logf("end %d: %+v; arm %d, CQ %s, RQ %s, SQ %s", i, e.g.Describe().QPs, e.g.u32(e.scq.arm).Load(),
					&e.scq.tring, &e.rq, &e.sq)
			}
			s.t.Fatalf("nothing happens after %d kills: %d of %d commands are done", s.kills, s.done, s.total)
		}
	}
}

// String returns the indices.
func (r *tring) String() string {
	return fmt.Sprintf("%d of %d", r.cons().Load(), r.prod().Load())
}

// resurrect lets a device continue what the victim has left: at first it is frozen, and nothing reaches it.
func (s *storage) resurrect() {
	g := s.w.guests[s.victim]
	g.replaceStopped(*s.left)
	s.left = nil
	s.kills++
	x := &s.asleep[s.victim]
	x.is, x.alone, x.frozen, x.eventsFirst = true, s.rng.IntN(1+s.rng.IntN(1000)), s.rng.IntN(30), s.rng.IntN(2) == 0
	s.next()
}

// goOn continues the devices whose time has come.
func (s *storage) goOn() {
	s.w.lose = nil
	for i := range s.asleep {
		x, g, e := &s.asleep[i], s.w.guests[i], s.ends[i].events
		if !x.is {
			continue
		}
		if x.alone > 0 {
			x.alone--
			s.w.lose = func([]byte) bool { return true } // there are only these two
			continue
		}
		if x.frozen > 0 {
			x.frozen--
			continue
		}
		x.is, s.quiet = false, 0
		if x.eventsFirst {
			e.restart()
		}
		g.up.Store(true)
		g.paused.Store(false)
		for _, eng := range g.engines {
			if err := g.thaw(eng); err != nil {
				s.t.Fatal(err)
			}
		}
		if !x.eventsFirst {
			e.restart()
		}
		e.add(len(e.free))
	}
}

// connectMTU is connectRC with a path MTU and as many READs as storage uses.
func (q *tqp) connectMTU(peer *tqp, mtu uint8) {
	q.g.tb.Helper()
	q.modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrAccessFlags, abi.QPAttr{AccessFlags: remoteAll})
	q.modify(abi.QPRTR,
		abi.QPAttrAV|abi.QPAttrPathMTU|abi.QPAttrDestQPN|abi.QPAttrRQPSN|abi.QPAttrMaxDestRdAtomic|abi.QPAttrMinRNRTimer,
		abi.QPAttr{PathMTU: mtu, DestQPN: peer.n, RQPSN: 7, MaxDestRdAtomic: 16, MinRNRTimer: 1, AV: peer.g.av()})
	q.modify(abi.QPRTS, abi.QPAttrSQPSN|abi.QPAttrTimeout|abi.QPAttrRetryCnt|abi.QPAttrRNRRetry|abi.QPAttrMaxQPRdAtomic,
		abi.QPAttr{SQPSN: 7, Timeout: 18, RetryCnt: 7, RNRRetry: 7, MaxRdAtomic: 16})
}

// TestCrashStorage: a storage target and its initiator outlive the ends of their devices (CO-2); see storage.
func TestCrashStorage(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	size := logSize
	logSize = 256 << 10
	defer func() { logSize = size }()
	n := uint64(20 / raceDivisor)
	if *everyCrash {
		n = 60
	}
	kills := 0
	for seed := range n {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newStorage(t, seed, 1+int(seed%2), 60)
			s.run()
			kills += s.kills
		})
	}
	t.Logf("%d kills", kills)
}
