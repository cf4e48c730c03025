package daemon

import (
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// Load is a VM's activity between two snapshots. Directions are from the VM's point of view.
type Load struct {
	VM *VMStatus // in the later snapshot

	RDMAInBytes, RDMAOutBytes     uint64 // copies between VMs of this host included
	RDMAInPackets, RDMAOutPackets uint64 // copies counted as the packets they replace
	Messages                      uint64 // of the copies
	EthInBytes, EthOutBytes       uint64 // at the VM's port
	EthInFrames, EthOutFrames     uint64
	GuestFaults, HostFaults       uint64
	Resent                        uint64 // packets
	Timeouts                      uint64
	Drops                         map[string]uint64 // frames at its port, by reason
	Refused                       map[string]uint64 // RoCE packets that its HCA refused, by reason
}

// Dropped is the sum of Drops and Refused.
func (l *Load) Dropped() uint64 { return sum(l.Drops) + sum(l.Refused) }

func sum(m map[string]uint64) (n uint64) {
	for _, v := range m {
		n += v
	}
	return n
}

// Since is the increase of a counter; a counter that restarted counts from 0.
func Since(before, now uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}

// SinceEach is Since for each reason, without unchanged ones.
func SinceEach(before, now map[string]uint64) map[string]uint64 {
	out := map[string]uint64{}
	for reason, n := range now {
		if n := Since(before[reason], n); n > 0 {
			out[reason] = n
		}
	}
	return out
}

// Loads compares two snapshots for each VM of the later one. A new VM counts from 0.
func Loads(before, now *Status) []Load {
	ports := func(s *Status) map[string]*vswitch.Totals {
		m := map[string]*vswitch.Totals{}
		for i := range s.Networks {
			for j := range s.Networks[i].Ports {
				if p := &s.Networks[i].Ports[j]; p.Kind == "vm" {
					m[p.Name] = &p.Totals
				}
			}
		}
		return m
	}
	old := map[string]*VMStatus{}
	for i := range before.VMs {
		old[before.VMs[i].Name] = &before.VMs[i]
	}
	was, is := ports(before), ports(now)
	out := make([]Load, 0, len(now.VMs))
	for i := range now.VMs {
		v := &now.VMs[i]
		o, a, b := old[v.Name], was[v.Name], is[v.Name]
		if o == nil {
			o = &VMStatus{}
		}
		if a == nil {
			a = &vswitch.Totals{}
		}
		if b == nil {
			b = &vswitch.Totals{}
		}
		stat := func(name string) uint64 { return Since(o.HCA.Stats[name], v.HCA.Stats[name]) }
		out = append(out, Load{
			VM:          v,
			RDMAInBytes: stat("rx_bytes"), RDMAOutBytes: stat("tx_bytes"), RDMAInPackets: stat("rx_packets"),
			RDMAOutPackets: stat("tx_packets"), Messages: stat("local_messages"),
			EthInBytes: Since(a.OutBytes, b.OutBytes), EthOutBytes: Since(a.InBytes, b.InBytes),
			EthInFrames: Since(a.OutFrames, b.OutFrames), EthOutFrames: Since(a.InFrames, b.InFrames),
			GuestFaults: stat("guest_faults"), HostFaults: Since(o.Memory.HostFaults, v.Memory.HostFaults),
			Resent: stat("retransmits"), Timeouts: stat("timeouts"),
			Drops: SinceEach(a.Drops, b.Drops), Refused: SinceEach(o.HCA.Drops, v.HCA.Drops),
		})
	}
	return out
}
