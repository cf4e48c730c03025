package vhostuser

import (
	"encoding/json"
	"errors"
	"io"
	"math"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var errKilled = errors.New("killed")

// hcaRings is the largest number of virtqueues that an HCA has (abi.NumQueues).
const hcaRings = 2 + 8 + 8

func stateFileOf(t *testing.T, size int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("state", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, size)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// largest is the largest state that an HCA has; n tells it from others.
func largest(n uint64) *keptState {
	const most = math.MaxUint64
	s := &keptState{Protocol: n, Running: &handed{Epoch: most, Features: most, Stopped: math.MaxInt64}}
	for range MaxMemSlots {
		s.Regions = append(s.Regions, keptRegion{most, most, most, most, fileID{most, most}.String()})
	}
	for range hcaRings {
		name := eventfdName("kick", most, MaxQueues)
		s.Running.Rings = append(s.Running.Rings, handedRing{math.MaxUint32, math.MaxUint16,
			VringAddr{math.MaxUint32, math.MaxUint32, most, most, most, most}, false, false, false, false, false, false,
			&[3]string{name, name, name}})
	}
	return s
}

// TestTornStates: a process may be killed within any write of any state, of few regions and of the most: the next one
// finds the old or the new state, whole. In a file of an older vnicd this holds for half of that size.
func TestTornStates(t *testing.T) {
	was := pwrite
	defer func() { pwrite = was }()
	few := func(n uint64) *keptState { return &keptState{Protocol: n, Regions: make([]keptRegion, 20)} }
	some := func(n uint64) *keptState {
		s := largest(n)
		s.Regions = s.Regions[:100]
		return s
	}
	for name, tc := range map[string]struct {
		size   int64
		states []func(uint64) *keptState
	}{
		"present": {keptSize, []func(uint64) *keptState{few, largest, some, largest, few}},
		"older":   {oldKeptSize, []func(uint64) *keptState{few, few}},
	} {
		t.Run(name, func(t *testing.T) {
			fd := stateFileOf(t, tc.size)
			if _, err := unix.Pwrite(fd, []byte{7}, markOff); err != nil {
				t.Fatal(err)
			}
			pwrite = was
			if err := writeState(fd, tc.states[0](1)); err != nil {
				t.Fatal(err)
			}
			for i, next := range tc.states {
				old, n, kills := uint64(i)+1, uint64(i)+2, 0
				for done := false; !done; kills++ {
					left := kills
					pwrite = func(fd int, b []byte, off int64) (int, error) {
						for k := 0; k < len(b); k += 4096 {
							if left--; left < 0 {
								return 0, errKilled
							}
							if _, err := unix.Pwrite(fd, b[k:min(k+4096, len(b))], off+int64(k)); err != nil {
								return 0, err
							}
						}
						return len(b), nil
					}
					err := writeState(fd, next(n))
					if done = err == nil; err != nil && !errors.Is(err, errKilled) {
						t.Fatal(err)
					}
					pwrite = was
					s, err := readState(fd)
					if err != nil || s.Protocol != n && (done || s.Protocol != old) {
						t.Fatalf("state %d, kill %d: got %d, want %d or %d: %v", i, kills, s.Protocol, old, n, err)
					}
					want := next(s.Protocol)
					if s.Protocol == old && i > 0 {
						want = tc.states[i-1](old)
					}
					if len(s.Regions) != len(want.Regions) {
						t.Fatalf("state %d, kill %d: %d regions, want %d", i, kills, len(s.Regions), len(want.Regions))
					}
				}
				if kills < 3 {
					t.Errorf("state %d: %d kills", i, kills)
				}
			}
			var b [1]byte
			if _, err := unix.Pread(fd, b[:], markOff); err != nil || b[0] != 7 {
				t.Errorf("the mark is %d, %v", b[0], err)
			}
		})
	}
}

// TestTornTwice: so may the next process, and the one after it, while they write.
func TestTornTwice(t *testing.T) {
	was := pwrite
	defer func() { pwrite = was }()
	// within calls f in a process that may write so many pages.
	within := func(pages int, f func() error) error {
		pwrite = func(fd int, b []byte, off int64) (int, error) {
			for k := 0; k < len(b); k += 4096 {
				if pages--; pages < 0 {
					return 0, errKilled
				}
				if _, err := unix.Pwrite(fd, b[k:min(k+4096, len(b))], off+int64(k)); err != nil {
					return 0, err
				}
			}
			return len(b), nil
		}
		defer func() { pwrite = was }()
		return f()
	}
	for _, size := range []int64{keptSize, oldKeptSize} {
		state := func(n uint64) *keptState {
			s := largest(n)
			if size == oldKeptSize {
				s.Regions = s.Regions[:20]
			}
			return s
		}
		for first := range 16 {
			for second := range 20 {
				fd := stateFileOf(t, size)
				if err := writeState(fd, state(1)); err != nil {
					t.Fatal(err)
				}
				_ = within(first, func() error { return writeState(fd, state(2)) })
				err := within(second, func() error {
					s, err := readState(fd)
					if err == nil {
						err = writeState(fd, state(s.Protocol+10))
					}
					return err
				})
				if err != nil && !errors.Is(err, errKilled) {
					t.Fatal(err)
				}
				s, err := readState(fd)
				if err != nil || s.Protocol%10 != 1 && s.Protocol%10 != 2 || len(s.Regions) != len(state(1).Regions) {
					t.Fatalf("size %d, kills after %d and %d pages: state %d, %d regions, %v", size, first, second, s.Protocol,
						len(s.Regions), err)
				}
			}
		}
	}
}

// TestOlderStates: what an older vnicd has written last is found, whichever file it had, and also if it was killed
// while it wrote (CO-6).
func TestOlderStates(t *testing.T) {
	// write does what an older vnicd does, up to half of the write of the first half.
	write := func(fd int, s *keptState, torn bool) {
		t.Helper()
		s.Sum = strings.Repeat("0", sumLen)
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		copy(b[len(sumPrefix):], sumOf(b))
		first := b
		if torn {
			first = b[:len(b)/2]
		}
		for off, b := range map[int64][]byte{oldKeptSize / 2: b, 0: first} {
			if _, err := unix.Pwrite(fd, b, off); err != nil {
				t.Fatal(err)
			}
		}
	}
	check := func(fd int, want uint64) {
		t.Helper()
		if s, err := readState(fd); err != nil || s.Protocol != want {
			t.Errorf("got %d, %v; want %d", s.Protocol, err, want)
		}
	}
	for _, size := range []int64{keptSize, oldKeptSize} {
		fd := stateFileOf(t, size)
		for n := uint64(1); n < 7; n += 3 {
			if err := writeState(fd, &keptState{Protocol: n, Regions: make([]keptRegion, 30)}); err != nil {
				t.Fatal(err)
			}
			check(fd, n)
			write(fd, &keptState{Protocol: n + 1, Regions: make([]keptRegion, 50)}, false)
			check(fd, n+1)
			write(fd, &keptState{Protocol: n + 2, Regions: make([]keptRegion, 50)}, true)
			check(fd, n+2)
		}
	}
	// A kill at the beginning of a write over what an older one has left.
	fd := stateFileOf(t, keptSize)
	write(fd, &keptState{Protocol: 1}, false)
	was := pwrite
	defer func() { pwrite = was }()
	pwrite = func(fd int, b []byte, off int64) (int, error) {
		if off == 0 {
			n, _ := unix.Pwrite(fd, b[:4096], off)
			return n, errKilled
		}
		return unix.Pwrite(fd, b, off)
	}
	if err := writeState(fd, largest(2)); !errors.Is(err, errKilled) {
		t.Fatal(err)
	}
	pwrite = was
	check(fd, 2)
	// A long state of this vnicd, of which the beginning is torn, is not taken for a copy of an older one.
	fd = stateFileOf(t, keptSize)
	if err := writeState(fd, largest(1)); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Pwrite(fd, []byte(sumPrefix+"torn"), 0); err != nil {
		t.Fatal(err)
	}
	check(fd, 1)
}

// TestStateInPieces: a write may take several calls, and one that comes to no end is an error.
func TestStateInPieces(t *testing.T) {
	was := pwrite
	defer func() { pwrite = was }()
	fd := stateFileOf(t, keptSize)
	calls := 0
	pwrite = func(fd int, b []byte, off int64) (int, error) {
		if calls++; calls%3 == 0 {
			return -1, unix.EINTR
		}
		return unix.Pwrite(fd, b[:min(len(b), 1000)], off)
	}
	want := largest(1)
	if err := writeState(fd, want); err != nil {
		t.Fatal(err)
	}
	if s, err := readState(fd); err != nil || len(s.Regions) != len(want.Regions) {
		t.Errorf("%d regions, want %d: %v", len(s.Regions), len(want.Regions), err)
	}
	pwrite = func(int, []byte, int64) (int, error) { return 0, nil }
	if err := writeState(fd, want); !errors.Is(err, io.ErrShortWrite) {
		t.Error(err)
	}
}
