package fastpath_test

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/ways"
)

// blind is a monitor and a port that ignores all frames.
type blind struct{}

func (blind) Frame(*loop.Loop, bool, []byte) {}
func (blind) Datagram(*loop.Loop, bool, netip.AddrPort, netip.AddrPort, uint8, []byte, []byte) {
}
func (blind) Deliver(*loop.Loop, *frame.Buf, vswitch.Destination) {}

func needShort(t *testing.T) {
	if !ways.ShortPath() {
		t.Skip("VNICD_WAYS turns the short path off")
	}
}

// shortLab is two hosts with a TAP each.
type shortLab struct {
	t    *testing.T
	a, b *nstest.NS
	ha   *host
	hb   *host
}

func newShortLab(t *testing.T, w wireKind, rate int64) *shortLab {
	needShort(t)
	l := &shortLab{t: t, a: nstest.New(t, "a"), b: nstest.New(t, "b")}
	nstest.Pair(l.a, l.b, "u0", w.mtu)
	for i, ns := range []*nstest.NS{l.a, l.b} {
		dev := "u0"
		if w.vlan {
			dev = "u0.7"
			if out, err := ns.Exec("ip", "link", "add", "link", "u0", "name", dev, "type", "vlan", "id", "7"); err != nil {
				t.Skipf("this kernel has no VLAN interfaces (CONFIG_VLAN_8021Q): %s", out)
			}
			ns.IP("link", "set", dev, "up")
		}
		w.underlay(ns, dev, 1+i)
	}
	loops := newLoops(t, 2)
	for i, h := range []**host{&l.ha, &l.hb} {
		ns := []*nstest.NS{l.a, l.b}[i]
		*h = newHost(t, ns, loops[i:i+1], hostConfig{local: w.addr(1 + i), peers: []string{w.addr(2 - i)}, zero: true,
			tap: tap.Config{Offloads: true, Name: "tap0", Rate: rate,
				Addrs: []netip.Prefix{netip.MustParsePrefix([]string{"10.0.0.1/24", "10.0.0.2/24"}[i])}}})
		if s := (*h).vt.Status().ShortPath; s.State != "on" {
			t.Fatal("no short path: ", s.State)
		}
	}
	return l
}

// tapTotals returns the host port's counters in the network's status.
func (h *host) tapTotals() (t vswitch.Totals) {
	for _, p := range h.net.Ports() {
		if p.Kind == vswitch.KindTAP.String() {
			t = p.Totals
		}
	}
	return t
}

func (h *host) short() uint64 { return h.vt.Status().ShortPath.Frames }

// carry transfers data until most of a transfer takes the short path at both hosts.
func (l *shortLab) carry(why string) {
	l.t.Helper()
	const size = 8 << 20
	testutil.Eventually(l.t, "most frames take the short path "+why, func() bool {
		short, all := [2]uint64{l.ha.short(), l.hb.short()}, l.frames()
		transfer(l.t, l.a, l.b, "10.0.0.2:7000", size)
		now := l.frames()
		for i, h := range []*host{l.ha, l.hb} {
			if d := h.short() - short[i]; d < 2*size/9000 || 100*d < 95*(now[i]-all[i]) {
				return false
			}
		}
		return true
	})
}

// frames counts all frames of each TAP.
func (l *shortLab) frames() (n [2]uint64) {
	for i, h := range []*host{l.ha, l.hb} {
		t := h.tapTotals()
		n[i] = t.InFrames + t.OutFrames
	}
	return n
}

// Data arrive intact by the short path, over either underlay; the counters of kernel and switch together cover all
// frames; and addresses used only in the kernel do not age.
func TestShortPath(t *testing.T) {
	for _, w := range wires {
		t.Run(w.name, func(t *testing.T) {
			l := newShortLab(t, w, 0)
			l.carry("at first")
			// One connection for longer than a moment: none of its frames passes the switches.
			var ln net.Listener
			l.b.Do(func() { ln = must[net.Listener](t)(net.Listen("tcp", "10.0.0.2:7001")) })
			defer ln.Close()
			read := make(chan struct{})
			go func() {
				defer close(read)
				if s, err := ln.Accept(); err == nil {
					_, _ = io.Copy(io.Discard, s)
					s.Close()
				}
			}()
			var c net.Conn
			l.a.Do(func() { c = must[net.Conn](t)(net.Dial("tcp", "10.0.0.2:7001")) })
			defer func() {
				c.Close()
				<-read
			}()
			data := make([]byte, 1<<20)
			before := l.frames()
			for end := time.Now().Add(4 * time.Second); time.Now().Before(end); {
				if _, err := c.Write(data); err != nil {
					t.Fatal(err)
				}
			}
			for i, h := range []*host{l.ha, l.hb} {
				for _, m := range []vswitch.MAC{l.ha.tap.MAC(), l.hb.tap.MAC()} {
					if e, ok := h.net.Lookup(m); !ok || e.Idle > 3*time.Second {
						t.Errorf("host %d: %v was idle for %v", i, m, e.Idle)
					}
				}
				if n := l.frames()[i] - before[i]; n < 1000 {
					t.Errorf("host %d counted %d frames", i, n)
				}
			}
		})
	}
}

// Any change that forbids the short path ends it at once; when the change is reverted, the short path is used again.
func TestShortPathLeft(t *testing.T) {
	l := newShortLab(t, wires[0], 0)
	att := l.ha.tap.Attachment()
	peer := netip.MustParseAddr(wires[0].addr(2))
	there := l.hb.tap.MAC()
	var elsewhere *vswitch.Attachment
	for _, x := range []struct {
		what  string
		do    func() error
		undo  func()
		flows bool // frames still arrive
	}{
		{"capture of the port", func() error { return att.SetMonitor(blind{}) }, att.RemoveMonitor, true},
		{"capture of the tunnels", func() error { return l.ha.vt.SetMonitor(blind{}) }, l.ha.vt.RemoveMonitor, true},
		{"a static entry elsewhere", func() (err error) {
			elsewhere, err = l.ha.net.Attach(blind{}, vswitch.PortConfig{Name: "elsewhere", Kind: vswitch.KindVM,
				MACs: []vswitch.MAC{there}})
			return err
		}, func() { elsewhere.Close() }, false},
		{"the peer removed", func() error { return l.ha.vt.RemovePeer(4711, peer) }, func() {
			if err := l.ha.vt.AddPeer(4711, peer); err != nil {
				t.Fatal(err)
			}
		}, false},
		{"the network removed", func() error { return l.ha.vt.RemoveNetwork(4711) }, func() {
			l.a.Do(func() {
				if err := l.ha.vt.AddNetwork(l.ha.net, []netip.Addr{peer}); err != nil {
					t.Fatal(err)
				}
			})
		}, false},
	} {
		l.carry("before " + x.what)
		if err := x.do(); err != nil {
			t.Fatal(x.what, err)
		}
		before := l.ha.short()
		if x.flows {
			transfer(t, l.a, l.b, "10.0.0.2:7000", 1<<20)
		} else {
			l.a.Do(func() {
				if c, err := net.DialTimeout("tcp", "10.0.0.2:7000", 300*time.Millisecond); err == nil {
					c.Close()
					t.Errorf("%s: connected", x.what)
				}
			})
		}
		if n := l.ha.short() - before; n != 0 {
			t.Errorf("%s: %d frames took the short path", x.what, n)
		}
		x.undo()
	}
	l.carry("at last")

	// An interface's entries are removed with it.
	if err := l.ha.tap.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "the entries are gone", func() bool { return l.ha.vt.Status().ShortPath.Entries == 0 })
}

// Frames of a port with a rate limit stay with the switch, which enforces it.
func TestShortPathRate(t *testing.T) {
	l := newShortLab(t, wires[0], 10_000_000_000)
	for range 3 {
		transfer(t, l.a, l.b, "10.0.0.2:7000", 8<<20)
	}
	if n := l.ha.short() + l.hb.short(); n != 0 {
		t.Errorf("%d frames took the short path", n)
	}
}

// Over IPv6 the kernel's segments have no outer checksum, so no frame is sent that way unless ZeroChecksum6 is set.
func TestShortPathChecksum6(t *testing.T) {
	if !ways.ShortPath() || os.Geteuid() != 0 {
		t.Skip("no short path")
	}
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "u0", 1500)
	w := wireKind{v6: true}
	w.underlay(a, "u0", 1)
	w.underlay(b, "u0", 2)
	// The Linux peer accepts no datagram without a checksum.
	b.IP("link", "add", "vx", "type", "vxlan", "id", fmt.Sprint(vni), "dstport", "4789", "local", w.addr(2), "remote",
		w.addr(1), "dev", "u0")
	b.IP("link", "add", "brt", "type", "bridge")
	b.IP("link", "set", "vx", "master", "brt", "up")
	b.IP("link", "set", "brt", "up")
	b.Addr("brt", "10.0.0.2/24")
	h := newHost(t, a, newLoops(t, 1), hostConfig{local: "2001:db8::1", peers: []string{"2001:db8::2"},
		tap: tap.Config{Offloads: true, Name: "tap0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	b.IP("link", "set", "brt", "mtu", "1430")
	transfer(t, a, b, "10.0.0.2:7000", 8<<20)
	// Received frames may take the short path.
	if out := h.vt.Status(); out.OutFrames == 0 || out.ShortPath.State != "on" {
		t.Errorf("%+v", out)
	}
}

// The short path works over a tagged underlay; a tenant's own tagged frames do not take it.
func TestVLANShortPath(t *testing.T) {
	l := newShortLab(t, wireKind{mtu: 1500, vlan: true}, 0)
	l.carry("over a tagged underlay")
	for i, ns := range []*nstest.NS{l.a, l.b} {
		ns.IP("link", "add", "link", "tap0", "name", "tap0.5", "mtu", "1400", "type", "vlan", "id", "5")
		ns.IP("link", "set", "tap0.5", "up")
		ns.Addr("tap0.5", fmt.Sprintf("10.5.0.%d/24", i+1))
	}
	before := l.ha.short() + l.hb.short()
	transfer(t, l.a, l.b, "10.5.0.2:7000", 1<<20)
	if n := l.ha.short() + l.hb.short() - before; n > 100 { // of the traffic before
		t.Errorf("%d tagged frames took the short path", n)
	}
}
