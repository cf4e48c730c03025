package integration

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/integration/harness"
)

// packetSocket sends frames as they are from an interface of a namespace.
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
	return func(f []byte) { _, _ = unix.Write(fd, f) } // a full queue is fine, and so is a refusal
}

func rawMAC(n uint32) []byte { return binary.BigEndian.AppendUint32([]byte{2, 9}, n) }

// headers are the beginnings of frames of every kind that the switch looks into.
func headers(dst, src []byte) (all [][]byte) {
	eth := func(typ uint16, body ...byte) {
		f := binary.BigEndian.AppendUint16(append(append([]byte{}, dst...), src...), typ)
		all = append(all, append(f, body...))
	}
	v4 := func(proto byte, frag uint16, l4 ...byte) []byte {
		p := []byte{0x45, 0, 0, byte(20 + len(l4)), 0, 1, byte(frag >> 8), byte(frag), 64, proto, 0, 0, 10, 0, 0, 13, 10, 0, 0, 11}
		return append(p, l4...)
	}
	v6 := func(next byte, body ...byte) []byte {
		p := append([]byte{0x60, 0, 0, 0, 0, byte(len(body)), next, 255}, make([]byte, 32)...)
		p[8], p[23], p[24], p[39] = 0xfd, 13, 0xfd, 11
		return append(p, body...)
	}
	roce := []byte{0x30, 0x39, 0x12, 0xb7, 0, 40, 0, 0, 4, 0x40, 0xff, 0xff, 0, 0, 0, 17, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
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

// malformed makes one of those, cut off or with bytes changed.
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

// TestHostile: what a tenant does, who has a whole host's port to send raw frames from, and a stranger on the underlay, costs what the
// limits allow, is counted by reason, and neither the other tenant nor the same tenant's others notice (MT-6, MT-9).
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
	// Datagrams to host 1's VTEP, from a stranger and from host 2's address.
	stranger := must[*harness.Namespace](t)(harness.NewNamespace("vnicd-stranger"))
	w.Add(func() { _ = stranger.Close() })
	check(t, harness.AddVeth(stranger, "ul", w.wire, "ws", 1500))
	w.ip(w.wire, "link set ws master sw")
	w.ip(stranger, "addr add 192.0.2.99/24 dev ul")
	underlay := func(ns *harness.Namespace) func([]byte) {
		var c net.Conn
		check(t, ns.Do(func() (err error) { c, err = net.Dial("udp", hostIP(0)+":4789"); return err }))
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
			raw(append(append(append([]byte{}, broadcast...), mac(13)...), 0x88, 0xb5, byte(i>>24), byte(i>>16), byte(i>>8), byte(i)))
		}},
		{"MAC flood", func(rng *rand.Rand, _ int) {
			raw(append(append(rawMAC(rng.Uint32()), rawMAC(rng.Uint32())...), make([]byte, 50)...))
		}},
		{"others' MACs", func(rng *rand.Rand, i int) { // as if they were here
			raw(append(append(append([]byte{}, broadcast...), mac(11+rng.IntN(2))...), 0x88, 0xb5, byte(i>>16), byte(i>>8), byte(i)))
		}},
		{"malformed frames", func(rng *rand.Rand, _ int) { raw(malformed(rng, all)) }},
		{"stranger's datagrams", func(rng *rand.Rand, i int) {
			inner := malformed(rng, all)
			switch i % 4 {
			case 0:
				fromStranger(vx(8, 100, inner)) // no peer
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
				// What may be claimed is what is learnt. Where addresses are has been told, as it is of VMs.
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
					if i%200 == 0 { // 40,000 a second at most: four times the storm limit
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
	drops := func(h int, path string) map[string]uint64 {
		t.Helper()
		sum := map[string]uint64{}
		var ports []struct {
			Name  string            `json:"name"`
			Drops map[string]uint64 `json:"drops"`
		}
		check(t, json.Unmarshal([]byte(must[string](t)(w.hosts[h].CLI(w.ctx, "port", "show", path, "-j"))), &ports))
		for _, p := range ports {
			for r, n := range p.Drops {
				sum[r] += n
			}
		}
		return sum
	}
	at3, at1 := drops(2, "blue"), drops(0, "blue")
	t.Logf("host 3: %v; host 1: %v", at3, at1)
	for _, r := range []string{"storm", "port-table-full", "static-moved"} {
		if at3[r] == 0 {
			t.Errorf("host 3 has counted no %s", r)
		}
	}
	for _, r := range []string{"too-big", "short-frame", "bad-source", "reserved-group"} {
		if at1[r] == 0 {
			t.Errorf("host 1 has counted no %s", r)
		}
	}
	status := w.cli(w.hosts[0], "status")
	for _, want := range []string{"192.0.2.99", "unknown-peer", "unknown-vni", "bad-header"} {
		if !strings.Contains(status, want) {
			t.Errorf("`vnicd status` on host 1 does not say %q:\n%s", want, status)
		}
	}
	if d := drops(0, "red"); d["storm"]+d["flapping"]+d["table-full"] != 0 {
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
