package fastpath_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/ethernet/fastpath"
	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/ways"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// host is one host: a VTEP with the short path, one network, and a TAP in it.
type host struct {
	vt   *vxlan.VTEP
	net  *vswitch.Network
	tap  *tap.TAP
	pool *frame.Pool
}

type hostConfig struct {
	local string
	peers []string
	tap   tap.Config
	zero  bool // IPv6 datagrams without checksum
}

// vni is the network of all tests.
const vni = 4711

func newLoops(t testing.TB, n int) (loops []*loop.Loop) {
	for i := range n {
		l := must[*loop.Loop](t)(loop.New(loop.Config{ID: i, SpinFor: ways.Spin(20 * time.Microsecond)}))
		if err := l.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		loops = append(loops, l)
	}
	return loops
}

func newHost(t testing.TB, ns *nstest.NS, loops []*loop.Loop, c hostConfig) *host {
	t.Helper()
	h := &host{}
	h.pool = must[*frame.Pool](t)(frame.NewPool(frame.Config{Count: 2048, Big: 128}))
	h.net = must[*vswitch.Network](t)(vswitch.NewNetwork(vswitch.Config{VNI: vni, Name: "tenant", Pool: h.pool}))
	var peers []netip.Addr
	for _, p := range c.peers {
		peers = append(peers, netip.MustParseAddr(p))
	}
	ns.Do(func() {
		h.vt = must[*vxlan.VTEP](t)(vxlan.New(vxlan.Config{Local: netip.MustParseAddr(c.local), Loops: loops, Pool: h.pool,
			ZeroChecksum6: c.zero, Segmentation: ways.Segmentation(), ShortPath: fastpath.Open}))
		if err := h.vt.AddNetwork(h.net, peers); err != nil {
			t.Fatal(err)
		}
		c.tap.Network, c.tap.Loop, c.tap.Pool = h.net, loops[0], h.pool
		h.tap = must[*tap.TAP](t)(tap.Open(c.tap))
	})
	t.Cleanup(func() {
		if t.Failed() {
			j, _ := json.MarshalIndent(h.net.Status(), "", " ")
			t.Logf("%s", j)
		}
		ns.Do(func() {
			if err := h.tap.Close(); err != nil {
				t.Error(err)
			}
			h.vt.Close()
			if n := h.pool.InUse(); n != 0 {
				t.Errorf("%d buffers leaked", n)
			}
		})
	})
	return h
}

// wires are the underlays of the short path tests.
var wires = []wireKind{{name: "IPv4", mtu: 1500}, {name: "IPv4 jumbo", mtu: 9000}, {name: "IPv6", v6: true, mtu: 1500},
	{name: "IPv6 jumbo", v6: true, mtu: 9000}}

type wireKind struct {
	name string
	v6   bool
	mtu  int
	vlan bool // tagged
}

// addr is host i's underlay address.
func (w wireKind) addr(i int) string {
	if w.v6 {
		return fmt.Sprint("2001:db8::", i)
	}
	return fmt.Sprint("192.0.2.", i)
}

// underlay assigns host i's address to an interface.
func (w wireKind) underlay(ns *nstest.NS, dev string, i int) {
	plen := "/24"
	if w.v6 {
		plen = "/64"
	}
	ns.Addr(dev, w.addr(i)+plen)
}

// transfer sends bytes to a TCP echo service, and compares the echo.
func transfer(t *testing.T, from, to *nstest.NS, addr string, size int64) {
	t.Helper()
	var l net.Listener
	to.Do(func() { l = must[net.Listener](t)(net.Listen("tcp", addr)) })
	defer l.Close()
	echoed := make(chan error, 1)
	go func() {
		s, err := l.Accept()
		if err == nil {
			_, err = io.Copy(s, s)
			s.Close()
		}
		echoed <- err
	}()
	var s net.Conn
	from.Do(func() { s = must[net.Conn](t)(net.Dial("tcp", addr)) })
	defer s.Close()
	_ = s.SetDeadline(time.Now().Add(2 * time.Minute))
	sent, back := sha256.New(), sha256.New()
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.MultiWriter(s, sent), io.LimitReader(rand.NewChaCha8([32]byte{1}), size))
		_ = s.(*net.TCPConn).CloseWrite()
		done <- err
	}()
	n, err := io.Copy(back, s)
	if err != nil || n != size {
		t.Fatalf("%d of %d bytes were echoed: %v", n, size, err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := <-echoed; err != nil {
		t.Fatal(err)
	}
	if [32]byte(sent.Sum(nil)) != [32]byte(back.Sum(nil)) {
		t.Error("the echo differs from the data sent")
	}
}
