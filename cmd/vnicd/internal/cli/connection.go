package cli

import (
	"fmt"
	"io"
	"net/url"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
)

func (a *app) connectionCmd() *cobra.Command {
	show := &cobra.Command{
		Use: "show [VM]", Short: "Show RDMA connections and where they go", Args: args(cobra.MaximumNArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(vms)),
		RunE: func(c *cobra.Command, argv []string) error {
			u := "/v1/connections"
			if len(argv) == 1 {
				u += "?vm=" + url.QueryEscape(argv[0])
			}
			return get(a, c, u, func(list []daemon.VMConnection) {
				for i := range list {
					showConnection(a.out, &list[i])
				}
			})
		},
	}
	c := a.group("connection", "Show the VMs' RDMA connections",
		`Connected queue pairs (RC, UC) of the VMs, and connections that connection management is
setting up or has just ended. The state is that of connection management (req-sent,
req-received, rep-sent, rep-received, established, dreq-sent, dreq-received, closed,
rejected; sidr-* and resolved for datagrams), or direct if the programs exchanged their
addresses by other means. The last line of each is the overlay tuple of its packets;
moves counts its changes.`, show)
	c.Aliases = []string{"conn"}
	return c
}

func showConnection(w io.Writer, c *daemon.VMConnection) {
	fmt.Fprintf(w, "vm %s type %s state %s", c.VM, c.Type, c.State)
	word := func(name string, v any, there bool) {
		if there {
			fmt.Fprintf(w, " %s %v", name, v)
		}
	}
	word("role", c.Role, c.Role != "")
	word("lqpn", fmt.Sprintf("0x%06x", c.LocalQPN), c.LocalQPN != 0)
	word("rqpn", fmt.Sprintf("0x%06x", c.RemoteQPN), c.RemoteQPN != 0)
	word("qp-state", c.QPState, c.QPState != "")
	word("service", c.Service, c.Service != "")
	word("service-id", c.ServiceID, c.Service == "" && c.ServiceID != "")
	word("reason", c.RejectReason, c.RejectReason != 0)
	fmt.Fprintf(w, "\n    src %s %s dst %s %s", c.LocalGID, c.LocalMAC, c.RemoteGID, c.RemoteMAC)
	word("vlan", c.VLAN, c.VLAN != 0)
	word("roce", "v1", c.RoCEv1)
	word("path-mtu", c.PathMTU, c.PathMTU != 0)
	word("comm-id", fmt.Sprintf("0x%08x 0x%08x", c.LocalID, c.RemoteID), c.Role != "")
	fmt.Fprintln(w)
	t := c.Tuple
	if t == nil {
		fmt.Fprintln(w, "    destination unknown: flooded")
		return
	}
	fmt.Fprintf(w, "    network %s vni %d", t.Network, t.VNI)
	if t.VTEP.IsValid() {
		fmt.Fprintf(w, " vtep %s from %s port %d dscp %d", t.VTEP, t.Source, t.UDPPort, t.DSCP)
	} else {
		fmt.Fprintf(w, " %s %s", t.Kind, t.Port)
	}
	fmt.Fprintf(w, " mtu %d moves %d\n", t.MTU, t.Moves)
}
