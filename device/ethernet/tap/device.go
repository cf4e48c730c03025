package tap

import (
	"errors"
	"fmt"

	"github.com/songgao/water"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
)

// Offloads of a TAP device (linux/if_tun.h).
const (
	tunCsum  = 0x01
	tunTSO4  = 0x02
	tunTSO6  = 0x04
	tunECN   = 0x08
	tunUSO4  = 0x20
	tunUSO6  = 0x40
	tunTSO   = tunTSO4 | tunTSO6 | tunECN
	tunClone = "/dev/net/tun"
)

// device is an open TAP interface. It owns its descriptors.
type device struct {
	fds []int // one for each queue
	// header: every frame is preceded by a virtio header (IFF_VNET_HDR).
	header bool
	// takes is the work that frames from and to the kernel may leave to the receiver; zero without header.
	takes frame.Need
}

func (d *device) close() (err error) {
	for _, fd := range d.fds {
		err = errors.Join(err, unix.Close(fd))
	}
	d.fds = nil
	return err
}

// openDevice creates an interface with the given number of queues. water creates it, but can neither request virtio
// headers nor give descriptors that Go's poller does not know; so the interface is made persistent for a moment and
// opened again for each queue, then persistence is cleared. If the kernel refuses virtio headers, there are no
// offloads.
func openDevice(name string, pool *frame.Pool, queues int, offloads bool) (d device, err error) {
	multi := queues > 1
	ifce, err := water.New(water.Config{DeviceType: water.TAP,
		PlatformSpecificParams: water.PlatformSpecificParams{Name: name, Persist: true, MultiQueue: multi}})
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return d, fmt.Errorf("%w: %s: %w", ErrPermission, name, err)
	case errors.Is(err, unix.EBUSY):
		return d, fmt.Errorf("%w: %s: %w", ErrExists, name, err)
	case err != nil:
		return d, fmt.Errorf("tap: create %s: %w", name, err)
	}
	if err := ifce.Close(); err != nil {
		return d, fmt.Errorf("tap: %s: %w", name, err)
	}
	flags := uint16(0)
	if multi {
		flags |= unix.IFF_MULTI_QUEUE
	}
	if offloads {
		d.header = d.attach(name, flags|unix.IFF_VNET_HDR, queues) == nil
	}
	if !d.header {
		if err := d.attach(name, flags, queues); err != nil {
			return d, fmt.Errorf("tap: attach to %s: %w", name, err)
		}
	}
	for _, fd := range d.fds {
		if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 0); err != nil {
			_ = d.close()
			return d, fmt.Errorf("tap: %s: TUNSETPERSIST: %w", name, err)
		}
	}
	if d.header {
		d.takes = enable(d.fds[0], pool.Largest() >= frame.BigCapacity)
	}
	return d, nil
}

// attach opens all queues or none.
func (d *device) attach(name string, flags uint16, queues int) error {
	for range queues {
		fd, err := attach(name, flags)
		if err != nil {
			_ = d.close()
			return err
		}
		d.fds = append(d.fds, fd)
	}
	return nil
}

// attach opens a queue of our persistent interface.
func attach(name string, flags uint16) (fd int, err error) {
	fd, err = unix.Open(tunClone, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	req, err := unix.NewIfreq(name)
	if err != nil {
		return -1, err
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | flags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return -1, fmt.Errorf("TUNSETIFF: %w", err)
	}
	if flags&unix.IFF_VNET_HDR != 0 {
		if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, gso.HeaderLen); err != nil {
			return -1, fmt.Errorf("TUNSETVNETHDRSZ: %w", err)
		}
		if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETLE, 1); err != nil {
			return -1, fmt.Errorf("TUNSETVNETLE: %w", err)
		}
	}
	return fd, nil
}

// enable turns on all offloads that the kernel knows; large: the pool has buffers for large frames. An offload applies
// to both directions.
func enable(fd int, large bool) frame.Need {
	try := func(flags int) bool { return unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, flags) == nil }
	switch {
	case large && try(tunCsum|tunTSO|tunUSO4|tunUSO6): // Linux 6.2
		return frame.NeedAll
	case large && try(tunCsum|tunTSO):
		return frame.NeedAll &^ frame.NeedUSO
	case try(tunCsum):
		return frame.NeedCsum
	}
	return 0
}
