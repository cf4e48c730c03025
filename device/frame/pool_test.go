package frame

import (
	"math/rand/v2"
	"sync"
	"testing"
)

func newPool(t testing.TB, c Config) *Pool {
	t.Helper()
	p, err := NewPool(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPoolConfig(t *testing.T) {
	for _, c := range []Config{{Count: -1}, {Count: MaxCount + 1}, {Capacity: -1}, {Capacity: MinCapacity - 1},
		{Capacity: MaxCapacity + 1}} {
		if _, err := NewPool(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
	p := newPool(t, Config{Count: 3, Capacity: 1000})
	if p.Count() != 3 || p.Capacity() < 1000 {
		t.Errorf("count %d, capacity %d", p.Count(), p.Capacity())
	}
	if d := newPool(t, Config{Count: 1}); d.Capacity() < DefaultCapacity {
		t.Errorf("default capacity %d", d.Capacity())
	}
}

func TestPoolExhaustion(t *testing.T) {
	const n = 10
	p := newPool(t, Config{Count: n, Capacity: MinCapacity})
	seen := map[*Buf]bool{}
	for range n {
		b := p.Get()
		if b == nil || seen[b] {
			t.Fatalf("got %p, seen %v", b, seen[b])
		}
		seen[b] = true
	}
	for range 3 {
		if b := p.Get(); b != nil {
			t.Fatal("got a buffer from an empty pool")
		}
	}
	if p.Exhausted() != 3 || p.InUse() != n {
		t.Errorf("exhausted %d, in use %d", p.Exhausted(), p.InUse())
	}
	for b := range seen {
		b.Free()
	}
	if p.InUse() != 0 {
		t.Errorf("in use %d", p.InUse())
	}
	for range n {
		if p.Get() == nil {
			t.Fatal("a freed buffer did not come back")
		}
	}
}

// However many callers keep as much as they may for long, others have room.
func TestKeepLong(t *testing.T) {
	for _, callers := range []int{1, 3} {
		p := newPool(t, Config{Count: 40, Capacity: MinCapacity})
		own := make([]int, callers)
		for range 40 {
			for i := range own {
				if p.KeepLong(own[i]) {
					own[i]++
				}
			}
		}
		left := 0
		for p.Keep() {
			left++
		}
		if want := 20 / (callers + 1); left < want || own[callers-1] < want || p.KeepLong(0) {
			t.Errorf("%v are kept, %d are left", own, left)
		}
		p.Unkeep(left)
		for _, n := range own {
			p.Unkeep(n)
		}
		if !p.KeepLong(19) || p.KeepLong(19) {
			t.Error("the bound")
		}
	}
}

func TestRefs(t *testing.T) {
	p := newPool(t, Config{Count: 1, Capacity: MinCapacity})
	b := p.Get()
	if b.Shared() {
		t.Error("fresh buffer is shared")
	}
	b.Ref()
	if !b.Shared() {
		t.Error("two owners, not shared")
	}
	b.Free()
	if p.Get() != nil {
		t.Error("freed with an owner left")
	}
	b.Free()
	mustPanic(t, "double Free", b.Free)
	p = newPool(t, Config{Count: 1, Capacity: MinCapacity})
	b = p.Get()
	b.Free()
	mustPanic(t, "Ref after Free", b.Ref)
}

func mustPanic(t *testing.T, what string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s did not panic", what)
		}
	}()
	f()
}

// A buffer behaves like a slice in the middle of a larger one.
func TestBufModel(t *testing.T) {
	p := newPool(t, Config{Count: 1, Capacity: 300})
	b := p.Get()
	model := make([]byte, Headroom+p.Capacity())
	off, n := Headroom, 0
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		k := rng.IntN(200) - 5
		switch rng.IntN(6) {
		case 0:
			got := b.Prepend(k)
			if ok := k >= 0 && k <= off; ok != (got != nil) && k != 0 {
				t.Fatalf("Prepend(%d) = %v with headroom %d", k, got != nil, off)
			} else if ok {
				off, n = off-k, n+k
				for i := range got {
					got[i] = byte(rng.Uint32())
					model[off+i] = got[i]
				}
			}
		case 1:
			ok := k >= 0 && k <= n
			if b.TrimFront(k) != ok {
				t.Fatalf("TrimFront(%d) of %d", k, n)
			}
			if ok {
				off, n = off+k, n-k
			}
		case 2:
			ok := k >= 0 && k <= len(model)-off
			if b.SetLen(k) != ok {
				t.Fatalf("SetLen(%d)", k)
			}
			if ok {
				n = k
			}
		case 3:
			data := make([]byte, max(k, 0))
			for i := range data {
				data[i] = byte(rng.Uint32())
			}
			ok := len(data) <= len(model)-off-n
			if b.Append(data) != ok {
				t.Fatalf("Append(%d)", len(data))
			}
			if ok {
				copy(model[off+n:], data)
				n += len(data)
			}
		case 4:
			if rng.IntN(20) == 0 {
				b.Reset()
				off, n = Headroom, 0
			}
		case 5:
			if len(b.Room()) != len(model)-off || b.Cap() != len(model)-off {
				t.Fatalf("room %d, cap %d, want %d", len(b.Room()), b.Cap(), len(model)-off)
			}
		}
		if b.Len() != n || b.Headroom() != off || string(b.Bytes()) != string(model[off:off+n]) {
			t.Fatalf("length %d, headroom %d; want %d, %d", b.Len(), b.Headroom(), n, off)
		}
	}
}

// Around returns the bytes around a frame, as far as the buffer reaches, and changes nothing.
func TestAround(t *testing.T) {
	p, err := NewPool(Config{Count: 1, Capacity: 256})
	if err != nil {
		t.Fatal(err)
	}
	b := p.Get()
	b.Append([]byte("frame"))
	room := b.Cap() - b.Len()
	for before := range Headroom + 2 {
		for _, behind := range []int{0, 1, room, room + 1} {
			d := b.Around(before, behind)
			if before > Headroom || behind > room {
				if d != nil {
					t.Fatalf("%d bytes before and %d behind the frame", before, behind)
				}
				continue
			}
			if len(d) != before+5+behind || cap(d) != len(d) || string(d[before:before+5]) != "frame" ||
				string(b.Bytes()) != "frame" {
				t.Fatalf("%d before, %d behind: %q of %q", before, behind, d, b.Bytes())
			}
		}
	}
}

// Many goroutines get, share, mark and free buffers; a buffer with two unrelated owners would show by its mark.
func TestPoolConcurrent(t *testing.T) {
	p := newPool(t, Config{Count: 16, Capacity: MinCapacity})
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			var held []*Buf
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for range 20000 {
				if rng.IntN(2) == 0 {
					if b := p.Get(); b != nil {
						b.SetLen(1)
						b.Bytes()[0] = byte(g)
						held = append(held, b)
					}
				} else if n := len(held); n > 0 {
					i := rng.IntN(n)
					b := held[i]
					held[i] = held[n-1]
					held = held[:n-1]
					if b.Bytes()[0] != byte(g) {
						t.Errorf("buffer of %d has mark %d", g, b.Bytes()[0])
					}
					b.Ref()
					b.Free()
					b.Free()
				}
			}
			for _, b := range held {
				b.Free()
			}
		})
	}
	wg.Wait()
	if n := p.InUse(); n != 0 {
		t.Errorf("%d in use", n)
	}
	got := map[*Buf]bool{}
	for b := p.Get(); b != nil; b = p.Get() {
		got[b] = true
	}
	if len(got) != p.Count() {
		t.Errorf("%d of %d buffers are left", len(got), p.Count())
	}
}

func BenchmarkGetFree(b *testing.B) {
	p := newPool(b, Config{})
	b.ReportAllocs()
	for b.Loop() {
		p.Get().Free()
	}
}

func BenchmarkGetFreeParallel(b *testing.B) {
	p := newPool(b, Config{})
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			p.Get().Free()
		}
	})
}

// Big buffers are a separate class for frames that do not fit the others, and return to it.
func TestBigBuffers(t *testing.T) {
	if _, err := NewPool(Config{Big: -1}); err == nil {
		t.Error("a negative number of big buffers was accepted")
	}
	p := newPool(t, Config{Count: 2, Capacity: 1000})
	if p.Largest() != p.Capacity() || p.GetFor(p.Capacity()+1) != nil {
		t.Error("a pool without big buffers has some")
	}
	p = newPool(t, Config{Count: 2, Capacity: 1000, Big: 1})
	if p.Largest() < BigCapacity || p.GetFor(p.Largest()+1) != nil {
		t.Errorf("largest %d", p.Largest())
	}
	small, big := p.GetFor(p.Capacity()), p.GetFor(p.Capacity()+1)
	if small.Cap() != p.Capacity() || big.Cap() != p.Largest() || big.Headroom() != Headroom {
		t.Errorf("%d %d", small.Cap(), big.Cap())
	}
	if small.Pool() != p || big.Pool() != p {
		t.Error("buffers do not know their pool")
	}
	if p.GetFor(BigCapacity) != nil || p.Exhausted() != 1 || p.InUse() != 2 || p.Count() != 2 {
		t.Errorf("exhausted %d, in use %d, count %d", p.Exhausted(), p.InUse(), p.Count())
	}
	big.SetLen(BigCapacity)
	big.Offload = Offload{Need: NeedAll, GSOSize: 1000, Payload: 100}
	if big.WireLen() != 1100 || big.Segments() != (BigCapacity-100+999)/1000 {
		t.Errorf("%d bytes, %d segments", big.WireLen(), big.Segments())
	}
	big.SetLen(500)
	if big.WireLen() != 500 || big.Segments() != 1 {
		t.Errorf("%d bytes, %d segments", big.WireLen(), big.Segments())
	}
	big.Free()
	small.Free()
	if p.InUse() != 0 {
		t.Errorf("%d in use", p.InUse())
	}
	if b := p.GetFor(BigCapacity); b == nil || b.Offload != (Offload{}) || b.WireLen() != 0 {
		t.Error("a buffer comes with the offloads of its last frame")
	}
}
