package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/hypervisor/qemu"
)

func (a *app) migrateCmd() *cobra.Command {
	var socket, destination string
	c := &cobra.Command{
		Use:   "migrate --qmp SOCKET [--destination FILE] VM URI",
		Short: "Move a running VM to another host, or save it",
		Long: `Has QEMU move the VM to the QEMU that waits at URI, with its connections, and returns once
it is there; that QEMU was started with the options of the other host's
` + "`vnicd qemu-args --migratable VM`" + ` and -incoming URI, such as tcp:0:4444. With file:PATH the VM is
saved in a file. An interrupt cancels: the VM runs on here, as after any failure.

QEMU needs no help of vnicd: this is its monitor's command migrate, after a look at what
would prevent it. What only the other host knows is in FILE (-: standard input), made there
by ` + "`vnicd vm capabilities VM -j`" + `: its network, limits and versions. Without FILE, a VM
that they do not suit arrives there, and its driver begins anew, without connections.
Bandwidth, compression, encryption and the like are the monitor's
(migrate-set-parameters).

` + whichMonitor,
		Args:              args(cobra.ExactArgs(2)),
		ValidArgsFunction: a.complete(nil, a.names(guests), nothing),
		RunE: func(cmd *cobra.Command, argv []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			client, err := a.client(cmd)
			if err != nil {
				return err
			}
			s, err := client.Status(ctx)
			if err != nil {
				return fmt.Errorf("%w; vnicd must run when QEMU stops the VM: the HCA's state goes with it then", err)
			}
			vm, err := findVM(s, argv[0])
			if err == nil && vm.IsApplication() {
				err = errApplication(vm.Name)
			}
			if err != nil {
				return usageError{err}
			}
			if err := migratable(vm); err != nil {
				return err
			}
			if destination != "" {
				if err := a.suits(ctx, client, vm.Name, destination); err != nil {
					return err
				}
			}
			m, err := monitor(ctx, socket)
			if err != nil {
				return err
			}
			defer m.Close()
			p := progress{out: a.out, vm: vm.Name}
			r, err := qemu.Migrate(ctx, m, argv[1], p.report)
			if err != nil {
				return err
			}
			what := "is at " + argv[1]
			if strings.HasPrefix(argv[1], "file:") {
				what = "was saved; QEMU has it still, paused: end that, or let the VM run on"
			}
			fmt.Fprintf(a.out, "%s %s: %.1f s, stopped for %d ms, %d MiB\n", vm.Name, what, float64(r.Total)/1000, r.Downtime,
				r.RAM.Transferred>>20)
			return nil
		},
	}
	c.Flags().StringVar(&a.control, "control", "", "control socket `path`")
	c.Flags().StringVar(&destination, "destination", "", "`file` with the other host's capabilities")
	monitorFlag(c, &socket)
	return c
}

// maxCapabilities bounds a file of capabilities, in bytes. Such a file has about a thousand.
const maxCapabilities = 1 << 20

// suits returns why the VM cannot go on at the host whose capabilities are in a file.
func (a *app) suits(ctx context.Context, client *daemon.Client, vm, path string) error {
	in := io.Reader(os.Stdin)
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return usageError{err}
		}
		defer f.Close()
		in = f
	}
	var there, here daemon.Capabilities
	if err := json.NewDecoder(io.LimitReader(in, maxCapabilities)).Decode(&there); err != nil {
		return fmt.Errorf("capabilities in %s: %w", path, err)
	}
	if err := client.Do(ctx, http.MethodGet, "/v1/vms/"+url.PathEscape(vm)+"/capabilities", nil, &here); err != nil {
		return err
	}
	if err := there.Takes(&here); err != nil {
		return fmt.Errorf("the VM stays here, because host %q cannot continue it:\n%w", there.Host, err)
	}
	return nil
}

// migratable returns an error if QEMU would refuse to move the VM, or would move it without its connections.
func migratable(vm *daemon.VMStatus) error {
	switch {
	case !vm.Net.Connected && !vm.HCA.Connected:
		return fmt.Errorf("VM %q is not attached to a QEMU; see `vnicd status %s`", vm.Name, vm.Name)
	case vm.HCADevice == config.VhostUser:
		return fmt.Errorf("the HCA of VM %q is QEMU's generic vhost-user device, which does not migrate; start the VM with the "+
			"options of `vnicd qemu-args --migratable %s`", vm.Name, vm.Name)
	case !vm.Net.Connected:
		return errors.New("the VM's virtio-net is not connected, by which the HCA learns that the VM stops")
	}
	return nil
}

// progress prints how far a migration is, each second.
type progress struct {
	out  io.Writer
	vm   string
	last time.Time
}

func (p *progress) report(m qemu.Migration) {
	if m.Ended() || time.Since(p.last) < time.Second {
		return
	}
	p.last = time.Now()
	fmt.Fprintf(p.out, "%s %s: %d MiB sent, %d MiB left\n", p.vm, m.Status, m.RAM.Transferred>>20, m.RAM.Remaining>>20)
}
