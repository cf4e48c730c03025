package evpn

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/testutil"
)

// Two speakers advertise the addresses at their ports (flood lists, MACs, IP addresses) and withdraw them.
func TestTwo(t *testing.T) { both(t, testTwo) }

func testTwo(t *testing.T, f *fabric) {
	one, two := f.host(1, f.config(1, 2)), f.host(2, f.config(2, 1))
	a, b := one.tenant(100, NetworkConfig{}), two.tenant(100, NetworkConfig{})
	a.attach("vm1", hwaddr(1))
	tap := b.attach("tap2")
	b.speak(tap, hwaddr(2))

	testutil.Eventually(t, "flood lists", func() bool {
		return slices.Equal(a.peers(), []netip.Addr{vtepAddr(2)}) && slices.Equal(b.peers(), []netip.Addr{vtepAddr(1)})
	})
	testutil.Eventually(t, "a VM's MAC and a learnt one",
		func() bool { return b.behind(hwaddr(1)) == vtepAddr(1) && a.behind(hwaddr(2)) == vtepAddr(2) })
	testutil.Eventually(t, "status", func() bool {
		st := one.s.Status()
		return len(st.Sessions) == 1 && st.Sessions[0].Received == 2
	})
	if st := one.s.Status(); len(st.Sessions) != 1 || st.Sessions[0].State != "established" ||
		st.Sessions[0].Received != 2 || st.Sessions[0].Advertised != 2 ||
		len(st.Networks) != 1 || st.Networks[0].MACs != 1 || st.Networks[0].VTEPs != 1 || st.Networks[0].Advertised != 1 {
		t.Errorf("status %+v", st)
	}

	// The same VNI means the same network; routes of other networks are not installed, in either direction.
	other := one.tenant(101, NetworkConfig{})
	other.attach("vm3", hwaddr(3))
	testutil.Eventually(t, "the foreign route is there, unused", func() bool {
		return slices.ContainsFunc(two.s.Routes(""), func(r RouteStatus) bool {
			return r.MAC == hwaddr(3) && !r.Active && r.Why == errTarget.Error()
		})
	})
	if _, ok := b.net.Lookup(hwaddr(3)); ok {
		t.Error("a MAC of another network was installed")
	}

	// A network is added after its routes have arrived.
	late := two.tenant(101, NetworkConfig{})
	testutil.Eventually(t, "routes that arrived before the network was added",
		func() bool { return late.behind(hwaddr(3)) == vtepAddr(1) })

	// Removed ports and networks are withdrawn.
	a.net.Port("vm1").Close()
	one.s.Retry()
	testutil.Eventually(t, "withdrawal of a MAC", func() bool { _, ok := b.net.Lookup(hwaddr(1)); return !ok })
	other.remove()
	testutil.Eventually(t, "withdrawal of a network", func() bool {
		return len(late.peers()) == 0 && !late.behind(hwaddr(3)).IsValid()
	})
	one.s.Close()
	testutil.Eventually(t, "end of the session", func() bool { return len(b.peers()) == 0 })
}

// Addresses that appear while sessions start are advertised: gobgp has a gap between its initial dump and its change
// notifications.
func TestBeginning(t *testing.T) {
	const others, most = 5, 180 // together the maximum of a network
	f := newFabric(t)
	var ns []int
	for n := range others {
		ns = append(ns, n+2)
	}
	one := f.host(1, f.config(1, ns...))
	a := one.tenant(100, NetworkConfig{})
	up := func(h *host) bool {
		return !slices.ContainsFunc(h.s.Status().Sessions, func(s SessionStatus) bool { return s.State != "established" })
	}
	var tenants []*tenant
	for _, n := range ns {
		tenants = append(tenants, f.host(n, f.config(n, 1)).tenant(100, NetworkConfig{}))
	}
	told := map[int][]vswitch.MAC{}
	for i := range most {
		for _, b := range tenants {
			if !up(b.host) {
				m := hwaddr(b.n<<16 + i)
				b.attach(fmt.Sprint("vm", i), m)
				told[b.n] = append(told[b.n], m)
			}
		}
		time.Sleep(time.Millisecond)
	}
	testutil.Eventually(t, "the sessions are up", func() bool { return up(one) })
	for n, macs := range told {
		for _, m := range macs {
			testutil.Eventually(t, fmt.Sprintf("MAC %v of host %d, which advertised %d", m, n, len(macs)),
				func() bool { return a.behind(m) == vtepAddr(n) })
		}
	}
}

// Speakers that connect to each other at the same moment establish a session (RFC 4271 section 6.8).
func TestCollision(t *testing.T) {
	f := newFabric(t)
	var hosts []*host
	for n := range 4 {
		var others []int
		for o := range 4 {
			if o != n {
				others = append(others, o+1)
			}
		}
		c := f.config(n+1, others...)
		for i := range c.Neighbours {
			c.Neighbours[i].Passive = false
		}
		hosts = append(hosts, f.host(n+1, c))
	}
	start := time.Now()
	for _, h := range hosts {
		testutil.Eventually(t, "all sessions are up", func() bool {
			return !slices.ContainsFunc(h.s.Status().Sessions, func(s SessionStatus) bool { return s.State != "established" })
		})
	}
	t.Logf("all sessions up after %v", time.Since(start).Round(time.Millisecond))
}

// An address moves, as a source of frames at a port and as a VM's own. Sequence numbers rise, and nothing remains at
// the old location.
func TestMobility(t *testing.T) { both(t, testMobility) }

func testMobility(t *testing.T, f *fabric) {
	one, two := f.host(1, f.config(1, 2, 3)), f.host(2, f.config(2, 1, 3))
	three := f.host(3, f.config(3, 1, 2))
	a, b, c := one.tenant(100, NetworkConfig{}), two.tenant(100, NetworkConfig{}), three.tenant(100, NetworkConfig{})
	m := hwaddr(9)
	at1, at2 := a.attach("tap1"), b.attach("tap2")
	for i, x := range []*tenant{a, b, a} {
		x.speak(map[*tenant]*vswitch.Attachment{a: at1, b: at2}[x], m)
		for _, y := range []*tenant{a, b, c} {
			if y != x {
				testutil.Eventually(t, fmt.Sprintf("move %d: host %d knows that it is at host %d", i, y.n, x.n),
					func() bool { return y.behind(m) == vtepAddr(x.n) })
			}
		}
		r, ok := c.route(m, vtepAddr(x.n))
		if !ok || int(r.Sequence) != i || !r.Active {
			t.Errorf("move %d: route %+v %v", i, r, ok)
		}
		old := map[*tenant]*tenant{a: b, b: a}[x]
		testutil.Eventually(t, "nothing stays at the old place", func() bool {
			_, ok := c.route(m, vtepAddr(old.n))
			return !ok
		})
	}
}
