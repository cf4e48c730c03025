package translate

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
)

func TestFaultOrder(t *testing.T) {
	var q FaultQueue
	var done []*Fault
	var errs []error
	note := func(f *Fault, err error) {
		if f.Waiting() {
			t.Error("Done is called while the fault waits")
		}
		done, errs = append(done, f), append(errs, err)
	}
	a, b, c := &Fault{Done: note}, &Fault{Done: note}, &Fault{Done: note}
	if q.TryNext() != nil {
		t.Fatal("an empty queue has a fault")
	}
	if !q.Raise(a) || !q.Raise(b) || q.Raise(a) || !a.Waiting() {
		t.Fatal("raise")
	}
	if q.TryNext() != a || !q.Raise(c) || q.Raise(a) {
		t.Fatal("want the oldest fault, still waiting")
	}
	gone := errors.New("gone")
	q.Finish(a, nil)
	if !q.Raise(a) { // behind the others
		t.Fatal("raise again")
	}
	for _, want := range []*Fault{b, c, a} {
		f, err := q.Next(t.Context())
		if err != nil || f != want {
			t.Fatal("order", err)
		}
		q.Finish(f, gone)
	}
	if len(done) != 4 || done[0] != a || errs[0] != nil || done[3] != a || errs[3] != gone {
		t.Fatal(done, errs)
	}
	st := q.Stats()
	if st.Raised != 4 || st.Served != 1 || st.Failed != 3 || st.Waiting != 0 || st.Time.Count != 4 || q.Estimate() <= 0 ||
		q.Estimate() > st.Time.Max {
		t.Fatalf("%+v, estimate %v", st, q.Estimate())
	}
	q.Raise(a)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := q.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Error("Next returned a fault although its context ended:", err)
	}
	if st := q.Stats(); st.Waiting != 1 {
		t.Errorf("%+v", st)
	}
}

// The naive model of a queue with many raisers and servers counts the raises and the Dones of each fault. Nothing is
// lost, nothing comes twice, each raiser's faults come in its order, and no server sleeps while faults wait: every
// raiser waits for all of its faults before it ends, so a lost wake-up hangs.
func TestFaultQueueModel(t *testing.T) {
	const raisers, perRaiser, rounds = 6, 5, 400
	for _, servers := range []int{1, 3, -1, -2} {
		patient := servers < 0 // contexts do not end, since that would hide a lost wake-up
		servers = max(servers, -servers)
		var q FaultQueue
		type waiter struct {
			Fault
			raised, done atomic.Int64
			number       int // of the raise, within its raiser
		}
		ctx, cancel := context.WithCancel(t.Context())
		var serving, raising sync.WaitGroup
		for s := range servers {
			serving.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(s), 1))
				for {
					// Servers come and go: contexts that end take tokens with them.
					turn, end := ctx, func() {}
					if !patient {
						turn, end = context.WithTimeout(ctx, time.Duration(rng.IntN(300))*time.Microsecond)
					}
					f, err := q.Next(turn)
					end()
					if err != nil {
						if ctx.Err() != nil {
							return
						}
						continue
					}
					if rng.IntN(4) == 0 && !patient {
						time.Sleep(time.Duration(rng.IntN(30)) * time.Microsecond)
					}
					if f.Write {
						err = ErrMemoryGone
					}
					q.Finish(f, err)
				}
			})
		}
		for i := range raisers {
			raising.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(i), 2))
				wake := make(chan struct{}, perRaiser)
				all := make([]*waiter, perRaiser)
				last := -1 // of those served, if one server keeps the order
				for k := range all {
					w := new(waiter)
					w.Done = func(f *Fault, err error) {
						if f != &w.Fault || (err != nil) != f.Write {
							t.Error("Done of another fault")
						}
						if servers == 1 {
							if w.number < last {
								t.Errorf("raise %d was served after %d", w.number, last)
							}
							last = w.number
						}
						w.done.Add(1)
						wake <- struct{}{}
					}
					all[k] = w
				}
				number := 0
				for range rounds {
					n := 0
					for _, k := range rng.Perm(perRaiser)[:1+rng.IntN(perRaiser)] {
						w := all[k]
						w.Write, w.number = rng.IntN(5) == 0, number
						number++
						n++
						if !q.Raise(&w.Fault) {
							t.Error("an idle fault is not taken")
							return
						}
						w.raised.Add(1)
					}
					for range n {
						<-wake
					}
				}
				for _, w := range all {
					if w.raised.Load() != w.done.Load() || w.Waiting() {
						t.Errorf("%d raises, %d served", w.raised.Load(), w.done.Load())
					}
				}
			})
		}
		raising.Wait()
		cancel()
		serving.Wait()
		if st := q.Stats(); st.Waiting != 0 || st.Raised != st.Time.Count || st.Failed == 0 || q.TryNext() != nil {
			t.Errorf("%+v", st)
		}
	}
}

// serve serves faults until ctx ends.
func serve(ctx context.Context, q *FaultQueue) {
	for {
		f, err := q.Next(ctx)
		if err != nil {
			return
		}
		q.Finish(f, nil)
	}
}

// A server whose context ends as it is woken must pass the wake-up on to another one, which would otherwise sleep for
// ever.
func TestFaultQueueWakeupPassedOn(t *testing.T) {
	for range 300 {
		var q FaultQueue
		var servers sync.WaitGroup
		f := &Fault{Done: func(*Fault, error) {}}
		ctx, cancel := context.WithCancel(t.Context())
		turn, end := context.WithCancel(ctx)
		servers.Go(func() { serve(turn, &q) }) // first in line
		testutil.Eventually(t, "one sleeps", func() bool { return q.sleepers.Load() == 1 })
		servers.Go(func() { serve(ctx, &q) })
		testutil.Eventually(t, "two sleep", func() bool { return q.sleepers.Load() == 2 })
		time.Sleep(10 * time.Microsecond) // it has announced itself but may not sleep yet
		q.Raise(f)
		end()
		testutil.Eventually(t, "the fault is served", func() bool { return !f.Waiting() })
		cancel()
		servers.Wait()
	}
}

// Each of several servers is woken, so that a slow one delays no other.
func TestFaultQueueWakesAllServers(t *testing.T) {
	const servers = 3
	var q FaultQueue
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var serving atomic.Int64
	release := make(chan struct{})
	for range servers {
		all.Go(func() {
			for {
				f, err := q.Next(ctx)
				if err != nil {
					return
				}
				serving.Add(1)
				<-release
				q.Finish(f, nil)
			}
		})
	}
	var faults [servers]Fault
	for range 300 {
		testutil.Eventually(t, "all sleep", func() bool { return q.sleepers.Load() == servers })
		for i := range faults {
			faults[i].Done = func(*Fault, error) {}
			q.Raise(&faults[i])
		}
		testutil.Eventually(t, "all serve", func() bool { return serving.Load() == servers })
		serving.Store(0)
		for range servers {
			release <- struct{}{}
		}
		testutil.Eventually(t, "all are served", func() bool { return q.Stats().Waiting == 0 })
	}
	cancel()
	all.Wait()
}

// Two servers have announced themselves but do not sleep yet when two faults are raised: the one token is passed on.
func TestFaultQueueTokenIsPassedOn(t *testing.T) {
	var q FaultQueue
	token := make(chan struct{}, 1)
	q.wakeup.Store(&token)
	q.sleepers.Store(2)
	q.Raise(new(Fault))
	q.Raise(new(Fault))
	for i, left := range []int{1, 0} {
		if len(token) != 1 {
			t.Fatalf("server %d is not woken", i)
		}
		<-token
		if q.TryNext() == nil || len(token) != left {
			t.Fatalf("%d tokens after server %d took its fault", len(token), i)
		}
	}
}

// A server that is about to sleep sees a fault that is raised at that moment.
func TestFaultQueueNoLostWakeup(t *testing.T) {
	var q FaultQueue
	ctx, cancel := context.WithCancel(t.Context())
	var server sync.WaitGroup
	server.Go(func() { serve(ctx, &q) })
	f := &Fault{Done: func(*Fault, error) {}}
	x := uint64(1)
	for range 30000 {
		q.Raise(f)
		for spin := 0; f.Waiting(); spin++ {
			if spin == 2000 {
				testutil.Eventually(t, "the fault is served", func() bool { return !f.Waiting() })
			}
		}
		x = x*6364136223846793005 + 1442695040888963407
		for range x >> 56 { // while the server goes to sleep
			q.Estimate()
		}
	}
	cancel()
	server.Wait()
}

// Many goroutines raise the same fault: it is taken once until it is served.
func TestFaultRaisedByMany(t *testing.T) {
	var q FaultQueue
	var taken, served atomic.Int64
	f := &Fault{Done: func(*Fault, error) { served.Add(1) }}
	ctx, cancel := context.WithCancel(t.Context())
	var raising, serving sync.WaitGroup
	serving.Go(func() { serve(ctx, &q) })
	for range 4 {
		raising.Go(func() {
			for range 5000 {
				if q.Raise(f) {
					taken.Add(1)
				}
			}
		})
	}
	raising.Wait()
	for f.Waiting() {
		time.Sleep(time.Millisecond)
	}
	cancel()
	serving.Wait()
	if taken.Load() != served.Load() || taken.Load() == 0 {
		t.Errorf("%d taken, %d served", taken.Load(), served.Load())
	}
}

func TestRaiseAllocatesNothing(t *testing.T) {
	var q FaultQueue
	f := &Fault{Done: func(*Fault, error) {}}
	if n := testing.AllocsPerRun(100, func() {
		q.Raise(f)
		q.Finish(q.TryNext(), nil)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestFetch(t *testing.T) {
	s := NewSpace(1)
	if err := s.Reserve(0x1000, 4096); err != nil {
		t.Fatal(err)
	}
	var buf [8]byte
	absent := s.Read(buf[:], 0x1000)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var server sync.WaitGroup
	gone := false
	mem := hostMem(t, 4096)
	server.Go(func() {
		for {
			f, err := s.Faults().Next(ctx)
			if err != nil {
				return
			}
			if f.Miss != absent || !f.Write {
				t.Errorf("%+v", f.Miss)
			}
			if !gone {
				gone = true
				s.Faults().Finish(f, ErrMemoryGone)
				continue
			}
			mustMap(t, s, 0x1000, mem)
			s.Faults().Finish(f, nil)
		}
	})
	if err := s.Fetch(ctx, absent, true); !errors.Is(err, ErrMemoryGone) {
		t.Error(err)
	}
	if err := s.Fetch(ctx, absent, true); err != nil {
		t.Error(err)
	}
	if m := s.Read(buf[:], 0x1000); !m.OK() {
		t.Error(m.Err())
	}
	if err := s.Fetch(ctx, s.Read(buf[:], 0x5000), true); !errors.Is(err, ErrMiss) {
		t.Error("an address outside guest memory:", err)
	}
	if err := s.Fetch(ctx, Miss{}, true); err != nil {
		t.Error(err)
	}
	cancel()
	server.Wait()
	if err := s.Fetch(ctx, absent, true); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestHistogram(t *testing.T) {
	var h Histogram
	for _, d := range []time.Duration{-1, 0, 999, time.Microsecond, 3 * time.Microsecond, 1000 * time.Microsecond,
		time.Hour} {
		h.Add(d)
	}
	for i, want := range map[int]uint64{0: 3, 1: 1, 2: 1, 10: 1, HistogramBuckets - 1: 1} {
		if h.Buckets[i] != want {
			t.Errorf("bucket %d: %d, expected %d", i, h.Buckets[i], want)
		}
	}
	if h.Count != 7 || h.Max != time.Hour || h.Sum < time.Hour || h.Mean() < h.Sum/8 {
		t.Errorf("%+v", h)
	}
	if q := h.Quantile(0.5); q != 2*time.Microsecond {
		t.Error("median", q)
	}
	if q := h.Quantile(1); q != time.Hour {
		t.Error("all", q)
	}
	var none Histogram
	if none.Mean() != 0 || none.Quantile(0.99) != 0 {
		t.Error("empty")
	}
}

// A fault that its server returns is served after those that wait already. Its owner notices nothing, and it counts
// once.
func TestReturn(t *testing.T) {
	var q FaultQueue
	ended := 0
	done := func(*Fault, error) { ended++ }
	a, b := Fault{Done: done}, Fault{Done: done}
	q.Raise(&a)
	q.Raise(&b)
	f := q.TryNext()
	q.Return(f)
	if f != &a || !a.Waiting() || q.Raise(&a) {
		t.Fatal("a returned fault does not wait any more")
	}
	for i, want := range []*Fault{&b, &a, nil} {
		if got := q.TryNext(); got != want {
			t.Fatalf("fault %d: %p, want %p", i, got, want)
		}
	}
	if st := q.Stats(); st.Raised != 2 || st.Waiting != 2 || ended != 0 {
		t.Errorf("%+v, %d ended", st, ended)
	}
	q.Finish(&b, nil)
	q.Finish(&a, ErrMemoryGone)
	if st := q.Stats(); st.Served != 1 || st.Failed != 1 || st.Waiting != 0 || ended != 2 || a.Waiting() {
		t.Errorf("%+v, %d ended", st, ended)
	}
}
