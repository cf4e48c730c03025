package integration

import (
	"context"
	"regexp"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// TestOneHost: two VMs under one vnicd run the same programs, without an underlay (ARCHITECTURE.md, Decisions). A third
// VM in another network has the MAC and the address of the second and never receives its traffic (MT-9).
func TestOneHost(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, `networks:
  - {name: blue, vni: 100, mtu: 4500}
  - {name: red, vni: 200}
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
  - {name: vm2, network: blue, mac: "02:00:00:00:00:02"}
  - {name: vm3, network: red, mac: "02:00:00:00:00:02"}
`))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	a, b := vmA, vmB
	a.MTU, b.MTU = 4500, 4500
	c := lab.VM{Name: "vm3", MAC: b.MAC, Addr: b.Addr}
	var err error
	ms, err = l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, a)), must[qemu.Config](t)(h.Config(ctx, b)),
		must[qemu.Config](t)(h.Config(ctx, c)))
	check(t, err)
	for _, m := range ms {
		check(t, lab.LoadModule(ctx, m))
	}
	ea := must[lab.End](t)(lab.NewEnd(ctx, ms[0], lab.Device, a.Addr))
	eb := must[lab.End](t)(lab.NewEnd(ctx, ms[1], lab.Device, b.Addr))

	t.Run("mtu", func(t *testing.T) {
		if out := run(ctx, t, ms[0], "ibv_devinfo -d vnic0"); !strings.Contains(out, "4096 (5)") {
			t.Errorf("a network with MTU 4500 must give a path MTU of 4096:\n%s", out)
		}
	})
	pingpongs(ctx, t, ea, eb)
	if out := must[string](t)(h.CLI(ctx, "status",
		"vm1")); regexp.MustCompile(`local_messages\s+[1-9]`).MatchString(out) != ways.LocalCopy() {
		t.Errorf("local copies enabled: %v, but:\n%s", ways.LocalCopy(), out)
	}
	for _, x := range [][]string{
		{"ib_write_bw", "-a", "-n", "20"},
		{"ib_read_bw", "-q", "8", "-s", "65536", "-n", "20"},
		{"ib_send_bw", "-q", "16", "-b", "-s", "65536", "-n", "20"},
		{"ib_send_lat", "-s", "2", "-n", "200"},
	} {
		t.Run(strings.Join(x, ""), func(t *testing.T) {
			t.Log(lab.Rows(must[string](t)(lab.Perftest(ctx, ea, eb, x[0], x[1:]...))))
		})
	}
	t.Run("loopback", func(t *testing.T) {
		// Both ends in one VM.
		must[string](t)(lab.Pingpong(ctx, ea, ea, "ibv_rc_pingpong", "-c", "-n", "100"))
	})
	t.Run("rdma_cm", func(t *testing.T) {
		_, out, err := lab.Pair(ctx, ms[1], "rping -s -a 0.0.0.0 -C 10 -v", ms[0], "rping -c -a 10.0.0.2 -C 10 -v", 0)
		check(t, err)
		if strings.Count(out, "ping data:") != 10 {
			t.Errorf("rping printed:\n%s", out)
		}
	})
	t.Run("tenants", func(t *testing.T) {
		// vm3 has vm2's addresses in another network: vm1 must reach vm2.
		if r := must[qemu.Result](t)(ms[2].Shell(ctx, "ping -c 2 -W 1 10.0.0.1")); r.ExitCode == 0 {
			t.Error("a VM reached another tenant's VM")
		}
		run(ctx, t, ms[0], "ping -c 2 -i 0.2 -W 5 10.0.0.2")
	})
	quietKernels(ctx, t, ms...)
}

// pair boots two VMs under one vnicd and loads the module in both; the first also gets args.
func pair(ctx context.Context, t *testing.T, l *lab.Lab, args ...string) (a, b lab.End) {
	t.Helper()
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, `networks: [{name: blue, vni: 100, mtu: 4500}]
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
  - {name: vm2, network: blue, mac: "02:00:00:00:00:02"}
`))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	v := [2]lab.VM{vmA, vmB}
	var cfgs [2]qemu.Config
	for i := range v {
		v[i].MTU = 4500
		cfgs[i] = must[qemu.Config](t)(h.Config(ctx, v[i]))
	}
	cfgs[0].ExtraArgs = append(cfgs[0].ExtraArgs, args...)
	ms = must[[]*qemu.Machine](t)(l.Boot(ctx, cfgs[:]...))
	var ends [2]lab.End
	for i, m := range ms {
		check(t, lab.LoadModule(ctx, m))
		ends[i] = must[lab.End](t)(lab.NewEnd(ctx, m, lab.Device, v[i].Addr))
	}
	return ends[0], ends[1]
}
