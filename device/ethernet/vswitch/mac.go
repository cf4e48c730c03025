package vswitch

import (
	"fmt"
	"net"
)

// MAC is an Ethernet address.
type MAC [6]byte

// ParseMAC reads a six-byte address in any of the usual notations.
func ParseMAC(s string) (MAC, error) {
	a, err := net.ParseMAC(s)
	if err != nil || len(a) != 6 {
		return MAC{}, fmt.Errorf("vswitch: %q is not an Ethernet address; want six bytes such as 52:54:00:12:34:56", s)
	}
	return MAC(a), nil
}

// String returns the address as 52:54:00:12:34:56.
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// IsGroup reports whether the address is a group address (multicast or broadcast).
func (m MAC) IsGroup() bool { return m[0]&1 != 0 }

// IsZero reports whether the address is all zeros.
func (m MAC) IsZero() bool { return m == MAC{} }

// key packs an address into 48 bits.
func (m MAC) key() uint64 { return macKey(m[:]) }

// macKey packs the first six bytes of b.
func macKey(b []byte) uint64 {
	_ = b[5]
	return uint64(b[0])<<40 | uint64(b[1])<<32 | uint64(b[2])<<24 | uint64(b[3])<<16 | uint64(b[4])<<8 | uint64(b[5])
}

// Address is a key of the forwarding table: a MAC in a VLAN (of the outermost tag; 0 = untagged, or priority-tagged).
type Address struct {
	MAC  MAC
	VLAN uint16
}

const (
	macBits = 1<<48 - 1 // of a packed address; the VLAN is above
	maxVLAN = 4094      // IEEE 802.1Q, table 9-2
)

// key packs an address into 60 bits.
func (a Address) key() uint64 { return uint64(a.VLAN)<<48 | a.MAC.key() }

// String returns the address as 52:54:00:12:34:56, or with its VLAN as 52:54:00:12:34:56 vlan 7.
func (a Address) String() string {
	if a.VLAN == 0 {
		return a.MAC.String()
	}
	return fmt.Sprintf("%v vlan %d", a.MAC, a.VLAN)
}

func keyVLAN(k uint64) uint16 { return uint16(k >> 48) }

// vlanKey is the part of a table key that a VLAN id makes.
func vlanKey(vlan uint16) uint64 { return uint64(vlan) << 48 }

func keyMAC(k uint64) MAC {
	return MAC{byte(k >> 40), byte(k >> 32), byte(k >> 24), byte(k >> 16), byte(k >> 8), byte(k)}
}

const groupBit = 1 << 40 // of a packed address
