package hostdriver

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/hypervisor/loglimit"
	"github.com/vnicd/vnicd/hypervisor/pressure"
)

// Host bounds what all VMs together keep resident while the host is short of memory (HF-4), and divides it among them.
// Memory above a VM's target is returned to the kernel, which may swap it.
//
// Each zone (the machine, and each memory cgroup with a limit that vnicd is in) is in one of these levels; the highest
// counts:
//
//	calm ──▶ pressed: little is free without swapping, and tasks wait for memory: the total shrinks by a sixteenth,
//	                  four times a second, to a quarter of the zone at least
//	     ──▶ critical: even swapping frees little more: by a quarter, ten times a second, to MinBudget for each VM
//	steady            neither these nor calm: the total stays
//
// In calm, after a while, the total grows by a sixteenth each second until it bounds nothing any more. A VM's own
// faults that wait for the swap device are pressure, too; the quarter is there so that they cannot drive the total down
// further and further. Nothing shrinks for a zone without free swap space, since nothing would be gained.
//
// When even the reserve is used up, only memory that the file has already is made resident; other faults wait until
// there is memory again (ErrShort), so that nobody is killed.
type Host struct {
	opts HostOptions

	credit    atomic.Int64 // bytes that may become resident before the next reading
	exhausted atomic.Pointer[string]
	wake      chan struct{}

	cancel context.CancelFunc
	done   chan struct{}
	watch  *pressure.Watch

	mu      sync.Mutex // guards the fields below; before Budget.mu
	vms     map[*Budget]uint64
	zones   map[string]*zoneState
	status  HostStatus
	target  uint64    // of all VMs; 0: none
	shrunk  time.Time // last time that target shrank
	grown   time.Time // last time that it grew
	calm    time.Time // beginning of calm; zero: not calm
	failing bool      // the last reading failed
	logged  time.Time // last message about pressure
}

// HostOptions of a Host.
type HostOptions struct {
	// Read returns the zones: pressure.Reader's Read. It is not called concurrently.
	Read func() ([]pressure.Zone, error)
	// Watch are files for pressure.NewWatch. Where it fails the host is only read periodically.
	Watch []string
	// Limit is the share of time, above 0, in which tasks wait for memory before VMs shrink.
	Limit float64
	Clock Clock // nil: the system's
	Log   hclog.Logger
}

// Levels of a zone, by severity.
type level int

const (
	levelCalm level = iota
	levelSteady
	levelPressed
	levelCritical
)

// Levels are the names of the levels of memory pressure, by severity.
var Levels = []string{"calm", "steady", "pressed", "critical"}

func (l level) String() string { return Levels[l] }

// HostStatus is the host's memory as the Host sees it.
type HostStatus struct {
	Level   string  `json:"level"`          // calm, steady, pressed, critical
	Zone    string  `json:"zone"`           // that it is the level of: "host", or a cgroup
	Total   uint64  `json:"total_bytes"`    // of the zone
	Free    uint64  `json:"free_bytes"`     // without swapping
	Reserve uint64  `json:"reserve_bytes"`  // with swapping
	Swap    uint64  `json:"swap_bytes"`     // free
	Stalled float64 `json:"stalled_ratio"`  // share of time in which tasks waited for memory, in the last interval
	Target  uint64  `json:"target_bytes"`   // of all VMs; 0: any amount
	Shrinks uint64  `json:"shrinks"`        // times that the target shrank
	Full    string  `json:"full,omitempty"` // why memory that is not in the files yet is not made resident
}

// zoneState is what is remembered of a zone.
type zoneState struct {
	at     time.Time
	stall  time.Duration
	share  float64 // of time, in the last interval
	level  level
	zone   pressure.Zone
	futile bool // there is no swap space: shrinking gains nothing
}

// Intervals and amounts; see Host.
const (
	interval      = 200 * time.Millisecond // over which stalls are measured, at least
	shrinkPressed = 250 * time.Millisecond
	shrinkUrgent  = 100 * time.Millisecond
	calmFor       = 5 * time.Second
	growEvery     = time.Second
	growLeast     = 16 << 20
	readCalm      = time.Second
	readUrgent    = 250 * time.Millisecond
	shrinkAgain   = 5 * time.Millisecond
	leastSwap     = 1 << 20
	mostCredit    = 64 << 20
)

// marks are the amounts of memory below which a zone is tight, critical, exhausted.
func marks(total uint64) (tight, critical, exhausted uint64) {
	return min(total/8, 4<<30), min(total/16, 1<<30), min(total/64, 128<<20)
}

// NewHost starts to watch the host's memory, until Close.
func NewHost(o HostOptions) (*Host, error) {
	h := newHost(o)
	if _, err := o.Read(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.cancel = cancel
	w, err := pressure.NewWatch(o.Watch, h.hurry)
	if err != nil {
		h.opts.Log.Debug("the kernel does not report memory pressure; it is read periodically", "reason", err)
	}
	h.watch = w
	go h.run(ctx)
	return h, nil
}

func newHost(o HostOptions) *Host {
	if o.Clock == nil {
		o.Clock = systemClock{}
	}
	o.Log = loglimit.New(o.Log)
	h := &Host{opts: o, wake: make(chan struct{}, 1), done: make(chan struct{}), vms: make(map[*Budget]uint64),
		zones: make(map[string]*zoneState)}
	return h
}

// Close ends the watch. Targets stay as they are.
func (h *Host) Close() {
	h.cancel()
	if h.watch != nil {
		h.watch.Close()
	}
	<-h.done
}

// Add bounds a VM. Weight is its share when memory is divided. No Driver uses the budget yet.
func (h *Host) Add(b *Budget, weight int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b.host = h
	h.vms[b] = uint64(weight)
}

// Remove ends Add.
func (h *Host) Remove(b *Budget) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.vms, b)
	b.setTarget(0)
}

// Status returns the state as of the last reading.
func (h *Host) Status() HostStatus {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.status
}

// hurry wakes run.
func (h *Host) hurry() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

func (h *Host) run(ctx context.Context) {
	defer close(h.done)
	next := h.opts.Clock.Now()
	for {
		if now := h.opts.Clock.Now(); !now.Before(next) {
			next = now.Add(h.step())
		}
		wait := next.Sub(h.opts.Clock.Now())
		if h.shrink() {
			wait = min(wait, shrinkAgain)
		}
		expired := make(chan struct{})
		stop := h.opts.Clock.AfterFunc(max(wait, 0), func() { close(expired) })
		select {
		case <-ctx.Done():
			stop()
			return
		case <-h.wake:
			stop()
			next = h.opts.Clock.Now()
		case <-expired:
		}
	}
}

// shrink evicts what VMs have beyond their targets. It reports whether some have more to evict soon.
func (h *Host) shrink() (more bool) {
	h.mu.Lock()
	vms := make([]*Budget, 0, len(h.vms))
	for b := range h.vms {
		vms = append(vms, b)
	}
	h.mu.Unlock()
	for _, b := range vms {
		more = b.shrink() || more
	}
	return more
}

// step reads the zones and sets the targets. It returns when to read again.
func (h *Host) step() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stepLocked()
}

func (h *Host) stepLocked() time.Duration {
	now := h.opts.Clock.Now()
	zones, err := h.opts.Read()
	if err == nil && len(zones) == 0 {
		err = errors.New("there is no zone")
	}
	if err != nil {
		if !h.failing {
			h.opts.Log.Warn("the host's memory cannot be read", "reason", err)
		}
		h.failing = true
		h.credit.Store(math.MaxInt64)
		h.exhausted.Store(nil)
		return readCalm
	}
	h.failing = false
	worst := h.judgeLocked(zones, now)
	h.adjustLocked(worst, now)
	h.divideLocked()
	h.reportLocked(worst)
	if worst.level == levelCalm && worst.zone.Free >= worst.zone.Total/4 && h.target == 0 {
		return readCalm
	}
	return readUrgent
}

// judgeLocked returns the zone with the highest level; of several, that with the smallest part free.
func (h *Host) judgeLocked(zones []pressure.Zone, now time.Time) (worst *zoneState) {
	// However much there is: a limit may be set before the next reading.
	credit, full := uint64(mostCredit), (*string)(nil)
	seen := make(map[string]bool, len(zones))
	for _, z := range zones {
		s := h.zones[z.Name]
		if s == nil {
			s = &zoneState{at: now, stall: z.Stall}
			h.zones[z.Name] = s
		}
		seen[z.Name] = true
		if d := now.Sub(s.at); d >= interval {
			s.share = float64(max(z.Stall-s.stall, 0)) / float64(d)
			s.at, s.stall = now, z.Stall
		}
		s.zone = z
		s.judge(h.opts.Limit)
		if worst == nil || s.level > worst.level || s.level == worst.level && s.free() < worst.free() {
			worst = s
		}
		credit = min(credit, z.Reserve/4)
		if _, _, exhausted := marks(z.Total); z.Reserve < exhausted {
			why := fmt.Sprintf("%s has %d MiB left of %d, and %d of swap", z.Name, z.Free>>20, z.Total>>20, z.Swap>>20)
			full = &why
		}
	}
	for name := range h.zones {
		if !seen[name] {
			delete(h.zones, name)
		}
	}
	if full != nil {
		credit = 0
	}
	h.exhausted.Store(full)
	h.credit.Store(int64(credit))
	return worst
}

func (s *zoneState) free() float64 { return float64(s.zone.Free) / float64(max(s.zone.Total, 1)) }

func (s *zoneState) judge(limit float64) {
	z := &s.zone
	tight, critical, _ := marks(z.Total)
	s.futile = z.Swap < leastSwap
	stalls, calmed := s.share >= limit, s.share < limit/2
	if z.Stall < 0 { // no PSI: a lower mark of free memory has to do
		stalls, calmed = z.Free < tight/2, z.Free >= tight
	}
	switch {
	case z.Reserve < critical:
		s.level = levelCritical
	case z.Free < tight && stalls:
		s.level = levelPressed
	case z.Reserve >= 2*critical && (calmed || z.Free >= 2*tight):
		s.level = levelCalm
	default:
		s.level = levelSteady
	}
}

// adjustLocked changes the target of all VMs.
func (h *Host) adjustLocked(worst *zoneState, now time.Time) {
	var used, least uint64
	for b := range h.vms {
		c := b.claim(1)
		used, least = used+b.resident(), least+c.least
	}
	have := used
	if h.target != 0 {
		have = min(used, h.target)
	}
	total := worst.zone.Total
	for _, s := range h.zones {
		total = min(total, s.zone.Total)
	}
	floor := max(total/4, least)
	since := now.Sub(h.shrunk)
	if worst.level != levelCalm {
		h.calm = time.Time{}
	} else if h.calm.IsZero() {
		h.calm = now
	}
	switch {
	case worst.level >= levelPressed && worst.futile:
	case worst.level == levelCritical && since >= shrinkUrgent:
		h.lowerLocked(max(have-have/4, least), now)
	case worst.level == levelPressed && since >= shrinkPressed:
		if h.target == 0 || h.target > floor {
			h.lowerLocked(max(have-have/16, floor), now)
		}
	case worst.level == levelCalm && h.target != 0 && now.Sub(h.calm) >= calmFor && now.Sub(h.grown) >= growEvery:
		h.grown = now
		if h.target += max(h.target/16, growLeast); h.target >= total {
			h.target = 0
			h.opts.Log.Info("memory pressure has passed: VMs may keep any amount of memory resident for their devices")
		}
	}
}

func (h *Host) lowerLocked(target uint64, now time.Time) {
	if h.target != 0 && target >= h.target {
		return
	}
	h.target, h.shrunk = target, now
	h.status.Shrinks++
	h.hurry()
}

// divideLocked sets each VM's target.
func (h *Host) divideLocked() {
	if h.target == 0 {
		for b := range h.vms {
			b.setTarget(0)
		}
		return
	}
	vms, claims := make([]*Budget, 0, len(h.vms)), make([]claim, 0, len(h.vms))
	for b, weight := range h.vms {
		vms, claims = append(vms, b), append(claims, b.claim(weight))
	}
	for i, n := range divide(h.target, claims) {
		vms[i].setTarget(n)
	}
}

// claim returns what the VM has and needs.
func (b *Budget) claim(weight uint64) claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := claim{weight: weight, least: b.held + max(MinBudget, 16*b.unit), want: b.used + b.used/8 + MinBudget}
	if b.limit != 0 {
		c.least, c.want = min(c.least, b.limit), min(c.want, b.limit)
	}
	return c
}

func (b *Budget) resident() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// pressureLog is the time between two messages about pressure.
const pressureLog = time.Minute

func (h *Host) reportLocked(worst *zoneState) {
	s, z := &h.status, &worst.zone
	s.Level, s.Zone, s.Total, s.Free, s.Reserve = worst.level.String(), z.Name, z.Total, z.Free, z.Reserve
	s.Swap, s.Stalled, s.Target, s.Full = z.Swap, worst.share, h.target, ""
	if why := h.exhausted.Load(); why != nil {
		s.Full = *why
	}
	now := h.opts.Clock.Now()
	if worst.level < levelPressed || !h.logged.IsZero() && now.Sub(h.logged) < pressureLog {
		return
	}
	h.logged = now
	log, args := h.opts.Log.Info, []any{"zone", z.Name, "level", s.Level, "free", z.Free, "reserve", z.Reserve, "stalled",
		fmt.Sprintf("%.0f%%", 100*worst.share), "swap", z.Swap}
	if worst.futile {
		log("memory pressure, and no swap space: guest memory cannot be given back", args...)
		return
	}
	log("memory pressure: VMs keep less memory resident for their devices", args...)
}

// admit is called before g becomes resident. It takes a reading when much has become resident since the last one, so
// that not even a burst of faults gets ahead of it. It returns ErrShort if the memory would have to be allocated and
// none is left.
func (h *Host) admit(g *granule) error {
	if h == nil || !g.m.counted() || h.credit.Add(-int64(g.size())) >= 0 {
		return nil
	}
	h.readAgain()
	why := h.exhausted.Load()
	if why == nil || len(g.m.incomplete(g.index)) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrShort, *why)
}

// readAgain takes a reading, unless another fault has taken one meanwhile.
func (h *Host) readAgain() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.credit.Load() < 0 {
		h.stepLocked()
		h.hurry()
	}
}
