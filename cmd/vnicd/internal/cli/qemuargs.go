package cli

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/virtio/ivshmem"
	"github.com/vnicd/vnicd/hypervisor/qemu"
)

func (a *app) qemuArgsCmd() *cobra.Command {
	var f argsFlags
	var migratable bool
	var binary string
	c := &cobra.Command{
		Use:   "qemu-args VM",
		Short: "Print the QEMU options that attach a VM",
		Long: `Prints the arguments that attach the VM to vnicd: shared guest memory, the
virtio-net and the HCA. Add them to a QEMU command line that has no -m and -M options:

    qemu-system-x86_64 $(vnicd qemu-args vm1) -accel kvm -drive file=disk.qcow2

If the daemon is running, VM may be one that was added at run time, and the virtio-net
gets the present MTU of its network, unless the configuration sets one.

With --no-memory only the two devices are printed; the memory must then be shared
by other options (-object memory-backend-memfd,share=on with -M memory-backend=).`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(guests)),
		RunE: func(c *cobra.Command, argv []string) error {
			cfg, running, vm, err := a.knownVM(c, argv[0])
			if err != nil {
				return err
			}
			if err := f.check(); err != nil {
				return err
			}
			kind, err := chooseHCA(c.Context(), vm, binary, migratable)
			if err != nil {
				return err
			}
			var out []string
			if !f.noMemory {
				out = append(out, "-M", qemu.MachineType)
				out = append(out, qemu.MemoryArgs(f.memory, f.huge)...)
			}
			out = append(out, qemu.NetArgs(cfg.NetSocket(vm), qemu.NetID(vm.Name), vm.MAC.String(),
				networkMTU(cfg, running, vm.Network), vm.Queues)...)
			if kind == config.Ivshmem {
				out = append(out, qemu.IvshmemArgs(cfg.IvshmemSocket(vm), qemu.HCAID(vm.Name),
					ivshmem.Vectors(daemon.HCAQueues(cfg)))...)
			} else {
				out = append(out, qemu.HCAArgs(cfg.HCASocket(vm), qemu.HCAID(vm.Name), daemon.HCAQueues(cfg))...)
			}
			if vm.QMP != "" {
				out = append(out, qemu.MonitorArgs(vm.QMP)...)
			}
			a.printArgs(out, f.lines)
			return nil
		},
	}
	f.add(a, c)
	c.Flags().StringVar(&binary, "qemu", "", whichQEMU)
	c.Flags().BoolVar(&migratable, "migratable", false, whichMigrates)
	return c
}

// argsFlags are the flags of the commands that print a VMM's arguments.
type argsFlags struct {
	memory                int
	noMemory, huge, lines bool
}

func (f *argsFlags) add(a *app, c *cobra.Command) {
	c.Flags().StringVar(&a.control, "control", "", "control socket `path`")
	c.Flags().IntVarP(&f.memory, "memory", "m", 1024, "guest memory in `MiB`")
	c.Flags().BoolVar(&f.huge, "huge-pages", false, "take the guest's memory from the host's huge pages")
	c.Flags().BoolVar(&f.noMemory, "no-memory", false, "print the devices only")
	c.Flags().BoolVar(&f.lines, "lines", false, "print one option per line, for reading")
}

func (f *argsFlags) check() error {
	if f.memory < 16 || f.memory > 1<<20 {
		return usageError{fmt.Errorf("--memory must be 16 to 1048576 MiB, found %d", f.memory)}
	}
	return nil
}

// printArgs prints pairs of an option and its value.
func (a *app) printArgs(pairs []string, lines bool) {
	if !lines {
		fmt.Fprintln(a.out, strings.Join(pairs, " "))
		return
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		fmt.Fprintf(a.out, "%s %s\n", pairs[i], pairs[i+1])
	}
}

const whichQEMU = "print what this QEMU `binary` has, if it has the devices [the first qemu-system-x86_64 in PATH]"

const whichMigrates = "print an HCA that migrates with the VM, and is saved with it: ivshmem-doorbell"

// chooseHCA returns the kind of device for a VM's HCA: as the configuration wants it, or what a QEMU has, the generic
// vhost-user device before ivshmem-doorbell, which alone is migratable. A binary that was named must have it.
func chooseHCA(ctx context.Context, vm *config.VM, binary string, migratable bool) (kind string, err error) {
	kind = vm.HCA
	if migratable {
		if kind == config.VhostUser {
			return "", fmt.Errorf("the HCA of VM %q is configured as the generic vhost-user device, which does not migrate; set "+
				"hca to %s or %s", vm.Name, config.Auto, config.Ivshmem)
		}
		kind = config.Ivshmem
	}
	named := binary != ""
	if !named {
		if kind != config.Auto {
			return kind, nil
		}
		if binary, err = exec.LookPath("qemu-system-x86_64"); err != nil {
			return config.VhostUser, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	switch kind {
	case config.VhostUser:
		return kind, qemu.Probe(ctx, binary)
	case config.Ivshmem:
		return kind, qemu.ProbeIvshmem(ctx, binary)
	}
	only, err := qemu.ProbeEither(ctx, binary)
	switch {
	case err != nil && named: // else it may not be the VM's
		return "", err
	case only:
		return config.Ivshmem, nil
	}
	return config.VhostUser, nil
}

// knownVM reads the file, asks the daemon (running is nil if it does not answer), and finds a VM in either.
func (a *app) knownVM(c *cobra.Command, name string) (cfg *config.Config, running *daemon.Status, vm *config.VM,
	err error) {
	if cfg, err = a.load(); err != nil {
		return nil, nil, nil, err
	}
	running = a.running(c, 5*time.Second)
	vm, err = cfg.VM(name)
	if err != nil && running != nil {
		vm, err = addedVM(running, name)
	}
	if err == nil && vm.Application != nil {
		err = errApplication(name)
	}
	if err != nil {
		return nil, nil, nil, usageError{err}
	}
	return cfg, running, vm, nil
}

// errApplication is the error of commands that accept only VMs.
func errApplication(name string) error {
	return fmt.Errorf("%q is a host application, not a VM: a program opens its socket (package guestdrv)", name)
}

// addedVM finds a VM of the running daemon that is not in the file.
func addedVM(s *daemon.Status, name string) (*config.VM, error) {
	v, err := findVM(s, name)
	if err != nil {
		return nil, err
	}
	mac, err := net.ParseMAC(v.MAC)
	if err != nil {
		return nil, err
	}
	return &config.VM{Name: v.Name, Network: v.Network, MAC: mac, Queues: len(v.Net.Pairs), HCA: v.HCAKind}, nil
}

// networkMTU is the MTU to offer to the guest; 0: none.
func networkMTU(cfg *config.Config, s *daemon.Status, name string) int {
	if n := cfg.Network(name); n != nil && n.MTU != 0 {
		return n.MTU
	}
	if s != nil {
		return statusMTU(s, name)
	}
	return 0
}

// statusMTU is the MTU of a network of the running daemon; 0: no such network.
func statusMTU(s *daemon.Status, name string) int {
	for _, n := range s.Networks {
		if n.Name == name {
			return n.MTU
		}
	}
	return 0
}
