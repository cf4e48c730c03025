package cli

import (
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/translate"
)

var vmWords = map[string]wordKind{"network": once, "mac": once, "ip": many, "queues": once, "hca": once, "rate": once,
	"storm": once, "memory-budget": once, "memory-weight": once, "qmp": once, "dma": once, "user": once, "group": once}

func (a *app) vmCmd() *cobra.Command {
	show := &cobra.Command{
		Use: "show", Short: "List the VMs", Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			var s daemon.Status
			if err := a.ask(c, http.MethodGet, "/v1/status", nil, &s); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(s.VMs)
			}
			t := table(a.out)
			for _, v := range s.VMs {
				fmt.Fprintf(t, "%s\tnetwork %s\tmac %s\tnet %s\thca %s%s\n", v.Name, v.Network, v.MAC,
					netState(&v), hcaState(&v.HCA), dmaState(&v))
			}
			return t.Flush()
		},
	}
	add := saveFlag(&cobra.Command{
		Use: "add NAME network NAME mac MAC [ip ADDRESS]... [queues N] [hca auto|vhost-user|ivshmem] [rate BITS] [storm N] " +
			"[memory-budget SIZE] [memory-weight N] [qmp PATH] [dma rw|ro|blocked] [user USER] [group GROUP]",
		Short: "Add a VM and its sockets", Args: args(cobra.MinimumNArgs(1)), ValidArgsFunction: a.complete(vmWords, nothing),
		RunE: func(c *cobra.Command, argv []string) error {
			w, err := words(argv[1:], vmWords)
			if err == nil {
				err = need(w, "network", "mac")
			}
			if err != nil {
				return err
			}
			return a.add(c, config.KindVM, argv[0], body(w, vmWords, map[string]string{"ip": "ips"}), vmWords)
		},
	})
	del := saveFlag(&cobra.Command{
		Use: "del NAME", Short: "Disconnect a VM and remove its sockets", Args: args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(vms)),
		RunE:              func(c *cobra.Command, argv []string) error { return a.del(c, config.KindVM, argv[0]) },
	})
	known := map[string]wordKind{"network": once}
	move := &cobra.Command{
		Use: "move NAME network NAME", Short: "Move a VM to another network", Args: args(cobra.ExactArgs(3)),
		ValidArgsFunction: a.complete(known, a.names(vms)),
		Long: `Moves the port of a running VM to another network, like a cable plugged into another switch.
The guest keeps its MAC and addresses. RDMA connections to hosts that it no longer reaches
fail when their retries are used up.`,
		RunE: func(c *cobra.Command, argv []string) error {
			w, err := words(argv[1:], known)
			if err != nil {
				return err
			}
			return a.ask(c, http.MethodPut, "/v1/vms/"+url.PathEscape(argv[0])+"/network",
				map[string]string{"network": one(w, "network")}, nil)
		},
	}
	readOnly := false
	quarantine := &cobra.Command{
		Use: "quarantine VM", Short: "Forbid a VM's devices to access its memory", Args: args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(vms)),
		RunE: func(c *cobra.Command, argv []string) error {
			to := translate.UplinkBlocked
			if readOnly {
				to = translate.UplinkReadOnly
			}
			return a.setDMA(c, argv[0], to)
		},
	}
	quarantine.Flags().BoolVar(&readOnly, "read-only", false, "let the devices read the memory (dma ro)")
	release := &cobra.Command{
		Use: "release VM", Short: "End a VM's quarantine", Args: args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(vms)),
		RunE: func(c *cobra.Command, argv []string) error {
			return a.setDMA(c, argv[0], translate.UplinkReadWrite)
		},
	}
	capabilities := &cobra.Command{
		Use: "capabilities VM", Short: "Show what this host has for a VM that migrates", Args: args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(guests)),
		RunE:              func(c *cobra.Command, argv []string) error { return a.capabilities(c, argv[0]) },
	}
	return a.group("vm", "Show, add, move, quarantine and remove VMs",
		`VMs of the running daemon. Arguments after NAME are named like the keys of the
configuration file. Changes last until the daemon ends; add and del can save them.`, show, capabilities, add, del, move,
		quarantine, release)
}

func (a *app) capabilities(cmd *cobra.Command, vm string) error {
	var c daemon.Capabilities
	if err := a.ask(cmd, http.MethodGet, "/v1/vms/"+url.PathEscape(vm)+"/capabilities", nil, &c); err != nil {
		return err
	}
	if a.json {
		return a.printJSON(&c)
	}
	ips := "any"
	if c.IPs != nil {
		ips = strings.Trim(fmt.Sprint(c.IPs), "[]")
	}
	fmt.Fprintf(a.out, "%s: vni %d (network %s), mac %s, ip %s, queues %d\n", c.VM, c.VNI, c.Network, c.MAC, ips, c.Queues)
	fmt.Fprintf(a.out, "hca: engines %d, event queues %d, mtu %d, features %#x, state of version 1 to %d\n", c.HCA.Engines,
		c.HCA.EventQueues, c.HCA.PortMTU, c.HCA.Features, c.HCA.Context)
	t := table(a.out)
	for _, name := range slices.Sorted(maps.Keys(c.HCA.Limits)) {
		fmt.Fprintf(t, "  %s\t%d\n", name, c.HCA.Limits[name])
	}
	return t.Flush()
}

// setDMA changes a VM's attribute and prints when it was in force.
func (a *app) setDMA(c *cobra.Command, name string, to translate.Uplink) error {
	var x daemon.DMAChange
	err := a.ask(c, http.MethodPut, "/v1/vms/"+url.PathEscape(name)+"/dma", map[string]any{"dma": to}, &x)
	switch {
	case err != nil:
		return err
	case a.json:
		return a.printJSON(&x)
	}
	fmt.Fprintf(a.out, "%s: dma %v, was %v; ", x.VM, x.DMA, x.Was)
	if x.Attached {
		fmt.Fprintf(a.out, "no access under %v is in progress any more, after %v\n", x.Was, short(x.Took))
	} else {
		fmt.Fprintln(a.out, "not attached: it applies as soon as it attaches")
	}
	return nil
}
