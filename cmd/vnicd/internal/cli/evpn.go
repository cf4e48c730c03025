package cli

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
)

func (a *app) evpnCmd() *cobra.Command {
	show := &cobra.Command{
		Use: "show", Short: "Show BGP sessions and the routes of each network", Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			var s evpn.Status
			if err := a.ask(c, http.MethodGet, "/v1/evpn", nil, &s); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(&s)
			}
			showEVPN(a.out, &s)
			return nil
		},
	}
	routes := &cobra.Command{
		Use: "routes [NETWORK]", Short: "Show routes in and out, and why one is unused", Args: args(cobra.MaximumNArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(networks)),
		RunE: func(c *cobra.Command, argv []string) error {
			return get(a, c, "/v1/evpn/routes"+inNetwork(argv), func(list []evpn.RouteStatus) {
				for i := range list {
					showRoute(a.out, &list[i])
				}
			})
		},
	}
	known := map[string]wordKind{"network": once}
	clear := &cobra.Command{
		Use: "clear MAC network NAME", Short: "Use a MAC again that was held as a duplicate",
		Args:              args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.complete(known, nothing),
		RunE: func(c *cobra.Command, argv []string) error {
			w, err := words(argv[1:], known)
			if err == nil {
				err = need(w, "network")
			}
			if err != nil {
				return err
			}
			return a.ask(c, http.MethodDelete, "/v1/networks/"+url.PathEscape(one(w, "network"))+"/duplicates/"+
				url.PathEscape(argv[0]), nil, nil)
		},
	}
	return a.group("evpn", "Show BGP EVPN", `BGP EVPN (RFC 7432, RFC 8365): sessions, networks, and routes. A route "in"
comes from a neighbour and is in use unless a reason follows it; a route "out" is this
host's own. seq is the MAC mobility sequence number, which rises with each move.`, show, routes, clear)
}

func showEVPN(w io.Writer, s *evpn.Status) {
	fmt.Fprintf(w, "as %d router-id %v vtep %v\n", s.AS, s.RouterID, s.VTEP)
	for _, x := range s.Sessions {
		fmt.Fprintf(w, "neighbour %v as %d %s", x.Neighbour, x.AS, x.State)
		if !x.Since.IsZero() {
			fmt.Fprintf(w, " for %v", time.Since(x.Since).Round(time.Second))
		}
		fmt.Fprintf(w, " routes in %d of %d out %d updates %d", x.Received, x.MaxRoutes, x.Advertised, x.Updates)
		if x.Flaps > 0 {
			fmt.Fprintf(w, " flaps %d", x.Flaps)
		}
		if x.Why != "" {
			fmt.Fprintf(w, " (%s)", x.Why)
		}
		fmt.Fprintln(w)
	}
	for _, n := range s.Networks {
		fmt.Fprintf(w, "network %s vni %d rd %s import %v export %v vteps %d macs %d ips %d of %d each advertised %d",
			n.Network, n.VNI, n.RD, n.Import, n.Export, n.VTEPs, n.MACs, n.IPs, n.MaxEntries, n.Advertised)
		if n.Waiting > 0 {
			fmt.Fprintf(w, " without room %d", n.Waiting)
		}
		if n.Duplicates > 0 {
			fmt.Fprintf(w, " duplicates %d now %d", n.Duplicates, n.Frozen)
		}
		fmt.Fprintln(w)
	}
	for _, why := range slices.Sorted(maps.Keys(s.Refused)) {
		fmt.Fprintf(w, "refused %d: %s\n", s.Refused[why], why)
	}
}

func showRoute(w io.Writer, r *evpn.RouteStatus) {
	direction := "in"
	if !r.Neighbour.IsValid() {
		direction = "out"
	}
	fmt.Fprintf(w, "%-3s", direction)
	if r.Network != "" {
		fmt.Fprintf(w, " %s", r.Network)
	}
	fmt.Fprintf(w, " %s", r.Type)
	if !r.MAC.IsZero() {
		fmt.Fprintf(w, " %v", r.MAC)
	}
	if r.IP.IsValid() {
		fmt.Fprintf(w, " %v", r.IP)
	}
	fmt.Fprintf(w, " vtep %v rd %s", r.VTEP, r.RD)
	if r.Type == "mac" {
		fmt.Fprintf(w, " seq %d", r.Sequence)
	}
	if r.Sticky {
		fmt.Fprint(w, " sticky")
	}
	if direction == "in" {
		fmt.Fprintf(w, " from %v", r.Neighbour)
	}
	if !r.Active {
		fmt.Fprintf(w, " not used: %s", r.Why)
	}
	fmt.Fprintln(w)
}
