package vxlan_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/ways"
)

const fabricHosts = 3

// fabric is three hosts on one underlay, each with two tenants whose endpoints have the same addresses: endpoint i of
// either tenant is 10.0.0.i with MAC 02:00:00:00:00:0i, in its own namespace.
type fabric struct {
	t     *testing.T
	loops []*loop.Loop
	pool  *frame.Pool
	under [fabricHosts]*nstest.NS
	vt    [fabricHosts]*vxlan.VTEP
	nets  [fabricHosts][2]*vswitch.Network
	ends  [fabricHosts][2]*nstest.NS
	taps  [fabricHosts][2]*tap.TAP
}

func newFabric(t *testing.T) *fabric {
	f := &fabric{t: t, loops: newLoops(t, 2)}
	f.pool = must[*frame.Pool](t)(frame.NewPool(frame.Config{Count: 4096}))
	wire := nstest.New(t, "wire")
	wire.IP("link", "add", "sw", "type", "bridge")
	wire.IP("link", "set", "sw", "up")
	for h := range fabricHosts {
		f.under[h] = nstest.New(t, fmt.Sprint("h", h))
		dev := fmt.Sprint("u", h)
		nstest.Pair(f.under[h], wire, dev, 1500)
		wire.IP("link", "set", dev, "master", "sw")
		f.under[h].Addr(dev, fmt.Sprintf("192.0.2.%d/24", h+1))
		for tenant := range 2 {
			f.ends[h][tenant] = nstest.New(t, fmt.Sprintf("t%d-%d", tenant, h))
			f.nets[h][tenant] = must[*vswitch.Network](t)(vswitch.NewNetwork(vswitch.Config{VNI: uint32(tenant + 1),
				Name: fmt.Sprint("tenant", tenant), Pool: f.pool}))
		}
		f.start(h)
		for tenant := range 2 {
			f.plug(h, tenant, h+1)
		}
	}
	t.Cleanup(func() {
		for h := range fabricHosts {
			if t.Failed() {
				j, _ := json.MarshalIndent([]any{f.vt[h].Status(), f.nets[h][0].Status(), f.nets[h][1].Status()}, "", " ")
				t.Logf("host %d: %s", h, j)
			}
			for tenant := range 2 {
				f.unplug(h, tenant)
			}
			f.vt[h].Close()
		}
		if n := f.pool.InUse(); n != 0 {
			t.Errorf("%d buffers leaked", n)
		}
	})
	return f
}

// start creates a host's VTEP.
func (f *fabric) start(h int) {
	f.t.Helper()
	f.under[h].Do(func() {
		f.vt[h] = must[*vxlan.VTEP](f.t)(vxlan.New(vxlan.Config{Local: netip.AddrFrom4([4]byte{192, 0, 2, byte(h + 1)}),
			Loops: f.loops, Pool: f.pool, Segmentation: ways.Segmentation(), ShortPath: shortPath(ways.ShortPath())}))
	})
	var peers []netip.Addr
	for i := range fabricHosts {
		if i != h {
			peers = append(peers, netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}))
		}
	}
	for _, n := range f.nets[h] {
		if err := f.vt[h].AddNetwork(n, peers); err != nil {
			f.t.Fatal(err)
		}
	}
}

// plug puts endpoint i of a tenant on a host.
func (f *fabric) plug(h, tenant, i int) {
	f.t.Helper()
	f.ends[h][tenant].Do(func() {
		f.taps[h][tenant] = must[*tap.TAP](f.t)(tap.Open(tap.Config{Offloads: true, Name: "end", Network: f.nets[h][tenant],
			Loop: f.loops[h%2], Pool: f.pool, MAC: vswitch.MAC{2, 0, 0, 0, 0, byte(i)},
			Addrs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 24)}}))
	})
}

func (f *fabric) unplug(h, tenant int) {
	if t := f.taps[h][tenant]; t != nil {
		if err := t.Close(); err != nil {
			f.t.Error(err)
		}
		f.taps[h][tenant] = nil
	}
}

func ip(i int) string { return fmt.Sprintf("10.0.0.%d", i) }

// everybody pings from each endpoint of a tenant to the others; where[i] is the host of endpoint i+1, -1 = none.
func (f *fabric) everybody(tenant int, where [fabricHosts]int) {
	f.t.Helper()
	for i, from := range where {
		for k, to := range where {
			if i != k && from >= 0 && to >= 0 {
				f.ends[from][tenant].Ping(ip(k + 1))
			}
		}
	}
}

// Three hosts, two tenants with the same subnet and MACs: full reachability inside a tenant and none across, also after
// an endpoint has moved to another host and after a host has restarted (MT-9).
func TestThreeHosts(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	f := newFabric(t)
	home := [fabricHosts]int{0, 1, 2}
	f.everybody(0, home)
	f.everybody(1, home)

	// Tenant 1 has no endpoint 3 any more; tenant 0's still exists and must not answer for it.
	f.unplug(2, 1)
	if out, err := f.ends[0][1].Exec("ping", "-c2", "-W1", ip(3)); err == nil {
		t.Errorf("an endpoint of another tenant answered:\n%s", out)
	}
	f.everybody(0, home)

	// Endpoint 1 of tenant 1 leaves host 0, and endpoint 3 returns there instead of on host 2.
	f.unplug(0, 1)
	f.plug(0, 1, 3)
	f.everybody(1, [fabricHosts]int{-1, 1, 0})
	f.everybody(0, home)

	// A host is stopped: the others are not affected. After its restart all endpoints are reachable again.
	f.vt[1].Close()
	f.ends[0][0].Ping(ip(3))
	if _, err := f.ends[0][0].Exec("ping", "-c2", "-W1", ip(2)); err == nil {
		t.Error("a stopped host answered")
	}
	f.start(1)
	f.everybody(0, home)
	f.everybody(1, [fabricHosts]int{-1, 1, 0})
	for h := range fabricHosts {
		s := f.vt[h].Status()
		if len(s.Refused) > 0 && h != 1 {
			t.Errorf("host %d refused %+v", h, s.Refused)
		}
	}
}
