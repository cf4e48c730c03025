package integration

import (
	"fmt"
	"regexp"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// TestLimits: 4,096 queue pairs and 65,536 regions of one process in a VM work. ibv_devinfo reports the limits, and
// requests beyond them fail with a card's errors.
func TestLimits(t *testing.T) {
	const qps, mrs, ahs = 4096, 65536, 300
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	// A few more for the kernel's own objects.
	check(t, h.Run(ctx, fmt.Sprintf(`networks: [{name: blue, vni: 100}]
vms: [{name: vm1, network: blue, mac: "02:00:00:00:00:01", limits: {qps: %d, mrs: %d, cqs: 70, ahs: %d}}]
`, qps+4, mrs+4, ahs)))
	v := vmA
	v.MemoryMiB = 1536
	ms := must[[]*qemu.Machine](t)(l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, v))))
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	check(t, lab.LoadModule(ctx, ms[0]))
	a := must[lab.End](t)(lab.NewEnd(ctx, ms[0], lab.Device, v.Addr))

	out := run(ctx, t, ms[0], "ibv_devinfo -v -d "+lab.Device)
	for _, want := range []string{
		fmt.Sprintf(`max_qp:\s+%d\b`, qps+4), fmt.Sprintf(`max_mr:\s+%d\b`, mrs+4), `max_cq:\s+70\b`,
		fmt.Sprintf(`max_ah:\s+%d\b`, ahs-1),
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("ibv_devinfo lacks %q:\n%s", want, out)
		}
	}
	check(t, l.Programs(ctx, l.Share))
	t.Log("\n" + run(ctx, t, ms[0], lab.Limited(15*time.Minute, fmt.Sprintf("/host/many %s %d %d %d", a.Device, a.GID, qps,
		mrs))))
	quietKernels(ctx, t, ms...)
}
