package fastpath_test

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/fastpath"
	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// forger sends forged datagrams to the VTEP 192.0.2.2, and sees which of them reach the kernel of its host by tap0.
type forger struct {
	t     *testing.T
	raw   int
	seen  int
	marks map[string]bool // of frames that were seen
	port  uint16          // source port
}

func newForger(t *testing.T, to, from *nstest.NS) *forger {
	t.Helper()
	f := &forger{t: t, marks: map[string]bool{}}
	to.Do(func() {
		dev := must[*net.Interface](t)(net.InterfaceByName("tap0"))
		f.seen = must[int](t)(unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK, 0))
		if err := unix.Bind(f.seen, &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: dev.Index}); err != nil {
			t.Fatal(err)
		}
	})
	from.Do(func() { f.raw = must[int](t)(unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)) })
	t.Cleanup(func() {
		unix.Close(f.seen)
		unix.Close(f.raw)
	})
	return f
}

// look notes the marks of what has arrived.
func (f *forger) look() {
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(f.seen, buf, 0)
		if err != nil {
			return
		}
		if i := bytes.Index(buf[:n], []byte("forged by ")); i >= 0 {
			f.marks[string(buf[i+10])] = true
		}
	}
}

// send forges a TCP segment from 10.0.0.1 to 10.0.0.2 in a datagram from 192.0.2.from.
func (f *forger) send(mark byte, from byte, vni uint32, dst, src vswitch.MAC) {
	f.t.Helper()
	text := "forged by " + string(mark)
	p := append(append(append([]byte{}, dst[:]...), src[:]...), 8, 0)
	p = append(p, 0x45, 0, 0, byte(40+len(text)), 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2)
	sum := uint32(0)
	for i := 14; i < 34; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(p[i:]))
	}
	binary.BigEndian.PutUint16(p[24:], ^uint16(sum+sum>>16))
	p = append(p, 0, 7, 0, 7, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0)
	p = append(p, text...)
	d := []byte{0x45, 0, 0, byte(36 + len(p)), 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, from, 192, 0, 2, 2}
	d = append(d, byte(f.port>>8), byte(f.port), 4789>>8, 4789&0xff, 0, byte(16+len(p)), 0, 0, 8, 0, 0, 0,
		byte(vni>>16), byte(vni>>8), byte(vni), 0)
	if err := unix.Sendto(f.raw, append(d, p...), 0, &unix.SockaddrInet4{Addr: [4]byte{192, 0, 2, 2}}); err != nil {
		f.t.Fatal(err)
	}
}

// A host is upgraded from a version that sends from dynamic ports: before, its datagrams are accepted from any port, on
// the short path, too; then only from reserved ones, although entries existed that accepted all (TR-3).
func TestShortPathUpgrade(t *testing.T) {
	needShort(t)
	ns := sharedWire(t, "a", "b", "c")
	a, b := ns[0], ns[1]
	loops := newLoops(t, 2)
	config := func(i int) hostConfig {
		addrs := []string{"192.0.2.1", "192.0.2.2"}
		return hostConfig{local: addrs[i], peers: addrs[1-i : 2-i], tap: tap.Config{Offloads: true, Name: "tap0",
			Addrs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 24)}}}
	}
	var ha, hb *host
	unprivileged(t, func() { ha = newHost(t, a, loops[:1], config(0)) })
	hb = newHost(t, b, loops[1:], config(1))
	s := newStream(t, a, b, "10.0.0.2:7000")
	hb.carries(t, "before the upgrade")
	f := newForger(t, b, ns[2])
	f.port = 50000
	am, bm := ha.tap.MAC(), hb.tap.MAC()
	testutil.Eventually(t, "a datagram from any port arrives", func() bool {
		f.send('1', 1, vni, bm, am)
		f.look()
		return f.marks["1"]
	})

	ha.vt.Close()
	a.Do(func() {
		ha.vt = must[*vxlan.VTEP](t)(vxlan.New(vxlan.Config{Local: netip.MustParseAddr("192.0.2.1"), Loops: loops[:1],
			Pool: ha.pool, ShortPath: fastpath.Open}))
		if err := ha.vt.AddNetwork(ha.net, []netip.Addr{netip.MustParseAddr("192.0.2.2")}); err != nil {
			t.Fatal(err)
		}
	})
	testutil.Eventually(t, "the peer is known by its ports", func() bool { return hb.vt.Peers(vni)[0].ReservedPort })
	s.goesOn(t, "after the upgrade", 1<<20)
	hb.carries(t, "after the upgrade")
	testutil.Eventually(t, "datagrams from any port are refused", func() bool {
		before := hb.net.Status().Drops[vswitch.SourcePort.String()]
		f.send('2', 1, vni, bm, am)
		return hb.net.Status().Drops[vswitch.SourcePort.String()] > before
	})
	for range 20 { // of 2 some may have arrived while older entries existed
		before := hb.net.Status().Drops[vswitch.SourcePort.String()]
		testutil.Eventually(t, "another is refused", func() bool { // a full socket may lose some
			f.send('3', 1, vni, bm, am)
			return hb.net.Status().Drops[vswitch.SourcePort.String()] > before
		})
	}
	f.look()
	if f.marks["3"] {
		t.Error("a forged frame arrived")
	}
	s.goesOn(t, "at last", 1<<20)
}

// unprivileged runs f on a thread that may not bind reserved ports.
func unprivileged(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var now, less [2]unix.CapUserData
	if err := unix.Capget(&h, &now[0]); err != nil {
		t.Fatal(err)
	}
	less = now
	less[0].Effective &^= 1 << unix.CAP_NET_BIND_SERVICE
	if err := unix.Capset(&h, &less[0]); err != nil {
		t.Fatal(err)
	}
	f()
	if err := unix.Capset(&h, &now[0]); err != nil {
		t.Fatal(err)
	}
}
