package config

import (
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/device/ethernet/wireguard"
)

// Underlay is how what VTEPs exchange is protected.
type Underlay struct {
	At        Place
	Interface string
	// Port is the UDP port of this host's WireGuard.
	Port       uint16
	PrivateKey wireguard.Secret
	Peers      []UnderlayPeer
}

// UnderlayPeer is another host.
type UnderlayPeer struct {
	At Place
	wireguard.Peer
}

// Settings returns keys and peers, which can change at run time.
func (u *Underlay) Settings() (s wireguard.Settings) {
	s.PrivateKey = u.PrivateKey
	for _, p := range u.Peers {
		s.Peers = append(s.Peers, p.Peer)
	}
	return s
}

func (p *parser) underlayKeys(u *Underlay, protect *string) object {
	return object{what: "underlay", keys: map[string]field{
		"protect":          p.choice("protect", []string{"wireguard", "none"}, func(s string) { *protect = s }),
		"interface":        p.str("interface", aDevice, &u.Interface),
		"listen-port":      number(p, "listen-port", 1, 65535, &u.Port),
		"private-key-file": p.secret("private-key-file", &u.PrivateKey),
		"peers": p.list("underlay peers", p.underlayPeerKeys(&UnderlayPeer{}).schema(),
			func(e *yaml.Node) { u.Peers = append(u.Peers, p.underlayPeer(e)) }),
	}}
}

// underlay returns nil for `protect: none`.
func (p *parser) underlay(n *yaml.Node) *Underlay {
	u, protect := &Underlay{At: p.place(n), Interface: wireguard.DefaultInterface, Port: wireguard.DefaultPort}, ""
	seen := p.mapping(n, p.underlayKeys(u, &protect))
	p.need(n, seen, "underlay", "protect")
	if protect == "none" {
		return nil
	}
	p.need(n, seen, "underlay", "private-key-file", "peers")
	return u
}

func (p *parser) underlayPeerKeys(x *UnderlayPeer) object {
	return object{"a peer of the underlay", map[string]field{
		"vtep": p.address("vtep", &x.Addr),
		"endpoint": {func(n *yaml.Node) {
			s, ok := p.scalar(n, "endpoint")
			if !ok {
				return
			}
			a, err := netip.ParseAddrPort(s)
			ip := a.Addr().Unmap()
			if err != nil || a.Port() == 0 || ip.IsUnspecified() || ip.IsMulticast() || ip.Zone() != "" {
				p.fail(n, "endpoint must be a unicast IP address and a port, such as 192.0.2.2:51820 or [2001:db8::2]:51820, "+
					"found %q", s)
				return
			}
			x.Endpoint = netip.AddrPortFrom(ip, a.Port())
		}, text(":[0-9]+$")},
		"public-key": {func(n *yaml.Node) {
			s, ok := p.scalar(n, "public-key")
			if !ok {
				return
			}
			var err error
			if x.PublicKey, err = wireguard.ParseKey(s); err != nil {
				p.fail(n, "public-key: %v, found %q", err, s)
			}
		}, text("^[A-Za-z0-9+/]{43}=$")},
		"preshared-key-file": p.secret("preshared-key-file", &x.Preshared),
		"keepalive":          p.keepalive(&x.Keepalive),
	}, []string{"vtep", "endpoint", "public-key"}}
}

func (p *parser) underlayPeer(n *yaml.Node) UnderlayPeer {
	x := UnderlayPeer{At: p.place(n)}
	p.read(n, p.underlayPeerKeys(&x))
	return x
}

// keepalive accepts whole seconds, which is all that WireGuard knows.
func (p *parser) keepalive(dst *time.Duration) field {
	f := p.duration("keepalive", 0, 65535*time.Second, "25s", dst)
	return field{func(n *yaml.Node) {
		f.read(n)
		if *dst%time.Second != 0 {
			p.fail(n, "keepalive must be whole seconds such as 25s, found %q", n.Value)
		}
	}, f.is}
}

// secret accepts the path of a file with a key, which it reads.
func (p *parser) secret(what string, dst *wireguard.Secret) field {
	return field{func(n *yaml.Node) {
		path, ok := p.scalar(n, what)
		if !ok {
			return
		}
		var err error
		if *dst, err = readSecret(path); err != nil {
			p.fail(n, "%s: %v", what, err)
		}
	}, anyPath}
}

// readSecret reads a key from a file that only its owner can read. Root may check the daemon's file.
func readSecret(path string) (s wireguard.Secret, err error) {
	if !filepath.IsAbs(path) {
		return s, fmt.Errorf("want an absolute path, found %q", path)
	}
	b, err := readRegular("the key", path, 256, func(m fs.FileMode) error {
		if m&0o077 != 0 {
			return fmt.Errorf("others than its owner can read %s (mode %#o): chmod 600 it, and make a new key if they may have "+
				"read it", path, m)
		}
		return nil
	})
	if err != nil {
		return s, err
	}
	if s, err = wireguard.ParseSecret(strings.TrimSpace(string(b))); err != nil {
		return s, fmt.Errorf("%s has no key: %w", path, err)
	}
	return s, nil
}

// checkUnderlay finds mistakes that no single key shows.
func (c *Config) checkUnderlay(errs *Errors, taps map[string]Place) {
	u := c.Underlay
	if u == nil {
		return
	}
	if c.VTEP == nil {
		errs.add(u.At, "underlay needs a `vtep` section with this host's address")
		return
	}
	local := c.VTEP.Local
	if local.IsLinkLocalUnicast() || local.Zone() != "" {
		errs.add(c.place("vtep.local"), "vtep local %s is a link-local address; a protected VTEP needs another one", local)
	}
	if c.ShortPath != nil && *c.ShortPath {
		errs.add(c.place("short-path"), "`short-path: true` is impossible with a protected underlay: omit the key")
	}
	if err := interfaceName(u.Interface); err != nil {
		errs.add(c.place("underlay.interface"), "underlay interface %v", err)
	}
	if first, dup := taps[u.Interface]; dup {
		at := c.place("underlay.interface")
		errs.add(at, "underlay interface %q is a tap's name in %s", u.Interface, first.seenFrom(at))
	}
	if len(u.Peers) > wireguard.MaxPeers {
		errs.add(u.At.sub("peers"), "underlay has %d peers; it may have %d", len(u.Peers), wireguard.MaxPeers)
	}
	vteps, keys, ends := map[netip.Addr]Place{}, map[wireguard.PublicKey]Place{}, map[netip.AddrPort]Place{}
	var own wireguard.PublicKey
	if u.PrivateKey != (wireguard.Secret{}) {
		own = u.PrivateKey.Public()
	}
	for _, p := range u.Peers {
		vteps[p.Addr] = p.At
	}
	for _, p := range u.Peers {
		switch {
		case !p.Addr.IsValid() || !local.IsValid():
		case p.Addr.Is4() != local.Is4():
			errs.add(p.At.sub("vtep"), "vtep %s is of another address family than vtep local %s", p.Addr, local)
		case p.Addr == local:
			errs.add(p.At.sub("vtep"), "vtep %s is this host itself (vtep local)", p.Addr)
		case p.Addr.IsLinkLocalUnicast():
			errs.add(p.At.sub("vtep"), "vtep %s is a link-local address; a protected VTEP needs another one", p.Addr)
		case vteps[p.Addr] != p.At:
			errs.add(p.At.sub("vtep"), "vtep %s is also a peer in %s", p.Addr, vteps[p.Addr].seenFrom(p.At))
		}
		if p.PublicKey != (wireguard.PublicKey{}) {
			switch first, dup := keys[p.PublicKey]; {
			case p.PublicKey == own:
				errs.add(p.At.sub("public-key"), "public-key is this host's own: it is the key of private-key-file")
			case dup:
				errs.add(p.At.sub("public-key"), "public-key is already used in %s; each host needs its own", first.seenFrom(p.At))
			default:
				keys[p.PublicKey] = p.At
			}
		}
		if e := p.Endpoint; e.IsValid() {
			_, isVTEP := vteps[e.Addr()]
			switch first, dup := ends[e]; {
			case dup:
				errs.add(p.At.sub("endpoint"), "endpoint %s is already used in %s", e, first.seenFrom(p.At))
			case e.Addr() == local || isVTEP:
				errs.add(p.At.sub("endpoint"), "endpoint %s has the address of a VTEP, which is reached through WireGuard only; want the host's "+
					"address on the network below", e)
			default:
				ends[e] = p.At
			}
		}
	}
}

// vteps returns the addresses of the peers.
func (u *Underlay) vteps() map[netip.Addr]bool {
	m := map[netip.Addr]bool{}
	for _, p := range u.Peers {
		m[p.Addr] = true
	}
	return m
}

// interfaceName checks the name of a network interface.
func interfaceName(s string) error {
	if len(s) > maxInterfaceName || !nameRule.MatchString(s) {
		return fmt.Errorf("name %q is not an interface name (1 to %d letters, digits, '_', '.', '-')", s, maxInterfaceName)
	}
	return nil
}
