package vhostuser

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
)

// The device's own state, which a front end carries to another host, or keeps (CO-4, CO-5). While no ring runs, it asks
// for a transfer (SET_DEVICE_STATE_FD) through a pipe that it has made, and for the result at its end
// (CHECK_DEVICE_STATE). A device whose state was saved goes on if its rings start again. State that is loaded is
// checked as if the driver had made it (CO-7); if it is refused, the device has none.

// StateTransfer is the payload of SET_DEVICE_STATE_FD.
type StateTransfer struct {
	Direction uint32 // SaveState or LoadState
	Phase     uint32 // 0: the device has stopped; others are not defined
}

// Directions of a transfer.
const (
	SaveState = 0
	LoadState = 1
)

const stateTransferSize = 8

// ParseStateTransfer decodes a StateTransfer and checks it.
func ParseStateTransfer(b []byte) (StateTransfer, error) {
	if len(b) != stateTransferSize {
		return StateTransfer{}, protoErr("state transfer of %d bytes, want %d", len(b), stateTransferSize)
	}
	x := StateTransfer{ne.Uint32(b), ne.Uint32(b[4:])}
	if x.Direction > LoadState || x.Phase != 0 {
		return x, protoErr("state transfer in direction %d, phase %d, want direction 0 or 1, phase 0", x.Direction, x.Phase)
	}
	return x, nil
}

// Append encodes x.
func (x StateTransfer) Append(b []byte) []byte {
	return ne.AppendUint32(ne.AppendUint32(b, x.Direction), x.Phase)
}

// StateNoFD in the reply to SET_DEVICE_STATE_FD says that no descriptor comes with it; the lowest byte is 0 if the
// transfer has begun.
const StateNoFD = 1 << 8

// MaxTransfer bounds a state that is transferred, in bytes. A guest can have it saved as often as it stops its network
// card, so it is not for the largest.
const MaxTransfer = 32 << 20

// transferTime bounds how long a front end may take for a transfer.
const transferTime = 20 * time.Second

// transfer is a transfer that goes on beside the connection's goroutine.
type transfer struct {
	load bool
	file *os.File
	data bytes.Buffer // loaded
	done chan struct{}
	err  error // valid once done is closed
}

// moveState begins a transfer, in place of one whose result nobody has asked for.
func (se *session) moveState(m *Message) ([]byte, error) {
	x, err := ParseStateTransfer(m.Body)
	if err != nil {
		return nil, err
	}
	se.transfer.end()
	se.transfer = nil
	if err := se.beginTransfer(x, m.TakeFD(0)); err != nil {
		se.log.Warn("the device's state is not transferred", "reason", err)
		return AppendU64(nil, StateNoFD|1), nil
	}
	return AppendU64(nil, StateNoFD), nil
}

// beginTransfer takes over fd.
func (se *session) beginTransfer(x StateTransfer, fd int) error {
	err := unix.SetNonblock(fd, true) // so that deadlines hold
	f := os.NewFile(uintptr(fd), "device state")
	t := &transfer{load: x.Direction == LoadState, file: f, done: make(chan struct{})}
	if err == nil {
		err = f.SetDeadline(time.Now().Add(transferTime))
	}
	if err == nil {
		err = se.standsStill()
	}
	var state []byte
	if err == nil && !t.load {
		state, err = se.dev.(virtio.Continuer).Save(MaxTransfer)
	}
	if err != nil {
		_ = f.Close()
		return err
	}
	se.transfer = t
	go t.run(state)
	return nil
}

// standsStill returns an error if a ring runs.
func (se *session) standsStill() error {
	for i := range se.rings {
		if se.rings[i].q != nil {
			return fmt.Errorf("ring %d runs", i)
		}
	}
	return nil
}

// run moves the bytes.
func (t *transfer) run(state []byte) {
	defer close(t.done)
	if t.load {
		_, t.err = io.Copy(&t.data, io.LimitReader(t.file, MaxTransfer+1))
		if t.err == nil && t.data.Len() > MaxTransfer {
			t.err = fmt.Errorf("more than %d bytes", MaxTransfer)
		}
	} else {
		_, t.err = t.file.Write(state)
	}
	t.err = errors.Join(t.err, t.file.Close())
}

// end ends a transfer; nil: there is none.
func (t *transfer) end() {
	if t != nil {
		_ = t.file.SetDeadline(time.Now())
		<-t.done
	}
}

// checkState returns the result of the transfer.
func (se *session) checkState() []byte {
	if err := se.endTransfer(); err != nil {
		se.log.Warn("the device's state was not transferred", "reason", err)
		return AppendU64(nil, 1)
	}
	return AppendU64(nil, 0)
}

func (se *session) endTransfer() error {
	t := se.transfer
	if t == nil {
		return errors.New("no transfer has begun")
	}
	se.transfer = nil
	<-t.done
	switch {
	case t.err != nil:
		return t.err
	case !t.load || t.data.Len() == 0:
		return nil
	}
	if err := se.standsStill(); err != nil {
		return err
	}
	return se.dev.(virtio.Continuer).Restore(t.data.Bytes())
}
