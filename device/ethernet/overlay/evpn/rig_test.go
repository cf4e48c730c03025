package evpn

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/ethernet/overlay"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

func TestMain(m *testing.M) {
	// The race detector reads its options before any Go code runs.
	if os.Getenv("GORACE") == "" {
		if err := syscall.Exec("/proc/self/exe", os.Args,
			append(os.Environ(), "GORACE=suppressions=testdata/gobgp.races")); err != nil {
			panic(err)
		}
	}
	flag.Parse()
	// The fuzzing engine's own goroutines may end slightly after the run.
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		os.Exit(m.Run())
	}
	// gobgp never closes the queue of a removed neighbour.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/eapache/channels.(*InfiniteChannel).infiniteBuffer"))
}

// patience is how long a test waits for a condition.
const patience = 60 * time.Second

func hwaddr(n int) vswitch.MAC { return vswitch.MAC{2, 0, 0, byte(n >> 16), byte(n >> 8), byte(n)} }

type nullPort struct{}

func (nullPort) Deliver(*loop.Loop, *frame.Buf, vswitch.Destination) {}

// fabric is several hosts in one process: their VTEPs in one network namespace, their BGP sessions over the loopback
// interface.
type fabric struct {
	t    *testing.T
	ns   *nstest.NS
	loop *loop.Loop
	pool *frame.Pool
	port uint16
	// apart: hosts run BGP as another process would.
	apart bool

	spoken int
}

// both runs a test with BGP in the daemon's process, and in another.
func both(t *testing.T, test func(*testing.T, *fabric)) {
	for _, apart := range []bool{false, true} {
		t.Run(map[bool]string{false: "within", true: "apart"}[apart], func(t *testing.T) {
			f := newFabric(t)
			f.apart = apart
			test(t, f)
		})
	}
}

func newFabric(t *testing.T) *fabric {
	t.Helper()
	f := &fabric{t: t, ns: nstest.New(t, "evpn")}
	f.ns.IP("link", "add", "under", "type", "bridge")
	f.ns.IP("link", "set", "under", "up")
	var err error
	if f.loop, err = loop.New(loop.Config{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.loop.Close)
	if err := f.loop.Start(); err != nil {
		t.Fatal(err)
	}
	if f.pool, err = frame.NewPool(frame.Config{Count: 1024}); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.port = uint16(l.Addr().(*net.TCPAddr).Port)
	l.Close()
	return f
}

// host is one of them. Its addresses contain its number.
type host struct {
	*fabric
	n   int
	vt  *vxlan.VTEP
	s   *Speaker
	log testlog.Log
	bgp *processes // nil: in the speaker
}

func (f *fabric) bgpAddr(n int) netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 1, byte(n)}) }
func vtepAddr(n int) netip.Addr            { return netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}) }

const testAS = 65001

// config is the configuration of a host whose neighbours are the others. Of two hosts, the higher one waits: gobgp may
// take long to resolve a connection collision.
func (f *fabric) config(n int, others ...int) Config {
	c := Config{
		AS: testAS, RouterID: vtepAddr(n), VTEP: vtepAddr(n), Listen: []netip.Addr{f.bgpAddr(n)}, Port: f.port,
		RestartTime: 20 * time.Second,
	}
	for _, o := range others {
		c.Neighbours = append(c.Neighbours, Neighbour{Address: f.bgpAddr(o), AS: testAS, Port: f.port, Local: f.bgpAddr(n),
			Passive: n > o})
	}
	return c
}

func (f *fabric) host(n int, c Config) *host {
	f.t.Helper()
	h := &host{fabric: f, n: n}
	f.ns.Addr("under", vtepAddr(n).String()+"/24")
	var err error
	f.ns.Do(func() {
		h.vt, err = vxlan.New(vxlan.Config{Local: vtepAddr(n), Loops: []*loop.Loop{f.loop}, Pool: f.pool})
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(h.vt.Close)
	c.Log = hclog.New(&hclog.LoggerOptions{Output: &h.log, Level: hclog.Debug})
	if f.apart {
		h.bgp = newProcesses(f.t, c.Log.Named("process"), Open)
		c.Process = h.bgp.run
	}
	if h.s, err = New(c); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(h.s.Close)
	f.t.Cleanup(func() {
		if f.t.Failed() {
			f.t.Logf("host %d:\n%s", n, h.log.String())
		}
	})
	return h
}

// tenant is one network on one host.
type tenant struct {
	*host
	net *vswitch.Network
	tab *overlay.Table
	src *Network
}

func (h *host) tenant(vni uint32, c NetworkConfig) *tenant {
	h.t.Helper()
	x := &tenant{host: h}
	var err error
	if x.net, err = vswitch.NewNetwork(vswitch.Config{VNI: vni, Name: fmt.Sprint("net", vni),
		MaxEntries: 1024}); err != nil {
		h.t.Fatal(err)
	}
	if err := h.vt.AddNetwork(x.net, nil); err != nil {
		h.t.Fatal(err)
	}
	x.tab, x.src = overlay.NewTable(x.net, h.vt), h.s.Network(c)
	if err := x.src.Attach(x.tab); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(x.remove)
	return x
}

func (x *tenant) remove() {
	x.src.Detach(x.tab)
	x.tab.WithdrawAll(x.src)
	_ = x.vt.RemoveNetwork(x.net.VNI())
}

// attach adds a port to the network; with MACs it is a VM's.
func (x *tenant) attach(name string, macs ...vswitch.MAC) *vswitch.Attachment {
	x.t.Helper()
	pc := vswitch.PortConfig{Name: name, Kind: vswitch.KindTAP, Loop: x.loop}
	if len(macs) > 0 {
		pc.Kind, pc.MACs = vswitch.KindVM, macs
	}
	var at *vswitch.Attachment
	pc.Attached = func(a *vswitch.Attachment) { at = a }
	if _, err := x.net.Attach(nullPort{}, pc); err != nil {
		x.t.Fatal(err)
	}
	x.s.Retry()
	return at
}

// speak has a port send a meaningless frame from a MAC.
func (x *tenant) speak(a *vswitch.Attachment, m vswitch.MAC) {
	b := x.pool.Get()
	defer b.Free()
	b.Append(append(append([]byte{2, 0xff, 0xff, 0xff, 0xff, 1}, m[:]...), 0x88, 0xb5, byte(x.spoken>>8), byte(x.spoken)))
	x.spoken++ // a repeated frame would look like a forwarding loop
	x.loop.Do(func() { a.Input(x.loop, b, vswitch.Source{}) })
}

// behind returns the VTEP of a MAC in the switch's table.
func (x *tenant) behind(m vswitch.MAC) netip.Addr {
	e, ok := x.net.Lookup(m)
	if !ok || e.Kind != vswitch.KindVTEP.String() {
		return netip.Addr{}
	}
	for _, p := range x.vt.Peers(x.net.VNI()) {
		if p.Remote == e.Remote {
			return p.Addr
		}
	}
	return netip.Addr{}
}

func (x *tenant) peers() (out []netip.Addr) {
	for _, p := range x.vt.Peers(x.net.VNI()) {
		out = append(out, p.Addr)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// route returns a speaker's status of a MAC's route at a VTEP, without IP address.
func (x *tenant) route(m vswitch.MAC, vtep netip.Addr) (RouteStatus, bool) {
	for _, r := range x.s.Routes(x.net.Name()) {
		if r.MAC == m && r.VTEP == vtep && !r.IP.IsValid() {
			return r, true
		}
	}
	return RouteStatus{}, false
}
