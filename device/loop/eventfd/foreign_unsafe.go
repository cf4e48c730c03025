package eventfd

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Signalling an eventfd that another process has, too. O_NONBLOCK belongs to the open file, which both share, so the
// other side can remove it at any time, fill the count, and block whoever writes. What does not help (Linux 6.18):
//
//	pwritev2 with RWF_NOWAIT            EOPNOTSUPP: eventfd has write, not write_iter (reading has: see Take)
//	opening /proc/self/fd/N again       ENXIO: there is no second open file of an eventfd
//	F_GETFL or poll(2) before write(2)  the other side acts between the two calls
//	writing 0, which wakes waiters      user-space waiters see a count of 0; and a count that the kernel has driven to
//	                                    2^64-1 blocks that, too
//	a signal that interrupts write(2)   Go's handlers restart it; a timer for each interrupt costs more than it
//	a thread for each VM                two thread switches for each interrupt
//	io_uring                            an eventfd is signalled without blocking only if it belongs to the ring: a ring
//	                                    for each; and hosts switch io_uring off
//
// What the kernel itself signals, it signals by eventfd_signal, which never waits: the count stays at its maximum. So
// the kernel is asked to complete a request of asynchronous I/O that is complete at once (0 bytes of /dev/null), with
// the eventfd as what is signalled on completion (IOCB_FLAG_RESFD, io_submit(2)). That is one system call, as write is,
// and costs 0.56 us where a write costs 0.22 (BenchmarkRaise, BenchmarkAdd).
//
// A context of asynchronous I/O is used by one thread at a time. A caller that finds one in use takes another, so that
// none waits.

// maxContexts bounds the contexts. There is one for each thread that runs Go code, up to that; so one is free.
const maxContexts = 64

// iocb is the kernel's struct iocb.
type iocb struct {
	_      [2]uint64 // aio_data, aio_key, aio_rw_flags
	opcode uint16
	_      int16 // aio_reqprio
	fd     uint32
	_      [4]uint64 // aio_buf, aio_nbytes, aio_offset, aio_reserved2
	flags  uint32
	resfd  uint32
}

const (
	opRead    = 0 // IOCB_CMD_PREAD
	flagResFD = 1 // IOCB_FLAG_RESFD
)

// events is the kernel's struct aio_ring, which io_setup maps at the address that is the context's handle. The process
// may take completions from it without a system call, as libaio and QEMU do.
type events struct {
	_          [2]uint32 // id, nr
	head, tail atomic.Uint32
	magic      uint32
	_          uint32 // compat_features
	incompat   uint32
	_          uint32 // header_length
}

const eventsMagic = 0xa10a10a1

type aio struct {
	busy   atomic.Bool
	handle uintptr
	events *events
	cb     iocb
	list   *iocb
	_      [32]byte // 128 bytes, so that threads do not share cache lines
}

var (
	contexts [maxContexts]aio
	ready    atomic.Int32 // contexts that may be used

	prepareMu sync.Mutex // taken by Prepare
)

// Hint remembers the context that a caller used last. The zero value is valid.
type Hint struct{ at atomic.Int32 }

// Prepare makes the contexts that Raise uses, unless there are some. After an error Raise writes, which the eventfd's
// other owner can block; or, with fewer contexts than threads, threads may wait for each other.
func Prepare() error {
	prepareMu.Lock()
	defer prepareMu.Unlock()
	if ready.Load() > 0 {
		return nil
	}
	want := min(runtime.GOMAXPROCS(0)+1, maxContexts)
	if err := prepare(want); err != nil {
		return fmt.Errorf("%d of %d contexts of asynchronous I/O: %w", ready.Load(), want, err)
	}
	return nil
}

func prepare(want int) error {
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0) // stays open
	if err != nil {
		return fmt.Errorf("/dev/null: %w", err)
	}
	for i := range want {
		c := &contexts[i]
		if _, _, e := unix.Syscall(unix.SYS_IO_SETUP, 1, uintptr(unsafe.Pointer(&c.handle)), 0); e != 0 {
			err = fmt.Errorf("io_setup: %w", e)
			break
		}
		if c.events = eventsAt(c.handle); c.events.magic != eventsMagic || c.events.incompat != 0 {
			err = errors.New("unknown layout of aio_ring")
			_, _, _ = unix.Syscall(unix.SYS_IO_DESTROY, c.handle, 0, 0)
			break
		}
		c.cb = iocb{opcode: opRead, fd: uint32(fd), flags: flagResFD}
		c.list = &c.cb
		ready.Store(int32(i + 1))
	}
	if ready.Load() == 0 {
		_ = unix.Close(fd)
	}
	return err
}

// eventsAt returns what the kernel has mapped at a context's handle, outside the Go heap.
//
//go:nocheckptr
func eventsAt(handle uintptr) *events { return (*events)(unsafe.Add(unsafe.Pointer(nil), handle)) }

// Raise adds one to the count of fd, an eventfd that another process may have made blocking and filled. It never
// blocks, and allocates nothing. A count at its maximum stays there: who waits has been woken. Without Prepare, or
// where that failed, it is Add.
func Raise(fd int, h *Hint) {
	n := ready.Load()
	if n == 0 {
		Add(fd)
		return
	}
	at := h.at.Load() % n
	for !contexts[at].busy.CompareAndSwap(false, true) {
		at = (at + 1) % n
	}
	h.at.Store(at)
	c := &contexts[at]
	c.cb.resfd = uint32(fd)
	for range 2 {
		_, _, e := unix.RawSyscall(unix.SYS_IO_SUBMIT, c.handle, 1, uintptr(unsafe.Pointer(&c.list)))
		// The completion is of no interest, but occupies a place.
		c.events.head.Store(c.events.tail.Load())
		if e != unix.EAGAIN {
			break
		}
	}
	c.busy.Store(false)
}
