package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
)

func (a *app) captureCmd() *cobra.Command {
	var o daemon.CaptureOptions
	var file string
	c := &cobra.Command{
		Use:   "capture PORT|vtep -w FILE",
		Short: "Write a port's frames to a file for Wireshark",
		Long: `Writes pcapng. At a port (of a VM, the host or a tunnel; see "vnicd port") it captures
the tenant's frames in both directions, RoCE included; at "vtep" the datagrams of all
tunnels, with outer IP and UDP headers reconstructed from the sockets' information. It
ends after -n packets or with an interrupt. Packets dropped because the reader was slow
are counted.


` + whichSocket,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(ports, "vtep")),
		RunE: func(c *cobra.Command, argv []string) (err error) {
			if file == "" {
				return usageError{fmt.Errorf("-w FILE is missing (-w - for standard output)")}
			}
			client, err := a.client(c)
			if err != nil {
				return err
			}
			w := a.out
			if file != "-" {
				f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
				if err != nil {
					return err
				}
				defer func() {
					if e := f.Close(); err == nil {
						err = e
					}
				}()
				w = f
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			o.Port = argv[0]
			return a.capture(ctx, client, o, w)
		},
	}
	a.askFlags(c)
	c.Flags().StringVarP(&file, "write", "w", "", "`file` to write, - for standard output")
	c.Flags().Uint64VarP(&o.Count, "count", "n", 0, "end after this number of `packets`")
	c.Flags().Uint64VarP(&o.SnapLen, "snaplen", "s", 0, "keep this many `bytes` of each packet (default all)")
	c.Flags().StringVar(&o.Network, "network", "", "the port's `network`, if several have a port of that name")
	return c
}

func (a *app) capture(ctx context.Context, client *daemon.Client, o daemon.CaptureOptions, w io.Writer) error {
	taken, dropped, err := client.Capture(ctx, o, w, func() { fmt.Fprintf(a.err, "capturing %s\n", o.Port) })
	if err != nil {
		return err
	}
	fmt.Fprintf(a.err, "%d packets, %d dropped\n", taken, dropped)
	return nil
}
