package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestFaultyDevice: while a program releases memory that its own WRITEs use, the device answers commands that end a use
// of memory with errors, and does not execute them; or the used ring of the command queue becomes invalid. Nothing is
// written to a page after its release, nothing hangs, and after the driver has been loaded again all works (TR-5,
// ODP-5). A module in the guest (integration/guest/refuse) turns commands into ones that vnicd refuses.
func TestFaultyDevice(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx,
		"networks: [{name: blue, vni: 100}]\nvms: [{name: vm1, network: blue, mac: \"02:00:00:00:00:01\"}]\n"))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	v := vmA
	v.CPUs, v.KernelArgs = 2, []string{"page_poison=1"}
	ms, err := l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, v)))
	check(t, err)
	m := ms[0]
	check(t, l.Programs(ctx, l.Share))
	check(t, l.Builder.Module(ctx, filepath.Join(l.Root, "integration", "guest", "refuse"), l.Share))
	run(ctx, t, m, "insmod /host/vnicd_refuse.ko")

	destroy := []abi.Opcode{abi.CmdDestroyMR, abi.CmdDestroyQP, abi.CmdDestroyCQ, abi.CmdDestroySRQ, abi.CmdDestroyPD,
		abi.CmdDestroyMW}
	for _, x := range []struct {
		name   string
		refuse []abi.Opcode
		log    string // of the driver
	}{
		{"DESTROY_MR", destroy[:1], "destroy command 22 for object"},
		{"every DESTROY", destroy, "destroy command 19 for object"},
		{"CLEAR_MTT", []abi.Opcode{abi.CmdClearMTT}, "device lost: it did not revoke pages"},
		{"used ring", nil, "device lost: its command queue is broken"},
	} {
		t.Run(x.name, func(t *testing.T) {
			check(t, lab.LoadModule(ctx, m))
			end := must[lab.End](t)(lab.NewEnd(ctx, m, lab.Device, v.Addr))
			run(ctx, t, m, "rm -f /tmp/released.*; dmesg -C")
			p := must[*qemu.Process](t)(m.StartShell(ctx, lab.Limited(5*time.Minute, fmt.Sprintf("/host/released %s %d",
				end.Device, end.GID))))
			appears := func(file string) {
				t.Helper()
				check(t, harness.WaitGuest(ctx, m, fmt.Sprintf("[ -e %s ] || ! kill -0 %d", file, p.PID())))
				if r, err := m.Shell(ctx, "ls "+file); err != nil || r.ExitCode != 0 {
					r, err := p.Wait(ctx)
					t.Fatalf("the program ended: %v, exit status %d: %s%s", err, r.ExitCode, r.Stdout, r.Stderr)
				}
			}
			appears("/tmp/released.ready")

			if x.refuse == nil {
				run(ctx, t, m, "echo 1 >/sys/module/vnicd_refuse/parameters/spoil")
			} else {
				refuse(ctx, t, m, x.refuse...)
			}
			run(ctx, t, m, "pkill -USR1 -x released") // `timeout` does not pass it on
			appears("/tmp/released.gone")
			check(t, p.Signal(ctx, "TERM"))
			r := must[qemu.Result](t)(p.Wait(ctx))
			t.Logf("exit status %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
			if r.ExitCode != 0 {
				t.Error("a page changed after its release, or the program failed")
			}
			eventually(ctx, t, "the driver reports: "+x.log, func() bool {
				return strings.Contains(run(ctx, t, m, "dmesg"), x.log)
			})
			quietKernels(ctx, t, m)

			refuse(ctx, t, m)
			run(ctx, t, m, lab.Limited(2*time.Minute, "rmmod vnicd"))
			quietKernels(ctx, t, m)
		})
	}
	check(t, lab.LoadModule(ctx, m))
	end := must[lab.End](t)(lab.NewEnd(ctx, m, lab.Device, v.Addr))
	must[string](t)(lab.Pingpong(ctx, end, end, "ibv_rc_pingpong", "-c", "-n", "100"))
	quietKernels(ctx, t, m)
}

// refuse makes vnicd refuse commands with these opcodes from now on.
func refuse(ctx context.Context, t *testing.T, m *qemu.Machine, ops ...abi.Opcode) {
	t.Helper()
	var mask uint64
	for _, op := range ops {
		mask |= 1 << op
	}
	run(ctx, t, m, fmt.Sprintf("echo %d >/sys/module/vnicd_refuse/parameters/refuse", mask))
}
