package vswitch

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vnicd/vnicd/device/frame/header"
)

// MaxIPs bounds PortConfig.IPs, because they are searched one by one.
const MaxIPs = 64

const (
	protoICMP = 1

	dhcpServerPort = 67
)

// setIPs sets the addresses that a port may use. Link-local IPv6 addresses are allowed unless some are listed.
func (a *Attachment) setIPs(list []netip.Addr) error {
	if len(list) == 0 {
		return nil
	}
	if len(list) > MaxIPs {
		return fmt.Errorf("%d IP addresses; want at most %d", len(list), MaxIPs)
	}
	if len(a.keys) != 1 {
		return fmt.Errorf("IP addresses are for a port with one MAC; it has %d", len(a.keys))
	}
	a.linkLocal = true
	for _, x := range list {
		if !x.IsValid() || x.IsUnspecified() || x.IsMulticast() || x.Zone() != "" {
			return fmt.Errorf("%v is not the address of a host", x)
		}
		if x.Is6() && x.IsLinkLocalUnicast() {
			a.linkLocal = false
		}
		a.ips = append(a.ips, x.As16())
	}
	return nil
}

// guard reports whether a frame's layer-3 source is one of the port's. It refuses frames in which the source cannot be
// found (truncated, more than two tags), and accepts Ethernet types without IP addresses.
func (a *Attachment) guard(f []byte, h *header.Layout) bool {
	p := f[h.L3:]
	switch h.Type {
	case header.TypeIPv4:
		if len(p) < header.IPv4Len || p[0]>>4 != 4 {
			return false
		}
		src := [4]byte(p[12:16])
		return a.mayUse(header.Mapped4(src)) || src == [4]byte{} && withoutAddress4(p)
	case header.TypeIPv6:
		if len(p) < header.IPv6Len || p[0]>>4 != 6 {
			return false
		}
		src := ip(p[8:24])
		if src == (ip{}) { // duplicate address detection, router solicitation, MLD
			return h.Proto == header.ProtoICMPv6
		}
		return a.mayUse6(src)
	case header.TypeRoCE1: // a global route header (IBTA annex A16)
		return len(p) >= header.IPv6Len && a.mayUse6(ip(p[8:24]))
	case header.TypeARP:
		if len(p) < header.ARPLen {
			return false
		}
		spa := [4]byte(p[14:18])
		return spa == [4]byte{} || a.mayUse(header.Mapped4(spa))
	case header.TypeVLAN, header.TypeQinQ:
		return false
	}
	return true
}

// withoutAddress4 reports whether an IPv4 packet may come from 0.0.0.0: to a DHCP server (RFC 2131, 4.1), or IGMP.
func withoutAddress4(p []byte) bool {
	if p[9] == header.ProtoIGMP {
		return true
	}
	off := int(p[0]&15) * 4
	return p[9] == header.ProtoUDP && binary.BigEndian.Uint16(p[6:])&0x1fff == 0 && len(p) >= off+4 &&
		binary.BigEndian.Uint16(p[off+2:]) == dhcpServerPort
}

func (a *Attachment) mayUse(src ip) bool {
	for i := range a.ips {
		if a.ips[i] == src {
			return true
		}
	}
	return false
}

func (a *Attachment) mayUse6(src ip) bool {
	return a.mayUse(src) || a.linkLocal && src[0] == 0xfe && src[1]&0xc0 == 0x80
}
