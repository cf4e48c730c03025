package integration

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestLinuxPeers: the remote peer of a vnicd is a Linux bridge with a vxlan device and a VM behind it. A local VM
// attached by QEMU's `-netdev tap` to a Linux bridge that holds vnicd's TAP port is in the same tenant network (MT-1,
// MT-2, MT-10). The VMs also communicate in a VLAN.
func TestLinuxPeers(t *testing.T) {
	t.Run("IPv4", func(t *testing.T) {
		linuxPeers(t, netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("192.0.2.2/24"), 1500, 1450)
	})
	t.Run("IPv6 jumbo", func(t *testing.T) {
		linuxPeers(t, netip.MustParsePrefix("2001:db8::1/64"), netip.MustParsePrefix("2001:db8::2/64"), 9000, 8930)
	})
}

func linuxPeers(t *testing.T, ours, theirs netip.Prefix, mtu, inner int) {
	l, ctx := newLabWithoutModule(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	peer := must[*lab.Host](t)(l.Host("h2")) // runs no vnicd
	check(t, l.Underlay(h, ours, peer, theirs, mtu))
	// Bridges with QEMU's TAPs: vnicd's TAP port joins the local one, the kernel's vxlan device the remote one.
	for _, x := range []struct {
		host *lab.Host
		tap  string
		addr string
	}{{h, "vm2tap", "10.0.0.254/24"}, {peer, "vm3tap", "10.0.0.102/24"}} {
		must[string](t)(x.host.NS.Shell(ctx,
			fmt.Sprintf("set -e; ip link add br0 mtu %[1]d type bridge; ip link set br0 up; ip addr add %[3]s dev br0\n"+
				"ip tuntap add %[2]s mode tap; ip link set %[2]s mtu %[1]d master br0 up", inner, x.tap, x.addr)))
	}
	must[string](t)(peer.NS.Shell(ctx,
		fmt.Sprintf("set -e; ip link add vx100 type vxlan id 100 dstport 4789 local %s remote %s dev ul\n"+
			"ip link set vx100 master br0 up", theirs.Addr(), ours.Addr())))
	check(t, h.Run(ctx, fmt.Sprintf(`vtep:
  local: %q
networks:
  - name: blue
    vni: 100
    peers: [%q]
    tap: {name: blue0, bridge: br0}
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
`, ours.Addr(), theirs.Addr())))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	vm := func(host *lab.Host, v lab.VM) qemu.Config {
		v.MTU, v.MemoryMiB = inner, 512
		return must[qemu.Config](t)(host.Config(ctx, v))
	}
	bridged, far := vmB, lab.VM{Name: "vm3", MAC: "02:00:00:00:00:03", Addr: "10.0.0.3/24", Tap: "vm3tap"}
	bridged.Tap = "vm2tap"
	var err error
	ms, err = l.Boot(ctx, vm(h, vmA), vm(h, bridged), vm(peer, far))
	check(t, err)

	t.Run("ping", func(t *testing.T) {
		for _, to := range []string{"10.0.0.102", "10.0.0.2", "10.0.0.3", "10.0.0.254"} {
			// Full-sized frames that must not be fragmented.
			run(ctx, t, ms[0], fmt.Sprintf("ping -c 3 -i 0.2 -W 5 -M do -s %d %s", inner-28, to))
		}
		run(ctx, t, ms[1], "ping -c 3 -i 0.2 -W 5 10.0.0.102")
		must[string](t)(peer.NS.Run(ctx, "ping", "-c", "3", "-i", "0.2", "-W", "5", "10.0.0.1"))
	})
	iperf := func(t *testing.T, m *qemu.Machine, to string, opts ...string) {
		t.Helper()
		for _, opt := range opts {
			out := run(ctx, t, m, "iperf3 -c "+to+" "+opt)
			for line := range strings.Lines(out) {
				if strings.Contains(line, "receiver") {
					t.Logf("%s iperf3 %s %s: %s", m.Name(), to, opt, strings.TrimSpace(line))
				}
			}
		}
	}
	t.Run("iperf3", func(t *testing.T) {
		log := filepath.Join(l.Dir, "iperf3.log")
		srv := must[*harness.Process](t)(peer.NS.Start(log, nil, "iperf3", "-s", "--forceflush"))
		defer srv.Kill()
		eventually(ctx, t, "iperf3 listens", func() bool { return strings.Contains(srv.LogTail(), "listening") })
		for _, m := range ms[:2] {
			iperf(t, m, "10.0.0.102", "-t 1", "-t 1 -R", "-t 1 -u -b 5M")
		}
	})
	t.Run("VLAN", func(t *testing.T) {
		for i, m := range ms {
			run(ctx, t, m,
				fmt.Sprintf("set -e; modprobe 8021q; ip link add link eth0 name eth0.7 type vlan id 7; ip link set eth0.7 mtu %d up; ip addr add 10.0.7.%d/24 dev eth0.7",
					inner-4, i+1))
		}
		for i, m := range ms {
			for k := range ms {
				if i != k {
					run(ctx, t, m, fmt.Sprintf("ping -c 3 -i 0.2 -W 5 -M do -s %d 10.0.7.%d", inner-4-28, k+1))
				}
			}
		}
		run(ctx, t, ms[2], "iperf3 -s -D && until ss -Hltn sport = 5201 | grep -q .; do sleep 0.1; done")
		for _, m := range ms[:2] {
			iperf(t, m, "10.0.7.3", "-t 1", "-t 1 -R", "-t 1 -u -b 5M")
		}
		// Addresses are learnt per VLAN.
		if out := must[string](t)(h.CLI(ctx, "fdb", "show",
			"blue")); !regexp.MustCompile(`(?m)^02:00:00:00:00:03 +vlan 7 .*vtep `).MatchString(out) {
			t.Errorf("the far VM in its VLAN is not in the table:\n%s", out)
		}
	})
	quietKernels(ctx, t, ms...)
}
