package integration

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// packetSocket returns a function that sends raw frames from an interface of a namespace.
func packetSocket(t *testing.T, ns *harness.Namespace, dev string) func([]byte) {
	t.Helper()
	var fd int
	check(t, ns.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		i, err := net.InterfaceByName(dev)
		if err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: i.Index})
	}))
	t.Cleanup(func() { unix.Close(fd) })
	return func(f []byte) { _, _ = unix.Write(fd, f) } // send errors are fine: a full queue or a refusal
}

// overhear counts the frames that arrive at an interface of a namespace, by the text that they contain.
func overhear(t *testing.T, ns *harness.Namespace, dev string, texts ...string) (count func(text string) int64) {
	t.Helper()
	const all = 3 << 8 // ETH_P_ALL in network byte order
	var fd int
	check(t, ns.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		i, err := net.InterfaceByName(dev)
		if err != nil {
			return err
		}
		return errors.Join(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100000}))
	}))
	seen := make([]atomic.Int64, len(texts))
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer unix.Close(fd)
		p := make([]byte, 1<<16)
		for {
			select {
			case <-stop:
				return
			default:
			}
			n, _, err := unix.Recvfrom(fd, p, 0)
			for i, x := range texts {
				if err == nil && bytes.Contains(p[:n], []byte(x)) {
					seen[i].Add(1)
				}
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
	return func(text string) int64 { return seen[slices.Index(texts, text)].Load() }
}

// liar sends forbidden frames from a VM's interface, a given number of each kind, untagged and in a VLAN; then
// permitted frames. Arguments: number; its own MAC, another VM's and an unused one; its own and another VM's IP
// address.
const liar = `import socket, struct, sys
count = int(sys.argv[1])
own, other, nobody = (bytes.fromhex(x.replace(":", "")) for x in sys.argv[2:5])
me, them = (socket.inet_aton(x) for x in sys.argv[5:7])
broadcast, lie, truth = b"\xff" * 6, b"this is a lie", b"this is true"
def checksum(b):
    n = sum(struct.unpack("!%dH" % (len(b) // 2), b))
    n = (n & 0xffff) + (n >> 16)
    return 0xffff - ((n & 0xffff) + (n >> 16))
def ip4(src, data):
    h = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(data), 0, 0, 64, 17, 0, src, b"\xff" * 4)
    h = h[:10] + struct.pack("!H", checksum(h)) + h[12:]
    return b"\x08\x00" + h + struct.pack("!HHHH", 9, 9, 8 + len(data), 0) + data
def ip6(src, proto, hops, body, tail=b""):
    return b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, len(body), proto, hops) + src + all_nodes + body + tail
def arp(mac, ip):
    return b"\x08\x06" + struct.pack("!HHBBH", 1, 0x800, 6, 4, 2) + mac + ip + broadcast + me + lie
all_nodes = socket.inet_pton(socket.AF_INET6, "ff02::1")
far, near = socket.inet_pton(socket.AF_INET6, "fd00::12"), socket.inet_pton(socket.AF_INET6, "fe80::1")
advert = struct.pack("!BBHI", 136, 0, 0, 0x20000000) + far + b"\x02\x01" + own
pseudo = near + all_nodes + struct.pack("!II", len(advert), 58)
advert = advert[:2] + struct.pack("!H", checksum(pseudo + advert)) + advert[4:]
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(("eth0", 0))
def send(mac, body, n):
    for tag in (b"", b"\x81\x00\x00\x07"):
        for i in range(n):
            s.send(broadcast + mac + tag + body)
for mac in other, nobody:                       # counted as spoofed
    send(mac, b"\x88\xb5" + lie, count)
for body in ip4(them, lie), ip6(far, 59, 1, lie), arp(own, them): # as spoofed-ip
    send(own, body, count)
for body in arp(other, me), ip6(near, 58, 255, advert, lie): # as spoofed-neighbour
    send(own, body, count)
send(own, ip4(me, truth), 10)
`

// spoofing: a VM's interface sends with other VMs' MACs and IP addresses, and claims them by ARP and ND. Every such
// frame is counted and reaches no port, no table contains the addresses, and other VMs are not affected.
func spoofing(t *testing.T, w *tenantLab, victims func(*testing.T)) {
	const blue, count = 0, 50
	const nobody = "02:0a:0a:0a:0a:0a"
	h := w.hosts[0]
	name := w.vm(blue).Name
	w.cli(h, "vm del "+name)
	w.cli(h, fmt.Sprintf("vm add %s network blue mac %s ip %s", name, endMAC(1), endIP(1)))
	w.ms = append(w.ms, w.bootVM(blue, h))
	vm := w.ms[0]
	w.all(blue, vm)
	var heard []func(string) int64
	for _, c := range w.ends[blue] {
		heard = append(heard, overhear(t, c.ns, "eth0", "this is a lie", "this is true"))
	}
	check(t, vm.WriteFile(w.ctx, "/tmp/liar.py", []byte(liar)))
	run(w.ctx, t, vm, fmt.Sprintln("python3 /tmp/liar.py", count, endMAC(1), endMAC(12), nobody, endIP(1), endIP(12)))
	for i, n := range heard {
		// The permitted frames were sent last.
		eventually(w.ctx, t, "the permitted frames", func() bool { return n("this is true") >= 2 })
		if lies := n("this is a lie"); lies > 0 {
			t.Errorf("%s received %d spoofed frames", w.ends[blue][i].name(), lies)
		}
	}
	drops := w.drops(h, "blue", name)
	t.Logf("%s: %v", name, drops)
	for why, want := range map[string]uint64{"spoofed": 2 * 2 * count, "spoofed-ip": 3 * 2 * count,
		"spoofed-neighbour": 2 * 2 * count} {
		if drops[why] != want {
			t.Errorf("%d counted as %s, want %d", drops[why], why, want)
		}
	}
	for i, x := range w.hosts {
		fdb, neigh := w.cli(x, "fdb show blue"), w.cli(x, "neigh show blue")
		if strings.Contains(fdb+neigh, nobody) {
			t.Errorf("host %d has learnt the unused MAC:\n%s%s", i+1, fdb, neigh)
		}
		where := map[bool]string{true: "port blue0", false: "vtep " + hostIP(1)}[i == 1]
		for line := range strings.Lines(fdb) {
			if strings.Contains(line, endMAC(12)) && !strings.Contains(line, where) {
				t.Errorf("host %d: %s", i+1, line)
			}
		}
		for line := range strings.Lines(neigh) {
			f := strings.Fields(line)
			if (f[0] == endIP(12)) != strings.Contains(line, endMAC(12)) || f[0] == "fd00::12" {
				t.Errorf("host %d: %s", i+1, line)
			}
		}
	}
	victims(t)
	quietKernels(w.ctx, t, vm)
}

func rawMAC(n uint32) []byte { return binary.BigEndian.AppendUint32([]byte{2, 9}, n) }

// headers returns the headers of every kind of frame that the switch parses.
func headers(dst, src []byte) (all [][]byte) {
	eth := func(typ uint16, body ...byte) {
		f := binary.BigEndian.AppendUint16(append(append([]byte{}, dst...), src...), typ)
		all = append(all, append(f, body...))
	}
	v4 := func(proto byte, frag uint16, l4 ...byte) []byte {
		p := []byte{0x45, 0, 0, byte(20 + len(l4)), 0, 1, byte(frag >> 8), byte(frag), 64, proto, 0, 0, 10, 0, 0, 13, 10, 0,
			0, 11}
		return append(p, l4...)
	}
	v6 := func(next byte, body ...byte) []byte {
		p := append([]byte{0x60, 0, 0, 0, 0, byte(len(body)), next, 255}, make([]byte, 32)...)
		p[8], p[23], p[24], p[39] = 0xfd, 13, 0xfd, 11
		return append(p, body...)
	}
	roce := []byte{0x30, 0x39, 0x12, 0xb7, 0, 40, 0, 0, 4, 0x40, 0xff, 0xff, 0, 0, 0, 17, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0}
	solicit := append([]byte{135, 0, 0, 0, 0, 0, 0, 0, 0xfd, 15: 0, 23: 11}, 1, 1, 2, 0, 0, 0, 0, 13)
	eth(0x0806, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 13, 10, 0, 0, 13, 0, 0, 0, 0, 0, 0, 10, 0, 0, 11)
	eth(0x0800, v4(17, 0, roce...)...)
	eth(0x0800, v4(6, 0, make([]byte, 20)...)...)
	eth(0x0800, v4(17, 0x2000, roce...)...)
	eth(0x0800, v4(17, 0x1fff, roce...)...)
	eth(0x0800, append([]byte{0x4f, 0, 0, 60}, make([]byte, 56)...)...)
	eth(0x86dd, v6(17, roce...)...)
	eth(0x86dd, v6(58, solicit...)...)
	eth(0x86dd, v6(44, append([]byte{58, 0, 0, 1, 0, 0, 0, 1}, solicit...)...)...)
	eth(0x86dd, v6(0, append([]byte{0, 255, 0, 0, 0, 0, 0, 0}, solicit...)...)...)
	eth(0x8915, v6(27, roce[8:]...)...)
	eth(0x8100, append([]byte{0x60, 7, 0x88, 0xa8, 0, 8, 0x81, 0, 0, 9, 8, 0}, v4(17, 0, roce...)...)...)
	eth(0x8809, 1, 1)
	return all
}

// malformed returns one of those, truncated or with bytes changed.
func malformed(rng *rand.Rand, all [][]byte) []byte {
	f := append([]byte{}, all[rng.IntN(len(all))]...)
	for range rng.IntN(4) {
		f[12+rng.IntN(len(f)-12)] = byte(rng.Uint32())
	}
	if rng.IntN(2) == 0 {
		f = f[:12+rng.IntN(len(f)-11)]
	}
	return f
}

// drops returns the drop counters of a network's ports on a host, or of one port.
func (w *tenantLab) drops(h *lab.Host, network, port string) map[string]uint64 {
	w.t.Helper()
	sum := map[string]uint64{}
	var ports []struct {
		Name  string            `json:"name"`
		Drops map[string]uint64 `json:"drops"`
	}
	check(w.t, json.Unmarshal([]byte(must[string](w.t)(h.CLI(w.ctx, "port", "show", network, "-j"))), &ports))
	for _, p := range ports {
		for r, n := range p.Drops {
			if port == "" || port == p.Name {
				sum[r] += n
			}
		}
	}
	return sum
}

// TestHostile: a tenant that sends raw frames from a whole host's port, and a host on the underlay that is no peer. The
// effects stay within the limits and are counted by reason; neither the other tenant nor other ports of the same tenant
// are affected (MT-6, MT-9).
func TestHostile(t *testing.T) {
	w := newTenantLab(t)
	blue, red := 0, 1
	attacker := w.ends[blue][2]
	raw := packetSocket(t, attacker.ns, "eth0")
	broadcast := []byte{255, 255, 255, 255, 255, 255}
	mac := func(i int) []byte { m, _ := net.ParseMAC(endMAC(i)); return m }
	victims := func(t *testing.T) {
		t.Helper()
		w.t = t
		for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); {
			w.all(red, nil)
			w.reaches(w.ends[blue][0], 12)
			w.reaches(w.ends[blue][1], 11)
		}
	}
	victims(t)
	t.Run("spoofing VM", func(t *testing.T) { w.t = t; spoofing(t, w, victims) })
	// Datagrams to host 1's VTEP, from an unknown host and from host 2's address.
	stranger := must[*harness.Namespace](t)(harness.NewNamespace("vnicd-stranger"))
	w.Add(func() { _ = stranger.Close() })
	check(t, harness.AddVeth(stranger, "ul", w.wire, "ws", 1500))
	w.ip(w.wire, "link set ws master sw")
	w.ip(stranger, "addr add 192.0.2.99/24 dev ul")
	underlay := func(ns *harness.Namespace) func([]byte) {
		var c net.Conn
		// From a reserved port: otherwise all would be refused for that.
		to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(hostIP(0)), 4789))
		check(t, ns.Do(func() (err error) { c, err = net.DialUDP("udp", &net.UDPAddr{Port: 500}, to); return err }))
		t.Cleanup(func() { c.Close() })
		return func(p []byte) { _, _ = c.Write(p) }
	}
	fromStranger, fromPeer := underlay(stranger), underlay(w.hosts[1].NS)
	vx := func(flags byte, vni uint32, inner []byte) []byte {
		h := binary.BigEndian.AppendUint32([]byte{flags, 0, 0, 0}, vni<<8)
		return append(h, inner...)
	}
	all := headers(broadcast, mac(13))
	for _, attack := range []struct {
		name string
		send func(rng *rand.Rand, i int)
	}{
		{"storm", func(_ *rand.Rand, i int) {
			raw(append(append(append([]byte{}, broadcast...), mac(13)...), 0x88, 0xb5, byte(i>>24), byte(i>>16), byte(i>>8),
				byte(i)))
		}},
		{"MAC flood", func(rng *rand.Rand, _ int) {
			raw(append(append(rawMAC(rng.Uint32()), rawMAC(rng.Uint32())...), make([]byte, 50)...))
		}},
		{"others' MACs", func(rng *rand.Rand, i int) { // as if they were on this host
			raw(append(append(append([]byte{}, broadcast...), mac(11+rng.IntN(2))...), 0x88, 0xb5, byte(i>>16), byte(i>>8),
				byte(i)))
		}},
		{"malformed frames", func(rng *rand.Rand, _ int) { raw(malformed(rng, all)) }},
		{"stranger's datagrams", func(rng *rand.Rand, i int) {
			inner := malformed(rng, all)
			switch i % 4 {
			case 0:
				fromStranger(vx(8, 100, inner)) // not from a peer
			case 1:
				fromStranger(vx(8, rng.Uint32()>>8, inner))
			case 2:
				fromStranger(vx(byte(rng.Uint32()), 100, inner)[:rng.IntN(9)])
			case 3:
				fromStranger(vx(8, 101, make([]byte, 4000))) // arrives in fragments
			}
		}},
		{"peer's datagrams", func(rng *rand.Rand, i int) {
			inner := malformed(rng, headers(broadcast, rawMAC(uint32(i%7))))
			switch i % 4 {
			case 0:
				if rng.IntN(4) == 0 {
					inner[6] |= 1
				} else if rng.IntN(4) == 0 {
					copy(inner, "\x01\x80\xc2\x00\x00\x0e")
				}
				fromPeer(vx(8, 100, inner))
			case 1:
				fromPeer(vx(8, 7777, inner))
			case 2:
				fromPeer(vx(0, 100, inner))
			case 3:
				fromPeer(vx(8, 100, append(inner, make([]byte, 4000)...)))
			}
		}},
	} {
		t.Run(attack.name, func(t *testing.T) {
			w.t = t
			if attack.name == "others' MACs" {
				// Allowed claims are learnt. The ends' locations are configured here, as those of VMs are.
				for h, x := range w.hosts {
					for i := range 2 {
						where := "vtep " + hostIP(i)
						if i == h {
							where = "port blue0"
						}
						w.cli(x, fmt.Sprintf("fdb add %s network blue %s", endMAC(11+i), where))
					}
				}
			}
			stop, rng := make(chan struct{}), rand.New(rand.NewPCG(1, 2))
			var wg sync.WaitGroup
			wg.Go(func() {
				for i := 0; ; i++ {
					attack.send(rng, i)
					if i%200 == 0 { // at most 40,000 per second: twenty times the storm limit
						select {
						case <-stop:
							return
						case <-time.After(5 * time.Millisecond):
						}
					}
				}
			})
			defer wg.Wait()
			defer close(stop)
			victims(t)
		})
	}
	w.t = t
	at3, at1 := w.drops(w.hosts[2], "blue", ""), w.drops(w.hosts[0], "blue", "")
	t.Logf("host 3: %v; host 1: %v", at3, at1)
	for _, r := range []string{"storm", "port-table-full", "static-moved"} {
		if at3[r] == 0 {
			t.Errorf("host 3 counted no %s", r)
		}
	}
	for _, r := range []string{"too-big", "short-frame", "bad-source", "reserved-group"} {
		if at1[r] == 0 {
			t.Errorf("host 1 counted no %s", r)
		}
	}
	status := w.cli(w.hosts[0], "status")
	for _, want := range []string{"192.0.2.99", "unknown-peer", "unknown-vni", "bad-header"} {
		if !strings.Contains(status, want) {
			t.Errorf("`vnicd status` on host 1 does not contain %q:\n%s", want, status)
		}
	}
	if d := w.drops(w.hosts[0], "red", ""); d["storm"]+d["flapping"]+d["table-full"] != 0 {
		t.Errorf("the other tenant has drops: %v", d)
	}
	for h, x := range w.hosts {
		b := must[[]byte](t)(os.ReadFile(fmt.Sprintf("/proc/%d/status", x.Proc.PID())))
		var kib int
		for line := range strings.Lines(string(b)) {
			fmt.Sscanf(line, "VmRSS: %d kB", &kib)
		}
		if kib == 0 || kib > 400<<10 {
			t.Errorf("host %d: vnicd uses %d MiB", h+1, kib>>10)
		}
		t.Logf("host %d: vnicd uses %d MiB", h+1, kib>>10)
	}
	victims(t)
}
