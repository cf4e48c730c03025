package localsocket

import (
	"errors"
	"fmt"
	"net"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Peer is the process at the other end of a connection, as it was when it connected (unix(7), SO_PEERCRED).
type Peer struct {
	PID, UID, GID int
	Groups        []int // supplementary ones; unknown before Linux 4.13
}

// PeerOf asks the kernel.
func PeerOf(c *net.UnixConn) (p Peer, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var cred *unix.Ucred
	var gerr error
	if cerr := raw.Control(func(fd uintptr) {
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			p.Groups, gerr = peerGroups(fd)
		}
	}); cerr != nil {
		return Peer{}, cerr
	}
	if err != nil || gerr != nil {
		return Peer{}, errors.Join(err, gerr)
	}
	p.PID, p.UID, p.GID = int(cred.Pid), int(cred.Uid), int(cred.Gid)
	return p, nil
}

// maxGroups is NGROUPS_MAX.
const maxGroups = 65536

// peerGroups asks for the supplementary groups (SO_PEERGROUPS); the kernel says how many there are if n is too small.
func peerGroups(fd uintptr) (groups []int, err error) {
	for n := 64; ; {
		ids := make([]uint32, n)
		size := uint32(4 * n)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&ids[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == 0:
			for _, id := range ids[:min(int(size)/4, n)] {
				groups = append(groups, int(id))
			}
			return groups, nil
		case errno == unix.ENOPROTOOPT, errno == unix.ENODATA: // an older kernel; a socket pair
			return nil, nil
		case errno == unix.ERANGE && int(size)/4 > n && int(size)/4 <= maxGroups:
			n = int(size) / 4
		default:
			return nil, fmt.Errorf("SO_PEERGROUPS: %w", errno)
		}
	}
}

// String describes the process, for logs.
func (p Peer) String() string {
	return fmt.Sprintf("pid %d uid %d gid %d", p.PID, p.UID, p.GID)
}
