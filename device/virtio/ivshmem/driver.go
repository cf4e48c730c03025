package ivshmem

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/hypervisor/worktime"
)

// What the driver asks for by the registers, and what the VM's network card tells, as vhost-user messages. The caller
// of all functions but requests and configChanged holds Server.mu.

// requests handles the driver's newest request. Vector 0 may have been rung for nothing.
func (se *session) requests() {
	se.srv.mu.Lock()
	defer se.srv.mu.Unlock()
	watch := se.srv.cfg.Work.Start(worktime.Messages)
	defer watch.Stop()
	if n := se.bar.word(offRequest).Load(); n != se.answered || se.unsure {
		done := se.unsure && se.status == 0 && se.bar.word(offAnswer).Load() == n
		se.unsure, se.answered = false, n
		if done {
			return // perhaps by another host's device: its state is about to arrive
		}
		r := se.bar.request()
		err := se.obey(&r)
		se.ran = se.ran || se.status != 0
		if se.failed != nil {
			return // the end of the session answers, once the device has let go of guest memory
		}
		result := uint32(0)
		if err != nil {
			result = uint32(unix.EINVAL)
			se.srv.log.Warn("request of the guest's driver refused", "socket", se.srv.cfg.Path, "reason", err)
		}
		se.bar.put32(offResult, result)
		se.bar.put32(offStatus, se.status)
		se.bar.put32(offAnswer, n)
	}
}

// obey brings the device into line with a request. An error says what is wrong with it; nothing was changed then. A
// reset is never refused.
func (se *session) obey(r *request) error {
	switch {
	case r.status == 0:
		return se.reset()
	case r.status&^statusBits != 0:
		return fmt.Errorf("device status %#x, known bits are %#x", r.status, statusBits)
	case se.status&virtio.StatusDriverOK != 0:
		return nil // queues and features stay as they are
	case se.status&virtio.StatusFeaturesOK != 0:
		if r.status&virtio.StatusDriverOK != 0 {
			return se.start(r)
		}
	case r.status&virtio.StatusDriverOK != 0:
		return errors.New("DRIVER_OK before FEATURES_OK")
	case r.status&virtio.StatusFeaturesOK != 0:
		if extra := r.features &^ se.offered; extra != 0 {
			return fmt.Errorf("features %#x were not offered", extra)
		}
		return se.setFeatures(r)
	}
	return nil
}

func (se *session) setFeatures(r *request) error {
	se.features = r.features
	if err := se.tellFeatures(); err != nil && !se.refused(err) {
		return err
	}
	err := se.dev.SetStatus(uint8(r.status &^ virtio.StatusDriverOK))
	if err != nil && !se.refused(err) {
		return err
	}
	s, err := se.dev.GetStatus() // without FEATURES_OK if the device cannot work with them
	if err != nil {
		se.fail(err)
		return err
	}
	se.status = uint32(s)
	return nil
}

// tellFeatures tells the device the driver's choice, and whether its writes are logged.
func (se *session) tellFeatures() error {
	f := se.features | vhostuser.FeatureProtocolFeatures
	if se.srv.writes != nil {
		f |= vhostuser.FeatureLogAll
	}
	return se.dev.SetFeatures(f)
}

// refused reports whether err is the device's refusal; another one ends the session.
func (se *session) refused(err error) bool {
	var r *frontend.RefusedError
	if errors.As(err, &r) {
		return true
	}
	se.fail(err)
	return false
}

// start describes the queues to the device. Those of a VM that does not run start when it does; those in memory that is
// not known yet when that is.
func (se *session) start(r *request) error {
	if err := se.describeQueues(r); err != nil {
		return err
	}
	if err := se.dev.SetStatus(uint8(r.status)); err != nil && !se.refused(err) {
		return err
	}
	se.status = r.status
	if se.srv.runs {
		se.setRunning(true)
	}
	return nil
}

// describeQueues checks where the driver has its queues, and tells the device.
func (se *session) describeQueues(r *request) error {
	n := se.srv.cfg.Queues
	for i := range r.queues {
		q := &r.queues[i]
		switch {
		case q.size == 0:
		case i >= n:
			return fmt.Errorf("queue %d, the device has %d", i, n)
		case q.size > maxSize || q.size&(q.size-1) != 0:
			return fmt.Errorf("queue %d has %d entries, want a power of two up to %d", i, q.size, maxSize)
		case q.desc%16 != 0 || q.avail%2 != 0 || q.used%4 != 0: // virtio 1.2, 2.7
			return fmt.Errorf("queue %d at %#x, %#x, %#x is not aligned to 16, 2 and 4", i, q.desc, q.avail, q.used)
		}
	}
	se.queues, se.bases = r.queues, [MaxQueues]uint32{}
	for i := range n {
		if err := se.place(i); err != nil {
			return err
		}
	}
	return nil
}

// place tells the device where queue i is.
func (se *session) place(i int) error {
	q := &se.queues[i]
	if q.size == 0 {
		return nil
	}
	err := se.dev.SetVringNum(i, uint32(q.size))
	if err == nil {
		err = se.dev.SetVringAddr(vhostuser.VringAddr{Index: uint32(i), Desc: q.desc, Avail: q.avail, Used: q.used})
	}
	if err == nil {
		err = se.dev.SetVringCall(i, se.out[1+i])
	}
	if err != nil && !se.refused(err) {
		return err
	}
	return nil // a refusal is logged where it was made; the queue does not start
}

// reset returns the device to its initial state: it accesses no memory of the driver any more. It always succeeds, as
// far as the driver can see; the session with a device that does not answer ends.
func (se *session) reset() error {
	if err := se.dev.SetStatus(0); err != nil && !se.refused(err) {
		return err
	}
	se.status, se.features, se.running = 0, 0, false
	se.queues, se.bases = [MaxQueues]queue{}, [MaxQueues]uint32{}
	se.readConfig() // before the answer: the driver is to find what belongs to the device after the reset
	return nil
}

// setRunning starts the queues, or stops them where they are.
func (se *session) setRunning(on bool) {
	if on {
		se.removeStale()
		se.arrive()
	}
	if se.status&virtio.StatusDriverOK == 0 || se.running == on {
		return
	}
	if !on {
		defer se.depart()
	}
	se.running, se.ran = on, true
	for i := range se.queues {
		if se.queues[i].size == 0 {
			continue
		}
		var err error
		if on {
			err = errors.Join(se.dev.SetVringBase(i, se.bases[i]), se.dev.SetVringKick(i, se.in[1+i]),
				se.dev.SetVringEnable(i, true))
		} else {
			se.bases[i], err = se.dev.GetVringBase(i)
		}
		if err != nil && !se.refused(err) {
			return
		}
	}
}

// addMemory tells the device of a region, unless it has it since the previous process.
func (se *session) addMemory(r region) {
	if slices.Contains(se.has, r.Region) {
		return
	}
	if err := se.dev.AddMemReg(r.Region, r.fd); err == nil {
		se.has = append(se.has, r.Region)
	} else {
		_ = se.refused(err)
	}
}

func (se *session) removeMemory(r vhostuser.Region) {
	if i := slices.Index(se.has, r); i >= 0 {
		if err := se.dev.RemMemReg(r); err == nil || se.refused(err) {
			se.has = slices.Delete(se.has, i, i+1)
		}
	}
}

// removeStale removes what was withdrawn while nobody followed the network card. Its memory is complete once it runs.
func (se *session) removeStale() {
	for _, r := range slices.Clone(se.has) {
		if !slices.ContainsFunc(se.srv.regions, func(x region) bool { return x.Region == r }) {
			se.removeMemory(r)
		}
	}
}

// machineReset resets the device if its queues stand, see Server.MachineReset.
func (se *session) machineReset() {
	if se.running {
		return
	}
	_ = se.reset()
	se.bar.put32(offStatus, se.status)
	eventfd.Raise(se.out[0], &se.hint) // a driver that goes on nevertheless sees that its device has begun anew
}

// configChanged shows the driver the device's config space of now, and tells it so.
func (se *session) configChanged() {
	se.srv.mu.Lock()
	defer se.srv.mu.Unlock()
	se.readConfig()
	eventfd.Raise(se.out[0], &se.hint)
}

// readConfig shows the driver the device's config space.
func (se *session) readConfig() {
	if err := se.dev.GetConfig(se.config, 0); err == nil || se.refused(err) {
		se.bar.setConfig(se.config)
	}
}
