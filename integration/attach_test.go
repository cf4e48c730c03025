package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/hypervisor/qmp"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestHotAttach attaches both faces to VMs that were started without them, and detaches them. Every failure leaves QEMU
// unchanged.
func TestHotAttach(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("a"))
	check(t, h.Run(ctx, `
networks:
  - {name: blue, vni: 100, mtu: 1450, tap: {name: blue0, addresses: [10.0.0.254/24]}}
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
  - {name: vm2, network: blue, mac: "02:00:00:00:00:02"}
`))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)

	t.Run("unsuitable VMs", func(t *testing.T) { testUnsuitable(ctx, t, l, h) })

	ports := []string{"-device", "pcie-root-port,id=rp1,chassis=1", "-device", "pcie-root-port,id=rp2,chassis=2"}
	monitor := filepath.Join(h.Dir, "op.qmp")
	ms = must[[]*qemu.Machine](t)(l.Boot(ctx, qemu.Config{
		Name: "vm1", MemoryMiB: 768, HostShare: l.Share, Netns: h.NS.Name,
		ExtraArgs: append(ports, qemu.MonitorArgs(monitor)...),
	}))
	m := ms[0]
	attach := func(want string, more ...string) {
		t.Helper()
		out, err := h.CLI(ctx, append([]string{"attach", "--qmp", monitor, "vm1"}, more...)...)
		if want == "" {
			check(t, err)
		} else if err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("attach %v: %q, %v; want %q", more, out, err, want)
		}
	}
	parts := func() string { return qemuParts(ctx, t, m.QMP()) }
	none := parts()

	if only := must[bool](t)(qemu.ProbeEither(ctx, l.Images.QEMU)); only {
		attach("QEMU " + qemu.HCADeviceRelease + " or newer has it")
		if now := parts(); now != none {
			t.Fatalf("a failed attach left %q", now)
		}
		return
	}
	// Without drivers in the guest everything is undone.
	attach("no driver in the guest brought up the virtio-net and the HCA (is vnicd.ko loaded in the guest?) within 2s; the devices were removed again", "--wait", "2s")
	if now := parts(); now != none {
		t.Fatalf("a failed attach left %q", now)
	}
	// Without the HCA's driver everything is undone, although virtio-net came up.
	run(ctx, t, m, "modprobe -a virtio_pci virtio_net")
	attach("no driver in the guest brought up the HCA (is", "--wait", "5s")
	if now := parts(); now != none {
		t.Fatalf("a failed attach left %q", now)
	}
	// The HCA's bus does not exist; virtio-net has been plugged by then.
	attach("Bus 'rp9' not found", "--hca-bus", "rp9")
	if now := parts(); now != none {
		t.Fatalf("a failed attach left %q", now)
	}

	check(t, harness.LoadModule(ctx, m, "/host/vnicd.ko"))
	for round := range 2 {
		attach("")
		run(ctx, t, m, "ip link set eth0 up && ip address replace 10.0.0.1/24 dev eth0")
		check(t, lab.WaitRDMA(ctx, m, "vnic0"))
		run(ctx, t, m, "ping -c 3 -W 10 10.0.0.254")
		if round == 0 {
			attach("already attached to a QEMU")
		}
		if _, err := h.CLI(ctx, "detach", "--qmp", monitor, "vm1"); err != nil {
			t.Fatal(err)
		}
		if now := parts(); now != none {
			t.Fatalf("detach left %q", now)
		}
		run(ctx, t, m, "! ibv_devinfo -d vnic0 && ! ip link show eth0")
	}
	if out, err := h.CLI(ctx, "detach", "--qmp", monitor, "vm1"); err == nil ||
		!strings.Contains(err.Error(), "not attached") {
		t.Errorf("detach without attach: %q, %v", out, err)
	}
	quietKernels(ctx, t, m)
}

// qemuParts lists the objects that attach adds to a QEMU.
func qemuParts(ctx context.Context, t *testing.T, c *qmp.Client) string {
	t.Helper()
	var parts []string
	for _, id := range []string{qemu.NetID("vm1"), qemu.HCAID("vm1")} {
		if must[bool](t)(c.Exists(ctx, "/machine/peripheral/"+id)) {
			parts = append(parts, id)
		}
	}
	for _, d := range must[[]qmp.Chardev](t)(c.Chardevs(ctx)) {
		parts = append(parts, d.Label)
	}
	return strings.Join(parts, " ")
}

// testUnsuitable tries VMs that were started without what attach needs. They are never run (-S).
func testUnsuitable(ctx context.Context, t *testing.T, l *lab.Lab, h *lab.Host) {
	shared := append([]string{"-M", qemu.MachineType}, qemu.MemoryArgs(128, false)...)
	for i, x := range []struct {
		name string
		args []string
		want string
	}{
		{"private memory", []string{"-M", "q35", "-m", "128"}, "memory is not shared"},
		{"private backend", []string{"-M", "q35,memory-backend=x", "-m", "128M", "-object",
			"memory-backend-memfd,id=x,size=128M,share=off"}, `memory backend "x" has no share=on`},
		{"no root port", shared, "does not support hotplugging; start the VM with -device pcie-root-port"},
		{"one root port", append(shared, "-device", "pcie-root-port,id=rp1,chassis=1"),
			"all 1 PCIe root ports are in use; two are needed; start the VM with"},
	} {
		t.Run(x.name, func(t *testing.T) {
			monitor := filepath.Join(h.Dir, fmt.Sprintf("u%d.qmp", i))
			argv := append([]string{l.Images.QEMU, "-S", "-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg"},
				x.args...)
			p := must[*harness.Process](t)(h.NS.Start(filepath.Join(h.Dir, fmt.Sprintf("u%d.log", i)), nil,
				append(argv, qemu.MonitorArgs(monitor)...)...))
			defer p.Kill()
			eventually(ctx, t, "QEMU's monitor", func() bool { return exists(monitor) })
			out, err := h.CLI(ctx, "attach", "--qmp", monitor, "vm2")
			if err == nil || !strings.Contains(err.Error(), x.want) {
				t.Errorf("%q, %v; want %q", out, err, x.want)
			}
			c := must[*qmp.Client](t)(qmp.Dial(ctx, monitor))
			defer c.Close()
			if left := must[[]qmp.Chardev](t)(c.Chardevs(ctx)); len(left) != 1 {
				t.Errorf("left in QEMU: %+v", left)
			}
		})
	}
}
