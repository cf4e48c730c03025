package header

import "encoding/binary"

// ARPLen is the size of an ARP packet for IPv4 over Ethernet.
const ARPLen = 28

// ARP operations.
const (
	ARPRequest = 1
	ARPReply   = 2
)

// ARP is an ARP packet for IPv4 over Ethernet (RFC 826).
type ARP struct {
	Op                   uint16
	SenderMAC, TargetMAC MAC
	SenderIP, TargetIP   [4]byte
}

// Decode reads the packet at the start of b and returns its size. ErrType if
// it is not about IPv4 over Ethernet.
func (a *ARP) Decode(b []byte) (int, error) {
	if len(b) < ARPLen {
		return 0, ErrShort
	}
	// Hardware type 1, protocol 0x0800, address lengths 6 and 4.
	if binary.BigEndian.Uint32(b) != 1<<16|TypeIPv4 || b[4] != 6 || b[5] != 4 {
		return 0, ErrType
	}
	a.Op = binary.BigEndian.Uint16(b[6:])
	a.SenderMAC, a.SenderIP = MAC(b[8:14]), [4]byte(b[14:18])
	a.TargetMAC, a.TargetIP = MAC(b[18:24]), [4]byte(b[24:28])
	return ARPLen, nil
}

// Encode writes the packet to b (28 bytes).
func (a *ARP) Encode(b []byte) int {
	b = b[:ARPLen]
	binary.BigEndian.PutUint32(b, 1<<16|TypeIPv4)
	b[4], b[5] = 6, 4
	binary.BigEndian.PutUint16(b[6:], a.Op)
	copy(b[8:], a.SenderMAC[:])
	copy(b[14:], a.SenderIP[:])
	copy(b[18:], a.TargetMAC[:])
	copy(b[24:], a.TargetIP[:])
	return ARPLen
}
