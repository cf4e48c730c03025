package vxlan

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/testutil"
)

// portRig is a VTEP with two networks of the same two peers, and a socket at the first peer for each kind of port.
type portRig struct {
	*rig
	second         *vswitch.Network
	reserved, user *net.UDPConn
	n              byte // number of the last datagram
}

func newPortRig(t *testing.T, v6 bool, p PeerPorts, peers []string) *portRig {
	t.Helper()
	c, from := Config{PeerPorts: p}, "192.0.2.2"
	if v6 {
		c.Local, from = netip.MustParseAddr("2001:db8::1"), "[2001:db8::2]"
	}
	r := &portRig{rig: newRig(t, c, peers)}
	var err error
	if r.second, err = vswitch.NewNetwork(vswitch.Config{VNI: 200, Name: "second"}); err != nil {
		t.Fatal(err)
	}
	if err := r.vt.AddNetwork(r.second, addrs(peers)); err != nil {
		t.Fatal(err)
	}
	r.reserved, r.user = r.socket(from+":1023"), r.socket(from+":1024")
	return r
}

func (r *portRig) frame() []byte {
	r.n++
	f := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	f[len(f)-1] = r.n
	return f
}

// accepts sends a datagram and waits until its frame is in the network.
func (r *portRig) accepts(what string, from *net.UDPConn) {
	r.t.Helper()
	f := r.frame()
	r.send(from, datagram(8, 100, f))
	testutil.Eventually(r.t, what+" is accepted", func() bool {
		select {
		case got := <-r.sink.frames:
			if got != string(f) {
				r.t.Fatalf("%s: got %x, want %x", what, got, f)
			}
			return true
		default:
			return false
		}
	})
}

// refuses sends a datagram and waits until it is counted at the network's port, and nowhere else.
func (r *portRig) refuses(what string, from *net.UDPConn, vni uint32, why vswitch.Reason) {
	r.t.Helper()
	sum := func() (n uint64) {
		for _, v := range []uint32{100, 200} {
			for _, k := range r.vt.Attachment(v).Counters.Totals().Drops {
				n += k
			}
		}
		for _, k := range r.vt.Counters.Totals().Drops {
			n += k
		}
		return n
	}
	c := &r.vt.Attachment(vni).Counters
	before, all := c.Dropped(why), sum()
	r.send(from, datagram(8, vni, r.frame()))
	testutil.Eventually(r.t, what+" is refused", func() bool { return c.Dropped(why) == before+1 })
	if n := sum(); n != all+1 {
		r.t.Errorf("%s: %d counted, want 1", what, n-all)
	}
	select {
	case f := <-r.sink.frames:
		r.t.Errorf("%s: %x arrived", what, f)
	default:
	}
}

// By default a peer's datagrams may come from any port until one comes from a reserved one (TR-3). That holds for the
// peer host in all its networks, for no other peer, and until it is no peer any more.
func TestPeerPortsAuto(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		peers, other := []string{remoteIP, "192.0.2.3"}, "192.0.2.3:5000"
		if v6 {
			peers, other = []string{"2001:db8::2", "2001:db8::3"}, "[2001:db8::3]:5000"
		}
		r := newPortRig(t, v6, PeerPortsAuto, peers)
		if v6 {
			r.b.Addr("under", "2001:db8::3/64")
		}
		r.accepts("a user's port at first", r.user)
		if x := r.vt.Peers(100); x[0].ReservedPort {
			t.Errorf("status: %+v", x)
		}
		r.accepts("a reserved port", r.reserved)
		if x := r.vt.Peers(200); !x[0].ReservedPort || x[1].ReservedPort {
			t.Errorf("status: %+v", x)
		}
		r.refuses("a user's port afterwards", r.user, 100, vswitch.SourcePort)
		r.refuses("in another network", r.user, 200, vswitch.SourcePort)
		r.accepts("a reserved port still", r.reserved)
		r.accepts("another peer", r.socket(other))
		named := slices.ContainsFunc(r.vt.Status().Refused, func(x Refused) bool {
			return x.From.String() == peers[0] && x.VNI == 200 && x.Reason == "source-port" && x.Count == 1
		})
		if !named {
			t.Errorf("status: %+v", r.vt.Status().Refused)
		}

		// A reload that keeps the peer does not forget; nor does one that removes it from one network only.
		if err := r.vt.SetPeers(100, addrs(peers[:1])); err != nil {
			t.Fatal(err)
		}
		r.refuses("a user's port after a change of the peers", r.user, 100, vswitch.SourcePort)
		if err := r.vt.SetPeers(100, nil); err != nil {
			t.Fatal(err)
		}
		if err := r.vt.AddPeer(100, netip.MustParseAddr(peers[0])); err != nil {
			t.Fatal(err)
		}
		r.refuses("a user's port of a peer of another network", r.user, 100, vswitch.SourcePort)
		// Nor does a user's port make it a peer of a network that learns peers; a reserved one does.
		if err := r.vt.SetPeers(100, nil); err != nil {
			t.Fatal(err)
		}
		if err := r.vt.SetLearnPeers(100, true); err != nil {
			t.Fatal(err)
		}
		r.refuses("a user's port of a peer of another network that learns", r.user, 100, vswitch.UnknownPeer)
		if x := r.vt.Peers(100); len(x) != 0 {
			t.Errorf("learnt %+v", x)
		}
		r.accepts("a reserved port of a peer of another network that learns", r.reserved)
		r.refuses("a user's port of a learnt peer", r.user, 100, vswitch.SourcePort)
		if err := r.vt.SetLearnPeers(100, false); err != nil {
			t.Fatal(err)
		}
		if err := r.vt.SetPeers(100, addrs(peers[:1])); err != nil { // it is configured again
			t.Fatal(err)
		}

		for _, vni := range []uint32{100, 200} {
			if err := r.vt.RemovePeer(vni, netip.MustParseAddr(peers[0])); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.vt.AddPeer(100, netip.MustParseAddr(peers[0])); err != nil {
			t.Fatal(err)
		}
		r.accepts("a user's port of a new peer", r.user)
		r.accepts("a reserved port", r.reserved)
		wide, err := vswitch.NewNetwork(vswitch.Config{VNI: 300, MTU: 9000})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.vt.AddNetwork(wide, addrs(peers)); !errors.Is(err, ErrMTU) {
			t.Errorf("a network that does not fit: %v", err)
		}
		if err := r.vt.RemoveNetwork(100); err != nil {
			t.Fatal(err)
		}
		if err := r.vt.RemoveNetwork(200); err != nil {
			t.Fatal(err)
		}
		if n := len(r.vt.origins.m); n != 0 {
			t.Errorf("%d hosts are remembered that are no peers", n)
		}
	}
}

// With PeerPortsReserved the first datagram counts already, and no peer is learnt from a user's port.
func TestPeerPortsReserved(t *testing.T) {
	r := newPortRig(t, false, PeerPortsReserved, []string{remoteIP})
	r.refuses("a user's port", r.user, 100, vswitch.SourcePort)
	r.accepts("a reserved port", r.reserved)
	if err := r.vt.SetLearnPeers(100, true); err != nil {
		t.Fatal(err)
	}
	r.refuses("a user's port of a host that is no peer", r.socket("192.0.2.3:1024"), 100, vswitch.UnknownPeer)
	if n := len(r.vt.Peers(100)); n != 1 {
		t.Errorf("%d peers", n)
	}
	r.accepts("a reserved port of a host that is no peer", r.socket("192.0.2.3:1"))
	if n := len(r.vt.Peers(100)); n != 2 {
		t.Errorf("%d peers", n)
	}
	r.refuses("a user's port of a learnt peer", r.socket("192.0.2.3:1025"), 100, vswitch.SourcePort)
}

func TestPeerPortsAny(t *testing.T) {
	r := newPortRig(t, false, PeerPortsAny, []string{remoteIP})
	r.accepts("a reserved port", r.reserved)
	r.accepts("a user's port", r.user)
}

// Within one batch, where most datagrams repeat the sender of the one before, those from a user's port are refused.
func TestPeerPortsInBatch(t *testing.T) {
	r := newPortRig(t, false, PeerPortsAuto, []string{remoteIP})
	r.accepts("a reserved port", r.reserved)
	const n = 24
	gate := make(chan struct{})
	for _, l := range r.loops {
		l.Post(func() { <-gate })
	}
	var want [][]byte
	for i := range n {
		f := r.frame()
		if i%3 == 0 {
			want = append(want, f)
			r.send(r.reserved, datagram(8, 100, f))
		} else {
			r.send(r.user, datagram(8, 100, f))
		}
	}
	close(gate)
	var got [][]byte
	testutil.Eventually(t, "all datagrams have been judged", func() bool {
		for {
			select {
			case f := <-r.sink.frames:
				got = append(got, []byte(f))
				continue
			default:
			}
			return len(got) == len(want) && r.vt.Attachment(100).Counters.Dropped(vswitch.SourcePort) == n-uint64(len(want))
		}
	})
	if !slices.EqualFunc(got, want, bytes.Equal) {
		t.Errorf("got %x, want %x", got, want)
	}
}

// A VTEP sends from reserved ports, each of its own. If others have some of them, it takes others; if all, it says so.
func TestReservedSourcePorts(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	seen := map[uint16]bool{}
	for _, p := range r.vt.Status().SourcePorts {
		if seen[p] || p >= reservedPorts || !slices.ContainsFunc(ourPorts, func(x [2]uint16) bool {
			return x[0] <= p && p <= x[1]
		}) {
			t.Errorf("source port %d", p)
		}
		seen[p] = true
	}
	if len(seen) != 2*DefaultSourcePorts {
		t.Errorf("%d source ports, want %d", len(seen), 2*DefaultSourcePorts)
	}
	r.inject(r.loops[0], macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)))
	if _, from := r.receive(r.remote); !seen[from.Port()] {
		t.Errorf("a datagram from port %d", from.Port())
	}

	var all []*net.UDPConn
	free := 0
	for _, x := range ourPorts {
		for p := x[0]; p <= x[1]; p++ {
			free++
			if seen[p] {
				free--
				continue
			}
			r.a.Do(func() {
				c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(localIP), Port: int(p)})
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, c)
			})
		}
	}
	if total := free + len(seen); total < 8*DefaultSourcePorts { // engines
		t.Errorf("%d ports, too few for eight engines", total)
	}
	again := func(port uint16) (*VTEP, error) {
		c := r.vt.cfg
		c.Port = port
		var vt *VTEP
		var err error
		r.a.Do(func() { vt, err = New(c) })
		return vt, err
	}
	if _, err := again(5000); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("with all ports in use: %v", err)
	}
	for _, c := range all[:20] {
		c.Close()
	}
	vt, err := again(5000)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(vt.Status().SourcePorts); n != 20 {
		t.Errorf("%d source ports of 20 that are free", n)
	}
	vt.Close()
	for _, c := range all[20:] {
		c.Close()
	}
}

// Without the right to bind reserved ports the VTEP sends from others, and warns.
func TestSourcePortsWithoutRight(t *testing.T) {
	r := newRig(t, Config{}, nil)
	var log bytes.Buffer
	c := r.vt.cfg
	c.Port, c.Log = 5000, hclog.New(&hclog.LoggerOptions{Output: &log})
	var vt *VTEP
	r.a.Do(func() {
		h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var now, less [2]unix.CapUserData // of this thread
		if err := unix.Capget(&h, &now[0]); err != nil {
			t.Fatal(err)
		}
		less = now
		less[0].Effective &^= 1 << unix.CAP_NET_BIND_SERVICE
		if err := unix.Capset(&h, &less[0]); err != nil {
			t.Fatal(err)
		}
		var err error
		vt, err = New(c)
		if e := unix.Capset(&h, &now[0]); e != nil {
			t.Fatal(e)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	defer vt.Close()
	ports := vt.Status().SourcePorts
	if len(ports) != 2*DefaultSourcePorts || slices.Min(ports) < firstPort {
		t.Errorf("source ports %v", ports)
	}
	if s := log.String(); strings.Count(s, "CAP_NET_BIND_SERVICE") != 1 {
		t.Errorf("log:\n%s", s)
	}
	// Users of this host could send from reserved ports, too, if the system allowed it.
	r.a.MustExec("sysctl", "-qw", "net.ipv4.ip_unprivileged_port_start=100")
	c.Port = 5001
	log.Reset()
	r.a.Do(func() {
		other, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		other.Close()
	})
	if s := log.String(); !strings.Contains(s, "ip_unprivileged_port_start") {
		t.Errorf("log:\n%s", s)
	}
}
