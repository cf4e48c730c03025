package virtq

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

const (
	memBase = translate.PA(0x10000)
	memSize = 1 << 20
)

// guest is a guest's memory and the driver's side of one ring in it, independent of the device's code: plain bytes at
// literal offsets.
type guest struct {
	t      testing.TB
	mem    []byte
	space  *translate.Space
	size   int
	packed bool

	desc, avail, used translate.PA
}

func newGuest(t testing.TB, size int) *guest {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, memSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	g := &guest{t: t, mem: mem, space: translate.NewSpace(7), size: size}
	if err := g.space.Map(memBase, mem); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.space.Unmap(memBase, memSize); err != nil {
			t.Error(err)
		}
		if err := unix.Munmap(mem); err != nil {
			t.Error(err)
		}
	})
	g.desc = memBase
	g.avail = g.desc + translate.PA(16*size)
	g.used = (g.avail + translate.PA(6+2*size) + 3) &^ 3
	return g
}

func (g *guest) queue(mod func(*Config)) *Queue {
	g.t.Helper()
	c := Config{Index: 3, Size: g.size, Desc: g.desc, Avail: g.avail, Used: g.used, Packed: g.packed, Kick: -1}
	if g.packed {
		c.Base = 1 << 15 // wrap counters start at 1
	}
	if mod != nil {
		mod(&c)
	}
	q, err := New(g.space, c)
	if err != nil {
		g.t.Fatal(err)
	}
	return q
}

func (g *guest) at(pa translate.PA, n int) []byte { return g.mem[pa-memBase:][:n] }

func (g *guest) put16(pa translate.PA, v uint16) { binary.LittleEndian.PutUint16(g.at(pa, 2), v) }
func (g *guest) get16(pa translate.PA) uint16    { return binary.LittleEndian.Uint16(g.at(pa, 2)) }
func (g *guest) get32(pa translate.PA) uint32    { return binary.LittleEndian.Uint32(g.at(pa, 4)) }

func (g *guest) setDesc(table translate.PA, i int, addr uint64, n uint32, flags, next uint16) {
	b := g.at(table+translate.PA(16*i), 16)
	binary.LittleEndian.PutUint64(b, addr)
	binary.LittleEndian.PutUint32(b[8:], n)
	binary.LittleEndian.PutUint16(b[12:], flags)
	binary.LittleEndian.PutUint16(b[14:], next)
}

// offer stores a head as available ring entry number idx and advances the index.
func (g *guest) offer(idx uint16, head uint16) {
	g.put16(g.avail+4+translate.PA(2*(int(idx)%g.size)), head)
	g.put16(g.avail+2, idx+1)
}

func (g *guest) usedIdx() uint16 { return g.get16(g.used + 2) }

func (g *guest) usedElem(idx uint16) (id, n uint32) {
	pa := g.used + 4 + translate.PA(8*(int(idx)%g.size))
	return g.get32(pa), g.get32(pa + 4)
}

// event is an eventfd with a notifier.
type event struct {
	fd int
	n  *Notifier
}

func newEvent(t testing.TB) *event {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	e := &event{fd: fd, n: NewNotifier()}
	if err := e.n.Set(fd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.n.Close()
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	})
	return e
}

// take returns and clears the number of signals.
func (e *event) take(t testing.TB) uint64 {
	t.Helper()
	var b [8]byte
	_, err := unix.Read(e.fd, b[:])
	if err == unix.EAGAIN {
		return 0
	}
	if err != nil {
		t.Fatal(err)
	}
	return binary.NativeEndian.Uint64(b[:])
}
