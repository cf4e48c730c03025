package integration

import (
	"context"
	"flag"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

var snapshots = flag.Int("snapshots", 3, "how often TestSnapshot saves and restores the VMs; 30 for the long test")

// TestSnapshot: two VMs with HCAs behind ivshmem-doorbell, with programs at work between them, are saved in files, and
// ended. They are restored on the hosts where they were, both on one, or each where the other was: no program notices
// (CO-4).
func TestSnapshot(t *testing.T) {
	outlive(t, bothMove, *chosen, event{name: "snapshot", run: snapshot, times: snapshots, awake: true})
}

// bothMove: on two hosts, and both VMs can move.
func bothMove(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
	va, vb := vmA, vmB
	va.HCA, vb.HCA = "ivshmem", "ivshmem"
	s := &stand{timeout: 14, moves: [2]lab.VM{va, vb}}
	s.bootMovable(ctx, t, l, va, vb)
	s.client = must[lab.End](t)(lab.NewEnd(ctx, s.vms[0], lab.Device, va.Addr))
	s.server = must[lab.End](t)(lab.NewEnd(ctx, s.vms[1], lab.Device, vb.Addr))
	return s
}

// snapshot saves both VMs and restores them elsewhere: h1 and h1, h2 and h1, then as at first.
func snapshot(ctx context.Context, t *testing.T, s *stand, n int) {
	s.at = [][2]int{{0, 0}, {1, 0}, {0, 1}}[n%3]
	for _, m := range s.vms {
		check(t, m.QMP().Run(ctx, "stop", nil, nil))
	}
	var files [2]string
	for i, m := range s.vms {
		files[i] = filepath.Join(s.Lab.Dir, fmt.Sprintf("%s.snapshot-%d", m.Name(), n))
		g := &migration{ctx: ctx, t: t, m: m}
		g.hurries()
		check(t, m.QMP().Run(ctx, "migrate", map[string]any{"uri": "file:" + files[i]}, nil))
		if p := g.ends(); p.Status != "completed" {
			t.Fatalf("snapshot of %s: %+v", m.Name(), p)
		}
	}
	for _, m := range s.vms {
		m.Kill()
	}
	var restored []*qemu.Machine
	for i := range s.vms {
		cfg := movable(ctx, t, s.Lab, s.hosts[s.at[i]], s.moves[i])
		cfg.ExtraArgs = append(cfg.ExtraArgs, "-incoming", "file:"+files[i], "-S")
		r := must[*qemu.Machine](t)(qemu.Boot(ctx, cfg))
		s.Lab.Add(r.Kill)
		restored = append(restored, r)
	}
	for i, m := range s.vms {
		g := &migration{ctx: ctx, t: t, there: restored[i]}
		g.waits()
		check(t, restored[i].QMP().Run(ctx, "cont", nil, nil))
		check(t, m.Become(ctx, restored[i]))
	}
}
