package integration

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/integration/harness"
	"github.com/vnicd/vnicd/integration/lab"
)

// TestLinuxPeers: a plain Linux vxlan device is the remote peer of a vnicd, and a VM
// attached by QEMU's `-netdev tap` through a Linux bridge that holds vnicd's TAP port
// is in the same tenant network (MT-1, MT-2, MT-10).
func TestLinuxPeers(t *testing.T) {
	l, ctx := newLabWithoutModule(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	peer := must[*lab.Host](t)(l.Host("h2")) // runs no vnicd
	check(t, l.Underlay(h, netip.MustParsePrefix("192.0.2.1/24"), peer, netip.MustParsePrefix("192.0.2.2/24"), 1500))
	for _, c := range [][]string{
		{"ip", "link", "add", "vx100", "type", "vxlan", "id", "100", "dstport", "4789", "local", "192.0.2.2", "remote", "192.0.2.1", "dev", "ul"},
		{"ip", "link", "set", "vx100", "up"},
		{"ip", "addr", "add", "10.0.0.102/24", "dev", "vx100"},
	} {
		must[string](t)(peer.NS.Run(ctx, c...))
	}
	// The bridge with a QEMU-owned TAP; vnicd's TAP port joins it.
	for _, c := range [][]string{
		{"ip", "link", "add", "br0", "mtu", "1450", "type", "bridge"},
		{"ip", "link", "set", "br0", "up"},
		{"ip", "addr", "add", "10.0.0.254/24", "dev", "br0"},
		{"ip", "tuntap", "add", "vm2tap", "mode", "tap"},
		{"ip", "link", "set", "vm2tap", "mtu", "1450", "master", "br0", "up"},
	} {
		must[string](t)(h.NS.Run(ctx, c...))
	}
	check(t, h.Run(ctx, `vtep:
  local: 192.0.2.1
networks:
  - name: blue
    vni: 100
    peers: [192.0.2.2]
    tap: {name: blue0, bridge: br0}
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
`))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	tapVM := vmB
	tapVM.Tap = "vm2tap"
	var err error
	ms, err = l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, vmA)), must[qemu.Config](t)(h.Config(ctx, tapVM)))
	check(t, err)

	t.Run("ping", func(t *testing.T) {
		for _, to := range []string{"10.0.0.102", "10.0.0.2", "10.0.0.254"} {
			run(ctx, t, ms[0], "ping -c 3 -i 0.2 -W 5 "+to)
		}
		run(ctx, t, ms[1], "ping -c 3 -i 0.2 -W 5 10.0.0.102")
		must[string](t)(peer.NS.Run(ctx, "ping", "-c", "3", "-i", "0.2", "-W", "5", "10.0.0.1"))
		// Full-sized frames, not to be fragmented.
		run(ctx, t, ms[0], "ping -c 2 -i 0.2 -W 5 -M do -s 1422 10.0.0.102")
	})
	t.Run("iperf3", func(t *testing.T) {
		log := filepath.Join(l.Dir, "iperf3.log")
		srv := must[*harness.Process](t)(peer.NS.Start(log, nil, "iperf3", "-s", "--forceflush"))
		defer srv.Kill()
		eventually(ctx, t, "iperf3 listens", func() bool { return strings.Contains(srv.LogTail(), "listening") })
		for _, m := range ms {
			for _, opt := range []string{"", "-R", "-u -b 5M"} {
				out := run(ctx, t, m, "iperf3 -c 10.0.0.102 -t 2 "+opt)
				for line := range strings.Lines(out) {
					if strings.Contains(line, "receiver") {
						t.Logf("%s iperf3 %s: %s", m.Name(), opt, strings.TrimSpace(line))
					}
				}
			}
		}
	})
	quietKernels(ctx, t, ms...)
}
