package cli

import (
	"context"
	"fmt"
	"os/exec"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/hypervisor/cloudhypervisor"
	"github.com/vnicd/vnicd/hypervisor/qemu"
)

const cloudHypervisor = "cloud-hypervisor"

func (a *app) vmmArgsCmd() *cobra.Command {
	var f argsFlags
	var binary string
	c := &cobra.Command{
		Use:   "vmm-args " + cloudHypervisor + " VM",
		Short: "Print the options that attach a VM of a VMM other than QEMU",
		Long: `Prints the arguments that attach the VM to vnicd: shared guest memory, the
virtio-net and the HCA, as Cloud Hypervisor's generic vhost-user device, which it has
since version 52:

    cloud-hypervisor $(vnicd vmm-args cloud-hypervisor vm1) --kernel vmlinux --disk path=disk.raw

It was not tried with Cloud Hypervisor itself, only with what that sends. Its live
migration and its snapshots do not include the HCA. With --no-memory only the two
devices are printed; the VM's memory must then have shared=on.`,
		Args:              args(cobra.ExactArgs(2)),
		ValidArgsFunction: a.complete(nil, choices(cloudHypervisor), a.names(guests)),
		RunE: func(c *cobra.Command, argv []string) error {
			if argv[0] != cloudHypervisor {
				return usageError{fmt.Errorf("unknown VMM %q, known is %s; for QEMU: `vnicd qemu-args`", argv[0], cloudHypervisor)}
			}
			cfg, running, vm, err := a.knownVM(c, argv[1])
			if err != nil {
				return err
			}
			if err := f.check(); err != nil {
				return err
			}
			if vm.HCA == config.Ivshmem {
				return fmt.Errorf("the HCA of VM %q is configured as ivshmem-doorbell, which %s does not have; set hca to %s or %s",
					vm.Name, cloudHypervisor, config.Auto, config.VhostUser)
			}
			version, err := cloudHypervisorVersion(c.Context(), binary)
			if err != nil {
				return err
			}
			var out []string
			if !f.noMemory {
				out = cloudhypervisor.MemoryArgs(f.memory, f.huge)
			}
			out = append(out, cloudhypervisor.NetArgs(cfg.NetSocket(vm), qemu.NetID(vm.Name), vm.MAC.String(),
				networkMTU(cfg, running, vm.Network), vm.Queues)...)
			out = append(out, cloudhypervisor.HCAArgs(cfg.HCASocket(vm), qemu.HCAID(vm.Name), daemon.HCAQueues(cfg), version)...)
			a.printArgs(out, f.lines)
			return nil
		},
	}
	f.add(a, c)
	c.Flags().StringVar(&binary, "binary", "",
		"print what this `binary` understands, if it has the devices [the first cloud-hypervisor in PATH]")
	return c
}

// cloudHypervisorVersion returns the version of the binary that was named, else of that in PATH. The latter may not be
// the VM's, so that its errors are none.
func cloudHypervisorVersion(ctx context.Context, binary string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if binary != "" {
		return cloudhypervisor.Version(ctx, binary)
	}
	if path, err := exec.LookPath(cloudHypervisor); err == nil {
		if n, err := cloudhypervisor.Version(ctx, path); err == nil {
			return n, nil
		}
	}
	return cloudhypervisor.Newest, nil
}
