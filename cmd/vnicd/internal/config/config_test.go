package config

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/translate"
)

const good = `
host: h1
run-dir: /run/v
engines: 2
spin: 5us
engine-cpus: 3,0
engine-nice: 5
monitoring: {listen: "[::1]:9469", pprof: yes, names: [host1, host1.example]}
vtep:
  local: 192.0.2.1
  dscp: af41
  peer-ports: reserved
evpn:
  as: 65001
  neighbours:
    - {address: 192.0.2.254, password: secret, ttl-security: 1, max-routes: 1000, next-hops: [192.0.2.0/24, 192.0.3.1]}
    - {address: "2001:db8::1", as: 4200000000, passive: true, port: 1790, local-address: "2001:db8::2"}
networks:
  - name: blue
    vni: 100
    peers: [192.0.2.2, 192.0.2.3]
    flood-unknown: false
    route-targets: ["65001:100", "192.0.2.1:7"]
    tap: {name: blue0, addresses: [10.0.0.254/24, "fd00::1/64"], rate: 1G, offloads: off}
  - name: red
    vni: 0x65
    ageing: 10s
    max-entries: 100
    storm: 500
    multicast: snoop
vms:
  - {name: a, network: blue, mac: "02:00:00:00:00:01"}
  - {name: b, network: red, mac: "02:00:00:00:00:01", limits: {qps: 64, pages: 1000, ahs: 32, messages: 10000, memory: 64GiB, host-memory: 64MiB, control-time: 5%}, ips: [10.0.0.1, "fd00::1"], queues: 4, rate: 10G, storm: 0, memory-budget: 256MiB, memory-weight: 400, qmp: /run/b.qmp, dma: ro, hca: ivshmem}
`

func TestParseGood(t *testing.T) {
	c, err := Parse("x.yaml", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	if c.VTEP.DSCP != 34 || c.VTEP.Port != 4789 || c.VTEP.PeerPorts != vxlan.PeerPortsReserved || c.Engines != 2 ||
		c.Spin != 5*time.Microsecond {
		t.Errorf("VTEP %+v, engines %d, spin %v", c.VTEP, c.Engines, c.Spin)
	}
	if !slices.Equal(c.EngineCPUs, []int{3, 0}) || c.EngineNice != 5 {
		t.Errorf("engines on %v, nice %d", c.EngineCPUs, c.EngineNice)
	}
	if p := c.Network("blue").TAP; p.Rate != 1_000_000_000 || p.Offloads {
		t.Errorf("TAP: %+v", p)
	}
	if n := c.Network("red"); n == nil || n.VNI != 101 {
		t.Errorf("network red: %+v", n)
	}
	b, err := c.VM("b")
	if want := (Limits{QPs: 64, AHs: 32, Pages: 1000, Messages: 10000, Memory: 64 << 30,
		HostMemory: 64 << 20, ControlTime: 5}); err != nil || b.Limits != want {
		t.Errorf("VM b: %+v, %v", b, err)
	}
	if a, err := c.VM("a"); err != nil || a.Queues != 1 || a.MemoryWeight != 100 || a.Limits.Memory != 0 ||
		a.Limits.ControlTime != 0 || a.DMA != translate.UplinkReadWrite {
		t.Errorf("VM a: %+v, %v", a, err)
	}
	if got := c.HCASocket(b); got != "/run/v/b.hca" {
		t.Errorf("HCA socket %q", got)
	}
	if len(b.IPs) != 2 || b.Queues != 4 || b.Rate != 10_000_000_000 || b.Storm != -1 || b.MemoryBudget != 256<<20 ||
		b.MemoryWeight != 400 || b.QMP != "/run/b.qmp" || b.HCA != Ivshmem || b.DMA != translate.UplinkReadOnly ||
		b.FileDMA != b.DMA {
		t.Errorf("VM b: %+v", b)
	}
	if n := c.Network("red"); n.Ageing != 10*time.Second || n.MaxEntries != 100 || n.Storm != 500 {
		t.Errorf("network red: %+v", n)
	}
	if e := c.EVPN; e == nil || e.AS != 65001 || e.RouterID != netip.MustParseAddr("192.0.2.1") ||
		!slices.Equal(e.Listen, []netip.Addr{netip.MustParseAddr("192.0.2.1")}) ||
		e.Port != 179 || e.HoldTime != 90*time.Second || len(e.Neighbours) != 2 || e.Neighbours[0].AS != 65001 ||
		e.Neighbours[0].Hops != 1 ||
		e.Neighbours[0].MaxRoutes != 1000 || len(e.Neighbours[0].NextHops) != 2 || e.Neighbours[0].NextHops[1].Bits() != 32 ||
		e.Neighbours[1].AS != 4200000000 || !e.Neighbours[1].Passive || e.Neighbours[1].NextHops != nil {
		t.Errorf("evpn %+v", e)
	}
	if !c.Network("red").Snoop || c.Network("blue").Snoop {
		t.Error("multicast is not as given, or not flood by default")
	}
	if n := c.Network("blue"); n.FloodUnknown || !n.EVPN || len(n.RouteTargets) != 2 ||
		n.RouteTargets[1].String() != "192.0.2.1:7" || !c.Network("red").FloodUnknown {
		t.Errorf("network blue: %+v", n)
	}
	if c.Control != "/run/v/vnicd.sock" {
		t.Errorf("control %q", c.Control)
	}
	mon := Monitoring{Listen: "[::1]:9469", PProf: true, Names: []string{"host1", "host1.example"},
		Group: c.StatusGroup}
	if !reflect.DeepEqual(c.Monitoring, mon) {
		t.Errorf("monitoring %+v", c.Monitoring)
	}
	if _, err := c.VM("z"); err == nil || !strings.Contains(err.Error(), "a, b") {
		t.Errorf("an unknown VM's error must list the known ones: %v", err)
	}
}

// By default, what a peer has sent from decides.
func TestPeerPorts(t *testing.T) {
	for text, want := range map[string]vxlan.PeerPorts{"": vxlan.PeerPortsAuto, ", peer-ports: auto": vxlan.PeerPortsAuto,
		", peer-ports: reserved": vxlan.PeerPortsReserved, ", peer-ports: any": vxlan.PeerPortsAny} {
		c, err := Parse("x.yaml", []byte("vtep: {local: 192.0.2.1"+text+"}"))
		if err != nil {
			t.Errorf("%q: %v", text, err)
		} else if c.VTEP.PeerPorts != want {
			t.Errorf("%q: %v", text, c.VTEP.PeerPorts)
		}
	}
}

// Without the key, the short path is used where possible.
func TestShortPath(t *testing.T) {
	for text, want := range map[string]string{"engines: 1": "nil", "short-path: true": "true",
		"short-path: off": "false"} {
		c, err := Parse("x.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		got := "nil"
		if c.ShortPath != nil {
			got = fmt.Sprint(*c.ShortPath)
		}
		if got != want {
			t.Errorf("%s: %s", text, got)
		}
	}
}

// The host's memory is watched by default.
func TestMemoryPressure(t *testing.T) {
	for text, want := range map[string]MemoryPressure{"engines: 1": {true, 10},
		"memory-pressure: {watch: false}": {false, 10}, "memory-pressure: {limit: 25%}": {true, 25}} {
		c, err := Parse("x.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if c.MemoryPressure != want {
			t.Errorf("%s: %+v", text, c.MemoryPressure)
		}
	}
}

// vm is a file with one VM that has key in line 6.
func vm(key string) string {
	return "networks: [{name: n, vni: 1}]\nvms:\n  - name: v\n    network: n\n    mac: \"02:00:00:00:00:01\"\n    " + key
}

// app is vm with an application.
func app(key string) string { return strings.Replace(vm(key), "vms:", "applications:", 1) }

// An application's permissions are those of VM sockets unless it has its own.
func TestApplication(t *testing.T) {
	c, err := Parse("x.yaml", []byte(app("limits: {qps: 4}")+
		"\n  - {name: w, network: n, mac: \"02:00:00:00:00:02\", socket-mode: 0o600, group: 7, memory: 64MiB}\nsocket-mode: 0o640"))
	if err != nil {
		t.Fatal(err)
	}
	if a := c.VMs[0]; *a.Application != (Application{Mode: 0o640, Memory: 1 << 30}) || a.Limits.QPs != 4 ||
		a.Owner != nil || a.What() != "application" {
		t.Errorf("%+v %+v", a, a.Application)
	}
	if a := c.VMs[1]; *a.Application != (Application{Mode: 0o600, Memory: 64 << 20}) ||
		*a.Owner != (localsocket.Owner{UID: localsocket.None, GID: 7}) {
		t.Errorf("%+v %+v", a.Application, a.Owner)
	}
}

// Owners of sockets are users and groups by name or number, and absent by default.
func TestOwners(t *testing.T) {
	c, err := Parse("x.yaml", []byte("control-group: 0\nstatus-group: root\nstatus: /run/s\nsocket-mode: 0o640\n"+vm("user: root")+
		"\n  - {name: w, network: n, mac: \"02:00:00:00:00:02\", user: 7, group: root}"+
		"\n  - {name: x, network: n, mac: \"02:00:00:00:00:03\"}"))
	if err != nil {
		t.Fatal(err)
	}
	if c.ControlGroup != 0 || c.StatusGroup != 0 || c.Status != "/run/s" {
		t.Errorf("control: groups %d and %d, status at %s", c.ControlGroup, c.StatusGroup, c.Status)
	}
	for i, want := range []*localsocket.Owner{{UID: 0, GID: localsocket.None}, {UID: 7, GID: 0}, nil} {
		v := c.VMs[i]
		if !reflect.DeepEqual(v.Owner, want) || c.SocketPermission(v) != 0o640 {
			t.Errorf("VM %s: %v, mode %o", v.Name, v.Owner, c.SocketPermission(v))
		}
	}
	c, err = Parse("x.yaml", []byte("run-dir: /run/v\n"+vm("queues: 1")))
	if err != nil {
		t.Fatal(err)
	}
	if c.Status != "/run/v/vnicd-status.sock" || c.ControlGroup != groupOr(DefaultControlGroup, localsocket.None) ||
		c.StatusGroup != groupOr(DefaultStatusGroup, localsocket.None) {
		t.Errorf("defaults: groups %d and %d, status at %s", c.ControlGroup, c.StatusGroup, c.Status)
	}
	if groupOr("no such group", -5) != -5 || groupOr("root", -5) != 0 {
		t.Error("default groups are those that the host has")
	}
}

// Each mistake is reported with its line and what was expected.
func TestParseMistakes(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"empty", "", "the file is empty"},
		{"syntax", "a: [1\nb: 2", "x.yaml:"},
		{"two documents", "engines: 1\n---\nengines: 2\n", "one YAML document"},
		{"unknown key", "engine: 1",
			`x.yaml:1: unknown key "engine" in the configuration; known: applications, buffers, control, control-group, debug, ecn, engine-cpus`},
		{"unknown nested key", "networks:\n  - name: a\n    vni: 1\n    vlan: 3",
			`x.yaml:4: unknown key "vlan" in a network`},
		{"twice", "engines: 1\nengines: 2", `x.yaml:2: key "engines" is there twice`},
		{"range", "engines: 99", `x.yaml:1: engines must be a number from 1 to 8, found "99"`},
		{"type", "engines: [1]", "x.yaml:1: engines needs a value, found a list"},
		{"null", "engines:", "engines needs a value, found nothing"},
		{"processors", "engine-cpus: 3-2",
			`x.yaml:1: engine-cpus must be a list of processors, 0 to 1023, such as 2-3,8, found "3-2"`},
		{"processor -1", "engine-cpus: -1", "engine-cpus must be a list of processors"},
		{"processor 1024", "engine-cpus: 1-1024", "engine-cpus must be a list of processors"},
		{"processor twice", "engines: 3\nengine-cpus: 4,3-4", "x.yaml:2: engine-cpus names processor 4 twice"},
		{"too few processors", "engines: 3\nengine-cpus: 2-3",
			"engine-cpus must name one processor for each of the 3 engines, found 2"},
		{"nice", "engine-nice: -21", "engine-nice must be a number from -20 to 19"},
		{"debug key at the top", "local-copy: false", "x.yaml:1: key \"local-copy\" belongs under `debug:`"},
		{"debug", "debug: {local-copy: 3, ecn: false}",
			"unknown key \"ecn\" in debug; known: guest-features, local-copy, segmentation, selective-repeat"},
		{"spin", "spin: fast", "spin must be a duration"},
		{"short path", "short-path: auto", `x.yaml:1: short-path must be true or false, found "auto"`},
		{"log", "log-level: loud", "log-level must be trace, debug"},
		{"monitoring", "monitoring: {listen: 9469}",
			"x.yaml:1: monitoring listen must be HOST:PORT such as 127.0.0.1:9469, or an absolute path for a unix socket, found \"9469\""},
		{"monitoring port", "monitoring: {listen: \"localhost:0\"}", "monitoring listen must be HOST:PORT"},
		{"monitoring page", "monitoring: {page: perhaps}", "x.yaml:1: monitoring page must be"},
		{"monitoring nowhere", "monitoring: {pprof: true}", "x.yaml:1: monitoring needs `listen`"},
		{"monitoring names", "monitoring: {page: true, names: [\"host1:9469\"]}",
			"x.yaml:1: monitoring names must be host names such as host1.example, without port, found \"host1:9469\""},
		{"monitoring path", "monitoring: {listen: /" + strings.Repeat("x", 120) + "}", "monitoring listen is 121 bytes long"},
		{"relative", "run-dir: here", "run-dir must be an absolute path"},
		{"vni", "networks:\n  - name: a\n    vni: 16777216", "x.yaml:3: vni must be a number from 1 to 16777215"},
		{"vni missing", "networks:\n  - name: a", "x.yaml:2: a network needs `vni`"},
		{"vni twice", "networks:\n  - {name: a, vni: 7}\n  - {name: b, vni: 7}",
			"x.yaml:3: vni 7 is already used by the network in line 2"},
		{"name twice", "networks:\n  - {name: a, vni: 7}\n  - {name: a, vni: 8}",
			`x.yaml:3: network name "a" is already used in line 2`},
		{"mac", "vms:\n  - {name: v, network: n, mac: \"01:00:00:00:00:01\"}",
			"x.yaml:2: mac must be a unicast Ethernet address"},
		{"mac twice",
			"networks: [{name: n, vni: 1}]\nvms:\n  - {name: v, network: n, mac: \"02:00:00:00:00:01\"}\n  - {name: w, network: n, mac: \"02:00:00:00:00:01\"}", `x.yaml:4: mac 02:00:00:00:00:01 is already used in network "n" by the VM in line 3`},
		{"no network", "vms:\n  - {name: v, network: n, mac: \"02:00:00:00:00:01\"}",
			`x.yaml:2: VM "v" is in network "n", which is not defined; defined: none`},
		{"peer family", "vtep: {local: 192.0.2.1}\nnetworks:\n  - {name: a, vni: 1, peers: [\"2001:db8::1\"]}",
			"x.yaml:3: peer 2001:db8::1 of network \"a\" is of another address family"},
		{"peer self", "vtep: {local: 192.0.2.1}\nnetworks:\n  - {name: a, vni: 1, peers: [192.0.2.1]}",
			"is this host itself"},
		{"peer without vtep", "networks:\n  - {name: a, vni: 1, peers: [192.0.2.1]}", "there is no `vtep` section"},
		{"vtep local", "vtep: {port: 4789}", "vtep needs `local`"},
		{"dscp", "vtep: {local: 192.0.2.1, dscp: af99}", "dscp must be 0 to 63"},
		{"peer-ports", "vtep: {local: 192.0.2.1, peer-ports: 1023}", `x.yaml:1: peer-ports must be auto, reserved or any, found "1023"`},
		{"tap name", "networks:\n  - {name: a, vni: 1, tap: {name: a-name-far-too-long}}", "is not an interface name"},
		{"tap address", "networks:\n  - {name: a, vni: 1, tap: {name: t, addresses: [10.0.0.1]}}",
			"an address must be IP/LENGTH"},
		{"rate", "vms:\n  - {name: v, network: n, mac: \"02:00:00:00:00:01\", rate: 10g}",
			`rate must be bits per second from 64k to 1000G such as 10G, found "10g"`},
		{"rate range", "vms:\n  - {name: v, network: n, mac: \"02:00:00:00:00:01\", rate: 1001G}", "rate must be"},
		{"budget unit", vm("memory-budget: 256"),
			`x.yaml:6: memory-budget must be a whole number of KiB, MiB, GiB or TiB, at least 4 MiB, such as 256MiB, found "256"`},
		{"budget unit of 1000", vm("memory-budget: 256MB"), "memory-budget must be"},
		{"host-memory unit", vm("limits: {host-memory: 300}"),
			`x.yaml:6: limits host-memory must be a whole number of KiB, MiB, GiB or TiB, at least 1 MiB, such as 256MiB, found "300"`},
		{"control-time unit", vm("limits: {control-time: 0.5}"),
			`x.yaml:6: limits control-time must be a whole percentage, 1% to 100%, such as 10%, found "0.5"`},
		{"control-time none", vm("limits: {control-time: 0%}"), "limits control-time must be"},
		{"host-memory small", vm("limits: {host-memory: 1000KiB}"), "limits host-memory must be"},
		{"budget fraction", vm("memory-budget: 1.5GiB"), "memory-budget must be"},
		{"budget small", vm("memory-budget: 4095KiB"), "memory-budget must be"},
		{"budget sign", vm("memory-budget: -1GiB"), "memory-budget must be"},
		{"shared memory unit", vm("limits: {memory: 64}"),
			`x.yaml:6: limits memory must be a whole number of KiB, MiB, GiB or TiB, at least 1 MiB, such as 256MiB, found "64"`},
		{"shared memory small", vm("limits: {memory: 512KiB}"), "limits memory must be"},
		{"budget huge", vm("memory-budget: 8388608TiB"), "memory-budget must be"},
		{"weight", vm("memory-weight: 0"), "x.yaml:6: memory-weight must be a number from 1 to 10000"},
		{"pressure", "memory-pressure: off", "x.yaml:1: memory-pressure must be a mapping of keys"},
		{"pressure key", "memory-pressure: {psi: 10%}", `x.yaml:1: unknown key "psi" in memory-pressure; known: limit, watch`},
		{"pressure limit", "memory-pressure: {limit: 10}",
			`x.yaml:1: memory-pressure limit must be a whole percentage, 1% to 100%, such as 10%, found "10"`},
		{"pressure limit 0", "memory-pressure: {limit: 0%}", "must be a whole percentage"},
		{"pressure limit 101", "memory-pressure: {limit: 101%}", "must be a whole percentage"},
		{"dma", vm("dma: read-only"), `x.yaml:6: dma must be rw, ro or blocked, found "read-only"`},
		{"hca", vm("hca: ivshmem-doorbell"), `x.yaml:6: hca must be auto, vhost-user or ivshmem, found "ivshmem-doorbell"`},
		{"application hca", app("hca: ivshmem"), `x.yaml:6: unknown key "hca"`},
		{"dma list", vm("dma: [ro]"), "x.yaml:6: dma needs a value"},
		{"dma empty", vm("dma:"), "x.yaml:6: dma needs a value"},
		{"dma switched off", vm("dma: false"), `x.yaml:6: dma must be rw, ro or blocked, found "false"`},
		{"application dma", app("dma: none"), `x.yaml:6: dma must be rw, ro or blocked, found "none"`},
		{"qmp relative", vm("qmp: vm.qmp"), `x.yaml:3: qmp must be an absolute path of at most 107 bytes, found "vm.qmp"`},
		{"qmp twice", vm("qmp: /a") + "\n  - {name: w, network: n, mac: \"02:00:00:00:00:02\", qmp: /a}",
			"x.yaml:7: qmp /a is already used by the VM in line 3; a monitor serves one client"},
		{"ageing", "networks:\n  - {name: a, vni: 1, ageing: 300}", `ageing must be a duration from 1s`},
		{"ip", "vms:\n  - {name: v, network: n, mac: \"02:00:00:00:00:01\", ips: [224.0.0.1]}",
			"x.yaml:2: ips must be a unicast IP address"},
		{"ip twice",
			"networks: [{name: n, vni: 1}]\nvms:\n  - {name: v, network: n, mac: \"02:00:00:00:00:01\", ips: [10.0.0.1]}\n  - {name: w, network: n, mac: \"02:00:00:00:00:02\", ips: [10.0.0.1]}", `x.yaml:4: ip 10.0.0.1 is already used in network "n" by the VM in line 3`},
		{"application key", app("queues: 2"),
			`x.yaml:6: unknown key "queues" in an application; known: dma, group, ips, limits, mac, memory, memory-budget, memory-weight, name, network, rate, socket-mode, storm, user`},
		{"application mode", app("socket-mode: 0o1777"), "x.yaml:6: socket-mode must be a number from 1 to 511"},
		{"multicast", "networks: [{name: n, vni: 1, multicast: drop}]",
			`x.yaml:1: multicast must be snoop or flood, found "drop"`},
		{"multicast list", "networks: [{name: n, vni: 1, multicast: [snoop]}]",
			`x.yaml:1: multicast needs a value, found a list`},
		{"user", vm("user: nobody at all"), `x.yaml:6: user must be a user of this host or its number, found "nobody at all"`},
		{"negative user", vm("user: -1"), `x.yaml:6: user must be a user of this host or its number, found "-1"`},
		{"empty user", vm("user:"), `x.yaml:6: user needs a value, found nothing`},
		{"group", vm("group: [a]"), `x.yaml:6: group needs a value, found a list`},
		{"control group", "control-group: no such group",
			`x.yaml:1: control-group must be a group of this host or its number, found "no such group"`},
		{"status group", "status-group: 4294967295", `x.yaml:1: status-group must be a group of this host or its number`},
		{"status", "status: here", "status must be an absolute path"},
		{"one socket", "control: /run/s\nstatus: /run/s", "control and status must be different sockets"},
		{"application group", app("group: no such group"),
			`x.yaml:6: group must be a group of this host or its number, found "no such group"`},
		{"application memory", app("memory: 1000"), "x.yaml:6: memory must be a whole number of KiB"},
		{"application network", "applications:\n  - {name: a, network: n, mac: \"02:00:00:00:00:01\"}",
			`x.yaml:2: application "a" is in network "n", which is not defined`},
		{"application like a VM", vm("rate: 1G") + "\napplications: [{name: v, network: n, mac: \"02:00:00:00:00:02\"}]",
			`x.yaml:7: application name "v" is already used in line 3`},
		{"bad VM name", "vms:\n  - {name: ../x, network: n, mac: \"02:00:00:00:00:01\"}", `VM name "../x" must be`},
		{"evpn without vtep", "evpn: {as: 1, neighbours: [{address: 192.0.2.2}]}", "x.yaml:1: evpn needs a `vtep` section"},
		{"evpn as", "evpn: {neighbours: [{address: 192.0.2.2}]}", "x.yaml:1: evpn needs `as`"},
		{"evpn alone", "vtep: {local: 192.0.2.1}\nevpn: {as: 1, neighbours: []}",
			"x.yaml:2: evpn has 0 neighbours; it needs 1 to 64"},
		{"router id", "vtep: {local: \"2001:db8::1\"}\nevpn: {as: 1, neighbours: [{address: 192.0.2.2}]}",
			"x.yaml:2: evpn needs `router-id`"},
		{"router id family",
			"vtep: {local: 192.0.2.1}\nevpn: {as: 1, router-id: \"::2\", neighbours: [{address: 192.0.2.2}]}",
			"router-id must be written as an IPv4 address"},
		{"neighbour twice",
			"vtep: {local: 192.0.2.1}\nevpn:\n  as: 1\n  neighbours:\n    - {address: 192.0.2.2}\n    - {address: 192.0.2.2}",
			"x.yaml:6: neighbour 192.0.2.2 is already listed in line 5"},
		{"neighbour self", "vtep: {local: 192.0.2.1}\nevpn: {as: 1, neighbours: [{address: 192.0.2.1}]}",
			"neighbour 192.0.2.1 is this host itself"},
		{"neighbour key", "vtep: {local: 192.0.2.1}\nevpn: {as: 1, neighbours: [{address: 192.0.2.2, secret: x}]}",
			`x.yaml:2: unknown key "secret" in a neighbour`},
		{"neighbour next hop",
			"vtep: {local: 192.0.2.1}\nevpn: {as: 1, neighbours: [{address: 192.0.2.2, next-hops: [all]}]}",
			"a next hop must be an IP address or IP/LENGTH"},
		{"password", "vtep: {local: 192.0.2.1}\nevpn: {as: 1, neighbours: [{address: 192.0.2.2, password: " +
			strings.Repeat("x", 81) + "}]}", "password is 81 bytes long; it may have 80"},
		{"passive, nowhere",
			"vtep: {local: 192.0.2.1}\nevpn: {as: 1, port: 0, neighbours: [{address: 192.0.2.2, passive: true}]}",
			"neighbour 192.0.2.2 is passive"},
		{"route target", "networks:\n  - {name: a, vni: 1, route-targets: [blue]}", `x.yaml:2: a route target is AS:NUMBER`},
		{"route target alone", "networks:\n  - {name: a, vni: 1, route-targets: [\"1:1\"]}",
			"has route-targets, but there is no `evpn` section"},
		{"long path", "run-dir: /" + strings.Repeat("x", 120), "a unix socket's path has at most 107"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse("x.yaml", []byte(tc.text))
			var e *Errors
			if !errors.As(err, &e) {
				t.Fatalf("error %v, want *Errors", err)
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got:\n%v\nwant it to contain:\n%s", err, tc.want)
			}
		})
	}
}

// All mistakes are reported at once, in the order of their lines.
func TestParseReportsAll(t *testing.T) {
	_, err := Parse("x.yaml", []byte("vms: 3\nengines: 0\nwhat: 1\n"))
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[0], "x.yaml:1:") || !strings.HasPrefix(lines[2], "x.yaml:3:") {
		t.Errorf("got:\n%v", err)
	}
}

// A mistake's place has its key, with the elements of lists counted from 0.
func TestKeys(t *testing.T) {
	_, err := Parse("x.yaml", []byte(`engines: 9
vtep: {local: 192.0.2.1, port: 0}
networks:
  - {name: a, vni: 1, peers: [192.0.2.2, x], vlan: 3}
  - {name: b, vni: 2, tap: {rate: 1}}
  - {name: a, vni: 3}
vms:
  - {name: v, network: z, mac: "02:00:00:00:00:01", limits: {qps: 1}}
control: here
`))
	var e *Errors
	if !errors.As(err, &e) {
		t.Fatalf("error %v, want *Errors", err)
	}
	var got []string
	for _, x := range e.List() {
		got = append(got, fmt.Sprintf("%d %s", x.Line, x.Key))
	}
	want := []string{"1 engines", "2 vtep.port", "4 networks[0].peers[1]", "4 networks[0].vlan", "5 networks[1].tap.rate",
		"5 networks[1].tap", "6 networks[2].name", "8 vms[0].limits.qps", "8 vms[0].network", "9 control"}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q:\n%v", got, want, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(good)
	f.Add("a: &x [*x]")
	f.Add("vms: [{limits: {<<: 1}}]")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := Parse("x", []byte(s))
		if (c == nil) == (err == nil) {
			t.Fatalf("config %v with error %v", c, err)
		}
	})
}
