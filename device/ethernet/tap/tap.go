// Package tap gives the host a port in a tenant's network: a TAP interface, created by songgao/water. One or more loops
// read it, any loop writes it. Checksums and segmentation are offloaded where both sides agree (device.go).
//
// The descriptors are non-blocking, each watched only by its loop's epoll. The interface is not persistent: it
// disappears when they are closed, also if the daemon crashes.
package tap

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

// Errors that callers test for.
var (
	ErrExists     = errors.New("tap: interface exists already")
	ErrClosed     = errors.New("tap: closed")
	ErrPermission = errors.New("tap: creating an interface needs root or CAP_NET_ADMIN")
)

// Config describes a host port.
type Config struct {
	// Name of the interface, 1 to 15 characters.
	Name    string
	Network *vswitch.Network
	// Loop reads the interface.
	Loop *loop.Loop
	// More are further loops that read it, each its own queue. The kernel spreads flows over queues, and sends a flow
	// to the queue that last wrote its other direction.
	More []*loop.Loop
	Pool *frame.Pool
	// MTU of the interface in bytes; zero = the network's, following its changes.
	MTU int
	// MAC of the interface; zero = the kernel picks one.
	MAC vswitch.MAC
	// Addrs are the host's addresses in the tenant's network, with their prefix lengths.
	Addrs []netip.Prefix
	// Bridge is the Linux bridge to put the interface into; it must exist. Excludes Addrs: the bridge has the addresses
	// then.
	Bridge string
	// Rate is the port's limit in bits per second, as in vswitch.PortConfig; zero = none.
	Rate int64
	// Offloads selects checksum and segmentation offload in both directions.
	Offloads bool
	Log      hclog.Logger
}

// TAP is an open host port.
type TAP struct {
	cfg   Config
	dev   device
	index int
	mac   vswitch.MAC
	att   *vswitch.Attachment
	log   hclog.Logger
	nl    *netlink.Handle // in the namespace of the interface

	followed func() // stops following the network's MTU; nil if the MTU is fixed

	queues []*queue
	fds    [loop.MaxLoops]int // descriptor that each loop writes to: its queue's, or the first
	out    [loop.MaxLoops]outgoing

	mu     sync.Mutex
	closed bool
}

func (c *Config) check() error {
	switch {
	case c.Network == nil || c.Loop == nil || c.Pool == nil:
		return errors.New("tap: network, loop and pool are required")
	case c.Name == "" || len(c.Name) >= unix.IFNAMSIZ || strings.ContainsAny(c.Name, "/:% \t\n") || c.Name == "." ||
		c.Name == "..":
		return fmt.Errorf("tap: %q is not an interface name; want 1 to %d characters without / : %% or blanks", c.Name,
			unix.IFNAMSIZ-1)
	case c.Bridge != "" && len(c.Addrs) > 0:
		return fmt.Errorf("tap: %s: a member of bridge %s has no addresses of its own; give them to the bridge", c.Name,
			c.Bridge)
	case c.MAC.IsGroup():
		return fmt.Errorf("tap: %s: %v is a group address", c.Name, c.MAC)
	}
	for _, a := range c.Addrs {
		if !a.IsValid() {
			return fmt.Errorf("tap: %s: invalid address", c.Name)
		}
	}
	if limit := min(c.Network.MTU(), c.maxMTU()); c.MTU != 0 && (c.MTU < 68 || c.MTU > limit) {
		return fmt.Errorf("tap: %s: MTU %d; want 68 to %d", c.Name, c.MTU, limit)
	}
	ids := map[int]bool{c.Loop.ID(): true}
	for _, l := range c.More {
		if l == nil || ids[l.ID()] {
			return fmt.Errorf("tap: %s: a loop is missing or listed twice", c.Name)
		}
		ids[l.ID()] = true
	}
	if c.Log == nil {
		c.Log = hclog.NewNullLogger()
	}
	return nil
}

// maxMTU is what our buffers hold with two VLAN tags. The 1: a frame that fills a buffer to the last byte cannot be
// told from a truncated one.
func (c *Config) maxMTU() int { return c.Pool.Capacity() - vswitch.HeaderLen - 8 - 1 }

// queue is the part of a TAP that one loop reads.
type queue struct {
	t     *TAP
	loop  *loop.Loop
	fd    int
	watch *loop.Watch

	cur, small *frame.Buf // the read buffer, and a frame copied out of it for the network
}

// Open creates the interface, configures it, brings it up and connects it to the network. It works in the network
// namespace of the calling thread.
func Open(c Config) (*TAP, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("tap: netlink: %w", err)
	}
	t := &TAP{cfg: c, nl: nl, log: c.Log}
	if err := t.open(); err != nil {
		nl.Close()
		return nil, err
	}
	return t, nil
}

func (t *TAP) open() (err error) {
	// water would attach to an existing persistent interface and clear its persistence.
	if _, err := t.nl.LinkByName(t.cfg.Name); err == nil {
		return fmt.Errorf("%w: %s", ErrExists, t.cfg.Name)
	}
	if t.dev, err = openDevice(t.cfg.Name, t.cfg.Pool, 1+len(t.cfg.More), t.cfg.Offloads); err != nil {
		if link, lerr := t.nl.LinkByName(t.cfg.Name); lerr == nil && !errors.Is(err, ErrExists) {
			_ = t.nl.LinkDel(link) // it did not exist before, so the failed Open left it
		}
		return err
	}
	if err := t.configure(); err != nil {
		_ = t.dev.close()
		return fmt.Errorf("tap: %s: %w", t.cfg.Name, err)
	}
	if err := t.connect(); err != nil {
		_ = t.dev.close()
		return err
	}
	if t.cfg.MTU == 0 {
		t.followed = t.cfg.Network.OnMTU(t.follow)
		t.follow(t.cfg.Network.MTU()) // it may have changed before we followed it
	}
	return nil
}

// follow adopts the network's MTU.
func (t *TAP) follow(mtu int) {
	if err := t.SetMTU(min(mtu, t.cfg.maxMTU())); err != nil && !errors.Is(err, ErrClosed) {
		t.log.Warn("cannot set the network's MTU", "interface", t.cfg.Name, "error", err)
	}
}

func (t *TAP) configure() error {
	c := &t.cfg
	link, err := t.nl.LinkByName(c.Name)
	if err != nil {
		return err
	}
	if !c.MAC.IsZero() {
		if err := t.nl.LinkSetHardwareAddr(link, c.MAC[:]); err != nil {
			return fmt.Errorf("set MAC %v: %w", c.MAC, err)
		}
	}
	mtu := c.MTU
	if mtu == 0 {
		mtu = min(c.Network.MTU(), c.maxMTU())
	}
	if err := t.setMTU(link, mtu); err != nil {
		return err
	}
	if c.Bridge != "" {
		master, err := t.nl.LinkByName(c.Bridge)
		if err != nil {
			return fmt.Errorf("bridge %q: %w", c.Bridge, err)
		}
		if master.Type() != "bridge" {
			return fmt.Errorf("%q is a %s, not a bridge", c.Bridge, master.Type())
		}
		if err := t.nl.LinkSetMaster(link, master); err != nil {
			return fmt.Errorf("put into bridge %q: %w", c.Bridge, err)
		}
	}
	for _, a := range c.Addrs {
		addr, err := netlink.ParseAddr(a.String())
		if err != nil {
			return err
		}
		if a.Addr().Is6() {
			addr.Flags |= unix.IFA_F_NODAD // usable at once; the operator ensures that it is unique
		}
		if err := t.nl.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add address %v: %w", a, err)
		}
	}
	if err := t.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring up: %w", err)
	}
	if link, err = t.nl.LinkByName(c.Name); err != nil {
		return err
	}
	t.index = link.Attrs().Index
	if hw := link.Attrs().HardwareAddr; len(hw) == len(t.mac) {
		t.mac = vswitch.MAC(hw)
	}
	return nil
}

func (t *TAP) connect() error {
	for i := range t.fds {
		t.fds[i] = t.dev.fds[0]
	}
	for i, l := range t.cfg.More {
		t.fds[l.ID()] = t.dev.fds[i+1]
	}
	_, err := t.cfg.Network.Attach(t, vswitch.PortConfig{Name: t.cfg.Name, Kind: vswitch.KindTAP, Rate: t.cfg.Rate,
		Loop:     t.cfg.Loop,
		Attached: func(a *vswitch.Attachment) { t.att = a }})
	if err != nil {
		return err
	}
	t.att.SetOffloads(t.dev.takes)
	for i, l := range append([]*loop.Loop{t.cfg.Loop}, t.cfg.More...) {
		q := &queue{t: t, loop: l, fd: t.dev.fds[i]}
		// On the loop, so that ready does not run before watch is known.
		l.Visit(func() {
			q.watch, err = l.Watch(q.fd, q.ready, loop.Name("tap "+t.cfg.Name), loop.OnFault(q.onFault))
		})
		if err != nil {
			t.disconnect()
			return err
		}
		t.queues = append(t.queues, q)
	}
	return nil
}

// disconnect stops reading and takes the port off the network.
func (t *TAP) disconnect() {
	for _, q := range t.queues {
		q.watch.Close()
	}
	t.att.Close()
	for _, q := range t.queues {
		q.loop.Visit(func() {
			if q.cur != nil {
				q.cur.Free()
				q.cur = nil
			}
		})
	}
}

// Name returns the interface's name.
func (t *TAP) Name() string { return t.cfg.Name }

// Index returns the interface's index.
func (t *TAP) Index() int { return t.index }

// MAC returns the interface's address.
func (t *TAP) MAC() vswitch.MAC { return t.mac }

// Attachment returns the port's attachment to the network, for its counters.
func (t *TAP) Attachment() *vswitch.Attachment { return t.att }

// Offloads returns the work that the kernel leaves undone in frames from this interface, and accepts undone in frames
// to it.
func (t *TAP) Offloads() frame.Need { return t.dev.takes }

// SetMTU changes the interface's MTU.
func (t *TAP) SetMTU(mtu int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrClosed
	}
	link, err := t.nl.LinkByIndex(t.index)
	if err != nil {
		return fmt.Errorf("tap: %s: %w", t.cfg.Name, err)
	}
	return t.setMTU(link, mtu)
}

// setMTU also limits TCP's large frames to the size of one tunnel message (64 KiB of UDP): in a frame of 46
// segments the last two would cost as much as the others together.
func (t *TAP) setMTU(link netlink.Link, mtu int) error {
	if err := t.nl.LinkSetMTU(link, mtu); err != nil {
		return fmt.Errorf("tap: %s: set MTU %d: %w", t.cfg.Name, mtu, err)
	}
	const message, header = 65535 - 40 - 8, 8 + vswitch.HeaderLen // VXLAN and Ethernet
	if err := t.nl.LinkSetGSOMaxSegs(link, message/(mtu+header)); err != nil {
		t.log.Debug("segmentation offload unavailable", "interface", t.cfg.Name, "error", err)
	}
	return nil
}

// Close takes the port off the network and removes the interface. It may be called twice.
func (t *TAP) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	if t.followed != nil {
		t.followed()
	}
	defer t.nl.Close()
	t.disconnect()
	if err := t.dev.close(); err != nil {
		return fmt.Errorf("tap: close %s: %w", t.cfg.Name, err)
	}
	return nil
}
