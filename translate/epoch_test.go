package translate

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// modelReader and modelDrain are the naive model: a drain is done when the readers that were inside at its flip have
// left.
type modelReader struct {
	slot int
	tok  Token
}

type modelDrain struct {
	d      *Drain
	before map[*modelReader]bool
}

// checkHeld checks that a release names slots that it waits for; if exact, exactly the slots of its readers.
func (m *modelDrain) checkHeld(t *testing.T, exact bool) {
	t.Helper()
	want := map[string]bool{}
	for r := range m.before {
		want[strconv.Itoa(r.slot%epochSlots)] = true
	}
	held := m.d.Held()
	for _, name := range held {
		if !want[name] && exact {
			t.Fatalf("%v: slot %s is not held", held, name)
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Fatalf("held by %v, but also by %v", held, want)
	}
}

func (m *modelDrain) leave(r *modelReader) { delete(m.before, r) }

// EP-2, EP-3, EP-4: never too early, and never too late while fewer epochs are open than the ring holds.
func TestEpochsModel(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var e Epochs
		e.SetNamer(strconv.Itoa)
		var readers []*modelReader
		var drains []*modelDrain
		flips := uint64(0)
		limit := 3 + int(seed%20) // drains at once: beyond epochRing-1 some are late
		for range 400 {
			switch rng.IntN(4) {
			case 0:
				r := &modelReader{slot: rng.IntN(40)}
				r.tok = e.Enter(ByLoop(r.slot))
				readers = append(readers, r)
			case 1:
				if len(readers) == 0 {
					break
				}
				i := rng.IntN(len(readers))
				r := readers[i]
				readers = append(readers[:i], readers[i+1:]...)
				e.Leave(r.slot, r.tok)
				for _, d := range drains {
					d.leave(r)
				}
			case 2:
				if len(drains) >= limit {
					break
				}
				m := &modelDrain{before: map[*modelReader]bool{}}
				for _, r := range readers {
					m.before[r] = true
				}
				m.d = e.Flip()
				flips++
				drains = append(drains, m)
			case 3:
				kept := drains[:0]
				for _, m := range drains {
					done := m.d.Done()
					if rng.IntN(4) == 0 {
						m.checkHeld(t, limit < epochRing-1)
					}
					if done && len(m.before) > 0 {
						t.Fatalf("seed %d: done with %d readers inside", seed, len(m.before))
					}
					if !done && len(m.before) == 0 && limit < epochRing-1 {
						t.Fatalf("seed %d: not done without readers inside", seed)
					}
					if !done {
						kept = append(kept, m)
					}
				}
				drains = kept
			}
		}
		for _, r := range readers {
			e.Leave(r.slot, r.tok)
		}
		for _, m := range drains {
			if !m.d.Done() {
				t.Fatalf("seed %d: not done after the last reader left", seed)
			}
			if !m.d.Done() {
				t.Fatal("done is not final")
			}
		}
		if st := e.Stats(); st.Drains != flips || st.Flips == 0 || st.Flips > flips || st.Longest <= 0 {
			t.Fatalf("seed %d: %d releases, %+v", seed, flips, st)
		}
		if len(e.drains) != 0 {
			t.Fatalf("seed %d: %d releases kept for ever", seed, len(e.drains))
		}
	}
}

// EP-4: overlapping readers, with no moment without one, starve no release.
func TestEpochsNoStarvation(t *testing.T) {
	var e Epochs
	tok := e.Enter(ByLoop(0))
	for i := range 1000 {
		d := e.Flip()
		next := e.Enter(ByLoop(0)) // overlaps the previous one
		e.Leave(0, tok)
		tok = next
		if !d.Done() {
			t.Fatalf("release %d starves", i)
		}
	}
	e.Leave(0, tok)
}

// Releases that had to wait for a free counter are not starved by later readers once the slow one has left.
func TestEpochsNoStarvationWhenFull(t *testing.T) {
	var e Epochs
	slow := e.Enter(ByLoop(0))
	var drains []*Drain
	for range 3 * epochRing {
		drains = append(drains, e.Flip())
	}
	tok := e.Enter(ByLoop(0))
	e.Leave(0, slow)
	left := len(drains)
	for range epochRing {
		left = 0
		for _, d := range drains {
			if !d.Done() {
				left++
			}
		}
		next := e.Enter(ByLoop(0))
		e.Leave(0, tok)
		tok = next
	}
	if left != 0 {
		t.Fatalf("%d releases starve", left)
	}
	e.Leave(0, tok)
}

// More releases than counters while one reader stays: none is lost.
func TestEpochsManyReleases(t *testing.T) {
	var e Epochs
	var tokens []Token
	var drains []*Drain
	for range 5 * epochRing {
		tokens = append(tokens, e.Enter(ByLoop(1)))
		drains = append(drains, e.Flip())
	}
	for _, d := range drains {
		if d.Done() {
			t.Fatal("done with a reader inside")
		}
	}
	late := e.Enter(ByLoop(1)) // after all flips were requested
	for _, tok := range tokens {
		e.Leave(1, tok)
	}
	for _, d := range drains {
		d.Done() // flips the releases that could not flip yet
	}
	later := e.Enter(ByLoop(2))
	e.Leave(1, late)
	for i, d := range drains {
		if !d.Done() {
			t.Fatalf("release %d waits for a reader that entered after its flip", i)
		}
	}
	e.Leave(2, later)
}

func TestEpochsWait(t *testing.T) {
	var e Epochs
	if err := e.Flip().Wait(context.Background()); err != nil {
		t.Fatal(err)
	}
	tok := e.Enter(ByLoop(5))
	d := e.Flip()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := d.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	waited := make(chan error)
	go func() { waited <- d.Wait(context.Background()) }()
	e.Leave(5, tok)
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	if err := d.Wait(ctx); err != nil {
		t.Fatalf("a drained epoch does not need ctx: %v", err)
	}
}

// A release that takes long names its holder repeatedly, and ends as soon as the holder leaves.
func TestEpochsWaitWarn(t *testing.T) {
	var e Epochs
	tok := e.Enter(ByLoop(17))
	d := e.Flip()
	if held := d.Held(); len(held) != 1 || held[0] != "slot 1" {
		t.Error(held)
	}
	e.SetNamer(func(slot int) string { return "loop " + strconv.Itoa(slot) })
	var times []time.Duration
	err := d.WaitWarn(t.Context(), time.Millisecond, func(since time.Duration, held []string) {
		if len(held) != 1 || held[0] != "loop 1" {
			t.Error(held)
		}
		if times = append(times, since); len(times) == 3 {
			e.Leave(17, tok)
		}
	})
	if err != nil || len(times) != 3 || times[0] < time.Millisecond || times[1] < 2*time.Millisecond ||
		times[2] < 4*time.Millisecond {
		t.Error(err, times)
	}
	if held := d.Held(); len(held) != 0 {
		t.Error(held)
	}
	tok = e.Enter(ByLoop(0))
	defer e.Leave(0, tok)
	ctx, cancel := context.WithCancel(t.Context())
	if err := e.Flip().WaitWarn(ctx, 0, func(time.Duration, []string) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestLeaveWithoutEnter(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Fatal("no panic")
		}
	}()
	var e Epochs
	e.Leave(0, 0)
}

// Readers use objects that writers replace, release and then overwrite with plain stores: the race detector and the
// check both detect a release that is too early.
func TestEpochsConcurrent(t *testing.T) {
	type object struct{ valid int }
	var e Epochs
	var table [4]atomic.Pointer[object]
	for i := range table {
		table[i].Store(&object{valid: 1})
	}
	var stop atomic.Bool
	var readers, writers sync.WaitGroup
	for g := range 2 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 2))
			for !stop.Load() {
				tok := e.Enter(ByLoop(g))
				for range rng.IntN(8) {
					if o := table[rng.IntN(len(table))].Load(); o.valid != 1 {
						t.Error("used after release")
						stop.Store(true)
					}
				}
				e.Leave(g, tok)
				runtime.Gosched() // there may be only two cores
			}
		})
	}
	for i := range table {
		writers.Go(func() {
			for range 2000 {
				old := table[i].Swap(&object{valid: 1})
				if err := e.Flip().Wait(context.Background()); err != nil {
					t.Error(err)
				}
				old.valid = 0
			}
		})
	}
	writers.Wait()
	stop.Store(true)
	readers.Wait()
}

// A caller that checks releases only when signalled misses none (EP-3), also while more epochs are held than the ring
// has counters.
func TestEpochsSignal(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var e Epochs
		heard := false
		e.SetSignal(func() { heard = true })
		type reader struct {
			slot int
			tok  Token
		}
		var readers []reader
		var waiting []*Drain
		leave := func(i int) {
			r := readers[i]
			readers = append(readers[:i], readers[i+1:]...)
			e.Leave(r.slot, r.tok)
		}
		sweep := func() {
			for heard {
				heard = false
				waiting = slices.DeleteFunc(waiting, (*Drain).DoneOrSignal)
			}
		}
		for range 300 {
			switch k := rng.IntN(5); {
			case k < 2:
				r := reader{slot: rng.IntN(20)}
				r.tok = e.Enter(ByLoop(r.slot))
				readers = append(readers, r)
			case k < 4 && len(readers) > 0:
				leave(rng.IntN(len(readers)))
			case k == 4:
				if d := e.Flip(); !d.DoneOrSignal() {
					waiting = append(waiting, d)
				}
			}
			sweep()
			if len(readers) == 0 && len(waiting) > 0 {
				t.Fatalf("seed %d: %d releases are not signalled, without readers", seed, len(waiting))
			}
		}
		for len(readers) > 0 {
			leave(0)
			sweep()
		}
		if len(waiting) > 0 {
			t.Fatalf("seed %d: %d releases are not signalled, without readers", seed, len(waiting))
		}
	}
}

// The same with the last reader on another thread, which leaves during the check: check and signal do not miss each
// other.
func TestEpochsSignalConcurrent(t *testing.T) {
	var e Epochs
	signals := make(chan struct{}, 1)
	e.SetSignal(func() {
		select {
		case signals <- struct{}{}:
		default:
		}
	})
	const rounds = 20000
	var inside, out atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	defer out.Store(rounds)
	wg.Go(func() {
		for i := range int64(rounds) {
			tok := e.Enter(ByLoop(3))
			inside.Store(i + 1)
			for out.Load() <= i {
				runtime.Gosched()
			}
			for j := int64(0); j < i%200; j++ {
				_ = out.Load()
			}
			e.Leave(3, tok)
		}
	})
	for i := range int64(rounds) {
		for inside.Load() <= i {
			runtime.Gosched()
		}
		d := e.Flip()
		out.Store(i + 1)
		for !d.DoneOrSignal() {
			select {
			case <-signals:
			case <-time.After(time.Minute):
				t.Fatalf("round %d: the last reader left without a signal", i)
			}
		}
	}
}
