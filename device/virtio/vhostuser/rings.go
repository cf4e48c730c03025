package vhostuser

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// controlSlot is the epoch reader slot of connections' goroutines (EP-1). Loops use the slots from 0.
const controlSlot = 15

// ring is what a front end has said about one virtqueue.
//
//	          complete: size, address in memory,
//	          kick seen, enabled, features accepted
//	stopped ──────────────────────────────────────────▶ running (q != nil)
//	   ▲                                                   │
//	   └───────────────────────────────────────────────────┘
//	    GET_VRING_BASE, disabled, reset, memory withdrawn
//
// In vhost-user a ring can be started and yet disabled; the device does not get such a ring, so buffers stay in it
// until it is enabled.
type ring struct {
	num     uint32 // 0: not set
	base    uint16
	addr    VringAddr
	hasAddr bool
	started bool // after SET_VRING_KICK, until GET_VRING_BASE
	enabled bool
	kick    int // -1: none
	call    *virtq.Notifier
	err     *virtq.Notifier
	files   [3]*keptFile // of kick, call and err, as kept; nil: none
	stale   [3]bool      // the eventfd was exchanged since then
	spare   *keptFile    // the call eventfd before this one: front ends exchange two of them all the time

	q     *virtq.Queue // set while the device has it
	areas [3]area      // of q
	holds [3]*hostdriver.Hold
}

type area struct {
	pa translate.PA
	n  uint64
}

func (r *ring) init() {
	*r = ring{kick: -1, call: virtq.NewNotifier(), err: virtq.NewNotifier()}
}

// reset clears the ring's description, but not its call and error descriptors.
func (r *ring) reset() {
	r.dropKick()
	*r = ring{kick: -1, call: r.call, err: r.err, files: r.files, stale: r.stale, spare: r.spare}
}

func (r *ring) close() {
	r.dropKick()
	r.call.Close()
	r.err.Close()
}

func (r *ring) dropKick() {
	if r.kick >= 0 {
		_ = unix.Close(r.kick)
		r.kick = -1
	}
	r.stale[0] = true
	r.started = false
}

// ring looks up a ring by the index in a message.
func (se *session) ring(i uint32) (*ring, error) {
	if uint64(i) >= uint64(len(se.rings)) {
		return nil, protoErr("ring %d, device has %d", i, len(se.rings))
	}
	return &se.rings[i], nil
}

func (se *session) vringState(m *Message, r *ring, s VringState) ([]byte, error) {
	i := int(s.Index)
	switch m.Request {
	case ReqSetVringNum:
		if s.Num == 0 || s.Num > virtq.MaxSize || s.Num&(s.Num-1) != 0 && !se.packed() {
			return nil, protoErr("ring %d: %d entries, want a power of two up to %d", i, s.Num, virtq.MaxSize)
		}
		if r.q != nil && s.Num != r.num {
			return nil, refuse("ring %d: size changes from %d to %d while it runs", i, r.num, s.Num)
		}
		r.num = s.Num
	case ReqSetVringBase:
		if s.Num > 0xffff && !se.packed() {
			return nil, protoErr("ring %d: base %#x, want 16 bits", i, s.Num)
		}
		if r.q != nil && se.again {
			return nil, nil // since the base was set
		}
		if r.q != nil {
			return nil, refuse("ring %d: base set while it runs", i)
		}
		// The upper half of a packed ring's base is the used place, which equals the available one: see virtq.Config.
		r.base = uint16(s.Num)
	case ReqGetVringBase:
		se.endLive()
		se.stop(i)
		r.dropKick()
		if err := se.flushLog(); err != nil {
			return nil, err
		}
		base := uint32(r.base)
		if se.packed() {
			base |= base << 16
		}
		return VringState{Index: s.Index, Num: base}.Append(nil), nil
	case ReqSetVringEnable:
		if s.Num > 1 {
			return nil, protoErr("ring %d: enable value %d, want 0 or 1", i, s.Num)
		}
		was := r.enabled
		r.enabled = s.Num == 1
		if !se.isEnabled(r) {
			se.stop(i)
			return nil, nil
		}
		if err := se.start(i); err != nil {
			// A front end that gets this error will try again; otherwise the ring starts when the missing part arrives.
			if se.wantsAck(m) {
				r.enabled = was
			}
			return nil, err
		}
	}
	se.tryStart(i)
	return nil, nil
}

// packed reports whether the driver uses packed rings.
func (se *session) packed() bool { return se.features&virtio.FeatureRingPacked != 0 }

// isEnabled: without PROTOCOL_FEATURES rings have no disabled state.
func (se *session) isEnabled(r *ring) bool {
	return r.enabled || se.features&FeatureProtocolFeatures == 0
}

func (se *session) setVringAddr(r *ring, a VringAddr) error {
	i := int(a.Index)
	if a.Flags != 0 && se.offer&FeatureLogAll == 0 {
		return protoErr("vring %d: address flags %#x, want 0 (logging is not offered)", i, a.Flags)
	}
	a.Flags = 0 // see VringLog
	if r.q != nil {
		if a == r.addr {
			return nil
		}
		if _, err := se.resolve(a, int(r.num)); err != nil {
			return err // the ring continues unchanged
		}
		se.stop(i)
	}
	r.addr, r.hasAddr = a, true
	se.tryStart(i)
	return nil
}

func (se *session) vringFD(r *ring, f VringFD, m *Message) error {
	i, fd := int(f.Index), -1
	if !f.NoFD {
		fd = m.FDs[0]
		if err := checkEventFD(fd); err != nil {
			return fmt.Errorf("ring %d: %w", i, err)
		}
	}
	switch m.Request {
	case ReqSetVringCall:
		if err := r.call.Set(fd); err != nil {
			return fmt.Errorf("%w: ring %d: %w", errRefused, i, err)
		}
		r.stale[1] = true
		// A front end that masks an interrupt diverts it and checks once, when it unmasks, for interrupts in between:
		// one that arrives between that check and this message would be lost. An additional interrupt is harmless.
		if r.q != nil {
			r.call.Signal()
		}
	case ReqSetVringErr:
		if err := r.err.Set(fd); err != nil {
			return fmt.Errorf("%w: ring %d: %w", errRefused, i, err)
		}
		r.stale[2] = true
	case ReqSetVringKick:
		se.stop(i)
		r.dropKick()
		if fd >= 0 {
			r.kick = m.TakeFD(0)
		}
		r.started = true
		se.tryStart(i)
	}
	return nil
}

// startReady starts every ring that is complete. A ring that cannot start is logged and skipped: the message that
// caused the attempt, for example a memory table, has succeeded, and the front end may be about to move the ring.
func (se *session) startReady() {
	for i := range se.rings {
		se.tryStart(i)
	}
}

func (se *session) tryStart(i int) {
	if err := se.start(i); err != nil {
		se.log.Warn("ring not started yet", "ring", i, "reason", err)
	}
}

// shareHint helps with memory that is not shared. A QEMU with ivshmem-doorbell shares that device's in any case.
const shareHint = "QEMU needs -object memory-backend-memfd,id=ram,size=SIZE,share=on with -M memory-backend=ram " +
	"(see `vnicd qemu-args`)"

// resolve finds a ring with n entries in guest memory.
func (se *session) resolve(addr VringAddr, n int) (areas [3]area, err error) {
	want := virtq.Areas(n, se.packed())
	for k, user := range [3]uint64{addr.Desc, addr.Avail, addr.Used} {
		a := &want[k]
		pa, ok := se.mem.UserToPA(user, a.Bytes)
		if !ok {
			return areas, fmt.Errorf("%w: ring %d: %s at user address %#x, %d bytes, lies in no memory region; %s", errAdvisory,
				addr.Index, a.Name, user, a.Bytes, shareHint)
		}
		areas[k] = area{pa, a.Bytes}
	}
	return areas, nil
}

// start passes ring i to the device if it is complete. A ring outside known memory waits for it, because the front end
// chooses the order of addresses and memory.
func (se *session) start(i int) error {
	r := &se.rings[i]
	if r.q != nil || !r.started || !r.hasAddr || r.num == 0 || !se.negotiated || !se.isEnabled(r) {
		return nil
	}
	if len(se.regions) == 0 {
		// This is legal, because memory may follow; but QEMU omits memory that it cannot share.
		if !se.warnedMemory {
			se.warnedMemory = true
			se.log.Warn("front end starts rings without sharing guest memory; " + shareHint)
		}
		return nil
	}
	n := int(r.num)
	areas, err := se.resolve(r.addr, n)
	if err != nil {
		r.err.Signal()
		return err
	}
	q, err := virtq.New(se.space, virtq.Config{
		Index: i, Size: n, Desc: areas[0].pa, Avail: areas[1].pa, Used: areas[2].pa, Base: r.base,
		Packed: se.packed(), EventIdx: se.features&virtio.FeatureEventIdx != 0,
		Indirect: se.features&virtio.FeatureIndirectDesc != 0, Kick: r.kick, Call: r.call, Err: r.err,
	})
	if err != nil {
		r.err.Signal()
		return fmt.Errorf("%w: %w", errAdvisory, err)
	}
	r.areas = areas
	if err = se.seal(); err == nil {
		err = se.hold(r)
	}
	if err == nil {
		err = se.resume(q)
	}
	if err == nil {
		se.survive()
		err = se.dev.StartQueue(i, q)
	}
	if err != nil {
		r.release()
		r.err.Signal()
		return fmt.Errorf("%w: ring %d: %w", errAdvisory, i, err)
	}
	r.q = q
	se.setLive(true)
	se.reportRun()
	return nil
}

// reportRun tells the follower when the first ring has started, and when the last one has stopped.
func (se *session) reportRun() {
	f := se.srv.cfg.Follower
	if on := slices.ContainsFunc(se.rings, func(r ring) bool { return r.q != nil }); f != nil && on != se.ran {
		se.ran = on
		f.Run(on)
	}
}

// setLive records that rings run, or that one is about to stop.
func (se *session) setLive(live bool) {
	se.oldLive = se.oldLive && !live // from now on the rings here count
	if se.backend.isLive() == live {
		return
	}
	se.backend.setLive(live, se.log)
	se.saveState()
}

// hold makes the ring resident until release, because a loop accesses it all the time.
func (se *session) hold(r *ring) error {
	return se.watch.Without(func() (err error) { // the host driver counts what paging takes
		for k, a := range r.areas {
			if r.holds[k], err = se.mem.Hold(se.srv.ctx, a.pa, a.n); err != nil {
				return err
			}
		}
		return nil
	})
}

// release ends hold.
func (r *ring) release() {
	for k, h := range r.holds {
		if h != nil {
			h.Release()
		}
		r.holds[k], r.areas[k] = nil, area{}
	}
}

// resume advances q to the position of the ring in memory.
func (se *session) resume(q *virtq.Queue) error {
	return se.space.Epochs().Within(controlSlot, func() error {
		from := q.Base()
		changed, err := q.Resume()
		if changed {
			se.log.Debug("ring resumed at the used index", "ring", q.Index(), "base", from, "used", q.Base())
		}
		return err
	})
}

// stop stops ring i if it runs, and records its position. The description is kept, so that start can resume it.
func (se *session) stop(i int) {
	r := &se.rings[i]
	if r.q == nil {
		return
	}
	se.setLive(false)
	se.dev.StopQueue(i)
	if n := r.q.InFlight(); n > 0 {
		se.log.Warn("ring stopped with chains in flight; they will be processed again", "ring", i, "chains", n)
	}
	r.base = r.q.Base()
	r.q = nil
	r.release()
	se.reportRun()
}

func (se *session) stopAll() {
	for i := range se.rings {
		se.stop(i)
	}
}

func (se *session) disableAll() {
	for i := range se.rings {
		se.stop(i)
		se.rings[i].dropKick()
		se.rings[i].enabled = false
	}
}
