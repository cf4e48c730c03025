package config

import (
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/virtio/vnet"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// The keys of each mapping: how they are read, and so what the published schema says of them. docs.go describes them.

// field is a key: how its value is read, and what that may be.
type field struct {
	read func(*yaml.Node)
	is   *Schema
}

// object is a mapping.
type object struct {
	what string // in messages
	keys map[string]field
	need []string // keys that each mapping of this kind has; a section may have them in another file
}

// section returns the field of a mapping that read reads.
func section(o object, read func(*yaml.Node)) field { return field{read, o.schema()} }

// list returns the field of a list with elements that each reads.
func (p *parser) list(what string, item *Schema, each func(*yaml.Node)) field {
	return field{func(n *yaml.Node) { p.sequence(n, what, each) }, listOf(item)}
}

const topLevel = "the configuration" // in messages

// top has the keys of the whole.
func (p *parser) top(c *Config) object {
	pressure := object{what: "memory-pressure", keys: map[string]field{
		"watch": p.boolean("memory-pressure watch", &c.MemoryPressure.Watch),
		"limit": p.percent("memory-pressure limit", &c.MemoryPressure.Limit),
	}}
	debug := p.debug(&c.Debug)
	shortPath := new(bool)
	short := p.boolean("short-path", shortPath)
	return object{what: topLevel, keys: map[string]field{
		"host":    p.str("host", anyText, &c.Host),
		"run-dir": p.str("run-dir", anyPath, &c.RunDir),
		"control": p.str("control", filePath, &c.Control),
		"status":  p.str("status", filePath, &c.Status),

		"control-group": p.group("control-group", func(gid int) { c.ControlGroup = gid }),
		"status-group":  p.group("status-group", func(gid int) { c.StatusGroup = gid }),

		"socket-mode":     number(p, "socket-mode", 0, 0o777, &c.SocketMode),
		"engines":         number(p, "engines", 1, MaxEngines, &c.Engines),
		"engine-cpus":     p.cpus("engine-cpus", &c.EngineCPUs),
		"engine-nice":     p.nice("engine-nice", &c.EngineNice),
		"buffers":         number(p, "buffers", 256, 1<<20, &c.Buffers),
		"spin":            p.duration("spin", 0, time.Second, "20us", &c.Spin),
		"ecn":             p.boolean("ecn", &c.ECN),
		"journal":         p.boolean("journal", &c.Journal),
		"debug":           section(debug, func(n *yaml.Node) { p.mapping(n, debug) }),
		"memory-pressure": section(pressure, func(n *yaml.Node) { p.mapping(n, pressure) }),
		"short-path": {func(n *yaml.Node) {
			c.ShortPath = shortPath
			short.read(n)
		}, short.is},
		"log-level": p.choice("log-level", []string{"trace", "debug", "info", "warn", "error"},
			func(s string) { c.LogLevel = s }),
		"monitoring": section(p.monitoringKeys(&c.Monitoring), func(n *yaml.Node) { p.monitoring(n, &c.Monitoring) }),
		"vtep":       section(p.vtepKeys(&VTEP{}), func(n *yaml.Node) { c.VTEP = p.vtep(n) }),
		"underlay":   section(p.underlayKeys(&Underlay{}, new(string)), func(n *yaml.Node) { c.Underlay = p.underlay(n) }),
		"evpn":       section(p.evpnKeys(&EVPN{}), func(n *yaml.Node) { c.EVPN = p.evpn(n) }),
		"networks": p.list("networks", p.networkKeys(&Network{}).schema(),
			func(e *yaml.Node) { c.Networks = append(c.Networks, p.network(e)) }),
		"vms": p.list("vms", p.vmKeys(&VM{}).schema(), func(e *yaml.Node) { c.VMs = append(c.VMs, p.vm(e)) }),
		"applications": p.list("applications", p.applicationKeys(&VM{Application: &Application{}}).schema(),
			func(e *yaml.Node) { c.VMs = append(c.VMs, p.application(e)) }),
	}}
}

// debugKeys are the keys of `debug`, which people look for at the top.
var debugKeys = newParser().debug(&Debug{}).keys

func (p *parser) debug(d *Debug) object {
	return object{what: "debug", keys: map[string]field{
		"local-copy":       p.boolean("debug local-copy", &d.LocalCopy),
		"segmentation":     p.boolean("debug segmentation", &d.Segmentation),
		"selective-repeat": p.boolean("debug selective-repeat", &d.SelectiveRepeat),
		"guest-features":   p.boolean("debug guest-features", &d.GuestFeatures),
	}}
}

func (p *parser) monitoringKeys(m *Monitoring) object {
	return object{what: "monitoring", keys: map[string]field{
		"listen": {func(n *yaml.Node) {
			s, ok := p.scalar(n, "monitoring listen")
			if !ok {
				return
			}
			if !filepath.IsAbs(s) {
				_, port, err := net.SplitHostPort(s)
				if v, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || v == 0 {
					p.fail(n,
						"monitoring listen must be HOST:PORT such as 127.0.0.1:9469, or an absolute path for a unix socket, found %q", s)
					return
				}
			}
			m.Listen = s
		}, text("^/|:[0-9]+$")},
		"names": p.list("monitoring names", hostName, func(e *yaml.Node) {
			s, ok := p.scalar(e, "a name of the server")
			if !ok {
				return
			}
			if len(s) > hostName.MaxLength || !nameRule.MatchString(s) {
				p.fail(e, "monitoring names must be host names such as host1.example, without port, found %q", s)
				return
			}
			m.Names = append(m.Names, s)
		}),
		"pprof": p.boolean("monitoring pprof", &m.PProf),
		"page":  p.boolean("monitoring page", &m.Page),
		"web-config": {func(n *yaml.Node) {
			s, ok := p.scalar(n, "monitoring web-config")
			if ok && !filepath.IsAbs(s) {
				p.fail(n, "monitoring web-config must be an absolute path, found %q", s)
				return
			}
			m.WebConfig = s
		}, anyPath},
	}}
}

func (p *parser) monitoring(n *yaml.Node, m *Monitoring) {
	seen := p.mapping(n, p.monitoringKeys(m))
	switch {
	case seen["listen"]:
	case m.Page:
		m.Listen = DefaultMonitoring
	default:
		p.fail(n, "monitoring needs `listen`, its address")
	}
}

func (p *parser) vtepKeys(v *VTEP) object {
	return object{what: "vtep", keys: map[string]field{
		"local":          p.address("vtep local", &v.Local),
		"port":           number(p, "vtep port", 1, 65535, &v.Port),
		"dscp":           p.dscp("dscp", &v.DSCP),
		"zero-checksum6": p.boolean("zero-checksum6", &v.ZeroChecksum6),
		"peer-ports": p.choice("peer-ports", []string{"auto", "reserved", "any"},
			func(s string) { v.PeerPorts, _ = vxlan.ParsePeerPorts(s) }),
	}}
}

func (p *parser) vtep(n *yaml.Node) *VTEP {
	v := &VTEP{Port: DefaultVXLANPort, DSCP: DefaultDSCP}
	if seen := p.mapping(n, p.vtepKeys(v)); !seen["local"] {
		p.fail(n, "vtep needs `local`, the underlay address of this host")
	}
	return v
}

func (p *parser) networkKeys(net *Network) object {
	return object{"a network", map[string]field{
		"name":        p.str("network name", aName, &net.Name),
		"vni":         number(p, "vni", 1, MaxVNI, &net.VNI),
		"mtu":         number(p, "mtu", minMTU, maxMTU, &net.MTU),
		"learn-peers": p.boolean("learn-peers", &net.LearnPeers),
		"peers":       p.addresses("peers", &net.Peers),
		"ageing":      p.duration("ageing", time.Second, 365*24*time.Hour, "300s", &net.Ageing),
		"max-entries": number(p, "max-entries", 1, vswitch.MaxMaxEntries, &net.MaxEntries),
		"storm":       p.storm(&net.Storm),
		"multicast": p.choice("multicast", []string{"snoop", "flood"},
			func(s string) { net.Snoop = s == "snoop" }),
		"flood-unknown": p.boolean("flood-unknown", &net.FloodUnknown),
		"evpn":          p.boolean("evpn", &net.EVPN),
		"route-targets": p.targets(&net.RouteTargets),
		"tap":           section(p.tapKeys(&TAP{}), func(n *yaml.Node) { net.TAP = p.tap(n) }),
	}, []string{"name", "vni"}}
}

func (p *parser) network(n *yaml.Node) *Network {
	net := &Network{At: p.place(n), FloodUnknown: true, EVPN: true}
	p.read(n, p.networkKeys(net))
	return net
}

func (p *parser) tapKeys(t *TAP) object {
	return object{"tap", map[string]field{
		"name":     p.str("tap name", aDevice, &t.Name),
		"bridge":   p.str("tap bridge", anyText, &t.Bridge),
		"rate":     p.rate(&t.Rate),
		"offloads": p.boolean("tap offloads", &t.Offloads),
		"addresses": p.list("addresses", text("/[0-9]+$"), func(e *yaml.Node) {
			s, ok := p.scalar(e, "an address")
			if !ok {
				return
			}
			a, err := netip.ParsePrefix(s)
			if err != nil {
				p.fail(e, "an address must be IP/LENGTH such as 10.0.0.1/24, found %q", s)
				return
			}
			t.Addresses = append(t.Addresses, a)
		}),
	}, []string{"name"}}
}

func (p *parser) tap(n *yaml.Node) *TAP {
	t := &TAP{At: p.place(n), Offloads: true}
	p.read(n, p.tapKeys(t))
	return t
}

func (p *parser) vmKeys(vm *VM) object {
	o := p.client("VM", "a VM", vm)
	o.keys["queues"] = number(p, "queues", 1, vnet.MaxPairs, &vm.Queues)
	o.keys["qmp"] = p.str("qmp", filePath, &vm.QMP)
	o.keys["hca"] = p.choice("hca", []string{Auto, VhostUser, Ivshmem}, func(s string) { vm.HCA = s })
	return o
}

func (p *parser) vm(n *yaml.Node) *VM {
	vm := &VM{At: p.place(n), Queues: 1, HCA: Auto, MemoryWeight: DefaultMemoryWeight}
	p.read(n, p.vmKeys(vm))
	return vm
}

func (p *parser) applicationKeys(vm *VM) object {
	o := p.client("application", "an application", vm)
	o.keys["memory"] = p.size("memory", 1<<20, &vm.Application.Memory)
	o.keys["socket-mode"] = number(p, "socket-mode", 1, 0o777, &vm.Application.Mode)
	return o
}

func (p *parser) application(n *yaml.Node) *VM {
	vm := &VM{At: p.place(n), MemoryWeight: DefaultMemoryWeight, Application: &Application{Memory: defaultAppMemory}}
	p.read(n, p.applicationKeys(vm))
	return vm
}

// client has the keys that VMs and applications share.
func (p *parser) client(kind, what string, vm *VM) object {
	limits := object{what: "limits", keys: map[string]field{
		"qps":          number(p, "limits qps", 2, maxQPs, &vm.Limits.QPs),
		"cqs":          number(p, "limits cqs", 2, maxQPs, &vm.Limits.CQs),
		"mrs":          number(p, "limits mrs", 1, maxMRs, &vm.Limits.MRs),
		"ahs":          number(p, "limits ahs", 2, maxAHs, &vm.Limits.AHs),
		"pages":        number(p, "limits pages", 1, 1<<36, &vm.Limits.Pages),
		"host-memory":  p.size("limits host-memory", 1<<20, &vm.Limits.HostMemory),
		"memory":       p.size("limits memory", 1<<20, &vm.Limits.Memory),
		"control-time": p.percent("limits control-time", &vm.Limits.ControlTime),
		"messages":     number(p, "limits messages", 1, hca.MaxMessages, &vm.Limits.Messages),
	}}
	return object{what, map[string]field{
		"name":    p.str(kind+" name", aName, &vm.Name),
		"network": p.str(kind+" network", aName, &vm.Network),
		"mac":     p.mac("mac", &vm.MAC),
		"user":    p.user("user", func(uid int) { vm.owner().UID = uid }),
		"group":   p.group("group", func(gid int) { vm.owner().GID = gid }),
		"ips":     p.addresses("ips", &vm.IPs),
		"rate":    p.rate(&vm.Rate),
		"storm":   p.storm(&vm.Storm),

		"memory-budget": p.size("memory-budget", hostdriver.MinBudget, &vm.MemoryBudget),
		"memory-weight": number(p, "memory-weight", 1, maxMemoryWeight, &vm.MemoryWeight),
		"dma": p.choice("dma", []string{"rw", "ro", "blocked"}, func(s string) {
			vm.DMA, _ = translate.ParseUplink(s)
			vm.FileDMA = vm.DMA
		}),
		"limits": section(limits, func(n *yaml.Node) { p.mapping(n, limits) }),
	}, []string{"name", "network", "mac"}}
}
