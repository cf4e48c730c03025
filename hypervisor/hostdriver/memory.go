package hostdriver

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"slices"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// region is a Slot of one connection: its view of a mapping.
type region struct {
	Slot
	d    *Driver
	m    *mapping
	view uint32 // bit of granule.in

	// Guarded by Budget.mu.
	held map[*granule]int // holds by this connection
	gone bool             // the slot is being removed
}

// mapping is a piece of a memory file that is mapped once for all connections of a VM, and divided into granules.
type mapping struct {
	key   mappingKey
	b     *Budget
	log   hclog.Logger
	file  *keptFile // nil: none, see keep
	from  int64     // offset of whole in the file
	whole []byte    // the mapping: may begin before the slot (huge pages)
	size  uint64    // of whole
	lead  uint64    // offset of the slot in whole
	base  uint64    // offset of whole in its first granule
	shift uint
	block uint64 // page size of the file
	huge  bool   // hugetlbfs: never swapped, so neither counted nor evicted

	// Guarded by Budget.mu.
	views    []*region           // one per connection that has the slot
	granules map[uint64]*granule // all granules that are not absent
	parting  []*drain            // of connections that have removed the slot
	users    int                 // users of the mapping without the mutex
	gone     bool                // the last connection is removing the slot
}

// mappingKey says which memory a mapping has. Slots of several connections share a mapping if all of it is equal. Slots
// that overlap only in part are mapped and counted apart.
type mappingKey struct{ dev, ino, offset, size uint64 }

// keptFile is a descriptor of a memory file. The mappings of a VM share it, by Budget.mu.
type keptFile struct {
	fd, users int
	sealed    bool // nobody can make holes: see Driver.Seal and NewFile
}

// fileKey identifies a file.
type fileKey struct{ dev, ino uint64 }

const (
	// maxGranules is how many granules of a mapping may be resident under the limit that it was made under.
	maxGranules = 1 << 17
	// minGranule is the smallest granule; a smaller one is not worth a system call.
	minGranule = 64 << 10
	// maxViews bounds the connections that share a mapping.
	maxViews = 32
	// maxFiles bounds the descriptors of memory files that are kept for one VM.
	maxFiles = 64
)

// newRegion maps the slot, with whole blocks around it, or shares the mapping of another connection of the VM.
func (d *Driver) newRegion(s Slot, f file) (*region, error) {
	b := d.opts.Budget
	key := mappingKey{f.dev, f.ino, s.Offset, s.Size}
	fd := s.FD
	s.FD = -1
	r := &region{Slot: s, d: d, held: make(map[*granule]int)}
	b.making.Lock()
	defer b.making.Unlock()
	// A descriptor that permits less than a mapping must not share it.
	if f.writable && b.share(key, r, nil) {
		return r, nil
	}
	m, err := b.newMapping(key, fd, f)
	if err != nil {
		return nil, err
	}
	m.log = d.log
	if !m.huge {
		if err := lock(m.whole); err != nil {
			b.notLocked(d.log, err)
		}
	}
	if b.share(key, r, m); r.m != m {
		m.close()
	}
	return r, nil
}

// share makes r a view of the mapping of that memory, or else of m, if m is not nil.
func (b *Budget) share(key mappingKey, r *region, m *mapping) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if have := b.mappings[key]; have != nil && len(have.views) < maxViews {
		m = have
	} else if m == nil {
		return false
	} else if have == nil {
		b.mappings[key] = m
	}
	var taken uint32
	for _, v := range m.views {
		taken |= v.view
	}
	r.m, r.view = m, ^taken&-^taken // the lowest free bit
	m.views = append(m.views, r)
	if !m.huge {
		b.unit = max(b.unit, 1<<m.shift)
	}
	return true
}

func (b *Budget) newMapping(key mappingKey, fd int, f file) (*mapping, error) {
	lead := key.offset & (f.block - 1)
	length := (lead + key.size + f.block - 1) &^ (f.block - 1)
	const maxInt = uint64(^uint(0) >> 1)
	if length < key.size || length > maxInt || key.offset > maxInt {
		return nil, fmt.Errorf("offset %#x is too large: %w", key.offset, translate.ErrInvalid)
	}
	if err := b.chargeMapping(length); err != nil {
		return nil, err
	}
	from := int64(key.offset - lead)
	whole, err := unix.Mmap(fd, from, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		b.releaseMapping(length)
		if f.closed {
			return nil, fmt.Errorf("file is sealed against new writable mappings, as one is that a vnicd has used: %w", ErrFile)
		}
		return nil, fmt.Errorf("mmap of fd %d: %w", fd, err)
	}
	m := &mapping{key: key, b: b, from: from, whole: whole, size: length, lead: lead, block: f.block,
		huge: f.block > translate.PageSize, granules: make(map[uint64]*granule)}
	if m.file, err = b.keep(fileKey{f.dev, f.ino}, fd, f.solid); err != nil {
		_ = unix.Munmap(whole)
		b.releaseMapping(length)
		return nil, err
	}
	size, limit := f.block, b.limitNow()
	if !m.huge {
		if size = minGranule; f.huge > size && (limit == 0 || f.huge <= limit/maxBatch) {
			size = f.huge
		}
		most := length
		if limit != 0 {
			most = min(most, limit)
		}
		for most/size > maxGranules {
			size *= 2
		}
	}
	m.shift = uint(bits.TrailingZeros64(size))
	m.base = uint64(from) & (size - 1)
	// Guest memory does not belong in a core dump of vnicd. Huge pages are optional.
	_ = unix.Madvise(whole, unix.MADV_DONTDUMP)
	_ = unix.Madvise(whole, unix.MADV_HUGEPAGE)
	return m, nil
}

// keep keeps a descriptor of the file, which tells memory that is gone from memory that is short (see lost). solid: the
// file is one of NewFile. It returns nil for a VM that has shared more than maxFiles files already.
func (b *Budget) keep(key fileKey, fd int, solid bool) (*keptFile, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.files[key]
	if f == nil {
		if len(b.files) >= maxFiles {
			return nil, nil
		}
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("duplicating fd %d: %w", fd, err)
		}
		f = &keptFile{fd: own, sealed: solid}
		b.files[key] = f
	}
	f.users++
	return f, nil
}

// close unmaps the memory, which nothing uses and no connection has any more.
func (m *mapping) close() {
	w := m.b.work.Start(worktime.Paging)
	defer w.Stop()
	if err := unix.Munmap(m.whole); err != nil {
		m.log.Error("munmap", "mapping", hclog.Fmt("%+v", m.key), "err", err)
	}
	m.whole = nil
	m.b.releaseMapping(m.size)
	if m.file == nil {
		return
	}
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	if m.file.users--; m.file.users == 0 {
		_ = unix.Close(m.file.fd)
		delete(m.b.files, fileKey{m.key.dev, m.key.ino})
	}
}

// lock makes the kernel keep every mapped page of b until it is unmapped: pages brought in by populate stay, pages
// dropped by discard may be swapped. Nothing is pinned, and pages may be migrated. Unlike locking single pages, this
// does not split the mapping (vm.max_map_count), and the mapping does not change while loops and other VMs use the
// address space.
func lock(b []byte) error {
	// Before Linux 5.18 locked memory cannot be dropped page by page.
	if err := unix.Madvise(b, unix.MADV_DONTNEED_LOCKED); err != nil {
		return fmt.Errorf("this kernel does not know MADV_DONTNEED_LOCKED (Linux 5.18): %w", err)
	}
	err := lockOnFault(b)
	if err == nil {
		return nil
	}
	var lim unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim)
	return fmt.Errorf("mlock of %d bytes: %w; RLIMIT_MEMLOCK is %d: give vnicd CAP_IPC_LOCK, or a limit (systemd: LimitMEMLOCK) of the memory of all VMs", len(b), err, lim.Cur)
}

// counted reports whether the memory counts against the budget.
func (m *mapping) counted() bool { return !m.huge }

// end is the first PA behind the slot.
func (r *region) end() translate.PA { return translate.PA(r.GuestPA + r.Size) }

// granule returns the index of the granule with pa, which is in the slot.
func (r *region) granule(pa translate.PA) uint64 {
	return (uint64(pa) - r.GuestPA + r.m.lead + r.m.base) >> r.m.shift
}

// span returns the beginning and end of granule i in whole.
func (m *mapping) span(i uint64) (from, to uint64) {
	from, to = i<<m.shift, (i+1)<<m.shift
	return max(from, m.base) - m.base, min(to-m.base, m.size)
}

// bytes returns the memory of granule i.
func (m *mapping) bytes(i uint64) []byte {
	from, to := m.span(i)
	return m.whole[from:to:to]
}

// slot returns the part of granule i that is in the slot, and its PA.
func (r *region) slot(i uint64) (translate.PA, []byte) {
	m := r.m
	from, to := m.span(i)
	from, to = max(from, m.lead), min(to, m.lead+r.Size)
	return translate.PA(r.GuestPA + from - m.lead), m.whole[from:to:to]
}

func (r *region) publish(g *granule) error {
	pa, b := r.slot(g.index)
	if err := r.d.space.Map(pa, b); err != nil {
		return err
	}
	g.in |= r.view
	return nil
}

// withdraw is the reverse of publish.
func (r *region) withdraw(g *granule) {
	pa, b := r.slot(g.index)
	if err := r.d.space.Withdraw(pa, uint64(len(b))); err != nil {
		r.d.log.Error("withdrawn memory is not in the table", "err", err) // a bug
	}
	g.in &^= r.view
}

// ErrShort: there is no memory at the moment. The access is repeated; it is not invalid (HF-2).
var ErrShort = errors.New("host memory is short")

// populate makes granule i resident and writable without raising SIGBUS. It reports whether something had to be read,
// from the swap device or the file. Its error is translate.ErrMemoryGone if that memory does not exist any more, or
// ErrShort.
func (m *mapping) populate(i uint64) (read bool, err error) {
	w := m.b.work.Start(worktime.Paging)
	defer w.Stop()
	b := m.bytes(i)
	read, err = m.b.fill(b)
	for tries := 0; tries < 100 && (errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN)); tries++ {
		read, err = m.b.fill(b)
	}
	if errors.Is(err, unix.EINVAL) {
		err = touch(b) // Linux before 5.14
	}
	switch {
	case err == nil:
		return read, nil
	case errors.Is(err, unix.EHWPOISON):
		err = fmt.Errorf("%w: %w", translate.ErrMemoryGone, err)
	case errors.Is(err, unix.EFAULT), errors.Is(err, translate.ErrMemoryGone):
		// An access would raise SIGBUS, for one of these reasons.
		if err = m.lost(i); err == nil {
			err = fmt.Errorf("%w: no free huge page, or the file system or its quota is full", ErrShort)
		}
	default: // ENOMEM: of the machine, or of the memory cgroup
		err = fmt.Errorf("%w: %w", ErrShort, err)
	}
	from, _ := m.span(i)
	return false, fmt.Errorf("%#x bytes at offset %#x of the memory file cannot be made resident: %w", len(b),
		uint64(m.from)+from, err)
}

// populate is Budget.fill, except in tests.
func populate(b []byte) (read bool, err error) {
	runtime.LockOSThread() // the counts are the thread's
	defer runtime.UnlockOSThread()
	before := majorFaults()
	err = unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	return majorFaults() != before, err
}

// majorFaults counts the calling thread's faults that needed the swap device or a file.
func majorFaults() int64 {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return u.Majflt
}

// lost returns an error if granule i cannot come back: the file ends before its end, or its content cannot be read from
// the swap device. Reading allocates nothing, as far as the file has holes.
func (m *mapping) lost(i uint64) error {
	if m.file == nil {
		return fmt.Errorf("%w: the file shrank, or has no memory there", translate.ErrMemoryGone)
	}
	from, to := m.span(i)
	var b [1]byte
	for at := from; at < to; at += m.block {
		n, err := unix.Pread(m.file.fd, b[:], m.from+int64(at))
		for tries := 0; tries < 100 && errors.Is(err, unix.EINTR); tries++ {
			n, err = unix.Pread(m.file.fd, b[:], m.from+int64(at))
		}
		switch {
		case errors.Is(err, unix.EIO):
			return fmt.Errorf("%w: it cannot be read back: %w", translate.ErrMemoryGone, err)
		case err == nil && n == 0:
			return fmt.Errorf("%w: the file ends at offset %#x", translate.ErrMemoryGone, m.from+int64(at))
		}
	}
	return nil
}

// incomplete returns those granules of which the file lacks a page in memory.
func (m *mapping) incomplete(is ...uint64) (holes []uint64) {
	vec := make([]byte, max(1<<m.shift, translate.PageSize)/translate.PageSize)
	for _, i := range is {
		b := m.bytes(i)
		v := vec[:len(b)/translate.PageSize]
		if err := mincore(b, v); err != nil {
			m.log.Warn("mincore", "err", err)
			return nil
		}
		if slices.ContainsFunc(v, func(x byte) bool { return x&1 == 0 }) {
			holes = append(holes, i)
		}
	}
	return holes
}

// discard removes granule i from our page table. The kernel may then swap it; its content stays in the file.
func (m *mapping) discard(i uint64) {
	w := m.b.work.Start(worktime.Paging)
	defer w.Stop()
	b := m.bytes(i)
	err := unix.Madvise(b, unix.MADV_DONTNEED_LOCKED)
	if errors.Is(err, unix.EINVAL) {
		err = unix.Madvise(b, unix.MADV_DONTNEED) // not locked then, see lock
	}
	if err != nil {
		m.log.Error("memory cannot be released", "mapping", hclog.Fmt("%+v", m.key), "granule", i, "err", err)
	}
}

// touch replaces MADV_POPULATE_WRITE. The guest uses its memory meanwhile, so each page is touched by an atomic that
// changes nothing.
func touch(b []byte) error {
	s := translate.NewSpace(translate.HostGVMI)
	if err := s.Map(0, b); err != nil {
		return err
	}
	return translate.Guard(func() error {
		for off := 0; off < len(b); off += translate.PageSize {
			w, m := s.RingUint32(translate.PA(off))
			if !m.OK() {
				return m.Err()
			}
			w.Or(0)
		}
		return nil
	})
}
