package monitoring

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/rdma/roce"
)

// metric is one family. All families are declared in the list below.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	name string
	// labels are its labels; values are all values of those whose values are known beforehand. A counter has a series
	// for each of them from the moment on when its object exists: one that appeared with its first event would hide that
	// event from rate() and from alerts.
	labels []string
	values map[string][]string
}

// each declares all values of a label.
func (m metric) each(label string, values ...string) metric {
	m.values[label] = values
	return m
}

var families []metric

func family(kind prometheus.ValueType, name, help string, labels ...string) metric {
	m := metric{prometheus.NewDesc("vnicd_"+name, help, labels, nil), kind, "vnicd_" + name, labels, map[string][]string{}}
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
	allFaultTime = family(prometheus.UntypedValue, "fault_duration_seconds",
		"Time from a page fault's raising to its answer, of all VMs, by the level that answers: guest or host.", "level")
	certificateEnd = gauge("monitoring_certificate_not_after_timestamp_seconds",
		"When the certificate with which this server speaks TLS, or one that it sends with it, expires.")
	buildInfo    = gauge("build_info", "Always 1; label: version.", "version")
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
	vtepPort  = newTraffic("vtep", "the tunnels").reasons(vxlan.DropReasons())

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
	networkGroups    = gauge("network_multicast_groups", "Multicast groups with members, if snooped.", "network")
	networkMembers   = gauge("network_multicast_members", "Members of all those groups.", "network")
	networkRefused   = counter("network_multicast_refused_total",
		"Joins of groups, and routers, beyond a limit: their ports got all multicast for some minutes.", "network")
	networkPruned = counter("network_multicast_pruned_frames_total",
		"Multicast frames that went to members alone instead of being flooded.", "network")
	networkDrops = counter("network_dropped_frames_total",
		"Frames dropped at all ports of a network, closed ones included.", "network", "reason").
		each("reason", networkReasons()...)

	port      = newTraffic("port", "a port", "network", "kind", "port") // its reasons: portReasons
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
		"reason").each("reason", evpn.RefusedReasons()...)

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
type traffic struct{ inFrames, inBytes, outFrames, outBytes, floods, pruned, answered, drops metric }

func newTraffic(prefix, what string, labels ...string) traffic {
	return traffic{
		inFrames:  counter(prefix+"_in_frames_total", "Frames that entered the network by "+what+".", labels...),
		inBytes:   counter(prefix+"_in_bytes_total", "Bytes that entered the network by "+what+".", labels...),
		outFrames: counter(prefix+"_out_frames_total", "Frames that left the network by "+what+".", labels...),
		outBytes:  counter(prefix+"_out_bytes_total", "Bytes that left the network by "+what+".", labels...),
		pruned:    counter(prefix+"_pruned_frames_total", "Multicast frames from "+what+" for members alone.", labels...),
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
		"vm", "access").each("access", "read", "write")

	vmHostUsed    = gauge("vm_host_memory_used_bytes", "Memory of vnicd that the VM's objects occupy.", "vm")
	vmHostMost    = gauge("vm_host_memory_most_bytes", "Largest vnicd_vm_host_memory_used_bytes so far.", "vm")
	vmHostLimit   = gauge("vm_host_memory_limit_bytes", "Bound of vnicd_vm_host_memory_used_bytes.", "vm")
	vmHostRefused = counter("vm_host_memory_refused_total", "Requests that limits.host-memory refused.", "vm")
	vmHostWrong   = counter("vm_host_memory_miscounted_total", "Errors in this account: a bug in vnicd.", "vm")

	vmControl = counter("vm_control_seconds_total",
		"Processor time that the VM causes outside of the engines: commands, messages, paging.", "vm", "kind").
		each("kind", "commands", "messages", "paging")
	vmDelayed = counter("vm_control_delayed_commands_total", "Commands that limits.control-time delayed.", "vm")
	vmEngine  = counter("vm_engine_seconds_total",
		"Time that engines work for a face of the VM's NIC, estimated from samples.", "vm", "face").
		each("face", "net", "hca")

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
	hcaQPs   = gauge("hca_queue_pairs", "Queue pairs of the guest, by state.", "vm", "state").each("state", qpStates()...)
	hcaDrops = counter("hca_refused_packets_total", "RoCE packets that the HCA refused.", "vm", "reason").
			each("reason", hca.DropReasons()...)
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

	faultTime = family(prometheus.UntypedValue, "vm_fault_duration_seconds",
		"Time from a page fault's raising to its answer, by the level that answers: guest or host. A native histogram: "+
			"scrapes in the text format have its count and sum.", "vm", "level")
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

// reasons declares why frames are dropped.
func (t traffic) reasons(all []string) traffic {
	t.drops.each("reason", all...)
	return t
}

// portReasons are the reasons of port_dropped_frames_total by the kind of port.
var portReasons = map[string][]string{}

func init() {
	for _, k := range []vswitch.Kind{vswitch.KindVM, vswitch.KindHCA, vswitch.KindTAP, vswitch.KindVTEP} {
		portReasons[k.String()] = names(k.Reasons())
	}
}

func qpStates() (out []string) {
	for s := roce.Reset; s <= roce.Err; s++ {
		out = append(out, s.String())
	}
	return out
}

func networkReasons() []string {
	all := make([]vswitch.Reason, vswitch.NumReasons)
	for r := range all {
		all[r] = vswitch.Reason(r)
	}
	return names(all)
}

func names(reasons []vswitch.Reason) (out []string) {
	for _, r := range reasons {
		out = append(out, r.String())
	}
	return out
}
