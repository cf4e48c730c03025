package guestdrv

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
)

// CommandInterrupts returns how often the device has signalled the command queue since the last call.
func (d *Device) CommandInterrupts() uint64 {
	var b [8]byte
	if _, err := unix.Read(d.cmds.q.CallFD(), b[:]); err != nil {
		return 0 // EAGAIN
	}
	return binary.NativeEndian.Uint64(b[:])
}

// Armed returns the CQ's arm word.
func (c *CQ) Armed() uint32 { return c.arm.Load() }

// RingGeometry changes the geometry in the shared header of the send queue, which the device must not trust.
func (q *QP) RingGeometry(log2, mask uint32) {
	le.PutUint32(q.sq.buf.data[0:], log2)
	le.PutUint32(q.sq.buf.data[4:], mask)
}

// SendIndices sets the send queue's indices.
func (q *QP) SendIndices(prod, cons uint32) {
	q.sq.prod.Store(prod)
	q.sq.cons.Store(cons)
}

// RawSendWR makes a request with any opcode, valid or not.
func RawSendWR(id uint64, op Opcode, key uint32, to Datagram) *SendWR {
	return &SendWR{ID: id, op: op, key: key, to: to}
}

// SimpleQueues disables the use of indirect descriptors and event indices.
func (c Config) SimpleQueues() Config {
	c.refuse = virtio.FeatureEventIdx | virtio.FeatureIndirectDesc
	return c
}

// Without makes a driver that does not know some of the device's features.
func (c Config) Without(features uint64) Config {
	c.refuse = features
	return c
}

// Forget makes a driver believe that the device lacks a capability.
func (d *Device) Forget(c Caps) { d.attr.Caps &^= uint64(c) }

// Fail makes a driver behave as if the device had violated the protocol.
func (d *Device) Fail(err error) { d.fail(err) }

// LastCommands are the commands that the slots were used for last. It waits until none is under way.
func (d *Device) LastCommands() map[string]int {
	ops := map[string]int{}
	for range cmdSlots {
		s := <-d.cmds.slots
		defer func() { d.cmds.slots <- s }()
		if s.size > 0 {
			ops[s.op.String()]++
		}
	}
	return ops
}

// SharedRanges returns how many pieces of the program's own memory the driver counts as the device's.
func (d *Device) SharedRanges() int {
	d.shared.mu.Lock()
	defer d.shared.mu.Unlock()
	return len(d.shared.ranges)
}
