package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/hypervisor/qemu"
)

func (a *app) qemuArgsCmd() *cobra.Command {
	var memory int
	var noMemory, lines bool
	var binary string
	c := &cobra.Command{
		Use:   "qemu-args VM",
		Short: "Print what to add to a VM's QEMU command line",
		Long: `Prints the arguments that attach the VM to vnicd: shared guest memory, the
virtio-net and the HCA. They go to a QEMU command line without -m and -M options
of its own:

    qemu-system-x86_64 $(vnicd qemu-args vm1) -accel kvm -drive file=disk.qcow2

With --no-memory only the two devices are printed; the memory must then be shared
by other options (-object memory-backend-memfd,share=on with -M memory-backend=).`,
		Args: args(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, argv []string) error {
			cfg, err := a.load()
			if err != nil {
				return err
			}
			vm, err := cfg.VM(argv[0])
			if err != nil {
				return usageError{err}
			}
			if memory < 16 || memory > 1<<20 {
				return usageError{fmt.Errorf("--memory must be 16 to 1048576 MiB, found %d", memory)}
			}
			if binary != "" {
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				if err := qemu.Probe(ctx, binary); err != nil {
					return err
				}
			}
			var out []string
			if !noMemory {
				out = append(out, "-M", qemu.MachineType)
				out = append(out, qemu.MemoryArgs(memory)...)
			}
			mtu := cfg.Network(vm.Network).MTU
			out = append(out, qemu.NetArgs(cfg.NetSocket(vm), vm.Name+"-net", vm.MAC.String(), mtu)...)
			out = append(out, qemu.HCAArgs(cfg.HCASocket(vm), vm.Name+"-hca", daemon.HCAQueues(cfg))...)
			if vm.QMP != "" {
				out = append(out, qemu.MonitorArgs(vm.QMP)...)
			}
			if lines {
				for i := 0; i+1 < len(out); i += 2 {
					fmt.Fprintf(a.out, "%s %s\n", out[i], out[i+1])
				}
				return nil
			}
			fmt.Fprintln(a.out, strings.Join(out, " "))
			return nil
		},
	}
	c.Flags().IntVarP(&memory, "memory", "m", 1024, "guest memory in `MiB`")
	c.Flags().BoolVar(&noMemory, "no-memory", false, "print the devices only")
	c.Flags().BoolVar(&lines, "lines", false, "one option per line, to be read")
	c.Flags().StringVar(&binary, "qemu", "", "first check that this QEMU `binary` has the device")
	return c
}
