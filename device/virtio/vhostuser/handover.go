package vhostuser

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/virtq"
)

// A process that ends in good order hands a connection over to the next one, so that the driver does not notice the
// change (CO-1): besides what is kept anyway (keep.go), the rings, at the position where they were stopped, and the
// device's own state, if it is a virtio.Continuer. The front end's messages and the driver's kicks meanwhile wait in
// the socket and in the eventfds.
//
//	NAME/context/EPOCH    the device's state, a sealed memory file
//	NAME/kick/EPOCH/N     eventfds of ring N
//	NAME/call/EPOCH/N
//	NAME/err/EPOCH/N
//
// The state file comes last: without its list of rings the next process tells the driver to begin anew, as after a
// crash. The next process removes that list before it uses anything, because a context serves once. The epoch, a random
// number in the state file, tells these descriptors from those that another process left behind.

// handed describes the rings and the driver's choices.
type handed struct {
	Epoch      uint64       `json:"epoch"`
	Features   uint64       `json:"features"` // acknowledged
	Negotiated bool         `json:"negotiated"`
	Status     uint8        `json:"status"`
	Context    uint64       `json:"context"` // size of the device's state, 0: none
	Rings      []handedRing `json:"rings"`   // by number
	Stopped    int64        `json:"stopped"` // when the rings were stopped, on the clock since the host's boot, ns
}

type handedRing struct {
	Num     uint32    `json:"num"`
	Base    uint16    `json:"base"`
	Addr    VringAddr `json:"addr"`
	HasAddr bool      `json:"has_addr"`
	Started bool      `json:"started"`
	Enabled bool      `json:"enabled"`
	Kick    bool      `json:"kick"` // there is such an eventfd
	Call    bool      `json:"call"`
	Err     bool      `json:"err"`
}

// maxContext bounds the state of a device, in bytes.
const maxContext = 1 << 30

func (k *keeping) context(epoch uint64) string { return fmt.Sprintf("%s/context/%x", k.name, epoch) }

func (k *keeping) eventfd(what string, epoch uint64, ring int) string {
	return fmt.Sprintf("%s/%s/%x/%d", k.name, what, epoch, ring)
}

// handOver stops the rings and stores what the next process needs to go on, if there is one to come.
func (se *session) handOver() {
	dev, ok := se.dev.(virtio.Continuer)
	if se.kept.to == nil || !se.kept.to.Ending() || !ok {
		return
	}
	s := se.state() // live: the driver runs; if not, the VM is paused, or has no driver
	se.leaving = true
	stopped := sinceBoot()
	se.stopAll()
	state, err := dev.Save()
	if !s.Live && err == nil && len(state) == 0 {
		return
	}
	var h *handed
	if err == nil {
		h, err = se.handed(state)
	}
	if err != nil {
		se.log.Warn("the device's state cannot be handed over: the driver has to begin anew", "error", err)
		return
	}
	h.Stopped = stopped
	s.Handed = h
	se.kept.write(&s)
}

// handed stores the rings' eventfds and the device's state.
func (se *session) handed(state []byte) (*handed, error) {
	h := &handed{
		Epoch: rand.Uint64(), Features: se.features, Negotiated: se.negotiated, Status: se.status,
		Context: uint64(len(state)),
	}
	if len(state) > 0 {
		fd, err := contextFile(state)
		if err != nil {
			return nil, err
		}
		err = se.kept.to.Keep(se.kept.context(h.Epoch), fd)
		_ = unix.Close(fd)
		if err != nil {
			return nil, err
		}
	}
	for i := range se.rings {
		r := &se.rings[i]
		x := handedRing{Num: r.num, Base: r.base, Addr: r.addr, HasAddr: r.hasAddr, Started: r.started, Enabled: r.enabled}
		for _, f := range []struct {
			what string
			fd   int
			has  *bool
		}{{"kick", r.kick, &x.Kick}, {"call", r.call.FD(), &x.Call}, {"err", r.err.FD(), &x.Err}} {
			if *f.has = f.fd >= 0; !*f.has {
				continue
			}
			if err := se.kept.to.Keep(se.kept.eventfd(f.what, h.Epoch, i), f.fd); err != nil {
				return nil, err
			}
		}
		h.Rings = append(h.Rings, x)
	}
	return h, nil
}

// contextFile returns a memory file with that content, which cannot change any more.
func contextFile(content []byte) (fd int, err error) {
	if fd, err = unix.MemfdCreate("vnicd-context", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return -1, fmt.Errorf("memory file for the device's state: %w", err)
	}
	f := os.NewFile(uintptr(fd), "vnicd-context")
	defer f.Close()
	_, err = f.Write(content)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS,
			unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE|unix.F_SEAL_SEAL)
	}
	if err == nil {
		fd, err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	}
	if err != nil {
		return -1, fmt.Errorf("memory file for the device's state: %w", err)
	}
	return fd, nil
}

// takeOver continues what the previous process has handed over, and reports whether it did. If that fails, the driver
// has to begin anew, as after a crash.
func (se *session) takeOver(h *handed, kept Kept) bool {
	if h != nil {
		// A context serves once. If this process dies, the driver has to begin anew.
		s := se.state()
		se.kept.write(&s)
	}
	parts := se.takeParts(h, kept)
	defer parts.close()
	if h == nil {
		return false
	}
	err := se.adoptRings(h, parts)
	if err == nil {
		err = se.adoptContext(h, parts.context)
	}
	if err == nil {
		err = se.startHanded(h)
	}
	if err != nil {
		se.log.Error("state of the previous vnicd refused: the driver has to begin anew", "reason", err)
		se.stopAll()
		se.oldLive = se.wasLive // starting may have ended it, but the front end's rings still run
		se.saveState()
		for i := range se.rings {
			se.rings[i].reset()
		}
		se.features, se.negotiated, se.status = 0, false, 0
		se.dev.Reset()
		return false
	}
	se.wasLive = false
	se.silence = max(time.Duration(sinceBoot()-h.Stopped), 0)
	return true
}

// sinceBoot returns the time since the host's boot, ns: a clock that two processes share and nobody sets.
func sinceBoot() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // cannot fail
	return t.Nano()
}

// handedParts are descriptors that were handed over; -1: none.
type handedParts struct {
	context int
	rings   [][3]int // kick, call, err
}

// takeParts takes them from what was kept. It drops those of other epochs: of a process that died while it handed over,
// or that ended before it had taken what it got.
func (se *session) takeParts(h *handed, kept Kept) *handedParts {
	p := &handedParts{context: -1, rings: make([][3]int, len(se.rings))}
	take := func(name string) int {
		fd, ok := kept.take(name)
		if !ok {
			return -1
		}
		se.kept.forget(name)
		return fd
	}
	for i := range p.rings {
		for k, what := range ringFiles {
			if p.rings[i][k] = -1; h != nil {
				p.rings[i][k] = take(se.kept.eventfd(what, h.Epoch, i))
			}
		}
	}
	if h != nil {
		p.context = take(se.kept.context(h.Epoch))
	}
	old := Kept{}
	for _, what := range append(ringFiles[:], "context") {
		maps.Copy(old, kept.of(se.kept.name+"/"+what))
	}
	old.drop(se.kept.to)
	return p
}

// ringFiles are the names of a ring's descriptors: kick, call and error.
var ringFiles = [3]string{"kick", "call", "err"}

func (p *handedParts) close() {
	for _, fds := range append(p.rings, [3]int{p.context, -1, -1}) {
		for _, fd := range fds {
			if fd >= 0 {
				_ = unix.Close(fd)
			}
		}
	}
}

// adoptRings sets the driver's choices and describes the rings, with the checks of the requests that do so.
func (se *session) adoptRings(h *handed, p *handedParts) error {
	if extra := h.Features &^ se.srv.offer; extra != 0 {
		return fmt.Errorf("features %#x are not offered any more", extra)
	}
	if len(h.Rings) != len(se.rings) {
		return fmt.Errorf("%d rings, the device has %d", len(h.Rings), len(se.rings))
	}
	if err := se.setFeatures(h.Features); err != nil {
		return err
	}
	if h.Negotiated != se.negotiated {
		return fmt.Errorf("features %#x: negotiated is %v", h.Features, h.Negotiated)
	}
	if h.Status != 0 {
		if err := se.setStatus(uint64(h.Status)); err != nil {
			return err
		}
	}
	for i, x := range h.Rings {
		r := &se.rings[i]
		if x.Num > virtq.MaxSize || x.Num&(x.Num-1) != 0 && !se.packed() {
			return fmt.Errorf("ring %d: %d entries", i, x.Num)
		}
		for k, has := range [3]bool{x.Kick, x.Call, x.Err} {
			if has != (p.rings[i][k] >= 0) {
				return fmt.Errorf("ring %d: an eventfd was not kept", i)
			}
			if has {
				if err := checkEventFD(p.rings[i][k]); err != nil {
					return fmt.Errorf("ring %d: %w", i, err)
				}
			}
		}
		if err := errors.Join(r.call.Set(p.rings[i][1]), r.err.Set(p.rings[i][2])); err != nil {
			return fmt.Errorf("ring %d: %w", i, err)
		}
		r.kick, p.rings[i][0] = p.rings[i][0], -1
		r.num, r.base, r.addr, r.hasAddr, r.enabled = x.Num, x.Base, x.Addr, x.HasAddr, x.Enabled
		r.addr.Index = uint32(i)
	}
	return nil
}

// adoptContext passes the device its state.
func (se *session) adoptContext(h *handed, fd int) error {
	dev, ok := se.dev.(virtio.Continuer)
	switch {
	case h.Context == 0 && fd < 0:
		return nil
	case !ok || fd < 0 || h.Context > maxContext:
		return fmt.Errorf("a device state of %d bytes, of which the file was kept: %v", h.Context, fd >= 0)
	}
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_WRITE
	if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || seals&sealed != sealed {
		return errors.New("the file of the device's state is not sealed")
	}
	state := make([]byte, h.Context)
	if _, err := io.ReadFull(io.NewSectionReader(stateFile(fd), 0, maxContext), state); err != nil {
		return fmt.Errorf("the device's state: %w", err)
	}
	return dev.Restore(state)
}

// startHanded starts the rings that ran.
func (se *session) startHanded(h *handed) error {
	for i, x := range h.Rings {
		if se.rings[i].started = x.Started; !x.Started {
			continue
		}
		if err := se.start(i); err != nil {
			return err
		}
	}
	return nil
}
