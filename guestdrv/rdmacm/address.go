package rdmacm

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// IP addressing of connections, IBTA annex A11: the service ID names protocol and port, and the private data of a REQ
// begins with the addresses.

const (
	// The IP protocol numbers TCP and UDP below the prefix 0x0000000001.
	portSpaceTCP = 0x0106 // RDMA_PS_TCP
	portSpaceUDP = 0x0111 // RDMA_PS_UDP
	headerLen    = 36
	headerV0     = 0 // major and minor version

	// MaxPrivateREQ is the room for the private data of Dial, MaxPrivateREP of Accept, MaxPrivateREJ of Reject;
	// MaxPrivateResolve of Resolve, MaxPrivateService of a DatagramService.
	MaxPrivateREQ = cm.PrivateREQ - headerLen
	MaxPrivateREP = cm.PrivateREP
	MaxPrivateREJ = cm.PrivateREJ

	MaxPrivateResolve = cm.PrivateSIDRReq - headerLen
	MaxPrivateService = cm.PrivateSIDRRep
)

// serviceID returns the service ID of a port in RDMA_PS_TCP.
func serviceID(port uint16) uint64 { return portSpaceTCP<<16 | uint64(port) }

// portOf is the inverse of serviceID; ok is false for services that are no ports of RDMA_PS_TCP.
func portOf(service uint64) (port uint16, ok bool) {
	return uint16(service), service>>16 == portSpaceTCP
}

// datagramID returns the service ID of a port in RDMA_PS_UDP.
func datagramID(port uint16) uint64 { return portSpaceUDP<<16 | uint64(port) }

// datagramPort is the inverse of datagramID; ok is false for services that are no ports of RDMA_PS_UDP.
func datagramPort(service uint64) (port uint16, ok bool) {
	return uint16(service), service>>16 == portSpaceUDP
}

// ipHeader is the header of the private data of a REQ or SIDR_REQ.
type ipHeader struct {
	src  netip.AddrPort
	dst  netip.Addr
	rest []byte // the program's private data
}

// encode returns the private data of a REQ.
func (h *ipHeader) encode() []byte {
	b := make([]byte, headerLen, headerLen+len(h.rest))
	b[0], b[1] = headerV0, 6<<4
	binary.BigEndian.PutUint16(b[2:], h.src.Port())
	src, dst := h.src.Addr().As16(), h.dst.As16()
	copy(b[4:], src[:])
	copy(b[20:], dst[:])
	if h.dst.Is4() {
		b[1] = 4 << 4
		clear(b[4 : 20-4]) // an IPv4 address is in the last four bytes of its field
		clear(b[20 : 36-4])
	}
	return append(b, h.rest...)
}

// decodeHeader splits the private data of a REQ.
func decodeHeader(b []byte) (h ipHeader, err error) {
	if len(b) < headerLen {
		return h, fmt.Errorf("IP header of %d bytes, expected %d", len(b), headerLen)
	}
	if b[0] != headerV0 {
		return h, fmt.Errorf("IP header of version %#x, expected 0", b[0])
	}
	port := binary.BigEndian.Uint16(b[2:])
	src, dst := b[4:20], b[20:36]
	switch b[1] >> 4 {
	case 4:
		src, dst = src[12:], dst[12:]
	case 6:
	default:
		return h, fmt.Errorf("IP header for IP version %d, expected 4 or 6", b[1]>>4)
	}
	from, _ := netip.AddrFromSlice(src) // the lengths are right
	h.dst, _ = netip.AddrFromSlice(dst)
	h.src, h.rest = netip.AddrPortFrom(from, port), b[headerLen:]
	return h, nil
}

// between reports whether the header's addresses are those of the two GIDs.
func (h *ipHeader) between(src, dst guestdrv.GID) bool {
	return guestdrv.IPGID(h.src.Addr()) == src && guestdrv.IPGID(h.dst) == dst
}

// parsePeer parses the address of Dial.
func parsePeer(address string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(address)
	if err != nil || a.Port() == 0 || a.Addr().Zone() != "" || !unicast(a.Addr().Unmap()) {
		return a, invalid("address %q: want a unicast IP address and a port such as 10.0.0.1:7471", address)
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
}

func unicast(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback()
}
