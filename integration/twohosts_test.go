package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
	"github.com/vnicd/vnicd/lab/wirefault"
)

// The guests of all two-host tests.
var (
	vmA = lab.VM{Name: "vm1", MAC: "02:00:00:00:00:01", Addr: "10.0.0.1/24"}
	vmB = lab.VM{Name: "vm2", MAC: "02:00:00:00:00:02", Addr: "10.0.0.2/24"}
)

func hostConfig(local, peer string, vms ...lab.VM) string {
	var b strings.Builder
	fmt.Fprintf(&b, "vtep:\n  local: %s\nnetworks:\n  - name: blue\n    vni: 100\n    peers: [%s]\nvms:\n", local, peer)
	for _, v := range vms {
		fmt.Fprintf(&b, "  - {name: %s, network: blue, mac: %q", v.Name, v.MAC)
		if v.Budget != "" {
			fmt.Fprintf(&b, ", memory-budget: %s", v.Budget)
		}
		if v.HCA != "" {
			fmt.Fprintf(&b, ", hca: %s", v.HCA)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// twoHosts is h1 and h2, joined by a faulty wire (initially without faults), with a vnicd and a VM on each.
type twoHosts struct {
	*lab.Lab
	a, b *lab.Host
	mid  *harness.Namespace
	wire *wirefault.Wire
	vms  []*qemu.Machine
}

func newTwoHosts(ctx context.Context, t *testing.T, l *lab.Lab) *twoHosts {
	t.Helper()
	return makeTwoHosts(ctx, t, l, nil, vmA, vmB)
}

// makeTwoHosts is newTwoHosts with other VMs; prepare, if not nil, is called before anything runs on the hosts.
func makeTwoHosts(ctx context.Context, t *testing.T, l *lab.Lab, prepare func(*twoHosts), va, vb lab.VM,
	options ...string) *twoHosts {
	t.Helper()
	w := wiredHosts(t, l)
	if prepare != nil {
		prepare(w)
	}
	more := strings.Join(options, "\n")
	check(t, w.a.Run(ctx, hostConfig("192.0.2.1", "192.0.2.2", va)+more))
	check(t, w.b.Run(ctx, hostConfig("192.0.2.2", "192.0.2.1", vb)+more))
	dumpOnFailure(t, []*lab.Host{w.a, w.b}, &w.vms)
	var err error
	w.vms, err = l.Boot(ctx, must[qemu.Config](t)(w.a.Config(ctx, va)), must[qemu.Config](t)(w.b.Config(ctx, vb)))
	check(t, err)
	return w
}

// wiredHosts returns the hosts and the wire, with nothing running.
func wiredHosts(t *testing.T, l *lab.Lab) *twoHosts {
	t.Helper()
	w := &twoHosts{Lab: l, a: must[*lab.Host](t)(l.Host("h1")), b: must[*lab.Host](t)(l.Host("h2"))}
	w.mid = must[*harness.Namespace](t)(harness.NewNamespace("vnicd-wire"))
	l.Add(func() { _ = w.mid.Close() })
	for _, x := range []struct {
		h        *lab.Host
		mid, net string
	}{{w.a, "wa", "192.0.2.1/24"}, {w.b, "wb", "192.0.2.2/24"}} {
		check(t, harness.AddVeth(x.h.NS, "ul", w.mid, x.mid, 1500))
		check(t, x.h.NS.AddAddress("ul", netip.MustParsePrefix(x.net)))
		check(t, x.h.RealWire())
	}
	var err error
	w.wire, err = wirefault.Start(w.mid.Name, "wa", "wb", wirefault.Policy{})
	check(t, err)
	l.Add(func() { _ = w.wire.Close() })
	return w
}

func (w *twoHosts) load(ctx context.Context, t *testing.T) (a, b lab.End) {
	t.Helper()
	check(t, both(
		func() error { return lab.LoadModule(ctx, w.vms[0]) },
		func() error { return lab.LoadModule(ctx, w.vms[1]) }))
	return must[lab.End](t)(lab.NewEnd(ctx, w.vms[0], lab.Device, vmA.Addr)),
		must[lab.End](t)(lab.NewEnd(ctx, w.vms[1], lab.Device, vmB.Addr))
}

// TestTwoHosts is the main path: stock programs in VMs on two hosts, connected by RoCEv2 in VXLAN (MT-1, PF-6).
func TestTwoHosts(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	run(ctx, t, w.vms[0], "ping -c 3 -i 0.2 -W 5 10.0.0.2")
	a, b := w.load(ctx, t)

	t.Run("devinfo", func(t *testing.T) {
		out := run(ctx, t, w.vms[0], "ibv_devinfo -v -d vnic0")
		for _, want := range []string{"state:.*PORT_ACTIVE", "link_layer:.*Ethernet", "active_mtu:.*1024",
			`GID\[.*::ffff:10\.0\.0\.1, RoCE v2`} {
			if !regexp.MustCompile(want).MatchString(out) {
				t.Errorf("ibv_devinfo lacks %q:\n%s", want, out)
			}
		}
	})
	t.Run("ping6", func(t *testing.T) {
		// Neighbour discovery is multicast and must cross the tunnels as ARP does.
		ll := strings.TrimSpace(run(ctx, t, w.vms[1], "ip -6 -o addr show dev eth0 scope link | sed 's/.*inet6 //;s,/.*,,'"))
		run(ctx, t, w.vms[0], "ping -c 2 -i 0.2 -W 5 "+ll+"%eth0")
	})
	pingpongs(ctx, t, a, b)
	perftests(ctx, t, a, b)
	t.Run("verified", func(t *testing.T) { verifiedRDMA(ctx, t, a, b) })
	t.Run("capture", func(t *testing.T) { capture(ctx, t, w, a, b) })
	t.Run("faults", func(t *testing.T) { wireFaults(ctx, t, w, a, b) })
	quietKernels(ctx, t, w.vms...)
}

func pingpongs(ctx context.Context, t *testing.T, a, b lab.End) {
	for _, x := range []struct {
		program string
		opts    []string
	}{
		{"ibv_rc_pingpong", []string{"-c"}},
		{"ibv_rc_pingpong", []string{"-c", "-e", "-s", "65536", "-n", "100"}},
		{"ibv_rc_pingpong", []string{"-c", "-m", "256", "-n", "200"}},
		{"ibv_rc_pingpong", []string{"-N", "-n", "200"}},
		{"ibv_uc_pingpong", []string{"-c", "-n", "100"}},
		{"ibv_ud_pingpong", []string{"-c", "-s", "1024", "-n", "200"}},
		{"ibv_srq_pingpong", []string{"-c", "-n", "200", "-q", "4"}},
	} {
		t.Run(x.program+strings.Join(x.opts, ""), func(t *testing.T) {
			out := must[string](t)(lab.Pingpong(ctx, a, b, x.program, x.opts...))
			t.Log(strings.TrimSpace(out))
		})
	}
}

func perftests(ctx context.Context, t *testing.T, a, b lab.End) {
	for _, x := range []struct {
		program string
		opts    []string
	}{
		{"ib_write_bw", []string{"-a", "-n", "20"}}, // 2 B to 8 MiB
		{"ib_read_bw", []string{"-a", "-n", "10"}},
		{"ib_send_bw", []string{"-a", "-n", "10"}},
		{"ib_write_bw", []string{"-q", "64", "-s", "4096", "-n", "20"}},
		{"ib_write_bw", []string{"-q", "8", "-b", "-s", "65536", "-n", "50"}},
		{"ib_send_bw", []string{"-q", "4", "-b", "-s", "16384", "-n", "50", "-r", "64"}},
		{"ib_send_bw", []string{"-c", "UD", "-s", "1024", "-n", "200"}},
		{"ib_write_lat", []string{"-s", "8", "-n", "200"}},
		{"ib_send_lat", []string{"-s", "2", "-n", "200", "-e"}},
		{"ib_read_lat", []string{"-s", "4096", "-n", "100"}},
		{"ib_atomic_bw", []string{"-A", "FETCH_AND_ADD", "-n", "100"}},
	} {
		t.Run(strings.Join(append([]string{x.program}, x.opts...), ""), func(t *testing.T) {
			out := must[string](t)(lab.Perftest(ctx, a, b, x.program, x.opts...))
			rows := lab.Rows(out)
			if len(rows) == 0 {
				t.Fatalf("no result:\n%s", out)
			}
			t.Log(rows)
		})
	}
}

// capture decodes the underlay with tshark: VXLAN with the right VNI, RoCEv2 with the right opcodes inside, traffic
// class as configured (MT-8).
func capture(ctx context.Context, t *testing.T, w *twoHosts, a, b lab.End) {
	file := filepath.Join(w.Dir, "underlay.pcapng")
	p := must[*harness.Process](t)(w.a.NS.Start(filepath.Join(w.Dir, "capture.log"), nil, "tshark", "-q", "-i", "ul", "-w",
		file, "-f", "udp port 4789"))
	defer p.Kill()
	eventually(ctx, t, "tshark captures", func() bool {
		return strings.Contains(p.LogTail(), "Capturing on") && exists(file)
	})
	must[string](t)(lab.Perftest(ctx, a, b, "ib_write_bw", "-s", "4096", "-n", "50"))
	must[string](t)(lab.Perftest(ctx, a, b, "ib_read_bw", "-s", "4096", "-n", "50"))
	must[string](t)(lab.Perftest(ctx, a, b, "ib_send_bw", "-s", "4096", "-n", "50"))
	check(t, p.Stop(ctx))
	out := must[string](t)(w.a.NS.Run(ctx, "tshark", "-r", file, "-T", "fields", "-E", "separator=|",
		"-e", "vxlan.vni", "-e", "ip.dsfield.dscp", "-e", "udp.dstport", "-e", "infiniband.bth.opcode", "-Y", "infiniband"))
	opcodes := map[string]int{}
	for line := range strings.Lines(out) {
		f := strings.Split(strings.TrimSpace(line), "|")
		if len(f) != 4 || f[0] != "100" || !strings.HasPrefix(f[1], "26") || f[2] != "4789,4791" {
			t.Fatalf("frame is not VXLAN VNI 100, DSCP AF31, ports 4789 and 4791: %q", line)
		}
		opcodes[f[3]]++
	}
	t.Logf("opcodes on the underlay: %v", opcodes)
	// RC SEND first/middle/last, WRITE first/middle/last, READ request, READ response first/middle/last, ACK.
	for _, op := range []string{"0", "1", "2", "6", "7", "8", "12", "13", "14", "15", "17"} {
		if opcodes[op] == 0 {
			t.Errorf("no packet with opcode %s", op)
		}
	}
	if mal := must[string](t)(w.a.NS.Run(ctx, "tshark", "-r", file, "-Y", "_ws.malformed")); mal != "" {
		t.Errorf("malformed frames:\n%s", mal)
	}
}

// wireFaults: with 1 % of the underlay's packets lost, or reordered, programs end with correct data. The pingpong
// compares the first byte of each received page (-c), rping all of the data (-V).
func wireFaults(ctx context.Context, t *testing.T, w *twoHosts, a, b lab.End) {
	defer w.wire.SetPolicy(wirefault.Policy{})
	for _, x := range []struct {
		name   string
		policy wirefault.Policy
		count  func() uint64
	}{
		{"drop", wirefault.Policy{Drop: 10, Seed: 1}, w.wire.Dropped.Load},
		{"reorder", wirefault.Policy{Reorder: 10, Distance: 4, Seed: 2}, w.wire.Reordered.Load},
		{"duplicate", wirefault.Policy{Duplicate: 20, Seed: 3}, w.wire.Duplicated.Load},
		{"all", wirefault.Policy{Drop: 10, Reorder: 10, Duplicate: 10, Seed: 4}, w.wire.Dropped.Load},
	} {
		t.Run(x.name, func(t *testing.T) {
			w.wire.SetPolicy(x.policy)
			defer w.wire.SetPolicy(wirefault.Policy{})
			before := x.count()
			pingpongUnderLoss(ctx, t, w, a, b)
			must[string](t)(lab.Perftest(ctx, a, b, "ib_write_bw", "-s", "65536", "-n", "100"))
			must[string](t)(lab.Perftest(ctx, a, b, "ib_read_bw", "-s", "65536", "-n", "100"))
			must[string](t)(lab.Perftest(ctx, a, b, "ib_send_bw", "-s", "65536", "-n", "100"))
			for range 5 {
				verifiedUnderLoss(ctx, t, a, b)
			}
			if n := x.count() - before; n == 0 {
				t.Error("the wire injected no faults: the test shows nothing")
			} else {
				t.Logf("faults in %d packets of %d", n, w.wire.Frames.Load())
			}
		})
	}
}

// pingpongUnderLoss runs 200 iterations of the pingpong, whose halves exit without telling each other: if the last
// acknowledgement of all is lost, its receiver retransmits to a QP that no longer exists. That failure is no defect,
// and the program runs again. It is recognised by one half that completed all iterations, another that exceeded its
// retries, and requests that reached a destroyed queue pair.
func pingpongUnderLoss(ctx context.Context, t *testing.T, w *twoHosts, a, b lab.End) {
	t.Helper()
	const unheard, through = "transport retry counter exceeded (12) for wr_id 2", "200 iters in "
	gone := func() uint64 {
		return hcaStatus(ctx, t, w.a, vmA.Name).Drops["qp-number"] + hcaStatus(ctx, t, w.b, vmB.Name).Drops["qp-number"]
	}
	for try := 1; ; try++ {
		before := gone()
		out, err := lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-c", "-s", "16384", "-n", "200")
		if err == nil {
			return
		}
		asked := gone() - before // seven requests, of which the wire may have lost some
		if try == 3 || asked < 4 || strings.Contains(err.Error(), "invalid data") ||
			!strings.Contains(err.Error(), unheard) || !strings.Contains(out+err.Error(), through) {
			t.Fatalf("%v\n%d requests reached a destroyed queue pair", err, asked)
		}
		t.Logf("the last acknowledgement was lost, and %d retries reached a destroyed queue pair", asked)
	}
}

// verifiedRDMA moves data by READ and WRITE and compares the result (rping -V).
func verifiedRDMA(ctx context.Context, t *testing.T, a, b lab.End) {
	t.Helper()
	_, _, err := lab.Pair(ctx, b.VM, "rping -s -a 0.0.0.0 -V -S 60000 -C 30", a.VM, "rping -c -a "+b.Addr+
		" -V -S 60000 -C 30", 0)
	check(t, err)
}

// verifiedUnderLoss is verifiedRDMA with lost packets. The client compares the data, so its exit status is the result.
// The server may wait for ever: if the client destroys its ID right after disconnecting, the kernel's CM sends the DREQ
// only once.
func verifiedUnderLoss(ctx context.Context, t *testing.T, a, b lab.End) {
	t.Helper()
	p, err := lab.Listen(ctx, b.VM, "rping -s -a 0.0.0.0 -V -S 60000 -C 30", 0)
	check(t, err)
	run(ctx, t, a.VM, lab.Limited(4*time.Minute, "rping -c -a "+b.Addr+" -V -S 60000 -C 30"))
	wctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if r, err := p.Wait(wctx); err != nil {
		_ = p.Signal(ctx, "TERM")
		_ = must[qemu.Result](t)(p.Wait(ctx))
		t.Log("the DREQ did not reach the server")
	} else if r.ExitCode != 0 {
		t.Errorf("server: exit status %d:\n%s", r.ExitCode, r.Stderr)
	}
}

// TestRXE: a VM with our HCA and a VM with Linux SoftRoCE over virtio-net in one tenant network, in both roles. rxe
// checks our ICRCs.
func TestRXE(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	check(t, both(
		func() error { return lab.LoadModule(ctx, w.vms[0]) },
		func() error { return harness.AddRXE(ctx, w.vms[1], "rxe0", "eth0") }))
	check(t, lab.WaitRDMA(ctx, w.vms[1], "rxe0"))
	ours := must[lab.End](t)(lab.NewEnd(ctx, w.vms[0], lab.Device, vmA.Addr))
	theirs := must[lab.End](t)(lab.NewEnd(ctx, w.vms[1], "rxe0", vmB.Addr))
	check(t, l.Programs(ctx, l.Share))
	for _, d := range []struct {
		name           string
		client, server lab.End
	}{{"to-rxe", ours, theirs}, {"from-rxe", theirs, ours}} {
		t.Run(d.name, func(t *testing.T) {
			t.Run("placement", func(t *testing.T) {
				if l.Images.Release == debian12 {
					t.Skip("this kernel's rxe has no ATOMIC WRITE (Linux 6.2)")
				}
				placement(ctx, t, d.client, d.server, false)
			})
			t.Run("pingpong", func(t *testing.T) {
				must[string](t)(lab.Pingpong(ctx, d.client, d.server, "ibv_rc_pingpong", "-c", "-n", "200"))
				must[string](t)(lab.Pingpong(ctx, d.client, d.server, "ibv_ud_pingpong", "-c", "-s", "1024", "-n", "100"))
			})
			for _, p := range []string{"ib_write_bw", "ib_read_bw", "ib_send_bw"} {
				t.Run(p, func(t *testing.T) {
					out := must[string](t)(lab.Perftest(ctx, d.client, d.server, p, "-s", "65536", "-n", "50"))
					t.Log(lab.Rows(out))
				})
			}
		})
	}
	// rxe refused none of our packets, and we none of rxe's.
	s := must[string](t)(w.a.CLI(ctx, "status", "vm1"))
	if m := regexp.MustCompile(`icrc_errors\s+(\d+)`).FindStringSubmatch(s); m == nil || m[1] != "0" {
		t.Errorf("ICRC errors:\n%s", s)
	}
	quietKernels(ctx, t, w.vms...)
}

// placement: client writes, flushes if flush is set, and sends ATOMIC WRITEs to server, which checks the effect with
// its processor (IBTA A19). rxe's FLUSHes have an ICRC that no other implementation accepts (wire's TestRXEFlush).
func placement(ctx context.Context, t *testing.T, client, server lab.End, flush bool) {
	t.Helper()
	how, want := "no", "without FLUSH"
	if flush {
		how, want = "yes", "with FLUSH"
	}
	start := func(e lab.End, to string) func() error {
		return func() error {
			r, err := e.VM.Shell(ctx, lab.Limited(5*time.Minute,
				fmt.Sprintf("/host/placement %s %d %s %s", e.Device, e.GID, how, to)))
			if err == nil && (r.ExitCode != 0 || !strings.Contains(r.Stdout, want)) {
				err = fmt.Errorf("placement at %s: exit status %d\n%s%s", e.Device, r.ExitCode, r.Stdout, r.Stderr)
			}
			return err
		}
	}
	check(t, both(start(server, ""), start(client, server.Addr)))
}

// TestLifecycle: unloading the module, killed programs, reboot, a killed QEMU, a stopped vnicd.
func TestLifecycle(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	a, b := w.load(ctx, t)
	quick := func(t *testing.T) {
		t.Helper()
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-c", "-n", "50"))
	}
	quick(t)
	t.Run("reload", func(t *testing.T) {
		for range 3 {
			run(ctx, t, w.vms[0], "rmmod vnicd")
			check(t, lab.LoadModule(ctx, w.vms[0]))
		}
		a = must[lab.End](t)(lab.NewEnd(ctx, w.vms[0], lab.Device, vmA.Addr))
		quick(t)
	})
	t.Run("killed application", func(t *testing.T) {
		for _, victim := range []int{0, 1} {
			cli, srv := w.stream(ctx, t, a, b)
			procs := []*qemu.Process{cli, srv}
			for _, i := range []int{victim, 1 - victim} {
				// The peer's program may have exited by itself.
				_, err := w.vms[i].Shell(ctx, "pkill -KILL ib_write_bw")
				check(t, err)
				_, err = procs[i].Wait(ctx)
				check(t, err)
			}
			eventually(ctx, t, "the programs' queue pairs are gone", func() bool {
				return rdmaQPs(ctx, t, w.a, "vm1") == 1 && rdmaQPs(ctx, t, w.b, "vm2") == 1
			})
		}
		run(ctx, t, w.vms[0], "rmmod vnicd")
		check(t, lab.LoadModule(ctx, w.vms[0]))
		a = must[lab.End](t)(lab.NewEnd(ctx, w.vms[0], lab.Device, vmA.Addr))
		quick(t)
	})
	quietKernels(ctx, t, w.vms...)
	t.Run("reboot", func(t *testing.T) {
		check(t, w.vms[0].Reboot(ctx))
		check(t, lab.LoadModule(ctx, w.vms[0]))
		a = must[lab.End](t)(lab.NewEnd(ctx, w.vms[0], lab.Device, vmA.Addr))
		quick(t)
	})
	t.Run("QEMU killed", func(t *testing.T) {
		// A connection is open when the peer's QEMU dies: the survivor's program ends with retries exceeded, and the
		// survivor continues to work.
		cli, _ := w.stream(ctx, t, a, b)
		w.vms[1].Kill()
		r := must[qemu.Result](t)(cli.Wait(ctx))
		t.Logf("survivor's program: exit %d\n%s%s", r.ExitCode, tail(r.Stdout, 600), tail(r.Stderr, 600))
		if r.ExitCode == 0 || r.ExitCode == 124 {
			t.Error("the survivor's program ended without an error")
		}
		eventually(ctx, t, "the dead VM's objects are gone", func() bool { return rdmaQPs(ctx, t, w.b, "vm2") == 0 })
		ms, err := l.Boot(ctx, must[qemu.Config](t)(w.b.Config(ctx, vmB)))
		check(t, err)
		w.vms[1] = ms[0]
		check(t, lab.LoadModule(ctx, w.vms[1]))
		b = must[lab.End](t)(lab.NewEnd(ctx, w.vms[1], lab.Device, vmB.Addr))
		quick(t)
	})
	quietKernels(ctx, t, w.vms...)
	t.Run("vnicd stopped", func(t *testing.T) {
		check(t, w.b.Stop(ctx))
		// The guest's driver sees a dead device: nothing hangs, programs fail, and the module can be unloaded.
		shortly, cancel := context.WithTimeout(ctx, 3*time.Minute)
		defer cancel()
		r := must[qemu.Result](t)(w.vms[1].Shell(shortly,
			"timeout 60 ibv_rc_pingpong -d vnic0 -g 0 -n 1 10.0.0.1; echo status $?"))
		if strings.Contains(r.Stdout, "status 0") || strings.Contains(r.Stdout, "status 124") {
			t.Errorf("a program on a dead device: %s%s", r.Stdout, r.Stderr)
		}
		run(shortly, t, w.vms[1], "rmmod vnicd")
		run(ctx, t, w.vms[0], "ibv_devinfo -d vnic0")
	})
	quietKernels(ctx, t, w.vms...)
}

// stream starts an endless stream of WRITEs from vm1 to vm2 and returns once data flows.
func (w *twoHosts) stream(ctx context.Context, t *testing.T, a, b lab.End) (client, server *qemu.Process) {
	t.Helper()
	const program = "exec timeout -k 5 200 ib_write_bw -F -d %s -x %d --run_infinitely -D 1"
	before := hcaStatus(ctx, t, w.a, "vm1").Stats["tx_packets"]
	server = must[*qemu.Process](t)(w.vms[1].StartShell(ctx, fmt.Sprintf(program, b.Device, b.GID)))
	check(t, harness.WaitGuest(ctx, w.vms[1], "ss -ltn | grep -q :18515"))
	client = must[*qemu.Process](t)(w.vms[0].StartShell(ctx, fmt.Sprintf(program+" "+b.Addr, a.Device, a.GID)))
	eventually(ctx, t, "traffic", func() bool {
		return hcaStatus(ctx, t, w.a, "vm1").Stats["tx_packets"] > before+1000
	})
	return client, server
}

// rdmaQPs returns the number of a VM's queue pairs, including the GSI QP.
func rdmaQPs(ctx context.Context, t *testing.T, h *lab.Host, vm string) int {
	t.Helper()
	return len(hcaStatus(ctx, t, h, vm).QPs)
}

// vmStatus holds the HCA and memory parts of `vnicd status VM -j`.
type vmStatus struct {
	HCA    hca.Status
	Memory hostdriver.Status
}

func statusOf(ctx context.Context, t *testing.T, h *lab.Host, vm string) (s vmStatus) {
	t.Helper()
	out := must[string](t)(h.CLI(ctx, "status", vm, "-j"))
	check(t, json.Unmarshal([]byte(out), &s))
	return s
}

func hcaStatus(ctx context.Context, t *testing.T, h *lab.Host, vm string) hca.Status {
	t.Helper()
	return statusOf(ctx, t, h, vm).HCA
}
