package integration

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// previousModule is the source of the guest module of the previous release; until there is one, of the time before
// feature bits. `git archive` of guestdrv/linux makes the next one.
const previousModule = "testdata/module-previous.tar.xz"

// buildPrevious compiles it as /host/previous.ko of the guests.
func buildPrevious(ctx context.Context, t *testing.T, l *lab.Lab) {
	t.Helper()
	src, out := t.TempDir(), t.TempDir()
	if b, err := exec.CommandContext(ctx, "tar", "-xJf", previousModule, "-C", src).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", previousModule, err, b)
	}
	check(t, l.Builder.Module(ctx, src, out))
	if b, err := exec.CommandContext(ctx, "cp", filepath.Join(out, "vnicd.ko"),
		filepath.Join(l.Share, "previous.ko")).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
}

// accepted returns which features of the ABI the driver of a VM has accepted.
func accepted(ctx context.Context, t *testing.T, h *lab.Host, vm string) uint64 {
	t.Helper()
	var f uint64
	s := hcaStatus(ctx, t, h, vm).Features
	if _, err := fmt.Sscanf(s, "0x%x", &f); err != nil {
		t.Fatalf("features %q of %s: %v", s, vm, err)
	}
	return f & abi.Features
}

// TestSkew: the module of the previous release with this vnicd, and this module with a vnicd that offers no features,
// as the previous one; both in one connection (CO-6).
func TestSkew(t *testing.T) {
	l, ctx := newLab(t)
	buildPrevious(ctx, t, l)
	w := wiredHosts(t, l)
	check(t, w.a.Run(ctx, hostConfig("192.0.2.1", "192.0.2.2", vmA)))
	check(t, w.b.Run(ctx, hostConfig("192.0.2.2", "192.0.2.1", vmB)+"debug: {guest-features: false}\n"))
	dumpOnFailure(t, []*lab.Host{w.a, w.b}, &w.vms)
	var err error
	w.vms, err = l.Boot(ctx, must[qemu.Config](t)(w.a.Config(ctx, vmA)), must[qemu.Config](t)(w.b.Config(ctx, vmB)))
	check(t, err)
	check(t, harness.LoadModule(ctx, w.vms[0], "/host/previous.ko"))
	check(t, lab.WaitRDMA(ctx, w.vms[0], lab.Device))
	check(t, lab.LoadModule(ctx, w.vms[1]))
	traffic := func(t *testing.T) {
		t.Helper()
		a, b := must[lab.End](t)(lab.NewEnd(ctx, w.vms[0], lab.Device, vmA.Addr)),
			must[lab.End](t)(lab.NewEnd(ctx, w.vms[1], lab.Device, vmB.Addr))
		for _, e := range [][2]lab.End{{a, b}, {b, a}} {
			must[string](t)(lab.Pingpong(ctx, e[0], e[1], "ibv_rc_pingpong", "-c", "-n", "200"))
			must[string](t)(lab.Pingpong(ctx, e[0], e[1], "ibv_rc_pingpong", "-c", "-o", "-n", "50")) // on-demand paging
			for _, program := range []string{"ib_write_bw", "ib_read_bw", "ib_send_bw"} {
				must[string](t)(lab.Perftest(ctx, e[0], e[1], program, "-n", "500"))
			}
		}
		// Destroyed and unloaded in good order.
		run(ctx, t, w.vms[0], "rmmod vnicd")
	}
	t.Run("previous module, and vnicd without features", func(t *testing.T) {
		if f := accepted(ctx, t, w.a, "vm1"); f != 0 {
			t.Errorf("the previous module has accepted features %#x", f)
		}
		if f := accepted(ctx, t, w.b, "vm2"); f != 0 {
			t.Errorf("features %#x were accepted, and not offered", f)
		}
		traffic(t)
	})
	t.Run("the module is upgraded", func(t *testing.T) {
		check(t, lab.LoadModule(ctx, w.vms[0]))
		if f := accepted(ctx, t, w.a, "vm1"); f != abi.Features {
			t.Errorf("features %#x, want %#x", f, uint64(abi.Features))
		}
		traffic(t)
	})
	t.Run("and back", func(t *testing.T) {
		check(t, harness.LoadModule(ctx, w.vms[0], "/host/previous.ko"))
		check(t, lab.WaitRDMA(ctx, w.vms[0], lab.Device))
		traffic(t)
	})
	quietKernels(ctx, t, w.vms...)
}

// TestDriverGone: a VM whose network card is not that of its HCA, so that nothing reports its reset. While it is
// paused, its peer is held; when its kernel reboots, with programs running, the peer's queue pair ends by its retries,
// although the new kernel does not load the module (CO-3, VNICD_FEATURE_NONCE).
func TestDriverGone(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	card := lab.VM{Name: "card", MAC: "02:00:00:00:00:11", Addr: "10.1.0.1/24"}
	check(t, h.Run(ctx, "networks: [{name: blue, vni: 100}]\nvms:\n"+
		"  - {name: vm1, network: blue, mac: \"02:00:00:00:00:01\"}\n  - {name: card, network: blue, mac: \"02:00:00:00:00:11\"}\n"+
		"  - {name: vm2, network: blue, mac: \"02:00:00:00:00:02\"}\n"))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	cfg := must[qemu.Config](t)(h.Config(ctx, vmA)) // its HCA, with the card of another VM of the configuration
	cfg.NICs = []qemu.NIC{{Socket: filepath.Join(h.Dir, card.Name+".net"), MAC: card.MAC, MTU: 1450, IfName: "eth0",
		Addresses: []netip.Prefix{netip.MustParsePrefix(card.Addr)}}}
	// The module pairs with a card that has the HCA's MAC. This one is connected to nothing: RoCE goes through the HCA.
	cfg.ExtraArgs = append(cfg.ExtraArgs, "-netdev", "hubport,id=alone,hubid=9", "-device",
		"virtio-net-pci,netdev=alone,romfile=,mac="+vmA.MAC)
	var err error
	ms, err = l.Boot(ctx, cfg, must[qemu.Config](t)(h.Config(ctx, vmB)))
	check(t, err)
	gone, peer := ms[0], ms[1]
	run(ctx, t, gone, "dev=$(basename $(dirname $(grep -l "+vmA.MAC+" /sys/class/net/*/address))) && "+
		"ip link set $dev up && ip addr add "+vmA.Addr+" dev $dev && "+
		"ip neigh replace 10.0.0.2 lladdr "+vmB.MAC+" dev $dev nud permanent")
	run(ctx, t, peer, "ip addr add 10.1.0.2/24 dev eth0 && ip neigh replace 10.0.0.1 lladdr "+vmA.MAC+
		" dev eth0 nud permanent")
	check(t, both(func() error { return lab.LoadModule(ctx, gone) }, func() error { return lab.LoadModule(ctx, peer) }))
	if f := accepted(ctx, t, h, "vm1"); f&abi.FeatureNonce == 0 {
		t.Fatalf("features %#x: no nonce", f)
	}
	a := must[lab.End](t)(lab.NewEnd(ctx, gone, lab.Device, vmA.Addr))
	b := must[lab.End](t)(lab.NewEnd(ctx, peer, lab.Device, vmB.Addr))
	const program = "exec timeout -k 5 600 ib_write_bw -F -d %s -x %d --run_infinitely -D 1 %s"
	must[*qemu.Process](t)(gone.StartShell(ctx, fmt.Sprintf(program, a.Device, a.GID, "")))
	check(t, harness.WaitGuest(ctx, gone, "ss -ltn | grep -q :18515"))
	client := must[*qemu.Process](t)(peer.StartShell(ctx, fmt.Sprintf(program, b.Device, b.GID, "10.1.0.1")))
	moves := func(when string) {
		t.Helper()
		packets := func() uint64 {
			s := hcaStatus(ctx, t, h, "vm2").Stats
			return s["tx_packets"] + s["rx_packets"]
		}
		before := packets()
		eventually(ctx, t, "traffic "+when, func() bool { return packets() > before+1000 })
	}
	moves("at first")
	check(t, gone.QMP().Run(ctx, "stop", nil, nil))
	eventually(ctx, t, "the HCA is paused", func() bool { return hcaStatus(ctx, t, h, "vm1").Paused })
	time.Sleep(harness.Patience(20 * time.Second)) // longer than all retries of the peer
	if s := hcaStatus(ctx, t, h, "vm1"); !s.Paused || len(s.QPs) < 2 {
		t.Errorf("paused %v, %d queue pairs", s.Paused, len(s.QPs))
	}
	check(t, gone.QMP().Run(ctx, "cont", nil, nil))
	moves("after the pause")

	// reboot(2) at once, with programs running and the module loaded.
	must[*qemu.Process](t)(gone.StartShell(ctx, "sleep 1; exec busybox reboot -f"))
	began := time.Now()
	shortly, cancel := context.WithTimeout(ctx, harness.Patience(time.Minute))
	defer cancel()
	r, err := client.Wait(shortly)
	if err != nil {
		t.Fatalf("the peer's program still runs %v after the reboot: %v", time.Since(began), err)
	}
	t.Logf("the peer's program ended %v after the reboot: %s", time.Since(began), tail(r.Stdout+r.Stderr, 300))
	if r.ExitCode == 0 || r.ExitCode == 124 {
		t.Errorf("the peer's program ended with status %d", r.ExitCode)
	}
	if s := hcaStatus(ctx, t, h, "vm1"); s.Paused || len(s.QPs) != 0 {
		t.Errorf("after the reboot: paused %v, %d queue pairs", s.Paused, len(s.QPs))
	}
	if !strings.Contains(h.Log(), "the driver has ended") {
		t.Error("the log does not say that the driver has ended")
	}
	check(t, gone.WaitReady(ctx))
	quietKernels(ctx, t, peer)
}
