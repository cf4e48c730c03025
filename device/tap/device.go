package tap

import (
	"errors"
	"fmt"
	"os"

	"github.com/songgao/water"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/gso"
	"github.com/vnicd/vnicd/device/packet"
)

// Offloads that a TAP device gives us frames with (linux/if_tun.h).
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

// device is an open TAP interface: a descriptor that only its holder owns.
type device struct {
	fd int
	// header tells that every frame has a virtio header in front (IFF_VNET_HDR).
	header bool
	// takes is what frames from the kernel may still need, and what frames to it may; zero without header.
	takes packet.Need
}

// openDevice makes the interface. water makes it, and cannot ask for virtio headers; so it is made persistent for a
// moment, opened a second time with that flag, and made to go with that descriptor. Kernels that refuse get an interface
// without offloads.
func openDevice(name string, pool *packet.Pool, offloads bool) (d device, err error) {
	ifce, err := water.New(water.Config{DeviceType: water.TAP, PlatformSpecificParams: water.PlatformSpecificParams{Name: name, Persist: offloads}})
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return d, fmt.Errorf("%w: %s: %w", ErrPermission, name, err)
	case errors.Is(err, unix.EBUSY):
		return d, fmt.Errorf("%w: %s: %w", ErrExists, name, err)
	case err != nil:
		return d, fmt.Errorf("tap: create %s: %w", name, err)
	}
	if !offloads {
		d.fd, err = take(name, ifce)
		return d, err
	}
	if err := ifce.Close(); err != nil {
		return d, fmt.Errorf("tap: %s: %w", name, err)
	}
	for _, flags := range []uint16{unix.IFF_VNET_HDR, 0} {
		if d.fd, err = attach(name, flags); err == nil {
			d.header = flags != 0
			break
		}
	}
	if err != nil {
		return d, fmt.Errorf("tap: attach to %s: %w", name, err)
	}
	if d.header {
		d.takes = enable(d.fd, pool.Largest() >= packet.BigCapacity)
	}
	return d, nil
}

// take duplicates water's descriptor, which belongs to Go's poller, and closes water's.
func take(name string, ifce *water.Interface) (int, error) {
	defer ifce.Close()
	file, ok := ifce.ReadWriteCloser.(*os.File)
	if !ok {
		return -1, fmt.Errorf("tap: water gave a %T; want an *os.File", ifce.ReadWriteCloser)
	}
	// SyscallConn and not Fd, which may switch the file to blocking.
	raw, err := file.SyscallConn()
	if err != nil {
		return -1, fmt.Errorf("tap: %s: %w", name, err)
	}
	fd := -1
	var dupErr error
	if err := raw.Control(func(f uintptr) { fd, dupErr = unix.FcntlInt(f, unix.F_DUPFD_CLOEXEC, 3) }); err != nil {
		return -1, fmt.Errorf("tap: %s: %w", name, err)
	}
	if dupErr != nil {
		return -1, fmt.Errorf("tap: %s: dup: %w", name, dupErr)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("tap: %s: O_NONBLOCK: %w", name, err)
	}
	return fd, nil
}

// attach opens our persistent interface and makes it go with the descriptor.
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
	if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 0); err != nil {
		return -1, fmt.Errorf("TUNSETPERSIST: %w", err)
	}
	return fd, nil
}

// enable asks the kernel for frames with as much left undone as it knows; cut: we have the buffers for large ones. A kernel that
// gives frames of a kind takes them as well.
func enable(fd int, cut bool) packet.Need {
	try := func(flags int) bool { return unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, flags) == nil }
	switch {
	case cut && try(tunCsum|tunTSO|tunUSO4|tunUSO6): // Linux 6.2
		return packet.NeedAll
	case cut && try(tunCsum|tunTSO):
		return packet.NeedAll &^ packet.NeedUSO
	case try(tunCsum):
		return packet.NeedCsum
	}
	return 0
}
