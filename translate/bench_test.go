package translate

import (
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

const benchVA = VA(0x7f0000000000)

// benchVM returns a VM with one region, in which n 4 KiB pages from benchVA on are present. Scattered pages have no
// contiguous neighbours; otherwise they are one physical run. The region is pinned, or implicit.
func benchVM(b *testing.B, n uint64, scattered, implicit bool) (*VM, *Region) {
	b.Helper()
	s := NewSpace(1)
	mustMap(b, s, 1<<32, hostMem(b, int(n)<<PageShift))
	vm := NewVM(s, Limits{})
	sp := RegionSpec{PD: 1, Access: LocalWrite | RemoteWrite | RemoteRead | RemoteAtomic, PageShift: 12,
		IOVA: benchVA, Length: n << PageShift, NPages: n}
	page0 := uint64(0)
	if implicit {
		sp.Flags, sp.IOVA, sp.Length, sp.NPages = DemandPaging|Implicit, 0, MaxImplicit, MaxImplicit>>PageShift
		page0 = uint64(benchVA) >> PageShift
	}
	r, err := vm.CreateRegion(sp)
	if err != nil {
		b.Fatal(err)
	}
	const step = 1 << 12
	pas := make([]PA, 0, step)
	for first := uint64(0); first < n; first += uint64(len(pas)) {
		pas = pas[:0]
		for p := first; p < min(first+step, n); p++ {
			at := p
			if scattered {
				at = p * 7919 % n // a permutation: n is no multiple of this prime
			}
			pas = append(pas, 1<<32+PA(at<<PageShift))
		}
		if err := vm.SetPages(r.Handle(), page0+first, pas); err != nil {
			b.Fatal(err)
		}
	}
	return vm, r
}

var sink byte

// cpuTime reports the processor time per operation beside the elapsed time, which means little on a shared machine.
func cpuTime(b *testing.B) (stop func()) {
	now := func() int64 {
		var r unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_THREAD, &r); err != nil {
			b.Fatal(err)
		}
		return r.Utime.Nano() + r.Stime.Nano()
	}
	runtime.LockOSThread()
	b.ReportAllocs()
	b.ResetTimer()
	start := now()
	return func() {
		b.ReportMetric(float64(now()-start)/float64(b.N), "cpu-ns/op")
		runtime.UnlockOSThread()
	}
}

// BenchmarkResolve measures the lookup from key and VA to host bytes, in a region with the given number of 4 KiB pages.
// "warm" accesses 256 pages at random, spread evenly over the region; "random" all of its pages.
func BenchmarkResolve(b *testing.B) {
	for _, layout := range []string{"contiguous", "scattered", "implicit-contiguous", "implicit-scattered"} {
		for _, n := range []uint64{1, 1000, 100_000, 1_000_000, 10_000_000} {
			b.Run(fmt.Sprintf("%s/pages=%d", layout, n), func(b *testing.B) {
				vm, r := benchVM(b, n, strings.HasSuffix(layout, "scattered"), strings.HasPrefix(layout, "implicit"))
				for name, set := range map[string]uint64{"warm": min(n, 256), "random": n} {
					b.Run(name, func(b *testing.B) {
						stride := n / set
						defer cpuTime(b)()
						x := uint64(1)
						for range b.N {
							x = x*6364136223846793005 + 1442695040888963407
							p := (x >> 32) * set >> 32 * stride
							h, m := vm.Resolve(r.key, 1, benchVA+VA(p<<PageShift)+64, 64, RemoteWrite)
							if !m.OK() {
								b.Fatal(m.Err())
							}
							sink += byte(len(h))
						}
					})
				}
			})
		}
	}
}

func BenchmarkHost(b *testing.B) {
	s := NewSpace(1)
	mustMap(b, s, 0, hostMem(b, 1<<30))
	defer cpuTime(b)()
	x := uint64(1)
	for range b.N {
		x = x*6364136223846793005 + 1442695040888963407
		h, m := s.Host(PA(x>>34), 64)
		if !m.OK() {
			b.Fatal(m.Err())
		}
		sink += byte(len(h))
	}
}

func BenchmarkWrite(b *testing.B) {
	for _, n := range []int{8, 64, 1024, 4096, 65536} {
		for _, layout := range []string{"contiguous", "scattered"} {
			b.Run(fmt.Sprintf("%s/%d", layout, n), func(b *testing.B) {
				vm, r := benchVM(b, 64, layout == "scattered", false)
				src := make([]byte, n)
				b.SetBytes(int64(n))
				defer cpuTime(b)()
				for i := range b.N {
					va := benchVA + VA(i%2*65536)
					if m := vm.Write(r.key, 1, va, src, RemoteWrite); !m.OK() {
						b.Fatal(m.Err())
					}
				}
			})
		}
	}
}

func BenchmarkEnterLeave(b *testing.B) {
	var e Epochs
	defer cpuTime(b)()
	for range b.N {
		e.Leave(1, e.Enter(ByLoop(1)))
	}
}

func BenchmarkEnterLeaveParallel(b *testing.B) {
	var e Epochs
	var next atomic.Int32
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		slot := int(next.Add(1))
		for pb.Next() {
			e.Leave(slot, e.Enter(ByLoop(slot)))
		}
	})
}

func BenchmarkRingRead(b *testing.B) {
	s := NewSpace(1)
	mustMap(b, s, 0, hostMem(b, 1<<21))
	r, err := NewRing(s, []PA{0x3000, 0x1000}, 12, 8192)
	if err != nil {
		b.Fatal(err)
	}
	var wqe [208]byte
	defer cpuTime(b)()
	for i := range b.N {
		if m := r.Read(wqe[:], uint64(i)%16*256); !m.OK() {
			b.Fatal(m.Err())
		}
	}
}

// BenchmarkRegister creates, fills and destroys a region of 1 GiB.
func BenchmarkRegister(b *testing.B) {
	s := NewSpace(1)
	vm := NewVM(s, Limits{})
	const n = 1 << 18
	pas := make([]PA, n)
	for i := range pas {
		pas[i] = PA(i) << PageShift
	}
	for _, fill := range []bool{false, true} {
		b.Run(fmt.Sprintf("fill=%v", fill), func(b *testing.B) {
			b.ReportAllocs()
			for range b.N {
				r, err := vm.CreateRegion(RegionSpec{PageShift: 12, Length: n << 12, NPages: n})
				if err != nil {
					b.Fatal(err)
				}
				if fill {
					if err := vm.SetPages(r.Handle(), 0, pas); err != nil {
						b.Fatal(err)
					}
				}
				if err := vm.DestroyRegion(b.Context(), r.Handle()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRegisterDemand creates and destroys an on-demand region: 1 TiB takes as long as 1 GiB.
func BenchmarkRegisterDemand(b *testing.B) {
	for name, size := range map[string]uint64{"1MiB": 1 << 20, "1GiB": 1 << 30, "1TiB": 1 << 40, "implicit": MaxImplicit} {
		b.Run(name, func(b *testing.B) {
			vm := NewVM(NewSpace(1), Limits{})
			b.ReportAllocs()
			for range b.N {
				r, err := vm.CreateRegion(RegionSpec{Flags: DemandPaging, PageShift: 12, Length: size, NPages: size >> PageShift})
				if err != nil {
					b.Fatal(err)
				}
				if err := vm.DestroyRegion(b.Context(), r.Handle()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkFaultPages measures the table's cost of a one-page fault and its invalidation, in a region with a million
// other present pages.
func BenchmarkFaultPages(b *testing.B) {
	vm, r := benchVM(b, 1_000_000, true, true)
	for name, page := range map[string]uint64{"beside others": uint64(benchVA)>>PageShift + 77, "alone": 1 << 30} {
		b.Run(name, func(b *testing.B) {
			pas := []PA{1 << 32}
			b.ReportAllocs()
			for range b.N {
				if err := vm.SetPages(r.Handle(), page, pas); err != nil {
					b.Fatal(err)
				}
				if err := vm.ClearPages(b.Context(), r.Handle(), page, 1); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkGranule measures the host driver's part: withdrawing and publishing 64 KiB among present memory.
func BenchmarkGranule(b *testing.B) {
	const size, granule = 1 << 30, 64 << 10
	s := NewSpace(1)
	host := hostMem(b, size)
	for off := 0; off < size; off += granule {
		mustMap(b, s, PA(off), host[off:off+granule])
	}
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		off := i * 7919 % (size / granule) * granule
		if err := s.Withdraw(PA(off), granule); err != nil {
			b.Fatal(err)
		}
		if err := s.Map(PA(off), host[off:off+granule]); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkReserve declares a memory slot without pages.
func BenchmarkReserve(b *testing.B) {
	for name, size := range map[string]uint64{"1GiB": 1 << 30, "64GiB": 1 << 36} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for range b.N {
				if err := NewSpace(1).Reserve(0, size); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkFault measures the queue's part of a fault: raise, take, finish.
func BenchmarkFault(b *testing.B) {
	var q FaultQueue
	f := &Fault{Done: func(*Fault, error) {}}
	defer cpuTime(b)()
	for range b.N {
		q.Raise(f)
		q.Finish(q.TryNext(), nil)
	}
}
