package config

import (
	"fmt"
	"regexp"
	"strings"
)

// Section is a group of keys as documents have them.
type Section struct {
	Title string
	Keys  []KeyDoc
}

// KeyDoc describes a key.
type KeyDoc struct {
	// Key is its path, with [] after lists: networks[].tap.rate.
	Key string
	// Text is Markdown, with links as docs/configuration.md has them. The default is in brackets at the end of its
	// sentence.
	Text string
}

// Sections describe all keys: for docs/configuration.md, the manual page and the schema. Those of applications that are
// not here are as those of VMs.
var Sections = []Section{
	{"The host", []KeyDoc{
		{"host", "name of this host in status output [the system's host name]"},
		{"run-dir", "directory of the sockets [/run/vnicd]"},
		{"control", "path of the control socket, which permits everything ([details](#changes-at-run-time)) [run-dir/vnicd.sock]"},
		{"control-group", "group that may open the control socket besides root and vnicd's user, by name or number [vnicd-admin if the host has it, otherwise none]"},
		{"status", "path of the control socket that permits questions only ([details](#changes-at-run-time)) [run-dir/vnicd-status.sock]"},
		{"status-group", "group that may open the status socket, by name or number [vnicd-status if the host has it, otherwise none]"},
		{"socket-mode", "permissions of the sockets of VMs that have neither `user` nor `group`: who may attach them [0660, of vnicd's user and group]"},
		{"engines", "data-path threads, 1 to 8 [1]"},
		{"engine-cpus", "processors of these threads, one each, in this order, such as 2-3,8; vnicd's other threads then avoid them [any]"},
		{"engine-nice", "nice value of these threads, -20 to 19; negative values need CAP_SYS_NICE or RLIMIT_NICE [-10]"},
		{"spin", "how long an engine polls after its last work before it sleeps, at most; shortened while polling finds nothing [20us]"},
		{"buffers", "frame buffers of 9 KiB, allocated on first use [8192]"},
		{"short-path", "let the kernel carry established TCP between host ports and tunnels ([details](#the-short-path)): true (vnicd fails to start where this is impossible) or false [on where the kernel and vnicd's rights allow it: Linux 6.6, CAP_BPF, CAP_NET_ADMIN; the log and `vnicd status` say why not]"},
		{"ecn", "RC connections mark their packets as ECN-capable, report congestion by CNPs and respond to them: [true] or false"},
		{"journal", "keep the state of HCAs in shared memory all the time, so that RDMA connections survive a crash of vnicd; only under systemd or `vnicd run --keep`; costs some speed ([details](../cmd/vnicd/OPERATING.md#what-a-restart-does)): [true] or false"},
		{"memory-pressure.watch", "return guest memory to the host while it is short of memory ([details](#memory-pressure)): [true] or false"},
		{"memory-pressure.limit", "part of the time in which tasks wait for memory from which on the host is short of it [10%]"},
		{"monitoring.listen", "address for metrics: HOST:PORT such as 127.0.0.1:9469, or an absolute path for a unix socket of mode 0660 and `status-group` [nowhere; with `page` 127.0.0.1:9469]"},
		{"monitoring.names", "host names, without port, by which clients may address this server, such as the name in a scrape configuration. IP addresses, localhost and the name in `listen` need no entry; requests with other names (`Host`) are answered with 421 [none]"},
		{"monitoring.pprof", "serve Go's profiles there too [false]"},
		{"monitoring.page", "serve the web page there too [false]"},
		{"monitoring.web-config", "absolute path of a file with TLS, client certificates and passwords for this server, in the format of Prometheus' exporters ([details](#tls-and-passwords)) [none: plain HTTP, without authentication]"},
		{"log-level", "trace, debug, info, warn, error [info]"},
	}},
	{"Tunnels and EVPN", []KeyDoc{
		{"vtep.local", "this host's underlay address, IPv4 or IPv6; without `vtep`, networks stay on this host"},
		{"vtep.port", "UDP port of the tunnels [4789]"},
		{"vtep.dscp", "outer class of RoCE frames, a number or a name such as af31 [af31] (MT-8)"},
		{"vtep.peer-ports", "from which UDP ports peers must send: reserved (below 1024), any, or auto (reserved, from a peer's first datagram on that does so) [auto] ([details](../cmd/vnicd/OPERATING.md#who-may-send-on-the-underlay))"},
		{"vtep.zero-checksum6", "send IPv6 datagrams without UDP checksum [false]; such datagrams are always accepted"},
		{"underlay.protect", "[none], or wireguard: exchange tunnels' datagrams through WireGuard only ([details](#the-protected-underlay)); needs `vtep`"},
		{"underlay.private-key-file", "absolute path of this host's private key in base64, which only the file's owner may read (mode 0600 or 0400)"},
		{"underlay.listen-port", "UDP port of WireGuard [51820]"},
		{"underlay.interface", "name of WireGuard's interface, which vnicd makes and removes [vnicd-wg0]"},
		{"underlay.peers[].vtep", "another host: the address of its VTEP, the only one it may send from"},
		{"underlay.peers[].endpoint", "address and port of that host's WireGuard, such as 192.0.2.2:51820"},
		{"underlay.peers[].public-key", "that host's public key in base64"},
		{"underlay.peers[].preshared-key-file", "absolute path of a key that both hosts share, in addition, which only the file's owner may read [none]"},
		{"underlay.peers[].keepalive", "send something at least this often, in whole seconds, for middleboxes that forget flows [never]"},
		{"evpn.as", "AS of this host in BGP; needs `vtep`"},
		{"evpn.router-id", "identifier of this host in BGP, in the form of an IPv4 address [vtep.local]"},
		{"evpn.listen", "addresses on which sessions are accepted [vtep.local]"},
		{"evpn.port", "TCP port on which sessions are accepted; 0: none are [179]"},
		{"evpn.hold-time", "a session without messages for this long ends [90s]"},
		{"evpn.restart-time", "how long routes are kept after a session broke (RFC 4724); 0: not at all [120s]"},
		{"evpn.neighbours[].address", "a route reflector or another VTEP, IPv4 or IPv6"},
		{"evpn.neighbours[].as", "AS of the neighbour [evpn.as]"},
		{"evpn.neighbours[].password", "TCP MD5 key (RFC 2385) [none]"},
		{"evpn.neighbours[].ttl-security", "greatest distance in hops (RFC 5082) [not checked]"},
		{"evpn.neighbours[].passive", "wait for the neighbour to connect [false]"},
		{"evpn.neighbours[].port", "port to connect to [179]"},
		{"evpn.neighbours[].local-address", "address to connect from [the kernel's choice]"},
		{"evpn.neighbours[].max-routes", "a session that exceeds this ends, for five minutes [262144]"},
		{"evpn.neighbours[].next-hops", "VTEPs that its routes may name, as addresses or IP/LENGTH [any]"},
	}},
	{"Networks", []KeyDoc{
		{"networks[].name", "name of a tenant's L2 segment"},
		{"networks[].vni", "VXLAN network identifier of the segment, 1 to 16777215"},
		{"networks[].mtu", "MTU of the segment [what the narrowest path to a peer leaves: 1450 of 1500 over IPv4]"},
		{"networks[].peers", "underlay addresses of the network's other hosts"},
		{"networks[].learn-peers", "accept tunnels from hosts that are not listed [false]"},
		{"networks[].ageing", "lifetime of a learnt address [300s]"},
		{"networks[].max-entries", "size of the forwarding table [16384]"},
		{"networks[].flood-unknown", "send frames to unknown unicast addresses into tunnels too; false drops them [true]"},
		{"networks[].evpn", "take part in EVPN if there is an `evpn` section [true]"},
		{"networks[].route-targets", "route targets to import and export, AS:NUMBER or IPV4:NUMBER [AS:VNI]"},
		{"networks[].storm", "broadcast, multicast and unknown-unicast frames per second that each port may send, 0: unlimited [10000]"},
		{"networks[].multicast", "`snoop`: multicast to members only ([limits](limits.md#network)); `flood`: to all ports, which loses nothing if a receiver does not report by IGMP or MLD [flood]"},
		{"networks[].tap.name", "name of the interface of the host's own port in the network"},
		{"networks[].tap.addresses", "addresses of the host port, as IP/LENGTH [none]"},
		{"networks[].tap.bridge", "bridge of the host that the host port joins, in place of addresses [none]"},
		{"networks[].tap.rate", "bits per second in each direction, such as 10G [unlimited]"},
		{"networks[].tap.offloads", "checksum and segmentation offload: [true] or false"},
	}},
	{"VMs and host applications", []KeyDoc{
		{"vms[].name", "name of a guest; its sockets are run-dir/NAME.net, and by `hca` run-dir/NAME.hca and run-dir/NAME.ivshmem"},
		{"vms[].network", "name of the VM's network"},
		{"vms[].mac", "MAC of both devices. It may be used once per network, and again in another (MT-9)"},
		{"vms[].user", "user of this host, by name or number, that may open the VM's sockets ([details](#who-may-attach-a-vm)) [whoever `socket-mode` lets]"},
		{"vms[].group", "group of this host, by name or number, that may open the VM's sockets [whoever `socket-mode` lets]"},
		{"vms[].ips", "the only IP addresses that the VM may use; the switch answers ARP and ND for them [any]"},
		{"vms[].queues", "queue pairs of virtio-net, 1 to 8, spread over the engines [1]; `qemu-args` passes the number to QEMU"},
		{"vms[].hca", "how QEMU may have the HCA: `vhost-user`, its generic vhost-user device, `ivshmem`, its ivshmem-doorbell, or `auto`, as QEMU's command line says ([which](attach.md#which-device)) [auto]"},
		{"vms[].rate", "bits per second in each direction, such as 10G [unlimited]"},
		{"vms[].storm", "as the network's `storm`, for this VM [the network's]"},
		{"vms[].limits", "what the VM may use. `ibv_devinfo -v` reports `qps`, `cqs`, `mrs`, `ahs` and `pages`; requests beyond these fail with ENOMEM"},
		{"vms[].limits.qps", "queue pairs [2048]"},
		{"vms[].limits.cqs", "completion queues [4096]"},
		{"vms[].limits.mrs", "memory regions, memory windows included [65536]"},
		{"vms[].limits.ahs", "address handles [16384]"},
		{"vms[].limits.pages", "pages of registered memory [2^24]. On-demand regions count 64 to 576 for each 2 MiB with a present page; at the limit the least recently used of these are fetched again when needed"},
		{"vms[].limits.messages", "send requests per second; requests beyond them wait [unlimited]"},
		{"vms[].limits.host-memory", "how much of vnicd's memory the VM's objects may occupy together, such as 500MiB [300MiB, and in proportion more if `qps`, `mrs` or `pages` is raised] ([what counts](#host-memory))"},
		{"vms[].limits.control-time", "how much of one processor its commands may use in the long run, 1% to 100%; further ones wait [50%] ([what counts](#processor-time))"},
		{"vms[].limits.memory", "how much memory its QEMU may share with the devices, such as 256GiB [twice the host's, at least 64GiB]. More is refused, and the log names both numbers; leave room for a second QEMU of the VM, which connects while the memory of the first is being released. All VMs together may share 32TiB"},
		{"vms[].memory-budget", "how much of the VM's memory its devices may keep resident, such as 256MiB; at least 4MiB [bounded only under [memory pressure](#memory-pressure)] (PF-15)"},
		{"vms[].memory-weight", "the VM's share of memory under pressure, 1 to 10000, relative to other VMs' [100]"},
		{"vms[].dma", "what the VM's devices may do to its memory: rw, ro (they do not write data), blocked (they neither read nor write data, and its port is down) [rw] ([details](../cmd/vnicd/OPERATING.md#a-vm-that-misbehaves), PF-3)"},
		{"vms[].qmp", "a monitor socket of the VM's QEMU for vnicd's exclusive use; it reports when a balloon or an unplugged device takes memory [none]"},
		{"applications[]", "a program of this host as an RDMA user (PF-4) through `guestdrv` or [libvnicd](../guestdrv/libvnicd/README.md), with the keys of `vms[]` except `queues`, `hca` and `qmp`. Its one socket is run-dir/NAME.hca, and [for containers](../cmd/vnicd/OPERATING.md#applications-in-containers) run-dir/NAME.app/hca"},
		{"applications[].socket-mode", "as the top-level key, for this application [`socket-mode`]"},
		{"applications[].memory", "how much memory the program may share with the device; vnicd makes the memory file if [its connection can outlive vnicd](../cmd/vnicd/OPERATING.md#what-a-restart-does) [1GiB]"},
	}},
	{"Debug", []KeyDoc{
		{"debug.local-copy", "false: RDMA between VMs of this host goes as frames through the switch instead of one copy [true]"},
		{"debug.segmentation", "false: each tunnel datagram is sent and received alone instead of in one message (UDP_SEGMENT, UDP_GRO) [true]"},
		{"debug.selective-repeat", "false: RC connections to another vnicd resend the whole window after a loss, and frames are not padded [true]"},
		{"debug.guest-features", "false: HCAs offer guest drivers no feature bits, as before there were any; drivers that have accepted some keep them ([details](../guestdrv/linux/README.md#versions)) [true]"},
	}},
}

// Table returns the section's keys as a table in Markdown.
func (s Section) Table() string {
	var b strings.Builder
	b.WriteString("| key | meaning |\n|---|---|\n")
	for _, k := range s.Keys {
		fmt.Fprintf(&b, "| `%s` | %s |\n", k.Key, k.Text)
	}
	return b.String()
}

var (
	// reference is a link of which nothing is left without its target: "([details](#x))".
	reference = regexp.MustCompile(` \(\[(?:details|which|limits|what counts)\]\([^)]*\)(?:, ([^)]*))?\)`)
	link      = regexp.MustCompile(`\[([^][]*)\]\([^)]*\)`)
)

// Plain returns the description without links.
func (k KeyDoc) Plain() string {
	s := reference.ReplaceAllStringFunc(k.Text, func(m string) string {
		if more := reference.FindStringSubmatch(m)[1]; more != "" {
			return " (" + more + ")"
		}
		return ""
	})
	return link.ReplaceAllString(s, "$1")
}

// descriptions are the texts by key, without links.
func descriptions() map[string]string {
	m := map[string]string{}
	for _, s := range Sections {
		for _, k := range s.Keys {
			m[k.Key] = k.Plain()
		}
	}
	return m
}
