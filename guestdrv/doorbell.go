package guestdrv

import (
	"math/rand/v2"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// doorbell is one engine's doorbell area, and its virtqueue, which carries only notifications.
type doorbell struct {
	engine int
	buf    *Buffer
	q      *frontend.Queue
}

func newDoorbell(d *Device, engine int) (*doorbell, error) {
	buf, err := d.mem.alloc(abi.DoorbellSize, pageSize)
	if err != nil {
		return nil, err
	}
	return &doorbell{engine: engine, buf: buf, q: d.fe.Queue(abi.DoorbellQueue(int(d.conf.NumCEQs), engine))}, nil
}

// ring notifies the engine that the QP in slot has new work, whose producer index was stored before. Go's atomics are
// sequentially consistent, so the load of need_wakeup follows the stores of the bits: either the device finds the bits
// in its last check before it sleeps, or this load finds the device's flag.
func (db *doorbell) ring(slot uint32) {
	b := db.buf.data
	atomic64(b, abi.DoorbellBitsOff+int(slot/64)*8).Or(1 << (slot % 64))
	atomic64(b, abi.DoorbellSummaryOff+int(slot/4096)*8).Or(1 << (slot / 64 % 64))
	if atomic32(b, abi.DoorbellNeedWakeupOff).Load() != 0 {
		db.q.Notify()
	}
}

// setNonce puts the driver's nonce where the device expects it, if the device has the feature, before SET_DOORBELLS
// (CO-3). clearNonce says that the driver has ended.
func (d *Device) setNonce() {
	if d.fe.Features()&abi.FeatureNonce != 0 {
		atomic64(d.dbs[0].buf.data, abi.DoorbellNonceOff).Store(rand.Uint64() | 1) // not 0
	}
}

func (d *Device) clearNonce() {
	if len(d.dbs) > 0 {
		atomic64(d.dbs[0].buf.data, abi.DoorbellNonceOff).Store(0)
	}
}
