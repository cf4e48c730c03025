package evpn

import (
	"errors"
	"os"
	"strconv"
	"syscall"
)

// farthest is the TTL that a receiver with TTL security (RFC 5082) expects.
const farthest = 255

var errNoListener = errors.New("no socket listens there")

// sendFar has this process's sockets that listen on a TCP port answer with the highest TTL. gobgp sets it on
// connections only after it has accepted them; until then the kernel answers with its default, and a neighbour with TTL
// security drops that: two gobgps would never connect. gobgp does not expose its listeners, so they are searched among
// this process's descriptors.
func sendFar(port uint16) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	found := false
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// A duplicate remains the same socket, even if the number is closed and reused meanwhile.
		syscall.ForkLock.RLock()
		if fd, err = syscall.Dup(fd); err == nil {
			syscall.CloseOnExec(fd)
		}
		syscall.ForkLock.RUnlock()
		if err != nil {
			continue
		}
		if level, name, ok := listens(fd, port); ok {
			found = true
			err = syscall.SetsockoptInt(fd, level, name, farthest)
		}
		_ = syscall.Close(fd)
		if err != nil {
			return err
		}
	}
	if !found {
		return errNoListener
	}
	return nil
}

// listens reports whether a descriptor is a socket that listens on a TCP port, and which option is its TTL.
func listens(fd int, port uint16) (level, name int, ok bool) {
	if on, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN); err != nil || on == 0 {
		return 0, 0, false
	}
	at, err := syscall.Getsockname(fd)
	if err != nil {
		return 0, 0, false
	}
	switch at := at.(type) {
	case *syscall.SockaddrInet4:
		return syscall.IPPROTO_IP, syscall.IP_TTL, at.Port == int(port)
	case *syscall.SockaddrInet6:
		return syscall.IPPROTO_IPV6, syscall.IPV6_UNICAST_HOPS, at.Port == int(port)
	}
	return 0, 0, false
}
