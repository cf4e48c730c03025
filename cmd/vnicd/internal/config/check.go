package config

import (
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

var nameRule = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)

// check finds mistakes that no single key shows: duplicates, references to undefined things, mixed address families,
// socket paths that are too long.
func (c *Config) check(errs *Errors) {
	c.checkPaths(errs)
	if n := len(c.EngineCPUs); n > 0 && n != c.Engines {
		errs.add(c.place("engine-cpus"), "engine-cpus must name one processor for each of the %d engines, found %d", c.Engines, n)
	}
	c.checkEVPN(errs)
	var protected map[netip.Addr]bool
	if c.Underlay != nil {
		protected = c.Underlay.vteps()
	}
	names, vnis, taps := map[string]Place{}, map[uint32]Place{}, map[string]Place{}
	for _, n := range c.Networks {
		checkName(errs, n.At, "network", n.Name, names)
		if n.VNI != 0 {
			if first, dup := vnis[n.VNI]; dup {
				errs.add(n.At.sub("vni"), "vni %d is already used by the network in %s; each network needs its own", n.VNI,
					first.seenFrom(n.At))
			} else {
				vnis[n.VNI] = n.At
			}
		}
		c.checkPeers(errs, n, protected)
		if t := n.TAP; t != nil && t.Name != "" {
			if err := interfaceName(t.Name); err != nil {
				errs.add(t.At.sub("name"), "tap %v", err)
			}
			if first, dup := taps[t.Name]; dup {
				errs.add(t.At.sub("name"), "tap name %q is already used in %s", t.Name, first.seenFrom(t.At))
			} else {
				taps[t.Name] = t.At
			}
		}
	}
	c.checkUnderlay(errs, taps)
	c.checkVMs(errs, names)
}

func (c *Config) checkPaths(errs *Errors) {
	if c.Control == c.Status {
		errs.add(c.place("status"), "control and status must be different sockets, found %q for both", c.Control)
	}
	for _, x := range []struct{ key, path string }{{"run-dir", c.RunDir}, {"control", c.Control}, {"status", c.Status}} {
		if !filepath.IsAbs(x.path) {
			errs.add(c.place(x.key), "%s must be an absolute path, found %q", x.key, x.path)
		}
	}
	for _, x := range []struct{ key, path string }{{"control", c.Control}, {"status", c.Status},
		{"monitoring.listen", c.Monitoring.Listen}} {
		if len(x.path) > maxUnixSocketPath {
			errs.add(c.place(x.key), "%s is %d bytes long; a unix socket's path has at most %d",
				strings.ReplaceAll(x.key, ".", " "), len(x.path), maxUnixSocketPath)
		}
	}
}

// checkPeers checks the peers of a network; protected are those of WireGuard.
func (c *Config) checkPeers(errs *Errors, n *Network, protected map[netip.Addr]bool) {
	if c.VTEP == nil {
		if len(n.Peers) > 0 || n.LearnPeers {
			errs.add(n.At.sub("peers"), "network %q has peers, but there is no `vtep` section with this host's underlay address", n.Name)
		}
		return
	}
	seen := map[netip.Addr]bool{}
	for _, a := range n.Peers {
		switch {
		case !c.VTEP.Local.IsValid():
		case a.Is4() != c.VTEP.Local.Is4():
			errs.add(n.At.sub("peers"), "peer %s of network %q is of another address family than vtep local %s", a, n.Name, c.VTEP.Local)
		case a == c.VTEP.Local:
			errs.add(n.At.sub("peers"), "peer %s of network %q is this host itself (vtep local)", a, n.Name)
		case seen[a]:
			errs.add(n.At.sub("peers"), "peer %s is listed twice in network %q", a, n.Name)
		case c.Underlay != nil && !protected[a]:
			errs.add(n.At.sub("peers"), "peer %s of network %q is no `vtep` of underlay peers: nothing would be sent to it or accepted from it",
				a, n.Name)
		}
		seen[a] = true
	}
}

func (c *Config) checkVMs(errs *Errors, networks map[string]Place) {
	type port struct{ network, mac string }
	type host struct {
		network string
		ip      netip.Addr
	}
	names, macs, ips, monitors := map[string]Place{}, map[port]Place{}, map[host]Place{}, map[string]Place{}
	for _, vm := range c.VMs {
		checkName(errs, vm.At, vm.What(), vm.Name, names)
		if _, ok := networks[vm.Network]; !ok && vm.Network != "" {
			var have []string
			for _, n := range c.Networks {
				have = append(have, n.Name)
			}
			errs.add(vm.At.sub("network"), "%s %q is in network %q, which is not defined; defined: %s", vm.What(), vm.Name,
				vm.Network, orNone(have))
		}
		// MT-9: two tenants may use one MAC; within a network it must be unique.
		if k := (port{vm.Network, vm.MAC.String()}); vm.MAC != nil {
			if first, dup := macs[k]; dup {
				errs.add(vm.At.sub("mac"), "mac %s is already used in network %q by the VM in %s", vm.MAC, vm.Network,
					first.seenFrom(vm.At))
			} else {
				macs[k] = vm.At
			}
		}
		if len(vm.IPs) > vswitch.MaxIPs {
			errs.add(vm.At.sub("ips"), "%s %q has %d ips; it may have %d", vm.What(), vm.Name, len(vm.IPs), vswitch.MaxIPs)
		}
		for _, a := range vm.IPs {
			if first, dup := ips[host{vm.Network, a}]; dup {
				errs.add(vm.At.sub("ips"), "ip %s is already used in network %q by the VM in %s", a, vm.Network,
					first.seenFrom(vm.At))
			} else {
				ips[host{vm.Network, a}] = vm.At
			}
		}
		switch first, dup := monitors[vm.QMP]; {
		case vm.QMP == "":
		case !filepath.IsAbs(vm.QMP) || len(vm.QMP) > maxUnixSocketPath:
			errs.add(vm.At.sub("qmp"), "qmp must be an absolute path of at most %d bytes, found %q", maxUnixSocketPath, vm.QMP)
		case dup:
			errs.add(vm.At.sub("qmp"), "qmp %s is already used by the VM in %s; a monitor serves one client", vm.QMP,
				first.seenFrom(vm.At))
		default:
			monitors[vm.QMP] = vm.At
		}
		p := c.NetSocket(vm)
		if vm.Application == nil && vm.HCA != VhostUser {
			p = c.IvshmemSocket(vm)
		}
		if len(p) > maxUnixSocketPath {
			errs.add(vm.At, "socket path %s is over %d bytes: choose a shorter run-dir or VM name", p, maxUnixSocketPath)
		}
	}
}

func checkName(errs *Errors, at Place, what, name string, seen map[string]Place) {
	if name == "" {
		return // already reported as missing
	}
	if len(name) > maxNameLength || !nameRule.MatchString(name) {
		errs.add(at.sub("name"), "%s name %q must be 1 to %d letters, digits, '_', '.' or '-'", what, name, maxNameLength)
	}
	if first, dup := seen[name]; dup {
		errs.add(at.sub("name"), "%s name %q is already used in %s", what, name, first.seenFrom(at))
		return
	}
	seen[name] = at
}
