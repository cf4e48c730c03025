package vhostuser

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
)

// Keeper holds copies of descriptors for the process that comes after this one.
// systemd's file descriptor store is one.
type Keeper interface {
	// Keep stores a copy of fd under name, which fits into a file name.
	Keep(name string, fd int) error
	// Forget drops what is stored under name. To forget what is not there is
	// no error.
	Forget(name string) error
}

// Kept is what a Keeper held when this process began: descriptors by name.
type Kept map[string]int

// of moves what belongs to one connection into a map of its own, nil if there is
// nothing.
func (k Kept) of(connection string) (part Kept) {
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

// take hands a descriptor over to the caller; false if there is none.
func (k Kept) take(name string) (int, bool) {
	fd, ok := k[name]
	delete(k, name)
	return fd, ok
}

// connection takes the socket; nil without an error if there is none.
func (k Kept) connection(name string) (*net.UnixConn, error) {
	fd, ok := k.take(name)
	if !ok {
		return nil, nil
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	c, err := net.FileConn(f) // a copy
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, errors.New("not a Unix socket")
	}
	return u, nil
}

// drop closes what nobody has taken, here and in the keeper.
func (k Kept) drop(keeper Keeper) {
	for name, fd := range k {
		_ = unix.Close(fd)
		_ = keeper.Forget(name) // at worst the next process finds it as useless
	}
	clear(k)
}

// Drop closes what no Listen has taken and returns the names of the connections.
func (k Kept) Drop(keeper Keeper) (connections []string) {
	for name := range k {
		if strings.Count(name, "/") == 1 {
			connections = append(connections, name)
		}
	}
	slices.Sort(connections)
	k.drop(keeper)
	return connections
}

// keeping is a connection's part in a Keeper. QEMU's generic device does not
// survive the end of its connection (as of 11.1 it neither negotiates anew nor
// notices what it lacks), so the connection must outlive this process: itself,
// the back-end channel, the guest's memory, and what was agreed on, which is
// said only once. Rings are not kept: the driver resets the device as soon as it
// learns that the device has lost its state, and describes them again.
type keeping struct {
	to    Keeper // nil: nothing is kept
	name  string // of the connection; the others have it as prefix
	log   hclog.Logger
	state int // a memory file of keptSize bytes that begins with keptState as JSON
}

// keptState is what was agreed on. Fields are added, never changed: the next
// process may be of another release.
type keptState struct {
	Protocol uint64       `json:"protocol"` // features
	Live     bool         `json:"live"`     // rings run; see backend
	Regions  []keptRegion `json:"regions"`
}

type keptRegion struct {
	GuestPA  uint64 `json:"pa"`
	Size     uint64 `json:"size"`
	UserAddr uint64 `json:"user"`
	Offset   uint64 `json:"offset"`
}

// keptSize bounds the JSON: MaxMemSlots regions of at most 128 bytes.
const keptSize = 32 << 10

func (k *keeping) connection() string { return k.name }
func (k *keeping) channel() string    { return k.name + "/channel" }
func (k *keeping) agreed() string     { return k.name + "/state" }
func (k *keeping) memory(r Region) string {
	return k.name + "/memory/" + strconv.FormatUint(r.GuestPA, 16)
}

// begin keeps a connection from now on.
func (k *keeping) begin(c *net.UnixConn) error {
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
		return fmt.Errorf("a memory file for the connection's state: %w", err)
	}
	k.keep(k.agreed(), fd)
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { k.keep(k.connection(), int(fd)) })
}

func (k *keeping) keep(name string, fd int) {
	if k.to == nil {
		return
	}
	if err := k.to.Keep(name, fd); err != nil {
		k.log.Warn("cannot be stored with systemd: the VM will lose this device when vnicd restarts", "what", name, "error",
			err)
	}
}

func (k *keeping) forget(name string) {
	if k.to == nil {
		return
	}
	if err := k.to.Forget(name); err != nil {
		k.log.Warn("cannot be removed from systemd's store", "what", name, "error", err)
	}
}

// write says where the connection stands.
func (k *keeping) write(s *keptState) {
	if k.to == nil {
		return
	}
	b, err := json.Marshal(s)
	if err == nil && len(b) > keptSize {
		err = fmt.Errorf("%d bytes, at most %d fit", len(b), keptSize)
	}
	if err == nil {
		// In one go, and within a page as a rule, so that a process that is killed
		// leaves the old or the new. What a longer one leaves behind is not read.
		_, err = unix.Pwrite(k.state, b, 0)
	}
	if err != nil {
		k.log.Error("connection state cannot be stored with systemd", "error", err)
	}
}

// end forgets all of the connection.
func (k *keeping) end(regions []mapped) {
	if k.to == nil {
		return
	}
	k.forget(k.connection())
	k.forget(k.agreed())
	k.forget(k.channel())
	for _, r := range regions {
		k.forget(k.memory(r.Region))
	}
	if k.state >= 0 {
		_ = unix.Close(k.state)
	}
	k.to = nil // what follows is teardown
}

// stateFile reads at offsets.
type stateFile int

func (f stateFile) ReadAt(b []byte, off int64) (int, error) {
	n, err := unix.Pread(int(f), b, off)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return max(n, 0), err
}

// saveState writes where the session stands, for the next process.
func (se *session) saveState() {
	if se.kept.to == nil {
		return
	}
	s := keptState{Protocol: se.proto, Live: se.backend.isLive(), Regions: make([]keptRegion, len(se.regions))}
	for i, r := range se.regions {
		s.Regions[i] = keptRegion(r.Region)
	}
	se.kept.write(&s)
}

// adopt brings the session to where the process before this one left it, except
// for the rings. The driver is told that the device has lost its state, if it
// runs one.
func (se *session) adopt(kept Kept) error {
	fd, ok := kept.take(se.kept.agreed())
	if !ok {
		return errors.New("the connection's state was not kept")
	}
	se.kept.state = fd
	var s keptState
	if err := json.NewDecoder(io.NewSectionReader(stateFile(fd), 0, keptSize)).Decode(&s); err != nil {
		return fmt.Errorf("the state: %w", err)
	}
	if extra := s.Protocol &^ se.srv.protos; extra != 0 {
		return fmt.Errorf("protocol features %#x are not offered any more", extra)
	}
	se.proto = s.Protocol
	for _, r := range s.Regions {
		if err := se.adoptRegion(Region(r), kept); err != nil {
			return fmt.Errorf("memory at PA %#x: %w", r.GuestPA, err)
		}
	}
	if fd, ok := kept.take(se.kept.channel()); ok {
		if err := se.backend.set(fd, se.log); err != nil {
			return err
		}
	}
	se.wasLive = s.Live
	se.log.Info("resumed a VM of the previous vnicd", "memory_regions", len(s.Regions), "driver", s.Live)
	return nil
}

func (se *session) adoptRegion(r Region, kept Kept) error {
	fd, ok := kept.take(se.kept.memory(r))
	if !ok {
		return errors.New("its file was not kept")
	}
	defer unix.Close(fd)
	id, err := se.fileOf(fd)
	if err != nil {
		return err
	}
	return se.mapRegion(mapped{r, id}, fd)
}

// announce tells a driver that was there under the process before this one.
// Requests that came meanwhile go first: QEMU may have stopped the rings.
func (se *session) announce() {
	if !se.wasLive || se.t.Pending() {
		return
	}
	se.wasLive = false
	se.backend.setLive(true, se.log)
	se.backend.configChanged(se.log)
	se.backend.setLive(false, se.log)
}
