package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// TestGuestMemory: a hypervisor changes guest memory while RDMA uses it. A balloon takes pages and returns them, a DIMM
// is plugged and unplugged (vhost-user adds and removes the slot), and the other VM's memory uses huge pages. The
// device releases removed memory, and all data verifies (PF-14, EP-1, EP-3).
func TestGuestMemory(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	monitor := filepath.Join(h.Dir, "vm1.monitor")
	check(t, h.Run(ctx, fmt.Sprintf(`networks:
  - {name: blue, vni: 100, mtu: 4500}
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01", qmp: %s}
  - {name: vm2, network: blue, mac: "02:00:00:00:00:02"}
`, monitor)))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	va, vb := vmA, vmB
	va.MTU, vb.MTU, va.CPUs = 4500, 4500, 2
	va.KernelArgs = []string{"memhp_default_state=online_movable"}
	ca, cb := must[qemu.Config](t)(h.Config(ctx, va)), must[qemu.Config](t)(h.Config(ctx, vb))
	ca.ExtraArgs = append(ca.ExtraArgs, "-device", "virtio-balloon-pci,id=balloon,romfile=",
		"-m", fmt.Sprintf("size=%dM,slots=2,maxmem=2G", ca.MemoryMiB))
	ca.ExtraArgs = append(ca.ExtraArgs, qemu.MonitorArgs(monitor)...)
	cb.MemoryMiB, cb.HugePages = 512, true
	reserveHugePages(t, cb.MemoryMiB/2+8)
	var err error
	ms, err = l.Boot(ctx, ca, cb)
	check(t, err)
	for _, m := range ms {
		check(t, lab.LoadModule(ctx, m))
	}
	install(ctx, t, l, ms...)
	a := must[lab.End](t)(lab.NewEnd(ctx, ms[0], lab.Device, va.Addr))
	b := must[lab.End](t)(lab.NewEnd(ctx, ms[1], lab.Device, vb.Addr))
	memory := func(vm string) (resident, discarded, huge uint64) {
		s := statusOf(ctx, t, h, vm).Memory
		return s.Resident, s.Discarded, s.HugeTLB
	}
	q := func(command string, args, out any) {
		t.Helper()
		check(t, ms[0].QMP().Run(ctx, command, args, out))
	}
	// under runs odpstress in both directions while f changes vm1's memory.
	under := func(t *testing.T, f func()) {
		t.Helper()
		server := must[*qemu.Process](t)(lab.Listen(ctx, b.VM, lab.StressCommand(b, "-r 16 -c keep", ""), lab.StressPort))
		client := must[*qemu.Process](t)(a.VM.StartShell(ctx, fmt.Sprintf("exec timeout -k 5 300 %s",
			lab.StressCommand(a, fmt.Sprintf("-t %d -r 64 -w atomic", int(odpDuration.Seconds())), b.Addr))))
		f()
		for _, p := range []*qemu.Process{client, server} {
			r := must[qemu.Result](t)(p.Wait(ctx))
			if r.ExitCode != 0 {
				t.Fatalf("status %d: %s", r.ExitCode, tail(r.Stderr+r.Stdout, 2000))
			}
		}
	}

	t.Run("huge pages", func(t *testing.T) {
		under(t, func() {})
		if resident, _, huge := memory("vm2"); huge == 0 || resident != 0 {
			t.Errorf("%d bytes resident in huge pages, and %d in others", huge, resident)
		}
	})
	t.Run("balloon", func(t *testing.T) {
		run(ctx, t, ms[0], "modprobe virtio_balloon")
		actual := func() uint64 {
			var info struct {
				Actual uint64 `json:"actual"`
			}
			q("query-balloon", nil, &info)
			return info.Actual
		}
		const small = 400 << 20
		under(t, func() {
			before, _, _ := memory("vm1")
			q("balloon", map[string]any{"value": small}, nil)
			eventually(ctx, t, "the balloon is inflated", func() bool { return actual() == small })
			eventually(ctx, t, "the device has released the balloon's pages", func() bool {
				_, discarded, _ := memory("vm1")
				return discarded > 0
			})
			after, discarded, _ := memory("vm1")
			t.Logf("%d MiB resident before, %d MiB after; %d granules taken", before>>20, after>>20, discarded)
		})
		q("balloon", map[string]any{"value": uint64(ca.MemoryMiB) << 20}, nil)
		eventually(ctx, t, "the balloon is deflated", func() bool { return actual() == uint64(ca.MemoryMiB)<<20 })
		under(t, func() {})
	})
	t.Run("DIMM", func(t *testing.T) {
		total := func() (kib int) {
			_, err := fmt.Sscan(run(ctx, t, ms[0], "awk '/^MemTotal:/ {print $2}' /proc/meminfo"), &kib)
			check(t, err)
			return kib
		}
		before := total()
		const size = 256 << 20
		q("object-add", map[string]any{"qom-type": "memory-backend-memfd", "id": "extra", "size": size, "share": true}, nil)
		under(t, func() {
			q("device_add", map[string]any{"driver": "pc-dimm", "id": "dimm", "memdev": "extra"}, nil)
			eventually(ctx, t, "the guest has more memory", func() bool { return total() >= before+size>>10 })
		})
		// The kernel allocates movable pages from the DIMM first, so the next regions lie in it.
		under(t, func() {
			q("device_del", map[string]any{"id": "dimm"}, nil)
			eventually(ctx, t, "the guest has released the DIMM's memory", func() bool {
				var devices []any
				q("query-memory-devices", nil, &devices)
				return len(devices) == 0
			})
		})
		if n := total(); n != before {
			t.Errorf("the guest has %d KiB; before the DIMM it had %d", n, before)
		}
		q("object-del", map[string]any{"id": "extra"}, nil)
		under(t, func() {})
	})
	noneHeld(ctx, t, h, "vm1", "vm2")
	quietKernels(ctx, t, ms...)
}

// reserveHugePages makes the host's kernel reserve n huge pages of 2 MiB until the test ends.
func reserveHugePages(t *testing.T, n int) {
	t.Helper()
	const file = "/proc/sys/vm/nr_hugepages"
	read := func() int {
		b := must[[]byte](t)(os.ReadFile(file))
		return must[int](t)(strconv.Atoi(strings.TrimSpace(string(b))))
	}
	before := read()
	t.Cleanup(func() { check(t, os.WriteFile(file, []byte(strconv.Itoa(before)), 0)) })
	check(t, os.WriteFile(file, []byte(strconv.Itoa(before+n)), 0))
	if got := read(); got < before+n {
		t.Fatalf("the kernel reserved %d huge pages of %d: not enough contiguous memory is free", got-before, n)
	}
}
