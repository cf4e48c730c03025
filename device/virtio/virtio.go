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

// Device is a virtio device that a transport offers to front ends. The transport calls its methods from the
// connection's goroutine, one at a time, never from a loop.
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
	// Features returns the device-specific virtio feature bits (0..23, 50..63), and RING_PACKED and IN_ORDER if the
	// device supports them. The transport adds its own (VERSION_1, other ring features).
	Features() uint64

	// NumQueues is the number of virtqueues, 1..MaxQueues.
	NumQueues() int

	// ConfigSize returns the size of the configuration space in bytes, at most what the transport supports. 0: the
	// front end keeps the configuration space (as QEMU does for virtio-net).
	ConfigSize() int

	// Connected begins a connection with new, empty guest memory. c is valid until Disconnected returns.
	Connected(c Conn)

	// Disconnected ends the connection. It implies Reset. When it returns, the device no longer accesses the guest's
	// memory.
	Disconnected()

	// SetFeatures sets the negotiated features: a subset of Features, and the transport's bits. It is called while no
	// queue runs; after an error no queue starts.
	SetFeatures(features uint64) error

	// ReadConfig fills dst with the configuration from offset off on; both lie
	// within ConfigSize. WriteConfig is its counterpart; an error refuses the
	// write (read-only fields).
	ReadConfig(dst []byte, off uint32) error
	WriteConfig(off uint32, src []byte) error

	// StartQueue starts queue i. The device may use q until StopQueue(i) has returned. On an error the queue stays
	// stopped.
	StartQueue(i int, q *virtq.Queue) error

	// StopQueue returns once the device no longer accesses the queue. By then every popped chain has been pushed or
	// returned untouched (Unpop).
	StopQueue(i int)

	// Reset returns the device to its initial state: driver gone, guest rebooted.
	Reset()
}

// Conn is a device's view of its front end. A transport implements it.
type Conn interface {
	// Space is the guest's memory under this connection.
	Space() *translate.Space

	// Hold makes all ranges present and keeps them resident until release, which may be called from any goroutine, also
	// after the memory or the connection has gone. It may wait for the host's swap device, so it must not be called on
	// a loop; ctx ends the wait. The error is a *translate.MissError if a range is not guest memory,
	// hostdriver.ErrBudget if too much is held, or that of the memory; then nothing is held. Ranges in ascending order
	// cost least (hostdriver.HoldRanges). The transport itself holds the rings of running queues.
	Hold(ctx context.Context, ranges []translate.Range) (release func(), err error)

	// Memory reports how much of the VM's memory is resident.
	Memory() hostdriver.Status

	// ConfigChanged notifies the driver that the configuration space has changed, if the transport can. It never
	// blocks; a notification before the front end listens is delivered later. It is safe from any goroutine.
	ConfigChanged()
}

// StatusWatcher is implemented by devices that need the virtio device status (DRIVER_OK and so on; virtio 1.2, 2.1).
// Some front ends do not report it (vhost-user without the STATUS protocol feature); then only started queues show
// that there is a driver.
type StatusWatcher interface {
	SetStatus(status uint8)
}

// Continuer is implemented by devices that another process can continue, so that neither the driver nor anybody that
// communicates with it notices the change (CO-1).
type Continuer interface {
	// Save returns the device's state, for Restore in another process; nil if there is none worth it, an error if it is
	// longer than most bytes. It is called when all queues are stopped, and the device does not change guest memory
	// until one starts again.
	Save(most int) ([]byte, error)

	// Restore continues the state that Save returned, possibly in another release: it is checked as if the driver had
	// made it (CO-7). It is called after Connected, when the memory is there and the features are set, and before any
	// queue starts. After an error the device is as it was, and its driver has to begin anew.
	Restore(state []byte) error
}

// Survivor is implemented by devices that another process can continue after this one was killed at any instruction
// (CO-2): their state is in a memory file all the time.
type Survivor interface {
	Continuer

	// Journal returns the memory file that has the device's state from now on; the device remains its owner. It is
	// called after Connected or Revive, before a queue starts. -1: the device keeps no such file (then everything is as
	// for a Continuer).
	Journal() (fd int, err error)

	// Revive continues the state that a killed process left in journal, which the caller closes afterwards. It is called
	// at the same point as Restore, and treats the state as Restore does. Journal follows, and returns another file,
	// which has that state.
	Revive(journal int) error
}

// NetDevice is implemented by network devices, for what only they need of a transport.
type NetDevice interface {
	// SendRARP announces mac on the network after a migration (in vhost-user: VHOST_USER_SEND_RARP).
	SendRARP(mac [6]byte)

	// SetMTU reports the MTU that the guest's configuration space has (in vhost-user: VHOST_USER_NET_SET_MTU).
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
