// Package loop is the thread of the data path: a Loop is one goroutine locked to its thread that does all the work of
// its ports, queues and QPs.
//
// One iteration goes through these stages, in this order:
//
//	events   epoll: ready functions of Watches
//	posts    functions from Do and Post
//	timers   those whose deadline has come
//	pollers  Poll of every Poller and Mailbox that does not rest (see poller.go)
//	flush    hooks, armed ones and then those of every iteration: send what was batched
//	prepare  only when nothing happened for SpinFor: pollers publish "wake me" and look once more
//	sleep    epoll_wait until an event, a wake-up or the next timer
//
// Rules. A loop's state is accessed only on its thread; other goroutines use Do (waits) or Post (does not). A handler
// must not block, and must not call Do or Close on another loop, because that loop might do the same. Pollers and hooks
// run in the order in which they were added.
//
// A memory fault of a handler ends that handler's call, see Fault; one of a function given to Do is Do's error. Any
// other panic on a loop is a bug, and ends the process: a loop serves all VMs, and nobody knows what it left half done.
package loop

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
	"github.com/vnicd/vnicd/translate"
)

// MaxLoops bounds Config.ID, and is the length of tables with one slot per loop.
const MaxLoops = 16

const (
	maxEvents    = 64   // epoll events taken at once
	maxPosts     = 64   // posts run per iteration, so that they cannot starve the data path
	postCapacity = 1024 // posts waiting
	// How long a loop counts as shared, in ns: several rounds of all pollers.
	sharedFor = 2e5
	// Number of shortened polls before the full time is tried again.
	maxMisses = 32
	// While pollers are busy, epoll is called only every epollEvery iterations, because the call costs more than a poll,
	// or after epollAfter, in ns: a poller that rests depends on it.
	epollEvery = 8
	epollAfter = 5e4
)

// Errors that callers test for.
var (
	ErrClosed    = errors.New("loop: loop is closed")
	ErrStarted   = errors.New("loop: loop was already started")
	ErrDuplicate = errors.New("loop: descriptor is already watched")
)

// Config describes a loop.
type Config struct {
	// ID is 0 to MaxLoops-1 and must differ among the loops of a daemon: it selects the loop's slot in counters and
	// epochs.
	ID int
	// SpinFor is the maximum time that the loop polls after its last work before it sleeps (see adapt). Zero: sleep at
	// once.
	SpinFor time.Duration
	// CPUs are the processors of the thread. Empty: those of the process.
	CPUs []int
	// Nice is the thread's nice value, -20 (most urgent) to 19. Without permission for it, the thread keeps its own.
	Nice int
	// Clock defaults to the monotonic clock.
	Clock Clock
	// Log defaults to a logger that discards everything.
	Log hclog.Logger
}

// Loop is one thread of the data path. States: new, Start, running, Close, closed. In the states new and closed, Do
// runs its function in the caller, so set-up and tear-down code is the same in all states.
type Loop struct {
	id    int
	spin  int64
	rest  int64 // a poller that has had no work for so long rests, ns
	cpus  []int
	nice  int
	clock Clock
	log   hclog.Logger
	guard translate.Guarded

	epfd   int
	wakefd int
	alarm  alarm

	// Owned by the loop's thread.
	now        int64
	lastWork   int64
	patience   int64 // current polling time before it sleeps, ns: 0 to spin
	misses     uint  // polls in vain since patience was at its maximum
	stage      stage
	index      int
	nev        int
	idleRounds int
	looked     int64 // when epoll was called last
	busy       bool
	mayWork    bool
	current    *handler
	blamed     *Owner
	events     []unix.EpollEvent
	watches    []*Watch // by slot; the epoll event has the slot and its generation
	freeSlots  []int
	watchGen   int32
	timers     timerHeap
	pollers    []*Polled // all
	awake      []*Polled // those that do not rest, in the order in which they are called
	resting    int
	worker     *Polled // last poller with work, other than mailboxes
	sharedAt   int64   // when worker last changed
	hooks      []*Hook // of every iteration
	armed      []*Hook // of this one; the first due are being called
	due        int
	sample     sampler

	// Shared.
	posts    *ring[post]
	roused   atomic.Pointer[Polled] // mailboxes to rouse
	asked    atomic.Bool            // all pollers are to be roused
	sleeping atomic.Uint32
	stopping atomic.Bool
	tid      atomic.Int64 // thread that may touch the loop's state right now, 0 = none
	faults   atomic.Uint64
	sleeps   atomic.Uint64
	rounds   atomic.Uint64

	inlineMu sync.Mutex // serialises Do while there is no thread; taken before lifeMu is released
	lifeMu   sync.RWMutex
	life     lifeState // guarded by lifeMu
	done     chan struct{}
}

type lifeState uint8

const (
	lifeNew lifeState = iota
	lifeRunning
	lifeClosed
)

type post struct {
	f    func()
	d    *doCall
	whom *Meter // see rouseFor
}

type doCall struct {
	f    func()
	done chan struct{}
	err  error // a memory fault in f
}

// New makes a loop; Start runs it.
func New(c Config) (*Loop, error) {
	if c.ID < 0 || c.ID >= MaxLoops {
		return nil, fmt.Errorf("loop: loop ID %d; want 0 to %d", c.ID, MaxLoops-1)
	}
	if c.SpinFor < 0 {
		return nil, fmt.Errorf("loop: loop %d: negative SpinFor %v", c.ID, c.SpinFor)
	}
	spin := int64(c.SpinFor)
	l := &Loop{id: c.ID, spin: spin, patience: spin, rest: max(restAfter, spin), cpus: c.CPUs, nice: c.Nice,
		clock: c.Clock, log: loglimit.New(c.Log), guard: translate.ByLoop(c.ID), events: make([]unix.EpollEvent, maxEvents),
		posts: newRing[post](postCapacity), done: make(chan struct{}), epfd: -1, wakefd: -1, alarm: alarm{fd: -1}}
	if l.clock == nil {
		l.clock = realClock{}
	}
	if err := l.open(); err != nil {
		l.closeDescriptors()
		return nil, fmt.Errorf("loop: %w", err)
	}
	l.now = l.clock.Now()
	if m, ok := l.clock.(*ManualClock); ok {
		m.add(l)
	}
	return l, nil
}

// open makes the descriptors. After an error closeDescriptors closes those that there are.
func (l *Loop) open() (err error) {
	if l.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll_create1: %w", err)
	}
	if l.wakefd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	if l.alarm, err = newAlarm(); err != nil {
		return err
	}
	for _, d := range []struct {
		fd    int
		event unix.EpollEvent
	}{
		{l.wakefd, unix.EpollEvent{Events: unix.EPOLLIN, Fd: wakeSlot}},
		{l.alarm.fd, unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: alarmSlot}}, // so nobody has to read it
	} {
		if err := unix.EpollCtl(l.epfd, unix.EPOLL_CTL_ADD, d.fd, &d.event); err != nil {
			return fmt.Errorf("epoll_ctl: %w", err)
		}
	}
	return nil
}

func (l *Loop) closeDescriptors() {
	for _, fd := range []*int{&l.epfd, &l.wakefd, &l.alarm.fd} {
		if *fd >= 0 {
			_ = unix.Close(*fd)
			*fd = -1
		}
	}
}

// ID returns the loop's number, 0 to MaxLoops-1.
func (l *Loop) ID() int { return l.id }

// Now returns the time of the current iteration in nanoseconds. Loop thread only; elsewhere use the clock.
func (l *Loop) Now() int64 { return l.now }

// Shared reports whether several pollers had work lately (within sharedFor): a poller with much work then splits it up
// to let the others run. Mailboxes do not count, because their contents belong to a poller. Loop thread only.
func (l *Loop) Shared() bool { return l.now-l.sharedAt < sharedFor }

// Clock returns the loop's clock, which any goroutine may read.
func (l *Loop) Clock() Clock { return l.clock }

// Start runs the loop on its own thread. It fails, without effect, if the thread cannot run on Config.CPUs.
func (l *Loop) Start() error {
	l.inlineMu.Lock()
	defer l.inlineMu.Unlock()
	l.lifeMu.Lock()
	defer l.lifeMu.Unlock()
	switch l.life {
	case lifeRunning:
		return ErrStarted
	case lifeClosed:
		return ErrClosed
	}
	settled := make(chan error)
	go l.run(settled)
	if err := <-settled; err != nil {
		return err
	}
	addProcessors(1)
	l.life = lifeRunning
	return nil
}

// Close stops the loop, waits for its thread to end and closes its descriptors. Remaining watches, pollers and hooks do
// not run again. It may be called twice; calling it on the loop's own thread is a bug.
func (l *Loop) Close() {
	if l.OnLoop() {
		panic("loop: Close called on the loop's own thread")
	}
	l.inlineMu.Lock()
	l.lifeMu.Lock()
	was := l.life
	if was == lifeNew {
		l.life = lifeClosed
	}
	l.lifeMu.Unlock()
	l.inlineMu.Unlock()
	switch was {
	case lifeNew:
		// From now on Do runs its function in its caller, beside this one.
		l.inlineMu.Lock()
		_ = l.inline(l.drainPosts) // it recovers the faults of posts itself
		l.release()
		close(l.done)
	case lifeRunning:
		l.stopping.Store(true)
		l.wake()
		<-l.done
	case lifeClosed:
		<-l.done
	}
}

func (l *Loop) release() {
	if m, ok := l.clock.(*ManualClock); ok {
		m.remove(l)
	}
	l.lifeMu.Lock() // no wake-up or Watch while the descriptors are closed
	defer l.lifeMu.Unlock()
	l.closeDescriptors()
}

// OnLoop reports whether the caller runs on the loop's thread (or inside Do while the loop has no thread).
func (l *Loop) OnLoop() bool {
	tid := l.tid.Load()
	return tid != 0 && tid == int64(unix.Gettid())
}

// Guarded returns the right to enter epochs on this loop, whose handlers survive memory faults. Loop thread only.
func (l *Loop) Guarded() translate.Guarded { return l.guard }

// Do runs f on the loop and returns when it has run. On the loop's own thread it runs f at once. Before Start and after
// Close it runs f in the caller, one caller at a time. The error, if any, is the Fault of f, which accessed memory that
// was not there: f was interrupted there, and what it left half done is the caller's to clean up. An owner that f has
// declared (Blame) has been notified, and Foreign is set. Use Visit where f accesses no guest memory.
//
// Do may wait for the iteration in progress, so it must not be called on another loop's thread.
func (l *Loop) Do(f func()) error { return l.do(&everyone, f) }

// DoFor is Do for a function that makes work for pollers of m's owner only, or of nobody (nil); others that rest (see
// poller.go) go on resting.
func (l *Loop) DoFor(m *Meter, f func()) error { return l.do(m, f) }

func (l *Loop) do(whom *Meter, f func()) error {
	if l.OnLoop() {
		l.rouseFor(whom)
		return l.protect(f)
	}
	d := &doCall{f: f, done: make(chan struct{})}
	for {
		queued, inline := l.enqueue(post{d: d, whom: whom})
		if inline {
			return l.inline(func() {
				l.rouseFor(whom)
				f()
			})
		}
		if queued {
			break
		}
		runtime.Gosched() // queue full: the loop is draining it
	}
	<-d.done
	return d.err
}

// Visit is Do for an f that accesses no guest memory, such as the loop's own lists. A memory fault of f is then a bug
// of the caller, and panics there.
func (l *Loop) Visit(f func()) {
	if err := l.Do(f); err != nil {
		panic(err)
	}
}

// VisitFor is Visit as DoFor is Do.
func (l *Loop) VisitFor(m *Meter, f func()) {
	if err := l.DoFor(m, f); err != nil {
		panic(err)
	}
}

// arrange is Visit for the loop's own lists, which makes no work for pollers.
func (l *Loop) arrange(f func()) { l.VisitFor(nil, f) }

// enqueue reports queued if p was queued, inline if there is no thread (then it holds inlineMu).
func (l *Loop) enqueue(p post) (queued, inline bool) {
	l.lifeMu.RLock()
	if l.life == lifeRunning {
		queued = l.posts.put(p)
		l.lifeMu.RUnlock()
		l.wake()
		return queued, false
	}
	l.lifeMu.RUnlock()
	// Start and the end of run take inlineMu too, so the state checked under it holds while f runs.
	l.inlineMu.Lock()
	l.lifeMu.RLock()
	running := l.life == lifeRunning
	l.lifeMu.RUnlock()
	if running {
		l.inlineMu.Unlock()
		return false, false
	}
	return false, true
}

func (l *Loop) inline(f func()) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer l.inlineMu.Unlock()
	l.tid.Store(int64(unix.Gettid()))
	defer l.tid.Store(0)
	l.now = l.clock.Now()
	return l.protect(f)
}

// Post queues f to run on the loop soon, and returns without waiting. It returns false if too many posts are pending or
// the loop is closed. For the control plane: f is usually an allocated closure. Frames use a Mailbox.
func (l *Loop) Post(f func()) bool { return l.PostFor(&everyone, f) }

// PostFor is Post as DoFor is Do.
func (l *Loop) PostFor(m *Meter, f func()) bool {
	l.lifeMu.RLock()
	ok := l.life != lifeClosed && l.posts.put(post{f: f, whom: m})
	l.lifeMu.RUnlock()
	if ok {
		l.wake()
	}
	return ok
}

// Wake has the loop call all pollers soon, also if it sleeps. Callable from anywhere.
func (l *Loop) Wake() {
	l.asked.Store(true)
	l.wake()
}

func (l *Loop) wake() {
	// The loop stores sleeping before it checks its queues for the last time; we store to the queue before we check
	// sleeping. One of the two sees the other.
	if l.sleeping.Load() == 0 || l.sleeping.Swap(0) == 0 {
		return
	}
	l.lifeMu.RLock()
	defer l.lifeMu.RUnlock()
	if l.wakefd >= 0 {
		eventfd.Add(l.wakefd)
	}
}

// Step runs one iteration in the caller, without sleeping. For tests, on a loop that is not started.
func (l *Loop) Step() {
	l.inlineMu.Lock()
	l.lifeMu.RLock()
	life := l.life
	l.lifeMu.RUnlock()
	if life != lifeNew {
		l.inlineMu.Unlock()
		panic("loop: Step on a started loop")
	}
	// Faults of handlers are pass's; the loop's own code accesses no guest memory.
	_ = l.inline(func() {
		l.stage = stageEvents
		l.idleRounds = epollEvery // check descriptors in every step
		for !l.pass(false) {
		}
	})
}

func (l *Loop) run(settled chan<- error) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	err := l.settle()
	settled <- err
	if err != nil {
		return
	}
	debug.SetPanicOnFault(true)
	l.tid.Store(int64(unix.Gettid()))
	for !l.stopping.Load() {
		l.pass(true)
	}
	// From here on Do runs inline; functions queued before still run here.
	l.inlineMu.Lock()
	l.lifeMu.Lock()
	l.life = lifeClosed
	l.lifeMu.Unlock()
	l.drainPosts()
	l.tid.Store(0)
	l.inlineMu.Unlock()
	l.release()
	addProcessors(-1)
	close(l.done)
}

func (l *Loop) drainPosts() {
	for !l.drainSome() {
	}
}

func (l *Loop) drainSome() (empty bool) {
	defer l.recoverFault()
	for l.runPost() {
	}
	return true
}

// Stats are counters of one loop, readable from anywhere.
type Stats struct {
	ID     int
	Rounds uint64 // iterations
	Sleeps uint64 // number of times that it went to sleep
	Faults uint64 // memory faults recovered
	CPUs   []int  // processors of its thread; empty: any
	Nice   int    // its thread's nice value
}

// Stats returns the loop's counters.
func (l *Loop) Stats() Stats {
	return Stats{ID: l.id, Rounds: l.rounds.Load(), Sleeps: l.sleeps.Load(), Faults: l.faults.Load(), CPUs: l.cpus,
		Nice: l.nice}
}

// String describes what the loop does, for messages about one that is stuck: if the number of the iteration does not
// change, a handler does not return.
func (l *Loop) String() string {
	if l.sleeping.Load() != 0 {
		return fmt.Sprintf("loop %d, asleep", l.id)
	}
	return fmt.Sprintf("loop %d, in iteration %d", l.id, l.rounds.Load())
}
