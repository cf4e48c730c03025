package vnet

import (
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// maxMerge bounds the guest buffers of one frame: 64 KiB in buffers for one Ethernet frame each, Linux's initial size,
// take 43.
const maxMerge = 64

const (
	// frameWalk bounds the descriptors of the buffers for one frame. Stock drivers need few: one for each of up to 43
	// buffers with MRG_RXBUF, else up to 48 for 64 KiB (Linux with MAX_SKB_FRAGS 45, and an indirect table's own).
	frameWalk = 4 * maxMerge
	// passWalk bounds the descriptors that one iteration of the loop reads for a pair: QEMU's largest ring has 1024.
	passWalk = 4096
)

// receive copies a frame into the guest's buffers, on the pair's loop. The caller still owns the frame.
func (p *pair) receive(b *frame.Buf) {
	q := p.rx
	if q == nil || q.Broken() != nil {
		p.d.drop(p.loop, vswitch.NotReady)
		return
	}
	if p.rxWait.waiting {
		p.hold(b)
		return
	}
	if !p.deliver(q, b) {
		p.hold(b)
	}
}

// deliver calls put with the declarations for an access to guest memory.
func (p *pair) deliver(q *virtq.Queue, b *frame.Buf) (done bool) {
	// The caller may be another VM's transmit: if this guest's memory has vanished, this device must stop.
	prev, other := p.loop.Blame(p.d.owner), p.loop.Charge(&p.d.meter)
	p.enterRx(q)
	done = p.put(q, b)
	p.loop.Charge(other)
	p.loop.Blame(prev)
	return done
}

// put writes a frame to the guest, or drops and counts it. False: the queue waits for an absent page; try the frame
// again later.
func (p *pair) put(q *virtq.Queue, b *frame.Buf) (done bool) {
	if b.Offload.Need&^p.rxTakes != 0 {
		// It was under way when a driver with fewer features took over.
		p.d.drop(p.loop, vswitch.NotReady)
		return true
	}
	frame := b.Bytes()
	n, done := p.gather(q, uint64(len(frame))+headerLen)
	if n == 0 {
		return done
	}
	// Without MRG_RXBUF num_buffers is 1 (5.1.6.4.1), and so is n.
	gso.PutHeader(&p.header, b, p.rxTakes != 0, n)
	// Write everything before the first push: the guest gets a frame whole or not at all.
	if all := headerLen + len(frame); n == 1 {
		if dst := p.rxc[0].Piece(all); dst != nil { // the usual case
			*(*[headerLen]byte)(dst) = p.header
			copy(dst[headerLen:], frame)
			p.push(q, 0, uint32(all))
			return true
		}
	}
	var written [maxMerge]uint32
	for i := range n {
		c := &p.rxc[i]
		off := uint64(0)
		if i == 0 {
			if _, m := c.WriteAt(p.header[:], 0); !m.OK() {
				return p.missed(q, m, n)
			}
			off = headerLen
		}
		part := frame
		if room := c.WritableLen() - off; uint64(len(part)) > room {
			part = part[:room]
		}
		if _, m := c.WriteAt(part, off); !m.OK() {
			return p.missed(q, m, n)
		}
		frame = frame[len(part):]
		written[i] = uint32(off) + uint32(len(part))
	}
	for i := range n {
		if !p.push(q, i, written[i]) {
			break
		}
	}
	return true
}

// push returns the filled buffer i.
func (p *pair) push(q *virtq.Queue, i int, written uint32) bool {
	if err := q.Push(&p.rxc[i], written); err != nil {
		p.broke(q, err)
		return false
	}
	p.rxDirty = true
	return true
}

// gather pops buffers for n bytes into rxc. None: there are too few, which are given back, and the frame is dropped and
// counted; or, if done is false, one is absent, and the queue waits.
//
// The loop does this while it serves the frame's sender, so what the guest can make it cost is bounded, for a frame and
// for an iteration: descriptors beyond what the frame needs are not read, and a frame whose buffers have too many is
// dropped.
func (p *pair) gather(q *virtq.Queue, n uint64) (bufs int, done bool) {
	begin := q.Walked()
	bufs, done = p.gatherPart(q, n, min(frameWalk, passWalk-p.rxWalked))
	p.rxWalked += int(q.Walked() - begin)
	return bufs, done
}

// gatherPart is gather for at most most descriptors.
func (p *pair) gatherPart(q *virtq.Queue, n uint64, most int) (bufs int, done bool) {
	var room uint64
	end := q.Walked() + uint64(max(most, 0))
	limit := 1
	if p.mergeable {
		limit = maxMerge
	}
	for room < n {
		if bufs == limit {
			p.giveBack(q, bufs, vswitch.Truncated)
			return 0, true
		}
		if q.Walked() >= end {
			p.giveBack(q, bufs, vswitch.LongChain)
			return 0, true
		}
		c := &p.rxc[bufs]
		got, err := q.PopPart(c, max(n-room, headerLen), int(end-q.Walked()))
		if err != nil {
			if m := virtq.Absent(err); m.Fault() {
				p.unget(q, bufs)
				p.rxWait.raise(q.Space(), m, true)
				return 0, false
			}
			p.giveBack(q, bufs, vswitch.NoBuffer)
			p.broke(q, err)
			return 0, true
		}
		if !got {
			p.giveBack(q, bufs, vswitch.QueueFull)
			return 0, true
		}
		bufs++
		if c.Cut() {
			p.giveBack(q, bufs, vswitch.LongChain)
			return 0, true
		}
		// 5.1.6.3.1: at least a header must fit, otherwise no frame ever would.
		if c.WritableLen() < headerLen || c.ReadableLen() != 0 {
			p.giveBack(q, bufs, vswitch.NoBuffer)
			p.broke(q, &BufferError{Queue: q.Index(), Readable: c.ReadableLen(), Writable: c.WritableLen()})
			return 0, true
		}
		room += c.WritableLen()
	}
	return bufs, true
}

// missed gives all popped buffers back because one cannot be written: either it is absent, then the queue waits and
// done is false; or the VM's attribute forbids the write (PF-3), then the frame is dropped; or it is not the guest's
// memory, which breaks the queue.
func (p *pair) missed(q *virtq.Queue, m translate.Miss, popped int) (done bool) {
	if m.Fault() {
		p.unget(q, popped)
		p.rxWait.raise(q.Space(), m, true)
		return false
	}
	if m.Kind == translate.Blocked {
		p.giveBack(q, popped, vswitch.Forbidden)
		return true
	}
	p.giveBack(q, popped, vswitch.Unreachable)
	p.broke(q, m.Err())
	return true
}

func (p *pair) giveBack(q *virtq.Queue, n int, why vswitch.Reason) {
	p.d.drop(p.loop, why)
	p.unget(q, n)
}

// unget gives back the first n of rxc, which are all popped chains.
func (p *pair) unget(q *virtq.Queue, n int) {
	if n > 0 {
		p.unpop(q, &p.rxc[0])
	}
}

// unpop gives back c and the chains popped after it.
func (p *pair) unpop(q *virtq.Queue, c *virtq.Chain) {
	if err := q.Unpop(c); err != nil {
		p.broke(q, err)
	}
}

// flowHash spreads flows over pairs so that each flow stays in order: by addresses and ports of IPv4 and IPv6, and by
// MAC addresses of other frames.
func flowHash(f []byte, at *header.Layout) uint32 {
	const (
		basis = 2166136261 // FNV-1a
		prime = 16777619
	)
	lo, hi := 0, min(12, len(f))
	if at.L4 != 0 {
		lo, hi = int(at.L3)+12, int(at.L3)+header.IPv4Len
		if at.Is(header.IsIPv6) {
			lo, hi = int(at.L3)+8, int(at.L3)+header.IPv6Len
		}
		// Ports only of packets that are not fragments, and where they follow the addresses.
		ports := at.Proto == header.ProtoTCP || at.Proto == header.ProtoUDP
		if ports && int(at.L4) == hi && !at.Is(header.IsFragment) && len(f) >= hi+4 {
			hi += 4
		}
	}
	h := uint32(basis)
	for _, c := range f[lo:hi] {
		h = (h ^ uint32(c)) * prime
	}
	return h
}
