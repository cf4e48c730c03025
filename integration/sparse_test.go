package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestSparseRegion: a program writes to few pages in each of 40,000 windows of 2 MiB of an implicit region, by a
// loop-back RC pair, and reads them back. Every address is valid, so every WRITE arrives (HF-2, HF-3). Nothing is
// released meanwhile. With the default quota of 2^24 entries the windows fit if each has one page, so no READ faults;
// if each has two, their tables do not fit, and the device drops those that were not used lately.
func TestSparseRegion(t *testing.T) {
	const windows = 40_000
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx,
		"networks: [{name: blue, vni: 100}]\nvms: [{name: vm1, network: blue, mac: \"02:00:00:00:00:01\"}]\n"))
	v := vmA
	v.CPUs, v.MemoryMiB = 2, 1024
	ms := must[[]*qemu.Machine](t)(l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, v))))
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	check(t, lab.LoadModule(ctx, ms[0]))
	check(t, l.Programs(ctx, l.Share))
	a := must[lab.End](t)(lab.NewEnd(ctx, ms[0], lab.Device, v.Addr))
	for _, pages := range []uint64{1, 2} {
		t.Run(fmt.Sprintf("%d a window", pages), func(t *testing.T) {
			before := hcaStatus(ctx, t, h, "vm1")
			t.Log(strings.TrimSpace(run(ctx, t, ms[0], lab.Limited(20*time.Minute, fmt.Sprintf("/host/sparse %s %d walk %d %d",
				a.Device, a.GID, windows, pages)))))
			after := hcaStatus(ctx, t, h, "vm1")
			faults, dropped := after.Faults.Guest.Raised-before.Faults.Guest.Raised, after.MTTsReclaimed-before.MTTsReclaimed
			t.Logf("%d faults, %d tables dropped", faults, dropped)
			if after.Faults.Guest.Failed != before.Faults.Guest.Failed {
				t.Errorf("%d faults failed", after.Faults.Guest.Failed-before.Faults.Guest.Failed)
			}
			if pages == 1 && (dropped != 0 || faults < windows || faults > windows*3/2) {
				t.Errorf("%d faults of %d pages, %d tables dropped: the quota holds them all", faults, windows, dropped)
			}
			if pages == 2 && dropped < windows/4 {
				t.Errorf("%d tables dropped: the quota was not exceeded", dropped)
			}
		})
	}
	quietKernels(ctx, t, ms...)
}

// sparseQuota is the VMs' limit of table entries in TestBeyondQuota.
const sparseQuota = 1 << 15

// TestBeyondQuota: two VMs do WRITEs and READs at random between areas that need four times the entries of each VM's
// quota, in both directions, on one host, between hosts and with rxe; all data are checked (HF-2, HF-3).
func TestBeyondQuota(t *testing.T) {
	l, ctx := newLab(t)
	w := wiredHosts(t, l)
	vmC := lab.VM{Name: "vm3", MAC: "02:00:00:00:00:03", Addr: "10.0.0.3/24"}
	limited := func(local, peer string, vms ...lab.VM) string {
		return strings.ReplaceAll(hostConfig(local, peer, vms...), "}\n",
			fmt.Sprintf(", limits: {pages: %d}}\n", sparseQuota))
	}
	check(t, w.a.Run(ctx, limited("192.0.2.1", "192.0.2.2", vmA, vmC)))
	check(t, w.b.Run(ctx, limited("192.0.2.2", "192.0.2.1", vmB)))
	dumpOnFailure(t, []*lab.Host{w.a, w.b}, &w.vms)
	var err error
	w.vms, err = l.Boot(ctx, must[qemu.Config](t)(w.a.Config(ctx, vmA)), must[qemu.Config](t)(w.b.Config(ctx, vmB)),
		must[qemu.Config](t)(w.a.Config(ctx, vmC)))
	check(t, err)
	install(ctx, t, l, w.vms...)
	var ends []lab.End
	for i, v := range []lab.VM{vmA, vmB, vmC} {
		check(t, lab.LoadModule(ctx, w.vms[i]))
		ends = append(ends, must[lab.End](t)(lab.NewEnd(ctx, w.vms[i], lab.Device, v.Addr)))
	}
	a, b, c := ends[0], ends[1], ends[2]
	for pages := 1; pages <= 2; pages++ {
		t.Run(fmt.Sprintf("%d a window, between hosts", pages), func(t *testing.T) {
			w.beyondQuota(ctx, t, a, b, "implicit", pages)
		})
		t.Run(fmt.Sprintf("%d a window, one host", pages), func(t *testing.T) {
			w.beyondQuota(ctx, t, a, c, "implicit", pages)
		})
	}
	noneHeld(ctx, t, w.a, "vm1", "vm3")
	noneHeld(ctx, t, w.b, "vm2")
	quietKernels(ctx, t, w.vms...)

	run(ctx, t, w.vms[1], "rmmod vnicd")
	check(t, harness.AddRXE(ctx, w.vms[1], "rxe0", "eth0"))
	check(t, lab.WaitRDMA(ctx, w.vms[1], "rxe0"))
	rxe := must[lab.End](t)(lab.NewEnd(ctx, w.vms[1], "rxe0", vmB.Addr))
	t.Run("1 a window, rxe", func(t *testing.T) { w.beyondQuota(ctx, t, a, rxe, "pinned", 1) })
	quietKernels(ctx, t, w.vms...)
}

// beyondQuota runs the program sparse between vm1, the client, and another end, with that many pages in each window.
func (w *twoHosts) beyondQuota(ctx context.Context, t *testing.T, client, server lab.End, kind string, pages int) {
	t.Helper()
	fit := sparseQuota / 64 // windows: one with a page costs 64 entries,
	if pages > 1 {
		fit = sparseQuota / (64 + 512) // one with more pages also a table
	}
	windows := 4 * fit / 2 // of each of the two areas
	line := func(e lab.End, kind string) string {
		return fmt.Sprintf("/host/sparse %s %d %s %d %d %d", e.Device, e.GID, kind, windows, pages,
			int(odpDuration.Seconds()))
	}
	before := hcaStatus(ctx, t, w.a, "vm1")
	sout, cout, err := lab.PairFor(ctx, *odpDuration+10*time.Minute, server.VM, line(server, kind), client.VM,
		line(client, "implicit")+" "+server.Addr, 18620)
	check(t, err)
	after := hcaStatus(ctx, t, w.a, "vm1")
	dropped := after.MTTsReclaimed - before.MTTsReclaimed
	t.Logf("%s%s%d faults of vm1, %d tables dropped", cout, sout, after.Faults.Guest.Raised-before.Faults.Guest.Raised,
		dropped)
	if dropped < uint64(fit) {
		t.Errorf("%d tables dropped, the quota holds up to %d: it was not exceeded much", dropped, fit)
	}
	if failed := after.Faults.Guest.Failed - before.Faults.Guest.Failed; failed != 0 {
		t.Errorf("%d faults failed", failed)
	}
}
