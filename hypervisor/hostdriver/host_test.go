package hostdriver

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/hypervisor/pressure"
	"github.com/vnicd/vnicd/translate"
)

// TestDivide checks shares: what a VM does not want goes to the others, by weight.
func TestDivide(t *testing.T) {
	const m = 1 << 20
	for name, c := range map[string]struct {
		total  uint64
		claims []claim
		want   []uint64 // MiB
	}{
		"none":            {100 * m, nil, nil},
		"equal":           {100 * m, []claim{{100, 4 * m, 500 * m}, {100, 4 * m, 500 * m}}, []uint64{50, 50}},
		"one is small":    {100 * m, []claim{{100, 4 * m, 10 * m}, {100, 4 * m, 500 * m}}, []uint64{10, 90}},
		"by weight":       {90 * m, []claim{{100, 4 * m, 500 * m}, {200, 4 * m, 500 * m}}, []uint64{30, 60}},
		"weight and want": {90 * m, []claim{{100, 0, 500 * m}, {200, 0, 20 * m}}, []uint64{70, 20}},
		"all fits":        {90 * m, []claim{{100, 4 * m, 10 * m}, {200, 4 * m, 20 * m}}, []uint64{30, 60}},
		"at least":        {10 * m, []claim{{100, 8 * m, 500 * m}, {10000, 4 * m, 500 * m}}, []uint64{8, 4}},
		"least first":     {40 * m, []claim{{1, 8 * m, 500 * m}, {100, 4 * m, 500 * m}}, []uint64{8, 32}},
	} {
		got := divide(c.total, c.claims)
		for i := range c.claims {
			if d := int64(got[i]) - int64(c.want[i]*m); d < -4096 || d > 4096 {
				t.Errorf("%s: VM %d gets %.3f MiB, want %d", name, i, float64(got[i])/m, c.want[i])
			}
		}
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		var claims []claim
		var least uint64
		for range 1 + rnd.IntN(20) {
			c := claim{weight: 1 + rnd.Uint64N(10000), least: rnd.Uint64N(1 << 24), want: rnd.Uint64N(1 << 40)}
			claims, least = append(claims, c), least+c.least
		}
		total := rnd.Uint64N(1 << 42)
		var sum uint64
		for i, n := range divide(total, claims) {
			sum += n
			if n < claims[i].least {
				t.Fatalf("%d of %+v", n, claims[i])
			}
		}
		if sum > max(total, least)+uint64(len(claims)) || sum+uint64(len(claims))*2+total>>50 < min(total, sum) {
			t.Fatalf("%d of %d, least %d", sum, total, least)
		}
	}
}

// stand is a Host with a clock and readings of the test's.
type stand struct {
	*Host
	clock *fakeClock
	zone  pressure.Zone
	more  []pressure.Zone
	err   error
	reads int
}

const gib = 1 << 30

func newStand(t *testing.T) *stand {
	s := &stand{clock: newFakeClock(), zone: pressure.Zone{Name: pressure.Host, Total: gib, Free: gib / 2, Reserve: gib,
		Swap: gib}}
	s.Host = newHost(HostOptions{Clock: s.clock, Log: testLog(t), Limit: 0.1, Read: func() ([]pressure.Zone, error) {
		s.reads++
		return append([]pressure.Zone{s.zone}, s.more...), s.err
	}})
	return s
}

// wait lets time pass in which tasks wait for memory for that share of it.
func (s *stand) wait(d time.Duration, share float64) {
	for step := 50 * time.Millisecond; d > 0; d -= step {
		s.clock.advance(step)
		s.zone.Stall += time.Duration(share * float64(step))
		s.step()
		for s.shrink() {
		}
	}
}

// vm is a VM of 256 MiB whose device has touched some of it.
func (s *stand) vm(t *testing.T, limit uint64, weight int, touched uint64) (*Budget, *translate.Space) {
	t.Helper()
	b := NewBudget(limit)
	s.Add(b, weight)
	d, space := newDriver(t, Options{Budget: b})
	slot(t, d, "vnicd-test-pressed", 0, 256<<20)
	touchAll(t, space, touched)
	return b, space
}

func touchAll(t *testing.T, s *translate.Space, n uint64) {
	t.Helper()
	ctx := testContext(t)
	for pa := uint64(0); pa < n; pa += 1 << 20 {
		if err := fetch(ctx, s, translate.PA(pa), 1<<20); err != nil {
			t.Fatal(err)
		}
	}
}

// HF-4: without a configured budget VMs shrink while tasks wait for memory, each to its share, and grow again after.
func TestPressure(t *testing.T) {
	s := newStand(t)
	one, oneS := s.vm(t, 0, 100, 64<<20)
	two, twoS := s.vm(t, 0, 200, 256<<20)
	idle, _ := s.vm(t, 0, 100, 0)
	capped, _ := s.vm(t, 8<<20, 10000, 16<<20)
	all := func() (n uint64) {
		for _, b := range []*Budget{one, two, idle, capped} {
			n += b.Status().Resident
		}
		return n
	}
	s.wait(10*time.Second, 0.5)
	if st := s.Status(); st.Level != "calm" || st.Target != 0 || st.Shrinks != 0 {
		t.Errorf("tasks wait, but memory is free: %+v", st)
	}
	s.wait(time.Second, 0)
	s.zone.Free, s.zone.Reserve = gib/16, gib/2
	s.wait(10*time.Second, 0.01)
	if st := s.Status(); st.Level != "calm" || st.Shrinks != 0 {
		t.Errorf("little memory is free, but no task waits: %+v", st)
	}

	before := all()
	s.wait(time.Second, 0.3)
	if st := s.Status(); st.Level != "pressed" || st.Target == 0 || st.Stalled < 0.25 || st.Zone != pressure.Host {
		t.Errorf("%+v", st)
	}
	if n := all(); n >= before-before/8 || n < before*6/10 {
		t.Errorf("%d bytes of %d after a second", n, before)
	}
	s.wait(time.Minute, 0.3)
	if st, n := s.Status(), all(); st.Target != gib/4 || n > gib/4 {
		t.Errorf("the total is a quarter of the zone at least: %+v, %d bytes", st, n)
	}
	for b, want := range map[*Budget]uint64{one: 64 << 20, idle: 0, capped: 8 << 20} {
		if n := b.Status().Resident; n != want {
			t.Errorf("a VM within its share has %d bytes, want %d", n, want)
		}
	}
	if st := two.Status(); st.Target < 160<<20 || st.Resident > st.Target {
		t.Errorf("a VM beyond its share: %+v", st)
	}
	// Faults go on: what they bring in is evicted elsewhere in the same VM.
	touchAll(t, twoS, 256<<20)
	if st := two.Status(); st.Resident > st.Target {
		t.Errorf("a VM has grown under pressure: %+v", st)
	}
	if n := one.Status().Evictions; n != 0 {
		t.Errorf("%d evictions in another VM", n)
	}

	// The same VMs where nearly nothing is left: each has the least that a VM needs.
	s.zone.Reserve = gib / 32
	s.wait(10*time.Second, 0.3)
	if st := s.Status(); st.Level != "critical" {
		t.Errorf("%+v", st)
	}
	for _, b := range []*Budget{one, two, idle, capped} {
		if n := b.Status().Resident; n > MinBudget {
			t.Errorf("%d bytes", n)
		}
		if err := audit(b, true); err != nil {
			t.Error(err)
		}
	}
	touchAll(t, oneS, 64<<20)
	if n := one.Status().Resident; n > MinBudget {
		t.Errorf("%d bytes after faults", n)
	}

	// Neither calm nor pressed: nothing changes.
	s.zone.Reserve = gib / 2
	s.wait(time.Second, 0.07)
	was := s.Status().Target
	s.wait(20*time.Second, 0.07)
	if st := s.Status(); st.Level != "steady" || st.Target != was {
		t.Errorf("%+v, target was %d", st, was)
	}
	s.wait(calmFor-time.Second, 0)
	if st := s.Status(); st.Level != "calm" || st.Target != was {
		t.Errorf("%+v, target was %d", st, was)
	}
	s.wait(10*time.Second, 0)
	if st := s.Status(); st.Target <= was {
		t.Errorf("%+v, target was %d", st, was)
	}
	s.wait(2*time.Minute, 0)
	if st := s.Status(); st.Target != 0 || two.Status().Target != 0 {
		t.Errorf("pressure has passed: %+v", st)
	}
	touchAll(t, twoS, 256<<20)
	if n := two.Status().Resident; n != 256<<20 {
		t.Errorf("%d bytes", n)
	}
}

// Memory that is held stays, whatever the pressure; a VM may hold more.
func TestPressureAndHolds(t *testing.T) {
	s := newStand(t)
	b, space := s.vm(t, 0, 100, 32<<20)
	d := onlyDriver(b)
	h, err := d.Hold(testContext(t), 0, 16<<20)
	if err != nil {
		t.Fatal(err)
	}
	s.zone.Free, s.zone.Reserve = 0, gib/32
	s.wait(10*time.Second, 1)
	if st := b.Status(); st.Held != 16<<20 || st.Resident > 16<<20+MinBudget || !present(space, 0) {
		t.Errorf("%+v", st)
	}
	more, err := d.Hold(testContext(t), 16<<20, 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	if st := b.Status(); st.Held != 24<<20 {
		t.Errorf("%+v", st)
	}
	more.Release()
	h.Release()
	s.wait(10*time.Second, 1)
	if st := b.Status(); st.Held != 0 || st.Resident > MinBudget {
		t.Errorf("%+v", st)
	}
	s.Remove(b)
	if st := b.Status(); st.Target != 0 {
		t.Errorf("%+v", st)
	}
}

func onlyDriver(b *Budget) *Driver {
	for d := range b.drivers {
		return d
	}
	return nil
}

// Where there is no swap space, nothing shrinks; where the kernel has no PSI, free memory decides; of several zones the
// worst counts.
func TestZones(t *testing.T) {
	t.Run("no swap", func(t *testing.T) {
		s := newStand(t)
		s.vm(t, 0, 100, 64<<20)
		s.zone.Free, s.zone.Reserve, s.zone.Swap = gib/32, gib/32, 0
		s.wait(10*time.Second, 0.5)
		if st := s.Status(); st.Level != "critical" || st.Shrinks != 0 || st.Target != 0 {
			t.Errorf("%+v", st)
		}
	})
	t.Run("no PSI", func(t *testing.T) {
		s := newStand(t)
		b, _ := s.vm(t, 0, 100, 256<<20)
		s.more = []pressure.Zone{{Name: "/vnicd", Total: gib / 2, Free: gib / 17, Reserve: gib / 4, Swap: gib, Stall: -1}}
		s.wait(10*time.Second, 0)
		if st := s.Status(); st.Level != "steady" && st.Level != "calm" || st.Shrinks != 0 {
			t.Errorf("%+v", st)
		}
		s.more[0].Free = gib / 64
		s.wait(time.Minute, 0)
		if st := s.Status(); st.Level != "pressed" || st.Zone != "/vnicd" || st.Target != gib/8 ||
			b.Status().Resident > gib/8 {
			t.Errorf("%+v, %+v", st, b.Status())
		}
		s.more = nil // moved to another cgroup
		s.wait(2*time.Minute, 0)
		if st := s.Status(); st.Level != "calm" || st.Zone != pressure.Host || st.Target != 0 {
			t.Errorf("%+v", st)
		}
	})
	t.Run("unreadable", func(t *testing.T) {
		s := newStand(t)
		_, space := s.vm(t, 0, 100, 0)
		s.err = errors.New("no such file")
		s.wait(time.Second, 0)
		touchAll(t, space, 64<<20)
	})
}

// A limit that is set while there is plenty of memory is noticed before a burst of faults exceeds it: no cgroup's OOM
// killer ends vnicd.
func TestLimitSetLater(t *testing.T) {
	s := newStand(t)
	b, space := s.vm(t, 0, 100, 0)
	s.zone.Total, s.zone.Free, s.zone.Reserve, s.zone.Swap = 64*gib, 64*gib, 64*gib, 0
	var limited atomic.Bool
	const limit = 128 << 20
	s.opts.Read = func() ([]pressure.Zone, error) {
		zones := []pressure.Zone{s.zone}
		if limited.Load() {
			left := limit - min(b.Status().Resident, limit)
			zones = append(zones, pressure.Zone{Name: "/vnicd", Total: limit, Free: left, Reserve: left, Stall: -1})
		}
		return zones, nil
	}
	s.step()
	limited.Store(true)
	ws := raise(space, 0, 4096) // 256 MiB
	testutil.Eventually(t, "faults wait", func() bool { return b.Status().Short > 0 })
	if st := b.Status(); st.Resident > limit || st.Resident < limit/2 {
		t.Errorf("%d bytes of %d: %+v", st.Resident, limit, st)
	}
	limited.Store(false)
	for i, w := range ws {
		if err := <-w.done; err != nil {
			t.Fatal(i, err)
		}
	}
}

// A burst of faults is not faster than the readings: the host is read again when a part of what was left is used up.
// When nothing is left, only memory that the file has already becomes resident, and other faults wait (HF-2).
func TestExhausted(t *testing.T) {
	s := newStand(t)
	b, space := s.vm(t, 0, 100, 0)
	var left atomic.Int64
	left.Store(gib)
	s.zone.Swap, s.zone.Stall = 0, -1
	s.opts.Read = func() ([]pressure.Zone, error) {
		s.reads++
		z := s.zone
		z.Reserve = uint64(left.Load() - int64(b.Status().Resident))
		z.Free = z.Reserve
		return []pressure.Zone{z}, nil
	}
	s.step()
	s.reads = 0
	left.Store(64 << 20)
	s.step()
	touchAll(t, space, 32<<20)
	if s.reads < 2 || s.reads > 200 {
		t.Errorf("%d readings", s.reads)
	}
	ws := raise(space, 32<<20, 1024) // 64 MiB
	testutil.Eventually(t, "faults wait", func() bool {
		ended := 0
		for _, w := range ws {
			if !w.Waiting() {
				ended++
			}
		}
		return b.Status().Short == len(ws)-ended && ended < len(ws)
	})
	st := b.Status()
	if _, _, exhausted := marks(gib); st.Resident > 64<<20-exhausted+2<<20 || st.FailedFaults != 0 {
		t.Errorf("%d bytes of %d: %+v", st.Resident, 64<<20, st)
	}
	if s.Status().Full == "" || st.ShortReason == "" {
		t.Errorf("%+v, %+v", s.Status(), st)
	}
	// The file has this memory: the guest has written to it.
	fd := onlyDriver(b).regions[0].m.file.fd
	if _, err := unix.Pwrite(fd, make([]byte, minGranule), 200<<20); err != nil {
		t.Fatal(err)
	}
	if err := fetch(testContext(t), space, 200<<20, 1); err != nil {
		t.Errorf("memory that the file has: %v", err)
	}
	left.Store(gib)
	for i, w := range ws {
		if err := <-w.done; err != nil {
			t.Fatal(i, err)
		}
	}
}

// The daemon's Host runs on its own: it shrinks VMs soon after the kernel reports pressure, and Close ends it.
func TestHostRuns(t *testing.T) {
	b := NewBudget(0)
	tight := pressure.Zone{Name: pressure.Host, Total: gib, Reserve: gib / 32, Swap: gib}
	h, err := NewHost(HostOptions{Limit: 0.1, Log: testLog(t), Watch: pressure.NewReader("/").Stalls(),
		Read: func() ([]pressure.Zone, error) { return []pressure.Zone{tight}, nil }})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	h.Add(b, 100)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, "vnicd-test-host", 0, 64<<20)
	touchAll(t, s, 64<<20)
	testutil.Eventually(t, "the VM has shrunk", func() bool { return b.Status().Resident <= MinBudget })
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
	if s := fmt.Sprintf("%+v", h.Status()); h.Status().Level != "critical" {
		t.Error(s)
	}
}
