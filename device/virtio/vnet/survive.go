package vnet

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// Another process can continue the device, however this one ends (virtio.Survivor): the link stays up, and the guest's
// kernel keeps its neighbours. All of the device's state is in the rings and in what the transport keeps. So its
// journal says only that, by its version: a later release may have devices with more.
//
// Frames that were between a ring and the network when the process was killed are lost, or sent twice: one that was
// taken and not returned is taken again.

// journalContent is what the journal has from its first use to its end.
var journalContent = []byte("vnet 1\n")

// Save implements virtio.Continuer: there is no state.
func (d *Device) Save(int) ([]byte, error) { return nil, nil }

// Restore implements virtio.Continuer.
func (d *Device) Restore(state []byte) error {
	if len(state) > 0 {
		return fmt.Errorf("vnet: a state of %d bytes, want none", len(state))
	}
	return nil
}

// Journal implements virtio.Survivor.
func (d *Device) Journal() (fd int, err error) {
	d.journal, err = hostdriver.SealedFile("vnicd-net-journal", journalContent)
	return d.journal, err
}

// Revive implements virtio.Survivor. It fails for the journal of a release whose devices have more state.
func (d *Device) Revive(journal int) error {
	b := make([]byte, len(journalContent)+1)
	n, err := unix.Pread(journal, b, 0)
	if err != nil {
		return fmt.Errorf("vnet: the journal: %w", err)
	}
	if !bytes.Equal(b[:n], journalContent) {
		return fmt.Errorf("vnet: the journal begins with %q, want %q", b[:n], journalContent)
	}
	return nil
}

func (d *Device) dropJournal() {
	if d.journal >= 0 {
		_ = unix.Close(d.journal)
		d.journal = -1
	}
}
