package guestdrv

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

func testMemory(t *testing.T, size uint64) *memory {
	t.Helper()
	m, err := newMemory(size)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Make(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// TestMemory allocates and frees at random and compares with a model: buffers are zeroed, aligned, within the memory
// and disjoint.
func TestMemory(t *testing.T) {
	const pages = 256
	m := testMemory(t, pages<<pageShift)
	rng := rand.New(rand.NewPCG(1, 1))
	owner := [pages]int{}
	zeros, ones := make([]byte, 21*pageSize), bytes.Repeat([]byte{0xff}, 21*pageSize)
	live := map[int]*Buffer{}
	for id := 1; id < 5000; id++ {
		if len(live) > 0 && rng.IntN(2) == 0 {
			for k, b := range live {
				first := (b.PA() - uint64(paBase)) >> pageShift
				for i := range len(b.pagePAs()) {
					if owner[first+uint64(i)] != k {
						t.Fatalf("page %d belongs to two buffers", first+uint64(i))
					}
					owner[first+uint64(i)] = 0
				}
				copy(b.Bytes(), ones)
				b.Close()
				b.Close() // twice is harmless
				delete(live, k)
				break
			}
			continue
		}
		n, align := uint64(1+rng.IntN(20*pageSize)), uint64(pageSize)<<rng.IntN(4)
		b, err := m.alloc(n, align)
		if errors.Is(err, ErrNoMemory) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if uint64(b.Len()) != n || b.PA()%align != 0 || b.PA() < uint64(paBase) ||
			b.PA()+n > uint64(paBase)+pages<<pageShift {
			t.Fatalf("requested %d bytes aligned to %#x, got %d at %#x", n, align, b.Len(), b.PA())
		}
		if !bytes.Equal(b.Bytes(), zeros[:n]) {
			t.Fatal("buffer is not zeroed")
		}
		live[id] = b
		first := (b.PA() - uint64(paBase)) >> pageShift
		for i := range len(b.pagePAs()) {
			owner[first+uint64(i)] = id
		}
	}
	for _, b := range live {
		b.Close()
	}
	if _, err := m.alloc(pages<<pageShift, pageSize); err != nil {
		t.Errorf("everything was freed, but: %v", err)
	}
}

// TestRing compares a ring with a slice under random operations.
func TestRing(t *testing.T) {
	m := testMemory(t, 1<<20)
	for _, n := range []int{1, 2, 3, 4, 100, 127, 128} {
		r, err := newRing(m, n, 100, 0)
		if err != nil {
			t.Fatal(err)
		}
		d := r.desc()
		if int(d.NumElems) <= n || d.NumElems&(d.NumElems-1) != 0 || d.Log2ElemSize != 7 ||
			d.Length != abi.RingLength(d.NumElems, 7) ||
			uint64(d.NPages) != (d.Length+pageSize-1)/pageSize || len(r.pages()) != int(d.NPages) {
			t.Fatalf("ring for %d elements: %+v", n, d)
		}
		rng := rand.New(rand.NewPCG(1, uint64(n)))
		var model []byte
		for i := range 2000 {
			if rng.IntN(2) == 0 {
				e := r.room()
				if full := len(model) == int(r.mask); full != (e == nil) {
					t.Fatalf("%d elements of %d, room %v", len(model), r.mask, e != nil)
				}
				if e != nil {
					if len(e) != 128 {
						t.Fatalf("slot of %d bytes", len(e))
					}
					e[127] = byte(i)
					r.publish()
					model = append(model, byte(i))
				}
			} else if len(model) > 0 {
				c := r.cons.Load()
				if r.elem(c)[127] != model[0] {
					t.Fatal("wrong element")
				}
				r.cons.Store((c + 1) & r.mask)
				model = model[1:]
			}
			if r.pending() != len(model) {
				t.Fatalf("%d pending, want %d", r.pending(), len(model))
			}
		}
		// Whatever the device writes to its index, the driver stays inside the ring.
		for _, c := range []uint32{0xffffffff, 0x80000000, r.mask + 1} {
			r.cons.Store(c)
			r.room()
			if p := r.pending(); p < 0 || p > int(r.mask) {
				t.Fatalf("%d pending with consumer %#x", p, c)
			}
			_ = r.elem(c)
		}
	}
}

func TestParseResponse(t *testing.T) {
	resp := func(status abi.Status, length uint32, payload ...byte) []byte {
		b := make([]byte, abi.SizeResp+len(payload), 64)
		(&abi.Resp{Status: status, Length: length}).Encode(b)
		copy(b[abi.SizeResp:], payload)
		return b
	}
	handle := make([]byte, abi.SizeHandle)
	(&abi.Handle{Handle: 77}).Encode(handle)
	var h abi.Handle
	parse := func(b []byte) error { return decodeResponse(abi.CmdCreatePD, b, uint32(len(b)), &h) }
	if err := parse(resp(abi.StatusOK, abi.SizeHandle, handle...)); err != nil || h.Handle != 77 {
		t.Errorf("good response: %v, %+v", err, h)
	}
	// What a later device may answer (CO-6).
	if err := parse(resp(abi.StatusOK, abi.SizeHandle, 78, 0, 0, 0, 1, 2, 3, 4)); err != nil || h.Handle != 78 {
		t.Errorf("reserved field in use: %v, %+v", err, h)
	}
	var ce *CommandError
	if err := parse(resp(99, 0)); !errors.As(err, &ce) || ce.Status != 99 {
		t.Errorf("unknown status: %v", err)
	}
	if err := parse(resp(abi.StatusNoMemory, 0)); !errors.Is(err, StatusNoMemory) || !errors.As(err, &ce) ||
		ce.Command != "CREATE_PD" {
		t.Errorf("refusal: %v", err)
	} else if err.Error() != "CREATE_PD: limit reached" {
		t.Errorf("refusal reads %q", err)
	}
	for name, b := range map[string][]byte{
		"nothing":          nil,
		"half a header":    make([]byte, 4),
		"no payload":       resp(abi.StatusOK, 0),
		"payload cut":      resp(abi.StatusOK, abi.SizeHandle, handle[:4]...),
		"length too large": resp(abi.StatusOK, 1000, handle...),
	} {
		if err := parse(b); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := decodeResponse(abi.CmdCreatePD, make([]byte, 16), 17, &h); err == nil {
		t.Error("more written than the buffer holds: accepted")
	}
}

// FuzzResponse: no answer of the device makes the driver panic.
func FuzzResponse(f *testing.F) {
	f.Add([]byte{}, uint32(0))
	f.Add(make([]byte, 64), uint32(64))
	f.Add([]byte{0, 0, 0, 0, 120, 0, 0, 0}, uint32(8))
	f.Fuzz(func(t *testing.T, b []byte, written uint32) {
		for _, d := range []decoder{nil, new(abi.Handle), new(abi.DeviceAttr), new(abi.QPAttr), new(abi.Stats)} {
			_ = decodeResponse(abi.CmdQueryQP, b, written, d)
		}
	})
}

// Shared memory goes behind what was shared last, then into the gaps, and never over what is shared.
func TestPlace(t *testing.T) {
	const gib = 1 << 30
	s := &sharedMemory{}
	rng := rand.New(rand.NewPCG(2, 2))
	wrapped := false
	for range 20000 {
		n := uint64(1+rng.IntN(1<<25)) * pageSize // up to 128 GiB
		pa, ok := s.place(n)
		if !ok {
			t.Fatal("no room")
		}
		wrapped = wrapped || pa < s.next
		if pa < sharedBase || pa%gib != 0 || uint64(pa)+n > uint64(translate.MaxPA) {
			t.Fatalf("%d bytes at %#x", n, uint64(pa))
		}
		for _, r := range s.ranges {
			if uint64(pa) < uint64(r.PA)+r.Size+gib && uint64(r.PA) < uint64(pa)+n {
				t.Fatalf("%d bytes at %#x, beside %d at %#x", n, uint64(pa), r.Size, uint64(r.PA))
			}
		}
		r := frontend.Range{PA: pa, Size: n}
		s.next, s.ranges = behind(r), append(s.ranges, r)
		if len(s.ranges) == 63 {
			i := rng.IntN(63)
			s.ranges = append(s.ranges[:i], s.ranges[i+1:]...)
		}
	}
	if !wrapped {
		t.Error("the end of all addresses was not reached")
	}
	if _, ok := s.place(uint64(translate.MaxPA)); ok {
		t.Error("more than all addresses")
	}
}
