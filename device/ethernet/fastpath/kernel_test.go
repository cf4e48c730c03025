package fastpath_test

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/fastpath"
	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// stream is one TCP connection that sends as fast as it can until the test ends.
type stream struct{ arrived atomic.Int64 }

func newStream(t *testing.T, from, to *nstest.NS, addr string) *stream {
	t.Helper()
	s := &stream{}
	var ln net.Listener
	to.Do(func() { ln = must[net.Listener](t)(net.Listen("tcp", addr)) })
	var c net.Conn
	from.Do(func() { c = must[net.Conn](t)(net.Dial("tcp", addr)) })
	r := must[net.Conn](t)(ln.Accept())
	ln.Close()
	ended := make(chan struct{}, 2)
	go func() {
		_, _ = io.Copy(c, zeroes{})
		ended <- struct{}{}
	}()
	go func() {
		b := make([]byte, 1<<16)
		for {
			n, err := r.Read(b)
			s.arrived.Add(int64(n))
			if err != nil {
				break
			}
		}
		ended <- struct{}{}
	}()
	t.Cleanup(func() {
		c.Close()
		r.Close()
		<-ended
		<-ended
	})
	return s
}

type zeroes struct{}

func (zeroes) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// goesOn waits until n more bytes have arrived.
func (s *stream) goesOn(t *testing.T, what string, n int64) {
	t.Helper()
	before := s.arrived.Load()
	testutil.Eventually(t, "the stream goes on "+what, func() bool { return s.arrived.Load()-before >= n })
}

// still waits until no frame of a host takes the short path.
func (h *host) still(t *testing.T, why string) {
	t.Helper()
	testutil.Eventually(t, "no frame takes the short path: "+why, func() bool {
		before := h.short()
		time.Sleep(50 * time.Millisecond)
		return h.short() == before
	})
}

func (h *host) carries(t *testing.T, when string) {
	t.Helper()
	testutil.Eventually(t, "frames take the short path "+when, func() bool {
		before := h.short()
		time.Sleep(50 * time.Millisecond)
		return h.short() > before+10
	})
}

// A change in the kernel of the route to the peer, of IPsec policies or of the host port's interface ends the short
// path of an existing connection, although the network's tables do not change.
func TestShortPathHeedsKernel(t *testing.T) {
	l := newShortLab(t, wires[0], 0)
	s := newStream(t, l.a, l.b, "10.0.0.2:7000")
	peer := wires[0].addr(2)
	policy := func(do, dir, from, to string, more ...string) {
		l.a.IP(append([]string{"xfrm", "policy", do, "src", from + "/32", "dst", to + "/32", "dir", dir}, more...)...)
	}
	here := wires[0].addr(1)
	for _, x := range []struct {
		what     string
		do, undo func()
		flows    bool
	}{
		{"an IPsec policy for output", func() { policy("add", "out", here, peer, "action", "block") },
			func() { policy("del", "out", here, peer) }, false},
		{"an IPsec policy for input", func() {
			policy("add", "in", peer, here, "tmpl", "src", peer, "dst", here, "proto", "esp", "mode", "transport")
		}, func() { policy("del", "in", peer, here) }, false},
		{"a promiscuous TAP", func() { l.a.IP("link", "set", "tap0", "promisc", "on") },
			func() { l.a.IP("link", "set", "tap0", "promisc", "off") }, true},
		{"a blackhole route", func() { l.a.IP("route", "add", "blackhole", peer) },
			func() { l.a.IP("route", "del", "blackhole", peer) }, false},
	} {
		l.ha.carries(t, "before "+x.what)
		x.do()
		if x.flows {
			testutil.Eventually(t, "the stream goes on without the short path", func() bool {
				before := l.ha.short()
				s.goesOn(t, x.what, 4<<20)
				return l.ha.short() == before
			})
		} else {
			// Frames under way may still arrive.
			testutil.Eventually(t, "the stream stops: "+x.what, func() bool {
				before := s.arrived.Load()
				time.Sleep(50 * time.Millisecond)
				return s.arrived.Load() == before
			})
			testutil.Eventually(t, "the entries are gone", func() bool { return l.ha.vt.Status().ShortPath.Entries == 0 })
			// The switch still sees TCP frames, and offers the flow.
			l.a.Do(func() {
				if c, err := net.DialTimeout("tcp", "10.0.0.2:7000", 300*time.Millisecond); err == nil {
					c.Close()
					t.Errorf("%s: connected", x.what)
				}
			})
			if n := l.ha.vt.Status().ShortPath.Entries; n != 0 {
				t.Errorf("%s: %d entries", x.what, n)
			}
		}
		x.undo()
	}
	// Policies for other addresses, and ones that allow the traffic, do not matter.
	policy("add", "out", "198.51.100.1", peer, "action", "block")
	policy("add", "out", here, peer, "action", "allow")
	l.ha.carries(t, "at last")
	s.goesOn(t, "at last", 1<<20)

	// A TAP that moved to another namespace is left alone: its index may belong to another interface here.
	c := nstest.New(t, "c")
	l.a.IP("link", "set", "tap0", "netns", c.Name)
	l.a.IP("link", "add", "other", "index", fmt.Sprint(l.ha.tap.Index()), "type", "bridge")
	testutil.Eventually(t, "the entries are gone", func() bool { return l.ha.vt.Status().ShortPath.Entries == 0 })
	c.IP("link", "set", "tap0", "up")
	c.Addr("tap0", "10.0.0.1/24")
	transfer(t, c, l.b, "10.0.0.2:7001", 8<<20)
	if n := l.ha.vt.Status().ShortPath.Entries; n != 0 {
		t.Errorf("%d entries for a TAP in another namespace", n)
	}
}

// When the host's firewall starts to drop the datagrams, an existing connection stops when its entries expire, although
// frames on the short path bypass the firewall.
func TestShortPathHeedsFirewall(t *testing.T) {
	nstest.Require(t, "nft", "nftables")
	was := *fastpath.RenewTicks
	*fastpath.RenewTicks = 2
	t.Cleanup(func() { *fastpath.RenewTicks = was })
	l := newShortLab(t, wires[0], 0)
	s := newStream(t, l.a, l.b, "10.0.0.2:7000")
	l.hb.carries(t, "at first")
	l.b.MustExec("nft",
		"add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in udp dport 4789 drop")
	testutil.Eventually(t, "the stream stops", func() bool {
		before := s.arrived.Load()
		time.Sleep(100 * time.Millisecond)
		return s.arrived.Load() == before
	})
	l.b.MustExec("nft", "delete table inet f")
	s.goesOn(t, "when it is allowed again", 1<<20)
	l.hb.carries(t, "at last")
}

// The short path counts frames as they are on a wire, at both ends.
func TestShortPathCounts(t *testing.T) {
	l := newShortLab(t, wires[0], 0)
	l.carry("at first")
	s := newStream(t, l.a, l.b, "10.0.0.2:7000")
	s.goesOn(t, "for a while", 64<<20)
	a, b := l.ha.tapTotals(), l.hb.tapTotals()
	s.goesOn(t, "for another", 256<<20)
	sent, got := l.ha.tapTotals(), l.hb.tapTotals()
	for _, n := range []struct {
		what       string
		sent, read uint64
		least      uint64
	}{
		{"frames", sent.InFrames - a.InFrames, got.OutFrames - b.OutFrames, 256 << 20 / 1450},
		{"bytes", sent.InBytes - a.InBytes, got.OutBytes - b.OutBytes, 256 << 20},
	} {
		if n.sent < n.least || n.read < n.least || 10*n.read > 11*n.sent || 10*n.sent > 11*n.read {
			t.Errorf("%s: %d sent, %d received, want %d at least", n.what, n.sent, n.read, n.least)
		}
	}
}

// sharedWire makes hosts with a common underlay, addresses 192.0.2.1 and so on.
func sharedWire(t *testing.T, names ...string) (ns []*nstest.NS) {
	sw := nstest.New(t, "wire")
	sw.IP("link", "add", "sw", "type", "bridge")
	sw.IP("link", "set", "sw", "up")
	for i, n := range names {
		h := nstest.New(t, n)
		dev := fmt.Sprint("u", i)
		nstest.Pair(h, sw, dev, 1500)
		sw.IP("link", "set", dev, "master", "sw")
		h.Addr(dev, fmt.Sprintf("192.0.2.%d/24", i+1))
		ns = append(ns, h)
	}
	return ns
}

// A third host on the underlay forges datagrams of a connection on the short path. Datagrams that the tunnel would
// reject are rejected and counted as usual (MT-6).
func TestShortPathForged(t *testing.T) {
	needShort(t)
	ns := sharedWire(t, "a", "b", "c")
	a, b, c := ns[0], ns[1], ns[2]
	loops := newLoops(t, 2)
	var h [2]*host
	for i := range h {
		h[i] = newHost(t, ns[i], loops[i:i+1], hostConfig{local: fmt.Sprintf("192.0.2.%d", i+1),
			peers: []string{fmt.Sprintf("192.0.2.%d", 2-i)},
			tap: tap.Config{Offloads: true,
				Name: "tap0", Addrs: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.0.0.%d/24", i+1))}}})
	}
	// Another tenant, whose peer is the third host.
	other := must[*vswitch.Network](t)(vswitch.NewNetwork(vswitch.Config{VNI: 4712, Name: "other"}))
	if err := h[1].vt.AddNetwork(other, []netip.Addr{netip.MustParseAddr("192.0.2.3")}); err != nil {
		t.Fatal(err)
	}
	s := newStream(t, a, b, "10.0.0.2:7000")
	h[1].carries(t, "before")

	f := newForger(t, b, c)
	forge, marks, look := f.send, f.marks, f.look
	f.port = 500 // only root may send from it
	am, bm := h[0].tap.MAC(), h[1].tap.MAC()
	// A host that can send from a's address can send as a: the tunnel is no safer than the underlay (SECURITY.md). This
	// datagram shows that the others would arrive, too, if they were accepted.
	testutil.Eventually(t, "a datagram with all values right arrives", func() bool {
		forge('9', 1, 4711, bm, am)
		look()
		return marks["9"]
	})
	testutil.Eventually(t, "the others are dropped and counted", func() bool { // a full socket may lose some
		forge('1', 3, 4711, bm, am) // from its own address: no peer of this network
		forge('2', 3, 4712, bm, am) // in the network whose peer the third host is
		forge('3', 1, 4712, bm, am) // as a, in a network of which a is no peer
		forge('4', 1, 4713, bm, am) // as a, in an unknown network
		st := h[1].vt.Status()
		return h[1].net.Status().Drops[vswitch.UnknownPeer.String()] > 0 &&
			other.Status().Drops[vswitch.UnknownPeer.String()] > 1 && st.Drops[vswitch.UnknownVNI.String()] > 0
	})
	// As a with all values right, but from a port that any user of a's host may use (TR-3).
	f.port = 50000
	testutil.Eventually(t, "it is refused and counted", func() bool {
		forge('5', 1, 4711, bm, am)
		return h[1].net.Status().Drops[vswitch.SourcePort.String()] > 0
	})
	look()
	if marks["5"] || marks["1"] || marks["2"] || marks["3"] || marks["4"] {
		t.Errorf("forged frames arrived: %v", marks)
	}
	h[1].carries(t, "after all")
	s.goesOn(t, "after all", 1<<20)
}

// A container behind a TAP's bridge moves to another host with its connection. The connection goes on, by the short
// path at the new host, and none of its frames takes the short path at the old one.
func TestShortPathMoves(t *testing.T) {
	needShort(t)
	ns := sharedWire(t, "a", "b", "c")
	loops := newLoops(t, 3)
	var h [3]*host
	for i, x := range ns {
		var peers []string
		for k := range ns {
			if k != i {
				peers = append(peers, fmt.Sprintf("192.0.2.%d", k+1))
			}
		}
		tc := tap.Config{Offloads: true, Name: "tap0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}
		if i > 0 {
			x.IP("link", "add", "brt", "type", "bridge")
			x.IP("link", "set", "brt", "up")
			tc = tap.Config{Offloads: true, Name: "tap0", Bridge: "brt"}
		}
		h[i] = newHost(t, x, loops[i:i+1], hostConfig{local: fmt.Sprintf("192.0.2.%d", i+1), peers: peers, tap: tc})
	}
	box := nstest.New(t, "box")
	ns[1].IP("link", "add", "e0", "mtu", "1450", "type", "veth", "peer", "name", "e0", "mtu", "1450", "netns", box.Name)
	t.Cleanup(func() { _, _ = box.Exec("ip", "link", "del", "e0") })
	box.IP("link", "set", "e0", "up")
	box.Addr("e0", "10.0.0.9/24")
	plug := func(at *nstest.NS) {
		at.IP("link", "set", "e0", "master", "brt")
		at.IP("link", "set", "e0", "up")
	}
	plug(ns[1])
	s := newStream(t, box, ns[0], "10.0.0.1:7000")
	for range 2 {
		for _, at := range [][2]int{{1, 2}, {2, 1}} {
			from, to := at[0], at[1]
			h[from].carries(t, "where the container is")
			h[0].carries(t, "at the other end")
			ns[from].IP("link", "set", "e0", "netns", ns[to].Name)
			plug(ns[to])
			h[from].still(t, "the container has gone")
			s.goesOn(t, "at its new place", 1<<20)
		}
	}
}
