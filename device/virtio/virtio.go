// Package virtio is the boundary between devices (virtio/vnet, rdma/hca) and the
// transports that carry them to front ends (virtio/vhostuser): a transport calls
// Device and implements Conn. It knows no transport; virtqueues are virtq's.
package virtio

import (
	"context"

	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// Device is a virtio device that a Server offers to front ends. Its methods are
// called from the connection's goroutine, one at a time, never from a loop.
//
//	      Connected            SetFeatures, StartQueue*
//	idle ───────────▶ attached ────────────────────────▶ running
//	 ▲                  │  ▲           Reset                │
//	 └──────────────────┘  └────────────────────────────────┘
//	    Disconnected
//
// Reset and Disconnected find all queues stopped. Memory stays mapped until
// Disconnected has returned, unless the front end withdraws a part of it (then
// translate's epochs drain it, and rings inside it are stopped first).
type Device interface {
	// Features are the device-specific virtio feature bits (0..23, 50..63), and
	// RING_PACKED and IN_ORDER if the device wants them. The transport's
	// (VERSION_1, other ring features) are added by the server.
	Features() uint64

	// NumQueues is the number of virtqueues, 1..MaxQueues.
	NumQueues() int

	// ConfigSize is the size of the configuration space in bytes, at most
	// MaxConfigSize; 0 means that the front end keeps it (as QEMU does for
	// virtio-net) and CONFIG is not offered.
	ConfigSize() int

	// Connected begins a connection with a fresh, empty guest memory. c stays
	// valid until Disconnected returns.
	Connected(c Conn)

	// Disconnected ends it. It implies Reset. When it returns, nobody touches
	// the guest's memory any more.
	Disconnected()

	// SetFeatures tells what was negotiated: a subset of Features plus the
	// transport's bits. It is called while no queue runs; an error keeps the
	// queues from starting.
	SetFeatures(features uint64) error

	// ReadConfig fills dst with the configuration from offset off on; both lie
	// within ConfigSize. WriteConfig is its counterpart; an error refuses the
	// write (read-only fields).
	ReadConfig(dst []byte, off uint32) error
	WriteConfig(off uint32, src []byte) error

	// StartQueue hands over queue i. The device may use q until it has returned
	// from StopQueue(i). On an error the queue stays stopped.
	StartQueue(i int, q *virtq.Queue) error

	// StopQueue returns once nobody touches the queue any more. Every chain that
	// was popped must have been pushed or given back (Unpop) by then.
	StopQueue(i int)

	// Reset returns the device to its initial state: driver gone, guest rebooted.
	Reset()
}

// Conn is what a device gets to know of its front end.
type Conn interface {
	// Space is the guest's memory under this connection.
	Space() *translate.Space

	// Hold makes [pa, pa+n) present and keeps it so until release, which may be
	// called on any goroutine, also after the memory or the connection is gone.
	// It may wait for the host's swap device, so never on a loop; ctx ends the
	// wait. The error is a *translate.MissError for what is no guest memory,
	// hostdriver.ErrBudget when too much is held, or that of the memory. The
	// server itself holds the rings of running queues.
	Hold(ctx context.Context, pa translate.PA, n uint64) (release func(), err error)

	// Memory tells what is resident of the VM's memory.
	Memory() hostdriver.Status

	// ConfigChanged tells the driver that the configuration space changed, if
	// the front end has a back-end channel. It never blocks; notices that
	// arrive before the front end listens are kept. Callable from anywhere.
	ConfigChanged()
}

// StatusWatcher is implemented by devices that want to see the virtio device
// status (DRIVER_OK = 4 and so on). Front ends without the STATUS protocol
// feature never say; then only started queues tell that a driver is there.
type StatusWatcher interface {
	SetStatus(status uint8)
}

// NetDevice is implemented by network devices, for the two messages that only
// they get and for GET_QUEUE_NUM, which counts pairs of queues for them.
type NetDevice interface {
	// SendRARP announces mac on the network (VHOST_USER_SEND_RARP).
	SendRARP(mac [6]byte)

	// SetMTU is the MTU the guest was told (VHOST_USER_NET_SET_MTU).
	SetMTU(mtu uint16)
}

// Feature bits that a transport negotiates for every device (virtio 1.2, chapter 6).
const (
	FeatureIndirectDesc = 1 << 28 // VIRTIO_F_INDIRECT_DESC
	FeatureEventIdx     = 1 << 29 // VIRTIO_F_EVENT_IDX
	FeatureVersion1     = 1 << 32 // VIRTIO_F_VERSION_1
	FeatureRingPacked   = 1 << 34 // VIRTIO_F_RING_PACKED; for devices that offer it
)

// Virtio device status bits (virtio 1.2, 2.1).
const (
	StatusAcknowledge = 1
	StatusDriver      = 2
	StatusDriverOK    = 4
	StatusFeaturesOK  = 8
	StatusNeedsReset  = 64
	StatusFailed      = 128
)
