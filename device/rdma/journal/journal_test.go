package journal

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
)

func newJournal(t *testing.T, c Config) *Journal {
	t.Helper()
	j, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(j.Close)
	return j
}

// newest is what a reader makes of a file: the newest payload of each key.
func newest(t *testing.T, j *Journal) map[uint64]string {
	t.Helper()
	c, err := Read(j.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	out, stamps := map[uint64]string{}, map[uint64]uint64{}
	for _, s := range c.Shards {
		for _, r := range s {
			if r.Stamp > stamps[r.Key] {
				out[r.Key], stamps[r.Key] = string(r.Payload), r.Stamp
			}
		}
	}
	return out
}

// A reader finds at any time what was committed last, and nothing of what was not, whatever the log's length. A model
// that is updated at each commit says what that is.
func TestCommit(t *testing.T) {
	j := newJournal(t, Config{Shards: 2, Half: 1 << 14})
	rng := rand.New(rand.NewPCG(1, 2))
	model := map[uint64]string{}
	restarts, refused := 0, 0
	for range 3000 {
		s := j.Shard(rng.IntN(2))
		added := map[uint64]string{}
		for range rng.IntN(4) {
			k := uint64(rng.IntN(20))
			v := fmt.Sprintf("%d %0*d", k, 1+rng.IntN(300), rng.Uint32())
			s.Add(7, k, []byte(v))
			added[k] = v
		}
		if rng.IntN(100) == 0 || s.Full() {
			restarts++
			if s.Full() {
				refused++
				if s.Commit() {
					t.Fatal("committed without room")
				}
			}
			s.Restart()
			for k, v := range model {
				if _, ok := added[k]; !ok {
					s.Add(7, k, []byte(v))
				}
			}
			for k, v := range added {
				s.Add(7, k, []byte(v))
			}
		}
		if got := newest(t, j); len(got) != len(model) {
			t.Fatalf("%d keys before the commit, want %d", len(got), len(model))
		}
		if !s.Commit() {
			t.Fatal("no room in a new log")
		}
		for k, v := range added {
			model[k] = v
		}
		got := newest(t, j)
		for k, v := range model {
			if got[k] != v {
				t.Fatalf("key %d is %q, want %q", k, got[k], v)
			}
		}
	}
	if restarts < 10 || refused < 10 {
		t.Errorf("%d new logs, %d for want of room", restarts, refused)
	}
}

// Words, and words within records, change by one store.
func TestWords(t *testing.T) {
	j := newJournal(t, Config{Words: 1000, Shards: 1, Half: page})
	for i := range 1000 {
		j.Word(i).Store(uint64(i) * 3)
	}
	s := j.Shard(0)
	p := s.End(append(s.Begin(1, 2), make([]byte, 24)...))
	s.Commit()
	WordOf(p, 16).Store(99)
	c, err := Read(j.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i, w := range c.Words {
		if v := w.Load(); v != uint64(i)*3 {
			t.Errorf("word %d is %d", i, v)
		}
	}
	if r := c.Shards[0][0]; r.Kind != 1 || r.Key != 2 || le.Uint64(r.Payload[16:]) != 99 {
		t.Errorf("%+v", r)
	}
}

// Files that were damaged are refused or read; nothing else (CO-7).
func TestDamaged(t *testing.T) {
	j := newJournal(t, Config{Words: 8, Shards: 2, Half: 2 * page})
	for i := range 40 {
		j.Shard(i%2).Add(uint32(i), uint64(i), bytes.Repeat([]byte{byte(i)}, i))
		j.Shard(i % 2).Commit()
	}
	good := bytes.Clone(j.mem)
	rng := rand.New(rand.NewPCG(3, 4))
	refused := 0
	for range 3000 {
		copy(j.mem, good)
		at := rng.IntN(headerLen)
		switch rng.IntN(3) {
		case 0:
			l := (&Config{Words: 8, Shards: 2, Half: 2 * page}).layout()
			at = l.shard(rng.IntN(2)) + rng.IntN(8)
		case 1:
			l := (&Config{Words: 8, Shards: 2, Half: 2 * page}).layout()
			at = l.shard(rng.IntN(2)) + page + rng.IntN(600)
		}
		j.mem[at] ^= byte(1 + rng.IntN(255))
		c, err := Read(j.FD())
		switch {
		case errors.Is(err, ErrInvalid):
			refused++
		case err != nil:
			t.Fatal(err)
		default:
			c.Close()
		}
	}
	if refused < 500 {
		t.Errorf("%d of 3000 were refused", refused)
	}
	copy(j.mem, good)
	j.Void()
	if _, err := Read(j.FD()); !errors.Is(err, ErrInvalid) {
		t.Errorf("void: %v", err)
	}
	fd, err := unix.MemfdCreate("not sealed", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.Pwrite(fd, good, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(fd); !errors.Is(err, ErrInvalid) {
		t.Errorf("not sealed: %v", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
		t.Fatal(err)
	}
	c, err := Read(fd)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := unix.Ftruncate(fd, int64(len(good)+page)); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(fd); !errors.Is(err, ErrInvalid) {
		t.Errorf("too long: %v", err)
	}
}

// A log is called long before it has no room, also if most of it was valid from the beginning: only then is there
// always room for records that cannot wait for a new log.
func TestLongBeforeFull(t *testing.T) {
	const half, record = 1 << 20, 100
	for _, live := range []int{1000, half / 4, half / 2, half / 8 * 7} {
		j := newJournal(t, Config{Shards: 1, Half: half})
		s := j.Shard(0)
		payload := make([]byte, record)
		s.Restart()
		for s.end < live {
			n := s.end
			s.Add(7, uint64(n), payload)
		}
		if !s.Commit() || s.Long() {
			t.Fatalf("%d bytes: full %v, long %v", live, s.Full(), s.Long())
		}
		for !s.Long() && !s.Full() {
			s.Add(7, 1, payload)
			s.Commit()
		}
		if s.Full() {
			t.Errorf("%d bytes of %d that are valid: the log is full before it is long", live, half)
		}
		if room := half - s.end; live < half/2 && room < half/5 {
			t.Errorf("%d bytes that are valid: %d bytes are free when the log is long", live, room)
		}
	}
}
