package integration

import (
	"context"
	"flag"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// ivshmemPCI is the PCI address of vm1's HCA in TestIvshmem: behind a root port, so that the guest can reset it.
const ivshmemPCI = "/sys/bus/pci/devices/0000:01:00.0"

var ivshmemQEMU = flag.String("ivshmem.qemu", "",
	"QEMU of TestIvshmem, such as the oldest that hosts have; by default the one of all tests")

// TestIvshmem: the HCA behind QEMU's ivshmem-doorbell in place of the generic vhost-user device (CO-5). Event queues
// have an interrupt each, and the device outlives what a guest's administrator may do to it while programs use it.
func TestIvshmem(t *testing.T) {
	l, ctx := newLab(t)
	va, vb := vmA, vmB
	va.HCA, vb.HCA, va.CPUs = "ivshmem", "ivshmem", 2
	w := wiredHosts(t, l)
	// Two engines: two completion event queues.
	check(t, w.a.Run(ctx, "engines: 2\n"+hostConfig("192.0.2.1", "192.0.2.2", va)))
	check(t, w.b.Run(ctx, hostConfig("192.0.2.2", "192.0.2.1", vb)))
	dumpOnFailure(t, []*lab.Host{w.a, w.b}, &w.vms)
	ca, cb := must[qemu.Config](t)(w.a.Config(ctx, va)), must[qemu.Config](t)(w.b.Config(ctx, vb))
	i := slices.IndexFunc(ca.ExtraArgs, func(a string) bool { return strings.HasPrefix(a, "ivshmem-doorbell,") })
	if i < 0 {
		t.Fatalf("no ivshmem-doorbell in %q", ca.ExtraArgs)
	}
	ca.ExtraArgs[i] += ",bus=root1,addr=0"
	ca.ExtraArgs = append([]string{"-device", "pcie-root-port,id=root1,slot=9"}, ca.ExtraArgs...)
	if *ivshmemQEMU != "" {
		images := *l.Images
		images.QEMU = *ivshmemQEMU
		ca.Images, cb.Images = &images, &images
	}
	var err error
	w.vms, err = l.Boot(ctx, ca, cb)
	check(t, err)
	a, b := w.load(ctx, t)
	again := func() {
		t.Helper()
		check(t, lab.WaitRDMA(ctx, w.vms[0], lab.Device))
		a = must[lab.End](t)(lab.NewEnd(ctx, w.vms[0], lab.Device, va.Addr))
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-c", "-e", "-n", "50"))
	}

	t.Run("programs", func(t *testing.T) {
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-c", "-e", "-s", "65536", "-n", "100"))
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_ud_pingpong", "-c", "-s", "1024", "-n", "200"))
		must[string](t)(lab.Perftest(ctx, a, b, "ib_write_bw", "-a", "-n", "20"))
		must[string](t)(lab.Perftest(ctx, a, b, "ib_atomic_bw", "-A", "FETCH_AND_ADD", "-n", "100"))
		verifiedRDMA(ctx, t, a, b)
	})
	t.Run("interrupts", func(t *testing.T) { ivshmemInterrupts(ctx, t, a, b) })
	// With all of its requests outstanding a program that polls may wait for ever for a device that is gone.
	end := func(ps ...*qemu.Process) {
		t.Helper()
		for i, p := range ps {
			_, err := w.vms[i].Shell(ctx, "pkill -KILL ib_write_bw")
			check(t, err)
			must[qemu.Result](t)(p.Wait(ctx))
		}
	}
	t.Run("unbind", func(t *testing.T) {
		client, server := w.stream(ctx, t, a, b)
		run(ctx, t, w.vms[0], "cd /sys/bus/pci/drivers/vnicd && echo 0000:01:00.0 >unbind")
		end(client, server)
		eventually(ctx, t, "no queue pairs", func() bool { return rdmaQPs(ctx, t, w.a, "vm1") == 0 })
		run(ctx, t, w.vms[0], "cd /sys/bus/pci/drivers/vnicd && echo 0000:01:00.0 >bind")
		again()
	})
	t.Run("unload", func(t *testing.T) {
		client, server := w.stream(ctx, t, a, b)
		run(ctx, t, w.vms[0], "rmmod vnicd")
		end(client, server)
		check(t, lab.LoadModule(ctx, w.vms[0]))
		again()
	})
	t.Run("PCI reset", func(t *testing.T) {
		// The device behind it goes on, and so does the program.
		client, server := w.stream(ctx, t, a, b)
		for range 3 {
			run(ctx, t, w.vms[0], "echo 1 >"+ivshmemPCI+"/reset")
			before := hcaStatus(ctx, t, w.a, "vm1").Stats["tx_packets"]
			eventually(ctx, t, "traffic after a reset", func() bool {
				return hcaStatus(ctx, t, w.a, "vm1").Stats["tx_packets"] > before+1000
			})
		}
		end(client, server)
		again()
	})
	quietKernels(ctx, t, w.vms...)
	t.Run("reboot", func(t *testing.T) {
		check(t, w.vms[0].Reboot(ctx))
		check(t, lab.LoadModule(ctx, w.vms[0]))
		again()
	})
	quietKernels(ctx, t, w.vms...)
}

// ivshmemInterrupts: one vector for config changes, commands, asynchronous events and each completion event queue; that
// of a program's event queue counts, and the queues' vectors are spread over the processors.
func ivshmemInterrupts(ctx context.Context, t *testing.T, a, b lab.End) {
	device := strings.TrimSpace(run(ctx, t, a.VM, "basename "+ivshmemPCI+"/virtio*"))
	vectors := func() (lines []string, completions int) {
		for line := range strings.Lines(run(ctx, t, a.VM, "cat /proc/interrupts")) {
			if !strings.Contains(line, " "+device+"-") {
				continue
			}
			lines = append(lines, line)
			if f := strings.Fields(line); strings.HasSuffix(f[len(f)-1], "-completions") {
				for _, n := range f[1:3] { // a column for each of two processors
					completions += must[int](t)(strconv.Atoi(n))
				}
			}
		}
		return lines, completions
	}
	lines, before := vectors()
	want := must[int](t)(strconv.Atoi(strings.TrimSpace(run(ctx, t, a.VM,
		"ibv_devinfo -v -d vnic0 | sed -n 's/.*num_comp_vectors:[[:space:]]*//p'"))))
	if len(lines) != 3+want {
		t.Errorf("%d vectors, expected 3 and one for each of %d completion event queues:\n%s", len(lines), want,
			strings.Join(lines, ""))
	}
	must[string](t)(lab.Perftest(ctx, a, b, "ib_send_lat", "-s", "2", "-n", "200", "-e"))
	if lines, after := vectors(); after < before+100 {
		t.Errorf("%d interrupts for 200 messages with events:\n%s", after-before, strings.Join(lines, ""))
	}
	var used []string
	for _, line := range lines {
		if irq, name, _ := strings.Cut(strings.TrimSpace(line), ":"); strings.Contains(name, "-completions") {
			used = append(used, strings.TrimSpace(run(ctx, t, a.VM, "cat /proc/irq/"+irq+"/smp_affinity_list")))
		}
	}
	slices.Sort(used)
	if cpus := strings.Join(slices.Compact(used), " "); cpus != "0 1" {
		t.Errorf("completion event queues interrupt the processors %q, expected each of 0 and 1", cpus)
	}
}
