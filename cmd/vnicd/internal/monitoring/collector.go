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

// metric is one family. All families are declared in the list below.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

var families []metric

func family(kind prometheus.ValueType, name, help string, labels ...string) metric {
	m := metric{prometheus.NewDesc("vnicd_"+name, help, labels, nil), kind}
	families = append(families, m)
	return m
}

func counter(name, help string, labels ...string) metric {
	return family(prometheus.CounterValue, name, help, labels...)
}

func gauge(name, help string, labels ...string) metric {
	return family(prometheus.GaugeValue, name, help, labels...)
}

// The daemon.
var (
	buildInfo    = gauge("build_info", "Always 1; labels: version and host name.", "version", "host")
	uptime       = gauge("uptime_seconds", "Time since the daemon's start.")
	continued    = gauge("continued_hcas", "HCAs of running VMs that go on where the previous daemon stopped them.")
	silence      = gauge("continued_silence_seconds", "Longest time for which one of these HCAs stood still.")
	revived      = gauge("revived_hcas", "HCAs that go on where the previous daemon was killed.")
	lost         = gauge("lost_hcas", "HCAs of running VMs that did not go on: their programs got flush errors.")
	resuming     = gauge("resuming_hcas", "HCAs of the previous daemon's VMs that are being resumed.")
	upgrades     = counter("keeper_upgrades_total", "Upgrades that this daemon's keeper had tried when it started this daemon.")
	notUpgraded  = counter("keeper_failed_upgrades_total", "Those of them after which the previous program ran on.")
	engineRounds = counter("engine_rounds_total", "Passes of a data-path thread.", "engine")
	engineSleeps = counter("engine_sleeps_total", "Times that a data-path thread found nothing to do and slept.",
		"engine")
	engineFaults = counter("engine_memory_faults_total",
		"Accesses to guest memory that had vanished, survived by a data-path thread.", "engine")
	buffers          = gauge("buffers", "Frame buffers of the usual size.")
	buffersUsed      = gauge("buffers_in_use", "Frame buffers of all sizes that are in use.")
	buffersExhausted = counter("buffers_exhausted_total", "Times that no frame buffer was free.")
)

// The tunnels.
var (
	vtepInfo = gauge("vtep_info", "Always 1; labels: underlay address, UDP port and interface.", "local", "port",
		"device")
	vtepMTU   = gauge("vtep_mtu_bytes", "Largest MTU that the underlay interface leaves to tenants.")
	vtepPeers = gauge("vtep_peers", "Other hosts of a network.", "network", "source")
	vtepPort  = newTraffic("vtep", "the tunnels")

	shortEntries = gauge("short_path_entries",
		"Pairs of addresses whose TCP the kernel carries between host ports and tunnels.")
	shortFrames = counter("short_path_frames_total",
		"Tunnel frames that the kernel carried between host ports and tunnels; vtep_* counts them, too.")
)

// What protects the tunnels. Peers are labelled by the address of their VTEP; the configuration bounds their number.
var (
	protectionUp = gauge("protection_up", "Whether the interface that encrypts the underlay works.", "interface",
		"port")
	protectionMTU      = gauge("protection_mtu_bytes", "MTU of that interface.")
	protectionInErrors = counter("protection_in_errors_total",
		"Packets refused after decryption: malformed, or with a source that is not their peer's.")
	protectionOutErrors = counter("protection_out_errors_total",
		"Packets not sent: no peer has their destination, or it does not answer.")
	protectionHandshake = gauge("protection_peer_handshake_timestamp_seconds",
		"When the latest session with a peer began; 0 = there was none.", "peer")
	protectionIn  = counter("protection_peer_in_bytes_total", "Bytes of encrypted packets from a peer.", "peer")
	protectionOut = counter("protection_peer_out_bytes_total", "Bytes of encrypted packets to a peer.", "peer")
)

// Networks and their ports.
var (
	networkInfo      = gauge("network_info", "Always 1; label: the VXLAN network identifier.", "network", "vni")
	networkMTU       = gauge("network_mtu_bytes", "MTU of a network.", "network")
	networkAddresses = gauge("network_addresses", "Entries of a network's forwarding table.", "network", "source")
	networkMoves     = counter("network_moves_total", "Addresses that moved to another port.", "network")
	networkAged      = counter("network_aged_total", "Learnt addresses that expired.", "network")
	networkDisplaced = counter("network_displaced_total", "Learnt addresses evicted from a full table.", "network")
	networkFlaps     = counter("network_flaps_total", "Addresses that flapped between ports and were held.", "network")
	networkFlapping  = gauge("network_flapping", "Addresses that are held because they flap.", "network")
	networkDrops     = counter("network_dropped_frames_total",
		"Frames dropped at all ports of a network, closed ones included.", "network", "reason")

	port      = newTraffic("port", "a port", "network", "kind", "port")
	portShort = counter("port_short_path_frames_total",
		"Frames of a port that the kernel carried past vnicd, both directions.", "network", "kind", "port")
	portLearned = gauge("port_learned_addresses", "Addresses learnt at a port.", "network", "kind", "port")
)

// BGP EVPN. Neighbours are labelled by address; the configuration bounds their number.
var (
	evpnInfo = gauge("evpn_info", "Always 1; labels: AS, router id and VTEP.", "as", "router_id", "vtep")
	evpnUp   = gauge("evpn_session_up", "Whether the BGP session with a neighbour is established.", "neighbour",
		"as")
	evpnSince = gauge("evpn_session_established_timestamp_seconds",
		"When the session was established; 0 = it is not.", "neighbour")
	evpnReceived = gauge("evpn_session_routes_received", "Routes received from a neighbour.", "neighbour")
	evpnLimit    = gauge("evpn_session_routes_limit", "Number of routes at which the neighbour's session ends.",
		"neighbour")
	evpnAdvertised = gauge("evpn_session_routes_advertised", "Routes advertised to a neighbour.", "neighbour")
	evpnUpdates    = counter("evpn_session_updates_received_total", "UPDATE messages from a neighbour.", "neighbour")
	evpnFlaps      = counter("evpn_session_flaps_total", "Sessions that ended soon after they were established.",
		"neighbour")
	evpnRefused = counter("evpn_routes_refused_total", "Received routes that were refused, by reason.",
		"reason")

	evpnVTEPs     = gauge("evpn_network_vteps", "Remote VTEPs that advertise a network.", "network", "vni")
	evpnAddresses = gauge("evpn_network_addresses", "Remote addresses of a network that are in use: mac, ip.",
		"network", "type")
	evpnMax     = gauge("evpn_network_addresses_limit", "Limit of remote addresses of each type.", "network")
	evpnWaiting = gauge("evpn_network_addresses_waiting", "Remote addresses that wait for room.", "network")
	evpnOut     = gauge("evpn_network_routes_advertised",
		"Addresses of this host that are advertised: MACs, and MACs with IP.", "network")
	evpnFrozen     = gauge("evpn_network_duplicates", "MACs that are on this host and elsewhere, and not updated.", "network")
	evpnDuplicates = counter("evpn_network_duplicates_total", "Times that a MAC was detected as duplicate.",
		"network")
)

// traffic is counted at ports and tunnels alike.
type traffic struct{ inFrames, inBytes, outFrames, outBytes, floods, answered, drops metric }

func newTraffic(prefix, what string, labels ...string) traffic {
	return traffic{
		inFrames:  counter(prefix+"_in_frames_total", "Frames that entered the network by "+what+".", labels...),
		inBytes:   counter(prefix+"_in_bytes_total", "Bytes that entered the network by "+what+".", labels...),
		outFrames: counter(prefix+"_out_frames_total", "Frames that left the network by "+what+".", labels...),
		outBytes:  counter(prefix+"_out_bytes_total", "Bytes that left the network by "+what+".", labels...),
		floods:    counter(prefix+"_floods_total", "Frames from "+what+" that were flooded.", labels...),
		answered: counter(prefix+"_answered_total", "ARP and ND requests from "+what+" that the switch answered.",
			labels...), drops: counter(prefix+"_dropped_frames_total", "Frames dropped at "+what+", by reason.",
			append(labels[:len(labels):len(labels)], "reason")...),
	}
}

// The VMs.
var (
	vmInfo     = gauge("vm_info", "Always 1; labels: the VM's network and MAC.", "vm", "network", "mac")
	vmAttached = gauge("vm_attached", "Whether a QEMU is connected to a face of the VM's NIC.", "vm", "face")
	vmUp       = gauge("vm_up", "Whether a guest's driver has brought up a face of the VM's NIC.", "vm", "face")
	vmBroken   = gauge("vm_broken", "Whether a face of the VM's NIC has stopped because of an error.",
		"vm", "face")

	vmDMA = gauge("vm_dma_info", "Always 1; label dma: what the devices may do to the VM's memory: rw, ro, blocked.",
		"vm", "dma")
	vmRefused = counter("vm_dma_refused_total", "Accesses to the VM's memory that its dma forbade: read, write.",
		"vm", "access")

	vmHost = gauge("vm_host_memory_bytes", "Memory of vnicd that the VM's objects occupy, by kind; their sum is bounded.",
		"vm", "kind")
	vmHostUsed    = gauge("vm_host_memory_used_bytes", "Sum of vnicd_vm_host_memory_bytes.", "vm")
	vmHostMost    = gauge("vm_host_memory_most_bytes", "Largest vnicd_vm_host_memory_used_bytes so far.", "vm")
	vmHostLimit   = gauge("vm_host_memory_limit_bytes", "Bound of vnicd_vm_host_memory_used_bytes.", "vm")
	vmHostRefused = counter("vm_host_memory_refused_total", "Requests that limits.host-memory refused.", "vm")
	vmHostWrong   = counter("vm_host_memory_miscounted_total", "Errors in this account: a bug in vnicd.", "vm")

	vmControl = counter("vm_control_seconds_total",
		"Processor time that the VM causes outside of the engines: commands, messages, paging.", "vm", "kind")
	vmDelayed = counter("vm_control_delayed_commands_total", "Commands that limits.control-time delayed.", "vm")
	vmEngine  = counter("vm_engine_seconds_total",
		"Time that engines work for a face of the VM's NIC, estimated from samples.", "vm", "face")

	vmLink = gauge("vm_link_outlives", "Whether the link of the VM's network device stays up over that end of vnicd: a "+
		"restart, a kill. Of VMs that are connected.", "vm", "end")
	hcaOutlives = gauge("hca_outlives", "Whether the HCA's connection outlives that end of vnicd: a restart, a kill. Of VMs "+
		"and applications that are connected.", "vm", "end")
	hcaLink = gauge("hca_link_up", "Whether the HCA's port is up: 0 while the VM's dma is blocked.", "vm")
	hcaMTU  = gauge("hca_mtu_bytes", "Path MTU of the HCA's port.", "vm")
	hcaGIDs = gauge("hca_gids", "Entries of the HCA's GID table.", "vm")
	hcaBusy = gauge("hca_busy",
		"Whether a command of the guest waits for the host's memory; objects, queue pairs and fault times are missing then.",
		"vm")
	hcaObjects   = gauge("hca_objects", "Objects of the guest: pd, cq, srq, mr.", "vm", "type")
	hcaPages     = gauge("hca_registered_pages", "Translation entries of the guest's memory regions.", "vm")
	hcaReclaimed = counter("hca_reclaimed_groups_total",
		"Groups of up to 512 translation entries of on-demand regions that were dropped to make room for others.", "vm")
	hcaQPs   = gauge("hca_queue_pairs", "Queue pairs of the guest, by transport and state.", "vm", "type", "state")
	hcaDrops = counter("hca_refused_packets_total", "RoCE packets that the HCA refused.", "vm", "reason")
	hcaLocal = counter("hca_local_messages_total", "RDMA messages copied between VMs of this host, without packets.",
		"vm")
	hcaMarked = counter("hca_np_ecn_marked_roce_packets_total", "RoCE packets received with an ECN congestion mark.",
		"vm")
	hcaCNPSent = counter("hca_np_cnp_sent_total", "Congestion notifications sent.", "vm")
	hcaCNPs    = counter("hca_rp_cnp_handled_total", "Congestion notifications received and obeyed.", "vm")
	hcaKept    = counter("hca_kept_packets_total",
		"RDMA packets, of requests and responses, that arrived out of order and were kept.", "vm")
	hcaMapsOut = counter("hca_selective_acks_sent_total",
		"Selective acknowledgements sent: a packet is missing, later ones have arrived.", "vm")
	hcaMapsIn = counter("hca_selective_acks_received_total", "Selective acknowledgements received.", "vm")
	hcaLocalB = counter("hca_local_bytes_total", "Bytes of payload copied between VMs of this host, without packets.",
		"vm")
	hcaStats = newHCAStats()

	faultTime = family(prometheus.UntypedValue, "fault_duration_seconds",
		"Time from a page fault's raising to its answer, by the level that answers: guest or host.", "vm", "level")
	faultWaiting = gauge("faults_waiting", "Page faults raised and not yet served.", "vm", "level")
	faultParked  = gauge("faults_parked", "Sides of queue pairs that wait for an absent page.", "vm")
	epochFlips   = counter("epoch_flips_total", "Releases of guest memory that were begun.", "vm")
	epochDrains  = counter("epoch_drains_total", "Releases of guest memory that waited for operations to end.", "vm")
	epochLongest = gauge("epoch_drain_longest_seconds", "The longest wait of a release of guest memory.", "vm")

	hostLevel = gauge("host_memory_level",
		"Pressure on the host's memory: 0 calm, 1 steady, 2 pressed, 3 critical. The zone is the host or a memory cgroup.",
		"zone")
	hostTotal   = gauge("host_memory_total_bytes", "Memory of the host, or limit of the memory cgroup, that is short.")
	hostFree    = gauge("host_memory_free_bytes", "Of it, available without swapping.")
	hostReserve = gauge("host_memory_reserve_bytes", "Of it, available with swapping.")
	hostSwap    = gauge("host_memory_swap_free_bytes", "Free swap space.")
	hostStalled = gauge("host_memory_stalled_ratio", "Share of time in which tasks waited for memory.")
	hostTarget  = gauge("host_memory_target_bytes",
		"Guest memory that all VMs may keep resident under memory pressure; 0: any amount.")
	hostShrinks = counter("host_memory_shrinks_total", "Times that this target was lowered.")
	hostFull    = gauge("host_memory_full", "Whether operations that need new memory wait until the host has some.")

	memTarget   = gauge("memory_target_bytes", "What a VM may keep resident under memory pressure; 0: any amount.", "vm")
	memShort    = gauge("memory_short_faults", "Page faults of the host level that wait because memory is short.", "vm")
	memShortFor = gauge("memory_short_seconds", "How long the oldest of them has waited.", "vm")
	memDelayed  = counter("memory_delayed_faults_total", "Page faults of the host level that found memory short.", "vm")
	memBudget   = gauge("memory_budget_bytes", "Limit of memory kept resident for a VM's devices; 0: no limit.", "vm")
	memResident = gauge("memory_resident_bytes", "Guest memory kept resident for a VM's devices.", "vm")
	memInactive = gauge("memory_inactive_bytes", "Resident memory that is released next.", "vm")
	memHeld     = gauge("memory_held_bytes", "Resident memory that cannot be released while it is in use.",
		"vm")
	memHuge      = gauge("memory_hugetlb_bytes", "Guest memory in huge pages, which is not counted as resident.", "vm")
	memMapped    = gauge("memory_mapped_bytes", "Memory that a VM shares with its devices, resident or not.", "vm")
	memMappedMax = gauge("memory_mapped_limit_bytes", "Limit of the memory that a VM may share; 0: that of all VMs.", "vm")
	memUnlocked  = gauge("memory_unlocked", "Whether the host's kernel may swap memory that the device uses.", "vm")
	memEvictions = counter("memory_evictions_total", "Pieces of memory released to make room for others.", "vm")
	memWithdrawn = counter("memory_withdrawals_total", "Pieces of memory that became inactive.", "vm")
	memRefaults  = counter("memory_refaults_total", "Inactive pieces of memory that were used again.", "vm")
	memDiscarded = counter("memory_discarded_total", "Pieces of memory removed by a balloon or an unplugged device.", "vm")
	memFaults    = counter("memory_faults_total", "Page faults of the host level, answered or failed.", "vm")
	memFailed    = counter("memory_failed_faults_total", "Page faults of the host level that failed.", "vm")
	memLongest   = gauge("memory_drain_longest_seconds", "The longest wait of a memory release.", "vm")
)

// statHelp explains the HCA's counters.
var statHelp = [abi.NumStats]string{
	abi.StatTxPackets:     "RoCE packets sent.",
	abi.StatTxBytes:       "Bytes sent by RDMA: of whole frames, or of payload where that is copied to a VM of this host.",
	abi.StatRxPackets:     "RoCE packets received.",
	abi.StatRxBytes:       "Bytes of payload received by RDMA.",
	abi.StatTxAcks:        "Acknowledgements sent.",
	abi.StatTxNaks:        "Negative acknowledgements sent.",
	abi.StatTxRNR:         "Receiver-not-ready answers sent: no receive posted, or a page fault.",
	abi.StatRxRNR:         "Receiver-not-ready answers received.",
	abi.StatRetransmits:   "Packets sent again.",
	abi.StatTimeouts:      "Times that an acknowledgement was not in time.",
	abi.StatOutOfSequence: "Packets that arrived out of sequence.",
	abi.StatDuplicates:    "Packets that arrived twice.",
	abi.StatICRCErrors:    "Packets with a wrong invariant CRC.",
	abi.StatRxDropped:     "RoCE packets dropped.",
	abi.StatAccessErrors:  "Operations refused for their key, range or rights.",
	abi.StatGuestFaults:   "Page faults raised to the guest's driver.",
	abi.StatHostFaults:    "Page faults of the HCA raised to the host's driver.",
	abi.StatInvalidations: "Pages that the guest's driver invalidated in regions, by request.",
	abi.StatFaultsResumed: "Page faults that the guest's driver answered with a page.",
	abi.StatFaultsFailed:  "Page faults that the guest's driver answered with an error.",
	abi.StatFaultDrops:    "Packets dropped for a page fault.",
}

func newHCAStats() (out [abi.NumStats]metric) {
	for s := range out {
		out[s] = counter("hca_"+abi.Stat(s).String()+"_total", statHelp[s], "vm")
	}
	return out
}

// collector makes metrics from a status, one snapshot per scrape.
type collector struct{ status func() *daemon.Status }

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range families {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	e := emitter(ch)
	s := c.status()
	e.put(buildInfo, 1, s.Version, s.Host)
	e.put(uptime, s.Uptime)
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

func (e emitter) traffic(m *traffic, t *vswitch.Totals, labels ...string) {
	e.count(m.inFrames, t.InFrames, labels...)
	e.count(m.inBytes, t.InBytes, labels...)
	e.count(m.outFrames, t.OutFrames, labels...)
	e.count(m.outBytes, t.OutBytes, labels...)
	e.count(m.floods, t.Floods, labels...)
	e.count(m.answered, t.Answered, labels...)
	for reason, n := range t.Drops {
		e.count(m.drops, n, append(labels[:len(labels):len(labels)], reason)...)
	}
}

func (e emitter) vtep(s *daemon.Status) {
	v := s.VTEP
	if v == nil {
		return
	}
	e.put(vtepInfo, 1, v.Local.String(), strconv.Itoa(int(v.Port)), v.Device)
	e.put(vtepMTU, float64(v.MTU))
	e.traffic(&vtepPort, &v.Totals)
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
	for reason, n := range s.Refused {
		e.count(evpnRefused, n, reason)
	}
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
	for reason, v := range n.Drops {
		e.count(networkDrops, v, n.Name, reason)
	}
	for i := range n.Ports {
		p := &n.Ports[i]
		e.traffic(&port, &p.Totals, n.Name, p.Kind, p.Name)
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
	for reason, n := range h.Drops {
		e.count(hcaDrops, n, vm, reason)
	}
	for kind, n := range h.HostMemory.By {
		e.put(vmHost, float64(n), vm, kind)
	}
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
	type key struct{ kind, state string }
	qps := map[key]int{}
	for _, q := range h.QPs {
		qps[key{q.Type, q.State}]++
	}
	for k, n := range qps {
		e.put(hcaQPs, float64(n), vm, k.kind, k.state)
	}

	f := &h.Faults
	e.put(faultParked, float64(f.Parked), vm)
	e.faults(vm, "guest", &f.Guest)
	e.faults(vm, "host", &f.Host)
	e.count(epochFlips, f.EpochsFlipped, vm)
	e.count(epochDrains, f.Drains, vm)
	e.time(epochLongest, f.LongestDrain, vm)
}

// histogramBuckets are those of translate.Histogram except the last, which has no upper bound.
const histogramBuckets = 31

func (e emitter) faults(vm, level string, q *hca.FaultQueue) {
	e.count(faultWaiting, q.Waiting, vm, level)
	sum, buckets := uint64(0), make(map[float64]uint64, histogramBuckets)
	for i := range histogramBuckets {
		if i < len(q.Buckets) {
			sum += q.Buckets[i]
		}
		buckets[(time.Microsecond << i).Seconds()] = sum
	}
	if len(q.Buckets) > histogramBuckets {
		sum += q.Buckets[histogramBuckets]
	}
	e <- prometheus.MustNewConstHistogram(faultTime.desc, sum, q.Sum.Seconds(), buckets, vm, level)
}
