package ivshmem

import (
	"errors"
	"fmt"
	"hash/crc32"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
)

// A VM's memory goes to another host, or into a snapshot, with BAR 2 in it. So whenever the VM stops, the device's
// state is put there, behind the registers, before QEMU copies memory for the last time (depart). A device to which no
// driver has spoken yet begins, when its VM starts, with the state that it finds (arrive; CO-4, CO-5). The VM's network
// card tells of both moments; the guest does not run then.
//
// The guest can write there, too: the state is its own, it is copied once, and checked as if the driver had made it
// (CO-7). Where there is none that is right, the device is as after a reset, and the driver begins anew.

// Offsets from regsSize on.
const (
	offStateMagic    = 0
	offStateVersion  = 8
	offStateStatus   = 12
	offStateFeatures = 16
	offStateLen      = 24
	offStateSum      = 28 // CRC-32C of the state
	offStateBases    = 32 // where queue i goes on
	stateHeader      = offStateBases + 4*MaxQueues

	stateMagic   = 0x746174732d617268 // "hra-stat"
	stateVersion = 1

	maxState = barSize - regsSize - stateHeader
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// saved is a device's state, with what its transport knows.
type saved struct {
	status   uint32
	features uint64
	bases    [MaxQueues]uint32
	state    []byte
}

// put stores x, and returns how many bytes of BAR 2 it takes, behind the registers.
func (b *bar) put(x *saved) (int, error) {
	if len(b.mem) < barSize {
		return 0, errors.New("BAR 2 was made by an older vnicd and has no room for it")
	}
	if len(x.state) > maxState {
		return 0, fmt.Errorf("%d bytes, BAR 2 has room for %d", len(x.state), maxState)
	}
	at := b.mem[regsSize:]
	le.PutUint32(at[offStateVersion:], stateVersion)
	le.PutUint32(at[offStateStatus:], x.status)
	le.PutUint64(at[offStateFeatures:], x.features)
	le.PutUint32(at[offStateLen:], uint32(len(x.state)))
	le.PutUint32(at[offStateSum:], crc32.Checksum(x.state, castagnoli))
	for i, v := range x.bases {
		le.PutUint32(at[offStateBases+4*i:], v)
	}
	copy(at[stateHeader:], x.state)
	le.PutUint64(at[offStateMagic:], stateMagic)
	return stateHeader + len(x.state), nil
}

// get copies what put has stored; nil: there is nothing.
func (b *bar) get() (*saved, error) {
	if len(b.mem) < barSize || le.Uint64(b.mem[regsSize:]) != stateMagic {
		return nil, nil
	}
	at := b.mem[regsSize:]
	var h [stateHeader]byte
	copy(h[:], at)
	n := le.Uint32(h[offStateLen:])
	if v := le.Uint32(h[offStateVersion:]); v != stateVersion {
		return nil, fmt.Errorf("state of version %d, this vnicd knows %d", v, stateVersion)
	}
	if n > maxState {
		return nil, fmt.Errorf("state of %d bytes, at most %d", n, maxState)
	}
	x := &saved{status: le.Uint32(h[offStateStatus:]), features: le.Uint64(h[offStateFeatures:])}
	x.state = append(x.state, at[stateHeader:stateHeader+n]...)
	if sum := crc32.Checksum(x.state, castagnoli); sum != le.Uint32(h[offStateSum:]) {
		return nil, errors.New("state with a wrong checksum")
	}
	for i := range x.bases {
		x.bases[i] = le.Uint32(h[offStateBases+4*i:])
	}
	return x, nil
}

// drop removes what put has stored, and gives its memory back. It reports whether there was something.
func (b *bar) drop() bool {
	if len(b.mem) < barSize || le.Uint64(b.mem[regsSize+offStateMagic:]) == 0 {
		return false
	}
	le.PutUint64(b.mem[regsSize+offStateMagic:], 0)
	// At worst it stays.
	_ = unix.Fallocate(b.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, regsSize, barSize-regsSize)
	return true
}

// depart puts the device's state into BAR 2, once its queues have stopped. The caller holds Server.mu.
func (se *session) depart() {
	if se.failed != nil || !se.movable || len(se.bar.mem) < barSize { // QEMU does not migrate that of an older vnicd
		return
	}
	state, err := se.dev.SaveState()
	if err != nil && !se.refused(err) {
		return
	}
	n := 0
	if err == nil {
		n, err = se.bar.put(&saved{status: se.status, features: se.features, bases: se.bases, state: state})
	}
	if err == nil {
		err = se.mark(n)
	}
	if err != nil {
		se.srv.log.Warn("the HCA's state cannot leave with its VM: on another host, or from a snapshot, its driver would begin anew",
			"socket", se.srv.cfg.Path, "error", err)
		se.drop()
	}
}

// drop removes the state from BAR 2.
func (se *session) drop() {
	if se.bar.drop() {
		// What may have been copied already is not to be found elsewhere. If this fails, so did depart.
		_ = se.mark(stateHeader)
	}
}

// mark logs that the registers were written, and n bytes behind them.
func (se *session) mark(n int) error {
	w := se.srv.writes
	if w == nil {
		return nil
	}
	for _, r := range se.srv.regions {
		var st unix.Stat_t
		if err := unix.Fstat(r.fd, &st); err == nil && st.Ino == se.bar.ino && r.Offset == 0 {
			return w.log.MarkRange(r.GuestPA, uint64(regsSize+n))
		}
	}
	return errors.New("the guest has not enabled the device's memory")
}

// arrive continues what another device has put into BAR 2. The caller holds Server.mu.
func (se *session) arrive() {
	defer se.drop() // if this process is killed before, the next one tries again
	if se.ran || !se.movable {
		return
	}
	// A request may be on its way; what was answered is not obeyed again.
	se.ran, se.answered = true, se.bar.word(offAnswer).Load()
	x, err := se.bar.get()
	if x == nil && err == nil {
		if se.bar.word(offStatus).Load() == se.status {
			se.describe() // the VM may have come from another host, without a driver
			return
		}
		err = errors.New("none came: the VM's last host had no vnicd when it stopped")
	}
	if se.status != 0 { // a killed process had begun
		err = errors.Join(err, se.reset())
	}
	if err == nil {
		r := se.bar.request()
		err = se.adopt(x, &r)
	}
	if se.failed != nil {
		return
	}
	if err != nil {
		se.srv.log.Error("the HCA's state that came with its VM is refused: its driver has to begin anew", "socket",
			se.srv.cfg.Path, "reason", err)
		_ = se.reset()
	} else {
		se.readConfig()
		se.srv.log.Info("the HCA goes on with the state that came with its VM", "socket", se.srv.cfg.Path, "bytes",
			len(x.state))
	}
	se.describe() // the registers are the other device's
	se.bar.put32(offStatus, se.status)
	for _, fd := range se.out { // a notice may have been lost with it
		eventfd.Raise(fd, &eventfd.Hint{})
	}
	eventfd.Raise(se.in[0], &eventfd.Hint{}) // and a request
}

// adopt brings the device into the state of x, with the queues that the driver has described.
func (se *session) adopt(x *saved, r *request) error {
	const ready = virtio.StatusFeaturesOK | virtio.StatusDriverOK
	switch extra := x.features &^ se.offered; {
	case x.status&^statusBits != 0 || x.status&ready != ready:
		return fmt.Errorf("device status %#x", x.status)
	case extra != 0:
		return fmt.Errorf("features %#x are not offered here", extra)
	}
	r.status, r.features = x.status, x.features
	if err := se.setFeatures(r); err != nil {
		return err
	}
	if se.status&virtio.StatusFeaturesOK == 0 {
		return fmt.Errorf("features %#x cannot be used here", x.features)
	}
	if err := se.describeQueues(r); err != nil {
		return err
	}
	if err := se.dev.LoadState(x.state); err != nil {
		_ = se.refused(err)
		return err
	}
	if err := se.dev.SetStatus(uint8(r.status)); err != nil && !se.refused(err) {
		return err
	}
	se.status, se.bases = r.status, x.bases
	return nil
}

// writeLog is the log of pages that a migration wants.
type writeLog struct {
	where vhostuser.LogBase
	fd    int
	log   *vhostuser.WriteLog
}

func newWriteLog(where vhostuser.LogBase, fd int) (*writeLog, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	log, err := vhostuser.OpenWriteLog(dup, where)
	if err != nil {
		return nil, err
	}
	return &writeLog{where, dup, log}, nil
}

func (w *writeLog) close() {
	if w != nil {
		w.log.Close()
	}
}

// setLog tells the device where to log its writes, or that it need not. The caller holds Server.mu.
func (se *session) setLog() {
	if w := se.srv.writes; w != nil {
		if err := se.dev.SetLogBase(w.where, w.fd); err != nil && !se.refused(err) {
			return
		}
	}
	if se.status&virtio.StatusFeaturesOK == 0 {
		return // setFeatures tells it
	}
	if err := se.tellFeatures(); err != nil {
		_ = se.refused(err)
	}
}
