// Package lab makes "hosts" (network namespaces with an underlay address and a running vnicd) and VMs on them, for the
// VM tests, the demo and the benchmark.
//
// It uses only what a user has: the vnicd binary, its configuration file, its control socket, stock programs in the
// guest.
package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab/harness"
)

// Lab holds the images, the binary and the module, and cleans up.
type Lab struct {
	*harness.Env
	harness.Cleanup
	// VNICD is the path of the daemon's binary.
	VNICD string
	// Share is the directory that guests see as /host; vnicd.ko lies in it.
	Share string
	// KernelArgs are appended to the kernel command line of every VM.
	KernelArgs []string
	// Settings, if set, returns lines that are added to a host's configuration. A key that the configuration has must not
	// be among them.
	Settings func(configuration string) string
	// Complain, if set, is called at the end of a VM with a debugging kernel if that reports a defect.
	Complain func(vm, what string)

	vms []*qemu.Machine // whose consoles were not searched
}

// Open returns a lab with prepared images, which runs the binary vnicd. share is the directory with vnicd.ko; "": none.
// The lab owns env.
func Open(env *harness.Env, vnicd, share string) *Lab {
	l := &Lab{Env: env, VNICD: vnicd, Share: share}
	l.Add(func() { _ = env.Close() })
	return l
}

// New is Open in the source tree: it prepares images and, on request, the kernel module, and finds the binary that
// `make build` made. Progress goes to log.
func New(ctx context.Context, log io.Writer, module bool) (*Lab, error) {
	env, err := harness.Prepare(ctx, log)
	if err != nil {
		return nil, err
	}
	l := Open(env, filepath.Join(env.Root, "build", "vnicd"), "")
	if _, err = os.Stat(l.VNICD); err != nil {
		err = fmt.Errorf("no vnicd binary; run `make build` first: %w", err)
	} else if module {
		l.Share, err = l.Module(ctx)
	}
	if err != nil {
		l.Run()
		return nil, err
	}
	return l, nil
}

// Host is a namespace with an underlay address and a vnicd.
type Host struct {
	lab *Lab
	// Name is short; it is part of interface and directory names.
	Name string
	NS   *harness.Namespace
	// Dir holds configuration, sockets and log.
	Dir  string
	Proc *harness.Process
	// Env is added to vnicd's environment.
	Env []string
	// Group, if set before Start and Config, bounds the memory of vnicd and of the VMs.
	Group *harness.MemoryGroup
	// Manager, if set before Start, keeps the descriptors that vnicd passes to its successor.
	Manager *harness.ServiceManager
	// Keep, if set before Start, has vnicd run under a keeper (`vnicd run --keep`), which is Proc then.
	Keep bool
}

// Host creates a host without links and without vnicd.
func (l *Lab) Host(name string) (*Host, error) {
	ns, err := harness.NewNamespace("vnicd-" + name)
	if err != nil {
		return nil, err
	}
	l.Add(func() { _ = ns.Close() })
	h := &Host{lab: l, Name: name, NS: ns, Dir: filepath.Join(l.Dir, name)}
	return h, os.MkdirAll(h.Dir, 0o755)
}

// Underlay joins two hosts by a veth pair named "ul" at both ends.
func (l *Lab) Underlay(a *Host, addrA netip.Prefix, b *Host, addrB netip.Prefix, mtu int) error {
	if err := harness.AddVeth(a.NS, "ul", b.NS, "ul", mtu); err != nil {
		return err
	}
	return errors.Join(a.NS.AddAddress("ul", addrA), b.NS.AddAddress("ul", addrB), a.RealWire(), b.RealWire())
}

// RealWire makes the host's underlay interface behave like a physical one. By default a veth pair passes frames larger
// than the MTU, and inner TCP segments without a checksum.
func (h *Host) RealWire() error {
	_, err := h.NS.Run(context.Background(), "ethtool", "-K", "ul",
		"tso", "off", "gso", "off", "gro", "off", "tx-udp-segmentation", "off", "tx", "off")
	return err
}

// Run writes the configuration (run-dir is added) and starts vnicd on the host. It returns when the daemon answers.
func (h *Host) Run(ctx context.Context, yaml string) error {
	path := filepath.Join(h.Dir, "vnicd.yaml")
	text := fmt.Sprintf("host: %s\nrun-dir: %s\n", h.Name, h.Dir)
	if h.lab.Settings != nil {
		text += h.lab.Settings(yaml)
	}
	text += yaml
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return err
	}
	return h.Start(ctx)
}

// Launch starts vnicd with the configuration that Run wrote, without waiting. The caller owns the process.
func (h *Host) Launch() (*harness.Process, error) {
	log, argv := filepath.Join(h.Dir, "vnicd.log"), []string{h.lab.VNICD, "run", "-c", filepath.Join(h.Dir, "vnicd.yaml"),
		"--log-level", "debug"}
	env := h.Env
	if h.Keep {
		argv = append(argv, "--keep")
		env = append(slices.Clone(env), "TMPDIR="+h.Dir) // what a keeper leaves that the lab kills goes with the lab
	}
	if h.Group != nil {
		argv = h.Group.Enter(argv...)
	}
	if h.Manager != nil {
		return h.Manager.Start(h.NS, log, env, argv...)
	}
	return h.NS.Start(log, env, argv...)
}

// Start calls Launch and returns when the daemon answers.
func (h *Host) Start(ctx context.Context) error {
	p, err := h.Launch()
	if err != nil {
		return err
	}
	h.Proc = p
	h.lab.Add(p.Kill)
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		if _, err := h.Status(ctx); err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("vnicd on %s exited: %s", h.Name, p.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("vnicd on %s does not answer: %s", h.Name, p.LogTail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stop stops vnicd with SIGTERM and reports a bad exit status.
func (h *Host) Stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return h.Proc.Stop(ctx)
}

// CLI runs a vnicd sub-command on the host.
func (h *Host) CLI(ctx context.Context, args ...string) (string, error) {
	return h.NS.Run(ctx, append([]string{h.lab.VNICD, "-c", filepath.Join(h.Dir, "vnicd.yaml")}, args...)...)
}

// Status returns the decoded output of `vnicd status -j`.
func (h *Host) Status(ctx context.Context) (map[string]any, error) {
	out, err := h.CLI(ctx, "status", "-j")
	if err != nil {
		return nil, err
	}
	var m map[string]any
	return m, json.Unmarshal([]byte(out), &m)
}

// Log returns the daemon's log so far.
func (h *Host) Log() string {
	b, err := os.ReadFile(filepath.Join(h.Dir, "vnicd.log"))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// VM describes a guest attached to a host's vnicd.
type VM struct {
	Name string
	MAC  string
	Addr string // IP/LENGTH of eth0
	MTU  int    // 0: 1450
	CPUs int
	// MemoryMiB is the guest's RAM; 0: 768. SwapMiB is the size of its swap disk; 0: none.
	MemoryMiB, SwapMiB int
	// Budget is the VM's memory-budget, such as 64MiB; "": none.
	Budget string
	// KernelArgs are appended to the kernel command line.
	KernelArgs []string
	// NoHCA omits the HCA: virtio-net only.
	NoHCA bool
	// HCA is the VM's hca in the configuration, vhost-user or ivshmem; "": the default.
	HCA string
	// Queues is the number of virtio-net queue pairs in the configuration; 0: one.
	Queues int
	// Tap attaches the NIC to this TAP interface instead of vnicd's socket.
	Tap string
	// Shares are directories that the guest may mount.
	Shares []qemu.Share
}

// Config returns the QEMU configuration of a guest on h. The HCA's arguments come from `vnicd qemu-args`, so that the
// tests use what users are told.
func (h *Host) Config(ctx context.Context, v VM) (qemu.Config, error) {
	if v.MTU == 0 {
		v.MTU = 1450
	}
	nic := qemu.NIC{MAC: v.MAC, MTU: v.MTU, Queues: v.Queues, IfName: "eth0"}
	if v.Addr != "" {
		p, err := netip.ParsePrefix(v.Addr)
		if err != nil {
			return qemu.Config{}, err
		}
		nic.Addresses = []netip.Prefix{p}
	}
	if v.MemoryMiB == 0 {
		v.MemoryMiB = 768
	}
	cfg := qemu.Config{Name: v.Name, CPUs: harness.CPUs(v.CPUs), MemoryMiB: harness.MemoryMiB(v.MemoryMiB),
		HostShare: h.lab.Share, Shares: v.Shares, Netns: h.NS.Name, KernelArgs: slices.Concat(h.lab.KernelArgs, v.KernelArgs)}
	if v.SwapMiB != 0 {
		disk := filepath.Join(h.Dir, v.Name+".swap")
		if err := makeSparse(disk, v.SwapMiB); err != nil {
			return cfg, err
		}
		cfg.ExtraArgs = append(cfg.ExtraArgs, "-drive", "file="+disk+",format=raw,if=none,id=swap,cache=unsafe", "-device",
			"virtio-blk-pci,drive=swap,romfile=")
	}
	if h.Group != nil {
		img := *h.lab.Images
		var err error
		if img.QEMU, err = h.Group.Wrap(h.Dir, img.QEMU); err != nil {
			return cfg, err
		}
		cfg.Images = &img
	}
	if v.Tap != "" {
		nic.Tap = v.Tap
		cfg.NICs = []qemu.NIC{nic}
		return cfg, nil
	}
	nic.Socket = filepath.Join(h.Dir, v.Name+".net")
	cfg.NICs = []qemu.NIC{nic}
	if !v.NoHCA {
		// Take the device's arguments from the command that a user would run.
		out, err := h.CLI(ctx, "qemu-args", v.Name, "--no-memory", "--lines", "--qemu", h.lab.Images.QEMU)
		if err != nil {
			return cfg, err
		}
		for line := range strings.Lines(out) {
			if opt, arg, ok := strings.Cut(strings.TrimSpace(line), " "); ok && strings.Contains(arg, "-hca") {
				cfg.ExtraArgs = append(cfg.ExtraArgs, opt, arg)
			}
		}
		if !slices.ContainsFunc(cfg.ExtraArgs, func(a string) bool { return strings.Contains(a, "chardev=") }) {
			return cfg, fmt.Errorf("`vnicd qemu-args` printed no chardev and device for the HCA:\n%s", out)
		}
	}
	return cfg, nil
}

func makeSparse(path string, mib int) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(int64(mib)<<20), f.Close())
}

// Boot starts the guests, in parallel, and waits until they answer.
func (l *Lab) Boot(ctx context.Context, cfgs ...qemu.Config) ([]*qemu.Machine, error) {
	// The console of a VM that a test has killed is replaced by that of its successor.
	for _, m := range l.vms {
		if slices.ContainsFunc(cfgs, func(c qemu.Config) bool { return c.Name == m.Name() }) {
			l.searchConsole(m)
		}
	}
	ms, err := l.BootAll(ctx, cfgs...)
	l.vms = append(l.vms, ms...)
	for _, m := range ms {
		l.Add(func() { l.end(m) })
	}
	return ms, err
}

// end kills a VM. If it has a debugging kernel, that is asked for its last complaints first, and the console is
// searched, which also has those from before a reboot and from after the test's own look at the kernel log.
func (l *Lab) end(m *qemu.Machine) {
	select {
	case <-m.Done():
	default:
		if l.Complain != nil && harness.Debugging() {
			bad, err := harness.LastComplaints(context.Background(), m)
			l.complain(m, bad, err)
		}
	}
	m.Kill()
	l.searchConsole(m)
}

// searchConsole searches the console of a VM with a debugging kernel, once, if the VM has ended.
func (l *Lab) searchConsole(m *qemu.Machine) {
	select {
	case <-m.Done():
	default:
		return
	}
	i := slices.Index(l.vms, m)
	if i < 0 {
		return
	}
	l.vms = slices.Delete(slices.Clone(l.vms), i, i+1)
	if l.Complain == nil || !harness.Debugging() {
		return
	}
	console, err := os.ReadFile(m.Console())
	l.complain(m, harness.Complaints(string(console)), err)
}

func (l *Lab) complain(m *qemu.Machine, bad []string, err error) {
	if err != nil {
		bad = append(bad, err.Error())
	}
	if len(bad) > 0 {
		l.Complain(m.Name(), strings.Join(bad, "\n"))
	}
}
