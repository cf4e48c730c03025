package cli

import (
	"context"
	"errors"
	"os/signal"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/deviceplugin"
	"github.com/vnicd/vnicd/guestdrv"
)

func (a *app) devicePluginCmd() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:   "device-plugin",
		Short: "Offer the host applications to the pods of a Kubernetes node",
		Long: `Registers with the node's kubelet as a device plugin (API version ` + deviceplugin.APIVersion + `),
and runs until it is ended by SIGTERM. Each network with applications is a resource of the node,
` + deviceplugin.Domain + `/NETWORK, and each of its applications one device of that: a container that asks for

    resources: {limits: {` + deviceplugin.Domain + `/blue: 1}}

has an application of network blue for itself. The container gets the directory ` + cdiContainerDir + `
with the application's socket, ` + config.AppSocket + `, and nothing else of vnicd, and the variable
` + guestdrv.SocketVariable + ` with the socket's path; programs with guestdrv or libvnicd use it if they name
no other one. It can have one application. A device does not give the right to open the
socket, which user, group and socket-mode in vnicd.yaml(5) do.

The devices follow the applications of the running vnicd, and wait for a vnicd or kubelet
that restarts. If vnicd does not answer for 30 s, they are unhealthy: pods that run keep
what they have, and no further pod gets one. A second device-plugin takes the place of
the first, which ends.

` + whichSocket,
		Args:              args(cobra.NoArgs),
		ValidArgsFunction: nothing,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.client(c)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			return deviceplugin.Run(ctx, deviceplugin.Config{
				Dir: dir, Mount: cdiContainerDir,
				Variables: map[string]string{guestdrv.SocketVariable: guestdrv.DefaultSocket},
				Log:       hclog.New(&hclog.LoggerOptions{Name: "vnicd.device-plugin", Level: hclog.Info, Output: a.err}),
				Applications: func(ctx context.Context) ([]deviceplugin.Application, error) {
					ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
					defer cancel()
					s, err := client.Status(ctx)
					if err != nil {
						return nil, err
					}
					return applicationsOf(s)
				},
			})
		},
	}
	c.Flags().StringVar(&a.control, "control", "", "control socket `path`")
	c.Flags().StringVar(&dir, "kubelet-dir", deviceplugin.Kubelet, "the kubelet's `directory` for the sockets of plugins")
	return c
}

// applicationsOf returns the applications of a daemon that stay, with directories for containers.
func applicationsOf(s *daemon.Status) (l []deviceplugin.Application, err error) {
	for _, v := range s.VMs {
		switch {
		case !v.IsApplication() || v.Going:
		case v.AppDir == "":
			return nil, errNoAppDir
		default:
			l = append(l, deviceplugin.Application{Name: v.Name, Network: v.Network, Dir: v.AppDir})
		}
	}
	return l, nil
}

var errNoAppDir = errors.New("the running vnicd is of a release that makes no directories for containers; upgrade it")
