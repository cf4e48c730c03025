package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/guestdrv"
)

// twoHosts are two hosts with a daemon each, and a router between them, where an attacker reads and sends everything.
type twoHosts struct {
	t      *testing.T
	v6     bool
	router *nstest.NS
	ns     [2]*nstest.NS
	dir    [2]string
	d      [2]*Daemon
	keys   [2]wgtypes.Key
	psk    wgtypes.Key
	log    [2]bytes.Buffer
}

// Addresses of the hosts' interfaces, the router's, and the VTEPs. The hosts' interfaces are u0 and u1.
func (h *twoHosts) addrs() (phys, via, vtep [2]string, bits, host string) {
	if h.v6 {
		return [2]string{"fd00:1::1", "fd00:2::1"}, [2]string{"fd00:1::fe", "fd00:2::fe"},
			[2]string{"fd00:9::1", "fd00:9::2"}, "/64", "/128"
	}
	return [2]string{"198.51.100.1", "198.51.101.1"}, [2]string{"198.51.100.254", "198.51.101.254"},
		[2]string{"10.9.0.1", "10.9.0.2"}, "/24", "/32"
}

func newTwoHosts(t *testing.T, v6 bool) *twoHosts {
	h := &twoHosts{t: t, v6: v6, router: nstest.New(t, "router"), psk: newKey(t)}
	phys, via, _, bits, _ := h.addrs()
	for i := range h.ns {
		dev := fmt.Sprint("u", i)
		h.ns[i], h.dir[i], h.keys[i] = nstest.New(t, dev), t.TempDir(), newKey(t)
		nstest.Pair(h.ns[i], h.router, dev, 1500)
		h.ns[i].Addr(dev, phys[i]+bits)
		h.router.Addr(dev, via[i]+bits)
		h.ns[i].IP("route", "add", "default", "via", via[i])
		for _, k := range []string{"all", dev} {
			// The strict filter would refuse some forgeries by itself.
			h.ns[i].MustExec("sysctl", "-qw", "net.ipv4.conf."+k+".rp_filter=0")
		}
	}
	h.router.MustExec("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	return h
}

func newKey(t *testing.T) wgtypes.Key {
	t.Helper()
	k, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func (h *twoHosts) file(i int, name, text string) string {
	h.t.Helper()
	path := filepath.Join(h.dir[i], name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
	return path
}

// configure writes the configuration of host i.
func (h *twoHosts) configure(i int, protect bool) (path string) {
	phys, _, vtep, _, _ := h.addrs()
	text := ""
	if protect {
		text = fmt.Sprintf(`
underlay:
  protect: wireguard
  private-key-file: %s
  peers:
    - {vtep: "%s", endpoint: "%s", public-key: "%s", preshared-key-file: %s}
`, h.file(i, "key", h.keys[i].String()+"\n"), vtep[1-i], net.JoinHostPort(phys[1-i], "51820"), h.keys[1-i].PublicKey(),
			h.file(i, "psk", h.psk.String()))
	} else {
		vtep = phys
	}
	return h.file(i, "vnicd.yaml", fmt.Sprintf(`
run-dir: %s
vtep: {local: "%s"}
networks: [{name: n, vni: 7, peers: ["%s"]}]
applications:
  - {name: app, network: n, mac: "02:00:00:00:00:0%d", ips: [10.0.0.%d]}
%s`, h.dir[i], vtep[i], vtep[1-i], i+1, i+1, text))
}

// start starts the daemons; stop ends them.
func (h *twoHosts) start(protect bool) {
	h.t.Helper()
	for i := range h.d {
		cfg, err := config.Load(h.configure(i, protect))
		if err != nil {
			h.t.Fatal(err)
		}
		h.ns[i].Do(func() {
			h.d[i], err = Start(cfg, "v0.0.0", hclog.New(&hclog.LoggerOptions{Output: &h.log[i], Mutex: &sync.Mutex{}}))
		})
		if err != nil {
			h.t.Fatal(err)
		}
		d := h.d[i]
		h.t.Cleanup(func() { _ = d.Close() })
	}
}

func (h *twoHosts) stop() {
	for i := range h.d {
		_ = h.d[i].Close()
	}
}

// programs are two programs with connected queue pairs, and a region of 1 MiB each.
type programs struct {
	t    *testing.T
	ctx  context.Context
	ends [2]*client
	big  [2]*guestdrv.Buffer
	mrs  [2]*guestdrv.MR
	next byte
}

func (h *twoHosts) programs(ctx context.Context) *programs {
	h.t.Helper()
	p := &programs{t: h.t, ctx: ctx}
	for i, d := range h.d {
		testutil.Eventually(h.t, "the program before has gone", func() bool {
			s := d.application(h.t, "app")
			return !s.HCA.Connected && s.Memory.Resident == 0
		})
		c := open(h.t, d, "app", fmt.Sprintf("10.0.0.%d", i+1))
		var err error
		if p.big[i], err = c.Alloc(1 << 20); err == nil {
			p.mrs[i], err = c.pd.Register(ctx, p.big[i], guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
		}
		if err != nil {
			h.t.Fatal(err)
		}
		p.ends[i] = c
	}
	if err := errors.Join(p.ends[0].to(ctx, p.ends[1]), p.ends[1].to(ctx, p.ends[0])); err != nil {
		h.t.Fatal(err)
	}
	return p
}

func (p *programs) close() {
	for _, c := range p.ends {
		_ = c.Close()
	}
}

// write writes 1 MiB from one program into the other's memory, and returns how it completed.
func (p *programs) write(from int) guestdrv.WCStatus {
	p.t.Helper()
	c := p.ends[from]
	if err := c.qp.PostSend(guestdrv.NewWrite(7, p.mrs[1-from].Remote(0), p.mrs[from].SGE(0, p.big[from].Len())).
		With(guestdrv.SendSignaled)); err != nil {
		p.t.Fatal(err)
	}
	wcs := make([]guestdrv.Completion, 1)
	if n, err := c.cq.PollWait(p.ctx, wcs); n != 1 || err != nil {
		p.t.Fatalf("%d completions, %v", n, err)
	}
	return wcs[0].Status
}

// pattern is in all data that the programs exchange.
const pattern = "TENANT'S SECRET "

// exchange has both programs write different data, and compares it.
func (p *programs) exchange(what string) {
	p.t.Helper()
	for from := range 2 {
		p.next++
		src, dst := p.big[from].Bytes(), p.big[1-from].Bytes()
		for i := range src {
			src[i] = pattern[i%len(pattern)]
			if i%len(pattern) == len(pattern)-1 {
				src[i] = byte(i/4096) + p.next
			}
		}
		if s := p.write(from); s != guestdrv.WCSuccess {
			p.t.Fatalf("%s: WRITE from %d: %v", what, from, s)
		}
		if !bytes.Equal(src, dst) {
			p.t.Fatalf("%s: the data that has arrived differs", what)
		}
	}
}

// rate measures WRITEs, for print only.
func (p *programs) rate() float64 {
	p.t.Helper()
	const n = 8
	start := time.Now()
	for range n {
		if s := p.write(0); s != guestdrv.WCSuccess {
			p.t.Fatalf("WRITE: %v", s)
		}
	}
	return n / time.Since(start).Seconds()
}

// tapper reads all frames that pass the router on the side of a host.
type tapper struct {
	fd, index int
	done      chan struct{}

	frames, encrypted, capable, cleartext, leaked atomic.Int64

	mu   sync.Mutex
	keep [][]byte // WireGuard's data packets to the host
}

// tap starts to read on interface u0 or u1 of the router.
func (h *twoHosts) tap(i int) *tapper {
	h.t.Helper()
	x := &tapper{done: make(chan struct{})}
	phys, _, _, _, _ := h.addrs()
	host := netip.MustParseAddr(phys[i])
	h.router.Do(func() {
		dev, err := net.InterfaceByName(fmt.Sprint("u", i))
		const all = 3 << 8 // ETH_P_ALL in network byte order
		if err == nil {
			x.index = dev.Index
			x.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
		}
		if err == nil {
			err = errors.Join(unix.Bind(x.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: x.index}),
				unix.SetsockoptInt(x.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
				unix.SetsockoptTimeval(x.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100000}))
		}
		if err != nil {
			h.t.Fatal(err)
		}
	})
	stop := make(chan struct{})
	go func() {
		defer close(x.done)
		b := make([]byte, 1<<16)
		for {
			n, err := unix.Read(x.fd, b)
			if n > 0 {
				x.look(b[:n], host)
			}
			select {
			case <-stop:
				return
			default:
			}
			if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
				return
			}
		}
	}()
	h.t.Cleanup(func() {
		close(stop)
		<-x.done
		unix.Close(x.fd)
	})
	return x
}

func (x *tapper) look(f []byte, host netip.Addr) {
	x.frames.Add(1)
	if bytes.Contains(f, []byte(pattern)) {
		x.leaked.Add(1)
	}
	tos, dst, udp, ok := outer(f)
	if !ok {
		return
	}
	switch binary.BigEndian.Uint16(f[udp+2:]) {
	case 4789:
		x.cleartext.Add(1)
	case 51820:
		x.encrypted.Add(1)
		if tos&3 != 0 { // RFC 3168: ECT or CE
			x.capable.Add(1)
		}
		if dst == host && len(f) > udp+1000 && f[udp+8] == 4 { // transport data
			x.mu.Lock()
			if len(x.keep) < 200 {
				x.keep = append(x.keep, bytes.Clone(f))
			}
			x.mu.Unlock()
		}
	}
}

// outer finds the UDP header of a frame.
func outer(f []byte) (tos byte, dst netip.Addr, udp int, ok bool) {
	if len(f) < 14+40+8 {
		return 0, dst, 0, false
	}
	switch ip := f[14:]; binary.BigEndian.Uint16(f[12:]) {
	case 0x0800:
		return ip[1], netip.AddrFrom4([4]byte(ip[16:20])), 14 + int(ip[0]&15)*4, ip[9] == unix.IPPROTO_UDP
	case 0x86dd:
		return ip[0]<<4 | ip[1]>>4, netip.AddrFrom16([16]byte(ip[24:40])), 14 + 40, ip[6] == unix.IPPROTO_UDP
	}
	return 0, dst, 0, false
}

// inject sends a frame on the interface.
func (x *tapper) inject(t *testing.T, f []byte) {
	t.Helper()
	to := &unix.SockaddrLinklayer{Ifindex: x.index, Halen: 6}
	copy(to.Addr[:], f[:6])
	if err := unix.Sendto(x.fd, f, 0, to); err != nil {
		t.Fatal(err)
	}
}

// forge returns a WRITE of 64 bytes 0xee into the memory of program 1 that its queue pair would accept next: the
// attacker knows all numbers.
func (p *programs) forge(offset int) []byte {
	p.t.Helper()
	attr, err := p.ends[0].qp.Query(p.ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	x := cmtest.Packet{VNI: 7, Path: wire.Path{SMAC: header.MAC(p.ends[0].MAC()), DMAC: header.MAC(p.ends[1].MAC()),
		VLAN: header.NoVLAN, SrcIP: p.ends[0].gid, DstIP: p.ends[1].gid, SrcPort: 0xc001}}
	x.Write(p.ends[1].qp.Number(), attr.SQPSN, p.mrs[1].RKey(), p.big[1].Addr()+uint64(offset),
		bytes.Repeat([]byte{0xee}, 64))
	b, err := x.Bytes()
	if err != nil {
		p.t.Fatal(err)
	}
	return b
}

// forged reports whether such a WRITE has reached the memory.
func (p *programs) forged() bool {
	return bytes.Contains(p.big[1].Bytes(), bytes.Repeat([]byte{0xee}, 64))
}

// send sends a datagram to the VTEP of host 1 from an address and a reserved port in a namespace.
func (h *twoHosts) send(ns *nstest.NS, from string, payload []byte) {
	h.t.Helper()
	_, _, vtep, _, _ := h.addrs()
	ns.Do(func() {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(from), Port: 500},
			&net.UDPAddr{IP: net.ParseIP(vtep[1]), Port: 4789})
		if err == nil {
			_, err = c.Write(payload)
			_ = c.Close()
		}
		if err != nil {
			h.t.Fatal(err)
		}
	})
}

// TestProtectedHosts: two daemons whose underlay WireGuard protects (TR-4). On the path nothing is readable; whatever
// somebody sends there is refused and counted; and without its interface a host sends nothing. It needs a kernel with
// WireGuard.
func TestProtectedHosts(t *testing.T) {
	probe := nstest.New(t, "probe")
	if out, err := probe.Exec("ip", "link", "add", "wg0", "type", "wireguard"); err != nil {
		t.Skipf("this kernel has no WireGuard (TestProtectedUnderlay of package integration runs this in a VM): %s", out)
	}
	for _, v6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("v6=%t", v6), func(t *testing.T) { testProtectedHosts(t, v6) })
	}
}

func testProtectedHosts(t *testing.T, v6 bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	h := newTwoHosts(t, v6)
	phys, _, vtep, _, host := h.addrs()

	// An earlier vnicd had WireGuard, and was killed; its rule comes before the host's routes.
	family := map[bool]string{true: "-6", false: "-4"}[v6]
	h.ns[0].MustExec("sh", "-c", fmt.Sprintf("ip link add left type wireguard && ip link set left alias 'vnicd %s 999 %s' "+
		"&& ip %s rule add iif lo lookup 478900999 priority 4789", net.JoinHostPort(vtep[0], "4789"), h.dir[0], family))
	h.start(false)
	if out := h.ns[0].IP("link") + h.ns[0].IP(family, "rule"); strings.Contains(out, "left") ||
		strings.Contains(out, "478900999") {
		t.Errorf("left behind: %s", out)
	}
	p := h.programs(ctx)
	p.exchange("without protection")
	plain := p.rate()
	p.close()
	h.stop()

	h.start(true)
	t.Cleanup(func() {
		if t.Failed() {
			for i := range h.d {
				t.Logf("host %d: %+v\n%+v\n%s", i, h.d[i].Status().Protection, h.d[i].Status().VTEP, h.log[i].String())
			}
		}
	})
	p = h.programs(ctx)
	p.exchange("with protection")
	t.Logf("WRITEs of 1 MiB, MiB/s: %.1f in cleartext, %.1f protected by WireGuard", plain, p.rate())
	sides := [2]*tapper{h.tap(0), h.tap(1)} // not before, because it slows the wire down
	p.exchange("while somebody reads")
	h.mixed()
	for i, d := range h.d {
		s := d.Status()
		if x := s.Protection; x.Problem != "" || len(x.Peers) != 1 || x.Peers[0].Handshake.IsZero() ||
			x.Peers[0].OutBytes == 0 || x.Peers[0].InBytes == 0 {
			t.Errorf("host %d: %+v", i, x)
		}
		want := 1500 - 60
		if v6 {
			want = 1500 - 80
		}
		if s.Protection.MTU != want || s.VTEP.Device != "vnicd-wg0" {
			t.Errorf("host %d: MTU %d, want %d, tunnels through %s", i, s.Protection.MTU, want, s.VTEP.Device)
		}
	}
	for i, x := range sides {
		t.Logf("side %d: %d frames, %d encrypted, %d of them ECN-capable", i, x.frames.Load(), x.encrypted.Load(),
			x.capable.Load())
		if x.encrypted.Load() < 100 || x.capable.Load() < 100 || x.cleartext.Load() != 0 || x.leaked.Load() != 0 {
			t.Errorf("side %d: %d datagrams of tunnels, %d frames with the programs' data", i, x.cleartext.Load(), x.leaked.Load())
		}
	}

	// A WRITE in cleartext from somebody on the path who knows all numbers.
	h.router.Addr("lo", vtep[0]+host)
	h.router.IP("route", "add", vtep[1]+host, "via", phys[1], "src", vtep[0])
	unprotected := func() uint64 { return h.d[1].Status().VTEP.Drops["unprotected"] }
	const forgeries = 20
	for range forgeries {
		h.send(h.router, vtep[0], p.forge(0))
	}
	testutil.Eventually(t, "WRITEs in cleartext are counted", func() bool { return unprotected() == forgeries })
	if p.forged() {
		t.Fatal("a WRITE in cleartext has reached the memory")
	}
	p.exchange("after forgeries in cleartext")

	// Encrypted packets, changed or repeated.
	sides[1].mu.Lock()
	recorded := sides[1].keep
	sides[1].mu.Unlock()
	if len(recorded) < 100 {
		t.Fatalf("%d packets recorded", len(recorded))
	}
	before, sentBefore := h.d[1].Status(), h.d[0].Status().VTEP.OutFrames
	for _, f := range recorded {
		_, _, udp, _ := outer(f)
		for _, at := range []int{0, len(f) - 1, udp + 8 + 16, udp + 8 + 8} { // nothing, tag, content, counter
			changed := bytes.Clone(f)
			if at != 0 {
				changed[at] ^= 1
			}
			fixChecksum(changed, udp)
			sides[1].inject(t, changed)
		}
	}
	p.exchange("after changed packets")
	after := h.d[1].Status()
	t.Logf("%d packets repeated or changed; in_errors %d before, %d after", 4*len(recorded), before.Protection.InErrors,
		after.Protection.InErrors)
	const underway = 50 // acknowledgements, when the first counters were read
	in, sent := after.VTEP.InFrames-before.VTEP.InFrames, h.d[0].Status().VTEP.OutFrames-sentBefore
	if in > sent+underway {
		t.Errorf("%d datagrams accepted, %d sent by the other host", in, sent)
	}

	// The holder of a key acts as another host.
	alias := strings.TrimSuffix(vtep[0], "1") + "77"
	h.ns[0].Addr("vnicd-wg0", alias+host)
	errs := h.d[1].Status().Protection.InErrors
	h.send(h.ns[0], alias, p.forge(0))
	testutil.Eventually(t, "a packet with another host's address is counted",
		func() bool { return h.d[1].Status().Protection.InErrors > errs })

	// A host that forwards packets does not encrypt those of others.
	h.router.IP("route", "del", vtep[1]+host)
	h.router.IP("route", "add", vtep[1]+host, "via", phys[0], "src", vtep[0])
	h.ns[0].MustExec("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	for range forgeries {
		h.send(h.router, vtep[0], p.forge(0))
	}
	p.exchange("after forgeries to be forwarded")
	if p.forged() {
		t.Fatal("a WRITE that host 0 has forwarded has reached the memory")
	}

	h.rotate(p)

	// Nothing else was wrong with these WRITEs: root of host 0 can send one, and it would forward one over IPv6, where the
	// kernel does not mind that it comes from an address of its own, if everybody could use its routes.
	if v6 {
		h.ns[0].IP("route", "add", vtep[1]+host, "dev", "vnicd-wg0")
		h.send(h.router, vtep[0], p.forge(0))
	} else {
		h.send(h.ns[0], vtep[0], p.forge(0))
	}
	testutil.Eventually(t, "the WRITE through WireGuard arrives", p.forged)
	p.close()

	// Without its interface, host 0 sends nothing, even if another interface has its address and a route.
	p = h.programs(ctx)
	p.exchange("before the interface goes")
	clear, leaked := sides[0].cleartext.Load(), sides[0].leaked.Load()
	h.ns[0].IP("link", "del", "vnicd-wg0")
	h.ns[0].Addr("u0", vtep[0]+host)
	if s := p.write(0); s != guestdrv.WCRetryExcErr {
		t.Errorf("a WRITE without the interface: %v", s)
	}
	s := h.d[0].Status()
	if s.Protection.Problem == "" || s.Networks[0].Drops["unreachable"] == 0 {
		t.Errorf("without its interface: %+v, drops %v", s.Protection, s.Networks[0].Drops)
	}
	if x := sides[0]; x.cleartext.Load() != clear || x.leaked.Load() != leaked {
		t.Errorf("%d datagrams of tunnels, %d frames with the programs' data", x.cleartext.Load()-clear, x.leaked.Load()-leaked)
	}
	p.close()
	h.stop()
	for i, ns := range h.ns {
		if out, err := ns.Exec("ip", "link", "show", "vnicd-wg0"); err == nil {
			t.Errorf("host %d: left behind: %s", i, out)
		}
		if out := ns.IP("rule"); strings.Contains(out, "478951820") {
			t.Errorf("host %d: left behind: %s", i, out)
		}
	}
}

// mixed has host 0 send datagrams of two networks in one message. WireGuard encrypts each by itself, and the receiving
// kernel may coalesce them again, as those of two tenants with one source port; none is refused for that.
func (h *twoHosts) mixed() {
	h.t.Helper()
	_, _, vtep, _, _ := h.addrs()
	const count, size = 32, 8 + 64
	var b []byte
	for i := range count {
		d := make([]byte, size)
		d[0], d[6] = 8, 7+byte(i%2) // VNI 7, which there is, and VNI 8
		b = append(b, d...)
	}
	h.ns[0].Do(func() {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(vtep[0]), Port: 501},
			&net.UDPAddr{IP: net.ParseIP(vtep[1]), Port: 4789})
		if err != nil {
			h.t.Fatal(err)
		}
		defer c.Close()
		raw, err := c.SyscallConn()
		if err == nil {
			var set error
			err = raw.Control(func(fd uintptr) {
				set = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size)
			})
			err = errors.Join(err, set)
		}
		if err == nil {
			_, err = c.Write(b)
		}
		if err != nil {
			h.t.Fatal(err)
		}
	})
	drops := func(name string) uint64 { return h.d[1].Status().VTEP.Drops[name] }
	testutil.Eventually(h.t, "datagrams of two networks are told apart",
		func() bool { return drops("unknown-vni")+drops("bad-header") == count/2 })
	if n := drops("bad-header"); n != 0 {
		h.t.Errorf("%d datagrams refused because others of the message are of another network", n)
	}
}

// rotate replaces the keys of host 1 while the programs are connected.
func (h *twoHosts) rotate(p *programs) {
	h.t.Helper()
	h.keys[1], h.psk = newKey(h.t), newKey(h.t)
	for i, d := range h.d {
		h.configure(i, true)
		done, err := d.Reload()
		if err != nil || strings.Join(done, ", ") != "WireGuard keys and peers" {
			h.t.Fatalf("host %d: %q, %v", i, done, err)
		}
	}
	p.exchange("with other keys")
	if got, want := h.d[1].Status().Protection.PublicKey, h.keys[1].PublicKey().String(); got != want {
		h.t.Errorf("public key %s, want %s", got, want)
	}
}

// fixChecksum makes the UDP checksum of a frame right, so that WireGuard gets it.
func fixChecksum(f []byte, udp int) {
	binary.BigEndian.PutUint16(f[udp+6:], 0)
	addrs := f[udp-8 : udp] // IPv4
	if f[12] == 0x86 {
		addrs = f[udp-32 : udp]
	}
	n := int(binary.BigEndian.Uint16(f[udp+4:]))
	pseudo := append(bytes.Clone(addrs), 0, unix.IPPROTO_UDP, byte(n>>8), byte(n))
	sum := header.Checksum(append(pseudo, f[udp:udp+n]...), 0)
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(f[udp+6:], sum)
}
