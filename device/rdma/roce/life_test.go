package roce

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// forget empties the queues, as an adapter does when its QP goes to RESET.
func (n *node) forget() {
	n.sq, n.rq, n.rqNext, n.sends, n.recvs, n.events = nil, nil, 0, nil, nil, nil
	n.seen, n.bad = map[uint32]bool{}, map[uint32]Status{}
}

// runLife takes two QPs through any states: every transition, requests of any kind posted in all states, loss and
// absent pages. In the error state all posted requests complete, each once and in order.
func runLife(t *testing.T, data []byte) {
	h := &hostile{in: data}
	o := opts()
	o.typ = [...]Type{RC, UC, UD}[int(h.byte())%3]
	o.srq, o.outstanding = h.byte()&1 != 0, int(h.byte()%4)*2
	f := newFabric(t, int64(h.byte()))
	f.local = localMode(h.byte() % 3)
	cfg := Config{Type: o.typ, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64, MaxOutstanding: o.outstanding,
		HasSRQ: o.srq, MaxRdAtomic: 16, ECN: true}
	ends := [2]*node{}
	for i := range ends {
		cfg.QPN, cfg.SelectiveRepeat = uint32(0x11*(i+1)), h.byte()&7 != 0
		ends[i] = f.node(string(rune('a'+i)), cfg)
		ends[i].reg(1, 0, 4096, allAccess)
		if h.byte()&3 == 0 {
			ends[i].paging(int64(h.byte()), 0.2, 0.05)
		}
	}
	segments := func() (sg []SGE) {
		for range h.byte() % 4 {
			sg = append(sg, sge(1, uint64(h.byte())*4, [...]int{0, 8, 200, 3000}[h.byte()%4]))
		}
		return sg
	}
	for steps := 0; len(h.in) > 0 && steps < 400; steps++ {
		i := int(h.byte()) % 2
		n, peer := ends[i], ends[1-i]
		switch h.byte() % 8 {
		case 0, 1: // one step towards RTS, or to any other state
			to := min(n.q.State()+1, RTS)
			if h.byte()&1 != 0 {
				to = State(h.byte() % uint8(Err+1))
			}
			a := Attr{State: to, Port: 1, Access: o.access, AV: [...]AddressVector{o.avA, o.avB}[i],
				PathMTU: uint8(h.some(1, 3, 5)), DestQPN: peer.q.QPN(), QKey: 7,
				MaxDestRdAtomic: uint8(h.some(0, 1, 4)), MaxRdAtomic: uint8(h.some(0, 1, 4)), MinRNRTimer: 1,
				Timeout: uint8(h.some(0, 8, 14)), RetryCnt: h.byte() & 7,
				RNRRetry: h.byte() & 7, SQDNotify: h.byte()&1 != 0}
			var m Mask
			switch to {
			case Init:
				m = maskInitRC
				if o.typ == UD {
					m = maskInitUD
				}
			case RTR:
				m = map[Type]Mask{RC: maskRTRRC, UC: maskRTRUC, UD: MaskState}[o.typ]
			case RTS:
				if m = map[Type]Mask{RC: maskRTSRC, UC: maskRTSUC, UD: maskRTSUC}[o.typ]; n.q.State() != RTR {
					m = MaskState
				}
			default:
				m = MaskState
			}
			leave := n.enter()
			err := n.q.Modify(f.now, &a, m)
			leave()
			if err == nil && to == Reset {
				n.forget()
			}
		case 2, 3:
			w := WQE{Opcode: WROpcode(h.byte() % 20), RKey: 1, RemoteVA: 0, SGEs: segments(), Fence: h.byte()&7 == 0,
				Solicited: h.byte()&7 == 0,
				AV:        [...]AddressVector{o.avA, o.avB}[i], RemoteQPN: peer.q.QPN(), QKey: 7}
			if h.byte()&7 == 0 {
				w.SGEs, w.Inline, w.InlineData = nil, true, make([]byte, h.byte()%64)
			}
			n.post(w)
		case 4:
			n.postRecv(segments()...)
			n.run = true
		case 5:
			lost := int(h.byte()) % 4
			f.loss = func(*wire.RoCE) bool { return lost == 1 && f.rng.Intn(4) == 0 || lost == 2 }
		default:
			for range h.byte() {
				if !f.step() {
					break
				}
			}
		}
	}
	f.loss = nil
	for _, n := range ends {
		if n.q.State() != Err {
			leave := n.enter()
			err := n.q.Modify(f.now, &Attr{State: Err}, MaskState)
			leave()
			if err != nil {
				t.Fatal(err)
			}
		}
		n.rng = nil // all pages are present
		n.run = true
	}
	f.settle(10e9)
	if n := f.held.InUse(); n != 0 {
		t.Errorf("%d frames are held", n)
	}
	for _, n := range ends {
		if len(n.sends) != len(n.sq) || n.q.req.head != n.q.req.tail {
			t.Errorf("%s: %d of %d requests completed", n.name, len(n.sends), len(n.sq))
		}
		if !o.srq && n.rqNext != len(n.rq) || len(n.recvs) != n.rqNext {
			t.Errorf("%s: of %d receives %d were fetched and %d completed", n.name, len(n.rq), n.rqNext, len(n.recvs))
		}
	}
}

func FuzzLife(f *testing.F) { fuzzFrom(f, 600, runLife) }

// TestAnyLife runs fixed seeds, so that every test run covers it.
func TestAnyLife(t *testing.T) { runFixed(t, 3, 1500, runLife) }
