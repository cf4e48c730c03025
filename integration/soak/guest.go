package main

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// hostileGuest is a guest whose kernel was taken over: its front end is correct, its driver is not.
type hostileGuest struct {
	s    *stage
	rng  *rand.Rand
	mem  *frontend.Memory
	dev  *frontend.Device
	conf abi.Config

	req, resp  translate.PA
	outcome    []byte // of the last command
	pds, cqs   []uint32
	srqs, qps  []uint32
	mrs, mws   []uint32
	keys       []uint32
	rings      []translate.PA // of one page each: work and completion rings, all the same to this guest
	doorbells  []translate.PA
	arm, ahTab translate.PA
}

const guestMemory = 32 << 20

// guestEpisode issues commands with plausible and spoilt arguments, writes work requests, rings and doorbells, and
// leaves at a random moment.
func guestEpisode(ctx context.Context, s *stage, rng *rand.Rand) error {
	mem, err := frontend.NewMemory(frontend.Range{PA: 0x100000, Size: guestMemory})
	if err != nil {
		return err
	}
	defer mem.Close()
	g := &hostileGuest{s: s, rng: rng, mem: mem}
	socket := []string{"mallory.hca", "trudy.hca"}[rng.IntN(2)]
	if g.dev, err = frontend.Open(ctx, frontend.Config{Path: s.socket(s.h1, socket), Memory: mem}); err != nil {
		return g.unavailable(ctx, err)
	}
	defer g.dev.Close()
	if err := g.prepare(); err != nil {
		return g.unavailable(ctx, err)
	}
	for range 100 + rng.IntN(400) {
		if ctx.Err() != nil {
			return nil
		}
		select {
		case <-g.dev.Gone():
			return nil // the daemon has had enough of it
		default:
		}
		if err := g.step(ctx); err != nil {
			return nil
		}
	}
	return nil
}

// unavailable tells a socket that is in use by another campaign, or a device that it has broken, from one that nobody
// serves.
func (g *hostileGuest) unavailable(ctx context.Context, err error) error {
	var refused *frontend.RefusedError
	if ctx.Err() != nil || errors.As(err, &refused) || errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	time.Sleep(10 * time.Millisecond)
	return nil
}

func (g *hostileGuest) page() (translate.PA, error) { return g.mem.Alloc(4096, 4096) }

// prepare makes a device that works: doorbells, address handles, protection domain, completion queue, region, queue
// pairs.
func (g *hostileGuest) prepare() (err error) {
	b := make([]byte, abi.SizeConfig)
	if err := g.dev.ReadConfig(b, 0); err != nil {
		return err
	}
	if err := g.conf.Decode(b); err != nil {
		return err
	}
	for _, p := range []*translate.PA{&g.req, &g.resp, &g.arm, &g.ahTab} {
		if *p, err = g.page(); err != nil {
			return err
		}
	}
	if g.req, err = g.mem.Alloc(abi.CmdMax, 4096); err != nil {
		return err
	}
	for range 8 {
		p, err := g.page()
		if err != nil {
			return err
		}
		g.rings = append(g.rings, p)
	}
	for e := range g.conf.NumEngines {
		db := abi.SetDoorbells{Engine: uint32(e), NPages: abi.DoorbellPages}
		for i := range db.PA {
			p, err := g.page()
			if err != nil {
				return err
			}
			g.doorbells = append(g.doorbells, p)
			db.PA[i] = uint64(p)
		}
		g.command(abi.CmdSetDoorbells, encode(abi.SizeSetDoorbells, &db), false)
	}
	g.command(abi.CmdSetAHTable, encode(abi.SizeSetAHTable, &abi.SetAHTable{NumEntries: 64, NPages: 1}, uint64(g.ahTab)),
		false)
	ip := [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 4}
	g.command(abi.CmdSetGID, encode(abi.SizeSetGID, &abi.SetGID{GID: ip, Type: abi.GIDRoCEv2, VLANID: abi.NoVLAN,
		SMAC: g.conf.MAC}), false)
	g.create(abi.CmdCreatePD, nil, &g.pds)
	for range 2 {
		g.createCQ(false)
		g.createMR(false)
		g.createQP(false)
	}
	return nil
}

type encoder interface{ Encode(b []byte) }

func encode(size int, x encoder, pas ...uint64) []byte {
	b := make([]byte, size+8*len(pas))
	x.Encode(b[:size])
	abi.PutPAs(b[size:], pas)
	return b
}

// command issues a command and waits a moment for the answer. Spoilt ones have some wrong bytes. It reports success.
func (g *hostileGuest) command(op abi.Opcode, payload []byte, spoil bool) bool {
	if spoil {
		for range 1 + g.rng.IntN(3) {
			if len(payload) > 0 {
				payload[g.rng.IntN(len(payload))] ^= byte(1 << g.rng.IntN(8))
			}
		}
	}
	if abi.SizeReq+len(payload) > abi.CmdMax {
		payload = payload[:abi.CmdMax-abi.SizeReq]
	}
	req, err := g.mem.Bytes(g.req, abi.CmdMax)
	if err != nil {
		return false
	}
	h := abi.Req{Opcode: op, Length: uint32(len(payload))}
	h.Encode(req)
	copy(req[abi.SizeReq:], payload)
	out := []frontend.Buf{{PA: g.req, Len: uint32(abi.SizeReq + len(payload))}}
	if g.rng.IntN(20) == 0 { // in pieces
		out = g.pieces(out[0])
	}
	q := g.dev.Queue(abi.CommandQueue)
	if q.Add(1, out, []frontend.Buf{{PA: g.resp, Len: 4096}}) != nil {
		return false
	}
	q.Kick()
	for begin := time.Now(); time.Since(begin) < 2*time.Second; time.Sleep(50 * time.Microsecond) {
		_, n, ok, err := q.Get()
		if err != nil {
			return false
		}
		if ok {
			b, err := g.mem.Bytes(g.resp, 4096)
			if err != nil || n < abi.SizeResp {
				return false
			}
			g.outcome = b[abi.SizeResp:n]
			var r abi.Resp
			return r.Decode(b) == nil && r.Status == abi.StatusOK
		}
		select {
		case <-g.dev.Gone():
			return false
		default:
		}
	}
	return false // a command that waits for memory
}

func (g *hostileGuest) pieces(b frontend.Buf) (bufs []frontend.Buf) {
	for b.Len > 0 && len(bufs) < 64 {
		n := min(b.Len, 1+uint32(g.rng.IntN(64)))
		bufs = append(bufs, frontend.Buf{PA: b.PA, Len: n})
		b.PA, b.Len = b.PA+translate.PA(n), b.Len-n
	}
	return bufs
}

// create issues a command whose answer begins with a handle.
func (g *hostileGuest) create(op abi.Opcode, payload []byte, list *[]uint32) bool {
	if !g.command(op, payload, false) || len(g.outcome) < 4 {
		return false
	}
	*list = append(*list, binary.LittleEndian.Uint32(g.outcome))
	return true
}

// any returns one of a list's handles, now and then a wrong one.
func (g *hostileGuest) any(list []uint32) uint32 {
	if len(list) == 0 || g.rng.IntN(20) == 0 {
		return g.rng.Uint32() >> g.rng.IntN(32)
	}
	return list[g.rng.IntN(len(list))]
}

func (g *hostileGuest) ring(elem uint8) (abi.Ring, uint64) {
	n := uint32(1) << (12 - elem - 1)
	return abi.Ring{Length: abi.RingLength(n, elem), NPages: 1, PageShift: 12, Log2ElemSize: elem, NumElems: n},
		uint64(g.rings[g.rng.IntN(len(g.rings))])
}

// wide turns an honest page list into a costly one: many equal pages of 1 GiB.
func (g *hostileGuest) wide(r *abi.Ring) (pas []uint64) {
	r.PageShift, r.NPages = uint8(12+g.rng.IntN(19)), uint32(1+g.rng.IntN(8000))
	for range r.NPages {
		pas = append(pas, uint64(g.rings[0])&^(1<<r.PageShift-1))
	}
	return pas
}

func (g *hostileGuest) createCQ(spoil bool) {
	r, pa := g.ring(6)
	pas := []uint64{pa}
	if spoil && g.rng.IntN(4) == 0 {
		pas = g.wide(&r)
	}
	b := encode(abi.SizeCreateCQ, &abi.CreateCQ{Ring: r, ArmPA: uint64(g.arm), CEQ: 0}, pas...)
	if spoil {
		g.command(abi.CmdCreateCQ, b, g.rng.IntN(2) == 0)
		return
	}
	g.create(abi.CmdCreateCQ, b, &g.cqs)
}

func (g *hostileGuest) createMR(spoil bool) {
	mr := abi.CreateMR{PDN: g.any(g.pds), Access: uint32(g.rng.IntN(64)), PageShift: 12, IOVA: 0x10000, NPages: 4,
		Length: 4 * 4096}
	switch g.rng.IntN(4) {
	case 0:
		mr.Flags, mr.NPages, mr.Length = abi.MROnDemand, 1<<20, 1<<32
	case 1:
		mr.Flags = uint32(g.rng.IntN(8))
	}
	if g.command(abi.CmdCreateMR, encode(abi.SizeCreateMR, &mr), spoil) && len(g.outcome) >= 12 {
		g.keys = append(g.keys, binary.LittleEndian.Uint32(g.outcome))
		g.mrs = append(g.mrs, binary.LittleEndian.Uint32(g.outcome[8:]))
	}
}

func (g *hostileGuest) createQP(spoil bool) {
	sq, spa := g.ring(9)
	rq, rpa := g.ring(9)
	qp := abi.CreateQP{Type: g.qpType(), Flags: uint32(g.rng.IntN(4)), PDN: g.any(g.pds), SendCQN: g.any(g.cqs),
		RecvCQN: g.any(g.cqs), MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64, SQ: sq, RQ: rq}
	if g.command(abi.CmdCreateQP, encode(abi.SizeCreateQP, &qp, spa, rpa), spoil) && len(g.outcome) >= 4 {
		g.qps = append(g.qps, binary.LittleEndian.Uint32(g.outcome))
		g.connect(g.qps[len(g.qps)-1])
	}
}

func (g *hostileGuest) qpType() uint32 {
	return []uint32{abi.QPTypeRC, abi.QPTypeUC, abi.QPTypeUD, abi.QPTypeGSI}[g.rng.IntN(4)]
}

// connect brings a queue pair to RTS, with an innocent as its peer as often as with itself.
func (g *hostileGuest) connect(qpn uint32) {
	target := g.s.pairs[g.rng.IntN(len(g.s.pairs))].known.Load()
	a := abi.QPAttr{QPN: qpn, PathMTU: uint8(1 + g.rng.IntN(5)), Timeout: 8, RetryCnt: 1, RNRRetry: uint8(g.rng.IntN(8)),
		MinRNRTimer: 1, MaxRdAtomic: 4, MaxDestRdAtomic: 4, PortNum: 1, AccessFlags: 15, QKey: g.rng.Uint32(),
		DestQPN: target.b, RQPSN: g.rng.Uint32() & 0xffffff, SQPSN: g.rng.Uint32() & 0xffffff}
	a.AV.DGID, a.AV.DMAC = target.path.GID, target.path.MAC
	a.AV.VLANID, a.AV.HopLimit = abi.NoVLAN, 64
	if g.rng.IntN(2) == 0 {
		a.DestQPN = qpn
		a.AV.DGID, a.AV.DMAC = [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 4}, g.conf.MAC
	}
	for _, m := range []struct {
		state uint8
		mask  uint32
	}{
		{abi.QPInit, abi.QPAttrState | abi.QPAttrPKeyIndex | abi.QPAttrPort | abi.QPAttrAccessFlags},
		{abi.QPRTR, abi.QPAttrState | abi.QPAttrAV | abi.QPAttrPathMTU | abi.QPAttrDestQPN | abi.QPAttrRQPSN |
			abi.QPAttrMaxDestRdAtomic | abi.QPAttrMinRNRTimer},
		{abi.QPRTS, abi.QPAttrState | abi.QPAttrSQPSN | abi.QPAttrTimeout | abi.QPAttrRetryCnt | abi.QPAttrRNRRetry |
			abi.QPAttrMaxQPRdAtomic},
	} {
		a.QPState, a.AttrMask = m.state, m.mask
		g.command(abi.CmdModifyQP, encode(abi.SizeQPAttr, &a), g.rng.IntN(10) == 0)
	}
}

// step is one move of the guest.
func (g *hostileGuest) step(ctx context.Context) error {
	spoil := g.rng.IntN(3) == 0
	switch g.rng.IntN(18) {
	case 0:
		g.create(abi.CmdCreatePD, nil, &g.pds)
	case 1:
		g.createCQ(spoil)
	case 2:
		g.createMR(spoil)
	case 3, 4:
		g.createQP(spoil)
	case 5:
		pas := make([]uint64, 1+g.rng.IntN(16))
		for i := range pas {
			pas[i] = 0x100000 + uint64(g.rng.IntN(guestMemory))&^0xfff | uint64(g.rng.IntN(4))
		}
		g.command(abi.CmdSetMTT, encode(abi.SizeSetMTT, &abi.SetMTT{Handle: g.any(g.mrs), Count: uint16(len(pas)),
			First: uint64(g.rng.IntN(8))}, pas...), spoil)
	case 6:
		g.command(abi.CmdClearMTT, encode(abi.SizeClearMTT, &abi.ClearMTT{Handle: g.any(g.mrs), Count: 1 << g.rng.IntN(21)}),
			spoil)
	case 7:
		g.command(abi.CmdResumeFault, encode(abi.SizeResumeFault, &abi.ResumeFault{Token: g.rng.Uint32() >> g.rng.IntN(32)}),
			spoil)
	case 8:
		destroy := []struct {
			op   abi.Opcode
			list []uint32
		}{{abi.CmdDestroyQP, g.qps}, {abi.CmdDestroyMR, g.mrs}, {abi.CmdDestroyCQ, g.cqs}, {abi.CmdDestroyPD, g.pds},
			{abi.CmdDestroySRQ, g.srqs}, {abi.CmdDestroyMW, g.mws}}[g.rng.IntN(6)]
		g.command(destroy.op, encode(abi.SizeHandle, &abi.Handle{Handle: g.any(destroy.list)}), spoil)
	case 9:
		if qpn := g.any(g.qps); qpn != 0 {
			g.connect(qpn)
		}
	case 10: // any command
		g.command(abi.Opcode(g.rng.IntN(34)), g.noise(g.rng.IntN(256)), false)
	case 11:
		g.command(abi.CmdResizeCQ, g.noise(abi.SizeResizeCQ+8*g.rng.IntN(4)), false)
	case 12: // a virtqueue's descriptors
		desc, avail, _ := g.dev.Queue(g.rng.IntN(g.dev.NumQueues())).Rings()
		if b, err := g.mem.Bytes([]translate.PA{desc, avail}[g.rng.IntN(2)], 64); err == nil && g.rng.IntN(8) == 0 {
			b[g.rng.IntN(len(b))] = byte(g.rng.Uint32())
		}
	case 13:
		g.dev.Queue(g.rng.IntN(g.dev.NumQueues())).Notify()
	default:
		g.post()
	}
	return ctx.Err()
}

func (g *hostileGuest) noise(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		if g.rng.IntN(4) == 0 {
			b[i] = byte(g.rng.Uint32())
		}
	}
	return b
}

// post writes work requests, a producer index and doorbells.
func (g *hostileGuest) post() {
	b, err := g.mem.Bytes(g.rings[g.rng.IntN(len(g.rings))], 4096)
	if err != nil {
		return
	}
	target := g.s.pairs[g.rng.IntN(len(g.s.pairs))].known.Load()
	for at := abi.RingDataOff; at+512 <= len(b); at += 512 {
		w := b[at : at+512]
		clear(w)
		binary.LittleEndian.PutUint64(w[abi.SendWQEIDOff:], g.rng.Uint64())
		binary.LittleEndian.PutUint32(w[abi.SendWQEOpcodeOff:], uint32(g.rng.IntN(20)))
		binary.LittleEndian.PutUint32(w[abi.SendWQEFlagsOff:], uint32(g.rng.IntN(32)))
		binary.LittleEndian.PutUint64(w[abi.SendWQERemoteAddrOff:], target.addr)
		binary.LittleEndian.PutUint32(w[abi.SendWQERKeyOff:], target.rkey) // the innocent's
		binary.LittleEndian.PutUint32(w[abi.SendWQEDMALengthOff:], g.rng.Uint32()>>g.rng.IntN(32))
		binary.LittleEndian.PutUint32(w[abi.SendWQENumSGEOff:], uint32(g.rng.IntN(40)))
		for i := range 4 {
			sge := w[abi.SendWQESGEOff+abi.SizeSGE*i:]
			binary.LittleEndian.PutUint64(sge, 0x10000+uint64(g.rng.IntN(4*4096)))
			binary.LittleEndian.PutUint32(sge[8:], uint32(g.rng.IntN(4096)))
			binary.LittleEndian.PutUint32(sge[12:], g.any(g.keys))
		}
		for range g.rng.IntN(3) {
			w[g.rng.IntN(len(w))] ^= byte(1 << g.rng.IntN(8))
		}
	}
	binary.LittleEndian.PutUint32(b[abi.RingProducerOff:], uint32(g.rng.IntN(16)))
	if g.rng.IntN(8) == 0 {
		binary.LittleEndian.PutUint32(b[g.rng.IntN(abi.RingDataOff/4)*4:], g.rng.Uint32())
	}
	if db, err := g.mem.Bytes(g.doorbells[g.rng.IntN(len(g.doorbells))], 4096); err == nil {
		for range 8 {
			db[g.rng.IntN(256)] |= byte(1 << g.rng.IntN(8))
		}
	}
	n := g.dev.NumQueues()
	for e := range int(g.conf.NumEngines) {
		g.dev.Queue(n - 1 - e).Notify()
	}
}
