package vnet

import (
	"encoding/binary"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// lane is one ring of a guest whose driver only offers the same buffers again, so that the device is measured.
type lane struct {
	q     *virtq.Queue
	mem   []byte
	avail int
	next  uint16
}

const laneSize, laneBuffer = 256, 2048

// newLane makes a ring of buffers of n bytes; readable ones contain raw.
func newLane(t testing.TB, index int, flags uint16, n int, raw []byte) *lane {
	t.Helper()
	const base = translate.PA(1 << 30)
	desc, used, bufs := 0, 8192, 16384
	l := &lane{avail: 4096}
	var err error
	if l.mem, err = unix.Mmap(-1, 0, bufs+laneSize*laneBuffer, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(l.mem) })
	s := translate.NewSpace(1)
	if err := s.Map(base, l.mem); err != nil {
		t.Fatal(err)
	}
	for i := range laneSize {
		d := l.mem[desc+16*i:]
		binary.LittleEndian.PutUint64(d, uint64(base)+uint64(bufs+i*laneBuffer))
		binary.LittleEndian.PutUint32(d[8:], uint32(n))
		binary.LittleEndian.PutUint16(d[12:], flags)
		binary.LittleEndian.PutUint16(l.mem[l.avail+4+2*i:], uint16(i))
		copy(l.mem[bufs+i*laneBuffer:], raw)
	}
	l.q, err = virtq.New(s, virtq.Config{Index: index, Size: laneSize, Desc: base + translate.PA(desc),
		Avail: base + translate.PA(l.avail), Used: base + translate.PA(used), Kick: -1})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *lane) offer(n int) {
	l.next += uint16(n)
	binary.LittleEndian.PutUint16(l.mem[l.avail+2:], l.next)
}

// BenchmarkForward forwards a frame from one guest's ring to another's on one loop, with all data in the cache.
func BenchmarkForward(b *testing.B) {
	const mergeable, writes = FeatureMrgRxbuf, 2
	h := newHost(b, 1, false)
	var devs [2]*Device
	var macs [2]vswitch.MAC
	for i := range devs {
		macs[i] = vswitch.MAC{2, 0, 0, 0, 0, byte(i)}
		port, err := vswitch.NewVMPort(h.net, vswitch.VMPortConfig{Name: string(rune('a' + i)), MAC: macs[i]})
		if err != nil {
			b.Fatal(err)
		}
		if devs[i], err = New(Config{Name: "vm", MAC: macs[i], Loops: h.loops, Pool: h.pool, Port: port}); err != nil {
			b.Fatal(err)
		}
		port.SetNet(devs[i])
		if err := devs[i].SetFeatures(mergeable); err != nil {
			b.Fatal(err)
		}
	}
	tx := newLane(b, 1, 0, headerLen+64, append(make([]byte, headerLen), buildFrame(macs[1], macs[0], 64, 1)...))
	rx := newLane(b, 0, writes, laneBuffer, nil)
	if err := devs[1].StartQueue(0, rx.q); err != nil {
		b.Fatal(err)
	}
	if err := devs[0].StartQueue(1, tx.q); err != nil {
		b.Fatal(err)
	}
	defer devs[1].StopQueue(0)
	defer devs[0].StopQueue(1)
	b.ReportAllocs()
	b.ResetTimer()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var from, to unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &from)
	for i := 0; i < b.N; i += txBudget {
		rx.offer(txBudget)
		tx.offer(txBudget)
		h.loops[0].Step()
	}
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &to)
	b.StopTimer()
	if n := devs[1].cfg.Port.Attachment().Counters.Totals().OutFrames; n < uint64(b.N) {
		b.Fatalf("%d of %d frames arrived", n, b.N)
	}
	b.ReportMetric(float64(to.Utime.Nano()-from.Utime.Nano())/float64(b.N), "cpu-ns/frame")
}
