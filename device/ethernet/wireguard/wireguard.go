// Package wireguard encrypts and authenticates what this host's VTEP and its peers exchange, with a WireGuard interface
// of the kernel: one per VTEP, which makes it, configures it and removes it. The tunnels' sockets are bound to it
// (vxlan.Protection).
//
// A peer is a public key, the address of one VTEP, and an endpoint. The kernel accepts from the holder of the key only
// packets with that source address (WireGuard's allowed IPs), so a peer can act as no other one.
//
// Routes to the peers' VTEPs are in a table of their own. A rule lets only this host's own traffic look there, so that
// what the host forwards (packets of containers, of VMs behind a bridge, or of an attacker on the wire who sends from
// the VTEP's address) is never encrypted with its key.
package wireguard

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

const (
	// DefaultInterface is the name of the interface.
	DefaultInterface = "vnicd-wg0"
	// DefaultPort is the UDP port on which WireGuard listens (that of wg-quick(8)).
	DefaultPort = 51820
	// MaxPeers bounds the peers of a host.
	MaxPeers = 4096
)

// ErrForeign: the interface's name is in use.
var ErrForeign = errors.New("wireguard: the interface belongs to another program")

// Secret is a private or preshared key. It does not print itself.
type Secret struct{ key wgtypes.Key }

// String hides the key.
func (Secret) String() string { return "(secret)" }

// GoString hides the key.
func (Secret) GoString() string { return "(secret)" }

// Public returns the public key of a private one.
func (s Secret) Public() PublicKey { return s.key.PublicKey() }

// PublicKey identifies a host.
type PublicKey = wgtypes.Key

// ParseKey reads a public key in base64.
func ParseKey(text string) (PublicKey, error) {
	k, err := wgtypes.ParseKey(text)
	if err != nil || k == (PublicKey{}) {
		return PublicKey{}, errors.New("want 32 bytes in base64, as `wg pubkey` prints them")
	}
	return k, nil
}

// ParseSecret reads a private or preshared key in base64.
func ParseSecret(text string) (Secret, error) {
	k, err := wgtypes.ParseKey(text)
	if err != nil || k == (PublicKey{}) {
		return Secret{}, errors.New("want 32 bytes in base64, as `wg genkey` prints them") // without the text
	}
	return Secret{k}, nil
}

// Peer is another host.
type Peer struct {
	// Addr is the address of its VTEP, the only one that it may send from.
	Addr netip.Addr
	// Endpoint is where its WireGuard listens on the network below.
	Endpoint  netip.AddrPort
	PublicKey PublicKey
	// Preshared is mixed into the handshake, against computers that break the key agreement later; zero: none.
	Preshared Secret
	// Keepalive is how often a packet is sent to keep state of middleboxes; 0: never.
	Keepalive time.Duration
}

// Settings can change while the device is in use.
type Settings struct {
	PrivateKey Secret
	Peers      []Peer
}

// Config describes a device.
type Config struct {
	Interface  string // name
	ListenPort uint16
	// Local and Port are the VTEP's address, which the interface gets, and its UDP port.
	Local netip.Addr
	Port  uint16
	// Owner is a directory that only one running vnicd uses, its run-dir: interfaces of the same owner that are not in use
	// are left over.
	Owner string
	Settings
	Log hclog.Logger
}

// Device is a WireGuard interface of this host.
type Device struct {
	cfg   Config // without Settings
	index int
	nl    *netlink.Handle
	wg    *wgctrl.Client
	rules []*netlink.Rule
	peers atomic.Pointer[map[netip.Addr]bool]

	mu     sync.Mutex // guards the fields below, and changes of the interface
	set    Settings
	mtu    int
	closed bool
}

// Open makes the interface. What a killed vnicd has left is removed; any other interface of that name is an error.
func Open(c Config) (*Device, error) {
	d := &Device{cfg: c}
	d.cfg.Settings = Settings{}
	d.peers.Store(&map[netip.Addr]bool{})
	if err := d.open(c); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func (d *Device) open(c Config) (err error) {
	if d.nl, err = netlink.NewHandle(syscall.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("wireguard: netlink: %w", err)
	}
	if err := d.removeLeft(); err != nil {
		return err
	}
	if err := d.add(); err != nil {
		return err
	}
	if d.wg, err = wgctrl.New(); err != nil {
		return fmt.Errorf("wireguard: %w", err)
	}
	port := int(c.ListenPort)
	if err := d.wg.ConfigureDevice(c.Interface, wgtypes.Config{ListenPort: &port}); err != nil {
		return fmt.Errorf("wireguard: interface %s: port %d: %w", c.Interface, port, err)
	}
	if err := d.up(); err != nil {
		return err
	}
	return d.Set(c.Settings)
}

// Name implements vxlan.Protection.
func (d *Device) Name() string { return d.cfg.Interface }

// Peer implements vxlan.Protection.
func (d *Device) Peer(a netip.Addr) bool { return (*d.peers.Load())[a] }

// Set replaces keys and peers. Peers that stay keep their sessions, unless the private key changes. After an error the
// settings before are in force, as far as the kernel accepts them.
func (d *Device) Set(s Settings) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.own(); err != nil {
		return err
	}
	was := d.set
	if err := d.applyLocked(was, s); err != nil {
		if was.PrivateKey != (Secret{}) {
			err = errors.Join(err, d.applyLocked(s, was))
		}
		return err
	}
	d.set = Settings{s.PrivateKey, slices.Clone(s.Peers)}
	d.refreshLocked()
	return nil
}

func (d *Device) applyLocked(was, is Settings) error {
	c := wgtypes.Config{Peers: peerConfigs(was.Peers, is.Peers)}
	if was.PrivateKey != is.PrivateKey {
		c.PrivateKey = &is.PrivateKey.key
	}
	if err := d.wg.ConfigureDevice(d.cfg.Interface, c); err != nil {
		return fmt.Errorf("wireguard: interface %s: keys and peers: %w", d.cfg.Interface, err)
	}
	addrs := map[netip.Addr]bool{}
	for _, p := range is.Peers {
		addrs[p.Addr] = true
		if err := d.nl.RouteReplace(d.route(p.Addr)); err != nil {
			return fmt.Errorf("wireguard: route to %v through %s: %w", p.Addr, d.cfg.Interface, err)
		}
	}
	for _, p := range was.Peers {
		if !addrs[p.Addr] {
			_ = d.nl.RouteDel(d.route(p.Addr)) // without its peer it leads nowhere
		}
	}
	d.peers.Store(&addrs)
	return nil
}

// peerConfigs returns the changes from one list of peers to another.
func peerConfigs(was, is []Peer) (out []wgtypes.PeerConfig) {
	gone := map[PublicKey]bool{}
	for _, p := range was {
		gone[p.PublicKey] = true
	}
	for _, p := range is {
		delete(gone, p.PublicKey)
	}
	// First, because an address belongs to one peer.
	for _, k := range slices.SortedFunc(maps.Keys(gone), func(a, b PublicKey) int { return slices.Compare(a[:], b[:]) }) {
		out = append(out, wgtypes.PeerConfig{PublicKey: k, Remove: true})
	}
	for _, p := range is {
		if slices.Contains(was, p) {
			continue // its endpoint may have changed since, if the peer sends from another one
		}
		ip := net.IPNet{IP: p.Addr.AsSlice(), Mask: net.CIDRMask(p.Addr.BitLen(), p.Addr.BitLen())}
		out = append(out, wgtypes.PeerConfig{PublicKey: p.PublicKey, PresharedKey: &p.Preshared.key,
			Endpoint: net.UDPAddrFromAddrPort(p.Endpoint), PersistentKeepaliveInterval: &p.Keepalive,
			ReplaceAllowedIPs: true, AllowedIPs: []net.IPNet{ip}})
	}
	return out
}

// Close removes the interface, its routes and its rule. It may be called twice.
func (d *Device) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	d.closed = true
	for _, r := range d.rules {
		_ = d.nl.RuleDel(r)
	}
	if d.index != 0 && d.own() == nil {
		if err := d.nl.LinkDel(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Index: d.index}}); err != nil {
			d.cfg.Log.Warn("cannot remove the WireGuard interface", "interface", d.cfg.Interface, "error", err)
		}
	}
	if d.wg != nil {
		_ = d.wg.Close()
	}
	if d.nl != nil {
		d.nl.Close()
	}
}
