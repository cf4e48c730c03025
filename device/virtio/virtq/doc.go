// Package virtq is the device's side of a virtqueue in guest memory, split or packed (virtio 1.2, sections 2.7 and
// 2.8), with indirect descriptors, event-idx, and buffers consumed and returned in any order.
//
// Every access goes through translate.Space, so a ring or a buffer outside all memory slots yields a typed error, never
// a fault of this process. The guest may write rings and descriptors at any time: each word is copied in once,
// validated, and used from the copy.
//
// # Ownership
//
// A Queue is used by one goroutine at a time (one loop, or one control goroutine). Others may only call Kick and Fail
// meanwhile. Every method that accesses guest memory must run inside an epoch of the queue's space
// (Queue.Space().Epochs(), EP-1), and so on a thread that survives a vanished page (a loop, or Epochs.Within).
//
// # Order of use
//
//	for {
//		ok, err := q.Pop(&c)          // take a chain
//		c.ReadAll(req); c.WriteAll(resp)
//		q.Push(&c, written)           // stage it as used
//	}
//	q.Signal()                        // publish all staged chains, interrupt if wanted
//
// To sleep: SetNotify(true), Pending once more, then wait for KickFD.
package virtq
