package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// evpnLab has three hosts that learn each other's addresses by BGP only: no static peers, no flooding of unknown
// unicast. Each has a Linux bridge that holds vnicd's TAP port.
type evpnLab struct {
	*lab.Lab
	ctx   context.Context
	t     *testing.T
	hosts [3]*lab.Host
}

func newEVPNLab(t *testing.T) *evpnLab {
	t.Helper()
	l, ctx := newLab(t)
	w := &evpnLab{Lab: l, ctx: ctx, t: t}
	wire := must[*harness.Namespace](t)(harness.NewNamespace("vnicd-wire"))
	l.Add(func() { _ = wire.Close() })
	must[string](t)(wire.Shell(ctx, "ip link add sw type bridge && ip link set sw up"))
	for i := range w.hosts {
		h := must[*lab.Host](t)(l.Host(fmt.Sprint("h", i+1)))
		w.hosts[i] = h
		dev := fmt.Sprint("w", i)
		check(t, harness.AddVeth(h.NS, "ul", wire, dev, 1500))
		must[string](t)(wire.Run(ctx, "ip", "link", "set", dev, "master", "sw"))
		check(t, h.NS.AddAddress("ul", netip.MustParsePrefix(hostIP(i)+"/24")))
		check(t, h.RealWire())
		must[string](t)(h.NS.Shell(ctx,
			"ip link add tenant mtu 1450 type bridge && ip link set tenant up && ip tuntap add vmtap mode tap && ip link set vmtap mtu 1450 master tenant up"))
	}
	for i, h := range w.hosts {
		var neighbours []string
		for k := range w.hosts {
			if k != i {
				neighbours = append(neighbours, fmt.Sprintf("{address: %s, passive: %v}", hostIP(k), i > k))
			}
		}
		text := fmt.Sprintf("vtep: {local: %s}\nevpn: {as: 65001, neighbours: [%s]}\nnetworks:\n  - {name: blue, vni: 100, flood-unknown: false, tap: {name: blue0, bridge: tenant}}\n",
			hostIP(i), strings.Join(neighbours, ", "))
		if i == 0 {
			text += fmt.Sprintf("vms:\n  - {name: %s, network: blue, mac: %q}\n", vmA.Name, vmA.MAC)
		}
		check(t, h.Run(ctx, text))
	}
	return w
}

// route returns a host's route for a MAC, without IP address, at another host's VTEP.
func (w *evpnLab) route(h *lab.Host, mac, vtep string) (r evpn.RouteStatus, ok bool) {
	w.t.Helper()
	var list []evpn.RouteStatus
	check(w.t, json.Unmarshal([]byte(must[string](w.t)(h.CLI(w.ctx, "evpn", "routes", "-j"))), &list))
	for _, r := range list {
		if r.MAC.String() == mac && r.VTEP.String() == vtep && !r.IP.IsValid() {
			return r, true
		}
	}
	return r, false
}

// bridged configures a VM whose card is attached to a host's Linux bridge.
func (w *evpnLab) bridged(v lab.VM, h *lab.Host) qemu.Config {
	w.t.Helper()
	v.Tap = "vmtap"
	return movable(w.ctx, w.t, w.Lab, h, v)
}

// TestVMMoves: QEMU migrates a VM from one host to another and back while a VM on a third host exchanges pings, TCP
// data and RC messages with it. All three continue. The VM's type 2 route moves with a higher sequence number, nothing
// stays at the old host, and the connection's tuple follows. The migrated VM uses Linux rxe, whose state moves with the
// VM's memory. Our HCA's state cannot move: QEMU's generic vhost-user device forbids migration.
func TestVMMoves(t *testing.T) {
	w := newEVPNLab(t)
	h := w.hosts
	var ms []*qemu.Machine
	dumpOnFailure(t, h[:], &ms)
	stays, moves := vmA, vmB
	stays.MemoryMiB, moves.MemoryMiB = 512, 512
	ms = must[[]*qemu.Machine](t)(w.Boot(w.ctx, must[qemu.Config](t)(h[0].Config(w.ctx, stays)), w.bridged(moves, h[1])))
	a, b := ms[0], ms[1]
	check(t, both(func() error { return lab.LoadModule(w.ctx, a) }, func() error {
		// Both hosts share the disk; from here on nothing writes to it.
		if _, err := b.Run(w.ctx, "sync; mount -o remount,ro /"); err != nil {
			return err
		}
		return harness.AddRXE(w.ctx, b, "rxe0", "eth0")
	}))
	check(t, lab.WaitRDMA(w.ctx, b, "rxe0"))
	prepareFlows(w.ctx, t, ms...)
	must[*qemu.Process](t)(b.StartShell(w.ctx, "exec python3 /tmp/talk.py serve"))
	must[*qemu.Process](t)(b.StartShell(w.ctx, "exec rping -s -a 0.0.0.0 -P"))
	check(t, harness.WaitGuest(w.ctx, b, "rdma resource show cm_id | grep -q 'state LISTEN' && ss -ltnH | grep -q :7000"))
	flows := []*flow{
		newFlow(w.ctx, t, a, "ping", "ttl=", "ping -n -i 0.1 10.0.0.2"),
		newFlow(w.ctx, t, a, "tcp", "echo", "python3 /tmp/talk.py ask 10.0.0.2"),
		newFlow(w.ctx, t, a, "rc", "ping data", "rping -c -a 10.0.0.2 -v -C 10000000"),
	}
	connection := func() vmConnection {
		t.Helper()
		for _, c := range connections(w.ctx, t, h[0]) {
			if c.State == "established" && c.Tuple != nil {
				return c
			}
		}
		t.Fatalf("no connection:\n%s", must[string](t)(h[0].CLI(w.ctx, "connection")))
		return vmConnection{}
	}
	first := connection()
	answers := make([]int, len(flows))
	for i, to := range []int{2, 1} {
		from := 3 - to
		before, ok := w.route(h[0], moves.MAC, hostIP(from))
		if !ok || !before.Active || connection().Tuple.VTEP.String() != hostIP(from) {
			t.Fatalf("the VM's route is not at %s: %+v, tuple %+v", h[from].Name, before, connection().Tuple)
		}
		var calm, moving []string
		for k, f := range flows {
			f.goesOn("at " + h[from].Name)
			calm = append(calm, fmt.Sprint(f.name, " ", f.longest(answers[k])))
			answers[k] = f.answers()
		}
		downtime := beginMigration(w.ctx, t, w.Lab, b, w.bridged(moves, h[to]), fast).arrives(true)
		for k, f := range flows {
			f.goesOn("after the move to " + h[to].Name)
			moving = append(moving, fmt.Sprint(f.name, " ", f.longest(answers[k])))
			answers[k] = f.answers()
		}
		t.Logf("the VM moved from %s to %s (QEMU stopped it for %v); no answer for: %s (before the move: %s)", h[from].Name,
			h[to].Name, downtime, strings.Join(moving, ", "), strings.Join(calm, ", "))
		var after evpn.RouteStatus
		for _, x := range h {
			eventually(w.ctx, t, "no route remains at "+h[from].Name,
				func() bool { _, stays := w.route(x, moves.MAC, hostIP(from)); return !stays })
			eventually(w.ctx, t, "the route is at "+h[to].Name, func() (ok bool) {
				after, ok = w.route(x, moves.MAC, hostIP(to))
				return ok && after.Active
			})
		}
		if after.Sequence <= before.Sequence {
			t.Errorf("sequence number %d at %s, then %d at %s", before.Sequence, h[from].Name, after.Sequence, h[to].Name)
		}
		c := connection()
		if c.LocalID != first.LocalID || c.LocalQPN != first.LocalQPN || c.RemoteQPN != first.RemoteQPN {
			t.Errorf("not the same connection: %+v, was %+v", c, first)
		}
		if c.Tuple.VTEP.String() != hostIP(to) || int(c.Tuple.Moves) != i+1 {
			t.Errorf("after move %d: tuple %+v", i+1, c.Tuple)
		}
	}
	t.Logf("on h1:\n%s%s", must[string](t)(h[0].CLI(w.ctx, "connection")),
		must[string](t)(h[0].CLI(w.ctx, "evpn", "routes")))
	quietKernels(w.ctx, t, ms...)
}
