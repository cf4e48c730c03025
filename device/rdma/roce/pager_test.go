package roce

import (
	"math/rand"

	"github.com/vnicd/vnicd/translate"
)

// pager plays a node's guest driver and host driver: pages are present, or absent in the guest, on the host, or both,
// and may be evicted at any time. It checks what the transport requests.
type pager struct {
	service func() int64                // service time of a fault, ns; negative: it is never answered. nil: 200 us
	refuse  func(m translate.Miss) bool // the address is invalid
	delay   int64                       // FaultDelay; 0: 200 us; -1: not known

	rng    *rand.Rand // nil: every page is present
	pages  map[pageID]absence
	gone   float64 // probability that a page is absent at first, for each stage
	evict  float64 // probability that an access evicts its page
	raised [2]int
	served int
	failed int
	asked  []translate.Miss
	missed map[missed]bool  // accesses that missed
	idle   bool             // brings in nothing
	whole  bool             // always bring in all requested pages
	open   [2]func(ok bool) // unanswered faults, by side
	busy   [2]bool
}

const pageBytes = 1024

type pageID struct {
	key  translate.Key
	page uint64
}

type absence uint8

const (
	guestAbsent absence = 1 << iota
	hostAbsent
)

// missed is an access of some kind to an absent byte.
type missed struct {
	key  translate.Key
	va   translate.VA
	need translate.Access
}

// paging makes n's pages come and go.
func (n *node) paging(seed int64, gone, evict float64) {
	n.rng, n.pages, n.gone, n.evict = rand.New(rand.NewSource(seed)), map[pageID]absence{}, gone, evict
	n.missed = map[missed]bool{}
}

func (p *pager) page(id pageID) absence {
	a, ok := p.pages[id]
	if !ok {
		for _, bit := range []absence{guestAbsent, hostAbsent} {
			if p.rng.Float64() < p.gone {
				a |= bit
			}
		}
		p.pages[id] = a
	}
	return a
}

// touch translates an access that is within its region and has the rights.
func (n *node) touch(key translate.Key, va, k uint64, need translate.Access) translate.Miss {
	if n.rng == nil || k == 0 {
		return translate.Miss{}
	}
	for at := va; at < va+k; at = (at/pageBytes + 1) * pageBytes {
		a := n.page(pageID{key, at / pageBytes})
		m := translate.Miss{Key: key, Where: translate.Where{VA: translate.VA(at)}, Len: k}
		if a != 0 {
			n.missed[missed{key, m.VA, need}] = true
		}
		switch {
		case a&guestAbsent != 0:
			m.Kind = translate.GuestFault
			return m
		case a&hostAbsent != 0:
			m.Kind = translate.HostFault
			m.PA = translate.PA(at ^ 0xff000)
			return m
		}
	}
	if n.rng.Float64() < n.evict {
		r := n.regions[key]
		id := pageID{key, (r.va + uint64(n.rng.Int63n(int64(len(r.buf))))) / pageBytes}
		n.pages[id] |= absence(1 + n.rng.Intn(3))
	}
	return translate.Miss{}
}

// Keep implements Adapter; it keeps nothing.
func (n *node) Keep() bool { return false }

// Fault implements Adapter.
func (n *node) Fault(side Side, m translate.Miss, need translate.Access) {
	if !n.inCall {
		n.f.t.Fatalf("%s: Fault called outside", n.name)
	}
	if !m.Fault() || m.Len == 0 || m.Len > maxFault {
		n.f.t.Fatalf("%s: fault for %+v", n.name, m)
	}
	// A wait whose fault was not answered for long raises it again, also while another wait of its side has one
	// outstanding.
	w, queue := n.q.Waits(side)
	if again := side == Responder && sameWhere(&n.q.faults.read.miss, &m); !again && (queue || !w.Fault()) {
		n.f.t.Fatalf("%s: fault for %+v, but it waits for %+v (queue: %v)", n.name, m, w, queue)
	}
	if n.rng != nil && m.Key != 0 {
		if _, ok := n.regions[m.Key].at(uint64(m.VA), m.Len); !ok {
			n.f.t.Fatalf("%s: fault for %+v: beyond the region", n.name, m)
		}
		if !n.missed[missed{m.Key, m.VA, need}] {
			n.f.t.Fatalf("%s: fault for %+v with rights %#x, which no access needed", n.name, m, need)
		}
	}
	n.asked = append(n.asked, m)
	n.raise(side, m)
}

func sameWhere(a, b *translate.Miss) bool {
	return a.Kind == b.Kind && a.Key == b.Key && a.Where == b.Where
}

// raise handles faults, also of work queues.
func (n *node) raise(side Side, m translate.Miss) {
	if n.busy[side] {
		return
	}
	n.busy[side] = true
	n.raised[side]++
	d := int64(200e3)
	if n.service != nil {
		d = n.service()
	}
	q := n.q
	done := func(ok bool) {
		if n.q != q { // moved meanwhile: the new process does not know the fault
			n.pageIn(m)
			return
		}
		n.busy[side], n.open[side] = false, nil
		if ok {
			n.served++
			n.pageIn(m)
		} else {
			n.failed++
		}
		leave := n.enter()
		n.q.Resume(n.f.now, side, ok)
		leave()
	}
	if d < 0 {
		n.open[side] = done
		return
	}
	ok := n.refuse == nil || !n.refuse(m)
	if ok && n.rng != nil && n.rng.Intn(2) == 0 { // the answer comes later than the page
		n.f.after(d-d*n.rng.Int63n(8)/8, func() { n.pageIn(m) })
	}
	n.f.after(d, func() { done(ok) })
}

// pageIn brings in the requested pages, sometimes fewer, sometimes none.
func (n *node) pageIn(m translate.Miss) {
	if n.rng == nil || m.Key == 0 || n.idle {
		return
	}
	end := uint64(m.VA) + m.Len
	if !n.whole {
		switch n.rng.Intn(8) {
		case 0:
			return
		case 1:
			end = uint64(m.VA) + 1
		}
	}
	bit := guestAbsent
	if m.Kind == translate.HostFault {
		bit = hostAbsent
	}
	for at := uint64(m.VA); at < end; at = (at/pageBytes + 1) * pageBytes {
		id := pageID{m.Key, at / pageBytes}
		n.pages[id] = n.page(id) &^ bit
	}
}

// FaultDelay implements Adapter.
func (n *node) FaultDelay() int64 {
	switch {
	case n.delay > 0:
		return n.delay
	case n.delay < 0:
		return 0
	}
	return 200e3
}
