package guestdrv

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// Pager returns a Pager for regions of the buffer's own addresses (RegisterOnDemand from Addr on). It provides a page
// once the program has it: PageIn reads it in this process first. So a userfaultfd that makes the program's pages makes
// those that the device needs, too (PF-4, ODP-1). Memory with a userfaultfd must be registered in this way only: in
// others the device finds zeros where a page has not been made.
//
// A page that the program itself cannot read is an invalid address for the device (PF-13). While nobody answers the
// userfaultfd, PageIn waits until its context ends, and leaves a thread behind that waits on. Another process, or a
// thread of C, is the better place to answer it: a goroutine that waits for a page inside copy delays the garbage
// collector, and that all goroutines.
func (b *Buffer) Pager() Pager {
	data := b.data
	return PagerFunc(func(ctx context.Context, f PageFault, pas []uint64) error {
		offset := f.VA - b.va
		if offset >= uint64(len(data)) {
			return invalid("page at %#x of a buffer of %d bytes at %#x", f.VA, len(data), b.va)
		}
		part := data[offset:min(offset+uint64(len(pas))<<pageShift, uint64(len(data)))]
		there := make(chan error, 1)
		go func() { there <- populate(part) }()
		select {
		case err := <-there:
			if err != nil {
				return fmt.Errorf("%d bytes at %#x: the program cannot read them itself: %w", len(part), f.VA, err)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
		for i := range (len(part) + pageSize - 1) >> pageShift {
			pas[i] = b.pa + offset + uint64(i)<<pageShift
		}
		return nil
	})
}

// populate reads a byte of each page of memory, which begins at a page.
func populate(memory []byte) error {
	// A system call leaves the processor to other goroutines, such as one that answers a userfaultfd.
	err := unix.Madvise(memory, unix.MADV_POPULATE_READ)
	// EINVAL: Linux before 5.14. EFAULT: the userfaultfd serves accesses of user space only, or there is no page.
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EFAULT) {
		return err
	}
	if translate.Guard(func() error { touch(memory); return nil }) != nil {
		return unix.EFAULT
	}
	return nil
}

// touch reads a byte of each page, whatever it is: the program may be writing to it.
//
//go:norace
func touch(memory []byte) {
	sum := byte(0)
	for i := 0; i < len(memory); i += pageSize {
		sum += memory[i]
	}
	runtime.KeepAlive(sum)
}
