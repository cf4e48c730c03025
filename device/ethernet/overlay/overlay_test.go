package overlay

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type nullPort struct{}

func (nullPort) Deliver(*loop.Loop, *frame.Buf, vswitch.Destination) {}

func mac(n int) vswitch.MAC { return vswitch.MAC{2, 0, 0, 0, byte(n >> 8), byte(n)} }

func ip(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}) }

func newNetwork(t *testing.T) *vswitch.Network {
	t.Helper()
	n, err := vswitch.NewNetwork(vswitch.Config{VNI: 7, Name: "seven", MaxEntries: 64, MaxNeighbours: 64})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// other is a source with another rank.
type other struct {
	API
	rank int
}

func (o *other) Name() string { return fmt.Sprint("other", o.rank) }
func (o *other) Rank() int    { return o.rank }

// The table against a map: sources add, contradict and withdraw routes, ports are added and removed.
func TestModel(t *testing.T) {
	n := newNetwork(t)
	tab := NewTable(n, nil)
	rng := rand.New(rand.NewPCG(1, 2))
	sources := []TableSource{&Static{}, &API{}, &other{rank: 30}}
	type offers map[TableSource]Route
	model := map[Key]offers{}
	ports := map[string]*vswitch.Attachment{}
	randomKey := func() Key {
		vlan := []uint16{0, 5}[rng.IntN(2)]
		if rng.IntN(2) == 0 {
			return Key{Kind: MAC, MAC: mac(rng.IntN(8) + 1), VLAN: vlan}
		}
		return Key{Kind: IP, IP: ip(rng.IntN(8) + 1), VLAN: vlan}
	}
	for step := range 5000 {
		src := sources[rng.IntN(len(sources))]
		k := randomKey()
		switch r := rng.IntN(100); {
		case r < 55:
			route := Route{Key: k}
			if k.Kind == MAC {
				route.Port = fmt.Sprint("p", rng.IntN(4))
			} else {
				route.At = mac(rng.IntN(4) + 100)
			}
			_ = tab.Set(src, route)
			if model[k] == nil {
				model[k] = offers{}
			}
			model[k][src] = route
		case r < 85:
			_, had := model[k][src]
			if tab.Withdraw(src, k) != had {
				t.Fatalf("step %d: Withdraw %+v", step, k)
			}
			delete(model[k], src)
		case r < 86:
			tab.WithdrawAll(src)
			for _, o := range model {
				delete(o, src)
			}
		default:
			name := fmt.Sprint("p", rng.IntN(4))
			if a := ports[name]; a != nil {
				a.Close()
				delete(ports, name)
			} else {
				var err error
				if ports[name], err = n.Attach(nullPort{}, vswitch.PortConfig{Name: name, Kind: vswitch.KindTAP}); err != nil {
					t.Fatal(err)
				}
			}
			tab.Retry()
		}
		// The installed entries: MAC -> port, IP -> MAC.
		type place struct {
			port string
			mac  vswitch.MAC
		}
		got, want, total := map[Key]place{}, map[Key]place{}, 0
		for _, e := range n.Entries() {
			got[Key{Kind: MAC, MAC: e.MAC, VLAN: e.VLAN}] = place{port: e.Port}
		}
		for _, x := range n.Neighbours() {
			got[Key{Kind: IP, IP: x.IP, VLAN: x.VLAN}] = place{mac: x.MAC}
		}
		for k, o := range model {
			total += len(o)
			for _, s := range sources { // ordered by rank
				if r, ok := o[s]; ok {
					if k.Kind == IP || ports[r.Port] != nil {
						want[k] = place{r.Port, r.At}
					}
					break
				}
			}
		}
		if !maps.Equal(got, want) {
			t.Fatalf("step %d: installed %v, want %v", step, got, want)
		}
		if tab.count != total {
			t.Fatalf("step %d: %d routes counted, %d in the model", step, tab.count, total)
		}
	}
	if !slices.IsSortedFunc(tab.Routes(), func(a, b RouteStatus) int { return cmp.Compare(a.Kind, b.Kind) }) {
		t.Error("routes are not ordered")
	}
}

// With tunnels: peers from several sources, MACs behind them, and routes that wait for their peer.
func TestTunnels(t *testing.T) {
	ns := nstest.New(t, "a")
	peer := nstest.New(t, "b")
	nstest.Pair(ns, peer, "under", 1500)
	ns.Addr("under", "192.0.2.1/24")
	l, err := loop.New(loop.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	pool, err := frame.NewPool(frame.Config{Count: 64})
	if err != nil {
		t.Fatal(err)
	}
	var vt *vxlan.VTEP
	ns.Do(func() {
		if vt, err = vxlan.New(vxlan.Config{Local: netip.MustParseAddr("192.0.2.1"), Loops: []*loop.Loop{l},
			Pool: pool}); err != nil {
			t.Fatal(err)
		}
	})
	defer vt.Close()
	n := newNetwork(t)
	if err := vt.AddNetwork(n, nil); err != nil {
		t.Fatal(err)
	}
	tab := NewTable(n, vt)
	two, three := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")
	peers := func() (s string) {
		for _, p := range vt.Status().Networks[0].Peers {
			s += p.Addr.String() + " "
		}
		return s
	}
	static, api := &Static{Peers: []netip.Addr{two}, LearnPeers: true}, &API{}
	if err := static.Attach(tab); err != nil {
		t.Fatal(err)
	}
	behind := func(at netip.Addr) Route { return Route{Key: Key{Kind: MAC, MAC: mac(1)}, Behind: at} }
	if err := tab.Set(api, behind(three)); !errors.Is(err, ErrNoPeer) {
		t.Errorf("MAC behind a host that is no peer: %v", err)
	}
	if r := tab.Routes(); len(r) != 2 || r[1].Active || !strings.Contains(r[1].Why, "not a peer") {
		t.Errorf("%+v", r)
	}
	if err := tab.Set(api, Route{Key: Key{Kind: Peer, VTEP: three}}); err != nil {
		t.Fatal(err)
	}
	check := func(what, wantPeers string, remote string) {
		t.Helper()
		if got := peers(); got != wantPeers {
			t.Errorf("%s: peers %q, want %q", what, got, wantPeers)
		}
		e, ok := n.Lookup(mac(1))
		if ok != (remote != "") {
			t.Errorf("%s: %+v %v", what, e, ok)
		} else if ok {
			if id, _ := vt.Remote(7, netip.MustParseAddr(remote)); e.Remote != id {
				t.Errorf("%s: behind %d, want %d", what, e.Remote, id)
			}
		}
	}
	check("its peer was added", "192.0.2.2 192.0.2.3 ", "192.0.2.3")
	if err := tab.Set(static, behind(two)); err != nil {
		t.Fatal(err)
	}
	check("a route from a source of lower rank", "192.0.2.2 192.0.2.3 ", "192.0.2.2")
	tab.Withdraw(static, behind(two).Key)
	check("its withdrawal", "192.0.2.2 192.0.2.3 ", "192.0.2.3")
	if err := tab.Set(api, Route{Key: Key{Kind: Peer, VTEP: two}}); err != nil {
		t.Fatal(err)
	}
	static.Detach(tab)
	tab.WithdrawAll(static)
	check("a peer of two sources loses one", "192.0.2.2 192.0.2.3 ", "192.0.2.3")
	if vt.Status().Networks[0].Learn {
		t.Error("peers are still being learnt")
	}
	tab.Withdraw(api, Key{Kind: Peer, VTEP: three})
	check("its peer was removed", "192.0.2.2 ", "")
	if err := tab.Set(api, Route{Key: Key{Kind: Peer, VTEP: three}}); err != nil {
		t.Fatal(err)
	}
	check("and added again", "192.0.2.2 192.0.2.3 ", "192.0.2.3")
	tab.WithdrawAll(api)
	check("silence", "", "")
	if tab.count != 0 || len(tab.Routes()) != 0 {
		t.Errorf("%d routes left: %+v", tab.count, tab.Routes())
	}
}

func TestRefused(t *testing.T) {
	n := newNetwork(t)
	if _, err := n.Attach(nullPort{}, vswitch.PortConfig{Name: "vm", Kind: vswitch.KindVM, MACs: []vswitch.MAC{mac(9)},
		IPs: []netip.Addr{ip(9)}}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Attach(nullPort{}, vswitch.PortConfig{Name: "tap", Kind: vswitch.KindTAP}); err != nil {
		t.Fatal(err)
	}
	tab, api := NewTable(n, nil), &API{}
	for _, r := range []Route{
		{}, {Key: Key{Kind: 9}}, {Key: Key{Kind: Peer}}, {Key: Key{Kind: Peer, VTEP: netip.MustParseAddr("224.0.0.1")}},
		{Key: Key{Kind: MAC, MAC: mac(1)}}, {Key: Key{Kind: MAC}, Port: "tap"},
		{Key: Key{Kind: MAC, MAC: mac(1)}, Port: "tap", Behind: ip(1)},
		{Key: Key{Kind: IP, IP: ip(1)}}, {Key: Key{Kind: IP}, At: mac(1)},
	} {
		if err := tab.Set(api, r); err == nil {
			t.Errorf("%+v was accepted", r)
		}
	}
	if len(tab.Routes()) != 0 {
		t.Errorf("%+v", tab.Routes())
	}
	for _, c := range []struct {
		r    Route
		want error
	}{
		{Route{Key: Key{Kind: Peer, VTEP: ip(1)}}, ErrNoTunnel},
		{Route{Key: Key{Kind: MAC, MAC: mac(1)}, Behind: ip(1)}, ErrNoTunnel},
		{Route{Key: Key{Kind: MAC, MAC: mac(1)}, Port: "none"}, ErrNoPort},
		{Route{Key: Key{Kind: MAC, MAC: mac(9)}, Port: "tap"}, vswitch.ErrMACInUse},
		{Route{Key: Key{Kind: IP, IP: ip(9)}, At: mac(1)}, vswitch.ErrIPInUse},
	} {
		if err := tab.Set(api, c.r); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.r, err, c.want)
		}
	}
	if err := (&Static{LearnPeers: true}).Attach(tab); !errors.Is(err, ErrNoTunnel) {
		t.Errorf("learning peers without a vtep: %v", err)
	}
	for k := Peer; k <= IP; k++ {
		b, _ := k.MarshalText()
		var back Kind
		if err := back.UnmarshalText(b); err != nil || back != k {
			t.Errorf("%s: %v %v", b, back, err)
		}
	}
}
