package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Selective repeat, the responder's part. A request that comes before its turn is kept, if its sender understands what is said
// about it, and executed when the gap before it has been filled: in order, as if it had just come. Nothing is placed out of order.
//
// What is said is a NAK for a sequence error with a map of what is there (wire.Arrivals), at once: whether a packet is late or lost
// is for its sender to judge, who knows the times. A sender that did not say in the very packet that it understands is answered as ever,
// so nothing has to be agreed on, and nothing can be left over when the peer becomes another.
//
// Packets wait for a gap to be filled, and for nothing else. Whatever else stops the responder (RNR, an absent page, an error) makes the
// sender go back and send all again, so they are given back.
const (
	aheadSpan = wire.ArrivalsSpan
	// aheadFor is how long the buffers of one QP are kept if nothing fills the gap, ns.
	aheadFor = 100e6
	// tellEvery is after how many packets that did not ask the map is told again.
	tellEvery = 8
)

type ahead struct {
	frames  []*frame.Buf  // ring, by PSN
	there   wire.Arrivals // from the expected PSN on; bit 0 only while what is there is being executed
	tell    bool          // the map is to be sent
	untold  uint8         // packets kept since
	untilAt int64         // they are given back; 0: there is nothing
}

// keepAhead takes p, which is ahead of the expected PSN. False: it is dropped, and the sender goes back.
func (q *QP) keepAhead(p *wire.RoCE, psn uint64) bool {
	h := &q.ahead
	if !p.BTH.Selective || q.cfg.GoBackN || q.nakSent || q.waits.request.cause != atNothing {
		return false
	}
	first, d := !h.there.Any(), psn-q.epsn
	switch {
	case h.there.Has(d):
		q.stats.Duplicates++
	default:
		var b *frame.Buf
		if d < aheadSpan {
			b = q.a.Hold()
		}
		if b == nil {
			if first {
				return false
			}
			q.stats.RxDropped++ // what is there already need not be sent again
			break
		}
		n := uint64(1)
		if p.Info.Op == wire.ReadRequest {
			n = packets(uint64(p.RETH().Length), q.mtu)
		}
		h.frames[psn%aheadSpan] = b
		h.there.Set(d, n)
		h.untold++
		q.stats.Kept++
	}
	if first {
		h.untilAt = q.now + aheadFor
	}
	if first || p.BTH.AckReq || h.untold >= tellEvery {
		h.tell = true
		q.wake()
	}
	return true
}

// passed notes that n PSNs from the expected one on are done with.
func (q *QP) passed(n uint64) {
	h := &q.ahead
	for psn := q.epsn; psn < q.epsn+min(n, aheadSpan); psn++ {
		q.release(psn)
	}
	h.there.Shift(n)
	h.untilAt = q.now + aheadFor
}

func (q *QP) release(psn uint64) {
	if b := q.ahead.frames[psn%aheadSpan]; b != nil {
		q.ahead.frames[psn%aheadSpan] = nil
		q.a.Release(b)
	}
}

// dropAhead gives everything back.
func (q *QP) dropAhead() {
	h := &q.ahead
	if h.there.Any() {
		for psn := range uint64(aheadSpan) {
			q.release(psn)
		}
	}
	*h = ahead{frames: h.frames}
}

// catchUp executes what was kept, as far as it has its turn now: at most aheadSpan packets.
func (q *QP) catchUp() {
	h := &q.ahead
	for h.there.Has(0) && q.waits.request.cause == atNothing {
		b, psn := h.frames[q.epsn%aheadSpan], q.epsn
		var p wire.RoCE
		if b == nil || wire.ParseRoCE(b.Bytes(), &p) != nil { // not what was announced: within a READ
			q.dropAhead()
			break
		}
		q.a.InHand(b)
		if q.request(&p); q.epsn == psn {
			break
		}
	}
	if q.a.InHand(nil); !h.there.Any() {
		h.tell, h.untold, h.untilAt = false, 0, 0
	}
}

// sendMap tells what is there, and what is not.
func (q *QP) sendMap() bool {
	h := &q.ahead
	t := bth{opcode: wire.OpRCSelectiveAck, qpn: q.attr.DestQPN, psn: q.epsn, selective: q.selective}
	buf, hdr, _ := q.frame(&q.tx, &t, wire.AETHLen+wire.ArrivalsLen, 0)
	if buf == nil {
		q.respStallAt = q.now + bufferDelay
		return false
	}
	a := wire.AETH{Syndrome: wire.NAKSequence, MSN: q.msn}
	there := h.there
	there[0] &^= 1
	there.Encode(hdr[a.Encode(hdr):])
	h.tell, h.untold = false, 0
	q.stats.TxMaps++
	q.send(&q.tx, buf)
	return true
}
