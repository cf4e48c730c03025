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

// TestHostConnections: programs of the host (guestdrv/rdmacm; PF-4, MT-10) and the distribution's rping and udaddy in
// VMs on the same host and on another find each other by address and port, in both roles. Data of rping is verified. A
// VM's request for a port without a listener is rejected with the reason, for programs and for the kernel's NVMe.
func TestHostConnections(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	rping, udaddy := buildExample(ctx, t, l, "rping"), buildExample(ctx, t, l, "udaddy")
	addApplications(ctx, t, w.a, `  - {name: app1, network: blue, mac: "02:00:00:00:00:a1", ips: [10.0.0.101]}`)
	a, b := w.load(ctx, t)
	app := func(program, opts string) []string {
		return append([]string{program, "-socket", w.a.Dir + "/app1.hca", "-address", "10.0.0.101", "-timeout", "4m"},
			strings.Fields(opts)...)
	}
	serve := func(t *testing.T, program, opts string) *harness.Process {
		t.Helper()
		p := must[*harness.Process](t)(w.a.NS.Start(filepath.Join(w.a.Dir, "app.log"), nil, app(program, opts)...))
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
		for _, x := range []struct{ name, program, server, client, vmServer, vmClient, done string }{
			{"rping", rping, "-size 4096", "-n 20 -size 4096", "rping -s -a 0.0.0.0 -S 4096",
				"rping -c -a 10.0.0.101 -C 20 -S 4096 -V", "20 rounds"},
			{"udaddy", udaddy, "-n 10", "-n 10", "udaddy", "udaddy -s 10.0.0.101", "10 messages received"},
		} {
			const limited = "timeout -k 5 240 "
			t.Run(peer.name+", "+x.name+" serves", func(t *testing.T) {
				p := serve(t, x.program, x.server)
				r, err := peer.end.VM.Shell(ctx, "exec "+limited+x.vmClient)
				if werr := p.Wait(ctx); err != nil || r.ExitCode != 0 || werr != nil || !strings.Contains(p.LogTail(), x.done) {
					t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", werr, p.LogTail(), err, r.ExitCode, r.Stdout, r.Stderr)
				}
			})
			t.Run(peer.name+", VM serves "+x.name, func(t *testing.T) {
				srv := must[*qemu.Process](t)(lab.Listen(ctx, peer.end.VM, limited+x.vmServer, 0))
				out, err := w.a.NS.Run(ctx, app(x.program, x.client+" "+peer.end.Addr)...)
				if err != nil {
					_ = srv.Kill(ctx)
				}
				r, werr := srv.Wait(ctx)
				if err != nil || !strings.Contains(out, x.done) {
					t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", err, out, werr, r.ExitCode, r.Stdout, r.Stderr)
				}
			})
		}
	}
	t.Run("nobody listens", func(t *testing.T) {
		p := serve(t, rping, "")
		r, err := a.VM.Shell(ctx, "timeout -k 5 240 rping -c -a 10.0.0.101 -p 7999 -C 1")
		if err != nil || r.ExitCode == 0 || !strings.Contains(r.Stdout+r.Stderr, fmt.Sprint("error ", 8)) {
			t.Errorf("%v, exit %d\n%s%s", err, r.ExitCode, r.Stdout, r.Stderr)
		}
		// The kernel's NVMe client says what it was told.
		r, err = a.VM.Shell(ctx, "timeout -k 5 240 sh -c '"+lab.NVMe{Transport: "rdma", Addr: "10.0.0.101"}.Connect(0)+"'")
		if err != nil || r.ExitCode == 0 {
			t.Errorf("nvme: %v, exit %d\n%s%s", err, r.ExitCode, r.Stdout, r.Stderr)
		}
		run(ctx, t, a.VM, "dmesg | grep -E 'nvme.*rejected: status 8 \\(invalid service ID\\)'")
		p.Kill()
	})
	quietKernels(ctx, t, w.vms...)
}
