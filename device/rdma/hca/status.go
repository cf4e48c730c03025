// Side: control

package hca

import (
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// Status describes a device for `vnicd status` and metrics.
type Status struct {
	Name      string   `json:"name"`
	MAC       string   `json:"mac"`
	Connected bool     `json:"connected"`
	Up        bool     `json:"up"`
	Link      bool     `json:"link"`
	Paused    bool     `json:"paused,omitempty"`   // the VM is paused, or its driver has gone and left queue pairs
	Failed    bool     `json:"failed,omitempty"`   // the guest's memory vanished
	Busy      bool     `json:"busy,omitempty"`     // a command takes long; some fields are left out
	Journal   bool     `json:"journal"`            // the state survives a kill of this process
	Features  string   `json:"features,omitempty"` // accepted by the driver, those of virtio included
	PortMTU   int      `json:"port_mtu"`
	GIDs      []string `json:"gids,omitempty"`
	PDs       int      `json:"pds"`
	CQs       int      `json:"cqs"`
	SRQs      int      `json:"srqs"`
	MRs       int      `json:"mrs"`
	MTTs      uint64   `json:"mtt_entries"`
	// MTTsReclaimed counts the groups of up to 512 entries that were removed to make room since the front end connected.
	MTTsReclaimed uint64      `json:"mtt_groups_reclaimed,omitempty"`
	QPs           []QPStatus  `json:"qps,omitempty"`
	Faults        FaultStatus `json:"faults"`
	// HostMemory is what the objects above occupy in this process, and its limit.
	HostMemory translate.AccountStatus `json:"host_memory"`
	// EngineTime is how long engines worked for the device since it was made: an estimate, see loop.Meter.
	EngineTime time.Duration `json:"engine_time_ns"`
	// Stats are the driver's counters; local_messages and local_bytes (requests that were
	// copied to another VM's memory instead of sent as frames; they count as packets, too);
	// and of congestion control np_ecn_marked_roce_packets, np_cnp_sent, rp_cnp_handled.
	Stats map[string]uint64 `json:"stats"`
	// Drops counts rejected packets by reason (MT-6).
	Drops map[string]uint64 `json:"drops,omitempty"`
}

// FaultStatus describes page faults and the releases of guest memory. Fields that
// count since the front end connected are marked.
type FaultStatus struct {
	Parked        int           `json:"parked"` // sides of QPs that wait now
	Guest         FaultQueue    `json:"guest"`
	Host          FaultQueue    `json:"host"` // since connected; all waiters of this memory
	Invalidations uint64        `json:"invalidations"`
	EpochsFlipped uint64        `json:"epochs_flipped"`   // since connected
	Drains        uint64        `json:"drains"`           // since connected
	LongestDrain  time.Duration `json:"longest_drain_ns"` // since connected
	// GuestHeat counts faults of the guest level by the address of the page that the driver supplied.
	GuestHeat translate.HeatMap `json:"-"`
}

// FaultQueue describes the faults of one level (PF-7).
type FaultQueue struct {
	Raised   uint64        `json:"raised"`
	Resumed  uint64        `json:"resumed"`
	Failed   uint64        `json:"failed"`
	Waiting  uint64        `json:"waiting"`
	Sum      time.Duration `json:"sum_ns"`  // of the faults in Buckets
	Mean     time.Duration `json:"mean_ns"` // from raising to the answer
	Median   time.Duration `json:"median_ns"`
	P99      time.Duration `json:"p99_ns"`
	Max      time.Duration `json:"max_ns"`
	Estimate time.Duration `json:"estimate_ns"` // smoothed; RNR timers follow it (PF-8)
	// Buckets[0] counts faults that took less than 1 us, Buckets[i] those of
	// [2^(i-1), 2^i) us; trailing zeros are left out.
	Buckets []uint64 `json:"buckets,omitempty"`
}

func (q *FaultQueue) setTimes(h *translate.Histogram) {
	q.Sum, q.Mean, q.Median, q.P99, q.Max = h.Sum, h.Mean(), h.Quantile(0.5), h.Quantile(0.99), h.Max
	n := len(h.Buckets)
	for n > 0 && h.Buckets[n-1] == 0 {
		n--
	}
	q.Buckets = append(q.Buckets, h.Buckets[:n]...)
}

// QPStatus describes a queue pair.
type QPStatus struct {
	QPN    uint32 `json:"qpn"`
	Type   string `json:"type"`
	State  string `json:"state"`
	Engine int    `json:"engine"`
	Dest   uint32 `json:"dest_qpn,omitempty"`
	Path   string `json:"path,omitempty"` // remote GID
	SQPSN  uint32 `json:"sq_psn"`         // next to send
	RQPSN  uint32 `json:"rq_psn"`         // expected from the peer

	// What the QP has begun and not done: see roce.Progress.
	Requests  int    `json:"requests,omitempty"`
	Unacked   uint64 `json:"unacked,omitempty"`
	Responses int    `json:"responses,omitempty"`
	Unposted  int    `json:"unposted,omitempty"`  // completions that are not in their queue yet
	NotReady  bool   `json:"not_ready,omitempty"` // the peer's receiver
	Refused   bool   `json:"refused,omitempty"`   // requests of the peer
	// Waits describes the absent pages that the QP waits for.
	Waits []string `json:"waits,omitempty"`
}

// Stats returns the counters, over all QPs since the device was created. It visits
// the loops; call it from any other goroutine.
func (d *Device) Stats() abi.Stats { return d.stats((*engine).total) }

// stats returns the device's counters, with those of QPs that count returns.
func (d *Device) stats(count func(*engine) counters) (s abi.Stats) {
	for _, e := range d.data.engines {
		e.onLoop(func() {
			c := count(e)
			e.statistics(&c, &s)
		})
	}
	for i := range d.data.rejected {
		switch n := d.data.rejected[i].Load(); rejectReason(i) {
		case rejectICRC:
			s.Value[abi.StatICRCErrors] += n
		case rejectUnsent:
		default:
			s.Value[abi.StatRxDropped] += n
		}
	}
	s.Value[abi.StatRxDropped] += d.data.conns.dropped()
	s.Value[abi.StatHostFaults] += d.fetches.Load()
	s.Value[abi.StatInvalidations] = d.invalidations.Load()
	s.Value[abi.StatFaultsResumed] = d.faults.resumed.Load()
	s.Value[abi.StatFaultsFailed] = d.faults.failed.Load()
	return s
}

// describePatience is how long readers of the tables wait for a command in
// progress, which may wait for a busy loop or for a reset's release.
const describePatience = time.Second

// tryLockTables locks mu, unless a command holds it for longer than describePatience.
func (d *Device) tryLockTables() bool {
	for end := time.Now().Add(describePatience); !d.mu.TryLock(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// visitQPs is how many QPs eachQP visits at a time.
const visitQPs = 64

// eachQP calls f, which accesses no guest memory, for every QP, on its loop; under mu. Between batches the loop, which
// other VMs share, does its work.
func (d *Device) eachQP(f func(q *qp)) {
	of := map[*engine][]*qp{}
	for _, o := range d.tables.qpList {
		of[o.q.engine] = append(of[o.q.engine], o.q)
	}
	for e, qs := range of {
		for some := range slices.Chunk(qs, visitQPs) {
			e.onLoop(func() {
				for _, q := range some {
					f(q)
				}
			})
		}
	}
}

// Describe gathers the device's status. It visits the loops; call it from any other
// goroutine. Fields under mu are left out if a command in progress takes long, so that
// one VM's slow memory does not delay the status of the others.
func (d *Device) Describe() Status {
	st := d.Stats()
	s := Status{
		Name: d.cfg.Name, MAC: net.HardwareAddr(d.cfg.MAC[:]).String(), Connected: d.portListener.Load() != nil,
		Up: d.data.up.Load(), Link: d.data.link.Load(), Paused: d.data.paused.Load(), Failed: d.data.broken.Load(),
		Journal: d.data.journal.Load() != nil,
		PortMTU: d.data.portMTU(), Stats: map[string]uint64{}, HostMemory: d.account.Status(),
		EngineTime: d.data.meter.Time(),
	}
	if f := d.features.Load(); f != 0 {
		s.Features = fmt.Sprintf("%#x", f)
	}
	s.Drops = d.Drops()
	for i, v := range st.Value {
		s.Stats[abi.Stat(i).String()] = v
	}
	for _, e := range d.data.engines {
		e.onLoop(func() {
			c := e.total()
			s.Stats["local_messages"] += c.LocalMessages
			s.Stats["local_bytes"] += c.LocalBytes
			s.Stats["np_ecn_marked_roce_packets"] += c.ECNMarked
			s.Stats["np_cnp_sent"] += c.TxCNP
			s.Stats["rp_cnp_handled"] += c.RxCNP
			s.Stats["kept_packets"] += c.Kept
			s.Stats["selective_acks_sent"] += c.TxSelectiveAcks
			s.Stats["selective_acks_received"] += c.RxSelectiveAcks
		})
	}
	for i, g := range d.data.gids.snap.Load().all {
		if g.set {
			v := "v2"
			if g.v1 {
				v = "v1"
			}
			s.GIDs = append(s.GIDs, fmt.Sprintf("%d: %s RoCE %s", i, net.IP(g.addr[:]), v))
		}
	}
	if s.Busy = !d.tryLockTables(); s.Busy {
		return s
	}
	defer d.mu.Unlock()
	t := &d.tables
	t.reap(d.account)
	d.chargeJournal()
	s.HostMemory = d.account.Status()
	s.PDs, s.CQs, s.SRQs, s.MRs = len(t.pds), len(t.cqs), len(t.srqs), len(t.mrs)
	if t.vm != nil {
		_, s.MTTs = t.vm.Usage()
		s.MTTsReclaimed = t.vm.Reclaimed()
	}
	d.eachQP(func(q *qp) {
		var a roce.Attr
		q.t.Query(&a)
		p := q.t.Progress()
		x := QPStatus{QPN: q.n, Type: q.typ.String(), State: a.State.String(), Engine: q.engine.id, Dest: a.DestQPN,
			SQPSN: a.SQPSN, RQPSN: a.RQPSN, Requests: p.Requests, Unacked: p.Unacked, Responses: p.Responses,
			Unposted: len(q.unpostedCQEs), NotReady: p.NotReady, Refused: p.Refused}
		if a.AV.DGID != [16]byte{} {
			x.Path = net.IP(a.AV.DGID[:]).String()
		}
		for i := range q.waiters {
			if m := q.waiters[i].waits(); !m.OK() {
				x.Waits = append(x.Waits, fmt.Sprintf("%s: %v", [...]string{"requester", "responder"}[i], m.Err()))
			}
		}
		s.QPs = append(s.QPs, x)
	})
	slices.SortFunc(s.QPs, func(a, b QPStatus) int { return int(a.QPN) - int(b.QPN) })
	s.Faults = d.faultStatus(&st)
	for _, q := range s.QPs {
		s.Faults.Parked += len(q.Waits)
	}
	return s
}

// faultStatus is called under mu.
func (d *Device) faultStatus(st *abi.Stats) FaultStatus {
	f := FaultStatus{Invalidations: d.invalidations.Load(), GuestHeat: d.faults.heat}
	g := &f.Guest
	g.Raised, g.Resumed, g.Failed = st.Value[abi.StatGuestFaults], d.faults.resumed.Load(), d.faults.failed.Load()
	for _, o := range d.tables.qpList {
		for i := range o.q.waiters {
			if s := o.q.waiters[i].guest.state.Load() & faultStateMask; s == faultRaised || s == faultPosted {
				g.Waiting++
			}
		}
	}
	g.Estimate = time.Duration(d.data.faultDelay.Load())
	g.setTimes(&d.faults.times)
	if conn := d.tables.conn; conn != nil {
		space := conn.Space()
		q := space.Faults()
		h := q.Stats()
		f.Host = FaultQueue{Raised: h.Raised, Resumed: h.Served, Failed: h.Failed, Waiting: h.Waiting, Estimate: q.Estimate()}
		f.Host.setTimes(&h.Time)
		e := space.Epochs().Stats()
		f.EpochsFlipped, f.Drains, f.LongestDrain = e.Flips, e.Drains, e.Longest
	}
	return f
}
