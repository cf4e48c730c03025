// Side: data

package hca

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// srq is a shared receive queue. All its QPs belong to one engine (see place),
// so it needs no lock.
type srq struct {
	dev    *dataSide
	n      uint32
	maxSGE int

	wr      workRing
	limit   uint32 // 0: disarmed (IBTA 10.2.9)
	scratch []byte

	failed  atomic.Bool
	touched bool // in engineJournal.srqs
	unshown bool // in engineJournal.shownSRQs
	asyn    eventNode
}

func newSRQ(d *dataSide, n uint32, maxSGE int, limit uint32, r ring) *srq {
	s := &srq{dev: d, n: n, maxSGE: maxSGE, limit: limit, wr: workRing{ring: r}}
	s.scratch = make([]byte, recvWQESize(maxSGE))
	s.asyn.init(n, nodeSRQ)
	return s
}

// fetch takes the next receive request. FetchFault comes with the miss that the QP
// has to wait for. later: see fetchRecv.
func (s *srq) fetch(w *roce.RecvWQE, later bool) (roce.Fetch, translate.Miss) {
	if s.failed.Load() {
		return roce.FetchEmpty, translate.Miss{}
	}
	if s.wr.have == 0 {
		n, m, err := s.wr.posted()
		switch {
		case m.Fault():
			return roce.FetchFault, m
		case !m.OK() || err != nil:
			return s.fail(m)
		case n == 0:
			return roce.FetchEmpty, m
		}
	}
	f, m := fetchRecv(&s.wr, s.scratch, s.maxSGE, w, later)
	switch {
	case m.Fault():
		return roce.FetchFault, m
	case !m.OK():
		return s.fail(m)
	}
	if s.limit != 0 {
		s.checkLimit()
	}
	return f, m
}

// checkLimit raises the limit event once when fewer than limit requests are left.
// If the producer index has just become absent, the last known count is used.
func (s *srq) checkLimit() {
	if s.wr.have >= s.limit {
		return
	}
	if n, m, err := s.wr.posted(); m.Fault() || m.OK() && err == nil && n < s.limit {
		s.limit = 0
		s.dev.async.post(&s.asyn, 1<<abi.EventSRQLimit)
	}
}

// fail stops the SRQ: its memory is gone or its indices are invalid.
func (s *srq) fail(m translate.Miss) (roce.Fetch, translate.Miss) {
	if !s.failed.Swap(true) {
		s.dev.warn("shared receive queue failed", "srq", s.n, "miss", m)
		s.dev.async.post(&s.asyn, 1<<abi.EventSRQErr)
	}
	return roce.FetchEmpty, translate.Miss{}
}

// resize moves the requests that are not consumed yet to a new ring. It runs where no
// QP consumes: on the loop of its QPs, or on the caller's goroutine if it has none.
func (s *srq) resize(r ring) error {
	prod, m := s.wr.index(abi.RingProducerOff)
	if !m.OK() {
		return &faultError{what: "the old ring", miss: m}
	}
	n := (prod - s.wr.next) & s.wr.mask
	if n > r.mask {
		return refuse(abi.StatusInvalid, "%d requests are posted, the new ring holds %d", n, r.mask)
	}
	tmp := make([]byte, recvWQESize(s.maxSGE))
	if _, m := s.wr.move(&r, s.wr.next, prod, tmp); !m.OK() {
		return &faultError{what: "moving requests to the new ring", miss: m}
	}
	s.wr = workRing{ring: r}
	return nil
}
