package vnet

import "fmt"

// BufferError reports a receive buffer that is too small for a virtio header, or that the device must not write (virtio
// 1.2, 5.1.6.3.1).
type BufferError struct {
	Queue              int
	Readable, Writable uint64 // bytes
}

func (e *BufferError) Error() string {
	return fmt.Sprintf("vnet: receive queue %d: a buffer of %d readable and %d writable bytes, want none and at least %d",
		e.Queue, e.Readable, e.Writable, headerLen)
}
