package cli

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// inNetwork returns the query for one network, "" for all.
func inNetwork(argv []string) string {
	if len(argv) == 0 {
		return ""
	}
	return "?network=" + url.QueryEscape(argv[0])
}

var networkWords = map[string]wordKind{"vni": once, "mtu": once, "peer": many, "learn-peers": flag, "ageing": once,
	"max-entries": once, "storm": once, "multicast": once}

var tapWords = map[string]wordKind{"address": many, "bridge": once, "rate": once, "offloads": once}

func (a *app) networkCmd() *cobra.Command {
	show := &cobra.Command{
		Use: "show [NAME]", Short: "Show networks, their peers and drops", Args: args(cobra.MaximumNArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(networks)), RunE: a.showNetworks,
	}
	add := saveFlag(&cobra.Command{
		Use: "add NAME vni N [mtu N] [peer ADDRESS]... [learn-peers] [ageing TIME] [max-entries N] [storm N] " +
			"[multicast snoop|flood]",
		Short: "Add a network", Args: args(cobra.MinimumNArgs(1)), ValidArgsFunction: a.complete(networkWords, nothing),
		RunE: func(c *cobra.Command, argv []string) error {
			w, err := words(argv[1:], networkWords)
			if err == nil {
				err = need(w, "vni")
			}
			if err != nil {
				return err
			}
			return a.add(c, config.KindNetwork, argv[0], body(w, networkWords, map[string]string{"peer": "peers"}),
				networkWords)
		},
	})
	del := saveFlag(&cobra.Command{
		Use: "del NAME", Short: "Remove a network that has no VMs", Args: args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(networks)),
		RunE:              func(c *cobra.Command, argv []string) error { return a.del(c, config.KindNetwork, argv[0]) },
	})
	peer := func(use, short, method string) *cobra.Command {
		return &cobra.Command{Use: use, Short: short, Args: args(cobra.ExactArgs(2)),
			ValidArgsFunction: a.complete(nil, a.names(networks)),
			RunE: func(c *cobra.Command, argv []string) error {
				return a.ask(c, method, "/v1/networks/"+url.PathEscape(argv[0])+"/peers/"+url.PathEscape(argv[1]), nil, nil)
			}}
	}
	tap := &cobra.Command{
		Use:   "add-tap NETWORK INTERFACE [address IP/LENGTH]... [bridge NAME] [rate BITS] [offloads on|off]",
		Short: "Add the host's port to a network", Args: args(cobra.MinimumNArgs(2)),
		ValidArgsFunction: a.complete(tapWords, a.names(networks), nothing),
		RunE: func(c *cobra.Command, argv []string) error {
			w, err := words(argv[2:], tapWords)
			if err != nil {
				return err
			}
			b := body(w, tapWords, map[string]string{"address": "addresses"})
			b["name"] = argv[1]
			return a.ask(c, http.MethodPut, "/v1/networks/"+url.PathEscape(argv[0])+"/tap", b, nil)
		},
	}
	delTAP := &cobra.Command{
		Use: "del-tap NETWORK", Short: "Remove the host's port", Args: args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(networks)),
		RunE: func(c *cobra.Command, argv []string) error {
			return a.ask(c, http.MethodDelete, "/v1/networks/"+url.PathEscape(argv[0])+"/tap", nil, nil)
		},
	}
	return a.group("network", "Show and change the tenants' networks",
		`Networks of the running daemon. Arguments after NAME are named like the keys of the
configuration file. Changes last until the daemon ends; add and del can save them.`, show, add, del,
		peer("add-peer NETWORK ADDRESS", "Add another host's underlay address", http.MethodPut),
		peer("del-peer NETWORK ADDRESS", "Remove a peer that add-peer added", http.MethodDelete), tap, delTAP)
}

func (a *app) showNetworks(c *cobra.Command, argv []string) error {
	var s daemon.Status
	if err := a.ask(c, http.MethodGet, "/v1/status", nil, &s); err != nil {
		return err
	}
	if len(argv) == 1 {
		all, names := s.Networks, []string{}
		s.Networks = nil
		for _, n := range all {
			names = append(names, n.Name)
			if n.Name == argv[0] {
				s.Networks = append(s.Networks, n)
			}
		}
		if s.Networks == nil {
			return fmt.Errorf("no network %q; there are: %s", argv[0], strings.Join(names, ", "))
		}
	}
	if a.json {
		return a.printJSON(s.Networks)
	}
	for _, n := range s.Networks {
		fmt.Fprintf(a.out, "%s: vni %d mtu %d addresses %d (static %d) neighbours %d moves %d flaps %d%s\n", n.Name, n.VNI,
			n.MTU, n.Entries, n.Static, len(n.Neighbours), n.Moves, n.Flaps, drops(n.Drops))
		for _, f := range n.Flapping {
			fmt.Fprintf(a.out, "    FLAPPING %s vlan %d between %s and %s, %d moves\n", f.MAC, f.VLAN, f.From, f.To, f.Moves)
		}
		a.showMulticast(&n)
		if s.VTEP == nil {
			continue
		}
		for _, v := range s.VTEP.Networks {
			for _, p := range v.Peers {
				if v.VNI == n.VNI {
					fmt.Fprintf(a.out, "    peer %s %s", p.Addr, map[bool]string{true: "learnt", false: "static"}[p.Learnt])
					if p.MTU > 0 {
						fmt.Fprintf(a.out, " mtu %d", p.MTU)
					}
					if p.ReservedPort {
						fmt.Fprint(a.out, " reserved-port")
					}
					fmt.Fprintln(a.out)
				}
			}
		}
	}
	return nil
}

func (a *app) portCmd() *cobra.Command {
	show := &cobra.Command{
		Use: "show [NETWORK]", Short: "Show ports with their counters", Args: args(cobra.MaximumNArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(networks)),
		RunE: func(c *cobra.Command, argv []string) error {
			return get(a, c, "/v1/ports"+inNetwork(argv), func(list []daemon.NetworkPort) {
				for _, p := range list {
					fmt.Fprintf(a.out, "%s: network %s kind %s learnt %d", p.Name, p.Network, p.Kind, p.Entries)
					for _, m := range p.MACs {
						fmt.Fprintf(a.out, " mac %s", m)
					}
					for _, ip := range p.IPs {
						fmt.Fprintf(a.out, " ip %s", ip)
					}
					fmt.Fprintf(a.out, "\n    rx %d packets %d bytes  tx %d packets %d bytes  floods %d answered %d%s\n", p.InFrames,
						p.InBytes, p.OutFrames, p.OutBytes, p.Floods, p.Answered, drops(p.Drops))
					if p.ShortPath > 0 {
						fmt.Fprintf(a.out, "    by the short path %d packets of these\n", p.ShortPath)
					}
				}
			})
		},
	}
	return a.group("port", "Show the networks' ports",
		`Ports of VMs, of the host (tap) and of the tunnels (vtep) with their counters, and drops
by reason. rx counts frames from the port, tx frames to it.`, show)
}

func (a *app) fdbCmd() *cobra.Command {
	show := &cobra.Command{
		Use: "show [NETWORK]", Short: "Show forwarding tables", Args: args(cobra.MaximumNArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(networks)),
		RunE: func(c *cobra.Command, argv []string) error {
			return get(a, c, "/v1/fdb"+inNetwork(argv), func(list []daemon.FDBEntry) {
				t := table(a.out)
				for _, e := range list {
					where := "port " + e.Port
					if e.VTEP.IsValid() {
						where = "vtep " + e.VTEP.String()
					}
					fmt.Fprintf(t, "%s\t%s\tnetwork %s\t%s\t%s%s\n", e.MAC, vlan(e.VLAN), e.Network, where, e.Source,
						idle(e.Static, e.Idle))
				}
				t.Flush()
			})
		},
	}
	known := map[string]wordKind{"network": once, "vtep": once, "port": once, "vlan": once}
	return a.group("fdb", "Show and change forwarding tables",
		`Forwarding tables: which MAC is at which port or behind which VTEP. Added entries neither
age nor move; adding one again moves it. Without a VLAN an entry applies to all.`, show,
		a.entry("add MAC network NAME vtep ADDRESS|port NAME [vlan N]", "Add or move an entry", http.MethodPut, "fdb",
			known, "vtep", "port"),
		a.entry("del MAC network NAME [vlan N]", "Remove an added entry, or forget a learnt one", http.MethodDelete, "fdb",
			map[string]wordKind{"network": once, "vlan": once}))
}

func (a *app) neighCmd() *cobra.Command {
	show := &cobra.Command{
		Use: "show [NETWORK]", Short: "Show the known IP addresses", Args: args(cobra.MaximumNArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(networks)),
		RunE: func(c *cobra.Command, argv []string) error {
			return get(a, c, "/v1/neighbours"+inNetwork(argv), func(list []daemon.NetworkNeighbour) {
				t := table(a.out)
				for _, e := range list {
					how := "snooped"
					if e.Static {
						how = "static"
					}
					if e.Router {
						how += " router"
					}
					fmt.Fprintf(t, "%s\t%s\tmac %s\tnetwork %s\t%s%s\n", e.IP, vlan(e.VLAN), e.MAC, e.Network, how,
						idle(e.Static, e.Idle))
				}
				t.Flush()
			})
		},
	}
	known := map[string]wordKind{"network": once, "mac": once, "vlan": once}
	return a.group("neigh", "Show and change the tables for ARP and neighbour discovery",
		`Which MAC has which IP address. The switch answers ARP and neighbour discovery requests for
them. No other host can claim an added address.`, show,
		a.entry("add ADDRESS network NAME mac MAC [vlan N]", "Add or change an entry", http.MethodPut, "neighbours",
			known, "mac"),
		a.entry("del ADDRESS network NAME [vlan N]", "Remove an added entry", http.MethodDelete, "neighbours",
			map[string]wordKind{"network": once, "vlan": once}))
}

// entry returns a command that sets or removes one entry of a table; the words in send form the request's body.
func (a *app) entry(use, short, method, table string, known map[string]wordKind, send ...string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.complete(known, nothing),
		RunE: func(c *cobra.Command, argv []string) error {
			w, err := words(argv[1:], known)
			if err == nil {
				err = need(w, "network")
			}
			if err != nil {
				return err
			}
			u := "/v1/networks/" + url.PathEscape(one(w, "network")) + "/" + table + "/" + url.PathEscape(argv[0])
			if v := one(w, "vlan"); v != "" {
				u += "?vlan=" + url.QueryEscape(v)
			}
			if method == http.MethodDelete {
				return a.ask(c, method, u, nil, nil)
			}
			b := map[string]string{}
			for _, k := range send {
				if v := one(w, k); v != "" {
					b[k] = v
				}
			}
			return a.ask(c, method, u, b, nil)
		}}
}

func vlan(n uint16) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("vlan %d", n)
}

func idle(static bool, d time.Duration) string {
	if static {
		return ""
	}
	return fmt.Sprintf(" %ds", int(d/time.Second))
}

// mostGroups bounds the groups that are shown; -j shows all.
const mostGroups = 64

// showMulticast prints a network's groups, if it has multicast snooping.
func (a *app) showMulticast(n *vswitch.Status) {
	m := n.Multicast
	if m == nil {
		return
	}
	list := func(ps []vswitch.Place) (s string) {
		for _, p := range ps {
			s += " " + p.Port
			if p.Remote != 0 {
				s += fmt.Sprintf("/%d", p.Remote)
			}
		}
		return s
	}
	fmt.Fprintf(a.out, "    multicast: groups %d members %d refused %d not flooded %d\n", m.Groups, m.Members, m.Refused,
		n.Pruned)
	for _, q := range m.Queriers {
		state := map[bool]string{true: "active", false: "waiting"}[q.Active]
		fmt.Fprintf(a.out, "    %s vlan %d: querier %v at %q, %s; routers%s\n", q.Family, q.VLAN, q.Address, q.Port, state,
			list(q.Routers))
	}
	for i, g := range m.List {
		if i == mostGroups {
			fmt.Fprintf(a.out, "    %d more groups\n", len(m.List)-i)
			break
		}
		fmt.Fprintf(a.out, "    group %v vlan %d:%s\n", g.Group, g.VLAN, list(g.Members))
	}
}
