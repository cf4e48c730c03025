package vxlan

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/loop"
)

// refusals records the senders of refused datagrams, and the reasons (MT-6); counters have the numbers. It is bounded:
// a new sender replaces the one that was silent longest, so a flood from many addresses shows its latest ones.
type refusals struct {
	busy   atomic.Bool // guards the fields below; loops do not wait for it
	list   [refusedSlots]refusal
	logged int64
}

const (
	refusedSlots = 16
	refusedEvery = 10 * time.Second // between two log lines
)

type refusal struct {
	from  netip.Addr
	vni   uint32
	why   vswitch.Reason
	count uint64
	last  int64 // loop's clock
}

// Refused is a sender whose datagrams were dropped.
type Refused struct {
	From   netip.Addr    `json:"from"`
	VNI    uint32        `json:"vni"`
	Reason string        `json:"reason"`
	Count  uint64        `json:"count"`
	Ago    time.Duration `json:"ago"` // since the last one
}

// refuse records a datagram that is dropped because of its outer headers. The caller counts it afterwards, so that the
// list has what a counter shows.
func (vt *VTEP) refuse(l *loop.Loop, from netip.Addr, vni uint32, why vswitch.Reason) {
	r := &vt.refused
	if !r.busy.CompareAndSwap(false, true) {
		return
	}
	defer r.busy.Store(false)
	var slot *refusal
	for i := range r.list {
		x := &r.list[i]
		if x.count > 0 && x.from == from && x.vni == vni && x.why == why {
			x.count++
			x.last = l.Now()
			return
		}
		if slot == nil || x.last < slot.last {
			slot = x
		}
	}
	*slot = refusal{from: from, vni: vni, why: why, count: 1, last: l.Now()}
	if r.logged != 0 && l.Now()-r.logged < int64(refusedEvery) {
		return
	}
	r.logged = l.Now()
	// logging may block
	go vt.log.Warn("datagrams from the underlay refused", "from", from, "vni", vni, "reason", why.String())
}

func (vt *VTEP) refusals() (out []Refused) {
	r := &vt.refused
	for !r.busy.CompareAndSwap(false, true) {
		time.Sleep(time.Microsecond)
	}
	list := r.list
	r.busy.Store(false)
	now := vt.cfg.Loops[0].Clock().Now()
	for _, x := range list {
		if x.count > 0 {
			out = append(out, Refused{From: x.from, VNI: x.vni, Reason: x.why.String(), Count: x.count,
				Ago: time.Duration(now - x.last).Round(time.Millisecond)})
		}
	}
	return out
}
