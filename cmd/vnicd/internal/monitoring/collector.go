package monitoring

import (
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/wireguard"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// collector makes metrics from a status, one snapshot per scrape.
type collector struct {
	status         func() *daemon.Status
	certificateEnd func() *time.Time
	faults         *faultTimes
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range families {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	e := emitter(ch)
	epoch := c.faults.begin()
	s := c.status()
	c.faults.add(epoch, s)
	e.allFaults(c.faults)
	e.put(buildInfo, 1, s.Version)
	e.put(uptime, s.Uptime)
	if at := c.certificateEnd(); at != nil {
		e.put(certificateEnd, float64(at.Unix()))
	}
	e.put(continued, float64(s.Continued.HCAs))
	e.put(silence, s.Continued.Silence)
	e.put(revived, float64(s.Continued.Revived))
	e.put(lost, float64(s.Continued.Lost))
	e.put(resuming, float64(s.Continued.Pending))
	if k := s.Keeper; k != nil {
		e.count(upgrades, uint64(k.Upgrades))
		e.count(notUpgraded, uint64(k.Failed))
	}
	for _, l := range s.Engines {
		id := strconv.Itoa(l.ID)
		e.count(engineRounds, l.Rounds, id)
		e.count(engineSleeps, l.Sleeps, id)
		e.count(engineFaults, l.Faults, id)
	}
	e.put(buffers, float64(s.Buffers.Count))
	e.put(buffersUsed, float64(s.Buffers.InUse))
	e.count(buffersExhausted, s.Buffers.Exhausted)
	e.vtep(s)
	e.protection(s.Protection)
	e.evpn(s.EVPN)
	e.hostMemory(s.Memory)
	for i := range s.Networks {
		e.network(&s.Networks[i])
	}
	for i := range s.VMs {
		e.vm(&s.VMs[i])
	}
}

type emitter chan<- prometheus.Metric

func (e emitter) put(m metric, v float64, labels ...string) {
	e <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
}

func (e emitter) count(m metric, v uint64, labels ...string) { e.put(m, float64(v), labels...) }

func (e emitter) time(m metric, d time.Duration, labels ...string) { e.put(m, d.Seconds(), labels...) }

func (e emitter) yes(m metric, v bool, labels ...string) {
	if v {
		e.put(m, 1, labels...)
	} else {
		e.put(m, 0, labels...)
	}
}

// reasons puts a value for each reason, and for any other that has occurred. The last label of m is the reason.
func (e emitter) reasons(m metric, all []string, counts map[string]uint64, labels ...string) {
	put := func(reason string) {
		e.count(m, counts[reason], append(labels[:len(labels):len(labels)], reason)...)
	}
	for _, r := range all {
		put(r)
	}
	for r := range counts {
		if !slices.Contains(all, r) {
			put(r)
		}
	}
}

func (e emitter) traffic(m *traffic, reasons []string, t *vswitch.Totals, labels ...string) {
	e.count(m.inFrames, t.InFrames, labels...)
	e.count(m.inBytes, t.InBytes, labels...)
	e.count(m.outFrames, t.OutFrames, labels...)
	e.count(m.outBytes, t.OutBytes, labels...)
	e.count(m.floods, t.Floods, labels...)
	e.count(m.pruned, t.Pruned, labels...)
	e.count(m.answered, t.Answered, labels...)
	e.reasons(m.drops, reasons, t.Drops, labels...)
}

func (e emitter) vtep(s *daemon.Status) {
	v := s.VTEP
	if v == nil {
		return
	}
	e.put(vtepInfo, 1, v.Local.String(), strconv.Itoa(int(v.Port)), v.Device)
	e.put(vtepMTU, float64(v.MTU))
	e.traffic(&vtepPort, vtepPort.drops.values["reason"], &v.Totals)
	e.put(shortEntries, float64(v.ShortPath.Entries))
	e.count(shortFrames, v.ShortPath.Frames)
	for _, n := range v.Networks {
		learnt := 0
		for _, p := range n.Peers {
			if p.Learnt {
				learnt++
			}
		}
		e.put(vtepPeers, float64(learnt), n.Name, "learnt")
		e.put(vtepPeers, float64(len(n.Peers)-learnt), n.Name, "static")
	}
}

func (e emitter) protection(s *wireguard.Status) {
	if s == nil {
		return
	}
	e.yes(protectionUp, s.Problem == "", s.Interface, strconv.Itoa(int(s.ListenPort)))
	e.put(protectionMTU, float64(s.MTU))
	e.count(protectionInErrors, s.InErrors)
	e.count(protectionOutErrors, s.OutErrors)
	for _, p := range s.Peers {
		at := 0.0
		if !p.Handshake.IsZero() {
			at = float64(p.Handshake.Unix())
		}
		e.put(protectionHandshake, at, p.VTEP.String())
		e.count(protectionIn, p.InBytes, p.VTEP.String())
		e.count(protectionOut, p.OutBytes, p.VTEP.String())
	}
}

func (e emitter) evpn(s *evpn.Status) {
	if s == nil {
		return
	}
	e.put(evpnInfo, 1, strconv.FormatUint(uint64(s.AS), 10), s.RouterID.String(), s.VTEP.String())
	for _, x := range s.Sessions {
		id := x.Neighbour.String()
		e.yes(evpnUp, !x.Since.IsZero(), id, strconv.FormatUint(uint64(x.AS), 10))
		since := 0.0
		if !x.Since.IsZero() {
			since = float64(x.Since.Unix())
		}
		e.put(evpnSince, since, id)
		e.count(evpnReceived, x.Received, id)
		e.put(evpnLimit, float64(x.MaxRoutes), id)
		e.count(evpnAdvertised, x.Advertised, id)
		e.count(evpnUpdates, x.Updates, id)
		e.count(evpnFlaps, uint64(x.Flaps), id)
	}
	e.reasons(evpnRefused, evpnRefused.values["reason"], s.Refused)
	for i := range s.Networks {
		n := &s.Networks[i]
		e.put(evpnVTEPs, float64(n.VTEPs), n.Network, strconv.FormatUint(uint64(n.VNI), 10))
		e.put(evpnAddresses, float64(n.MACs), n.Network, "mac")
		e.put(evpnAddresses, float64(n.IPs), n.Network, "ip")
		e.put(evpnMax, float64(n.MaxEntries), n.Network)
		e.put(evpnWaiting, float64(n.Waiting), n.Network)
		e.put(evpnOut, float64(n.Advertised), n.Network)
		e.put(evpnFrozen, float64(n.Frozen), n.Network)
		e.count(evpnDuplicates, n.Duplicates, n.Network)
	}
}

func (e emitter) hostMemory(m *hostdriver.HostStatus) {
	if m == nil {
		return
	}
	e.put(hostLevel, float64(slices.Index(hostdriver.Levels, m.Level)), m.Zone)
	e.count(hostTotal, m.Total)
	e.count(hostFree, m.Free)
	e.count(hostReserve, m.Reserve)
	e.count(hostSwap, m.Swap)
	e.put(hostStalled, m.Stalled)
	e.count(hostTarget, m.Target)
	e.count(hostShrinks, m.Shrinks)
	e.yes(hostFull, m.Full != "")
}

func (e emitter) network(n *vswitch.Status) {
	e.put(networkInfo, 1, n.Name, strconv.FormatUint(uint64(n.VNI), 10))
	e.put(networkMTU, float64(n.MTU), n.Name)
	e.put(networkAddresses, float64(n.Static), n.Name, "static")
	e.put(networkAddresses, float64(n.Entries-n.Static), n.Name, "learnt")
	e.count(networkMoves, n.Moves, n.Name)
	e.count(networkAged, n.Aged, n.Name)
	e.count(networkDisplaced, n.Displaced, n.Name)
	e.count(networkFlaps, n.Flaps, n.Name)
	e.put(networkFlapping, float64(len(n.Flapping)), n.Name)
	m := n.Multicast
	if m == nil {
		m = &vswitch.MulticastStatus{} // all is flooded
	}
	e.put(networkGroups, float64(m.Groups), n.Name)
	e.put(networkMembers, float64(m.Members), n.Name)
	e.count(networkRefused, m.Refused, n.Name)
	e.count(networkPruned, n.Pruned, n.Name)
	e.reasons(networkDrops, networkDrops.values["reason"], n.Drops, n.Name)
	for i := range n.Ports {
		p := &n.Ports[i]
		e.traffic(&port, portReasons[p.Kind], &p.Totals, n.Name, p.Kind, p.Name)
		e.put(portLearned, float64(p.Entries), n.Name, p.Kind, p.Name)
		e.count(portShort, p.ShortPath, n.Name, p.Kind, p.Name)
	}
}

func (e emitter) vm(v *daemon.VMStatus) {
	e.put(vmInfo, 1, v.Name, v.Network, v.MAC)
	e.put(vmDMA, 1, v.Name, v.DMA.Attribute.String())
	e.count(vmRefused, v.DMA.Refused.Reads, v.Name, "read")
	e.count(vmRefused, v.DMA.Refused.Writes, v.Name, "write")
	e.yes(vmAttached, v.Net.Connected, v.Name, "net")
	e.yes(vmAttached, v.HCA.Connected, v.Name, "hca")
	e.yes(vmUp, v.Net.Up(), v.Name, "net")
	e.yes(vmUp, v.HCA.Up, v.Name, "hca")
	e.yes(vmBroken, v.Net.Broken != "", v.Name, "net")
	e.yes(vmBroken, v.HCA.Failed, v.Name, "hca")
	if o := v.NetOutlives; o != "" {
		e.yes(vmLink, o != daemon.OutlivesNothing, v.Name, "restart")
		e.yes(vmLink, o == daemon.OutlivesKill, v.Name, "kill")
	}
	if o := v.Outlives; o != "" {
		e.yes(hcaOutlives, o != daemon.OutlivesNothing, v.Name, "restart")
		e.yes(hcaOutlives, o == daemon.OutlivesKill, v.Name, "kill")
	}
	e.hca(v.Name, &v.HCA)
	e.time(vmControl, v.Control.Commands, v.Name, "commands")
	e.time(vmControl, v.Control.Messages, v.Name, "messages")
	e.time(vmControl, v.Control.Paging, v.Name, "paging")
	e.count(vmDelayed, v.Control.Delayed, v.Name)
	e.time(vmEngine, v.Net.EngineTime, v.Name, "net")
	e.time(vmEngine, v.HCA.EngineTime, v.Name, "hca")

	m := &v.Memory
	e.count(memTarget, m.Target, v.Name)
	e.put(memShort, float64(m.Short), v.Name)
	e.time(memShortFor, m.ShortFor, v.Name)
	e.count(memDelayed, m.Delayed, v.Name)
	e.count(memBudget, m.Budget, v.Name)
	e.count(memResident, m.Resident, v.Name)
	e.count(memInactive, m.Inactive, v.Name)
	e.count(memHeld, m.Held, v.Name)
	e.count(memHuge, m.HugeTLB, v.Name)
	e.count(memMapped, m.Mapped, v.Name)
	e.count(memMappedMax, m.Shared, v.Name)
	e.yes(memUnlocked, m.Unlocked != "", v.Name)
	e.count(memEvictions, m.Evictions, v.Name)
	e.count(memWithdrawn, m.Withdrawals, v.Name)
	e.count(memRefaults, m.Refaults, v.Name)
	e.count(memDiscarded, m.Discarded, v.Name)
	e.count(memFaults, m.HostFaults, v.Name)
	e.count(memFailed, m.FailedFaults, v.Name)
	e.time(memLongest, m.LongestDrain, v.Name)
}

func (e emitter) hca(vm string, h *hca.Status) {
	e.yes(hcaLink, h.Link, vm)
	e.put(hcaMTU, float64(h.PortMTU), vm)
	e.put(hcaGIDs, float64(len(h.GIDs)), vm)
	e.yes(hcaBusy, h.Busy, vm)
	for s, m := range hcaStats {
		e.count(m, h.Stats[abi.Stat(s).String()], vm)
	}
	e.count(hcaLocal, h.Stats["local_messages"], vm)
	e.count(hcaLocalB, h.Stats["local_bytes"], vm)
	e.count(hcaMarked, h.Stats["np_ecn_marked_roce_packets"], vm)
	e.count(hcaCNPSent, h.Stats["np_cnp_sent"], vm)
	e.count(hcaCNPs, h.Stats["rp_cnp_handled"], vm)
	e.count(hcaKept, h.Stats["kept_packets"], vm)
	e.count(hcaMapsOut, h.Stats["selective_acks_sent"], vm)
	e.count(hcaMapsIn, h.Stats["selective_acks_received"], vm)
	e.reasons(hcaDrops, hcaDrops.values["reason"], h.Drops, vm)
	e.put(vmHostUsed, float64(h.HostMemory.Used), vm)
	e.put(vmHostMost, float64(h.HostMemory.Most), vm)
	e.put(vmHostLimit, float64(h.HostMemory.Limit), vm)
	e.count(vmHostWrong, h.HostMemory.Miscounted, vm)
	e.count(vmHostRefused, h.HostMemory.Refused, vm)
	if h.Busy {
		return // the rest is unknown; zeros would look like a restart
	}
	for _, o := range []struct {
		name string
		n    int
	}{{"pd", h.PDs}, {"cq", h.CQs}, {"srq", h.SRQs}, {"mr", h.MRs}} {
		e.put(hcaObjects, float64(o.n), vm, o.name)
	}
	e.count(hcaPages, h.MTTs, vm)
	e.count(hcaReclaimed, h.MTTsReclaimed, vm)
	qps := map[string]uint64{}
	for _, q := range h.QPs {
		qps[q.State]++
	}
	e.reasons(hcaQPs, hcaQPs.values["state"], qps, vm)

	f := &h.Faults
	e.put(faultParked, float64(f.Parked), vm)
	e.count(faultWaiting, f.Guest.Waiting, vm, "guest")
	e.count(faultWaiting, f.Host.Waiting, vm, "host")
	e.faults(&f.Guest, vm, "guest")
	e.faults(&f.Host, vm, "host")
	e.count(epochFlips, f.EpochsFlipped, vm)
	e.count(epochDrains, f.Drains, vm)
	e.time(epochLongest, f.LongestDrain, vm)
}
