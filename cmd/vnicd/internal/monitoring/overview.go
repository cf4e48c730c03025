package monitoring

import (
	"cmp"
	"slices"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// overview is the answer to GET /v1/overview; README.md describes it.
type overview struct {
	Host    string  `json:"host"`
	Version string  `json:"version"`
	Uptime  float64 `json:"uptime_seconds"`
	At      int64   `json:"at_ms"` // when the snapshot was made, Unix time
	// age of the snapshot; more than a few seconds if the data path does not answer
	Age         int64               `json:"age_ms"`
	Buffers     daemon.BufferStatus `json:"buffers"`
	VTEP        *tunnels            `json:"vtep,omitempty"`
	Networks    []networkView       `json:"networks"`
	VMs         []vmView            `json:"vms"`
	Connections []connection        `json:"connections"`
	Problems    []Problem           `json:"problems"`
	Detail      *vmDetail           `json:"detail,omitempty"`
	Series      []string            `json:"series"`
	Samples     []sample            `json:"samples"`
}

type tunnels struct {
	Local  string `json:"local"`
	Port   uint16 `json:"port"`
	Device string `json:"device"`
}

type networkView struct {
	Name      string     `json:"name"`
	VNI       uint32     `json:"vni"`
	MTU       int        `json:"mtu"`
	Addresses int        `json:"addresses"`
	TAPs      []string   `json:"taps"`
	Peers     []peerView `json:"peers"`
}

type peerView struct {
	Addr   string `json:"addr"`
	Learnt bool   `json:"learnt,omitempty"`
}

type vmView struct {
	Name     string    `json:"name"`
	Network  string    `json:"network"`
	MAC      string    `json:"mac"`
	Net      string    `json:"net"` // down, attached, up, broken
	HCA      string    `json:"hca"`
	DMA      string    `json:"dma"` // rw, ro, blocked
	QPs      int       `json:"qps"`
	MRs      int       `json:"mrs"`
	Parked   int       `json:"parked"` // requesters and responders that wait for a page
	Budget   uint64    `json:"budget_bytes"`
	Resident uint64    `json:"resident_bytes"`
	Memory   uint64    `json:"memory_bytes"`
	Faults   [2]uint64 `json:"faults"` // guest level, host level; since the start
	// Strip is the number of faults by place, from the lowest to the highest address of its memory.
	Strip []uint64 `json:"strip"`
}

// vmDetail is sent for one VM only.
type vmDetail struct {
	Name  string            `json:"name"`
	Areas []hostdriver.Area `json:"areas"` // of its memory
	Guest levelView         `json:"guest"`
	Host  levelView         `json:"host"`
}

// levelView is one level of page faults.
type levelView struct {
	CellBytes uint64   `json:"cell_bytes"` // 0: no faults yet
	BasePA    uint64   `json:"base_pa"`    // address of the first cell
	Cells     []uint64 `json:"cells"`      // without empty cells at the end
	Waiting   uint64   `json:"waiting"`
	Count     uint64   `json:"count"` // of those in Buckets
	Median    int64    `json:"median_ns"`
	P99       int64    `json:"p99_ns"`
	Max       int64    `json:"max_ns"`
	Buckets   []uint64 `json:"buckets"` // [0]: below 1 us; [i]: 2^(i-1) to 2^i us
}

// connection counts the RDMA connections between a VM and one other place.
type connection struct {
	VM    string `json:"vm"`
	Kind  string `json:"kind"` // vm, vtep, tap; "": unknown
	To    string `json:"to"`   // VM, underlay address or port
	Count int    `json:"count"`
}

// maxConnections bounds the list.
const maxConnections = 2000

// group counts connections with the same ends, the most frequent first.
func group(all []daemon.VMConnection) []connection {
	counts := map[connection]int{}
	for _, c := range all {
		k := connection{VM: c.VM}
		if t := c.Tuple; t != nil {
			if k.Kind, k.To = t.Kind, t.Port; t.VTEP.IsValid() {
				k.To = t.VTEP.String()
			}
		}
		counts[k]++
	}
	out := make([]connection, 0, len(counts))
	for k, n := range counts {
		k.Count = n
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b connection) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.VM, b.VM), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.To, b.To))
	})
	return out[:min(len(out), maxConnections)]
}

// overview makes an answer: the samples after since, and the detail of the named VM.
func (v *view) overview(now time.Time, since uint64, vm string) *overview {
	s := v.status
	o := &overview{
		Host: s.Host, Version: s.Version, Uptime: s.Uptime, At: v.at.UnixMilli(), Age: max(now.Sub(v.at).Milliseconds(), 0),
		Buffers: s.Buffers, Networks: []networkView{}, VMs: []vmView{}, Connections: v.connections, Problems: v.problems,
		Samples: []sample{},
	}
	for i := range series {
		o.Series = append(o.Series, series[i].name)
	}
	peers := map[uint32][]peerView{}
	if t := s.VTEP; t != nil {
		o.VTEP = &tunnels{t.Local.String(), t.Port, t.Device}
		for _, n := range t.Networks {
			for _, p := range n.Peers {
				peers[n.VNI] = append(peers[n.VNI], peerView{p.Addr.String(), p.Learnt})
			}
		}
	}
	for i := range s.Networks {
		n := &s.Networks[i]
		x := networkView{Name: n.Name, VNI: n.VNI, MTU: n.MTU, Addresses: n.Entries, TAPs: []string{},
			Peers: append([]peerView{}, peers[n.VNI]...)}
		for _, p := range n.Ports {
			if p.Kind == "tap" {
				x.TAPs = append(x.TAPs, p.Name)
			}
		}
		o.Networks = append(o.Networks, x)
	}
	for i := range s.VMs {
		m := &s.VMs[i]
		o.VMs = append(o.VMs, newVMView(m))
		if m.Name == vm {
			o.Detail = newDetail(m)
		}
	}
	samples := v.history
	for len(samples) > 0 && samples[0].Seq <= since {
		samples = samples[1:]
	}
	most := max(answerCells/max(len(s.VMs), 1), 1)
	o.Samples = append(o.Samples, samples[max(0, len(samples)-most):]...)
	return o
}

func newVMView(m *daemon.VMStatus) vmView {
	x := vmView{
		Name: m.Name, Network: m.Network, MAC: m.MAC, Net: state(m.Net.Connected, m.Net.Up(), m.Net.Broken != ""),
		HCA: state(m.HCA.Connected, m.HCA.Up, m.HCA.Failed), DMA: m.DMA.Attribute.String(), QPs: len(m.HCA.QPs),
		MRs: m.HCA.MRs, Parked: m.HCA.Faults.Parked,
		Budget: m.Memory.Budget, Resident: m.Memory.Resident,
		Faults: [2]uint64{m.HCA.Stats["guest_faults"], m.Memory.HostFaults},
	}
	for _, a := range m.Memory.Areas {
		x.Memory += a.Size
	}
	x.Strip = strip(m)
	return x
}

func state(connected, up, broken bool) string {
	switch {
	case broken:
		return "broken"
	case up:
		return "up"
	case connected:
		return "attached"
	}
	return "down"
}

// stripCells is the length of a strip.
const stripCells = 32

// strip adds up both levels over the VM's memory, without holes. Faults outside of it, in memory that was unplugged
// since, are ignored.
func strip(m *daemon.VMStatus) []uint64 {
	both := m.Memory.Heat
	both.Merge(&m.HCA.Faults.GuestHeat)
	var total uint64
	for _, a := range m.Memory.Areas {
		total += a.Size
	}
	out := make([]uint64, stripCells)
	if total == 0 || both.CellSize() == 0 {
		return out
	}
	for i, n := range both.Cells {
		if n == 0 {
			continue
		}
		from, before := uint64(both.Base)+uint64(i)*both.CellSize(), uint64(0)
		for _, a := range m.Memory.Areas {
			// A cell that contains the beginning of an area counts there.
			if at := max(from, a.GuestPA); at < a.GuestPA+a.Size && at < from+both.CellSize() {
				out[int(float64(before+at-a.GuestPA)/float64(total)*stripCells)] += n
				break
			}
			before += a.Size
		}
	}
	return out
}

// newDetail returns nil while a command of the guest blocks the values it needs; the reader keeps the previous ones.
func newDetail(m *daemon.VMStatus) *vmDetail {
	if m.HCA.Busy {
		return nil
	}
	g, f := &m.HCA.Faults.Guest, &m.Memory.FaultTime
	d := &vmDetail{
		Name: m.Name, Areas: append([]hostdriver.Area{}, m.Memory.Areas...),
		Guest: levelView{Waiting: g.Waiting, Median: int64(g.Median), P99: int64(g.P99), Max: int64(g.Max),
			Buckets: append([]uint64{}, g.Buckets...)}, Host: levelView{Waiting: m.HCA.Faults.Host.Waiting,
			Median: int64(f.Quantile(0.5)), P99: int64(f.Quantile(0.99)), Max: int64(f.Max),
			Buckets: append([]uint64{}, withoutEnd(f.Buckets[:])...)},
	}
	d.Guest.heat(&m.HCA.Faults.GuestHeat)
	d.Host.heat(&m.Memory.Heat)
	return d
}

func (l *levelView) heat(h *translate.HeatMap) {
	l.CellBytes, l.BasePA, l.Cells = h.CellSize(), uint64(h.Base), append([]uint64{}, withoutEnd(h.Cells[:])...)
	for _, n := range l.Buckets {
		l.Count += n
	}
}

// withoutEnd removes zeros at the end.
func withoutEnd(n []uint64) []uint64 {
	for len(n) > 0 && n[len(n)-1] == 0 {
		n = n[:len(n)-1]
	}
	return n
}
