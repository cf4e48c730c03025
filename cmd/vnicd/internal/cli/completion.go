package cli

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/lab/cluster"
)

// Completion in a shell. The scripts that cobra generates run this program with the words of the command line. Errors
// are not reported: nothing is completed then.

// completer returns the completions of one word of a command line.
type completer = cobra.CompletionFunc

// completionTime bounds the daemon's time to answer while a user waits for completions. Tests change it.
var completionTime = time.Second

// nameKind is a kind of names.
type nameKind uint8

const (
	guests       nameKind = iota // VMs
	applications                 // host applications
	vms                          // both
	networks                     // tenants' networks
	ports                        // ports of networks
	numNameKinds
)

// names completes names of one kind, and the words in more.
func (a *app) names(k nameKind, more ...string) completer {
	return func(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		list := slices.Concat(a.inventory(c)[k], more)
		slices.Sort(list)
		return slices.Compact(list), cobra.ShellCompDirectiveNoFileComp
	}
}

// inventory returns the names that the running daemon has, or those of the configuration if no daemon answers. With the
// flag --network it has the ports of that network only.
func (a *app) inventory(c *cobra.Command) (names [numNameKinds][]string) {
	add := func(k nameKind, name string) { names[k] = append(names[k], name) }
	only, _ := c.Flags().GetString("network")
	addPort := func(network, name string) {
		if only == "" || only == network {
			add(ports, name)
		}
	}
	addVM := func(name string, application bool) {
		add(vms, name)
		if application {
			add(applications, name)
		} else {
			add(guests, name)
		}
	}
	if s := a.running(c, completionTime); s != nil {
		for _, n := range s.Networks {
			add(networks, n.Name)
			for _, p := range n.Ports {
				addPort(n.Name, p.Name)
			}
		}
		for _, v := range s.VMs {
			addVM(v.Name, v.IsApplication())
		}
		return names
	}
	cfg, err := config.Load(a.config)
	if err != nil {
		return names
	}
	for _, n := range cfg.Networks {
		add(networks, n.Name)
		if n.TAP != nil {
			addPort(n.Name, n.TAP.Name)
		}
	}
	for _, v := range cfg.VMs {
		addVM(v.Name, v.Application != nil)
		addPort(v.Network, v.Name)
	}
	return names
}

// running returns the daemon's status, nil if none answers within limit.
func (a *app) running(c *cobra.Command, limit time.Duration) *daemon.Status {
	client, err := a.client(c)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	s, err := client.Status(ctx)
	if err != nil {
		return nil
	}
	return s
}

// files leaves the completion to the shell, which completes names of files.
func files(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return nil, cobra.ShellCompDirectiveDefault
}

// directories makes the shell complete names of directories.
func directories(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return nil, cobra.ShellCompDirectiveFilterDirs
}

// nothing completes nothing.
var nothing completer = cobra.NoFileCompletions

// choices completes one of a few words.
func choices(words ...string) completer {
	return cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)
}

// valuesOf completes the values of a key of the configuration.
func valuesOf(key string) completer {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return config.Values(key), cobra.ShellCompDirectiveNoFileComp
	}
}

// values are what completes the values of flags, and of keys among the arguments.
func (a *app) values() map[string]completer {
	return map[string]completer{
		"config": files, "control": files, "qemu": files, "binary": files, "qmp": files, "socket-path": files, "write": files,
		"output": files, "destination": files,
		"logs": directories,

		"network": a.names(networks), "port": a.names(ports), "vm": a.names(guests),

		"dma": valuesOf("vms[].dma"), "hca": valuesOf("vms[].hca"), "multicast": valuesOf("networks[].multicast"),
		"log-level": valuesOf("log-level"),
		"kernel":    choices(cluster.Kernels()...),
		"offloads":  choices("on", "off"),
	}
}

// complete returns a completer of arguments: first complete the leading ones, known are the keys of those that follow,
// as in words.
func (a *app) complete(known map[string]wordKind, first ...completer) completer {
	return func(c *cobra.Command, argv []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(argv) < len(first) {
			return first[len(argv)](c, argv, typed)
		}
		left := maps.Clone(known)
		for i := len(first); i < len(argv); i++ {
			key := argv[i]
			if known[key] != many {
				delete(left, key)
			}
			if known[key] == flag {
				continue
			}
			if i++; i == len(argv) { // its value is next
				next := a.values()[key]
				if _, is := known[key]; !is || next == nil {
					next = nothing
				}
				return next(c, argv, typed)
			}
		}
		return slices.Sorted(maps.Keys(left)), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeFlags completes the values of the flags of c and its sub-commands.
func (a *app) completeFlags(c *cobra.Command) {
	for name, f := range a.values() {
		if c.LocalFlags().Lookup(name) != nil {
			_ = c.RegisterFlagCompletionFunc(name, f) // fails for a flag that does not exist
		}
	}
	for _, sub := range c.Commands() {
		a.completeFlags(sub)
	}
}
