package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// Two campaigns restart a daemon while it is attacked. Innocents lose their connections, by design, and nothing else:
// those that have no end on this host go on, the others open their devices again within backPatience, connect, and
// compare bytes as before. What other campaigns meet meanwhile, such as a socket that nobody serves, is no event.
//
//	foreground  nothing holds the devices between two daemons: every front end is disconnected
//	adoption    a service manager keeps the connections, and the next daemon adopts them in whatever state the
//	            attackers have left them. Now and then it is killed again at once, as if such a state had ended it

// An innocent VM must be back within this time of a daemon's start: suspects are resumed one by one, and a new front
// end waits for its predecessor.
const backPatience = 2 * time.Minute

// maxCrashes is how many daemons may die of what they adopt, before they have found out whose state it was
// (device/virtio/vhostuser: suspects).
const maxCrashes = 2

func foregroundEpisode(ctx context.Context, s *stage, rng *rand.Rand) error {
	return s.restartEpisode(ctx, rng, false)
}

func adoptionEpisode(ctx context.Context, s *stage, rng *rand.Rand) error {
	return s.restartEpisode(ctx, rng, true)
}

// restartEpisode attacks a daemon by itself, too, so that it has something to lose or to adopt.
func (s *stage) restartEpisode(ctx context.Context, rng *rand.Rand, managed bool) error {
	h := []*lab.Host{s.h1, s.h1, s.h1, s.h2}[rng.IntN(4)]
	quiet := 2*time.Second + time.Duration(rng.IntN(4000))*time.Millisecond // the others work undisturbed
	attack := time.Duration(rng.IntN(1500)) * time.Millisecond
	var sig os.Signal = syscall.SIGKILL
	if rng.IntN(4) == 0 {
		sig = syscall.SIGTERM
	}
	var again []time.Duration // further daemons are killed that long after their start
	if managed && rng.IntN(2) == 0 {
		again = append(again, time.Duration(rng.IntN(3000))*time.Millisecond)
		if rng.IntN(2) == 0 { // while suspects are resumed alone: one of them is then guilty
			again = append(again, 2*time.Second+time.Duration(rng.IntN(5000))*time.Millisecond)
		}
	}
	attackers := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))

	select {
	case <-ctx.Done():
		return nil
	case <-time.After(quiet):
	}
	s.restarting.Lock()
	defer s.restarting.Unlock()
	if ctx.Err() != nil {
		return nil
	}
	if managed && h.Manager == nil {
		if err := s.restart(h, syscall.SIGTERM, managed, nil); err != nil {
			return fmt.Errorf("start under a service manager: %w", err)
		}
	}
	within, stop := context.WithTimeout(ctx, attack+episodeLimit)
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	for range 2 {
		for _, episode := range []func(context.Context, *stage, *rand.Rand) error{frontEndEpisode, guestEpisode} {
			r := rand.New(rand.NewPCG(attackers.Uint64(), attackers.Uint64()))
			wg.Go(func() { // its errors are those of an attacker whose daemon goes away
				_ = s.once(within, campaign{episode: episode}, r)
			})
		}
	}
	time.Sleep(attack)
	return s.restart(h, sig, managed, again)
}

// restart ends a daemon, starts the next one, and brings the innocents back. It finishes even if the phase is over.
func (s *stage) restart(h *lab.Host, sig os.Signal, managed bool, again []time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*backPatience)
	defer cancel()
	var affected []*pair
	for _, p := range s.pairs {
		if p.x.host == h || p.y.host == h {
			affected = append(affected, p)
		}
	}
	adopts, begin := managed && h.Manager != nil, time.Now()
	s.windows[h].Add(1)
	defer s.windows[h].Add(1)
	for _, p := range affected {
		p.expect()
	}
	err := s.replace(ctx, h, sig, managed, again)
	if err == nil && adopts && len(again) == 0 {
		err = s.adopted(ctx, h)
	}
	for _, p := range affected {
		p.interrupt()
	}
	if err == nil {
		err = s.reconnect(ctx, h, affected)
	}
	if err != nil {
		return err // an event, which ends the phase: the pairs stay parked
	}
	for _, p := range affected {
		p.restored()
	}
	s.outages = append(s.outages, time.Since(begin))
	return nil
}

// replace ends a daemon and starts the next.
func (s *stage) replace(ctx context.Context, h *lab.Host, sig os.Signal, managed bool, again []time.Duration) error {
	s.daemon.Lock()
	defer s.daemon.Unlock()
	if err := s.end(ctx, h, sig); err != nil {
		return err
	}
	if err := s.manage(h, managed); err != nil {
		return err
	}
	for _, after := range again {
		// Not awaited: it may die before it answers.
		if err := s.keepLog(h); err != nil {
			return err
		}
		p, err := h.Launch()
		if err != nil {
			return err
		}
		h.Proc = p
		s.Add(p.Kill)
		select {
		case <-p.Done():
			return errors.New("vnicd has ended while it adopted connections: " + p.LogTail())
		case <-time.After(after):
		}
		p.Kill()
	}
	var err error
	for range maxCrashes + 1 {
		if err = s.keepLog(h); err != nil {
			return err
		}
		if err = h.Start(ctx); err == nil {
			return nil
		}
		s.report(h.Name, err) // an event in any case; but the next daemon must come up
	}
	return fmt.Errorf("vnicd on %s does not come up after %d crashes: %w", h.Name, maxCrashes, err)
}

// end ends a daemon, which must not have ended by itself.
func (s *stage) end(ctx context.Context, h *lab.Host, sig os.Signal) error {
	select {
	case <-h.Proc.Done():
		return errors.New("vnicd has ended: " + h.Proc.LogTail())
	default:
	}
	if sig == syscall.SIGTERM {
		return h.Stop(ctx)
	}
	h.Proc.Kill()
	return nil
}

// manage gives the host a service manager, or takes it away, with what it keeps.
func (s *stage) manage(h *lab.Host, managed bool) error {
	switch {
	case managed && h.Manager == nil:
		s.managers++
		dir := filepath.Join(h.Dir, fmt.Sprint("m", s.managers))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		m, err := harness.NewServiceManager(dir)
		if err != nil {
			return err
		}
		h.Manager = m
		s.Add(func() {
			if h.Manager == m {
				_ = m.Close()
			}
		})
	case !managed && h.Manager != nil:
		m := h.Manager
		h.Manager = nil
		return m.Close()
	}
	return nil
}

// keepLog puts the daemon's log aside: the next one begins a new one.
func (s *stage) keepLog(h *lab.Host) error {
	n := len(s.oldLogs(h))
	err := os.Rename(filepath.Join(h.Dir, "vnicd.log"), filepath.Join(h.Dir, fmt.Sprintf("vnicd.log.%04d", n)))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func (s *stage) oldLogs(h *lab.Host) []string {
	names, _ := filepath.Glob(filepath.Join(h.Dir, "vnicd.log.*")) // the pattern is good
	slices.Sort(names)
	return names
}

// logs returns the logs of all daemons of a host.
func (s *stage) logs(h *lab.Host) string {
	var b strings.Builder
	for _, n := range s.oldLogs(h) {
		text, err := os.ReadFile(n)
		if err != nil {
			return err.Error()
		}
		b.Write(text)
	}
	return b.String() + h.Log()
}

var resumed = regexp.MustCompile(`resumed a VM of the previous vnicd: .*vm=(\w+)`)

// adopted waits until the daemon has adopted the connections of the host's innocents.
func (s *stage) adopted(ctx context.Context, h *lab.Host) error {
	ctx, cancel := context.WithTimeout(ctx, backPatience)
	defer cancel()
	for {
		have := map[string]bool{}
		for _, m := range resumed.FindAllStringSubmatch(h.Log(), -1) {
			have[m[1]] = true
		}
		i := slices.IndexFunc(s.parties, func(p *party) bool { return p.host == h && !have[p.name] })
		if i < 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("vnicd on %s has not adopted the connection of %s within %s", h.Name, s.parties[i].name,
				backPatience)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// restarted prints what the daemons' logs say of restarts, if there were any: a campaign in which nothing was adopted
// proves nothing.
func (s *stage) restarted() {
	for _, h := range s.daemons() {
		text := s.logs(h)
		innocent, other := 0, 0
		for _, m := range resumed.FindAllStringSubmatch(text, -1) {
			if slices.ContainsFunc(s.parties, func(p *party) bool { return p.name == m[1] }) {
				innocent++
			} else {
				other++
			}
		}
		if n := s.windows[h].Load() / 2; n > 0 {
			fmt.Printf("%s: %d restarts; connections adopted: %d of innocents, %d of attackers; not resumable %d, dropped as "+
				"guilty %d\n", h.Name, n, innocent, other,
				strings.Count(text, "connection of the previous vnicd cannot be resumed"),
				strings.Count(text, "connection of the previous vnicd dropped"))
		}
	}
	if len(s.outages) > 0 {
		fmt.Printf("innocents were back after %v (median), %v (longest)\n", median(s.outages).Round(time.Millisecond),
			slices.Max(s.outages).Round(time.Millisecond))
	}
}

// reconnect opens the devices of the host's innocents again and connects the pairs.
func (s *stage) reconnect(ctx context.Context, h *lab.Host, affected []*pair) error {
	for _, p := range s.parties {
		if p.host == h {
			_ = p.dev.Close() // its daemon has gone
		}
	}
	for _, p := range s.parties {
		if p.host == h {
			if err := p.reopen(ctx); err != nil {
				return err
			}
		}
	}
	for _, p := range affected {
		for _, e := range []*end{p.a, p.b} {
			if e.host == h {
				continue
			}
			if err := e.close(); err != nil {
				return fmt.Errorf("%s: what remains of the connection %s cannot be destroyed: %w", e.name, p.name(), err)
			}
		}
		if err := p.connect(ctx); err != nil {
			return fmt.Errorf("%s: connecting again: %w", p.name(), err)
		}
	}
	return nil
}

// reopen opens the party's device at the next daemon.
func (p *party) reopen(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, backPatience)
	defer cancel()
	for {
		err := p.open(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the VM is not back within %s: %w", backPatience, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// disturbance is what has been restarted so far.
type disturbance [2]int64

func (s *stage) disturbance() (d disturbance) {
	for i, h := range s.daemons() {
		d[i] = s.windows[h].Load()
	}
	return d
}

// disturbed reports whether a daemon was being restarted at the time of before, or since.
func (s *stage) disturbed(before disturbance) bool {
	return before != s.disturbance() || before[0]%2 != 0 || before[1]%2 != 0
}

// proc returns the host's daemon.
func (s *stage) proc(h *lab.Host) *harness.Process {
	s.daemon.RLock()
	defer s.daemon.RUnlock()
	return h.Proc
}
