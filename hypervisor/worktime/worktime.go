// Package worktime counts the processor time that one VM causes in the control side of the daemon, and bounds that of
// its commands.
//
// What is counted is the processor time of the thread that does the work (CLOCK_THREAD_CPUTIME_ID), user and kernel
// time, so neither waiting (for a page, a lock, a loop) nor other processes count. The goroutine is locked to its
// thread meanwhile, because the clock is that of a thread. As reading it is a system call, commands and paging are
// sampled: one piece of work in sampleEvery, on average, is measured, at irregular distances, and counts for those
// since the sample before. Counted are
//
//	commands  the HCA's command goroutine: reading, executing and answering
//	messages  the connections' goroutines: vhost-user messages and the end of a connection, mapping of memory
//	paging    making guest memory resident, returning it to the kernel and unmapping it, whichever goroutine does it
//
// Not counted are goroutines that only wait, what a command does on a loop (that is time of the engine, see
// loop.Meter), the bookkeeping of paging around the system calls, and background work of the Go runtime, garbage
// collection above all.
//
// Only commands and messages are charged to the bucket, and only commands wait for it: see Account.Delay.
package worktime

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is what the time was used for.
type Kind uint8

// The kinds.
const (
	Commands Kind = iota
	Messages
	Paging
	numKinds
)

const (
	// DefaultPercent is the share of one processor that a VM's commands may use in the long run.
	DefaultPercent = 50
	// DefaultBurst is the processor time that may be used at once, on top of the share: the start of a guest and the
	// registration of all its memory take a fraction.
	DefaultBurst = 5 * time.Second
	// sampleEvery is the mean distance of samples of commands and paging. Messages are few, and each is measured.
	sampleEvery = 8
	// maxDelay bounds for how long commands wait because of commands and messages that did not: a driver gives up a
	// device that does not answer.
	maxDelay = 2 * time.Second
)

// Clock is the time, and timers.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f on another goroutine after that time, unless stop is called before.
	AfterFunc(after time.Duration, f func()) (stop func() bool)
}

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) AfterFunc(after time.Duration, f func()) func() bool {
	return time.AfterFunc(after, f).Stop
}

// threadTime is the processor time of the calling thread. The clock always exists on Linux.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// Config of an Account. Zero fields take defaults.
type Config struct {
	// Percent of one processor that commands and messages may use; 0: no bound.
	Percent int
	// Burst is what they may use at once.
	Burst time.Duration
	// Exact measures every piece of work, for tests.
	Exact bool
	// Clock and Thread, the processor time of the calling thread, are replaced by tests.
	Clock  Clock
	Thread func() time.Duration
}

// Account is one VM's. Its methods may be called from any goroutine but loops. A nil Account counts nothing and has no
// bound.
type Account struct {
	percent int
	burst   time.Duration
	clock   Clock
	thread  func() time.Duration
	exact   bool

	used    [numKinds]atomic.Int64 // ns
	delayed atomic.Uint64

	mu      sync.Mutex        // guards the fields below
	samples [numKinds]sampler // of the kinds
	credit  time.Duration     // processor time; negative: commands wait
	last    time.Time         // when credit was increased
}

// New returns an Account whose bucket is full.
func New(c Config) *Account {
	if c.Burst == 0 {
		c.Burst = DefaultBurst
	}
	if c.Clock == nil {
		c.Clock = systemClock{}
	}
	if c.Thread == nil {
		c.Thread = threadTime
	}
	return &Account{percent: c.Percent, burst: c.Burst, clock: c.Clock, thread: c.Thread, exact: c.Exact,
		credit: c.Burst, last: c.Clock.Now()}
}

// sampler decides which pieces of work are measured.
type sampler struct {
	passed, gap uint32 // pieces since the last sample, and the number at which the next one is due
}

// next begins a piece of work. It returns how many pieces the measurement stands for; 0: it is not measured.
func (s *sampler) next() (weight uint32) {
	if s.passed++; s.passed < s.gap {
		return 0
	}
	weight, s.passed, s.gap = s.passed, 0, 1+rand.Uint32N(2*sampleEvery-1)
	return weight
}

// Watch measures the work of one goroutine. The zero Watch measures nothing.
type Watch struct {
	a      *Account
	kind   Kind
	weight uint32        // of this piece; 0: it is not measured
	since  time.Duration // the thread's time when it began
}

// Start begins a piece of work of the calling goroutine. If it is measured, the goroutine stays on its thread until Lap
// or Stop.
func (a *Account) Start(k Kind) Watch {
	if a == nil {
		return Watch{}
	}
	w := Watch{a: a, kind: k}
	w.begin()
	return w
}

func (w *Watch) begin() {
	if w.weight = w.a.sample(w.kind); w.weight > 0 {
		runtime.LockOSThread()
		w.since = w.a.thread()
	}
}

func (w *Watch) end() {
	if w.weight == 0 {
		return
	}
	w.a.add(w.kind, (w.a.thread()-w.since)*time.Duration(w.weight))
	w.weight = 0
	runtime.UnlockOSThread()
}

// Lap ends a piece of work, which is charged, and begins the next one.
func (w *Watch) Lap() {
	if w.a != nil {
		w.end()
		w.begin()
	}
}

// Without runs f, whose time is counted by somebody else or not at all.
func (w *Watch) Without(f func() error) error {
	if w.weight == 0 {
		return f()
	}
	begin := w.a.thread()
	err := f()
	w.since += w.a.thread() - begin
	return err
}

// Stop ends the work. It may be called again, without effect.
func (w *Watch) Stop() {
	if w.a != nil {
		w.end()
		w.a = nil
	}
}

func (a *Account) sample(k Kind) (weight uint32) {
	if a.exact || k == Messages {
		return 1
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.samples[k].next()
}

func (a *Account) add(k Kind, d time.Duration) {
	a.used[k].Add(int64(d))
	if k == Paging || a.percent == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refillLocked()
	a.credit = max(a.credit-d, -maxDelay*time.Duration(a.percent)/100)
}

func (a *Account) refillLocked() {
	now := a.clock.Now()
	if d := now.Sub(a.last); d > 0 {
		// The bucket is full after less than a day: the product does not overflow.
		d = min(d, 24*time.Hour)
		a.credit = min(a.credit+d*time.Duration(a.percent)/100, a.burst)
		a.last = now
	}
}

// Delay returns for how long the VM's next command has to wait, 0: not at all. Commands that give pages of the guest
// back (CLEAR_MTT, DESTROY_MR: EP-3, TR-5) and messages do not ask: they are counted, and the next commands pay.
func (a *Account) Delay() time.Duration {
	if a == nil || a.percent == 0 {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.credit <= 0 { // what time has passed since would only add to it
		a.refillLocked()
	}
	if a.credit > 0 {
		return 0
	}
	// Not only for the least credit above 0: some commands can then run without another wait.
	const some = 100 * time.Microsecond
	return (some - a.credit) * 100 / time.Duration(a.percent)
}

// Delayed counts a command that has to wait.
func (a *Account) Delayed() {
	if a != nil {
		a.delayed.Add(1)
	}
}

// After calls f on another goroutine after d, unless stop is called before.
func (a *Account) After(d time.Duration, f func()) (stop func() bool) { return a.clock.AfterFunc(d, f) }

// Status is a snapshot of an Account.
type Status struct {
	// Processor time since the start, by kind.
	Commands time.Duration `json:"commands_ns"`
	Messages time.Duration `json:"messages_ns"`
	Paging   time.Duration `json:"paging_ns"`
	// Percent of one processor that commands may use; 0: no bound.
	Percent int `json:"percent"`
	// Delayed counts the commands that had to wait, since the start.
	Delayed uint64 `json:"delayed_commands"`
}

// Status returns a snapshot.
func (a *Account) Status() Status {
	if a == nil {
		return Status{}
	}
	used := func(k Kind) time.Duration { return time.Duration(a.used[k].Load()) }
	return Status{Commands: used(Commands), Messages: used(Messages), Paging: used(Paging), Percent: a.percent,
		Delayed: a.delayed.Load()}
}
