package ivshmem

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio/vhostuser"
)

// The mirror of guestdrv/linux/vnicd_ivshmem.h; a test compares both.
const (
	magic     = 0x6873766963696e76 // "vnicivsh"
	version   = 1
	regsSize  = 65536
	MaxQueues = 32
	maxConfig = 256

	devicePeer = 1 // our peer number; QEMU's is 0
	maxSize    = 256

	ended = 0xffffffff // as answer: the device has ended, and accesses no memory

	// Offsets of the device's part.
	offMagic      = 0
	offVersion    = 8
	offVirtioID   = 12
	offPeer       = 16
	offNumQueues  = 20
	offNumVectors = 24
	offConfigSize = 28
	offFeatures   = 32
	offMaxSize    = 40
	offAnswer     = 64
	offResult     = 68
	offStatus     = 72
	offGeneration = 76
	offConfig     = 1280

	// Offsets of the driver's part, which begins at driverPart.
	driverPart      = 128
	offRequest      = 128
	offDriverStatus = 132
	offDriverFeat   = 136
	offQueue        = 192
	queueLen        = 32
	driverEnd       = offQueue + queueLen*MaxQueues
)

// barSize is the size of BAR 2: the registers, then the device's state while the VM does not run (state.go). What is
// not used takes no memory.
const barSize = vhostuser.MaxTransfer

var le = binary.LittleEndian

// bar is the memory of BAR 2, which QEMU and the guest have mapped, too.
type bar struct {
	fd         int
	ino        uint64
	mem        []byte
	generation uint32 // of config space, as written last
}

const barSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// newBar makes the memory. Its size cannot change, so accesses never fault.
func newBar() (*bar, error) {
	fd, err := unix.MemfdCreate("vnicd-bar2", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memory of BAR 2: %w", err)
	}
	if err = unix.Ftruncate(fd, barSize); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, barSeals)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("memory of BAR 2: %w", err)
	}
	return adoptBar(fd)
}

// adoptBar takes over fd, the memory that newBar has made, in this process or in another.
func adoptBar(fd int) (b *bar, err error) {
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
			b, err = nil, fmt.Errorf("memory of BAR 2: %w", err)
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	// Up to release 0.1 it was only the registers.
	if err != nil || seals&barSeals != barSeals || st.Size != barSize && st.Size != regsSize {
		return nil, fmt.Errorf("%d bytes with seals %#x (%v), want %d and %#x", st.Size, seals, err, barSize, barSeals)
	}
	b = &bar{fd: fd, ino: st.Ino}
	if b.mem, err = unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	b.generation = b.word(offGeneration).Load() &^ 1 // any number is right that the driver has not just read
	return b, nil
}

func (b *bar) close() {
	_ = unix.Munmap(b.mem)
	_ = unix.Close(b.fd)
}

func (b *bar) word(off int) *atomic.Uint32 { return word(b.mem[off:]) }

func (b *bar) put32(off int, v uint32) { b.word(off).Store(v) }

// request is a copy of the driver's part.
type request struct {
	status   uint32
	features uint64
	queues   [MaxQueues]queue
}

// queue is where the driver has a split ring, by guest physical addresses. size 0: the queue is not used.
type queue struct {
	desc, avail, used uint64
	size              uint16
}

// request copies the driver's part.
func (b *bar) request() (r request) {
	var c [driverEnd - driverPart]byte
	copy(c[:], b.mem[driverPart:driverEnd])
	at := func(off int) []byte { return c[off-driverPart:] }
	r.status, r.features = le.Uint32(at(offDriverStatus)), le.Uint64(at(offDriverFeat))
	for i := range r.queues {
		q := at(offQueue + i*queueLen)
		r.queues[i] = queue{desc: le.Uint64(q), avail: le.Uint64(q[8:]), used: le.Uint64(q[16:]), size: le.Uint16(q[24:])}
	}
	return r
}

// setConfig shows the driver another config space: the generation is odd meanwhile.
func (b *bar) setConfig(c []byte) {
	b.put32(offGeneration, b.generation+1)
	copy(b.mem[offConfig:offConfig+maxConfig], c)
	b.generation += 2
	b.put32(offGeneration, b.generation)
}
