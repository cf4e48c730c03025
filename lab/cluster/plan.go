package cluster

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// The prefixes of the underlay and of the VMs' network. A machine's own networks do not matter: the cluster has a
// network namespace of its own.
var (
	underlayPrefix = netip.MustParsePrefix("192.0.2.0/24") // RFC 5737
	tenantPrefix   = netip.MustParsePrefix("10.77.0.0/16")
)

// hostPlan has the names and addresses of a host.
type hostPlan struct {
	name     string
	underlay netip.Prefix
	// port is the address of the host's own port in the VMs' network, from which it reaches them.
	port netip.Prefix
	vms  []vmPlan
}

// vmPlan has the names and addresses of a VM.
type vmPlan struct {
	name string
	rank int // from 0
	mac  string
	addr netip.Prefix
}

// plan returns the hosts of a cluster of valid size. VM number i is vmI; the first VMs are on the first host.
func plan(hosts, vmsPerHost int) []hostPlan {
	var ps []hostPlan
	rank := 0
	for h := 1; h <= hosts; h++ {
		p := hostPlan{name: "h" + strconv.Itoa(h), underlay: host(underlayPrefix, 0, h), port: host(tenantPrefix, 255, h)}
		for range vmsPerHost {
			p.vms = append(p.vms, vmPlan{name: "vm" + strconv.Itoa(rank+1), rank: rank,
				mac: fmt.Sprintf("02:00:00:00:00:%02x", rank+1), addr: host(tenantPrefix, 0, rank+1)})
			rank++
		}
		ps = append(ps, p)
	}
	return ps
}

// host returns an IPv4 prefix with its last two bytes replaced, the third only if the prefix is short enough.
func host(p netip.Prefix, third byte, last int) netip.Prefix {
	a := p.Addr().As4()
	if p.Bits() <= 16 {
		a[2] = third
	}
	a[3] = byte(last)
	return netip.PrefixFrom(netip.AddrFrom4(a), p.Bits())
}

// configuration returns the configuration file of vnicd on host h of the plan.
func configuration(ps []hostPlan, h int) string {
	var b strings.Builder
	var peers []string
	for i, p := range ps {
		if i != h {
			peers = append(peers, p.underlay.Addr().String())
		}
	}
	fmt.Fprintf(&b, "vtep: {local: %s}\nnetworks:\n  - {name: lab, vni: 100, peers: [%s], "+
		"tap: {name: lab0, addresses: [%s]}}\nvms:\n", ps[h].underlay.Addr(), strings.Join(peers, ", "), ps[h].port)
	for _, v := range ps[h].vms {
		fmt.Fprintf(&b, "  - {name: %s, network: lab, mac: %q}\n", v.name, v.mac)
	}
	return b.String()
}

// vmsOf returns the VMs of all hosts in the order of their ranks.
func vmsOf(ps []hostPlan) (vms []vmPlan) {
	for _, p := range ps {
		vms = append(vms, p.vms...)
	}
	return vms
}

// environment returns the variables that tell a program in a VM of its place among all.
func environment(dir string, vms []vmPlan, v vmPlan) []string {
	var names, addrs []string
	for _, o := range vms {
		names, addrs = append(names, o.name), append(addrs, o.addr.Addr().String())
	}
	return []string{
		"VNICD_LAB_HOSTS=" + strings.Join(names, ","),
		"VNICD_LAB_ADDRESSES=" + strings.Join(addrs, ","),
		"VNICD_LAB_RANK=" + strconv.Itoa(v.rank),
		"VNICD_LAB_SIZE=" + strconv.Itoa(len(vms)),
		"VNICD_LAB_DIR=" + dir,
	}
}
