package guestdrv

import (
	"fmt"
	"net/netip"
)

// GID is a port address, in network order: in RoCEv2 an IP address, see IPGID.
type GID [16]byte

// IPGID returns the GID of an IP address in RoCEv2: IPv6 unchanged, IPv4 mapped into IPv6 (IBTA A17.4.5).
func IPGID(a netip.Addr) GID { return a.As16() }

// Addr returns the IP address of which g is the GID. It is the inverse of IPGID, except that an IPv6 zone is lost and
// an IPv4-mapped IPv6 address becomes IPv4.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

// String returns the address as netip.Addr prints it, such as "10.0.0.5" or "fd00::5".
func (g GID) String() string { return g.Addr().String() }

// MAC is a MAC address.
type MAC [6]byte

// String returns the address in the form "02:00:00:00:01:01".
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}
