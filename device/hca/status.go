package hca

import (
	"fmt"
	"net"
	"slices"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/device/roce"
)

// Status describes a device for people (`vnicd status`) and metrics.
type Status struct {
	Name      string            `json:"name"`
	MAC       string            `json:"mac"`
	Connected bool              `json:"connected"`
	Up        bool              `json:"up"`
	Link      bool              `json:"link"`
	Failed    bool              `json:"failed,omitempty"` // the guest's memory vanished
	PortMTU   int               `json:"port_mtu"`
	GIDs      []string          `json:"gids,omitempty"`
	PDs       int               `json:"pds"`
	CQs       int               `json:"cqs"`
	SRQs      int               `json:"srqs"`
	MRs       int               `json:"mrs"`
	MTTs      uint64            `json:"mtt_entries"`
	QPs       []QPStatus        `json:"qps,omitempty"`
	Stats     map[string]uint64 `json:"stats"`
}

// QPStatus describes a queue pair.
type QPStatus struct {
	QPN    uint32 `json:"qpn"`
	Type   string `json:"type"`
	State  string `json:"state"`
	Engine int    `json:"engine"`
	Dest   uint32 `json:"dest_qpn,omitempty"`
	Path   string `json:"path,omitempty"` // remote GID
}

// Stats returns the counters, over all QPs since the device was made. It visits
// the loops; any goroutine but theirs.
func (d *Device) Stats() abi.Stats { return d.stats() }

func (d *Device) stats() (s abi.Stats) {
	for _, l := range d.lanes {
		l.loop.Do(func() { l.statistics(&s) })
	}
	return s
}

// Describe gathers the device's status. It waits for a command in progress and
// visits the loops; any goroutine but theirs.
func (d *Device) Describe() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := &d.tables
	s := Status{
		Name: d.cfg.Name, MAC: net.HardwareAddr(d.cfg.MAC[:]).String(), Connected: t.conn != nil, Up: d.up.Load(),
		Link: d.link.Load(), Failed: d.broken.Load(), PortMTU: d.portMTU(), PDs: len(t.pds), CQs: len(t.cqs),
		SRQs: len(t.srqs), MRs: len(t.mrs), Stats: map[string]uint64{},
	}
	if t.vm != nil {
		_, s.MTTs = t.vm.Usage()
	}
	for i, g := range d.gids.snap.Load().all {
		if g.set {
			v := "v2"
			if g.v1 {
				v = "v1"
			}
			s.GIDs = append(s.GIDs, fmt.Sprintf("%d: %s RoCE %s", i, net.IP(g.addr[:]), v))
		}
	}
	for _, l := range d.lanes {
		l.loop.Do(func() {
			for _, q := range t.qpList {
				if q.lane != l {
					continue
				}
				var a roce.Attr
				q.t.Query(&a)
				x := QPStatus{QPN: q.n, Type: q.typ.String(), State: a.State.String(), Engine: l.id, Dest: a.DestQPN}
				if a.AV.DGID != [16]byte{} {
					x.Path = net.IP(a.AV.DGID[:]).String()
				}
				s.QPs = append(s.QPs, x)
			}
		})
	}
	slices.SortFunc(s.QPs, func(a, b QPStatus) int { return int(a.QPN) - int(b.QPN) })
	st := d.stats()
	for i, v := range st.Value {
		s.Stats[abi.Stat(i).String()] = v
	}
	return s
}
