package hostdriver

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// TestMain fails the binary if goroutines or mappings of memory files are left.
func TestMain(m *testing.M) {
	if os.Getenv(swapChild) != "" {
		os.Exit(swapMain())
	}
	if o := os.Getenv(crowdChild); o != "" {
		os.Exit(crowdMain(o))
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "leaked:", err)
			code = 1
		}
		if maps, err := os.ReadFile("/proc/self/maps"); err != nil || strings.Contains(string(maps), "memfd:vnicd-test") {
			fmt.Fprintln(os.Stderr, "leaked mappings of guest memory", err)
			code = 1
		}
	}
	os.Exit(code)
}

// memfd makes a memory file whose name is visible in the mappings of this process.
func memfd(t testing.TB, name string, size int64, flags, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

// mappings counts this process's mappings of the memory file.
func mappings(t *testing.T, name string) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(maps), "memfd:"+name)
}

// testLog drops messages below error.
func testLog(t testing.TB) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{Output: t.Output(), Level: hclog.Error})
}

func newDriver(t testing.TB, o Options) (*Driver, *translate.Space) {
	s := translate.NewSpace(1)
	d := New(s, hclog.NewNullLogger(), o)
	t.Cleanup(d.Close)
	return d, s
}

// slot adds size bytes of a fresh memory file at PA pa.
func slot(t testing.TB, d *Driver, name string, pa, size uint64) (fd int) {
	t.Helper()
	fd = memfd(t, name, int64(size), 0, unix.F_SEAL_SHRINK)
	if err := d.AddSlot(Slot{GuestPA: pa, Size: size, UserAddr: 0x7f0000000000 + pa, FD: fd}); err != nil {
		t.Fatal(err)
	}
	return fd
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// fetch raises a fault and waits for it, as a parked operation does.
func fetch(ctx context.Context, s *translate.Space, pa translate.PA, n uint64) error {
	return s.Fetch(ctx, translate.Miss{Kind: translate.HostFault, Where: translate.Where{PA: pa}, Len: n}, true)
}

// access calls f with the host memory at [pa, pa+n), inside an epoch, as soon as all of it is present. Until then it
// parks: it leaves the epoch, waits for the fault, and translates again.
func access(ctx context.Context, s *translate.Space, slot int, pa translate.PA, n uint64, f func(b []byte),
	parked ...func()) error {
	for {
		tok := s.Epochs().Enter(translate.ByLoop(slot))
		b, m := s.Host(pa, int(n))
		ok := m.OK() && uint64(len(b)) == n
		if ok {
			f(b)
		}
		s.Epochs().Leave(slot, tok)
		if ok {
			return nil
		}
		if m.OK() { // Host returns what is present
			m = translate.Miss{Kind: translate.HostFault, Where: translate.Where{PA: pa + translate.PA(len(b))},
				Len: n - uint64(len(b))}
		}
		for _, p := range parked {
			p()
		}
		if err := s.Fetch(ctx, m, true); err != nil {
			return err
		}
	}
}

// present reports whether an access finds the page at pa.
func present(s *translate.Space, pa translate.PA) bool {
	tok := s.Epochs().Enter(translate.ByLoop(14))
	defer s.Epochs().Leave(14, tok)
	_, m := s.Host(pa, 1)
	return m.OK()
}

// usage is the kernel's account of all mappings of one memory file, in bytes.
type usage struct {
	rss, locked, swap, huge uint64
	lockedFlag              bool
	n                       int
}

func smaps(t testing.TB, name string) usage {
	t.Helper()
	u, err := readUsage(name)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func readUsage(name string) (u usage, err error) {
	b, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return u, err
	}
	in := false
	for _, l := range strings.Split(string(b), "\n") {
		key, rest, _ := strings.Cut(l, " ")
		switch {
		case strings.Contains(l, "-") && !strings.HasSuffix(key, ":"):
			if in = strings.Contains(l, name); in {
				u.n++
			}
		case !in:
		case key == "VmFlags:":
			u.lockedFlag = strings.Contains(rest, " lo")
		default:
			kb, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				continue
			}
			switch key {
			case "Rss:":
				u.rss += kb << 10
			case "Locked:":
				u.locked += kb << 10
			case "Swap:":
				u.swap += kb << 10
			case "ShmemPmdMapped:":
				u.huge += kb << 10
			}
		}
	}
	return u, nil
}

// audit compares b's accounting with its lists and with the tables. Slots that are being removed, and room that was
// just reserved, are only in the accounting; with quiet there are none.
func audit(b *Budget, quiet bool) error {
	b.mu.Lock()
	ds := slices.Collect(maps.Keys(b.drivers))
	b.mu.Unlock()
	ms := map[*mapping]bool{}
	for _, d := range ds {
		d.mu.Lock()
		for _, r := range d.regions {
			ms[r.m] = true
		}
		d.mu.Unlock()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	var used, held, huge uint64
	listed := 0
	for m := range ms {
		if m.gone {
			continue
		}
		holds := map[*granule]int{}
		for _, r := range m.views {
			for g, n := range r.held {
				holds[g] += n
			}
		}
		for i, g := range m.granules {
			n := g.size()
			if g.index != i || g.m != m {
				return fmt.Errorf("granule %d is stored at index %d", g.index, i)
			}
			if m.counted() {
				used += n
			} else {
				huge += n
			}
			if g.holds != holds[g] {
				return fmt.Errorf("granule %d has %d holds, its views %d", i, g.holds, holds[g])
			}
			if g.holds > 0 && m.counted() {
				held += n
			}
			var want *list
			switch {
			case g.state == active && g.holds == 0 && m.counted():
				want = &b.active
			case g.state == inactive:
				want = &b.inactive
			}
			if g.on != want {
				return fmt.Errorf("granule %d in state %d with %d holds is on the wrong list", i, g.state, g.holds)
			}
			if want != nil {
				listed++
			}
			if (g.state == active) != (g.in != 0) {
				return fmt.Errorf("granule %d in state %d is in the tables of %#b", i, g.state, g.in)
			}
			for _, r := range m.views {
				pa, mem := r.slot(i)
				for off := 0; off < len(mem); off += translate.PageSize {
					h, miss := r.d.space.Host(pa+translate.PA(off), 1)
					if miss.OK() != (g.in&r.view != 0) || miss.OK() && &h[0] != &mem[off] {
						return fmt.Errorf("granule %d in state %d, page %d, view %#b of %#b: %v", i, g.state, off/translate.PageSize,
							r.view, g.in, miss.Kind)
					}
				}
			}
		}
	}
	n := 0
	for _, l := range []*list{&b.active, &b.inactive} {
		var bytes uint64
		var last *granule
		for g := l.head; g != nil; last, g = g, g.next {
			if g.prev != last || g.on != l {
				return fmt.Errorf("a list is not linked both ways")
			}
			bytes += g.size()
			n++
		}
		if l.tail != last || bytes != l.bytes {
			return fmt.Errorf("a list has a wrong end, or %d bytes, want %d", bytes, l.bytes)
		}
	}
	switch {
	case listed > n || used > b.used || held > b.held || huge > b.huge,
		quiet && (listed < n || used < b.used || held < b.held || huge < b.huge):
		return fmt.Errorf("regions have %d granules, %d bytes, %d held, %d huge; accounted %d, %d, %d, %d", listed, used,
			held, huge, n, b.used, b.held, b.huge)
	case b.limit != 0 && (b.used > b.limit || b.held > b.limit/2):
		return fmt.Errorf("%d bytes used, %d held of %d", b.used, b.held, b.limit)
	}
	return nil
}
