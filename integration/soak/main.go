// Command soak attacks live daemons for a while (`make soak`): attackers own front ends, guests, a tenant's network, a
// host on the underlay and a connection to every socket, while innocent programs of the same daemons use RDMA and check
// every byte (TR-1, TR-2, TR-4, TR-6).
//
//	stage.go     two hosts, each with a daemon; the sockets and addresses of innocents and attackers
//	oracle.go    the innocents: pairs of programs that notice a wrong byte, an error or a stall
//	watch.go     the daemons: alive, answering, no bug in the log, no resource that grows
//	campaign.go  campaigns run episodes; an episode's random choices follow from its seed alone
//	frontend.go  a QEMU that was taken over: vhost-user messages in any order, memory that vanishes, eventfds
//	guest.go     a guest: commands, work requests, rings and doorbells
//	network.go   a guest's network card, and frames with the keys and numbers of the innocents
//	underlay.go  a local user of the peer host, and a peer that was taken over
//	bgp.go       a BGP neighbour that was taken over
//	doors.go     the control socket and the web page
//	restart.go   daemons are killed and started again, and adopt what the attackers have left; outage.go: the innocents
//	             meanwhile
//	neighbour.go what a VM gets beside a hostile one, as a table
//	sabotage.go  events made on purpose: a campaign that notices nothing proves nothing
//
// What the oracle or the watch sees is an event: it is printed with the episodes in progress, and the command fails.
// `-only guest -seed 7 -first 120 -episodes 1` runs one episode again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

type options struct {
	vnicd    string
	time     time.Duration
	seed     uint64
	only     string
	first    int
	episodes int
	dir      string
	sabotage string

	neighbour bool
}

func main() {
	var o options
	flag.StringVar(&o.vnicd, "vnicd", "build/vnicd", "the daemon's binary")
	flag.DurationVar(&o.time, "time", 30*time.Minute, "how long to attack")
	flag.Uint64Var(&o.seed, "seed", 0, "seed of the random choices (0: from the clock)")
	flag.StringVar(&o.only, "only", "", "campaigns, separated by spaces (empty: all)")
	flag.IntVar(&o.first, "first", 0, "number of each campaign's first episode")
	flag.IntVar(&o.episodes, "episodes", 0, "episodes of each campaign (0: until the time is over)")
	flag.StringVar(&o.dir, "dir", "build/soak-logs", "where logs are left if there is an event")
	flag.StringVar(&o.sabotage, "sabotage", "", "cause an event, to see that it is noticed: corrupt, kill, stop, or lose (with adoption or foreground)")
	flag.BoolVar(&o.neighbour, "neighbour", false, "measure what a VM gets beside an idle, an honest and a hostile one")
	flag.Parse()
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(o options) error {
	if os.Geteuid() != 0 {
		return errors.New("daemons run in network namespaces here, which need root: sudo make soak")
	}
	chosen, err := choose(o.only)
	if err != nil {
		return err
	}
	if _, ok := sabotages[o.sabotage]; !ok && o.sabotage != "" {
		return fmt.Errorf("-sabotage: %q, want corrupt, kill, stop or lose", o.sabotage)
	}
	if o.seed == 0 {
		o.seed = uint64(time.Now().UnixNano())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s, err := newStage(ctx, o)
	if err != nil {
		return err
	}
	defer s.Run()
	if o.neighbour {
		return s.neighbour(ctx, o.seed)
	}
	fmt.Printf("seed %d, %s; campaigns: %s\n", o.seed, o.time, strings.Join(names(chosen), " "))
	return s.attack(ctx, o, chosen)
}

func choose(only string) ([]campaign, error) {
	if only == "" {
		return campaigns, nil
	}
	var chosen []campaign
	for _, n := range strings.Fields(only) {
		i := slices.IndexFunc(campaigns, func(c campaign) bool { return c.name == n })
		if i < 0 {
			return nil, fmt.Errorf("-only: no campaign %q; there are %s", n, strings.Join(names(campaigns), ", "))
		}
		chosen = append(chosen, campaigns[i])
	}
	return chosen, nil
}

func names(cs []campaign) (n []string) {
	for _, c := range cs {
		n = append(n, c.name)
	}
	return n
}
