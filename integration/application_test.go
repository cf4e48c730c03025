package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// buildExample builds a program of guestdrv/examples, and returns its path.
func buildExample(ctx context.Context, t *testing.T, l *lab.Lab, name string) string {
	t.Helper()
	program := filepath.Join(l.Dir, name)
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", program,
		"../guestdrv/examples/"+name).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// addApplications adds a list of applications to a running daemon's configuration.
func addApplications(ctx context.Context, t *testing.T, h *lab.Host, list string) {
	t.Helper()
	f := must[*os.File](t)(os.OpenFile(filepath.Join(h.Dir, "vnicd.yaml"), os.O_APPEND|os.O_WRONLY, 0))
	_, err := f.WriteString("applications:\n" + list + "\n")
	check(t, err)
	check(t, f.Close())
	must[string](t)(h.CLI(ctx, "reload"))
}

// TestHostApplications: programs of the host (PF-4, MT-10) exchange messages with VMs on the same host and on another,
// as server and as client, with pinned memory and with on-demand pages. The VMs run the distribution's ibv_rc_pingpong,
// and perftest with the C library's example. A killed program leaves nothing behind.
func TestHostApplications(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	program := buildExample(ctx, t, l, "pingpong")
	// The programs exchange their parameters over TCP through the host's port.
	addApplications(ctx, t, w.a, `  - {name: app1, network: blue, mac: "02:00:00:00:00:a1", ips: [10.0.0.101]}
  - {name: app2, network: blue, mac: "02:00:00:00:00:a2"}`)
	must[string](t)(w.a.CLI(ctx, "network", "add-tap", "blue", "blue0", "address", "10.0.0.201/24"))
	must[string](t)(w.a.NS.Run(ctx, "ip", "link", "set", "lo", "up"))
	a, b := w.load(ctx, t)
	app := func(n int, opts string) []string {
		return append([]string{program, "-socket", fmt.Sprintf("%s/app%d.hca", w.a.Dir, n), "-address",
			fmt.Sprintf("10.0.0.10%d", n), "-timeout", "4m"}, strings.Fields(opts)...)
	}
	serve := func(t *testing.T, opts string) *harness.Process {
		t.Helper()
		p := must[*harness.Process](t)(w.a.NS.Start(filepath.Join(w.a.Dir, "app.log"), nil, app(1, opts)...))
		t.Cleanup(p.Kill)
		eventually(ctx, t, "the program listens", func() bool {
			out, err := w.a.NS.Run(ctx, "ss", "-ltnH", "sport", "=", "18515")
			return err == nil && out != ""
		})
		return p
	}
	for _, peer := range []struct {
		name string
		end  lab.End
	}{{"same host", a}, {"another host", b}} {
		vm := func(opts string) string {
			return fmt.Sprintf("exec timeout -k 5 240 ibv_rc_pingpong -d %s -g %d %s", peer.end.Device, peer.end.GID, opts)
		}
		for _, x := range []struct{ name, app, vm string }{
			{"pinned", "-n 200 -size 4096", "-n 200 -s 4096"},
			{"on demand", "-n 50 -size 100000 -on-demand", "-n 50 -s 100000 -o"},
		} {
			t.Run(peer.name+", program serves, "+x.name, func(t *testing.T) {
				p := serve(t, x.app)
				r, err := peer.end.VM.Shell(ctx, vm(x.vm+" 10.0.0.201"))
				if werr := p.Wait(ctx); err != nil || r.ExitCode != 0 || werr != nil {
					t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", werr, p.LogTail(), err, r.ExitCode, r.Stdout, r.Stderr)
				}
				t.Log(p.LogTail())
			})
			t.Run(peer.name+", VM serves, "+x.name, func(t *testing.T) {
				srv := must[*qemu.Process](t)(lab.Listen(ctx, peer.end.VM, strings.TrimPrefix(vm(x.vm), "exec "), 18515))
				out, err := w.a.NS.Run(ctx, app(2, x.app+" "+peer.end.Addr)...)
				if err != nil {
					_ = srv.Kill(ctx)
				}
				r, werr := srv.Wait(ctx)
				if err != nil || werr != nil || r.ExitCode != 0 {
					t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", err, out, werr, r.ExitCode, r.Stdout, r.Stderr)
				}
				t.Log(out)
			})
		}
	}
	bandwidth(ctx, t, l, w, a, b)
	t.Run("two programs", func(t *testing.T) {
		p := serve(t, "-n 500")
		out, err := w.a.NS.Run(ctx, app(2, "-n 500 127.0.0.1")...)
		if werr := p.Wait(ctx); err != nil || werr != nil {
			t.Fatalf("%v\n%s\n%v\n%s", err, out, werr, p.LogTail())
		}
		t.Log(out)
	})
	for _, turn := range []string{"any", "VM's"} {
		t.Run("killed, "+turn+" turn", func(t *testing.T) { killedApplication(ctx, t, w, b, turn == "VM's", serve) })
	}
	quietKernels(ctx, t, w.vms...)
}

// bandwidth runs the example of the C library against the distribution's perftest in VMs, both ways round.
func bandwidth(ctx context.Context, t *testing.T, l *lab.Lab, w *twoHosts, a, b lab.End) {
	dir := filepath.Join(l.Dir, "libvnicd")
	out, err := exec.CommandContext(ctx, "make", "-s", "-C", "../guestdrv/libvnicd", "OUT="+dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const size, count = 100000, 300
	app := func(args ...string) []string {
		return append([]string{filepath.Join(dir, "rdma_bw"), w.a.Dir + "/app1.hca", "10.0.0.101", "18515",
			fmt.Sprint(size)}, args...)
	}
	// transferred checks what the program printed: perftest's memory is random, so nearly all bytes become others.
	transferred := func(t *testing.T, out string, changes bool) {
		t.Helper()
		var messages, bytes, changed int
		var rate float64
		line := out[max(0, strings.Index(out, fmt.Sprint(count, " messages"))):]
		if _, err := fmt.Sscanf(line, "%d messages of %d bytes, %f MiB/s; %d bytes here", &messages, &bytes, &rate,
			&changed); err != nil || messages != count || bytes != size || rate <= 0 || changes != (changed > size*9/10) {
			t.Errorf("%v: %q", err, out)
		}
	}
	for _, peer := range []struct {
		name string
		end  lab.End
	}{{"same host", a}, {"another host", b}} {
		for _, verb := range []string{"write", "read"} {
			program := fmt.Sprintf("timeout -k 5 240 ib_%s_bw -d %s -x %d -s %d -n %d", verb, peer.end.Device,
				peer.end.GID, size, count)
			t.Run(peer.name+", C program serves ib_"+verb+"_bw", func(t *testing.T) {
				p := must[*harness.Process](t)(w.a.NS.Start(filepath.Join(w.a.Dir, "bw.log"), nil, app()...))
				t.Cleanup(p.Kill)
				eventually(ctx, t, "the program listens", func() bool { return strings.Contains(p.LogTail(), "port 18515") })
				r, err := peer.end.VM.Shell(ctx, "exec "+program+" 10.0.0.201")
				if werr := p.Wait(ctx); err != nil || r.ExitCode != 0 || werr != nil {
					t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", werr, p.LogTail(), err, r.ExitCode, r.Stdout, r.Stderr)
				}
				transferred(t, p.LogTail(), verb == "write")
			})
			t.Run(peer.name+", ib_"+verb+"_bw serves C program", func(t *testing.T) {
				srv := must[*qemu.Process](t)(lab.Listen(ctx, peer.end.VM, program, 18515))
				out, err := w.a.NS.Run(ctx, app(verb, fmt.Sprint(count), peer.end.Addr)...)
				if err != nil {
					_ = srv.Kill(ctx)
				}
				r, werr := srv.Wait(ctx)
				if err != nil || werr != nil || r.ExitCode != 0 {
					t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", err, out, werr, r.ExitCode, r.Stdout, r.Stderr)
				}
				transferred(t, out, verb == "read")
			})
		}
	}
}

// killedApplication kills the program while a VM talks to it: the device releases all its objects, and the next program
// gets the address. If the VM's program sends next, it ends with an error. Otherwise it may wait for a message after
// its own was acknowledged (the device outlives the program by the milliseconds that the kernel takes to end it) and
// never learns of the end, as with any HCA; then the test ends it.
func killedApplication(ctx context.Context, t *testing.T, w *twoHosts, b lab.End, vmsTurn bool,
	serve func(*testing.T, string) *harness.Process) {
	p := serve(t, "-n 1000000")
	vm := must[*qemu.Process](t)(b.VM.StartShell(ctx,
		fmt.Sprintf("exec timeout -k 5 240 ibv_rc_pingpong -d %s -g %d -n 1000000 10.0.0.201", b.Device, b.GID)))
	status := func() string { return must[string](t)(w.a.CLI(ctx, "status", "app1")) }
	received := func() string { return regexp.MustCompile(`rx_packets +\d+`).FindString(status()) }
	eventually(ctx, t, "the program's queue pair is connected", func() bool { return strings.Contains(status(), "RTS") })
	first := received()
	eventually(ctx, t, "messages come", func() bool { return received() != first })
	if vmsTurn {
		// The host's program answers at once, so the stopped VM program is the next to send.
		run(ctx, t, b.VM, "pkill -STOP -x ibv_rc_pingpong")
		was := ""
		eventually(ctx, t, "the program has answered", func() bool {
			last := was
			was = status()
			return was == last
		})
	}
	p.Kill()
	eventually(ctx, t, "nothing is left of the program", func() bool {
		return strings.Contains(status(), "hca down") &&
			strings.Contains(status(), "0 PDs, 0 CQs, 0 SRQs, 0 MRs with 0 pages, 0 QPs")
	})
	if vmsTurn {
		run(ctx, t, b.VM, "pkill -CONT -x ibv_rc_pingpong")
		if r, err := vm.Wait(ctx); err != nil || r.ExitCode == 0 ||
			!strings.Contains(r.Stdout+r.Stderr, "transport retry counter exceeded") {
			t.Errorf("the VM's program: %v, exit %d\n%s%s", err, r.ExitCode, r.Stdout, r.Stderr)
		}
	} else {
		run(ctx, t, b.VM, "pkill -x ibv_rc_pingpong || true")
		if r, err := vm.Wait(ctx); err != nil || r.ExitCode == 0 {
			t.Errorf("the VM's program: %v, exit %d\n%s%s", err, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
	next := serve(t, "-n 1")
	next.Kill()
}
