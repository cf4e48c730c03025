package cli

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/hypervisor/qmp"
)

// monitorTime bounds the wait for the greeting of QEMU's monitor.
const monitorTime = 10 * time.Second

// releaseTime bounds the guest's time to release the devices.
const releaseTime = time.Minute

const whichMonitor = `SOCKET is a monitor (-qmp unix:SOCKET,server=on,wait=off) without another client:
QEMU serves one client per monitor. The daemon uses the monitor of the VM's qmp key, so
give QEMU a second one.`

func (a *app) attachCmd() *cobra.Command {
	var socket, netBus, hcaBus string
	var wait time.Duration
	c := &cobra.Command{
		Use:   "attach --qmp SOCKET VM",
		Short: "Plug both devices into a running VM",
		Long: `Plugs the VM's virtio-net and HCA into a running QEMU and waits until the guest's
drivers have brought both up. On failure or an interrupt both are unplugged again.

The VM's memory must be shared (-object memory-backend-memfd,share=on), which can only
be set when a VM is started; otherwise the command fails and changes nothing. A machine
with PCI Express needs two free root ports, such as
-device pcie-root-port,id=rp1,chassis=1 -device pcie-root-port,id=rp2,chassis=2.

` + whichMonitor + "\n\n" + whichSocket,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(guests)),
		RunE: func(cmd *cobra.Command, argv []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			client, err := a.client(cmd)
			if err != nil {
				return err
			}
			s, err := client.Status(ctx)
			if err != nil {
				return err
			}
			vm, err := findVM(s, argv[0])
			if err == nil && vm.IsApplication() {
				err = errApplication(vm.Name)
			}
			if err != nil {
				return usageError{err}
			}
			if vm.Net.Connected || vm.HCA.Connected {
				return fmt.Errorf("VM %q is already attached to a QEMU; see `vnicd status %s`, `vnicd detach`", vm.Name, vm.Name)
			}
			if vm.HCAKind == config.Ivshmem {
				return fmt.Errorf("the HCA of VM %q is an ivshmem device, which vnicd does not plug into a running QEMU; start it "+
					"with the options of `vnicd qemu-args %s`", vm.Name, vm.Name)
			}
			m, err := monitor(ctx, socket)
			if err != nil {
				return err
			}
			defer m.Close()
			if err := qemu.Attach(ctx, m, qemu.Attachment{
				VM: vm.Name, NetSocket: vm.NetSocket, HCASocket: vm.HCASocket, MAC: vm.MAC, MTU: statusMTU(s, vm.Network),
				NetQueues: len(vm.Net.Pairs), HCAQueues: abi.NumQueues(len(s.Engines), len(s.Engines)), NetBus: netBus,
				HCABus: hcaBus,
			}); err != nil {
				return hotplugHint(err)
			}
			if wait == 0 {
				return nil
			}
			if err := awaitGuest(ctx, client, vm.Name, wait); err != nil {
				ctx, cancel := context.WithTimeout(context.Background(), releaseTime)
				defer cancel()
				if uerr := undoAttach(ctx, m, socket, vm.Name); uerr != nil {
					return fmt.Errorf("%w; removing the devices again failed: %w", err, uerr)
				}
				return fmt.Errorf("%w; the devices were removed again", err)
			}
			fmt.Fprintf(a.out, "%s: net up, hca up\n", vm.Name)
			return nil
		},
	}
	c.Flags().StringVar(&a.control, "control", "", "control socket `path`")
	monitorFlag(c, &socket)
	c.Flags().StringVar(&netBus, "net-bus", "", "`id` of the bus for the virtio-net (default: a free root port)")
	c.Flags().StringVar(&hcaBus, "hca-bus", "", "`id` of the bus for the HCA (default: a free root port)")
	c.Flags().DurationVar(&wait, "wait", time.Minute, "how long to wait for the guest's drivers; 0 = do not wait")
	return c
}

func (a *app) detachCmd() *cobra.Command {
	var socket string
	c := &cobra.Command{
		Use:   "detach --qmp SOCKET VM",
		Short: "Unplug both devices from a running VM",
		Long: `Asks the guest to release the VM's virtio-net and HCA, waits until it has done so
(a PCI Express guest takes five seconds), and removes both from QEMU. RDMA connections
of programs in the guest end. Devices from QEMU's command line can be unplugged too if
they are on a bus that supports hot-plug.

` + whichMonitor,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(guests)),
		RunE: func(_ *cobra.Command, argv []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			m, err := monitor(ctx, socket)
			if err != nil {
				return err
			}
			defer m.Close()
			ctx, cancel := context.WithTimeout(ctx, releaseTime)
			defer cancel()
			return hotplugHint(qemu.Detach(ctx, m, argv[0]))
		},
	}
	monitorFlag(c, &socket)
	return c
}

func monitorFlag(c *cobra.Command, socket *string) {
	c.Flags().StringVar(socket, "qmp", "", "monitor `socket` of the VM's QEMU")
}

func monitor(ctx context.Context, socket string) (*qmp.Client, error) {
	if socket == "" {
		return nil, usageError{errors.New("--qmp SOCKET is missing")}
	}
	ctx, cancel := context.WithTimeout(ctx, monitorTime)
	defer cancel()
	c, err := qmp.Dial(ctx, socket)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("%w: QEMU does not answer; is another client connected to that monitor?", err)
	}
	return c, err
}

// undoAttach uses the monitor, or opens a new connection if an interrupted command has closed it.
func undoAttach(ctx context.Context, m *qmp.Client, socket, vm string) error {
	err := qemu.Detach(ctx, m, vm)
	if !errors.Is(err, qmp.ErrClosed) {
		return err
	}
	if m, err = monitor(ctx, socket); err != nil {
		return err
	}
	defer m.Close()
	return qemu.Detach(ctx, m, vm)
}

// hotplugHint adds advice for the user.
func hotplugHint(err error) error {
	switch {
	case errors.Is(err, qemu.ErrPrivateMemory):
		return fmt.Errorf("%w; start the VM with -object memory-backend-memfd,id=ram,size=SIZE,share=on -M …,memory-backend=ram", err)
	case errors.Is(err, qemu.ErrNoBus):
		return fmt.Errorf("%w; start the VM with -device pcie-root-port,id=rp1,chassis=1 -device pcie-root-port,id=rp2,chassis=2", err)
	}
	return err
}

// awaitGuest waits until both faces of a VM are up.
func awaitGuest(ctx context.Context, client *daemon.Client, name string, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	down := []string{"virtio-net", "HCA"}
	for {
		if s, err := client.Status(ctx); err == nil {
			vm, err := findVM(s, name)
			if err != nil {
				return err
			}
			down = nil
			if !vm.Net.Up() {
				down = append(down, "virtio-net")
			}
			if !vm.HCA.Up {
				down = append(down, "HCA (is vnicd.ko loaded in the guest?)")
			}
			if down == nil {
				return nil
			}
		} else if ctx.Err() == nil {
			return err
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return errors.New("interrupted")
			}
			return fmt.Errorf("no driver in the guest brought up the %s within %v", strings.Join(down, " and the "), patience)
		}
	}
}
