package vxlan_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/ways"
)

// wireCheck inspects the datagrams on an underlay interface, in the background.
type wireCheck struct {
	mu       sync.Mutex
	tcp, udp int // inner packets with payload
	summed   int // TCP in datagrams with a checksum, which segmented ones have
	wrong    int
	first    string // the first wrong one
	largest  int    // inner frame
	stop     func()
}

// watchWire checks inner IP and transport checksums of every VXLAN datagram on dev.
func watchWire(t *testing.T, ns *nstest.NS, dev string) *wireCheck {
	t.Helper()
	w := &wireCheck{}
	fd := packetSocket(t, ns, dev)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	w.stop = func() { cancel(); <-done }
	go func() {
		defer close(done)
		p := make([]byte, 1<<17)
		for ctx.Err() == nil {
			n, _, err := unix.Recvfrom(fd, p, 0)
			if err != nil {
				continue // the timeout
			}
			w.look(p[:n])
		}
	}()
	t.Cleanup(w.stop)
	return w
}

func (w *wireCheck) look(f []byte) {
	const outer = header.EthernetLen + header.IPv4Len + header.UDPLen
	if len(f) < outer+vxlan.HeaderLen+header.EthernetLen+header.IPv4Len || f[12] != 8 || f[13] != 0 ||
		f[23] != header.ProtoUDP || binary.BigEndian.Uint16(f[36:]) != 4789 {
		return
	}
	end := header.EthernetLen + int(binary.BigEndian.Uint16(f[16:]))
	if end > len(f) {
		return
	}
	inner := f[outer+vxlan.HeaderLen : end]
	w.mu.Lock()
	defer w.mu.Unlock()
	w.largest = max(w.largest, len(inner))
	var l4 []byte
	var sum uint32
	var proto uint8
	p := inner[header.EthernetLen:]
	switch binary.BigEndian.Uint16(inner[12:]) {
	case header.TypeIPv4:
		n := int(p[0]&15) * 4
		if header.Checksum(p[:n], 0) != 0 {
			w.bad(inner)
		}
		l4, proto = p[n:binary.BigEndian.Uint16(p[2:])], p[9]
		sum = header.PseudoSum4([4]byte(p[12:16]), [4]byte(p[16:20]), proto, uint16(len(l4)))
	case header.TypeIPv6:
		l4, proto = p[header.IPv6Len:header.IPv6Len+int(binary.BigEndian.Uint16(p[4:]))], p[6]
		sum = header.PseudoSum6([16]byte(p[8:24]), [16]byte(p[24:40]), proto, uint32(len(l4)))
	}
	switch proto {
	case 6:
		w.tcp++
		if f[outer-2] != 0 || f[outer-1] != 0 {
			w.summed++
		}
	case header.ProtoUDP:
		w.udp++
	default:
		return
	}
	if header.Checksum(l4, sum) != 0 {
		w.bad(inner)
	}
}

func (w *wireCheck) bad(f []byte) {
	if w.wrong++; w.wrong == 1 {
		w.first = fmt.Sprintf("%x", f[:min(len(f), 80)])
	}
}

func (w *wireCheck) report(t *testing.T, limit int) {
	t.Helper()
	w.stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	t.Logf("on the wire: %d TCP, %d UDP, largest inner frame %d", w.tcp, w.udp, w.largest)
	if w.wrong > 0 {
		t.Errorf("%d wrong inner checksums on the wire; the first: %s", w.wrong, w.first)
	}
	if w.tcp < 1000 || w.largest > limit {
		t.Errorf("%d TCP packets seen, largest inner frame %d, want at most %d", w.tcp, w.largest, limit)
	}
}

// Two hosts, offloads on or off at each, against each other and against Linux: TCP both ways, datagrams that the sender
// leaves unsegmented, and right checksums on the wire.
func TestOffloads(t *testing.T) {
	nstest.Require(t, "iperf3", "iperf3")
	for _, c := range []struct {
		name        string
		here, there bool // with offloads
		linux       bool
	}{
		{"both", true, true, false}, {"sender only", true, false, false}, {"receiver only", false, true, false},
		{"none", false, false, false},
		{"Linux peer", true, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := nstest.New(t, "a"), nstest.New(t, "b")
			nstest.Pair(a, b, "under", 1500)
			// Frames on the wire are complete, as on a real one: no work is left to the peer's kernel.
			a.NoOffload("under")
			b.NoOffload("under")
			underlay(a, "under", "192.0.2.1")
			loops := newLoops(t, 2)
			host := func(ns *nstest.NS, i int, offloads bool) *host {
				return newHost(t, ns, loops[i-1:i], hostConfig{vni: 4711, whole: true, local: fmt.Sprint("192.0.2.", i),
					peers: []string{fmt.Sprint("192.0.2.", 3-i)},
					tap: tap.Config{Name: "tenant", Offloads: offloads,
						Addrs: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.0.0.%d/24", i)),
							netip.MustParsePrefix(fmt.Sprintf("fd00::%d/64", i))}}})
			}
			ha := host(a, 1, c.here)
			if c.linux {
				linuxPeer(b, "under", "192.0.2.2", "192.0.2.1")
			} else {
				underlay(b, "under", "192.0.2.2")
				host(b, 2, c.there)
			}
			if got := ha.tap.Offloads(); c.here != (got == frame.NeedAll) || !c.here && got != 0 {
				t.Errorf("offloads of the TAP: %#x", got)
			}
			a.Ping("10.0.0.2")
			w := watchWire(t, a, "under")
			b.Start("iperf3", "-s")
			for _, to := range []string{"10.0.0.2", "fd00::2"} {
				for _, dir := range [][]string{nil, {"-R"}} {
					r := runIperf(t, a, to, append(dir, "-n16M")...)
					t.Logf("TCP %s %v: %.0f Mbit/s", to, dir, bitsPerSecond(t, r)/1e6)
				}
			}
			datagrams(t, a, b)
			w.report(t, ha.net.MTU()+header.EthernetLen)
			if cut := w.summed >= 100; cut != (c.linux || ways.Segmentation()) { // Linux computes checksums in any case
				t.Errorf("%d of %d datagrams were segmented by the kernel", w.summed, w.tcp)
			}
			for _, p := range ha.net.Status().Ports {
				for why, n := range p.Drops {
					t.Logf("port %s: dropped %d as %s", p.Name, n, why)
					if why == "bad-header" || why == "too-big" {
						t.Error("unexpected drops")
					}
				}
			}
		})
	}
}

// datagrams sends UDP datagrams as one message that the kernel may leave unsegmented (UDP_SEGMENT), and expects each of
// them.
func datagrams(t *testing.T, from, to *nstest.NS) {
	t.Helper()
	for _, c := range []struct{ network, dst string }{{"udp4", "10.0.0.2:7777"}, {"udp6", "[fd00::2]:7777"}} {
		var server, client *net.UDPConn
		to.Do(func() {
			server = must[*net.UDPConn](t)(net.ListenUDP(c.network, must[*net.UDPAddr](t)(net.ResolveUDPAddr(c.network, c.dst))))
		})
		from.Do(func() {
			client = must[*net.UDPConn](t)(net.DialUDP(c.network, nil,
				must[*net.UDPAddr](t)(net.ResolveUDPAddr(c.network, c.dst))))
		})
		const size, total = 1200, 12*1200 + 7
		data := make([]byte, total)
		for i := range data {
			data[i] = byte(i / size)
		}
		raw := must[interface {
			Control(func(uintptr)) error
		}](t)(client.SyscallConn())
		if err := raw.Control(func(fd uintptr) {
			if err := unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size); err != nil {
				t.Fatalf("UDP_SEGMENT: %v", err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 1<<16)
		testutil.Eventually(t, "all datagrams of one frame arrive", func() bool {
			if _, err := client.Write(data); err != nil {
				t.Fatal(err)
			}
			seen := map[byte]int{}
			for range 13 {
				server.SetReadDeadline(time.Now().Add(time.Second))
				n, err := server.Read(got)
				if err != nil {
					return false
				}
				for _, x := range got[:n] {
					if x != got[0] {
						t.Fatalf("a datagram of %d bytes mixes two", n)
					}
				}
				seen[got[0]] = n
			}
			for i := range byte(13) {
				if want := min(size, total-int(i)*size); seen[i] != want {
					t.Errorf("datagram %d has %d bytes, want %d", i, seen[i], want)
				}
			}
			return true
		})
		client.Close()
		server.Close()
	}
}

// The underlay becomes narrower during a transfer whose frames the kernel segments: it refuses them, the switch
// segments them, each datagram is found to be too big, and the transfer goes on with smaller ones.
func TestOffloadsPathShrinks(t *testing.T) {
	nstest.Require(t, "iperf3", "iperf3")
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	a.NoOffload("under")
	b.NoOffload("under")
	underlay(a, "under", "192.0.2.1")
	linuxPeer(b, "under", "192.0.2.2", "192.0.2.1")
	h := newHost(t, a, newLoops(t, 1), hostConfig{vni: 4711, local: "192.0.2.1", peers: []string{"192.0.2.2"},
		tap: tap.Config{Offloads: true, Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	a.Ping("10.0.0.2")
	b.Start("iperf3", "-s")
	waitListen(t, b, 5201)
	a.Start("iperf3", "-c", "10.0.0.2", "-t", "15")
	sent := func() uint64 { return h.tapTotals().InBytes }
	testutil.Eventually(t, "the transfer runs", func() bool { return sent() > 4<<20 })
	a.IP("link", "set", "under", "mtu", "1300")
	testutil.Eventually(t, "the network's MTU follows", func() bool { return h.net.MTU() == 1250 })
	arrived := func() uint64 { return h.vt.Status().OutBytes }
	before := arrived()
	testutil.Eventually(t, "the transfer goes on", func() bool { return arrived() > before+4<<20 })
	// A capture sees each datagram as it is on the wire.
	var m monitor
	if err := h.vt.SetMonitor(&m); err != nil {
		t.Fatal(err)
	}
	before = sent()
	testutil.Eventually(t, "the transfer still goes on", func() bool { return sent() > before+4<<20 })
	h.vt.RemoveMonitor()
	if m.frames.Load() < 1000 || m.largest.Load() > 1250+header.EthernetLen {
		t.Errorf("%d datagrams seen, inner frames of up to %d bytes", m.frames.Load(), m.largest.Load())
	}
}

// monitor records the datagrams that one loop sends.
type monitor struct{ frames, largest atomic.Int64 }

func (m *monitor) Datagram(_ *loop.Loop, out bool, _, _ netip.AddrPort, _ uint8, _, inner []byte) {
	if out {
		m.frames.Add(1)
		m.largest.Store(max(m.largest.Load(), int64(len(inner))))
	}
}

// A kernel at the other end of a veth pair sends TCP frames unsegmented, also to a receiver without segmentation.
func TestUncutWithoutSegmentation(t *testing.T) {
	a, b := nstest.New(t, "a"), nstest.New(t, "b")
	nstest.Pair(a, b, "under", 1500)
	underlay(a, "under", "192.0.2.1")
	linuxPeer(b, "under", "192.0.2.2", "192.0.2.1")
	b.IP("link", "set", "brt", "mtu", "1450")
	h := newHost(t, a, newLoops(t, 1), hostConfig{vni: 4711, local: "192.0.2.1", peers: []string{"192.0.2.2"}, whole: true,
		alone: true, tap: tap.Config{Offloads: true,
			Name: "tap0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	transfer(t, a, b, "10.0.0.2:7000", 8<<20)
	if n := h.vt.Status().Drops[vswitch.Truncated.String()]; n != 0 {
		t.Errorf("%d datagrams were too large", n)
	}
}
