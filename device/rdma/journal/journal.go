// Package journal keeps the state of a device in a file of shared memory that another process reads after this one
// was killed at any instruction (CO-1, CO-2). It knows nothing of the state.
//
// A file has words, each of which changes by one store, and shards, each with one writer. A shard has a log of
// records. A writer adds records and then commits them: one store to the shard's head makes all of them part of the
// log, so a reader finds either all or none. A newer record with the same kind and key replaces an older one, of the
// same shard or of another: stamps say which is newer. When a log has become long, the writer begins a new one in the
// other half of its shard (Restart), writes all that is still valid, and commits: the same store switches to that
// half.
//
//	page 0   header: magic, version, number of words, number of shards, bytes of a half,
//	         version of the records
//	words    8 bytes each, to the end of a page
//	shard    head, in a page of its own; half 0; half 1
//	head     bit 63: the half in use; the others: length of its log
//	record   length of the payload (4 bytes), kind (4), key (8), stamp (8), payload, padding to 8 bytes
//
// Numbers are little-endian. The file is sparse: only what logs have reached takes memory. A killed process stops
// between two instructions, and what it has stored stays in the file. Nobody reads the file while its writer lives, so
// plain stores do: it is the order of the program that counts, not that in which other processors see its stores.
package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	magic   = "vnicd journal\x00\x00\x00"
	version = 1
	page    = 4096

	headerLen = 16 + 5*8
	recordLen = 24 // before the payload

	halfBit = 1 << 63

	// Bounds of what is read.
	maxShards = 64
	maxWords  = 1 << 24
	maxHalf   = 1 << 32
	maxFile   = 1 << 40
)

var le = binary.LittleEndian

// Journal is a journal file that this process writes.
type Journal struct {
	fd     int
	mem    []byte
	fixed  uint64 // bytes of all but the logs
	shards []Shard
	stamp  atomic.Uint64
	logs   atomic.Uint64 // bytes of pages that logs have reached
}

// Config says how large the parts of a file are.
type Config struct {
	Format uint32 // of the records: for the reader
	Words  int
	Shards int
	Half   int // bytes of a log at most; a multiple of 4096
}

// New makes a journal file. Close ends its use.
func New(c Config) (*Journal, error) {
	if c.Words < 0 || c.Words > maxWords || c.Shards < 1 || c.Shards > maxShards || c.Half < page || c.Half > maxHalf ||
		c.Half%page != 0 {
		return nil, fmt.Errorf("journal of %d words and %d shards of %d bytes", c.Words, c.Shards, c.Half)
	}
	fd, err := unix.MemfdCreate("vnicd-journal", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("journal file: %w", err)
	}
	l := c.layout()
	j := &Journal{fd: fd, fixed: uint64(l.first + c.Shards*page)}
	if err = unix.Ftruncate(fd, int64(l.size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		j.mem, err = unix.Mmap(fd, 0, l.size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("journal file of %d bytes: %w", l.size, err)
	}
	_ = unix.Madvise(j.mem, unix.MADV_DONTDUMP) // the file may hold 10 GiB of nothing
	j.shards = make([]Shard, c.Shards)
	for i := range j.shards {
		at := l.shard(i)
		j.shards[i] = Shard{j: j, head: word(j.mem[at:]),
			halves: [2][]byte{j.mem[at+page:][:c.Half:c.Half], j.mem[at+page+c.Half:][:c.Half:c.Half]}}
	}
	h := append([]byte(magic), make([]byte, 5*8)...)
	for i, v := range [...]int{version, c.Words, c.Shards, c.Half, int(c.Format)} {
		le.PutUint64(h[16+8*i:], uint64(v))
	}
	copy(j.mem, h)
	return j, nil
}

// layout is where the parts of a file are.
type layout struct{ first, perShard, size int }

func (c *Config) layout() layout {
	l := layout{first: page + (8*c.Words+page-1)&^(page-1), perShard: page + 2*c.Half}
	l.size = l.first + c.Shards*l.perShard
	return l
}

func (l *layout) shard(i int) int { return l.first + i*l.perShard }

// Memory returns how many bytes of memory the file takes at most, which only grows. Any goroutine.
func (j *Journal) Memory() uint64 { return j.fixed + j.logs.Load() }

// FD returns the file's descriptor, which Close closes.
func (j *Journal) FD() int { return j.fd }

// Close ends the use of the file. Nobody writes it any more.
func (j *Journal) Close() {
	_ = unix.Munmap(j.mem)
	_ = unix.Close(j.fd)
	j.mem, j.shards = nil, nil
}

// Shard returns shard i.
func (j *Journal) Shard(i int) *Shard { return &j.shards[i] }

// Word returns word i.
func (j *Journal) Word(i int) *Word { return word(j.mem[page+8*i:]) }

// Void makes the file useless for the next process: what it says is not complete.
func (j *Journal) Void() { clear(j.mem[:len(magic)]) }

// Stamp returns a stamp for later records: those that are added afterwards have a greater one.
func (j *Journal) Stamp() uint64 { return j.stamp.Add(1) }

// Word is a word of a file. One thread writes it at a time. A store is one instruction, and the compiler leaves stores
// in their order.
type Word uint64

// Load returns the word.
func (w *Word) Load() uint64 { return uint64(*w) }

// Store changes the word.
func (w *Word) Store(v uint64) { *w = Word(v) }

// Shard is a log with one writer at a time.
type Shard struct {
	j      *Journal
	head   *Word
	halves [2][]byte
	half   int    // where records are added
	end    int    // of the records added
	pages  [2]int // bytes of the halves' pages that records have reached
	began  int    // where the record begins that is being added
	stamp  uint64 // of that record
	live   int    // length of the log after the last Restart and Commit
	fresh  bool
	full   bool
}

// Begin begins a record. The caller appends the payload to what it returns, and passes the result to End.
func (s *Shard) Begin(kind uint32, key uint64) []byte {
	s.stamp = s.j.Stamp()
	return s.Next(kind, key)
}

// Next is Begin with the stamp of the record before: records of other shards that were added in between count as newer.
func (s *Shard) Next(kind uint32, key uint64) []byte {
	s.began = s.end
	b := s.halves[s.half]
	if len(b)-s.end < recordLen {
		s.full = true
		return make([]byte, recordLen)
	}
	b = b[s.end : s.end+recordLen]
	le.PutUint32(b[4:], kind)
	le.PutUint64(b[8:], key)
	le.PutUint64(b[16:], s.stamp)
	return b // append writes behind it, in the file, as long as there is room
}

// End ends a record, and returns its payload in the file; nil if there is no room left, see Full.
func (s *Shard) End(b []byte) []byte {
	n := len(b) - recordLen
	end := s.began + (len(b)+7)&^7
	half := s.halves[s.half]
	if s.full || end > len(half) || &b[0] != &half[s.began] {
		s.full = true
		return nil
	}
	le.PutUint32(b, uint32(n))
	s.end = end
	return b[recordLen:]
}

// SetKey sets the key of a record that Begin has returned, before anything is appended.
func SetKey(b []byte, key uint64) { le.PutUint64(b[8:], key) }

// Add adds a record.
func (s *Shard) Add(kind uint32, key uint64, payload []byte) {
	s.End(append(s.Begin(kind, key), payload...))
}

// Commit makes all records that were added part of the log, at once. It returns false, and changes nothing, if there
// was no room for one of them.
func (s *Shard) Commit() bool {
	if s.end > s.pages[s.half] {
		s.reach()
	}
	if s.full {
		return false
	}
	v := uint64(s.end)
	if s.half == 1 {
		v |= halfBit
	}
	s.head.Store(v)
	if s.fresh {
		s.fresh, s.live = false, s.end
	}
	return true
}

// reach counts the pages up to the last record.
func (s *Shard) reach() {
	n := (s.end + page - 1) &^ (page - 1)
	s.j.logs.Add(uint64(n - s.pages[s.half]))
	s.pages[s.half] = n
}

// Full reports whether a record had no room: only Restart helps.
func (s *Shard) Full() bool { return s.full }

// Long reports whether the log has become so much longer than what was valid that it should be begun anew, or is about
// to have no room.
func (s *Shard) Long() bool {
	const least = 64 << 10
	room := len(s.halves[s.half])
	return s.full || s.end > max(min(max(least, 4*s.live), room/4*3), s.live+s.live/8)
}

// Restart begins a new log. Records that were added and not committed are dropped. The old log stays valid until
// Commit.
func (s *Shard) Restart() {
	if !s.fresh {
		s.half = 1 - s.half
	}
	s.end, s.full, s.fresh = 0, false, true
}

// WordOf returns the word at an offset of a payload that End has returned; the offset is a multiple of 8.
func WordOf(payload []byte, off int) *Word { return word(payload[off:]) }

// Record is a record of a log.
type Record struct {
	Kind    uint32
	Key     uint64
	Stamp   uint64
	Payload []byte
}

// Contents is what a file says. It refers to the file's memory, and its words may be changed, until Close.
type Contents struct {
	Format uint32
	Words  []*Word
	Shards [][]Record // in the order in which they were added
	mem    []byte
}

// ErrInvalid is wrapped by errors about a file's contents.
var ErrInvalid = errors.New("invalid journal")

// Read reads a journal whose writer is gone. The file is not trusted (CO-7), except that nobody writes it. fd remains
// the caller's.
func Read(fd int) (*Contents, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("%w: the file is not sealed", ErrInvalid)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, os.NewSyscallError("fstat of the journal", err)
	}
	if st.Size < page || st.Size > maxFile {
		return nil, fmt.Errorf("%w: a file of %d bytes", ErrInvalid, st.Size)
	}
	mem, err := unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("journal of %d bytes: %w", st.Size, err)
	}
	x := &Contents{mem: mem}
	if err := x.parse(); err != nil {
		x.Close()
		return nil, err
	}
	return x, nil
}

// Close ends the use of the file, and of all that Contents has returned.
func (x *Contents) Close() {
	_ = unix.Munmap(x.mem)
	*x = Contents{}
}

func (x *Contents) parse() error {
	h := x.mem[:headerLen]
	if string(h[:16]) != magic {
		return fmt.Errorf("%w: begins with %q", ErrInvalid, h[:16])
	}
	n := func(i int) uint64 { return le.Uint64(h[16+8*i:]) }
	if n(0) != version {
		return fmt.Errorf("%w: version %d, this vnicd knows %d", ErrInvalid, n(0), version)
	}
	if n(1) > maxWords || n(2) == 0 || n(2) > maxShards || n(3) > maxHalf || n(3)%page != 0 {
		return fmt.Errorf("%w: %d words, %d shards of %d bytes", ErrInvalid, n(1), n(2), n(3))
	}
	c := Config{Words: int(n(1)), Shards: int(n(2)), Half: int(n(3))}
	if x.Format = uint32(n(4)); uint64(x.Format) != n(4) {
		return fmt.Errorf("%w: records of version %d", ErrInvalid, n(4))
	}
	l := c.layout()
	if l.size != len(x.mem) {
		return fmt.Errorf("%w: a file of %d bytes, its parts have %d", ErrInvalid, len(x.mem), l.size)
	}
	for i := range c.Words {
		x.Words = append(x.Words, word(x.mem[page+8*i:]))
	}
	for i := range c.Shards {
		log, err := x.log(l.shard(i), c.Half)
		if err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
		x.Shards = append(x.Shards, log)
	}
	return nil
}

// log returns the log of the shard at an offset.
func (x *Contents) log(at, half int) (out []Record, err error) {
	head := word(x.mem[at:]).Load()
	at += page
	if head&halfBit != 0 {
		at += half
	}
	n := head &^ halfBit
	if n > uint64(half) {
		return nil, fmt.Errorf("%w: a log of %d bytes, at most %d", ErrInvalid, n, half)
	}
	for b := x.mem[at:][:n]; len(b) > 0; {
		if len(b) < recordLen {
			return nil, fmt.Errorf("%w: record is cut off", ErrInvalid)
		}
		n := uint64(le.Uint32(b))
		end := (recordLen + n + 7) &^ 7
		if end > uint64(len(b)) {
			return nil, fmt.Errorf("%w: record of %d bytes, %d are left", ErrInvalid, n, len(b)-recordLen)
		}
		out = append(out, Record{Kind: le.Uint32(b[4:]), Key: le.Uint64(b[8:]), Stamp: le.Uint64(b[16:]),
			Payload: b[recordLen : recordLen+n : recordLen+n]})
		b = b[end:]
	}
	return out, nil
}
