// Side: control

package hca

import (
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// When the command queue has stopped, either the VM is paused, and its driver will go on, or the driver has gone:
// unloaded, or the VM has been reset. QEMU reports no reset of its generic device: it only stops the queues. Peers are
// held while the VM is paused (CO-3), and must not be for a driver that has gone. What tells the two apart:
//
//	the driver's nonce is not in its place   gone; looked at when the queue stops, during the stop, and when it starts
//	the VM's network card was reset          gone (MachineReset)
//	the queue starts at 0                    gone: there is a new driver
//	none of it                               paused
//
// A guest that changes its nonce loses its own state, and nobody else's.

// lookInterval is how often the nonce is looked at while the VM is paused: after a reset that the driver was not told
// of, something else may overwrite it. The orderly end of a driver is found when the queue stops. Tests change it.
var lookInterval = time.Second

// driverNonce is where a driver's nonce is in guest memory, and its value; 0: the driver has none.
type driverNonce struct {
	value uint64
	at    translate.PA
}

// nonceOf reads the nonce of the driver that sets up a doorbell area, whose memory is held, or takes it from the
// context.
func (c *cmd) nonceOf(r *abi.SetDoorbells) (n driverNonce, err error) {
	n.at = translate.PA(r.PA[0]) + abi.DoorbellNonceOff
	switch {
	case r.Engine != 0:
		return driverNonce{}, nil
	case c.as != nil:
		n.value = c.as.nonce
		return n, nil
	case c.d.features.Load()&abi.FeatureNonce == 0:
		return driverNonce{}, nil
	}
	err = c.epoch(func() error {
		p, m := c.d.data.space().RingUint64(n.at)
		if !m.OK() {
			return &faultError{what: "doorbell area", miss: m}
		}
		n.value = p.Load()
		return nil
	})
	if err == nil && n.value == 0 {
		err = refuse(abi.StatusInvalid, "the driver has accepted the feature of a nonce, and its nonce is 0")
	}
	return n, err
}

// driverGone reports whether the driver's nonce is not in guest memory any more. The command queue is stopped, and the
// caller holds driver. Memory that cannot be read says nothing.
func (d *Device) driverGone() (gone bool) {
	d.mu.Lock()
	n := d.tables.nonce
	d.mu.Unlock()
	space := d.data.mem.Load()
	if n.value == 0 || space == nil {
		return false
	}
	_ = space.Epochs().Within(commandSlot, func() error {
		if p, m := space.RingUint64(n.at); m.OK() {
			gone = p.Load() != n.value
		}
		return nil
	})
	return gone
}

// pauses is called when the command queue has stopped, or objects of a stopped device have been made again. The caller
// holds driver.
func (d *Device) pauses() {
	d.mu.Lock()
	paused := d.tables.qps > 0
	d.mu.Unlock()
	d.data.paused.Store(paused)
	d.lookLocked()
}

// lookLocked drops the state of a driver that has gone, or looks again later.
func (d *Device) lookLocked() {
	switch {
	case d.commands != nil || !d.data.paused.Load():
	case d.driverGone():
		d.dropDriver("the driver has ended")
	case d.look == nil:
		d.look = time.AfterFunc(lookInterval, d.lookForDriver)
	default:
		d.look.Reset(lookInterval)
	}
}

// lookForDriver is called by the timer. After the pause, which teardown ends, too, it has no effect. A bug that it
// meets ends the device, not the process (TR-6).
func (d *Device) lookForDriver() {
	d.driver.Lock()
	defer d.driver.Unlock()
	if err := translate.Contain(func() error { d.lookLocked(); return nil }); err != nil {
		d.data.stopped(err, "stack", translate.StackOf(err))
	}
}

// MachineReset says that the VM's machine was reset. If the driver had been stopped, it does not go on then, because a
// paused VM resets nothing. Its objects are destroyed. Peers, which were held as those of a paused VM are (CO-3), meet
// silence. A device with a running driver ignores the call. Any goroutine.
func (d *Device) MachineReset() {
	d.driver.Lock()
	defer d.driver.Unlock()
	if d.commands == nil && d.data.paused.Load() {
		d.dropDriver("the VM was reset")
	}
}

// dropDriver destroys the objects of a driver that has gone while the VM seemed paused. The caller holds driver.
func (d *Device) dropDriver(why string) {
	d.data.paused.Store(false)
	d.generation.Add(1)
	if d.wipe() {
		d.log.Info("state of the driver dropped", "reason", why)
		d.PortChanged() // a driver that goes on nevertheless checks the generation
	}
}
