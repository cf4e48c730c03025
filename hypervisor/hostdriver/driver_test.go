package hostdriver

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

func TestSlotLife(t *testing.T) {
	d, s := newDriver(t, Options{})
	const name = "vnicd-test-life"
	fd := memfd(t, name, 4<<20, 0, unix.F_SEAL_SHRINK)
	slot := Slot{GuestPA: 0x100000000, Size: 3 << 20, UserAddr: 0x7f0000000000, FD: fd, Offset: 1 << 20}
	if err := d.AddSlot(slot); err != nil {
		t.Fatal(err)
	}
	if err := fetch(testContext(t), s, 0x100000000, 17); err != nil {
		t.Fatal(err)
	}
	if m := s.Write(0x100000000, []byte("through stage two")); !m.OK() {
		t.Fatal(m.Err())
	}
	got := make([]byte, 17)
	if _, err := unix.Pread(fd, got, 1<<20); err != nil || string(got) != "through stage two" {
		t.Fatalf("%q, %v", got, err)
	}
	for _, c := range []struct {
		user, n uint64
		want    translate.PA
		ok      bool
	}{
		{0x7f0000000000, 1, 0x100000000, true},
		{0x7f00002fffff, 1, 0x1002fffff, true},
		{0x7f00002fffff, 2, 0, false},
		{0x7f0000300000, 1, 0, false},
		{0x7effffffffff, 1, 0, false},
		{0x7f0000000000, 1<<64 - 1, 0, false},
		{0, 1, 0, false},
	} {
		if pa, ok := d.UserToPA(c.user, c.n); pa != c.want || ok != c.ok {
			t.Errorf("UserToPA(%#x, %#x) = %v, %v", c.user, c.n, pa, ok)
		}
	}
	for _, c := range [][3]uint64{{0x100000000, 2 << 20, 0x7f0000000000}, {0x100000000, 3 << 20, 0x7f0000001000},
		{0, 3 << 20, 0x7f0000000000}} {
		if err := d.RemoveSlot(c[0], c[1], c[2]); !errors.Is(err, ErrNoSlot) {
			t.Errorf("%#x: %v", c, err)
		}
	}
	if got := d.Slots(); len(got) != 1 || got[0].GuestPA != slot.GuestPA || got[0].FD != -1 {
		t.Errorf("slots %+v", got)
	}
	if err := d.RemoveSlot(slot.GuestPA, slot.Size, slot.UserAddr); err != nil {
		t.Fatal(err)
	}
	if n := mappings(t, name); n != 0 {
		t.Errorf("%d mappings left", n)
	}
	if m := s.Read(got, 0x100000000); m.Kind != translate.BadAddress {
		t.Errorf("after removal: %v", m.Err())
	}
	if err := d.AddSlot(slot); err != nil { // the same place can be used again
		t.Fatal(err)
	}
}

func TestAddSlotRefuses(t *testing.T) {
	d, s := newDriver(t, Options{})
	fd := memfd(t, "vnicd-test-bad", 8<<20, 0, 0)
	pipe := make([]int, 2)
	if err := unix.Pipe(pipe); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	readOnly, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(readOnly)
	good := Slot{GuestPA: 0x200000, Size: 1 << 20, UserAddr: 0x10000000, FD: fd}
	if err := d.AddSlot(good); err != nil {
		t.Fatal(err)
	}
	with := func(f func(*Slot)) Slot {
		s := Slot{GuestPA: 0x40000000, Size: 1 << 20, UserAddr: 0x20000000, FD: fd}
		f(&s)
		return s
	}
	for name, c := range map[string]struct {
		slot Slot
		want error
	}{
		"empty":             {with(func(s *Slot) { s.Size = 0 }), translate.ErrInvalid},
		"size":              {with(func(s *Slot) { s.Size = 4097 }), translate.ErrInvalid},
		"pa":                {with(func(s *Slot) { s.GuestPA++ }), translate.ErrInvalid},
		"pa too high":       {with(func(s *Slot) { s.GuestPA = 1 << 48 }), translate.ErrInvalid},
		"pa wraps":          {with(func(s *Slot) { s.GuestPA = ^uint64(0) &^ 4095 }), translate.ErrInvalid},
		"end too high":      {with(func(s *Slot) { s.GuestPA = 1<<48 - 4096 }), translate.ErrInvalid},
		"user":              {with(func(s *Slot) { s.UserAddr += 8 }), translate.ErrInvalid},
		"user wraps":        {with(func(s *Slot) { s.UserAddr = ^uint64(0) &^ 4095 }), translate.ErrInvalid},
		"offset":            {with(func(s *Slot) { s.Offset = 1 }), translate.ErrInvalid},
		"offset beyond":     {with(func(s *Slot) { s.Offset = 8 << 20 }), ErrFile},
		"offset huge":       {with(func(s *Slot) { s.Offset = ^uint64(0) &^ 4095 }), ErrFile},
		"size beyond":       {with(func(s *Slot) { s.Size = 9 << 20 }), ErrFile},
		"size huge":         {with(func(s *Slot) { s.Size = 1 << 47 }), ErrFile},
		"same pa":           {with(func(s *Slot) { s.GuestPA = 0x200000 }), translate.ErrOverlap},
		"overlaps head":     {with(func(s *Slot) { s.GuestPA = 0x200000 - 4096 }), translate.ErrOverlap},
		"overlaps tail":     {with(func(s *Slot) { s.GuestPA = 0x300000 - 4096 }), translate.ErrOverlap},
		"overlaps user":     {with(func(s *Slot) { s.UserAddr = 0x10000000 + 1<<20 - 4096 }), translate.ErrOverlap},
		"pipe":              {with(func(s *Slot) { s.FD = pipe[0] }), ErrFile},
		"no fd":             {with(func(s *Slot) { s.FD = -1 }), unix.EBADF},
		"read-only memory ": {with(func(s *Slot) { s.FD = readOnly }), unix.EACCES},
	} {
		err := d.AddSlot(c.slot)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, expected %v", name, err, c.want)
		}
	}
	if got := d.Slots(); len(got) != 1 {
		t.Errorf("slots %+v", got)
	}
	if n := mappings(t, "vnicd-test-bad"); n != 1 {
		t.Errorf("%d mappings", n)
	}
	if s.Contains(0x40000000, 1) {
		t.Error("a refused slot is in the table")
	}
}

func TestSlotLimit(t *testing.T) {
	d, _ := newDriver(t, Options{})
	fd := memfd(t, "vnicd-test-limit", 4096, 0, 0)
	for i := uint64(0); ; i++ {
		err := d.AddSlot(Slot{GuestPA: i << 13, Size: 4096, UserAddr: i << 13, FD: fd})
		if i < MaxSlots && err != nil {
			t.Fatal(err)
		}
		if i == MaxSlots {
			if !errors.Is(err, translate.ErrLimit) {
				t.Fatal(err)
			}
			return
		}
	}
}

// EP-2, EP-3: memory in use stays mapped, new accesses miss at once.
func TestRemoveWaitsForReaders(t *testing.T) {
	d, s := newDriver(t, Options{})
	const name = "vnicd-test-wait"
	fd := memfd(t, name, 2<<20, 0, 0)
	if err := d.AddSlot(Slot{Size: 2 << 20, FD: fd}); err != nil {
		t.Fatal(err)
	}
	if err := fetch(testContext(t), s, 0, 2<<20); err != nil {
		t.Fatal(err)
	}
	tok := s.Epochs().Enter(translate.ByLoop(3))
	b, m := s.Host(0, 2<<20)
	if !m.OK() {
		t.Fatal(m.Err())
	}
	removed := make(chan error, 1)
	go func() { removed <- d.RemoveSlot(0, 2<<20, 0) }()
	for deadline := time.Now().Add(30 * time.Second); s.Contains(0, 1); {
		if time.Now().After(deadline) {
			t.Fatal("entry is not removed")
		}
	}
	select {
	case err := <-removed:
		t.Fatalf("removed under a reader: %v", err)
	default:
	}
	b[0], b[2<<20-1] = 1, 2 // would be a SIGSEGV
	// Other slots are added and removed meanwhile.
	if err := d.AddSlot(Slot{GuestPA: 0x40000000, Size: 4096, FD: fd}); err != nil {
		t.Fatal(err)
	}
	s.Epochs().Leave(3, tok)
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
	if n := mappings(t, name); n != 1 {
		t.Errorf("%d mappings, expected the other slot's", n)
	}
	d.Close()
	d.Close()
	if n := mappings(t, name); n != 0 {
		t.Errorf("%d mappings after Close", n)
	}
	if err := d.AddSlot(Slot{Size: 4096, FD: fd}); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if err := d.RemoveSlot(0, 4096, 0); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// A guest memory file that shrinks is an error of one VM and does not end the daemon.
func TestShrunkFile(t *testing.T) {
	var log bytes.Buffer
	s := translate.NewSpace(1)
	d := New(s, hclog.New(&hclog.LoggerOptions{Output: &log, Mutex: new(sync.Mutex), Level: hclog.Warn}), Options{})
	defer d.Close()
	fd := memfd(t, "vnicd-test-shrink", 1<<20, 0, 0)
	for i := range uint64(2) {
		if err := d.AddSlot(Slot{GuestPA: i << 20, UserAddr: i << 20, Size: 1 << 20, FD: fd}); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(log.String(), "not sealed"); n != 1 {
		t.Errorf("warned %d times: %s", n, log.String())
	}
	if err := fetch(testContext(t), s, 0, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	err := translate.Guard(func() error { return s.Read(make([]byte, 8), 0x1000).Err() })
	if !errors.Is(err, translate.ErrMemoryGone) {
		t.Fatalf("read: %v", err)
	}
	err = translate.Guard(func() error { return s.Write(0x1000, make([]byte, 100)).Err() })
	if !errors.Is(err, translate.ErrMemoryGone) {
		t.Fatalf("write: %v", err)
	}
}

func TestTouch(t *testing.T) {
	fd := memfd(t, "vnicd-test-touch", 1<<20, 0, 0)
	d, _ := newDriver(t, Options{})
	r, err := d.newRegion(Slot{Size: 1 << 20, FD: fd}, file{block: translate.PageSize})
	if err != nil {
		t.Fatal(err)
	}
	defer d.opts.Budget.abandon(r)
	if err := touch(r.m.whole); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Blocks*512 < 1<<20 {
		t.Errorf("file has %d blocks, %v", st.Blocks, err)
	}
	if err := unix.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	if err := touch(r.m.whole); !errors.Is(err, translate.ErrMemoryGone) {
		t.Error(err)
	}
}

// A release that takes longer than a second is logged with its holder.
func TestSlowDrainIsReported(t *testing.T) {
	var log bytes.Buffer
	var mu sync.Mutex
	s := translate.NewSpace(7)
	s.Epochs().SetNamer(func(slot int) string { return fmt.Sprintf("loop %d, in iteration 12", slot) })
	d := New(s, hclog.New(&hclog.LoggerOptions{Output: &log, Mutex: &mu, Level: hclog.Warn}), Options{})
	slot(t, d, "vnicd-test-slow", 0, 1<<20)
	tok := s.Epochs().Enter(translate.ByLoop(3))
	time.AfterFunc(drainPatience+drainPatience/2, func() { s.Epochs().Leave(3, tok) })
	d.Close()
	for _, want := range []string{"still in use", "gvmi=7", "loop 3, in iteration 12"} {
		if strings.Count(log.String(), want) != 1 {
			t.Errorf("%q is not in the log, or not once: %s", want, log.String())
		}
	}
	if n := d.Status().LongestDrain; n < drainPatience {
		t.Errorf("longest drain %v", n)
	}
}

// A Hold has one entry for ranges in adjacent granules, and holds each granule once: what it costs does not depend on
// how often a page is listed.
func TestHoldRanges(t *testing.T) {
	b := NewBudget(64 << 20)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, "vnicd-test-ranges", 0, 16<<20)
	ctx := testContext(t)
	var ranges []translate.Range
	for pa := translate.PA(0); pa < 8<<20; pa += 3 * translate.PageSize {
		ranges = append(ranges, translate.Range{PA: pa, N: translate.PageSize}, translate.Range{PA: pa, N: 2})
	}
	ranges = append(ranges, translate.Range{PA: 12 << 20, N: 1})
	h, err := d.HoldRanges(ctx, ranges)
	if err != nil {
		t.Fatal(err)
	}
	if st := b.Status(); len(h.held) != 2 || cap(h.held) != 2 || st.Held != 8<<20+minGranule {
		t.Errorf("%d ranges: %d entries, %d bytes held", len(ranges), len(h.held), st.Held)
	}
	if n, most := HoldCost(ranges), translate.AllocatedFor[heldRange](2)+1<<10; n > most {
		t.Errorf("the cost is %d bytes, want at most %d", n, most)
	}
	for _, g := range d.regions[0].m.granules {
		if g.holds != 1 {
			t.Errorf("granule %d is held %d times", g.index, g.holds)
		}
	}
	// One range that is not guest memory: nothing is held.
	if _, err := d.HoldRanges(ctx, append(ranges, translate.Range{PA: 32 << 20, N: 1})); err == nil {
		t.Error("memory outside of the slot is held")
	}
	if !present(s, 0) {
		t.Error("not present")
	}
	h.Release()
	h.Release()
	if st := b.Status(); st.Held != 0 {
		t.Errorf("%d bytes are held", st.Held)
	}
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
}
