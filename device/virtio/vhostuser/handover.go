package vhostuser

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
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
// Eventfds that are kept already (running.go) have their names in the state file. A keeper does not store an open file
// twice.
//
// The state file comes last: without its list of rings the next process tells the driver to begin anew, as after a
// crash. The next process removes that list before it uses anything, because a context serves once; a device that is a
// virtio.Survivor has not used it before its first ring starts, and is continued even if this process dies. The epoch,
// a random number in the state file, tells these descriptors from those that another process left behind.

// handed describes the rings and the driver's choices.
type handed struct {
	Epoch      uint64       `json:"epoch"`
	Features   uint64       `json:"features"` // acknowledged
	Negotiated bool         `json:"negotiated"`
	Status     uint8        `json:"status"`
	Context    uint64       `json:"context"`        // size of the device's state, 0: none
	Idle       bool         `json:"idle,omitempty"` // no ring has run: the device is as new, and has no journal
	Rings      []handedRing `json:"rings"`          // by number
	Stopped    int64        `json:"stopped"`        // when the rings were stopped, on the clock since the host's boot, ns
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
	// Files are the names, behind the connection's, of the three; nil: as above.
	Files *[3]string `json:"files,omitempty"`
}

// maxContext bounds the state of a device, in bytes.
const maxContext = 1 << 30

func (k *keeping) context(epoch uint64) string { return fmt.Sprintf("%s/context/%x", k.name, epoch) }

func (k *keeping) eventfd(what string, epoch uint64, ring int) string {
	return k.part(eventfdName(what, epoch, ring))
}

// part is the full name of a part of the connection.
func (k *keeping) part(name string) string { return k.name + "/" + name }

func eventfdName(what string, epoch uint64, ring int) string {
	return fmt.Sprintf("%s/%x/%d", what, epoch, ring)
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
	s.Running = nil // the device's end follows
	state, err := dev.Save(maxContext)
	var h *handed
	if err == nil {
		h, err = se.handed(state)
	}
	if err != nil {
		se.log.Warn("the device's state cannot be handed over: the driver has to begin anew", "error", err)
		se.kept.write(&s)
		return
	}
	h.Stopped = stopped
	s.Handed = h
	se.kept.write(&s)
}

// handed stores the rings' eventfds and the device's state.
func (se *session) handed(state []byte) (*handed, error) {
	epoch := rand.Uint64()
	if se.running.last != nil {
		epoch = se.running.epoch
	}
	h := se.choices(epoch)
	h.Context = uint64(len(state))
	if len(state) > 0 {
		fd, err := hostdriver.SealedFile("vnicd-context", state)
		if err != nil {
			return nil, fmt.Errorf("the device's state: %w", err)
		}
		err = se.kept.to.Keep(se.kept.context(h.Epoch), fd)
		_ = unix.Close(fd)
		if err != nil {
			return nil, err
		}
	}
	if se.running.last != nil || len(se.running.files) > 0 {
		se.running.epoch = epoch
		return h, se.nameFiles(h)
	}
	for i := range se.rings {
		for k, fd := range se.rings[i].eventfds() {
			if fd < 0 {
				continue
			}
			if err := se.kept.to.Keep(se.kept.eventfd(ringFiles[k], h.Epoch, i), fd); err != nil {
				return nil, err
			}
		}
	}
	return h, nil
}

// choices describes the driver's choices and the rings, without the names of eventfds.
func (se *session) choices(epoch uint64) *handed {
	h := &handed{Epoch: epoch, Features: se.features, Negotiated: se.negotiated, Status: se.status,
		Idle: se.running.journal == ""}
	for i := range se.rings {
		r := &se.rings[i]
		fds := r.eventfds()
		h.Rings = append(h.Rings, handedRing{Num: r.num, Base: r.base, Addr: r.addr, HasAddr: r.hasAddr,
			Started: r.started, Enabled: r.enabled, Kick: fds[0] >= 0, Call: fds[1] >= 0, Err: fds[2] >= 0})
	}
	return h
}

// eventfds returns kick, call and error; -1: none.
func (r *ring) eventfds() [3]int { return [3]int{r.kick, r.call.FD(), r.err.FD()} }

// takeOver continues what the previous process has handed over, or kept when it was killed, and reports whether it did.
// If that fails, the driver has to begin anew.
func (se *session) takeOver(s *keptState, kept Kept) bool {
	_, survives := se.dev.(virtio.Survivor)
	h := s.Handed
	if h == nil && survives {
		h = s.Running
	}
	if se.trial != nil && se.trial.anew {
		h = nil
	}
	if !survives || h == nil {
		// A context serves once. If this process dies, the driver has to begin anew.
		se.saveState()
	}
	parts := se.takeParts(h, kept)
	defer func() {
		se.dropParts(parts)
		se.follow() // then: a keeper does not store the second name of an open file
	}()
	parts.others.Discard(se.kept.to)
	if h == nil {
		return false
	}
	if err := se.goOn(s, h, parts); err != nil {
		se.log.Error("state of the previous vnicd refused: the driver has to begin anew", "reason", err)
		se.beginAnew()
		return false
	}
	if s.Handed == nil && h.Idle {
		return true
	}
	se.wasLive = false
	if s.Handed != nil {
		se.silence = max(time.Duration(sinceBoot()-h.Stopped), 0)
		return true
	}
	se.revived = true
	for i := range se.rings { // the killed process may not have signalled what it returned last
		if se.rings[i].q != nil {
			se.rings[i].call.Signal()
		}
	}
	return true
}

// goOn continues rings and device as h describes them. Until a ring starts, what the previous process kept can be
// continued again; from then on, what this one keeps.
func (se *session) goOn(s *keptState, h *handed, p *handedParts) error {
	if err := se.adoptRings(h, p); err != nil {
		return err
	}
	if s.Handed != nil {
		if err := se.adoptContext(h, p.context); err != nil {
			return err
		}
	} else if h.Idle {
		se.follow()
		se.startReady()
		return nil
	} else if h.Negotiated { // otherwise there is no driver, and its reset may not have reached the journal
		if err := se.adoptJournal(p.journal); err != nil {
			return err
		}
	}
	if se.survive(); se.running.last == nil {
		se.forgetRun() // what the previous process kept
	}
	for i := range se.rings {
		if err := se.start(i); err != nil {
			return err
		}
	}
	return nil
}

// beginAnew undoes goOn.
func (se *session) beginAnew() {
	se.stopAll()
	se.oldLive = se.wasLive // starting may have ended it, but the front end's rings still run
	se.forgetRun()
	for i := range se.rings {
		se.rings[i].reset()
	}
	se.features, se.negotiated, se.status = 0, false, 0
	se.dev.Reset()
}

// sinceBoot returns the time since the host's boot, ns: a clock that two processes share and nobody sets.
func sinceBoot() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // cannot fail
	return t.Nano()
}

// handedParts are descriptors that were handed over, or kept for the case of a kill; -1: none.
type handedParts struct {
	context int
	journal int
	rings   [][3]int    // kick, call, err
	names   [][3]string // of these, behind the connection's name
	own     Kept        // all of them, as they were kept
	others  Kept        // that the state does not name
}

// takeParts takes them from what was kept, also those that the state does not name: of a process that died before it
// had stored a state, or after.
func (se *session) takeParts(h *handed, kept Kept) *handedParts {
	p := &handedParts{context: -1, journal: -1, rings: make([][3]int, len(se.rings)),
		names: make([][3]string, len(se.rings)), own: Kept{}, others: Kept{}}
	take := func(name string) int {
		if fd, ok := p.own[name]; ok {
			return fd
		}
		fd, ok := kept.Take(name)
		if !ok {
			return -1
		}
		p.own[name] = fd
		return fd
	}
	for i := range p.rings {
		p.rings[i] = [3]int{-1, -1, -1}
		if h == nil {
			continue
		}
		for k, what := range ringFiles {
			name := eventfdName(what, h.Epoch, i)
			if i < len(h.Rings) && h.Rings[i].Files != nil {
				name = h.Rings[i].Files[k]
			}
			if file, _, _ := strings.Cut(name, "/"); slices.Contains(ringFiles[:], file) {
				p.names[i][k], p.rings[i][k] = name, take(se.kept.part(name))
			}
		}
	}
	if h != nil {
		p.context, p.journal = take(se.kept.context(h.Epoch)), take(se.kept.journal(h.Epoch))
	}
	for _, what := range append(ringFiles[:], "context", "journal") {
		maps.Copy(p.others, kept.Of(se.kept.part(what)))
	}
	return p
}

// dropParts closes them, and removes those from the keeper that are not in use.
func (se *session) dropParts(p *handedParts) {
	used := se.running.names(&se.kept)
	for _, fd := range p.own {
		_ = unix.Close(fd)
	}
	for name := range p.own {
		if !slices.Contains(used, name) {
			se.kept.forget(name)
		}
	}
}

// ringFiles are the names of a ring's descriptors: kick, call and error.
var ringFiles = [3]string{"kick", "call", "err"}

// adoptRings sets the driver's choices and describes the rings, with the checks of the requests that do so.
func (se *session) adoptRings(h *handed, p *handedParts) error {
	if extra := h.Features &^ se.offer; extra != 0 {
		return fmt.Errorf("features %#x are not offered any more", extra)
	}
	if len(h.Rings) != len(se.rings) {
		return fmt.Errorf("%d rings, the device has %d", len(h.Rings), len(se.rings))
	}
	if h.Features != 0 {
		if err := se.accept(h.Features); err != nil {
			return err
		}
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
		if x.Kick {
			fd, err := unix.FcntlInt(uintptr(p.rings[i][0]), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("ring %d: %w", i, err)
			}
			r.kick = fd
		}
		se.adoptFiles(i, p)
		r.num, r.base, r.addr, r.hasAddr, r.started, r.enabled = x.Num, x.Base, x.Addr, x.HasAddr, x.Started, x.Enabled
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

// adoptJournal passes the device the journal of a process that was killed.
func (se *session) adoptJournal(fd int) error {
	dev, ok := se.dev.(virtio.Survivor)
	if !ok || fd < 0 {
		return errors.New("the journal of the device's state was not kept")
	}
	return dev.Revive(fd)
}
