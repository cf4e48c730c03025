package translate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// uplinkRig is guest memory in a leaf, and in the first page of the next leaf, with a region over both stages.
type uplinkRig struct {
	host  []byte
	space *Space
	vm    *VM
	phys  *Region // without an MTT
	paged *Region // page 0 is present, page 1 is absent in the guest
}

func newUplinkRig(t *testing.T) *uplinkRig {
	t.Helper()
	x := &uplinkRig{host: hostMem(t, leafSize), space: NewSpace(5)}
	mustMap(t, x.space, 0, x.host)
	mustMap(t, x.space, leafSize, hostMem(t, PageSize))
	x.vm = NewVM(x.space, Limits{})
	var err error
	all := LocalWrite | RemoteRead | RemoteWrite | RemoteAtomic
	if x.phys, err = x.vm.CreateRegion(RegionSpec{Flags: Phys, Access: all, Length: 4096}); err != nil {
		t.Fatal(err)
	}
	if x.paged, err = x.vm.CreateRegion(RegionSpec{PageShift: 12, Access: all, Length: 8192, NPages: 2,
		Flags: DemandPaging}); err != nil {
		t.Fatal(err)
	}
	if err := x.vm.SetPages(x.paged.Handle(), 0, []PA{0}); err != nil {
		t.Fatal(err)
	}
	return x
}

// uplinkAccess is one way to access memory.
type uplinkAccess struct {
	name        string
	write, ring bool
	do          func(x *uplinkRig, pa PA, buf []byte) Miss
}

// uplinkAccesses are all ways of this package to access guest memory.
var uplinkAccesses = []uplinkAccess{
	{"Space.Read", false, false, func(x *uplinkRig, pa PA, b []byte) Miss { return x.space.Read(b, pa) }},
	{"Space.Write", true, false, func(x *uplinkRig, pa PA, b []byte) Miss { return x.space.Write(pa, b) }},
	{"Space.HostRead", false, false, func(x *uplinkRig, pa PA, b []byte) Miss {
		_, m := x.space.HostRead(pa, len(b))
		return m
	}},
	{"Space.Host", true, false, func(x *uplinkRig, pa PA, b []byte) Miss {
		h, m := x.space.Host(pa, len(b))
		copy(h, b)
		return m
	}},
	{"VM.Read", false, false, func(x *uplinkRig, pa PA, b []byte) Miss {
		return x.vm.Read(b, x.paged.LKey(), 0, VA(pa%PageSize&^7), 0)
	}},
	{"VM.Write", true, false, func(x *uplinkRig, pa PA, b []byte) Miss {
		return x.vm.Write(x.paged.LKey(), 0, VA(pa%PageSize&^7), b, RemoteWrite)
	}},
	{"VM.Write, physical", true, false, func(x *uplinkRig, pa PA, b []byte) Miss {
		return x.vm.Write(x.phys.LKey(), 0, VA(pa%PageSize&^7), b, LocalWrite)
	}},
	{"VM.Uint64", true, false, func(x *uplinkRig, pa PA, _ []byte) Miss {
		w, m := x.vm.Uint64(x.paged.LKey(), 0, VA(pa%PageSize&^7), RemoteAtomic)
		if m.OK() {
			w.Add(1)
		}
		return m
	}},
	{"VM.Resolve to read", false, false, func(x *uplinkRig, pa PA, b []byte) Miss {
		_, m := x.vm.Resolve(x.paged.LKey(), 0, VA(pa%PageSize&^7), uint64(len(b)), RemoteRead)
		return m
	}},
	{"VM.Resolve to write", true, false, func(x *uplinkRig, pa PA, b []byte) Miss {
		h, m := x.vm.Resolve(x.paged.LKey(), 0, VA(pa%PageSize&^7), uint64(len(b)), RemoteWrite)
		copy(h, b)
		return m
	}},
	{"Window.Bytes", true, false, func(x *uplinkRig, pa PA, b []byte) Miss {
		w := x.space.Window(pa, 8)
		h := w.Bytes(8)
		if copy(h, b); h == nil && pa != leafSize-4 {
			return Miss{Kind: Blocked}
		}
		return x.space.Write(pa, b)
	}},
	{"Space.RingRead", false, true, func(x *uplinkRig, pa PA, b []byte) Miss { return x.space.RingRead(b, pa) }},
	{"Space.RingWrite", true, true, func(x *uplinkRig, pa PA, b []byte) Miss { return x.space.RingWrite(pa, b) }},
	{"Space.RingUint32", true, true, func(x *uplinkRig, pa PA, _ []byte) Miss {
		_, m := x.space.RingUint32(pa &^ 3)
		return m
	}},
	{"Space.RingUint64", true, true, func(x *uplinkRig, pa PA, _ []byte) Miss {
		_, m := x.space.RingUint64(pa &^ 7)
		return m
	}},
	{"RingWindow", true, true, func(x *uplinkRig, pa PA, b []byte) Miss {
		w := x.space.RingWindow(pa, 16)
		return w.Write8(0, (*[8]byte)(b))
	}},
	{"Ring", true, true, func(x *uplinkRig, _ PA, b []byte) Miss {
		r, err := NewRing(x.space, []PA{0}, 12, 4096)
		if err != nil {
			panic(err)
		}
		if m := r.Read(b, 0); !m.OK() {
			return m
		}
		return r.Write(0, b)
	}},
}

// Every access to data obeys the attribute, every access to a ring works (PF-3); what is refused is counted. The
// attribute holds for Spaces that are bound later, too.
func TestAttribute(t *testing.T) {
	x, other := newUplinkRig(t), newUplinkRig(t)
	var a Attribute
	want := Denied{}
	for i, u := range []Uplink{UplinkReadWrite, UplinkReadOnly, UplinkBlocked, UplinkReadWrite} {
		drains, err := a.Set(u)
		if err != nil || a.Uplink() != u || len(drains) != min(i, 1) {
			t.Fatalf("%v: %v, %d releases, %v", u, a.Uplink(), len(drains), err)
		}
		for _, d := range drains {
			if !d.Done() {
				t.Error("a release waits, but there is no reader")
			}
		}
		if i == 0 {
			a.Bind(x.space)
		}
		for _, c := range uplinkAccesses {
			for _, pa := range []PA{0, leafSize, leafSize - 4} { // in a leaf, in 4 KiB entries, across
				kind := None
				if !c.ring && (u == UplinkBlocked || u == UplinkReadOnly && c.write) {
					kind = Blocked
				}
				before := a.Refused()
				if m := c.do(x, pa, make([]byte, 8)); m.Kind != kind {
					t.Errorf("%v: %s at %v: %v, want %v", u, c.name, pa, m.Kind, kind)
				}
				if m := c.do(other, pa, make([]byte, 8)); !m.OK() { // PF-5
					t.Errorf("%v: %s of another VM: %v", u, c.name, m)
				}
				// A window only says that there is nothing; its user's slow path is counted.
				if counted := a.Refused() != before; counted != (kind == Blocked) && c.name != "Window.Bytes" {
					t.Errorf("%v: %s at %v: refused %v, counted %v", u, c.name, pa, kind == Blocked, counted)
				}
			}
		}
		// A page that is absent in the guest: an access that is refused raises no fault.
		kind := GuestFault
		if u != UplinkReadWrite {
			kind = Blocked
		}
		m := x.vm.Write(x.paged.LKey(), 0, PageSize, make([]byte, 8), RemoteWrite)
		if m.Kind != kind {
			t.Errorf("%v: absent page: %v, want %v", u, m.Kind, kind)
		}
		if kind == Blocked && !strings.Contains(m.Err().Error(), VA(PageSize).String()) {
			t.Errorf("the error does not name the address: %v", m.Err())
		}
		want = a.Refused()
	}
	if want.Reads == 0 || want.Writes <= want.Reads {
		t.Errorf("refused: %+v", want)
	}
	a.Release(x.space)
	if a.Release(x.space); a.Refused() != want {
		t.Errorf("refused: %+v after the front end has gone, %+v before", a.Refused(), want)
	}
	if _, err := a.Set(UplinkBlocked); err != nil {
		t.Fatal(err)
	}
	next := newUplinkRig(t)
	a.Bind(next.space)
	if m := next.space.Read(make([]byte, 1), 0); m.Kind != Blocked {
		t.Errorf("the next attachment: %v", m)
	}
	if _, err := a.Set(numUplinks); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
}

// The names of the configuration, and of JSON.
func TestUplinkNames(t *testing.T) {
	for u := range numUplinks {
		text, err := json.Marshal(u)
		var back Uplink
		if err != nil || json.Unmarshal(text, &back) != nil || back != u || string(text) != `"`+u.String()+`"` {
			t.Errorf("%d: %s, %v, back %v", u, text, err, back)
		}
	}
	for _, name := range []string{"", "RW", "none", "attribute 3"} {
		if u, err := ParseUplink(name); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v, %v", name, u, err)
		}
	}
}

// While loops access memory in every way, the attribute changes: once the releases are done, nothing is accessed under
// the previous attribute (PF-3, EP-3). The canaries show writes, the phase shows reads.
func TestAttributeDrain(t *testing.T) {
	x := newUplinkRig(t)
	var a Attribute
	a.Bind(x.space)
	const canary = 0xa5
	data := x.host[:PageSize]
	var phase atomic.Uint64 // the attribute that holds for whatever begins, in the low bits; each change has another value
	var done atomic.Uint64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for slot := range 4 {
		wg.Go(func() {
			buf := make([]byte, 8)
			window := x.space.Window(0, 8) // stays over many epochs, as that of a virtqueue
			for i := slot; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				at := phase.Load()
				in := Uplink(at & 3)
				tok := x.space.Epochs().Enter(ByLoop(slot))
				for range 4 {
					c := &uplinkAccesses[i%len(uplinkAccesses)]
					if c.ring {
						break
					}
					m := c.do(x, PA(8*slot), buf)
					if b := window.Bytes(8); b != nil {
						copy(b, buf)
						if in != UplinkReadWrite && phase.Load() == at {
							t.Errorf("a window yields data under %v", in)
						}
					}
					if m.OK() {
						if in.forbids(c.write) && phase.Load() == at {
							t.Errorf("%s succeeds under %v", c.name, in)
						}
						done.Add(1)
					}
				}
				x.space.Epochs().Leave(slot, tok)
				runtime.Gosched()
			}
		})
	}
	for i := range 100 {
		u := UplinkReadOnly + Uplink(i%2)
		drains, err := a.Set(u)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range drains {
			if err := d.Wait(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		phase.Store(uint64(4*i) | uint64(u))
		for k := range data {
			data[k] = canary
		}
		for range 20 {
			runtime.Gosched()
		}
		if bytes.Count(data, []byte{canary}) != len(data) {
			t.Fatalf("change %d: written under %v", i, u)
		}
		phase.Store(uint64(4*i) | uint64(UplinkReadWrite))
		if _, err := a.Set(UplinkReadWrite); err != nil {
			t.Fatal(err)
		}
		for n := done.Load(); done.Load() < n+8; {
			runtime.Gosched() // they access it again
		}
	}
	close(stop)
	wg.Wait()
	if r := a.Refused(); r.Reads == 0 || r.Writes == 0 {
		t.Errorf("refused: %+v; the changes met no access", r)
	}
}
