package vhostuser

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// mapped is a region known to the host driver, and its file.
type mapped struct {
	Region
	file fileID
}

func (se *session) fileOf(fd int) (fileID, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fileID{}, fmt.Errorf("memory file: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fileID{}, protoErr("memory file has mode %#o, want a regular file", st.Mode)
	}
	if se.srv.cfg.Sealed {
		seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
		if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
			return fileID{}, protoErr("memory file is no memfd that is sealed against shrinking")
		}
		if id := (fileID{st.Dev, st.Ino}); seals&unix.F_SEAL_SEAL != 0 && !hostdriver.IsSolid(fd) && !se.knows(id) {
			return fileID{}, protoErr("memory file has F_SEAL_SEAL, so it cannot be sealed against holes; leave that seal out")
		}
	}
	return fileID{st.Dev, st.Ino}, nil
}

// giveMemory makes a memory file for a front end that is not trusted: memory that is safe to use and that the next
// process can map. It does so once for a session. The file costs nothing before it is used.
func (se *session) giveMemory(m *Message) ([]byte, error) {
	size, err := ParseU64(m.Body)
	if err != nil {
		return nil, err
	}
	if se.gave {
		return nil, refuse("the front end has got a memory file already")
	}
	if err := se.fits([]Region{{Size: size}}); err != nil {
		return nil, fmt.Errorf("%w: %w", errRefused, err)
	}
	fd, err := hostdriver.NewFile(size)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errRefused, err)
	}
	se.gave = true
	m.FDs = append(m.FDs, fd) // goes with the reply
	return AppendU64(nil, size), nil
}

// A change of memory is atomic for the next process, which finds the old table in the state file or the new one
// (session.stored): a file is kept before a state names it, and forgotten after none does.

// setMemTable replaces the memory. Regions in both tables (same place, same file) stay in use, so rings and work queues
// in them continue; a front end sends the whole table for each partial change. Rings in withdrawn memory are stopped
// first and restarted if the new table has their memory.
func (se *session) setMemTable(m *Message) error {
	table, err := ParseMemTable(m.Body, len(m.FDs))
	if err != nil {
		return err
	}
	next := make([]mapped, len(table))
	for i, r := range table {
		id, err := se.fileOf(m.FDs[i])
		if err != nil {
			return err
		}
		next[i] = mapped{r, id}
	}
	if err := se.fits(table); err != nil {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	// All checks have passed; now change, old regions before new ones, because a new one may take an old one's place.
	defer se.storeMemory()
	old := slices.Clone(se.regions)
	removed := false
	for _, r := range old {
		if !slices.Contains(next, r) {
			if err := se.withdraw(r); err != nil {
				return err
			}
			removed = true
		}
	}
	for i, r := range next {
		if slices.Contains(se.regions, r) {
			continue
		}
		if err := se.admit(r, m.FDs[i]); err != nil {
			return se.undo(old, removed, err)
		}
	}
	se.startReady()
	return nil
}

// undo restores the table before a failed change, if possible: withdrawn memory cannot be restored without its file,
// and then the connection must end, because the front end would not know that the device lost memory.
func (se *session) undo(old []mapped, removed bool, cause error) error {
	if removed {
		return fmt.Errorf("memory table partly changed, cannot continue: %w", cause)
	}
	for _, r := range slices.Clone(se.regions) {
		if !slices.Contains(old, r) {
			if err := se.withdraw(r); err != nil {
				return err
			}
		}
	}
	return fmt.Errorf("%w: %w", errRefused, cause)
}

func (se *session) addMemReg(m *Message) error {
	r, err := ParseMemReg(m.Body)
	if err != nil {
		return err
	}
	id, err := se.fileOf(m.FDs[0])
	if err != nil {
		return err
	}
	if se.again && slices.Contains(se.regions, mapped{r, id}) {
		se.startReady()
		return nil
	}
	if len(se.regions) >= MaxMemSlots {
		return refuse("memory region at PA %#x: %d regions are there, want at most %d", r.GuestPA, len(se.regions),
			MaxMemSlots)
	}
	for _, o := range se.regions {
		if r.overlaps(o.Region) {
			return refuse("memory region PA %#x size %#x user address %#x overlaps the one at PA %#x size %#x user address %#x",
				r.GuestPA, r.Size, r.UserAddr, o.GuestPA, o.Size, o.UserAddr)
		}
	}
	if err := se.admit(mapped{r, id}, m.FDs[0]); err != nil {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	se.storeMemory()
	se.startReady()
	return nil
}

func (se *session) remMemReg(m *Message) error {
	r, err := ParseMemReg(m.Body)
	if err != nil {
		return err
	}
	for _, o := range se.regions {
		// "Identified by its guest address, user address and size."
		if o.GuestPA == r.GuestPA && o.UserAddr == r.UserAddr && o.Size == r.Size {
			err := se.withdraw(o)
			se.storeMemory()
			return err
		}
	}
	if se.again {
		return nil // removed already
	}
	return refuse("no memory region at PA %#x, size %#x, user address %#x", r.GuestPA, r.Size, r.UserAddr)
}

// admit maps a region, and keeps its file for the next process. The caller still owns fd, and calls storeMemory.
func (se *session) admit(r mapped, fd int) error {
	if err := se.mapRegion(r, fd); err != nil {
		return err
	}
	if se.srv.cfg.Sealed && !hostdriver.IsSolid(fd) {
		se.abandon() // the next process cannot map a file that is sealed
	}
	if !slices.Contains(se.files, r.file) {
		se.files = append(se.files, r.file)
		se.kept.keepMemory(r.file, fd)
	}
	return nil
}

// storeMemory completes a change of memory: from now on the next process finds the present regions.
func (se *session) storeMemory() {
	if !slices.Equal(se.stored, se.regions) {
		se.stored = slices.Clone(se.regions)
		se.saveState()
	}
	se.files = slices.DeleteFunc(se.files, func(id fileID) bool {
		if se.knows(id) {
			return false
		}
		se.kept.forget(se.kept.memory(id))
		return true
	})
}

// knows reports whether a region is in that file.
func (se *session) knows(id fileID) bool {
	return slices.ContainsFunc(se.regions, func(r mapped) bool { return r.file == id })
}

// fits returns an error if these regions alone are more than the front end may share. Files that have a hole for each
// of their bytes cost it nothing.
func (se *session) fits(regions []Region) error {
	var sum uint64
	for _, r := range regions {
		if sum += r.Size; sum < r.Size {
			sum = math.MaxUint64
			break
		}
	}
	if most := se.srv.cfg.MaxMemory; most > 0 && sum > most {
		return fmt.Errorf("%d bytes of memory: this front end may share %d in all", sum, most)
	}
	return se.mem.CheckShared(sum)
}

func (se *session) mapRegion(r mapped, fd int) error {
	if most := se.srv.cfg.MaxMemory; most > 0 {
		var have uint64
		for _, o := range se.regions {
			have += o.Size
		}
		if r.Size > most-min(have, most) {
			return fmt.Errorf("%d bytes of memory beside %d: this front end may share %d in all", r.Size, have, most)
		}
	}
	err := se.mem.AddSlot(hostdriver.Slot{GuestPA: r.GuestPA, Size: r.Size, UserAddr: r.UserAddr, FD: fd,
		Offset: r.Offset})
	if err != nil {
		return err
	}
	if se.sealed {
		if err := se.mem.Seal(); err != nil {
			return errors.Join(err, se.mem.RemoveSlot(r.GuestPA, r.Size, r.UserAddr))
		}
	}
	se.regions = append(se.regions, r)
	if f := se.srv.cfg.Follower; f != nil {
		f.AddMemory(r.Region, fd)
	}
	return nil
}

// seal makes the memory safe to use, once rings start: until then regions in the same file can be added.
func (se *session) seal() error {
	if !se.srv.cfg.Sealed || se.sealed {
		return nil
	}
	err := se.mem.Seal()
	se.sealed = err == nil
	return err
}

// withdraw stops the rings in a region and unmaps it; the host driver waits until it is no longer accessed (EP-3). The
// caller calls storeMemory.
func (se *session) withdraw(r mapped) error {
	for i := range se.rings {
		if se.rings[i].q == nil {
			continue
		}
		for _, a := range se.rings[i].areas {
			if uint64(a.pa) < r.GuestPA+r.Size && r.GuestPA < uint64(a.pa)+a.n {
				se.stop(i)
				break
			}
		}
	}
	if f := se.srv.cfg.Follower; f != nil {
		f.RemoveMemory(r.Region)
	}
	// The host driver counts what unmapping takes.
	err := se.watch.Without(func() error { return se.mem.RemoveSlot(r.GuestPA, r.Size, r.UserAddr) })
	if err != nil {
		return err
	}
	se.regions = slices.DeleteFunc(se.regions, func(o mapped) bool { return o == r })
	return nil
}
