package main

import (
	"fmt"
	"math"

	"github.com/vnicd/vnicd/lab"
)

// registry returns the rows in the order of the table.
func registry() []Row {
	return []Row{
		{
			Name: "local_write_1m", What: "local RDMA WRITE 1 MiB, DRAM to DRAM", Anchor: "memcpy on the same buffers",
			Unit: "GB/s", Goals: []Goal{ratioAtLeast(0.95)}, Open: localWrite1M,
		},
		{
			Name: "local_write_lat", What: "local RDMA WRITE 8 B, polled, one way, median",
			Anchor: "ucx_perftest put, shared memory, median", Unit: "ns", Goals: []Goal{atMost(1000), ratioAtMost(8)},
			Open: localLatency,
		},
		{
			Name: "local_write_rate", What: "local RDMA WRITE 8 B, one engine", Anchor: "ucx_perftest put, shared memory",
			Unit: "msg/s", Goals: []Goal{atLeast(5e6)}, Open: smallMessages,
		},
		{
			Name: "journal_write_rate", What: "local_write_rate by a daemon with journals (CO-2)", Anchor: "without journals",
			Unit: "msg/s", Goals: []Goal{ratioAtLeast(0.95)}, Open: journaled(journaledRate),
		},
		{
			Name: "journal_write_lat", What: "local_write_lat by a daemon with journals", Anchor: "without journals",
			Unit: "ns", Goals: []Goal{ratioAtMost(1.05)}, Open: journaled(journaledLatency),
		},
		{
			Name: "journal_read_rate", What: "local READ 4 KiB by a daemon with journals", Anchor: "without journals",
			Unit: "msg/s", Goals: []Goal{ratioAtLeast(0.95)}, Open: journaled(journaledRead),
		},
		{
			Name: "journal_remote_64k", What: "remote_write_64k by daemons with journals", Anchor: "without journals",
			Unit: "Gbit/s", Goals: []Goal{ratioAtLeast(0.95)}, Open: journaled(journaledRemote),
		},
		{
			Name: "scale_qps", What: "local WRITE 8 B by 1,000 QPs in turn", Anchor: "by one", Unit: "msg/s",
			Open: manyQPs,
		},
		{
			Name: "scale_memory", What: "local WRITE 8 B to pages all over 64 GiB of registered memory", Anchor: "over 1 MiB",
			Unit: "msg/s", Open: muchMemory,
		},
		{
			Name: "sizes_cached", What: "local WRITE 4 KiB, and 64 B to 256 KiB beside it, buffers in the caches",
			Anchor: "memcpy on the same buffers", Unit: "GB/s", Open: messageSizes(true),
		},
		{
			Name: "sizes_uncached", What: "the same, messages all over 160 MiB", Anchor: "memcpy on the same buffers",
			Unit: "GB/s", Open: messageSizes(false),
		},
		{
			Name: "engines_2", What: "local WRITE 4 KiB of 4 pairs of VMs, 2 engines", Anchor: "1 engine", Unit: "msg/s",
			Open: manyEngines(2),
		},
		{
			Name: "engines_4", What: "the same, 4 engines", Anchor: "1 engine", Unit: "msg/s", Open: manyEngines(4),
		},
		{
			Name: "real_addresses", What: "local RDMA WRITE 4 KiB of a guest's kernel, by real addresses (RA-1)",
			Anchor: "each registered and invalidated", Unit: "msg/s", Goals: []Goal{ratioAtLeast(1)}, Open: realAddresses,
		},
		{
			Name: "application_write_4k", What: "local RDMA WRITE 4 KiB between two programs of the host (GVMI 0), by keys",
			Anchor: "between two VMs, by keys", Unit: "msg/s", Open: applicationWrites,
		},
		{
			Name:   "latency_busy",
			What:   "local WRITE 8 B, one way, median, while two other VMs stream WRITEs of 64 KiB through the engine",
			Anchor: "they do not", Unit: "ns", Open: busyLatency(64<<10, 16<<20),
		},
		{
			Name: "latency_hungry", What: "the same, WRITEs of 1 MiB all over 256 MiB of memory", Anchor: "they do not",
			Unit: "ns", Open: busyLatency(1<<20, 256<<20),
		},
		{
			Name:   "latency_collected",
			What:   "local WRITE 8 B, one way, 99.9th percentile, while the daemon collects garbage again and again",
			Anchor: "while it never does", Unit: "ns", Goals: []Goal{ratioAtMost(1.25)}, Open: collectedLatency,
		},
		{
			Name: "latency_1000_vms", What: "local WRITE 8 B, one way, median, beside 998 VMs that are attached and idle",
			Anchor: "beside 6", Unit: "ns", Open: amongIdle(1000),
		},
		{
			Name: "latency_100k_qps", What: "the same, beside 100,000 idle QPs of 50 VMs", Anchor: "beside none", Unit: "ns",
			Open: amongQPs(100_000),
		},
		{
			Name:   "latency_mixed",
			What:   "the same, beside WRITEs of 1 MiB, guest faults and TCP to another host, all at once",
			Anchor: "nothing beside it", Unit: "ns", Open: mixedWork,
		},
		{
			Name: "fair_8vms", What: "smallest share of 8 VMs with 1 to 8 QPs that WRITE 16 KiB through one engine",
			Unit: "of 1/8", Goals: []Goal{atLeast(0.9)}, Open: fairShares,
		},
		{
			Name: "fair_flood", What: "WRITE 64 KiB beside a VM that floods doorbells and posts to a dead QP",
			Anchor: "beside a VM that does the same as ours", Unit: "GB/s", Goals: []Goal{ratioAtLeast(0.95)}, Open: flooded,
		},
		{
			Name: "remote_write_64k", What: "RDMA WRITE 64 KiB between two hosts, underlay MTU 1500",
			Anchor: "iperf3 TCP over kernel VXLAN", Unit: "Gbit/s", Goals: []Goal{ratioAtLeast(1)}, Open: remoteWrite(1500),
		},
		{
			Name: "remote_write_64k_9000", What: "the same, underlay MTU 9000", Anchor: "iperf3 TCP over kernel VXLAN",
			Unit: "Gbit/s", Goals: []Goal{ratioAtLeast(1)}, Open: remoteWrite(9000),
		},
		{
			Name: "wire_write_64k", What: "remote_write_64k without segmentation offloads (TSO, GSO, UDP) of the wire",
			Anchor: "iperf3 TCP over kernel VXLAN, likewise", Unit: "Gbit/s", Open: wireWithoutOffloads,
		},
		{
			Name: protectedRow, What: "remote_write_64k, encrypted (`underlay: {protect: wireguard}`)",
			Anchor: "the same in cleartext", Unit: "Gbit/s", Open: protectedWrite,
		},
		{
			Name:   "stream_64k",
			What:   "net.Conn of guestdrv/rstream between programs of two hosts, Writes of 64 KiB",
			Anchor: "TCP over kernel VXLAN, the same program", Unit: "Gbit/s", Open: stream,
		},
		lossRow("01", 0.001), lossRow("1", 0.01), lossLatencyRow("01", 0.001), lossLatencyRow("1", 0.01),
		{
			Name:   "incast_8",
			What:   "8 hosts WRITE 16 KiB to one, through a switch with 500 Mbit/s and 256 KiB: what arrives",
			Anchor: "TCP over kernel VXLAN", Unit: "of the link", Open: incast(8),
		},
		{
			Name: "incast_32", What: "the same, 32 hosts", Anchor: "TCP over kernel VXLAN", Unit: "of the link",
			Open: incast(32),
		},
		{
			Name:   "fair_tenants",
			What:   "smaller share of two tenants that WRITE 64 KiB between two hosts, with 1 and 16 QPs",
			Anchor: "1 and 16 TCP connections over kernel VXLANs", Unit: "of 1/2", Open: fairTenants,
		},
		{
			Name: "remote_packets", What: "RDMA WRITE 1 KiB (one packet) between two hosts",
			Anchor: "iperf3 UDP 1400 B over kernel VXLAN", Unit: "packet/s", Open: remotePackets,
		},
		{
			Name: "remote_lat_polled", What: "RDMA WRITE 8 B between two hosts, one way, median, programs poll",
			Anchor: "UDP over kernel VXLAN, programs poll", Unit: "us", Open: remoteLatency(false),
		},
		{
			Name: "remote_lat_asleep", What: "the same, programs sleep on completion events",
			Anchor: "UDP over kernel VXLAN, programs block", Unit: "us", Open: remoteLatency(true),
		},
		{
			Name: "vm_write_64k", What: "ib_write_bw 64 KiB between VMs on two hosts",
			Anchor: "rxe in the same VMs, over our virtio-net or a TAP, the better", Unit: "MiB/s",
			Goals: []Goal{ratioAtLeast(20)},
			Open:  perftest(lab.Bandwidth, math.Max, "ib_write_bw", "-s 65536"),
		},
		{
			Name: "vm_send_lat", What: "ib_send_lat 2 B between VMs on two hosts, typical",
			Anchor: "rxe in the same VMs, over our virtio-net or a TAP, the better", Unit: "us",
			Open: perftest(lab.Latency, math.Min, "ib_send_lat", "-s 2"),
		},
		{
			Name: "vm_tcp", What: "one TCP connection between VMs on two hosts, over our virtio-net",
			Anchor: "over QEMU's TAP, kernel bridge and vxlan", Unit: "Mbit/s", Open: guestTCP,
		},
		{
			Name: "vm_nvme", What: "NVMe over RDMA between VMs on two hosts, random reads of 4 KiB, 16 at once",
			Anchor: "NVMe over TCP, QEMU's TAP, kernel bridge and vxlan", Unit: "read/s", Open: guestNVMe,
		},
		{
			Name:   "host_tcp_switch",
			What:   "TCP from TAP to TAP through vnicd (`short-path: false`), two hosts, underlay MTU 1500",
			Anchor: "kernel bridge and vxlan", Unit: "Gbit/s", Goals: []Goal{ratioAtLeast(1)}, Open: hostTCP(false, false),
		},
		{
			Name:   "host_tcp_switch_v6",
			What:   "the same, IPv6 underlay, default configuration but `short-path: false`",
			Anchor: "kernel bridge and vxlan", Unit: "Gbit/s", Goals: []Goal{ratioAtLeast(1)}, Open: hostTCP(true, false),
		},
		{
			Name:   "host_tcp_kernel",
			What:   "TCP from TAP to TAP by the kernel's short path, which vnicd only sets up: no frame passes the daemon",
			Anchor: "kernel bridge and vxlan", Unit: "Gbit/s", Open: hostTCP(false, true),
		},
		{
			Name: "host_tcp_kernel_v6", What: "the same, IPv6 underlay, `zero-checksum6: true`",
			Anchor: "kernel bridge and vxlan", Unit: "Gbit/s", Open: hostTCP(true, true),
		},
		{
			Name: "host_udp_64", What: "UDP 64 B from TAP to TAP, highest rate read with at most 0.1 % lost",
			Anchor: "kernel bridge and vxlan, by the same programs", Unit: "packet/s", Goals: []Goal{ratioAtLeast(2)},
			Open: hostUDP(64),
		},
		{
			Name: "host_udp_1400", What: "UDP 1400 B, the same",
			Anchor: "kernel bridge and vxlan, by the same programs", Unit: "packet/s", Goals: []Goal{ratioAtLeast(1)},
			Open: hostUDP(1400),
		},
		{
			Name: "vhost_64", What: "64 B frames between two virtio-net ports of testpmd, what one core could pass on",
			Anchor: "the same through DPDK's vhost", Unit: "frame/s", Goals: []Goal{ratioAtLeast(0.5)}, Open: vhostFrames,
		},
		translationRow("1m", 1_000_000, "2 MiB"), translationRow("10m", 10_000_000, "2 MiB"),
		translationRow("10m_4k", 10_000_000, "4 KiB"),
		{
			Name:   "translate_10m_cold",
			What:   "both stages, random over 10M scattered pages, 2 MiB pages on the host, one look-up after the other",
			Anchor: "a load from 80 MB of memory (the table's size), one after the other", Unit: "ns",
			Open: coldTranslation(10_000_000),
		},
		{
			Name: "guest_fault", What: "WRITE 8 B with a guest fault, source page absent, post to completion, median",
			Anchor: "the WRITE with the page present", Unit: "us", Goals: []Goal{atMost(30)}, Open: guestFault(false),
		},
		{
			Name: "guest_fault_far", What: "the same, target page absent: RNR NAK and unsolicited ACK",
			Anchor: "the WRITE with the page present", Unit: "us", Open: guestFault(true),
		},
		{
			Name: "guest_fault_vm",
			What: "guest fault served by the kernel module in a VM, up to 1 MiB each, raise to resume, mean", Unit: "us",
			Open: guestFaultVM,
		},
		{
			Name: "register_1g", What: "registration of 1 GiB on demand, median", Anchor: "of one page", Unit: "us",
			Goals: []Goal{atMost(1000), ratioAtMost(1.25)}, Open: registration,
		},
		{
			Name: "register_pinned_1g", What: "mlock of 1 GiB of resident memory and registration of its pages, median",
			Anchor: "mlock alone", Unit: "us", Open: pinnedRegistration,
		},
		{
			Name: "fault_storm", What: "guest faults of 64 QPs at once, target pages absent: faults served",
			Anchor: "of one QP", Unit: "fault/s", Open: faultStorm,
		},
		{
			Name: "fault_storm_lat", What: "local WRITE 8 B between two other VMs beside the 64 QPs, one way, median",
			Anchor: "their pages are present", Unit: "us", Open: besideStorm,
		},
		neighbourRow("same_slow", true, true), neighbourRow("other_slow", false, true),
		neighbourRow("same_never", true, false), neighbourRow("other_never", false, false),
		{
			Name: "idle_8vms", What: "processor share of an idle daemon, 8 VMs attached", Anchor: "none attached",
			Unit: "% of a core", Goals: []Goal{atMost(1)}, Open: idle,
		},
		{Name: "memory_per_vm", What: "daemon's private memory per attached VM, idle", Unit: "KiB",
			Open: growth(8, 0, 0, makeVMs)},
		{Name: "memory_per_qp", What: "daemon's private memory per RC QP pair, idle, CQs included", Unit: "KiB",
			Open: growth(100, 2, 256<<20, makeQPs)},
		{Name: "memory_per_mr", What: "daemon's private memory per region of 1 MiB", Unit: "KiB",
			Open: growth(2000, 2, 64<<20, makeMRs)},
		{Name: "memory_1m_entries", What: "daemon's private memory for a million entries of translation", Unit: "KiB",
			Open: growth(1, 1, millionEntries*pageSize+64<<20, makeEntries)},
		{
			Name: "start_up", What: "from starting a daemon with 8 VMs until a driver has its device",
			Anchor: "`vnicd --version`", Unit: "ms", Open: startUp,
		},
		{
			Name: "start_100", What: "from starting a daemon with 100 VMs until drivers of all have their devices",
			Anchor: "with 1 VM", Unit: "ms", Open: startMany(100),
		},
		{
			Name:   "evpn_100k",
			What:   "100,000 MAC/IP routes of 1,000 hosts, announced by a reflector, until all are in the switch's tables",
			Anchor: "gobgp alone, until it has them", Unit: "s", Open: evpnScale,
		},
		{Name: "micro", What: "the Go benchmarks of the hot functions, with allocations", Section: micro},
	}
}

func translationRow(name string, n uint64, host string) Row {
	return Row{
		Name: "translate_" + name, What: fmt.Sprintf("both stages, warm, %s scattered pages, %s pages on the host",
			number(float64(n)), host), Anchor: "a region of one page", Unit: "ns", Goals: []Goal{atMost(10), ratioAtMost(1.25)},
		Open: translation(n, host == "2 MiB"),
	}
}

func neighbourRow(name string, sameVM, answered bool) Row {
	who, pager := "another VM", "pager that never answers"
	if sameVM {
		who = "the same VM"
	}
	if answered {
		pager = "pager of 1 ms"
	}
	return Row{
		Name: "fault_" + name, What: "WRITE 4 KiB while a QP of " + who + " faults all the time, " + pager,
		Anchor: "that QP does not fault", Unit: "msg/s", Goals: []Goal{ratioAtLeast(0.95)},
		Open: neighbours(sameVM, answered),
	}
}

func lossRow(name string, share float64) Row {
	return Row{
		Name:   "loss_" + name,
		What:   fmt.Sprintf("goodput of wire_write_64k with %g %% of frames lost, as a part of that without loss", 100*share),
		Anchor: "TCP with SACK over kernel VXLAN", Unit: "of lossless", Open: lossGoodput(share),
	}
}

func lossLatencyRow(name string, share float64) Row {
	return Row{
		Name:   "loss_lat_" + name,
		What:   fmt.Sprintf("RDMA WRITE 8 B between two hosts, one way, 99.9th percentile, %g %% of frames lost", 100*share),
		Anchor: "TCP with SACK over kernel VXLAN", Unit: "us", Open: lossLatency(share),
	}
}
