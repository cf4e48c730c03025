package vxlan_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// vlanTags are the tags of tenants' frames: none, one (IEEE 802.1Q), two (802.1ad).
var vlanTags = []string{"", "\x81\x00\x60\x07", "\x88\xa8\x00\x08\x81\x00\x00\x07"}

// tagged has two raw sockets in a tenant's network, at our TAP and behind the peer's switch, send each other frames
// that fill the network's MTU, tags included; they must arrive unchanged. The first frame is flooded, because its
// receiver is unknown; the others are not.
func tagged(t *testing.T, h *host, ours, theirs int, number byte) {
	t.Helper()
	ends := [2]struct {
		socket int
		mac    string
	}{{ours, "\x02\x00\x00\x00\x01\x01"}, {theirs, "\x02\x00\x00\x00\x02" + string(rune(number))}}
	for i := range 4 {
		from, to := ends[i%2], ends[1-i%2]
		for _, tags := range vlanTags {
			f := to.mac + from.mac + tags + "\x88\xb5" + strings.Repeat(string(rune('a'+i)), h.net.MTU()-len(tags))
			testutil.Eventually(t, fmt.Sprintf("frame %d with tags %x arrives", i, tags), func() bool {
				if _, err := unix.Write(from.socket, []byte(f)); err != nil {
					t.Fatal(err)
				}
				return received(t, to.socket, f)
			})
		}
	}
	for _, vlan := range []uint16{0, 7, 8} {
		a := vswitch.Address{MAC: vswitch.MAC([]byte(ends[1].mac)), VLAN: vlan}
		if e, ok := h.net.LookupIn(a); !ok || e.Kind != "vtep" {
			t.Errorf("%v: %+v %v", a, e, ok)
		}
	}
}

// Tenants' tagged frames pass a Linux vxlan device and its bridge unchanged, both ways.
func TestVLANGuests(t *testing.T) {
	for _, u := range wires {
		t.Run(u.name, func(t *testing.T) {
			a, b, guest := nstest.New(t, "a"), nstest.New(t, "b"), nstest.New(t, "g")
			nstest.Pair(a, b, "under", u.mtu)
			b.NoOffload("under")
			underlay(a, "under", u.addr(1))
			linuxPeer(b, "under", u.addr(2), u.addr(1))
			nstest.Pair(guest, b, "guest", u.inner())
			b.IP("link", "set", "guest", "master", "brt")
			h := newHost(t, a, newLoops(t, 1), hostConfig{vni: 4711, local: u.addr(1), peers: []string{u.addr(2)},
				tap: tap.Config{Offloads: true, Name: "tenant"}})
			tagged(t, h, packetSocket(t, a, "tenant"), packetSocket(t, guest, "guest"), 2)
			if out, err := a.Exec("ip", "link", "add", "link", "tenant", "name", "tenant.7", "type", "vlan", "id",
				"7"); err != nil {
				t.Logf("this kernel has no VLAN interfaces (TestVLANUnderlay of package integration runs this in a VM): %s", out)
				return
			}
			// With VLAN interfaces, the tenants' hosts know their MTU.
			mtu := u.inner() - 4
			guest.IP("link", "add", "link", "guest", "name", "guest.7", "type", "vlan", "id", "7")
			a.IP("link", "set", "tenant.7", "mtu", fmt.Sprint(mtu), "up")
			guest.IP("link", "set", "guest.7", "mtu", fmt.Sprint(mtu), "up")
			a.Addr("tenant.7", "10.0.7.1/24")
			guest.Addr("guest.7", "10.0.7.2/24")
			a.Ping("10.0.7.2", "-s", fmt.Sprint(mtu-28), "-Mdo")
			guest.Ping("10.0.7.1", "-s", fmt.Sprint(mtu-28), "-Mdo")
		})
	}
}

// packetSocket opens a raw socket on an interface, with PACKET_AUXDATA for the tags that the kernel strips.
func packetSocket(t *testing.T, ns *nstest.NS, dev string) (fd int) {
	t.Helper()
	ns.Do(func() {
		const all = 3 << 8 // ETH_P_ALL in network byte order
		var err error
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			t.Fatal(err)
		}
		i := must[*net.Interface](t)(net.InterfaceByName(dev))
		for _, err := range []error{unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}),
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200000})} {
			if err != nil {
				t.Fatal(err)
			}
		}
	})
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// received looks for a frame among those queued.
func received(t *testing.T, fd int, want string) bool {
	t.Helper()
	p, oob := make([]byte, 1<<14), make([]byte, 128)
	for range 50 {
		n, oobn, _, from, err := unix.Recvmsg(fd, p, oob, 0)
		if err != nil {
			return false
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		f := string(p[:n])
		msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range msgs { // struct tpacket_auxdata: status, len, snaplen, mac, net, vlan_tci, vlan_tpid
			const tciValid = 1 << 4
			if d := m.Data; len(d) >= 20 && binary.NativeEndian.Uint32(d)&tciValid != 0 {
				tci, tpid := binary.NativeEndian.Uint16(d[16:]), binary.NativeEndian.Uint16(d[18:])
				f = f[:12] + string([]byte{byte(tpid >> 8), byte(tpid), byte(tci >> 8), byte(tci)}) + f[12:]
			}
		}
		if f == want {
			return true
		}
	}
	return false
}
