package vswitch

import (
	"math/bits"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
)

// fdb is the forwarding database of one network: MAC and VLAN -> port, remote, last seen. Any loop may look up and
// learn at any time; none waits.
//
// It is a set-associative table as in switch hardware: a MAC may be in one of two buckets of seven slots, chosen by a
// hash with a secret seed, so that a guest that chooses its MACs cannot fill the bucket of another MAC. The table has
// twice as many slots as its maximum of entries.
//
// Each bucket is a sequence lock. A reader reads the version, then the entry, and uses it if the version is still the
// same and even. A writer makes the version odd by compare-and-swap; if another writer has it, a learning loop skips
// learning this time (the next frame will do), while the control plane retries. Refreshing an entry's age, the common
// case, is one compare-and-swap of the value, at most once per second and entry.
type fdb struct {
	buckets []bucket
	mask    uint64
	seed    uint64
	hand    atomic.Uint64 // next bucket to sweep
	// vlans has a bit for each VLAN that any key had, so that finding an address in all VLANs needs no walk of the
	// table.
	vlans [4096 / 64]atomic.Uint64
}

const bucketSlots = 7

type bucket struct {
	version atomic.Uint64
	keys    [bucketSlots]atomic.Uint64 // packed Address; 0 = free (the zero MAC is never learnt)
	vals    [bucketSlots]atomic.Uint64
	_       [8]byte
}

// value packs an entry: port 14 bits, yields 1 bit, static 1 bit, remote 16 bits, last seen in seconds 32 bits.
type value uint64

func makeValue(port uint16, static bool, remote uint16, seen uint32) value {
	v := value(port)<<50 | value(remote)<<32 | value(seen)
	if static {
		v |= 1 << 48
	}
	return v
}

// yielding marks a static value as one that ports other than tunnels may take over.
func (v value) yielding() value { return v | 1<<49 }

func (v value) port() uint16   { return uint16(v >> 50) }
func (v value) yields() bool   { return v>>49&1 != 0 }
func (v value) static() bool   { return v>>48&1 != 0 }
func (v value) remote() uint16 { return uint16(v >> 32) }
func (v value) seen() uint32   { return uint32(v) }

// place returns all of a value but its age.
func (v value) place() uint64 { return uint64(v) >> 32 }

func (v value) expired(now, maxAge uint32) bool {
	// now may be a second behind seen if another loop refreshed the entry.
	return !v.static() && int32(now-v.seen()) > int32(maxAge)
}

func newFDB(maxEntries int) *fdb {
	n := uint64(1) << bits.Len64(uint64(2*maxEntries/bucketSlots))
	return &fdb{buckets: make([]bucket, n), mask: n - 1, seed: rand.Uint64()}
}

// pair returns the two buckets of a key, which may be the same.
func (t *fdb) pair(key uint64) (a, b *bucket) {
	hi, lo := bits.Mul64(key^t.seed, 0x9e3779b97f4a7c15)
	h := (hi ^ lo) * 0xd6e8feb86659fd93
	return &t.buckets[h>>32&t.mask], &t.buckets[(h^h>>29)&t.mask]
}

// find returns the slot and value of key; ok is false if it is not there.
func (t *fdb) find(key uint64) (b *bucket, slot int, v value, ok bool) {
	a, c := t.pair(key)
	if slot, v, ok = a.find(key); ok {
		return a, slot, v, true
	}
	if slot, v, ok = c.find(key); ok {
		return c, slot, v, true
	}
	return nil, 0, 0, false
}

// readRetries bounds a reader's retries after interference by writers. Then the entry counts as unknown, and the frame
// is flooded.
const readRetries = 64

func (b *bucket) find(key uint64) (int, value, bool) {
	for range readRetries {
		v1 := b.version.Load()
		for i := range b.keys {
			if b.keys[i].Load() != key {
				continue
			}
			val := b.vals[i].Load()
			if v1&1 == 0 && b.version.Load() == v1 {
				return i, value(val), true
			}
		}
		if v1&1 == 0 && b.version.Load() == v1 {
			return 0, 0, false
		}
	}
	return 0, 0, false
}

func (b *bucket) tryLock() bool {
	v := b.version.Load()
	return v&1 == 0 && b.version.CompareAndSwap(v, v+1)
}

// lock is for the control plane: loops hold a bucket only for some nanoseconds.
func (b *bucket) lock() {
	for !b.tryLock() {
		runtime.Gosched()
	}
}

func (b *bucket) unlock() { b.version.Add(1) }

func (b *bucket) slotOf(key uint64) int {
	for i := range b.keys {
		if b.keys[i].Load() == key {
			return i
		}
	}
	return -1
}

// lockPair locks both buckets of a key for an insertion. It never waits for a second lock while it holds a first, so no
// lock order is needed.
func (t *fdb) lockPair(key uint64, wait bool) (a, c *bucket, ok bool) {
	a, c = t.pair(key)
	if wait {
		for !t.tryPair(a, c) {
			runtime.Gosched()
		}
		return a, c, true
	}
	return a, c, t.tryPair(a, c)
}

func (t *fdb) tryPair(a, c *bucket) bool {
	if !a.tryLock() {
		return false
	}
	if a != c && !c.tryLock() {
		a.unlock()
		return false
	}
	return true
}

func unlockPair(a, c *bucket) {
	a.unlock()
	if a != c {
		c.unlock()
	}
}

type putResult uint8

const (
	putDone    putResult = iota // stored; old is the value replaced, 0 = none
	putBusy                     // another writer holds a bucket
	putNoSpace                  // both buckets are full of live entries
	putDenied                   // decide refused
)

// put stores v under key. decide gets the present value (0 = none) while the buckets are locked, and may refuse. Slots
// with expired entries are reused; evict is called for each entry replaced that way.
func (t *fdb) put(key uint64, v value, wait bool, expired func(value) bool, decide func(old value) bool,
	evict func(value)) putResult {
	a, c, ok := t.lockPair(key, wait)
	if !ok {
		return putBusy
	}
	defer unlockPair(a, c)
	for _, b := range [2]*bucket{a, c} {
		if i := b.slotOf(key); i >= 0 {
			old := value(b.vals[i].Load())
			if !decide(old) {
				return putDenied
			}
			b.vals[i].Store(uint64(v))
			return putDone
		}
	}
	if !decide(0) {
		return putDenied
	}
	// Use the emptier bucket.
	fa, na := a.free(expired)
	fc, nc := c.free(expired)
	b, i := a, fa
	if nc > na {
		b, i = c, fc
	}
	if i < 0 {
		return putNoSpace
	}
	if b.keys[i].Load() != 0 {
		evict(value(b.vals[i].Load()))
	}
	if vlan := keyVLAN(key); vlan != 0 {
		if w, bit := &t.vlans[vlan/64], uint64(1)<<(vlan%64); w.Load()&bit == 0 {
			w.Or(bit)
		}
	}
	b.vals[i].Store(uint64(v))
	b.keys[i].Store(key)
	return putDone
}

// free returns a usable slot (-1 = none) and their number; the bucket is locked.
func (b *bucket) free(expired func(value) bool) (slot, n int) {
	slot = -1
	for i := range b.keys {
		empty := b.keys[i].Load() == 0
		if empty || expired(value(b.vals[i].Load())) {
			n++
			if slot < 0 || empty {
				slot = i
			}
		}
	}
	return slot, n
}

// removeIf deletes the matching entries of one bucket, calls gone with each value, and returns their number. Without
// wait it gives up if a writer has the bucket.
func (b *bucket) removeIf(wait bool, match func(key uint64, v value) bool, gone func(value)) (n int) {
	if wait {
		b.lock()
	} else if !b.tryLock() {
		return 0
	}
	for i := range b.keys {
		k := b.keys[i].Load()
		if k == 0 {
			continue
		}
		if v := value(b.vals[i].Load()); match(k, v) {
			b.keys[i].Store(0)
			n++
			gone(v)
		}
	}
	b.unlock()
	return n
}

// tagged calls f with an address in each VLAN that was ever used, except 0.
func (t *fdb) tagged(mac uint64, f func(key uint64)) {
	for i := range t.vlans {
		for w := t.vlans[i].Load(); w != 0; w &= w - 1 {
			f(mac | uint64(64*i+bits.TrailingZeros64(w))<<48)
		}
	}
}

// each calls f for every entry, with a consistent view of each bucket. Control plane only.
func (t *fdb) each(f func(key uint64, v value)) {
	for i := range t.buckets {
		b := &t.buckets[i]
		var keys, vals [bucketSlots]uint64
		for {
			v1 := b.version.Load()
			for j := range b.keys {
				keys[j], vals[j] = b.keys[j].Load(), b.vals[j].Load()
			}
			if v1&1 == 0 && b.version.Load() == v1 {
				break
			}
			runtime.Gosched()
		}
		for j, k := range keys {
			if k != 0 {
				f(k, value(vals[j]))
			}
		}
	}
}
