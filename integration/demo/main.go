// Command demo is `make demo`: two "hosts" (network namespaces joined by a veth pair), a vnicd and a VM on each, and
// stock RDMA programs between the VMs. RoCEv2 crosses the underlay inside VXLAN. The same programs then run over
// SoftRoCE (rxe) in the same VMs, for comparison. The exit status is 0 if every step worked.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/integration/rig"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

const (
	addrA, addrB = "10.0.0.1/24", "10.0.0.2/24"
	macA, macB   = "02:00:00:00:00:01", "02:00:00:00:00:02"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Minute)
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "\ndemo: %v\n", err)
		os.Exit(1)
	}
}

var start = time.Now()

func step(format string, args ...any) {
	fmt.Printf("[%4.0fs] %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
}

type demo struct {
	*lab.Lab
	a, b    *lab.Host
	vms     []*qemu.Machine
	summary strings.Builder
}

func run(ctx context.Context) error {
	step("preparing QEMU, guest image and kernel module (the first time takes minutes)")
	l, err := lab.New(ctx, os.Stderr, true)
	if err != nil {
		return err
	}
	defer l.Run()
	d := &demo{Lab: l}
	if err := d.hosts(ctx); err != nil {
		return err
	}
	if err := d.guests(ctx); err != nil {
		return err
	}
	ours, err := d.programs(ctx, lab.Device)
	if err != nil {
		return err
	}
	client, server, err := d.ends(ctx, lab.Device)
	if err != nil {
		return err
	}
	if err := d.picture(ctx, client, server); err != nil {
		return err
	}
	step("the same over SoftRoCE (rxe) in the same VMs")
	for _, m := range d.vms {
		if _, err := m.Run(ctx, "rmmod vnicd"); err != nil {
			return err
		}
		if err := harness.AddRXE(ctx, m, "rxe0", "eth0"); err != nil {
			return err
		}
	}
	theirs, err := d.programs(ctx, "rxe0")
	if err != nil {
		return err
	}
	if err := d.healthy(ctx); err != nil {
		return err
	}
	d.show(ours, theirs)
	return nil
}

func (d *demo) hosts(ctx context.Context) (err error) {
	step("creating two hosts, joined by a veth pair, with a vnicd on each")
	if d.a, err = d.Host("h1"); err != nil {
		return err
	}
	if d.b, err = d.Host("h2"); err != nil {
		return err
	}
	if err := d.Underlay(d.a, netip.MustParsePrefix("192.0.2.1/24"), d.b, netip.MustParsePrefix("192.0.2.2/24"),
		1500); err != nil {
		return err
	}
	conf := func(local, peer, vm, mac string) string {
		return fmt.Sprintf(`vtep:
  local: %s
networks:
  - name: blue
    vni: 100
    peers: [%s]
vms:
  - name: %s
    network: blue
    mac: "%s"
monitoring: {page: true}
`, local, peer, vm, mac)
	}
	return errors.Join(
		d.a.Run(ctx, conf("192.0.2.1", "192.0.2.2", "vm1", macA)),
		d.b.Run(ctx, conf("192.0.2.2", "192.0.2.1", "vm2", macB)))
}

func (d *demo) guests(ctx context.Context) error {
	step("booting vm1 on h1 and vm2 on h2 (Debian, kernel %s, %s)", d.Images.KVer, d.Accel)
	c1, err := d.a.Config(ctx, lab.VM{Name: "vm1", MAC: macA, Addr: addrA})
	if err != nil {
		return err
	}
	c2, err := d.b.Config(ctx, lab.VM{Name: "vm2", MAC: macB, Addr: addrB})
	if err != nil {
		return err
	}
	if d.vms, err = d.Boot(ctx, c1, c2); err != nil {
		return err
	}
	step("loading vnicd.ko in both")
	for _, m := range d.vms {
		if err := lab.LoadModule(ctx, m); err != nil {
			return err
		}
	}
	device, err := d.device(ctx)
	if err != nil {
		return err
	}
	step("QEMU has them behind its device of the kind %q (`hca: auto`)", device)
	fmt.Fprintf(&d.summary, "HCA behind QEMU's device of the kind %q\n", device)
	ping, err := d.vms[0].Run(ctx, "ping -c 3 -i 0.3 10.0.0.2")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(ping), "\n")
	fmt.Fprintf(&d.summary, "ping vm1 -> vm2 (virtio-net over VXLAN)\n    %s\n    %s\n", lines[len(lines)-2],
		lines[len(lines)-1])
	info, err := d.vms[0].Run(ctx, "ibv_devinfo")
	if err != nil {
		return err
	}
	fmt.Fprintf(&d.summary, "ibv_devinfo in vm1\n%s", indent(info))
	return nil
}

// device is the kind of QEMU's device behind which the HCAs are.
func (d *demo) device(ctx context.Context) (string, error) {
	status, err := d.a.Status(ctx)
	if err != nil {
		return "", err
	}
	vms, _ := status["vms"].([]any)
	if len(vms) != 1 {
		return "", fmt.Errorf("h1 has %d VMs, want 1", len(vms))
	}
	kind, _ := vms[0].(map[string]any)["hca_device"].(string)
	if kind == "" {
		return "", errors.New("no HCA is connected on h1")
	}
	return kind, nil
}

// result holds the output of the programs over one device.
type result struct {
	write, read, lat float64
	pingpong         string
}

// ends returns the device's end in both VMs.
func (d *demo) ends(ctx context.Context, device string) (client, server lab.End, err error) {
	if client, err = lab.NewEnd(ctx, d.vms[0], device, addrA); err == nil {
		server, err = lab.NewEnd(ctx, d.vms[1], device, addrB)
	}
	return client, server, err
}

func (d *demo) programs(ctx context.Context, device string) (r result, err error) {
	if err := errors.Join(lab.WaitRDMA(ctx, d.vms[0], device), lab.WaitRDMA(ctx, d.vms[1], device)); err != nil {
		return r, err
	}
	client, server, err := d.ends(ctx, device)
	if err != nil {
		return r, err
	}
	step("%s: ibv_rc_pingpong", device)
	if r.pingpong, err = lab.Pingpong(ctx, client, server, "ibv_rc_pingpong", "-c", "-n 500"); err != nil {
		return r, err
	}
	for _, x := range []struct {
		program string
		opts    []string
		value   func(string) (float64, error)
		to      *float64
	}{
		{"ib_write_bw", []string{"-s 65536", "-n 500"}, lab.Bandwidth, &r.write},
		{"ib_read_bw", []string{"-s 65536", "-n 500"}, lab.Bandwidth, &r.read},
		{"ib_send_lat", []string{"-s 2", "-n 500"}, lab.Latency, &r.lat},
	} {
		step("%s: %s %s", device, x.program, strings.Join(x.opts, " "))
		out, err := lab.Perftest(ctx, client, server, x.program, x.opts...)
		if err != nil {
			return r, err
		}
		if *x.to, err = x.value(out); err != nil {
			return r, err
		}
	}
	return r, nil
}

// picture checks the web page of h1 during RDMA traffic and writes a screenshot of it, if a browser is installed.
func (d *demo) picture(ctx context.Context, client, server lab.End) error {
	if _, err := rig.FindBrowser(); err != nil {
		step("no picture of the web page: %v", err)
		return nil
	}
	step("the web page of h1 while ib_write_bw runs")
	b, err := rig.NewBrowser(ctx, d.a.NS)
	if err != nil {
		return err
	}
	defer b.Close()
	picture := filepath.Join("build", "page.png")
	stop := rig.Traffic(ctx, client, server)
	if err := errors.Join(b.Window(ctx, 1280, 900, false), rig.WatchPage(ctx, b, "http://127.0.0.1:9469/", "vm1"),
		b.Screenshot(ctx, filepath.Join(d.Root, picture)), stop()); err != nil {
		return err
	}
	fmt.Fprintf(&d.summary,
		"the web page of h1 (http://127.0.0.1:9469/ there) while ib_write_bw ran: topology and changing rates\n    %s\n",
		picture)
	return nil
}

// healthy fails the demo if a guest's kernel log reports a defect.
func (d *demo) healthy(ctx context.Context) error {
	for _, m := range d.vms {
		bad, err := harness.KernelComplaints(ctx, m)
		if err != nil {
			return err
		}
		if len(bad) > 0 {
			return fmt.Errorf("the kernel log of %s reports defects:\n%s", m.Name(), strings.Join(bad, "\n"))
		}
	}
	return nil
}

func (d *demo) show(ours, theirs result) {
	fmt.Printf("\n%s", d.summary.String())
	fmt.Printf("ibv_rc_pingpong vm1 -> vm2, data verified\n%s", indent(ours.pingpong))
	fmt.Printf("perftest vm1 -> vm2, two hosts, RoCEv2 in VXLAN (VMs run by %s)\n", d.Accel)
	fmt.Printf("    %-28s %12s %12s %8s\n", "", "vnicd", "rxe", "ratio")
	row := func(name, unit string, a, b, ratio float64) {
		fmt.Printf("    %-28s %12.1f %12.1f %7.1fx\n", name+" "+unit, a, b, ratio)
	}
	row("ib_write_bw 64 KiB", "MiB/s", ours.write, theirs.write, ours.write/theirs.write)
	row("ib_read_bw  64 KiB", "MiB/s", ours.read, theirs.read, ours.read/theirs.read)
	row("ib_send_lat 2 B", "us", ours.lat, theirs.lat, theirs.lat/ours.lat)
	fmt.Println("\nEvery step worked. `make test` checks much more; README.md says how to attach your own VM.")
}

func indent(s string) string {
	return "    " + strings.ReplaceAll(strings.TrimSpace(s), "\n", "\n    ") + "\n"
}
