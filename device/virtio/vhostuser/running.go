package vhostuser

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"strconv"
	"strings"

	"github.com/vnicd/vnicd/device/virtio"
)

// A device that has its state in a memory file all the time (virtio.Survivor) can be continued after this process was
// killed at any instruction (CO-2). From the first start of a ring on, the keeper has what a handover would add, and
// the state file describes the rings and the driver's choices as they are:
//
//	NAME/journal/EPOCH    the device's state, its memory file
//	NAME/kick/EPOCH/N     eventfds of ring N, each with an epoch of its own; the state file has their names
//	NAME/call/EPOCH/N
//	NAME/err/EPOCH/N
//
// A ring is described before the device gets it; another change, before the front end gets the reply. An eventfd is
// kept before a state names it, and forgotten after none does. The next process does the same with its journal, so that
// it may be killed, too: it revives the device from the old one, keeps the new one, describes it, and forgets the old.
// The position of a ring is in the ring.

// running is what the keeper has of a running device.
type running struct {
	asked   bool // the device has been asked for its journal
	fd      int  // its journal, valid if asked, -1: none
	epoch   uint64
	last    *handed              // as last described, nil: nothing is kept
	journal string               // as it is kept; "": it is not
	files   map[uint64]*keptFile // eventfds that are kept, by their number
}

// keptFile is an eventfd that is kept.
type keptFile struct {
	id   uint64 // see eventID
	name string // behind the connection's
}

func (k *keeping) journal(epoch uint64) string { return fmt.Sprintf("%s/journal/%x", k.name, epoch) }

// names returns all names with the keeper.
func (r *running) names(k *keeping) (names []string) {
	if r.last == nil {
		return nil
	}
	for _, f := range r.files {
		names = append(names, k.part(f.name))
	}
	if r.journal != "" {
		names = append(names, r.journal)
	}
	return names
}

// runs reports whether a ring is with the device.
func (h *handed) runs() bool {
	if h == nil || !h.Negotiated || h.Idle {
		return false
	}
	for _, x := range h.Rings {
		if x.Started && x.HasAddr && x.Num != 0 && (x.Enabled || h.Features&FeatureProtocolFeatures == 0) {
			return true
		}
	}
	return false
}

// survives reports whether the device can be continued after a kill.
func (se *session) survives() bool {
	_, ok := se.dev.(virtio.Survivor)
	return ok && se.kept.to != nil && !se.leaving
}

// follow begins to describe the rings before one has run, unless the device is known to have no journal.
func (se *session) follow() {
	if se.survives() && se.running.last == nil && (!se.running.asked || se.running.fd >= 0) {
		se.describeAnew()
	}
}

// survive begins to keep the device's journal, if it has one, and describes the rings. It is called before a ring
// starts.
func (se *session) survive() {
	switch {
	case !se.survives():
		return
	case se.running.last != nil && se.running.journal != "":
		se.describe()
		return
	case !se.running.asked:
		fd, err := se.dev.(virtio.Survivor).Journal()
		if err != nil {
			se.log.Warn("the device has no journal: its driver will have to begin anew if vnicd is killed", "error", err)
			fd = -1
		}
		se.running.asked, se.running.fd = true, fd
	}
	if se.running.fd >= 0 {
		se.describeAnew()
	} else if se.running.last != nil {
		se.forgetRun()
	}
}

// describeAnew begins the description, with the device's journal if that was asked for. Eventfds that are kept remain.
func (se *session) describeAnew() {
	se.running.epoch = rand.Uint64()
	if se.running.files == nil {
		se.running.files = map[uint64]*keptFile{}
	}
	var err error
	if se.running.asked {
		se.running.journal = se.kept.journal(se.running.epoch)
		err = se.kept.to.Keep(se.running.journal, se.running.fd)
	}
	h := se.choices(se.running.epoch)
	if err == nil {
		err = se.nameFiles(h)
	}
	se.running.last = h
	if err != nil {
		se.giveUp(err)
		return
	}
	se.saveState()
}

// describe stores the rings and the driver's choices if they have changed.
func (se *session) describe() {
	if !se.survives() || se.running.last == nil {
		return
	}
	h := se.choices(se.running.epoch)
	if err := se.nameFiles(h); err != nil {
		se.giveUp(err)
		return
	}
	if reflect.DeepEqual(h, se.running.last) {
		return
	}
	se.running.last = h
	se.saveState()
	se.forgetUnused()
}

// giveUp ends the description after an error, until a ring starts again.
func (se *session) giveUp(err error) {
	se.log.Warn("rings cannot be kept: the driver will have to begin anew if vnicd is killed", "error", err)
	se.forgetRun()
}

// forgetRun ends the description.
func (se *session) forgetRun() {
	journal := se.running.journal
	se.running.last, se.running.journal = nil, ""
	se.saveState()
	if journal != "" {
		se.kept.forget(journal)
	}
	for i := range se.rings {
		se.rings[i].files, se.rings[i].spare = [3]*keptFile{}, nil
	}
	se.forgetUnused()
}

// nameFiles adds the names of the rings' eventfds to h, and stores those that are not kept yet.
func (se *session) nameFiles(h *handed) error {
	for i := range se.rings {
		r := &se.rings[i]
		var names [3]string
		for k, fd := range r.eventfds() {
			if fd >= 0 && (r.files[k] == nil || r.stale[k]) || fd < 0 && r.files[k] != nil {
				f, err := se.keepFile(k, i, fd)
				if err != nil {
					return fmt.Errorf("%s eventfd of ring %d: %w", ringFiles[k], i, err)
				}
				if old := r.files[k]; k == 1 && old != nil && old != f {
					r.spare = old
				}
				r.files[k] = f
			}
			if r.stale[k] = false; r.files[k] != nil {
				names[k] = r.files[k].name
			}
		}
		h.Rings[i].Files = &names
	}
	return nil
}

// keepFile stores an eventfd, unless it is kept already: a keeper has an open file only once. Of none it returns nil.
func (se *session) keepFile(k, ring, fd int) (*keptFile, error) {
	if fd < 0 {
		return nil, nil
	}
	id, err := eventID(fd)
	if err != nil {
		return nil, err
	}
	if f := se.running.files[id]; f != nil {
		return f, nil
	}
	epoch := se.running.epoch // at first, as in a handover
	if se.running.last != nil {
		epoch = rand.Uint64()
	}
	f := &keptFile{id, eventfdName(ringFiles[k], epoch, ring)}
	if err := se.kept.to.Keep(se.kept.part(f.name), fd); err != nil {
		return nil, err
	}
	se.running.files[id] = f
	return f, nil
}

// adoptFiles notes the names of eventfds that are kept since the previous process.
func (se *session) adoptFiles(i int, p *handedParts) {
	if _, ok := se.dev.(virtio.Survivor); !ok {
		return
	}
	if se.running.files == nil {
		se.running.files = map[uint64]*keptFile{}
	}
	for k, fd := range p.rings[i] {
		if fd < 0 {
			continue
		}
		id, err := eventID(fd)
		if err != nil {
			return // keepFile reports it
		}
		if se.running.files[id] == nil {
			se.running.files[id] = &keptFile{id, p.names[i][k]}
		}
		se.rings[i].files[k] = se.running.files[id]
	}
}

// forgetUnused removes eventfds that no ring has. A call eventfd stays until two others have followed it.
func (se *session) forgetUnused() {
	used := map[*keptFile]bool{}
	for i := range se.rings {
		r := &se.rings[i]
		for _, f := range append(r.files[:], r.spare) {
			used[f] = true
		}
	}
	for id, f := range se.running.files {
		if !used[f] && se.kept.forget(se.kept.part(f.name)) {
			delete(se.running.files, id)
		}
	}
}

// eventID returns the number that the kernel gives an eventfd, which is unique while it exists.
func eventID(fd int) (uint64, error) {
	f, err := os.Open("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if id, ok := strings.CutPrefix(s.Text(), "eventfd-id:"); ok {
			return strconv.ParseUint(strings.TrimSpace(id), 10, 64)
		}
	}
	return 0, fmt.Errorf("the kernel does not number eventfds: %w", s.Err())
}
