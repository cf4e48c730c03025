package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/vnicd/vnicd/lab"
)

// campaign is one kind of attacker. An episode is a bounded attack whose choices come from rng alone. It returns an
// error only for what must not happen, such as a socket that nobody serves: refusals are what an attacker expects.
type campaign struct {
	name    string
	episode func(ctx context.Context, s *stage, rng *rand.Rand) error
	count   *atomic.Int64 // finished episodes
	// restarts is set if the episodes restart daemons.
	restarts bool
}

var campaigns = []campaign{
	{"frontend", frontEndEpisode, new(atomic.Int64), false},
	{"guest", guestEpisode, new(atomic.Int64), false},
	{"network", networkEpisode, new(atomic.Int64), false},
	{"underlay", underlayEpisode, new(atomic.Int64), false},
	{"doors", doorsEpisode, new(atomic.Int64), false},
	{"bgp", bgpEpisode, new(atomic.Int64), false},
	{"foreground", foregroundEpisode, new(atomic.Int64), true},
	{"adoption", adoptionEpisode, new(atomic.Int64), true},
}

// An episode that lasts longer than this waits for a daemon that does not answer.
const episodeLimit = 3 * time.Minute

// attack measures the innocents alone, lets the attackers work, and measures again. The error names the events.
func (s *stage) attack(ctx context.Context, o options, chosen []campaign) error {
	quiet := min(10*time.Second, o.time)
	s.observe(ctx, quiet, o.seed, nil)
	s.table("before")
	var before [2]resources
	for i, h := range s.daemons() {
		var err error
		if before[i], err = measure(h); err != nil {
			return err
		}
	}

	begin := time.Now()
	s.observe(ctx, o.time, o.seed+1, func(ctx context.Context) {
		var wg sync.WaitGroup
		for _, c := range chosen {
			wg.Go(func() { s.series(ctx, o, c) })
		}
		if f := sabotages[o.sabotage]; f != nil {
			f(s)
		}
		done := make(chan struct{})
		go func() { wg.Wait(); close(done) }()
		for {
			select {
			case <-done:
				return
			case <-time.After(time.Minute):
				fmt.Printf("%5.0f min: %s\n", time.Since(begin).Minutes(), progress(chosen))
			}
		}
	})
	fmt.Printf("attacked for %s: %s\n", time.Since(begin).Round(time.Second), progress(chosen))
	s.table("during the attack")

	if len(s.events) == 0 && ctx.Err() == nil {
		s.observe(ctx, quiet, o.seed+2, nil)
		s.table("after")
		var after [2]resources
		for i, h := range s.daemons() {
			after[i] = s.settle(ctx, h, before[i])
		}
		fmt.Print(summary(s.daemons(), before, after, chosen))
		s.restarted()
	}
	for _, h := range s.daemons() {
		s.searchLog(h)
	}
	if len(s.events) == 0 {
		fmt.Println("no event")
		return ctx.Err()
	}
	s.keepLogs(o.dir)
	n := len(s.events)
	for range n {
		fmt.Println("event:", <-s.events)
	}
	return fmt.Errorf("%d events; seed %d; the daemons' logs are in %s", n, o.seed, o.dir)
}

func (s *stage) daemons() []*lab.Host { return []*lab.Host{s.h1, s.h2} }

// observe runs the innocents and the watch for d, or until there is an event, and f beside them.
func (s *stage) observe(ctx context.Context, d time.Duration, seed uint64, f func(context.Context)) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var wg sync.WaitGroup
	for i, p := range s.pairs {
		wg.Go(func() {
			if err := p.run(ctx, seed+uint64(i)); err != nil {
				s.report("oracle", err)
				cancel()
			}
		})
	}
	for _, h := range s.daemons() {
		wg.Go(func() { s.guard(ctx, h) })
	}
	if f != nil {
		wg.Go(func() { f(ctx) })
	}
	wg.Go(func() { // the first event ends the phase: the episodes in progress are then known
		for ctx.Err() == nil && len(s.events) == 0 {
			time.Sleep(100 * time.Millisecond)
		}
		cancel()
	})
	wg.Wait()
}

// series runs episodes of one campaign, one after the other.
func (s *stage) series(ctx context.Context, o options, c campaign) {
	for i := o.first; ctx.Err() == nil && (o.episodes == 0 || i < o.first+o.episodes); i++ {
		before, at := len(s.events), s.disturbance()
		err := s.once(ctx, c, rand.New(rand.NewPCG(o.seed, uint64(i))))
		// What attackers meet during a restart is no event; what the restart itself reports is.
		if err != nil && !c.restarts && s.disturbed(at) {
			time.Sleep(20 * time.Millisecond)
			continue // nobody was attacked
		}
		if err != nil && (c.restarts || ctx.Err() == nil) {
			s.report(fmt.Sprintf("%s, episode %d", c.name, i), err)
		}
		if before == 0 && len(s.events) > 0 {
			fmt.Printf("in progress: -only %s -seed %d -first %d -episodes 1\n", c.name, o.seed, i)
		}
		c.count.Add(1)
	}
}

// once runs an episode. The attacker's own accesses to memory that it has withdrawn end the episode, not the command.
func (s *stage) once(ctx context.Context, c campaign, rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(ctx, episodeLimit)
	defer cancel()
	result := make(chan error, 1)
	go func() {
		defer func() {
			r := recover()
			if r == nil {
				return
			}
			if _, fault := r.(interface{ Addr() uintptr }); !fault {
				panic(r)
			}
			result <- nil
		}()
		debug.SetPanicOnFault(true)
		result <- c.episode(ctx, s, rng)
	}()
	select {
	case err := <-result:
		return err
	case <-time.After(episodeLimit + patience):
		return fmt.Errorf("has not ended after %s: a daemon does not answer", episodeLimit+patience)
	}
}

// settle waits until a daemon has released what the attackers used.
func (s *stage) settle(ctx context.Context, h *lab.Host, before resources) (after resources) {
	var err error
	for range 60 {
		if after, err = measure(h); err == nil {
			if err = grown(before, after); err == nil {
				break
			}
		}
		select {
		case <-ctx.Done():
			return after
		case <-time.After(time.Second):
		}
	}
	s.report(h.Name, err)
	return after
}

// summary is what the daemons used before and after the attack, and how often they were attacked.
func summary(hosts []*lab.Host, before, after [2]resources, cs []campaign) string {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "daemon\tdescriptors\tmappings\tthreads\tgoroutines\tRSS MiB\t")
	for i, h := range hosts {
		for _, x := range []struct {
			when string
			r    resources
		}{{"before", before[i]}, {"after", after[i]}} {
			fmt.Fprintf(t, "%s %s\t%d\t%d\t%d\t%d\t%d\t\n", h.Name, x.when, x.r.descriptors, x.r.mappings, x.r.threads,
				x.r.goroutines, x.r.rssKiB>>10)
		}
	}
	fmt.Fprintln(t, "campaign\tepisodes\t")
	for _, c := range cs {
		fmt.Fprintf(t, "%s\t%d\t\n", c.name, c.count.Load())
	}
	_ = t.Flush() // to memory
	return b.String()
}

func progress(cs []campaign) string {
	var parts []string
	for _, c := range cs {
		parts = append(parts, fmt.Sprintf("%s %d", c.name, c.count.Load()))
	}
	return "episodes: " + strings.Join(parts, ", ")
}

// table prints what the innocents saw in the last phase.
func (s *stage) table(when string) {
	for _, p := range s.pairs {
		n, median, p999 := p.phase()
		fmt.Printf("%-18s %-12s %6d WRITEs, median %v, 99.9%% within %v\n", when, p.name(), n,
			median.Round(time.Microsecond), p999.Round(time.Microsecond))
	}
}

func (s *stage) keepLogs(dir string) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		return
	}
	for _, h := range s.daemons() {
		if err := os.WriteFile(filepath.Join(dir, h.Name+".log"), []byte(s.logs(h)), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "soak:", err)
		}
	}
}
