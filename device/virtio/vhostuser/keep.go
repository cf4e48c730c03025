package vhostuser

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// Keeper holds copies of descriptors for the next process, such as systemd's file descriptor store.
type Keeper interface {
	// Keep stores a copy of fd under name, which fits into a file name.
	Keep(name string, fd int) error
	// Forget removes what is stored under name. An unknown name is no error.
	Forget(name string) error
	// Ending reports whether this process ends in good order: Forget does nothing then, and connections are handed over.
	Ending() bool
}

// Kept is what a Keeper held when this process started: descriptors by name.
type Kept map[string]int

// Of moves the descriptors of one connection into a map of their own, nil if there are none.
func (k Kept) Of(connection string) (part Kept) {
	for name, fd := range k {
		if name == connection || strings.HasPrefix(name, connection+"/") {
			if part == nil {
				part = Kept{}
			}
			part[name] = fd
		}
	}
	maps.DeleteFunc(k, func(name string, _ int) bool { _, ok := part[name]; return ok })
	return part
}

// Take passes a descriptor to the caller; false if there is none.
func (k Kept) Take(name string) (int, bool) {
	fd, ok := k[name]
	delete(k, name)
	return fd, ok
}

// Connection takes the socket; nil without an error if there is none.
func (k Kept) Connection(name string) (*net.UnixConn, error) {
	fd, ok := k.Take(name)
	if !ok {
		return nil, nil
	}
	return unixConn(fd, name)
}

// Discard closes the remaining descriptors, and removes them from the keeper.
func (k Kept) Discard(keeper Keeper) {
	for _, fd := range k {
		_ = unix.Close(fd)
	}
	names := slices.Collect(maps.Keys(k))
	clear(k)
	for _, name := range names {
		_ = keeper.Forget(name) // at worst the next process finds and drops it
	}
}

// Drop closes the descriptors that no Listen has taken, and returns the names of their connections.
func (k Kept) Drop(keeper Keeper) (connections []string) {
	for name := range k {
		if strings.Count(name, "/") == 1 {
			connections = append(connections, name)
		}
	}
	slices.Sort(connections)
	k.Discard(keeper)
	return connections
}

// keeping is a connection's use of a Keeper. QEMU's generic device does not survive the end of its connection (as of
// 11.1 it neither negotiates again nor notices the loss), so the connection must outlive this process: socket, back-end
// channel, guest memory, and the negotiated state, which QEMU sends only once. Rings of most devices are not kept while
// they run: the driver resets the device as soon as it is told that the device has lost its state, and describes them
// again. A process that ends in good order hands the rings and the device's own state over, too (handover.go); those of
// a virtio.Survivor are kept all the time (running.go).
type keeping struct {
	to    Keeper // nil: nothing is kept
	name  string // of the connection; prefix of the others
	log   hclog.Logger
	inner bool         // the front end is within this process
	state int          // a memory file, see statefile.go
	lives *atomic.Bool // it is kept; see Server.Keeps
	loss  string       // what follows if it is not, for the log
}

// keptState is the negotiated state. Fields may be added but not changed: the next process may be of another release.
type keptState struct {
	Sum      string       `json:"sum"`      // of the rest, see statefile.go; first
	Protocol uint64       `json:"protocol"` // features
	Live     bool         `json:"live"`     // rings run; see backend
	Regions  []keptRegion `json:"regions"`
	Untold   bool         `json:"untold,omitempty"`  // the driver was not told yet that the device lost its state
	Handed   *handed      `json:"handed,omitempty"`  // nil: the process has not ended in good order
	Log      *keptLog     `json:"log,omitempty"`     // of written pages
	Logging  bool         `json:"logging,omitempty"` // the front end wants it
	Running  *handed      `json:"running,omitempty"` // for the case that the process is killed; without a context
}

type keptRegion struct {
	GuestPA  uint64 `json:"pa"`
	Size     uint64 `json:"size"`
	UserAddr uint64 `json:"user"`
	Offset   uint64 `json:"offset"`
	File     string `json:"file,omitempty"` // fileID.String; "": written by an older vnicd
}

func (r *keptRegion) region() Region {
	return Region{GuestPA: r.GuestPA, Size: r.Size, UserAddr: r.UserAddr, Offset: r.Offset}
}

func (k *keeping) connection() string { return k.name }
func (k *keeping) channel() string    { return k.name + "/channel" }
func (k *keeping) agreed() string     { return k.name + "/state" }
func (k *keeping) replies() string    { return k.name + "/replies" } // see reply.go

// memory names the descriptor of a file. It is not one of a region: a VM's regions are usually parts of one file.
func (k *keeping) memory(id fileID) string { return k.name + "/memory/" + id.String() }

// oldMemory is the name that older vnicds gave the file of a region.
func (k *keeping) oldMemory(r Region) string {
	return k.name + "/memory/" + strconv.FormatUint(r.GuestPA, 16)
}

// begin starts to keep a connection, with its pipe for replies.
func (k *keeping) begin(c *net.UnixConn, pipe int, s keptState) error {
	if k.to == nil {
		return nil
	}
	fd, err := unix.MemfdCreate("vnicd-state", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		k.state = fd
		err = unix.Ftruncate(fd, keptSize)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return fmt.Errorf("memory file for the connection's state: %w", err)
	}
	k.write(&s)
	parts := k.keep(k.agreed(), fd)
	parts = k.keep(k.replies(), pipe) && parts
	if k.inner {
		k.lives.Store(parts)
		return nil
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { k.lives.Store(k.keep(k.connection(), int(fd)) && parts) })
}

// keep stores a descriptor, and reports whether it did.
func (k *keeping) keep(name string, fd int) bool {
	if k.to == nil {
		return false
	}
	err := k.to.Keep(name, fd)
	if err != nil {
		k.log.Warn("cannot be stored with systemd: "+k.loss, "what", name, "error", err)
		k.lives.Store(false)
	}
	return err == nil
}

// keepMemory stores a memory file. A VM's front end gives all devices the same open file, which systemd stores only
// once, whatever the names: so it is opened again, if that has no effect on others.
func (k *keeping) keepMemory(id fileID, fd int) {
	if k.to != nil && opensFreely(fd) {
		if own, err := reopen(fd); err == nil {
			defer unix.Close(own)
			fd = own
		}
	}
	k.keep(k.memory(id), fd)
}

// reopen opens the file of fd once more, for no other access than fd permits: this process may have more rights than
// the front end.
func reopen(fd int) (int, error) {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return -1, err
	}
	return unix.Open("/proc/self/fd/"+strconv.Itoa(fd), flags&unix.O_ACCMODE|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
}

// opensFreely reports whether fd is of a file that only memory stands behind: opening it asks nobody.
func opensFreely(fd int) bool {
	var st unix.Stat_t
	var fs unix.Statfs_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && unix.Fstatfs(fd, &fs) == nil &&
		(fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.HUGETLBFS_MAGIC)
}

// forget removes a descriptor, and reports whether the keeper has it no more: one whose process ends keeps it.
func (k *keeping) forget(name string) bool {
	if k.to == nil {
		return true
	}
	err := k.to.Forget(name)
	if err != nil {
		k.log.Warn("cannot be removed from systemd's store", "what", name, "error", err)
	}
	return err == nil && !k.to.Ending() // asked afterwards: the process may have been told to end meanwhile
}

// write stores the connection's state.
func (k *keeping) write(s *keptState) {
	if k.to == nil {
		return
	}
	if err := writeState(k.state, s); err != nil {
		k.log.Error("connection state cannot be stored with systemd", "error", err)
	}
}

// end removes everything of the connection from the keeper.
func (k *keeping) end(files []fileID, others []string) {
	if k.to == nil {
		return
	}
	k.forget(k.connection())
	k.forget(k.agreed())
	k.forget(k.replies())
	k.forget(k.channel())
	k.forget(k.writeLog())
	for _, id := range files {
		k.forget(k.memory(id))
	}
	for _, name := range others {
		k.forget(name)
	}
	if k.state >= 0 {
		_ = unix.Close(k.state)
	}
	k.lives.Store(false)
	k.to = nil // teardown follows, which must not be stored
}

// abandon ends the keeping of a connection that goes on: it will end with this process.
func (se *session) abandon() {
	if se.kept.to == nil {
		return
	}
	se.log.Info("this connection will end with this vnicd: its memory is not of a file that vnicd has made")
	se.kept.end(se.files, se.running.names(&se.kept))
	se.running.last = nil
}

// saveState stores the session's state for the next process.
func (se *session) saveState() {
	if se.kept.to != nil && !se.leaving {
		s := se.state()
		se.kept.write(&s)
	}
}

func (se *session) state() keptState {
	s := keptState{Protocol: se.proto, Live: se.backend.isLive() || se.oldLive, Untold: se.untold,
		Regions: make([]keptRegion, len(se.stored)), Running: se.running.last, Logging: se.logs}
	if se.dirty != nil {
		s.Log = &keptLog{se.dirty.base.Size, se.dirty.base.Offset}
	}
	for i, r := range se.stored {
		s.Regions[i] = keptRegion{r.GuestPA, r.Size, r.UserAddr, r.Offset, r.file.String()}
	}
	return s
}

// adoptCounted is adopt, and counts the result.
func (se *session) adoptCounted(kept Kept) error {
	defer func() { // also after a panic
		se.counted = true
		how := anew
		switch {
		case se.revived && se.negotiated:
			how = revived
		case se.backend.isLive() && se.silence > 0:
			how = continued
		case se.drove && !se.goesOn:
			how = lost
		}
		se.srv.cfg.Continuity.end(how, se.silence)
	}()
	return se.adopt(kept)
}

// adopt restores the session's state from the previous process, except for the rings. It is checked as if the front end
// had sent it, for it did. If the state is not continued, the driver is told that the device has lost it.
func (se *session) adopt(kept Kept) error {
	fd, ok := kept.Take(se.kept.agreed())
	if !ok {
		return errors.New("the connection's state was not kept")
	}
	se.kept.state = fd
	s, err := readState(fd)
	if err != nil {
		return fmt.Errorf("the state: %w", err)
	}
	live := s.Live || s.Running.runs() // the process may have been killed before it wrote that a ring runs
	se.drove = live || s.Handed.runs()
	if err := se.adoptPipe(kept); err != nil {
		return err
	}
	if extra := s.Protocol &^ se.protos; extra != 0 {
		return fmt.Errorf("protocol features %#x are not offered any more", extra)
	}
	se.proto = s.Protocol
	if len(s.Regions) > MaxMemSlots {
		return fmt.Errorf("%d memory regions, want at most %d", len(s.Regions), MaxMemSlots)
	}
	files := kept.Of(se.kept.name + "/memory")
	defer func() { // the keeper has those of regions, and needs no others
		for _, fd := range files {
			_ = unix.Close(fd)
		}
		for name := range files {
			if !slices.ContainsFunc(se.regions, func(r mapped) bool { return se.kept.memory(r.file) == name }) {
				se.kept.forget(name)
			}
		}
	}()
	for i := range s.Regions {
		r := &s.Regions[i]
		if err := r.region().check(); err != nil {
			return err
		}
		if err := se.adoptRegion(r, files); err != nil {
			return fmt.Errorf("memory at PA %#x: %w", r.GuestPA, err)
		}
	}
	se.stored = slices.Clone(se.regions)
	if err := se.adoptLog(&s, kept); err != nil {
		return err
	}
	if fd, ok := kept.Take(se.kept.channel()); ok {
		if err := se.backend.set(fd, se.log); err != nil {
			return err
		}
	}
	se.wasLive, se.oldLive = live, live
	se.untold = s.Untold
	se.backend.hold() // QEMU may have begun to stop the rings
	goesOn := se.takeOver(&s, kept)
	se.goesOn = goesOn
	if !goesOn && (se.srv.cfg.Sealed || se.srv.cfg.Reconnects) {
		return errors.New("the device's state cannot be continued, and its driver does not begin anew on a connection")
	}
	if !goesOn || s.Untold {
		se.untold = true
		se.backend.configChanged(se.log) // waits for announce, or until rings start
	}
	se.kept.lives.Store(true)
	se.log.Info("resumed a VM of the previous vnicd", "memory_regions", len(s.Regions), "driver", live, "continued",
		goesOn)
	return nil
}

// adoptRegion maps a region in one of the kept files.
func (se *session) adoptRegion(k *keptRegion, files Kept) error {
	r, name := k.region(), se.kept.name+"/memory/"+k.File
	if k.File == "" {
		name = se.kept.oldMemory(r)
	}
	fd, ok := files[name]
	if !ok {
		return errors.New("its file was not kept")
	}
	id, err := se.fileOf(fd)
	if err != nil {
		return err
	}
	if se.srv.cfg.Sealed && !hostdriver.IsSolid(fd) {
		return errors.New("pages can be taken out of its file")
	}
	if !slices.Contains(se.files, id) {
		se.files = append(se.files, id)
		if k.File == "" {
			se.kept.forget(name)
			se.kept.keepMemory(id, fd)
		}
	}
	return se.mapRegion(mapped{r, id}, fd)
}

// endLive records that the front end stops its rings: from then on it must not get a notice, nor from the next process.
func (se *session) endLive() {
	se.wasLive = false
	if se.oldLive {
		se.oldLive = false
		se.saveState()
	}
}

// announce tells the previous process's driver that the device has lost its state. Pending requests are handled first,
// because QEMU may have stopped the rings, as it does to pause the VM. Then, and if they had been stopped before, the
// driver is told when they start.
func (se *session) announce() {
	if !se.wasLive || se.t.Pending() {
		return
	}
	se.wasLive = false
	se.backend.setLive(true, se.log)
	se.backend.setLive(false, se.log)
	se.told()
}

// told records that the driver was told, if it was.
func (se *session) told() {
	if se.untold && !se.backend.isPending() {
		se.untold = false
		se.saveState()
	}
}
