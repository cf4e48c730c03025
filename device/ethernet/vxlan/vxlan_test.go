package vxlan

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// The fuzzing engine's own goroutines may end slightly after the run.
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}

const (
	localIP  = "192.0.2.1"
	remoteIP = "192.0.2.2"
)

// rig is a VTEP in one namespace, and in another a socket that acts as its peer, byte by byte.
type rig struct {
	t      testing.TB
	a, b   *nstest.NS
	loops  []*loop.Loop
	pool   *frame.Pool
	vt     *VTEP
	net    *vswitch.Network
	remote *net.UDPConn
	sink   *sink
	att    *vswitch.Attachment
}

// sink is a port of the network that keeps the frames it gets, on any loop.
type sink struct {
	frames chan string
}

func (s *sink) Deliver(_ *loop.Loop, b *frame.Buf, to vswitch.Destination) {
	select {
	case s.frames <- string(b.Bytes()):
	default:
	}
}

func newRig(t testing.TB, c Config, peers []string, opts ...NetworkOption) *rig {
	t.Helper()
	c.Segmentation = true
	return newRigAsIs(t, c, peers, opts...)
}

func newRigAsIs(t testing.TB, c Config, peers []string, opts ...NetworkOption) *rig {
	t.Helper()
	r := &rig{t: t, a: nstest.New(t, "a"), b: nstest.New(t, "b")}
	nstest.Pair(r.a, r.b, "under", 1500)
	r.a.Addr("under", localIP+"/24")
	r.b.Addr("under", remoteIP+"/24")
	r.b.Addr("under", "192.0.2.3/24")
	r.a.Addr("under", "2001:db8::1/64")
	r.b.Addr("under", "2001:db8::2/64")
	for i := range 2 {
		l, err := loop.New(loop.Config{ID: i})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		r.loops = append(r.loops, l)
	}
	var err error
	if r.pool, err = frame.NewPool(frame.Config{Count: 512, Big: 16}); err != nil {
		t.Fatal(err)
	}
	if r.net, err = vswitch.NewNetwork(vswitch.Config{VNI: 100, Name: "hundred"}); err != nil {
		t.Fatal(err)
	}
	r.sink = &sink{frames: make(chan string, 1000)}
	if r.att, err = r.net.Attach(r.sink, vswitch.PortConfig{Name: "sink", Kind: vswitch.KindTAP}); err != nil {
		t.Fatal(err)
	}
	if !c.Local.IsValid() {
		c.Local = netip.MustParseAddr(localIP)
	}
	c.Loops, c.Pool = r.loops, r.pool
	r.a.Do(func() {
		if r.vt, err = New(c); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() {
		r.vt.Close()
		r.vt.Close()
		if n := r.pool.InUse(); n != 0 {
			t.Errorf("%d buffers leaked", n)
		}
	})
	if err := r.vt.AddNetwork(r.net, addrs(peers), opts...); err != nil {
		t.Fatal(err)
	}
	r.remote = r.socket(remoteIP + ":4789")
	if c.Local.Is6() {
		r.remote = r.socket("[2001:db8::2]:4789")
	}
	return r
}

func addrs(s []string) (out []netip.Addr) {
	for _, a := range s {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

// socket makes a UDP socket in the peer's namespace.
func (r *rig) socket(addr string) (c *net.UDPConn) {
	r.t.Helper()
	r.b.Do(func() {
		var err error
		if c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr))); err != nil {
			r.t.Fatal(err)
		}
	})
	r.t.Cleanup(func() { c.Close() })
	return c
}

// send sends a datagram to the VTEP.
func (r *rig) send(from *net.UDPConn, p []byte) {
	r.t.Helper()
	if _, err := from.WriteToUDPAddrPort(p, netip.AddrPortFrom(r.vt.Local(), DefaultPort)); err != nil {
		r.t.Fatal(err)
	}
}

// inject sends frames from the sink's port, on a loop.
func (r *rig) inject(l *loop.Loop, frames ...[]byte) {
	r.t.Helper()
	l.Do(func() {
		for _, f := range frames {
			b := r.pool.Get()
			if b == nil || !b.Append(f) {
				r.t.Error("no buffer")
				return
			}
			r.att.Input(l, b, vswitch.Source{})
			b.Free()
		}
	})
}

// receive waits for a datagram at the peer.
func (r *rig) receive(c *net.UDPConn) ([]byte, netip.AddrPort) {
	r.t.Helper()
	p := make([]byte, 65536)
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		r.t.Fatal(err)
	}
	n, from, err := c.ReadFromUDPAddrPort(p)
	if err != nil {
		r.t.Fatal(err)
	}
	return p[:n], netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
}

func datagram(flags byte, vni uint32, inner []byte) []byte {
	p := []byte{flags, 0, 0, 0, byte(vni >> 16), byte(vni >> 8), byte(vni), 0}
	return append(p, inner...)
}

func macs(dst, src byte, f []byte) []byte {
	copy(f, []byte{2, 0, 0, 0, 0, dst, 2, 0, 0, 0, 0, src})
	return f
}

// Each check of the receive side, by its counter; a good frame after each shows that the loop still works.
func TestReceiveChecks(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	stranger := r.socket("192.0.2.3:4789")
	good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	global := func(why vswitch.Reason) uint64 { return r.vt.Counters.Dropped(why) }
	port := func(why vswitch.Reason) uint64 { return r.vt.Attachment(100).Counters.Dropped(why) }
	for i, c := range []struct {
		why   vswitch.Reason
		count func(vswitch.Reason) uint64
		from  *net.UDPConn
		p     []byte
	}{
		{vswitch.BadHeader, global, r.remote, nil},
		{vswitch.BadHeader, global, r.remote, datagram(8, 100, nil)[:7]},
		{vswitch.BadHeader, global, r.remote, datagram(0xf7, 100, good)},
		{vswitch.UnknownVNI, global, r.remote, datagram(8, 101, good)},
		{vswitch.UnknownPeer, port, stranger, datagram(8, 100, good)},
		{vswitch.ShortFrame, port, r.remote, datagram(8, 100, nil)},
		{vswitch.ShortFrame, port, r.remote, datagram(8, 100, good[:13])},
		{vswitch.TooBig, port, r.remote, datagram(8, 100, macs(1, 2, make([]byte, 1450+14+1)))},
		{vswitch.BadSource, port, r.remote, datagram(8, 100, make([]byte, 60))},
		{vswitch.Truncated, global, r.remote, datagram(8, 100, make([]byte, 20000))},
	} {
		before := c.count(c.why)
		r.send(c.from, c.p)
		testutil.Eventually(t, fmt.Sprintf("case %d is counted as %v", i, c.why),
			func() bool { return c.count(c.why) == before+1 })
		r.send(r.remote, datagram(8, 100, good))
		if f := <-r.sink.frames; f != string(good) {
			t.Errorf("case %d: got %x", i, f)
		}
	}
	e, ok := r.net.Lookup(vswitch.MAC{2, 0, 0, 0, 0, 2})
	if id, known := r.vt.Remote(100, netip.MustParseAddr(remoteIP)); !ok || !known || e.Remote != id || e.Kind != "vtep" {
		t.Errorf("learnt %+v, peer's number %d", e, id)
	}
}

// With learning, an unknown host becomes a peer, within the limit, and gets flooded frames from then on.
func TestLearnPeers(t *testing.T) {
	r := newRig(t, Config{}, nil, MaxPeers(1))
	if err := r.vt.SetLearnPeers(100, true); err != nil {
		t.Fatal(err)
	}
	stranger := r.socket("192.0.2.3:4789")
	good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	r.inject(r.loops[0], macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)))
	if r.vt.Attachment(100).Counters.Dropped(vswitch.NoPeers) != 1 {
		t.Error("flood without peers was not counted")
	}
	r.send(r.remote, datagram(8, 100, good))
	<-r.sink.frames
	r.send(stranger, datagram(8, 100, good))
	testutil.Eventually(t, "second unknown host is refused",
		func() bool { return r.vt.Attachment(100).Counters.Dropped(vswitch.UnknownPeer) == 1 })
	st := r.vt.Status()
	if len(st.Networks) != 1 || len(st.Networks[0].Peers) != 1 || !st.Networks[0].Peers[0].Learnt ||
		st.Networks[0].Peers[0].Addr.String() != remoteIP {
		t.Errorf("%+v", st.Networks)
	}
	r.inject(r.loops[0], macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)))
	p, from := r.receive(r.remote)
	want := datagram(8, 100, macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)))
	if string(p) != string(want) || from.Addr() != r.vt.Local() {
		t.Errorf("%x from %v", p, from)
	}
	// A learnt peer that becomes a configured one keeps its number; one that is removed is no longer known.
	if err := r.vt.SetPeers(100, addrs([]string{remoteIP})); err != nil {
		t.Fatal(err)
	}
	if st := r.vt.Status(); st.Networks[0].Peers[0].Learnt || st.Networks[0].Peers[0].Remote != 1 {
		t.Errorf("%+v", st.Networks[0].Peers)
	}
}

// Source ports: stable for a flow, several for many flows, all below 1024; each loop has its own.
func TestSourcePorts(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	first := map[uint16]uint16{}
	seen := map[uint16]bool{}
	for range 3 {
		for flow := range uint16(40) {
			r.inject(r.loops[0], macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 0xc000+flow, header.PortRoCE)))
			_, from := r.receive(r.remote)
			if from.Port() >= reservedPorts {
				t.Errorf("source port %d", from.Port())
			}
			if p, ok := first[flow]; ok && p != from.Port() {
				t.Errorf("flow %d was sent from port %d, then %d", flow, p, from.Port())
			}
			first[flow] = from.Port()
			seen[from.Port()] = true
		}
	}
	if len(seen) < DefaultSourcePorts/2 {
		t.Errorf("40 flows used %d source ports", len(seen))
	}
}

// Both loops' sockets get a share of the flows.
func TestReusePort(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	for i := range 64 {
		r.send(r.socket(fmt.Sprintf("%s:%d", remoteIP, 20000+i)), datagram(8, 100, good))
		<-r.sink.frames
	}
	if n := r.vt.Counters.Totals().InFrames; n != 64 {
		t.Errorf("%d of 64 datagrams counted", n)
	}
	one := 0
	for _, rx := range r.vt.rx {
		rx.l.Do(func() {
			if rx.lastIP.IsValid() {
				one++
			}
		})
	}
	if one != 2 {
		t.Errorf("%d of 2 loops received", one)
	}
}

// A batch with frames larger than the underlay's MTU: these are counted, the others arrive in order, nothing is
// fragmented.
func TestUnderlayTooBig(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		c, peer := Config{}, remoteIP
		if v6 {
			c.Local, peer = netip.MustParseAddr("2001:db8::1"), "2001:db8::2"
		}
		r := newRig(t, c, []string{peer})
		if want := map[bool]int{false: 1450, true: 1430}[v6]; r.net.MTU() != want || r.vt.MTU() != want {
			t.Errorf("MTU %d, %d; want %d", r.net.MTU(), r.vt.MTU(), want)
		}
		r.vt.stopWatch() // otherwise the network would follow
		r.vt.stopWatch = nil
		r.a.IP("link", "set", "under", "mtu", "1400")
		small, big := macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)),
			macs(9, 1, append(ip4(0, 1, 2, header.ProtoUDP, 7, 8), make([]byte, 1380)...))
		var frames [][]byte
		for i := range 20 {
			f := small
			if i%3 == 1 {
				f = big
			}
			f = append([]byte(nil), f...)
			f[len(f)-1] = byte(i)
			frames = append(frames, f)
		}
		r.inject(r.loops[0], frames...)
		want := uint64(0)
		for i, f := range frames {
			if i%3 == 1 {
				want++
				continue
			}
			p, _ := r.receive(r.remote)
			if string(p[HeaderLen:]) != string(f) {
				t.Fatalf("v6 %v frame %d: got %x", v6, i, p)
			}
		}
		// The last large one is counted after the last small one has arrived.
		testutil.Eventually(t, fmt.Sprint("counted as too big: ", want), func() bool {
			return r.vt.Attachment(100).Counters.Dropped(vswitch.UnderlayTooBig) == want
		})
		if err := r.vt.RefreshMTU(); err != nil || r.net.MTU() != map[bool]int{false: 1350, true: 1330}[v6] {
			t.Error(err, r.net.MTU())
		}
	}
}

// A full socket never blocks the loop: datagrams that do not fit are dropped and counted, and all references are
// dropped. The peer does not answer ARP, so its datagrams stay charged to the socket.
func TestQueueFull(t *testing.T) {
	r := newRig(t, Config{SourcePorts: 1}, []string{"192.0.2.99"})
	if err := unix.SetsockoptInt(r.vt.tx[0].socks[0].fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1); err != nil { // the minimum
		t.Fatal(err)
	}
	var frames [][]byte
	for range 200 {
		frames = append(frames, macs(9, 1, append(ip4(0, 1, 2, header.ProtoUDP, 7, 8), make([]byte, 1000)...)))
	}
	start := time.Now()
	r.inject(r.loops[0], frames...)
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
	r.loops[0].Do(func() {})
	if n := r.vt.Attachment(100).Counters.Dropped(vswitch.QueueFull); n == 0 || n >= 200 {
		t.Errorf("%d of 200 counted as queue full", n)
	}
}

func TestUnreachable(t *testing.T) {
	r := newRig(t, Config{}, []string{"198.51.100.1"})
	r.inject(r.loops[1], macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)))
	// It is sent at the end of the loop's iteration, in which another Do may still run.
	testutil.Eventually(t, "one is counted as unreachable", func() bool {
		return r.vt.Attachment(100).Counters.Dropped(vswitch.Unreachable) == 1
	})
}

// With an empty pool datagrams leave the socket and are counted, and the loop neither spins nor stops.
func TestReceiveWithoutBuffers(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	var held []*frame.Buf
	for b := r.pool.Get(); b != nil; b = r.pool.Get() {
		held = append(held, b)
	}
	for range 5 {
		r.send(r.remote, datagram(8, 100, good))
	}
	testutil.Eventually(t, "five drops are counted", func() bool { return r.vt.Counters.Dropped(vswitch.NoBuffer) == 5 })
	for _, b := range held {
		b.Free()
	}
	r.send(r.remote, datagram(8, 100, good))
	if f := <-r.sink.frames; f != string(good) {
		t.Errorf("%x arrived", f)
	}
}

// The outer header on the wire: DF, DSCP and ECN, checksum.
func TestOuterHeader(t *testing.T) {
	for _, c := range []struct {
		v6, zero bool
		frame    []byte
		tos      uint8
	}{
		{false, false, ip4(0, 1, 2, header.ProtoUDP, 50000, header.PortRoCE), 26 << 2},
		{false, false, ip4(0xff, 1, 2, header.ProtoUDP, 50000, header.PortRoCE), 26<<2 | 3},
		{false, false, ip4(0xfe, 1, 2, header.ProtoTCP, 50000, 80), 2},
		{true, false, ip6(1, 1, 2, header.ProtoUDP, 50000, header.PortRoCE), 26<<2 | 1},
		{true, true, ip6(0, 1, 2, header.ProtoTCP, 50000, 80), 0},
	} {
		cfg, peer, etherType := Config{ZeroChecksum6: c.zero}, remoteIP, uint16(header.TypeIPv4)
		if c.v6 {
			cfg.Local, peer, etherType = netip.MustParseAddr("2001:db8::1"), "2001:db8::2", header.TypeIPv6
		}
		r := newRig(t, cfg, []string{peer})
		fd := r.capture(etherType)
		r.inject(r.loops[0], macs(9, 1, c.frame))
		f := make([]byte, 2048)
		for {
			n, err := unix.Read(fd, f)
			if err != nil {
				t.Fatalf("no datagram on the wire: %v", err)
			}
			if flowOf(f[:n]).hash == 0 || n < 14+8 {
				continue
			}
			p := f[14:n]
			udp := p[20:]
			if c.v6 {
				udp = p[40:]
			}
			if p[9] != header.ProtoUDP && !c.v6 || c.v6 && p[6] != header.ProtoUDP ||
				binary.BigEndian.Uint16(udp[2:]) != DefaultPort {
				continue
			}
			if got := flowOf(f[:n]).tos; got != c.tos {
				t.Errorf("%+v: traffic class %#x", c, got)
			}
			if !c.v6 && p[6]&0x40 == 0 {
				t.Errorf("%+v: no DF", c)
			}
			if zero := udp[6] == 0 && udp[7] == 0; zero != (!c.v6 || c.zero) {
				t.Errorf("%+v: checksum %x", c, udp[6:8])
			}
			break
		}
	}
}

// capture opens a packet socket on the peer's end of the underlay.
func (r *rig) capture(etherType uint16) (fd int) {
	r.t.Helper()
	r.b.Do(func() {
		proto := int(etherType<<8 | etherType>>8) // network byte order
		var err error
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto); err != nil {
			r.t.Fatal(err)
		}
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
			r.t.Fatal(err)
		}
	})
	r.t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func TestConfigErrors(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	r.a.Do(func() {
		ok := Config{Local: netip.MustParseAddr("2001:db8::1"), Loops: r.loops, Pool: r.pool}
		for _, c := range []struct {
			change func(*Config)
			say    string
		}{
			{func(c *Config) { c.Local = netip.Addr{} }, "local address"},
			{func(c *Config) { c.Local = netip.MustParseAddr("0.0.0.0") }, "local address"},
			{func(c *Config) { c.Local = netip.MustParseAddr("224.0.0.1") }, "local address"},
			{func(c *Config) { c.Local = netip.MustParseAddr("203.0.113.1") }, "not an address of this host"},
			{func(c *Config) { c.Local = netip.MustParseAddr(localIP) }, "in use"},
			{func(c *Config) { c.Loops = nil }, "loops"},
			{func(c *Config) { c.Loops = []*loop.Loop{r.loops[0], r.loops[0]} }, "ID 0"},
			{func(c *Config) { c.Pool = nil }, "pool"},
			{func(c *Config) { c.DSCP = 64 }, "DSCP 64"},
			{func(c *Config) { c.DSCP = -2 }, "DSCP -2"},
			{func(c *Config) { c.SourcePorts = 65 }, "65 source ports"},
		} {
			bad := ok
			c.change(&bad)
			vt, err := New(bad)
			if err == nil {
				vt.Close()
				t.Errorf("New accepted it; want an error with %q", c.say)
			} else if !strings.Contains(err.Error(), c.say) {
				t.Errorf("%q does not contain %q", err, c.say)
			}
		}
		// A kernel vxlan device on the same port.
		r.a.IP("link", "add", "vx", "type", "vxlan", "id", "5", "dstport", "4790", "local", localIP)
		r.a.IP("link", "set", "vx", "up")
		bad := ok
		bad.Local, bad.Port = netip.MustParseAddr(localIP), 4790
		if vt, err := New(bad); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("port of a kernel vxlan device: %v %v", vt, err)
		}
	})
	other, err := vswitch.NewNetwork(vswitch.Config{VNI: 200, MTU: 1500})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.vt.AddNetwork(other, nil); !errors.Is(err, ErrMTU) {
		t.Errorf("network of MTU 1500: %v", err)
	}
	if err := r.vt.AddNetwork(r.net, nil); !errors.Is(err, ErrDuplicateVNI) {
		t.Errorf("same VNI: %v", err)
	}
	if err := r.vt.RemoveNetwork(5); !errors.Is(err, ErrUnknownVNI) {
		t.Errorf("unknown VNI: %v", err)
	}
	for _, p := range []string{"2001:db8::2", "0.0.0.0", "224.0.0.1", localIP} {
		if err := r.vt.SetPeers(100, addrs([]string{p})); err == nil {
			t.Errorf("peer %s was accepted", p)
		}
	}
	if err := r.vt.SetPeers(100, addrs([]string{"2001:db8::2"})); !errors.Is(err, ErrPeerFamily) {
		t.Errorf("peer of the other family: %v", err)
	}
	if _, ok := r.vt.Remote(100, netip.MustParseAddr(remoteIP)); !ok {
		t.Error("a refused SetPeers changed the peers")
	}
}

// Peers and networks are added and removed under traffic: frames of removed ones stop, their table entries vanish,
// numbers are reused, nothing leaks.
func TestPeerChurn(t *testing.T) {
	fds := 0
	t.Cleanup(func() {
		if n := nstest.OpenFDs(t); n > fds {
			t.Errorf("%d descriptors before, %d after", fds, n)
		}
	})
	fds = nstest.OpenFDs(t)
	r := newRig(t, Config{}, []string{remoteIP})
	good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	r.send(r.remote, datagram(8, 100, good))
	<-r.sink.frames
	if err := r.vt.SetPeers(100, addrs([]string{"192.0.2.3"})); err != nil {
		t.Fatal(err)
	}
	if _, ok := r.net.Lookup(vswitch.MAC{2, 0, 0, 0, 0, 2}); ok {
		t.Error("an address behind a removed peer is still in the table")
	}
	if id, ok := r.vt.Remote(100, netip.MustParseAddr("192.0.2.3")); !ok || id != 2 {
		t.Errorf("number %d %v", id, ok)
	}
	if err := r.vt.SetPeers(100, addrs([]string{remoteIP, "192.0.2.3"})); err != nil {
		t.Fatal(err)
	}
	if id, _ := r.vt.Remote(100, netip.MustParseAddr(remoteIP)); id != 1 {
		t.Errorf("the free number was not reused: %d", id)
	}
	for range 20 {
		if err := r.vt.RemoveNetwork(100); err != nil {
			t.Fatal(err)
		}
		r.send(r.remote, datagram(8, 100, good))
		if err := r.vt.AddNetwork(r.net, addrs([]string{remoteIP})); err != nil {
			t.Fatal(err)
		}
	}
	testutil.Eventually(t, "frames arrive again", func() bool {
		r.send(r.remote, datagram(8, 100, good))
		select {
		case <-r.sink.frames:
			return true
		case <-time.After(10 * time.Millisecond):
			return false
		}
	})
}

func BenchmarkEncapsulate(b *testing.B) {
	r := newRig(b, Config{}, []string{remoteIP})
	buf := r.pool.Get()
	defer buf.Free()
	buf.Append(macs(9, 1, append(ip4(0, 1, 2, header.ProtoUDP, 50000, header.PortRoCE), make([]byte, 1000)...)))
	l, s := r.loops[0], r.vt.tx[0]
	port := (*r.vt.nets.Load())[100]
	b.Run("batch without the kernel", func(b *testing.B) {
		b.ReportAllocs()
		l.Do(func() {
			for b.Loop() {
				port.Deliver(l, buf, vswitch.Destination{Remote: 1})
				if k := s.dirty[0]; k.n == txBatch-1 {
					for i := range k.n {
						k.bufs[i].Free()
					}
					k.n = 0
					s.dirty = s.dirty[:0]
				}
			}
			s.flush()
		})
	})
	b.Run("sendmmsg over veth", func(b *testing.B) {
		b.ReportAllocs()
		l.Do(func() {
			for b.Loop() {
				port.Deliver(l, buf, vswitch.Destination{Remote: 1})
			}
			s.flush()
		})
	})
}
