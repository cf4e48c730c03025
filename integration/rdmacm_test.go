package integration

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestHostConnections: a program of the host (guestdrv/rdmacm; PF-4, MT-10) and the distribution's rping in VMs on the
// same host and on another connect by address and port, in both roles. Data is verified, and vnicd knows the connection
// of the VM as established (MT-3 to MT-5). A VM's request for a port without a listener is rejected with the reason.
func TestHostConnections(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	program := buildExample(ctx, t, l, "rping")
	addApplications(ctx, t, w.a, `  - {name: app1, network: blue, mac: "02:00:00:00:00:a1", ips: [10.0.0.101]}`)
	a, b := w.load(ctx, t)
	app := func(opts string) []string {
		return append([]string{program, "-socket", w.a.Dir + "/app1.hca", "-address", "10.0.0.101", "-timeout", "4m"},
			strings.Fields(opts)...)
	}
	serve := func(t *testing.T) *harness.Process {
		t.Helper()
		p := must[*harness.Process](t)(w.a.NS.Start(filepath.Join(w.a.Dir, "app.log"), nil, app("-size 4096")...))
		t.Cleanup(p.Kill)
		eventually(ctx, t, "the program listens", func() bool {
			return strings.Contains(p.LogTail(), "waiting for a client")
		})
		return p
	}
	for _, peer := range []struct {
		name string
		end  lab.End
	}{{"same host", a}, {"another host", b}} {
		vm := func(opts string) string { return "exec timeout -k 5 240 rping " + opts }
		t.Run(peer.name+", program serves", func(t *testing.T) {
			p := serve(t)
			r, err := peer.end.VM.Shell(ctx, vm("-c -a 10.0.0.101 -C 20 -S 4096 -V"))
			if werr := p.Wait(ctx); err != nil || r.ExitCode != 0 || werr != nil ||
				!strings.Contains(p.LogTail(), "20 rounds") {
				t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", werr, p.LogTail(), err, r.ExitCode, r.Stdout, r.Stderr)
			}
		})
		t.Run(peer.name+", VM serves", func(t *testing.T) {
			srv := must[*qemu.Process](t)(lab.Listen(ctx, peer.end.VM, "timeout -k 5 240 rping -s -a 0.0.0.0 -S 4096", 0))
			out, err := w.a.NS.Run(ctx, app("-n 20 -size 4096 "+peer.end.Addr)...)
			if err != nil {
				_ = srv.Kill(ctx)
			}
			r, werr := srv.Wait(ctx)
			if err != nil || !strings.Contains(out, "20 rounds") {
				t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", err, out, werr, r.ExitCode, r.Stdout, r.Stderr)
			}
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		p := serve(t)
		r, err := a.VM.Shell(ctx, "timeout -k 5 240 rping -c -a 10.0.0.101 -p 7999 -C 1")
		if err != nil || r.ExitCode == 0 || !strings.Contains(r.Stdout+r.Stderr, fmt.Sprint("error ", 8)) {
			t.Errorf("%v, exit %d\n%s%s", err, r.ExitCode, r.Stdout, r.Stderr)
		}
		p.Kill()
	})
	quietKernels(ctx, t, w.vms...)
}
