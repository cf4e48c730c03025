package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// guestAddr returns the address of VM i's eth0.
func guestAddr(i int) string { return fmt.Sprintf("10.0.0.%d/24", i+1) }

// A pair of VMs has another NIC each: QEMU's TAP on a kernel bridge with a vxlan device, over the same underlay.
const (
	bridgedNIC = "bridged"
	bridgedTap = "vtap"
	bridgedMTU = 1450
)

func bridgedMAC(i int) string { return fmt.Sprintf("02:00:00:00:02:%02x", i) }

func bridgedAddr(i int) string { return fmt.Sprintf("10.0.1.%d/24", i+1) }

// bridge makes bridge, vxlan device and TAP of host i.
func bridge(ctx context.Context, h *lab.Host, i int) error {
	_, err := h.NS.Shell(ctx, fmt.Sprintf("set -e; ip link add kbr mtu %[1]d type bridge; ip link set kbr up\n"+
		"ip link add kvx type vxlan id 4242 dev ul local %[2]s remote %[3]s dstport 4790\n"+
		"ip link set kvx mtu %[1]d master kbr up\n"+
		"ip tuntap add %[4]s mode tap; ip link set %[4]s mtu %[1]d master kbr up",
		bridgedMTU, underlayAddr(i), underlayAddr(1-i), bridgedTap))
	return err
}

// guests boots n VMs with our kernel module, each on its own host with a vnicd. n is 1, or 2 joined by an underlay.
// Images and module are built first if needed. kind completes the rows' samples.
func (b *Bench) guests(ctx context.Context, n int) (hosts []*lab.Host, vms []*qemu.Machine, kind accel, err error) {
	l, err := lab.New(context.WithoutCancel(ctx), os.Stderr, true)
	if err != nil {
		return nil, nil, "", err
	}
	b.Add(l.Run)
	for i := range n {
		h, err := l.Host(fmt.Sprintf("g%d", i+1))
		if err != nil {
			return nil, nil, "", err
		}
		hosts = append(hosts, h)
	}
	network := func(int) string { return "" }
	if n == 2 {
		if err := l.Underlay(hosts[0], netip.PrefixFrom(underlayAddr(0), 24), hosts[1], netip.PrefixFrom(underlayAddr(1), 24),
			1500); err != nil {
			return nil, nil, "", err
		}
		network = peered
	}
	var cfgs []qemu.Config
	for i, h := range hosts {
		if err := b.daemon(ctx, h, i, 1, network(i)); err != nil {
			return nil, nil, "", err
		}
		cfg, err := h.Config(ctx, lab.VM{Name: vmName(i), MAC: vmMAC(i), Addr: guestAddr(i), CPUs: 3 - n})
		if err != nil {
			return nil, nil, "", err
		}
		if n == 2 {
			if err := bridge(ctx, h, i); err != nil {
				return nil, nil, "", err
			}
			cfg.NICs = append(cfg.NICs, qemu.NIC{
				Tap: bridgedTap, MAC: bridgedMAC(i), MTU: bridgedMTU, IfName: bridgedNIC,
				Addresses: []netip.Prefix{netip.MustParsePrefix(bridgedAddr(i))},
			})
		}
		cfgs = append(cfgs, cfg)
	}
	if vms, err = l.Boot(ctx, cfgs...); err != nil {
		return nil, nil, "", err
	}
	for _, vm := range vms {
		if err := lab.LoadModule(ctx, vm); err != nil {
			return nil, nil, "", err
		}
	}
	return hosts, vms, accel(l.Accel), nil
}

// accel is the way in which the guests' instructions run.
type accel qemu.Accel

// mark adds to a sample that its guests are emulated, if they are: most of the figure is then the emulator's.
func (a accel) mark(s *Sample) {
	if qemu.Accel(a) == qemu.KVM {
		return
	}
	if s.Extra == nil {
		s.Extra = map[string]float64{}
	}
	s.Extra[emulated] = 1
}

// emulated marks figures of emulated guests in the table and in the file of results.
const emulated = "guests emulated (TCG, no KVM)"

// perftest measures a program of perftest between two VMs on two hosts. The anchor is the same program over rxe in the
// same VMs, on our virtio-net or on QEMU's TAP and the kernel's bridge, whichever is better. Our module is unloaded for
// it: while it is loaded the HCA receives all RoCE frames. The work includes the start of the programs.
func perftest(value func(out string) (float64, error), better func(x, y float64) float64, program string,
	opts ...string) func(context.Context, *Bench) (Meter, error) {
	const iterations = 500
	opts = append(slices.Clone(opts), "-n", strconv.Itoa(iterations))
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		_, vms, kind, err := b.guests(ctx, 2)
		if err != nil {
			return m, err
		}
		const ourNIC, tapNIC = "rxe0", "rxe1"
		for _, vm := range vms {
			if err := harness.AddRXE(ctx, vm, ourNIC, "eth0"); err != nil {
				return m, err
			}
			if err := harness.AddRXE(ctx, vm, tapNIC, bridgedNIC); err != nil {
				return m, err
			}
		}
		loaded := true
		by := func(device string, addr func(i int) string) func(context.Context, time.Duration) (Sample, error) {
			return func(ctx context.Context, _ time.Duration) (s Sample, err error) {
				load := device == lab.Device
				var ends [2]lab.End
				for i, vm := range vms {
					switch {
					case load && !loaded:
						err = lab.LoadModule(ctx, vm)
					case loaded && !load:
						_, err = vm.Run(ctx, "rmmod vnicd")
					}
					if err != nil {
						return s, err
					}
					if err := lab.WaitRDMA(ctx, vm, device); err != nil {
						return s, err
					}
					if ends[i], err = lab.NewEnd(ctx, vm, device, addr(i)); err != nil {
						return s, err
					}
				}
				loaded = load
				return working("message", func() (s Sample, n float64, err error) {
					out, err := lab.Perftest(ctx, ends[0], ends[1], program, opts...)
					if err != nil {
						return s, 0, err
					}
					s.Value, err = value(out)
					kind.mark(&s)
					return s, iterations, err
				})
			}
		}
		overOurs, overTap := by(ourNIC, guestAddr), by(tapNIC, bridgedAddr)
		anchor := func(ctx context.Context, d time.Duration) (Sample, error) {
			x, err := overOurs(ctx, d)
			if err != nil {
				return x, err
			}
			y, err := overTap(ctx, d)
			s := x
			if better(x.Value, y.Value) != x.Value {
				s = y
			}
			s.Extra = map[string]float64{
				"rxe over our virtio-net": x.Value, "rxe over a TAP and the kernel's bridge": y.Value,
			}
			return s, err
		}
		return Meter{Ours: by(lab.Device, guestAddr), Anchor: anchor}, nil
	}
}

// guestFaultVM measures the mean time of guest faults served by the kernel module in a VM, from raise to the answer
// as the device counts it: perftest writes from and to fresh on-demand buffers of 4 MiB.
func guestFaultVM(ctx context.Context, b *Bench) (m Meter, err error) {
	hosts, vms, kind, err := b.guests(ctx, 1)
	if err != nil {
		return m, err
	}
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		end, err := lab.NewEnd(ctx, vms[0], lab.Device, guestAddr(0))
		if err != nil {
			return Sample{}, err
		}
		return working("fault", func() (Sample, float64, error) {
			f, err := served(ctx, hosts[0], func() error {
				for stop := time.Now().Add(d); ; {
					if err := writeOnDemand(ctx, end); err != nil || time.Now().After(stop) {
						return err
					}
				}
			})
			s := Sample{Value: f.mean(), Extra: map[string]float64{"faults": float64(f.n)}}
			kind.mark(&s)
			return s, float64(f.n), err
		})
	}
	return m, nil
}

func writeOnDemand(ctx context.Context, end lab.End) error {
	_, err := lab.Perftest(ctx, end, end, "ib_write_bw", "--odp", "-s", "4194304", "-n", "5")
	return err
}
