package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/standin"
)

// backendDevices are the programs for one device. Their names are links to vnicd and begin with backendPrefix.
var backendDevices = map[string]struct {
	// kind is the VhostUserBackendType of docs/interop/vhost-user.json. It has no type for RDMA, so vnicd uses the name
	// of the virtio device.
	kind   string
	socket func(*config.Config, *config.VM) string
}{
	"net": {"net", (*config.Config).NetSocket},
	"hca": {"rdma", (*config.Config).HCASocket},
}

const (
	backendPrefix     = "vnicd-"
	printCapabilities = "--print-capabilities"
)

// daemonTime is how long a front end waits while the daemon restarts.
const daemonTime = 30 * time.Second

// Args returns the words of the command line. A program called by a back end's name is that sub-command; with
// --print-capabilities it ignores all other options, as QEMU's conventions want.
func Args(argv []string) []string {
	device, ok := strings.CutPrefix(filepath.Base(argv[0]), backendPrefix)
	switch _, known := backendDevices[device]; {
	case !ok || !known:
		return argv[1:]
	case slices.Contains(argv, printCapabilities):
		return []string{"backend", device, printCapabilities}
	}
	return append([]string{"backend", device}, argv[1:]...)
}

func (a *app) backendCmd() *cobra.Command {
	var socket, vm string
	var fd int
	var asked bool
	c := &cobra.Command{
		Use:   "backend {net | hca} --vm VM {--socket-path PATH | --fd NUMBER}",
		Short: "Represent one device of a VM as a separate process",
		Long: `For management software that starts one process per device of a VM, by QEMU's
conventions for vhost-user back ends (docs/interop/vhost-user.rst), under the names
/usr/libexec/vnicd/vnicd-net and /usr/libexec/vnicd/vnicd-hca.

The process creates the device's socket, or receives it (connected or listening), and
relays each front end to the running vnicd, which serves the device: rings and guest
memory do not pass through the process. SIGTERM ends the process and the device; so does
the end of the connection if the socket was connected. While vnicd restarts, it waits.`,
		ValidArgsFunction: a.complete(nil, choices(slices.Sorted(maps.Keys(backendDevices))...)),
		Args: func(c *cobra.Command, argv []string) error {
			if len(argv) == 0 || backendDevices[argv[0]].kind == "" || len(argv) > 1 {
				return usageError{fmt.Errorf("one device is expected, net or hca; usage: %s", c.UseLine())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, argv []string) error {
			device := backendDevices[argv[0]]
			if asked {
				_, err := fmt.Fprintf(a.out, "{\n  \"type\": %q\n}\n", device.kind)
				return err
			}
			if vm == "" || (socket == "") == !c.Flags().Changed("fd") {
				return usageError{errors.New("--vm and one of --socket-path and --fd are needed")}
			}
			cfg, _, v, err := a.knownVM(c, vm)
			if err != nil {
				return err
			}
			to := device.socket(cfg, v)
			if _, err := os.Stat(to); err != nil {
				return fmt.Errorf("no vnicd serves VM %s: %w", vm, err)
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			var from *standin.Front
			if socket != "" {
				from, err = standin.Listen(socket)
			} else {
				from, err = standin.Passed(fd)
			}
			if err != nil {
				return err
			}
			return from.Serve(ctx, func(ctx context.Context) (*net.UnixConn, error) { return standin.Dial(ctx, to, daemonTime) },
				func(err error) { fmt.Fprintf(a.err, "vnicd: %s: %v\n", to, err) })
		},
	}
	c.Flags().StringVar(&vm, "vm", "", "`name` of the VM")
	c.Flags().StringVar(&socket, "socket-path", "", "create the vhost-user socket at this `path`")
	c.Flags().IntVar(&fd, "fd", 0, "file descriptor `number` of the vhost-user socket")
	c.Flags().BoolVar(&asked, "print-capabilities", false, "print the capabilities as JSON and exit")
	c.Flags().StringVar(&a.control, "control", "", "control socket `path`")
	return c
}
