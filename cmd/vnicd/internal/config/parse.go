package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/virtio/vnet"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/translate"
)

// Parse checks data, a whole configuration; path only names it in messages. Errors are *Errors.
func Parse(path string, data []byte) (*Config, error) {
	return parse(path, []source{{path, data}}, Errors{Files: []string{path}})
}

// parse reads and checks the files of a configuration whose main file is at path. errs are mistakes of files that are
// not among them.
func parse(path string, files []source, errs Errors) (*Config, error) {
	p := newParser()
	p.errs, p.incomplete = errs, len(errs.list) > 0
	c := &Config{
		Path: path, RunDir: DefaultRunDir, SocketMode: DefaultSocketMode, Engines: DefaultEngines, ECN: true, Journal: true,
		Debug:      Debug{LocalCopy: true, Segmentation: true, SelectiveRepeat: true, GuestFeatures: true},
		EngineNice: DefaultEngineNice,
		Spin:       DefaultSpin, Buffers: DefaultBuffers, LogLevel: "info",
		MemoryPressure: MemoryPressure{Watch: true, Limit: DefaultPressureLimit},
		ControlGroup:   groupOr(DefaultControlGroup, localsocket.None),
		StatusGroup:    groupOr(DefaultStatusGroup, localsocket.None),
	}
	all := &yaml.Node{Kind: yaml.MappingNode}
	for _, f := range files {
		if n := p.decode(f); n != nil && p.isMapping(n, topLevel) {
			p.merge(topLevel, all, n)
		}
	}
	if len(all.Content) == 0 && len(p.errs.list) == 0 {
		p.errs.add(Place{File: path}, "the file is empty; it needs at least `networks` and `vms`")
	}
	p.top(all, c)
	c.Files, c.Keys, c.Overrides = p.errs.Files, p.keys, p.overrides
	if c.Control == "" {
		c.Control = c.RunDir + "/vnicd.sock"
	}
	if c.Status == "" {
		c.Status = c.RunDir + "/vnicd-status.sock"
	}
	c.Monitoring.Group = c.StatusGroup
	if c.Host == "" {
		c.Host, _ = os.Hostname()
	}
	if !p.incomplete { // otherwise much would seem to be undefined
		c.check(&p.errs)
	}
	if err := p.errs.orNil(); err != nil {
		return nil, err
	}
	return c, nil
}

// parser walks the tree of a configuration.
type parser struct {
	errs       Errors
	incomplete bool                  // a file could not be read
	files      map[*yaml.Node]string // of each node
	key        string                // path of the node that is read
	keys       map[string]Place      // as Config.Keys
	overrides  []Override
}

func newParser() *parser { return &parser{files: map[*yaml.Node]string{}, keys: map[string]Place{}} }

// decode returns the root of a file's tree; nil: the file has mistakes or nothing but comments.
func (p *parser) decode(f source) *yaml.Node {
	dec := yaml.NewDecoder(bytes.NewReader(f.data))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		p.syntax(f.path, err)
		return nil
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		p.errs.add(Place{File: f.path}, "the file must hold one YAML document")
	}
	p.register(&doc, f.path)
	return doc.Content[0]
}

// register notes the file of a tree.
func (p *parser) register(n *yaml.Node, file string) {
	p.files[n] = file
	for _, c := range n.Content {
		p.register(c, file)
	}
}

// place returns where a node stands.
func (p *parser) place(n *yaml.Node) Place { return Place{File: p.files[n], Line: n.Line, Key: p.key} }

// fail reports a mistake in a node.
func (p *parser) fail(n *yaml.Node, format string, args ...any) {
	p.errs.add(p.place(n), format, args...)
}

// under calls f to read a node whose path is key.
func (p *parser) under(key string, f func()) {
	before := p.key
	p.key = key
	f()
	p.key = before
}

var yamlLine = regexp.MustCompile(`^yaml: line (\d+): (.*)$`)

func (p *parser) syntax(file string, err error) {
	p.incomplete = true
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		line, _ := strconv.Atoi(m[1])
		p.errs.add(Place{File: file, Line: line}, "not YAML: %s", m[2])
		return
	}
	p.errs.add(Place{File: file}, "not YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
}

// mapping calls the field function of every key. Unknown keys are mistakes, and so are keys that a file repeats, and a
// node that is not a mapping; where a later file repeats a key, its value stays. mapping returns the keys present.
func (p *parser) mapping(n *yaml.Node, what string, fields map[string]func(*yaml.Node)) map[string]bool {
	seen := map[string]bool{}
	if !p.isMapping(n, what) {
		return seen
	}
	n = resolve(n)
	places := map[string]Place{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		p.under(join(p.key, k.Value), func() {
			f, ok := fields[k.Value]
			switch {
			case !ok && what == topLevel && debugKeys[k.Value]:
				p.fail(k, "key %q belongs under `debug:`", k.Value)
			case !ok:
				p.fail(k, "unknown key %q in %s; known: %s", k.Value, what, knownKeys(fields))
			case seen[k.Value] && places[k.Value].File == p.files[k]:
				p.fail(k, "key %q is there twice in %s", k.Value, what)
			default:
				if seen[k.Value] {
					p.overrides = append(p.overrides, Override{places[k.Value], p.place(k)})
				}
				seen[k.Value], places[k.Value] = true, p.place(k)
				if !strings.Contains(p.key, "[") {
					p.keys[p.key] = p.place(k)
				}
				f(v)
			}
		})
	}
	return seen
}

// isMapping reports whether n is a mapping; otherwise that is a mistake.
func (p *parser) isMapping(n *yaml.Node, what string) bool {
	if n = resolve(n); n.Kind != yaml.MappingNode {
		p.fail(n, "%s must be a mapping of keys, found %s", what, kindName(n))
		return false
	}
	return true
}

func (p *parser) sequence(n *yaml.Node, what string, each func(*yaml.Node)) {
	n = resolve(n)
	if isNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		p.fail(n, "%s must be a list, found %s", what, kindName(n))
		return
	}
	i, file := 0, ""
	for _, e := range n.Content {
		if f := p.files[e]; f != file { // what follows is of a later file
			i, file = 0, f
		}
		p.under(fmt.Sprintf("%s[%d]", p.key, i), func() { each(e) })
		i++
	}
}

func knownKeys(fields map[string]func(*yaml.Node)) string {
	keys := make([]string, 0, len(fields))
	for k := range fields {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return strings.Join(keys, ", ")
}

// isNull reports whether a node has no value.
func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		if isNull(n) {
			return "nothing"
		}
		return fmt.Sprintf("%q", n.Value)
	}
	return "something else"
}

// scalar returns the node's text; other kinds of node are mistakes.
func (p *parser) scalar(n *yaml.Node, what string) (string, bool) {
	if n = resolve(n); n.Kind != yaml.ScalarNode || isNull(n) {
		p.fail(n, "%s needs a value, found %s", what, kindName(n))
		return "", false
	}
	return n.Value, true
}

func (p *parser) str(what string, dst *string) func(*yaml.Node) {
	return func(n *yaml.Node) {
		if s, ok := p.scalar(n, what); ok {
			*dst = s
		}
	}
}

func (p *parser) boolean(what string, dst *bool) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		switch s {
		case "true", "yes", "on":
			*dst = true
		case "false", "no", "off":
			*dst = false
		default:
			p.fail(n, "%s must be true or false, found %q", what, s)
		}
	}
}

// number accepts lo..hi in decimal, or with a 0x or 0o prefix.
func number[T int | uint8 | uint16 | uint32 | uint64](p *parser, what string, lo, hi uint64, dst *T) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		v, err := strconv.ParseUint(s, 0, 64)
		if err != nil || v < lo || v > hi {
			p.fail(n, "%s must be a number from %d to %d, found %q", what, lo, hi, s)
			return
		}
		*dst = T(v)
	}
}

func (p *parser) nice(what string, dst *int) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		v, err := strconv.Atoi(s)
		if err != nil || v < -20 || v > 19 {
			p.fail(n, "%s must be a number from -20 to 19, found %q", what, s)
			return
		}
		*dst = v
	}
}

// cpus reads processors as taskset(1) and cpuset(7) write them: 2-3,8.
func (p *parser) cpus(what string, n *yaml.Node) (cpus []int) {
	s, ok := p.scalar(n, what)
	if !ok {
		return nil
	}
	for part := range strings.SplitSeq(s, ",") {
		from, to, span := strings.Cut(part, "-")
		lo, err := strconv.ParseUint(from, 10, 10)
		hi, herr := lo, error(nil)
		if span {
			hi, herr = strconv.ParseUint(to, 10, 10)
		}
		if err != nil || herr != nil || hi < lo {
			p.fail(n, "%s must be a list of processors, 0 to 1023, such as 2-3,8, found %q", what, s)
			return nil
		}
		for c := int(lo); c <= int(hi); c++ {
			if slices.Contains(cpus, c) {
				p.fail(n, "%s names processor %d twice", what, c)
				return nil
			}
			cpus = append(cpus, c)
		}
	}
	return cpus
}

func (p *parser) addr(what string, n *yaml.Node) (netip.Addr, bool) {
	s, ok := p.scalar(n, what)
	if !ok {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(s)
	if err != nil || a.IsUnspecified() || a.IsMulticast() {
		p.fail(n, "%s must be a unicast IP address, found %q", what, s)
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// dscpNames are the names of RFC 2474, 2597 and 3246.
var dscpNames = func() map[string]uint8 {
	m := map[string]uint8{"default": 0, "be": 0, "ef": 46}
	for c := uint8(0); c < 8; c++ {
		m[fmt.Sprintf("cs%d", c)] = c << 3
	}
	for c := uint8(1); c <= 4; c++ {
		for d := uint8(1); d <= 3; d++ {
			m[fmt.Sprintf("af%d%d", c, d)] = c<<3 | d<<1
		}
	}
	return m
}()

func (p *parser) dscp(dst *uint8) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, "dscp")
		if !ok {
			return
		}
		if v, ok := dscpNames[strings.ToLower(s)]; ok {
			*dst = v
			return
		}
		v, err := strconv.ParseUint(s, 0, 8)
		if err != nil || v > 63 {
			p.fail(n, "dscp must be 0 to 63 or a name such as af31, cs3 or ef, found %q", s)
			return
		}
		*dst = uint8(v)
	}
}

func (p *parser) top(n *yaml.Node, c *Config) {
	mode := uint32(c.SocketMode)
	p.mapping(n, topLevel, map[string]func(*yaml.Node){
		"host":    p.str("host", &c.Host),
		"run-dir": p.str("run-dir", &c.RunDir),
		"control": p.str("control", &c.Control),
		"status":  p.str("status", &c.Status),

		"control-group": func(n *yaml.Node) { c.ControlGroup = p.group("control-group", n) },
		"status-group":  func(n *yaml.Node) { c.StatusGroup = p.group("status-group", n) },

		"socket-mode": number(p, "socket-mode", 0, 0o777, &mode),
		"engines":     number(p, "engines", 1, MaxEngines, &c.Engines),
		"engine-cpus": func(n *yaml.Node) { c.EngineCPUs = p.cpus("engine-cpus", n) },
		"engine-nice": p.nice("engine-nice", &c.EngineNice),
		"buffers":     number(p, "buffers", 256, 1<<20, &c.Buffers),
		"spin":        p.duration("spin", 0, time.Second, "20us", &c.Spin),
		"ecn":         p.boolean("ecn", &c.ECN),
		"journal":     p.boolean("journal", &c.Journal),
		"debug":       func(n *yaml.Node) { p.debug(n, &c.Debug) },
		"memory-pressure": func(n *yaml.Node) {
			p.mapping(n, "memory-pressure", map[string]func(*yaml.Node){
				"watch": p.boolean("memory-pressure watch", &c.MemoryPressure.Watch),
				"limit": p.percent("memory-pressure limit", &c.MemoryPressure.Limit),
			})
		},
		"short-path": func(n *yaml.Node) {
			c.ShortPath = new(bool)
			p.boolean("short-path", c.ShortPath)(n)
		},
		"log-level": func(n *yaml.Node) {
			s, ok := p.scalar(n, "log-level")
			if !ok {
				return
			}
			switch s {
			case "trace", "debug", "info", "warn", "error":
				c.LogLevel = s
			default:
				p.fail(n, "log-level must be trace, debug, info, warn or error, found %q", s)
			}
		},
		"monitoring": func(n *yaml.Node) { p.monitoring(n, &c.Monitoring) },
		"vtep":       func(n *yaml.Node) { c.VTEP = p.vtep(n) },
		"underlay":   func(n *yaml.Node) { c.Underlay = p.underlay(n) },
		"evpn":       func(n *yaml.Node) { c.EVPN = p.evpn(n) },
		"networks": func(n *yaml.Node) {
			p.sequence(n, "networks", func(e *yaml.Node) { c.Networks = append(c.Networks, p.network(e)) })
		},
		"vms": func(n *yaml.Node) { p.sequence(n, "vms", func(e *yaml.Node) { c.VMs = append(c.VMs, p.vm(e)) }) },
		"applications": func(n *yaml.Node) {
			p.sequence(n, "applications", func(e *yaml.Node) { c.VMs = append(c.VMs, p.application(e)) })
		},
	})
	c.SocketMode = mode
	for _, vm := range c.VMs {
		if a := vm.Application; a != nil && a.Mode == 0 {
			a.Mode = mode
		}
	}
}

const topLevel = "the configuration" // in messages

var debugKeys = map[string]bool{
	"local-copy": true, "segmentation": true, "selective-repeat": true, "guest-features": true,
}

func (p *parser) debug(n *yaml.Node, d *Debug) {
	p.mapping(n, "debug", map[string]func(*yaml.Node){
		"local-copy":       p.boolean("debug local-copy", &d.LocalCopy),
		"segmentation":     p.boolean("debug segmentation", &d.Segmentation),
		"selective-repeat": p.boolean("debug selective-repeat", &d.SelectiveRepeat),
		"guest-features":   p.boolean("debug guest-features", &d.GuestFeatures),
	})
}

func (p *parser) monitoring(n *yaml.Node, m *Monitoring) {
	seen := p.mapping(n, "monitoring", map[string]func(*yaml.Node){
		"listen": func(n *yaml.Node) {
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
		},
		"names": func(n *yaml.Node) {
			p.sequence(n, "monitoring names", func(e *yaml.Node) {
				s, ok := p.scalar(e, "a name of the server")
				if !ok {
					return
				}
				if len(s) > 253 || !nameRule.MatchString(s) {
					p.fail(e, "monitoring names must be host names such as host1.example, without port, found %q", s)
					return
				}
				m.Names = append(m.Names, s)
			})
		},
		"pprof": p.boolean("monitoring pprof", &m.PProf),
		"page":  p.boolean("monitoring page", &m.Page),
	})
	switch {
	case seen["listen"]:
	case m.Page:
		m.Listen = DefaultMonitoring
	default:
		p.fail(n, "monitoring needs `listen`, its address")
	}
}

func (p *parser) vtep(n *yaml.Node) *VTEP {
	v := &VTEP{Port: DefaultVXLANPort, DSCP: DefaultDSCP}
	seen := p.mapping(n, "vtep", map[string]func(*yaml.Node){
		"local":          func(n *yaml.Node) { v.Local, _ = p.addr("vtep local", n) },
		"port":           number(p, "vtep port", 1, 65535, &v.Port),
		"dscp":           p.dscp(&v.DSCP),
		"zero-checksum6": p.boolean("zero-checksum6", &v.ZeroChecksum6),
		"peer-ports":     p.peerPorts(&v.PeerPorts),
	})
	if !seen["local"] {
		p.fail(n, "vtep needs `local`, the underlay address of this host")
	}
	return v
}

// peerPorts accepts the ports that peers must send from.
func (p *parser) peerPorts(dst *vxlan.PeerPorts) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, "peer-ports")
		if !ok {
			return
		}
		if *dst, ok = vxlan.ParsePeerPorts(s); !ok {
			p.fail(n, "peer-ports must be auto, reserved or any, found %q", s)
		}
	}
}

// duration accepts lo..hi with a unit.
func (p *parser) duration(what string, lo, hi time.Duration, example string, dst *time.Duration) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		d, err := time.ParseDuration(s)
		if err != nil || d < lo || d > hi {
			p.fail(n, "%s must be a duration from %v to %v such as %s, found %q", what, lo, hi, example, s)
			return
		}
		*dst = d
	}
}

// storm accepts a limit of frames per second. 0 means no limit, which is stored as -1.
func (p *parser) storm(dst *int) func(*yaml.Node) {
	return func(n *yaml.Node) {
		number(p, "storm", 0, vswitch.MaxStorm, dst)(n)
		if *dst == 0 {
			*dst = vswitch.Unlimited
		}
	}
}

// multicast accepts snoop or flood.
func (p *parser) multicast(dst *bool) func(*yaml.Node) {
	return func(n *yaml.Node) {
		switch s, ok := p.scalar(n, "multicast"); {
		case !ok:
		case s == "snoop" || s == "flood":
			*dst = s == "snoop"
		default:
			p.fail(n, "multicast must be snoop or flood, found %q", s)
		}
	}
}

// rate accepts bits per second, with k, M or G for a power of 1000.
func (p *parser) rate(dst *int64) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, "rate")
		if !ok {
			return
		}
		digits, unit := s, int64(1)
		for i, suffix := range []string{"k", "M", "G"} {
			if d, found := strings.CutSuffix(s, suffix); found {
				digits, unit = d, []int64{1e3, 1e6, 1e9}[i]
			}
		}
		v, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || v < 1 || v > vswitch.MaxRate/unit || v*unit < vswitch.MinRate {
			p.fail(n, "rate must be bits per second from 64k to 1000G such as 10G, found %q", s)
			return
		}
		*dst = v * unit
	}
}

func (p *parser) addrs(what string, dst *[]netip.Addr) func(*yaml.Node) {
	return func(n *yaml.Node) {
		p.sequence(n, what, func(e *yaml.Node) {
			if a, ok := p.addr(what, e); ok {
				*dst = append(*dst, a)
			}
		})
	}
}

func (p *parser) network(n *yaml.Node) *Network {
	net := &Network{At: p.place(n), FloodUnknown: true, EVPN: true}
	seen := p.mapping(n, "a network", map[string]func(*yaml.Node){
		"name":          p.str("network name", &net.Name),
		"vni":           number(p, "vni", 1, MaxVNI, &net.VNI),
		"mtu":           number(p, "mtu", minMTU, maxMTU, &net.MTU),
		"learn-peers":   p.boolean("learn-peers", &net.LearnPeers),
		"peers":         p.addrs("peers", &net.Peers),
		"ageing":        p.duration("ageing", time.Second, 365*24*time.Hour, "300s", &net.Ageing),
		"max-entries":   number(p, "max-entries", 1, vswitch.MaxMaxEntries, &net.MaxEntries),
		"storm":         p.storm(&net.Storm),
		"multicast":     p.multicast(&net.Snoop),
		"flood-unknown": p.boolean("flood-unknown", &net.FloodUnknown),
		"evpn":          p.boolean("evpn", &net.EVPN),
		"route-targets": p.targets(&net.RouteTargets),
		"tap":           func(n *yaml.Node) { net.TAP = p.tap(n) },
	})
	p.need(n, seen, "a network", "name", "vni")
	return net
}

func (p *parser) need(n *yaml.Node, seen map[string]bool, what string, keys ...string) {
	for _, k := range keys {
		if !seen[k] {
			p.fail(n, "%s needs `%s`", what, k)
		}
	}
}

func (p *parser) tap(n *yaml.Node) *TAP {
	t := &TAP{At: p.place(n), Offloads: true}
	seen := p.mapping(n, "tap", map[string]func(*yaml.Node){
		"name":     p.str("tap name", &t.Name),
		"bridge":   p.str("tap bridge", &t.Bridge),
		"rate":     p.rate(&t.Rate),
		"offloads": p.boolean("tap offloads", &t.Offloads),
		"addresses": func(n *yaml.Node) {
			p.sequence(n, "addresses", func(e *yaml.Node) {
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
			})
		},
	})
	p.need(n, seen, "tap", "name")
	return t
}

func (p *parser) vm(n *yaml.Node) *VM {
	vm := &VM{At: p.place(n), Queues: 1, HCA: VhostUser, MemoryWeight: DefaultMemoryWeight}
	keys := p.client("VM", vm)
	keys["queues"] = number(p, "queues", 1, vnet.MaxPairs, &vm.Queues)
	keys["qmp"] = p.str("qmp", &vm.QMP)
	keys["hca"] = func(n *yaml.Node) {
		s, ok := p.scalar(n, "hca")
		if !ok {
			return
		}
		if s != VhostUser && s != Ivshmem {
			p.fail(n, "hca must be %s or %s, found %q", VhostUser, Ivshmem, s)
			return
		}
		vm.HCA = s
	}
	p.need(n, p.mapping(n, "a VM", keys), "a VM", "name", "network", "mac")
	return vm
}

func (p *parser) application(n *yaml.Node) *VM {
	a := &Application{Memory: defaultAppMemory}
	vm := &VM{At: p.place(n), MemoryWeight: DefaultMemoryWeight, Application: a}
	keys := p.client("application", vm)
	keys["memory"] = p.size("memory", 1<<20, &a.Memory)
	keys["socket-mode"] = number(p, "socket-mode", 1, 0o777, &a.Mode)
	p.need(n, p.mapping(n, "an application", keys), "an application", "name", "network", "mac")
	return vm
}

// client returns the keys that VMs and applications share.
func (p *parser) client(what string, vm *VM) map[string]func(*yaml.Node) {
	return map[string]func(*yaml.Node){
		"name":    p.str(what+" name", &vm.Name),
		"network": p.str(what+" network", &vm.Network),
		"mac": func(n *yaml.Node) {
			s, ok := p.scalar(n, "mac")
			if !ok {
				return
			}
			m, err := net.ParseMAC(s)
			if err != nil || len(m) != 6 || m[0]&1 != 0 || isZero(m) {
				p.fail(n, "mac must be a unicast Ethernet address such as 02:00:00:00:00:01, found %q", s)
				return
			}
			vm.MAC = m
		},
		"user":  func(n *yaml.Node) { vm.owner().UID = p.user("user", n) },
		"group": func(n *yaml.Node) { vm.owner().GID = p.group("group", n) },
		"ips":   p.addrs("ips", &vm.IPs),
		"rate":  p.rate(&vm.Rate),
		"storm": p.storm(&vm.Storm),

		"memory-budget": p.size("memory-budget", hostdriver.MinBudget, &vm.MemoryBudget),
		"memory-weight": number(p, "memory-weight", 1, maxMemoryWeight, &vm.MemoryWeight),
		"dma": func(n *yaml.Node) {
			s, ok := p.scalar(n, "dma")
			if !ok {
				return
			}
			u, err := translate.ParseUplink(s)
			if err != nil {
				p.fail(n, "dma must be rw, ro or blocked, found %q", s)
				return
			}
			vm.DMA, vm.FileDMA = u, u
		},
		"limits": func(n *yaml.Node) {
			p.mapping(n, "limits", map[string]func(*yaml.Node){
				"qps":          number(p, "limits qps", 2, maxQPs, &vm.Limits.QPs),
				"cqs":          number(p, "limits cqs", 2, maxQPs, &vm.Limits.CQs),
				"mrs":          number(p, "limits mrs", 1, maxMRs, &vm.Limits.MRs),
				"ahs":          number(p, "limits ahs", 2, maxAHs, &vm.Limits.AHs),
				"pages":        number(p, "limits pages", 1, 1<<36, &vm.Limits.Pages),
				"host-memory":  p.size("limits host-memory", 1<<20, &vm.Limits.HostMemory),
				"memory":       p.size("limits memory", 1<<20, &vm.Limits.Memory),
				"control-time": p.percent("limits control-time", &vm.Limits.ControlTime),
				"messages":     number(p, "limits messages", 1, hca.MaxMessages, &vm.Limits.Messages),
			})
		},
	}
}

// percent accepts 1% to 100%.
func (p *parser) percent(what string, dst *int) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		digits, ok := strings.CutSuffix(s, "%")
		v, err := strconv.ParseUint(digits, 10, 32)
		if !ok || err != nil || v < 1 || v > 100 {
			p.fail(n, "%s must be a whole percentage, 1%% to 100%%, such as 10%%, found %q", what, s)
			return
		}
		*dst = int(v)
	}
}

// size accepts a number of bytes, at least lo, with a unit that is a power of 1024.
func (p *parser) size(what string, lo uint64, dst *uint64) func(*yaml.Node) {
	return func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
			digits, found := strings.CutSuffix(s, unit)
			if !found {
				continue
			}
			shift := 10 * (i + 1)
			if v, err := strconv.ParseUint(strings.TrimSpace(digits), 10, 63-shift); err == nil && v<<shift >= lo {
				*dst = v << shift
				return
			}
		}
		p.fail(n, "%s must be a whole number of KiB, MiB, GiB or TiB, at least %d MiB, such as 256MiB, found %q",
			what, lo>>20, s)
	}
}

func isZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
