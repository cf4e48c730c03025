package fastpath

import (
	"github.com/cilium/ebpf/asm"
)

// outerLen returns the length of the outer headers without Ethernet: IP, UDP 8, VXLAN 8.
func outerLen(v6 bool) int16 {
	if v6 {
		return 40 + 16
	}
	return 20 + 16
}

// sending is the program at a host port's egress, for frames that the host sends into the tenant's network.
//
//	Ethernet | IP TCP ...   ->   Ethernet (the underlay's) | IP UDP VXLAN Ethernet | IP TCP ...
//
// The program changes nothing before it makes room, so any frame that it cannot fully check goes on to vnicd. Large
// frames stay whole: the underlay's card, or the kernel's software GSO, segments them.
func sending(m *maps, v6 bool) asm.Instructions {
	const (
		scratch, length, segments = -4, -8, -12
		key                       = -32
		frame                     = -112 // headers of the frame
		outer                     = -192 // in front of it: the outer Ethernet header's type
	)
	n := outerLen(v6)
	udp := outer + n - 16
	c := &code{}
	c.add(asm.Mov.Reg(asm.R6, asm.R1))
	c.skb(asm.R2, skbVLAN)
	c.add(asm.JNE.Imm(asm.R2, 0, "next"))
	c.tcp(0, frame, false)

	c.skb(asm.R2, skbIfindex)
	c.store(key, asm.R2, asm.Word)
	c.copy(key+4, frame, 12)
	c.find(m.send, key, "next")
	c.add(asm.Mov.Reg(asm.R9, asm.R0))
	c.fits(0, length, segments)
	c.load(asm.R1, length, asm.Word)
	c.add(asm.JGT.Imm(asm.R1, 65535-int32(n), "next")) // the outer lengths have 16 bits
	c.valid(m.generations, scratch)

	// A source port of the VTEP, chosen by the flow's hash.
	c.add(asm.Mov.Reg(asm.R1, asm.R6), asm.FnGetHashRecalc.Call(), asm.LSh.Imm(asm.R0, 32), asm.RSh.Imm(asm.R0, 32),
		asm.Mul.Imm(asm.R0, int32(m.ports.MaxEntries())), asm.RSh.Imm(asm.R0, 32))
	c.store(scratch, asm.R0, asm.Word)
	c.find(m.ports, scratch, "next")
	c.add(asm.LoadMem(asm.R5, asm.R0, 0, asm.Half))

	for i := int16(0); i < n; i += 4 {
		c.add(asm.LoadMem(asm.R2, asm.R9, valueOuter+i, asm.Word))
		c.store(outer+i, asm.R2, asm.Word)
	}
	c.store(udp, asm.R5, asm.Half)
	c.load(asm.R1, length, asm.Word)
	c.add(asm.Add.Imm(asm.R1, 16), asm.Mov.Reg(asm.R2, asm.R1), asm.HostTo(asm.BE, asm.R2, asm.Half))
	c.store(udp+4, asm.R2, asm.Half)
	if v6 {
		c.add(asm.StoreImm(asm.RFP, outer-2, int64(be(etherIPv6)), asm.Half))
		c.store(outer+4, asm.R2, asm.Half)
		c.add(asm.LSh.Imm(asm.R8, 4)) // the low half of the traffic class is the high half of this byte
		c.store(outer+1, asm.R8, asm.Byte)
	} else {
		c.add(asm.StoreImm(asm.RFP, outer-2, int64(be(etherIPv4)), asm.Half))
		c.add(asm.Add.Imm(asm.R1, 20), asm.HostTo(asm.BE, asm.R1, asm.Half))
		c.store(outer+2, asm.R1, asm.Half)
		c.store(outer+1, asm.R8, asm.Byte)
		c.sum(outer)
		c.add(asm.Xor.Imm(asm.R1, 0xffff))
		c.store(outer+10, asm.R1, asm.Half)
	}
	c.copy(outer+n, frame, 12)
	c.load(asm.R2, frame+12, asm.Half)
	c.store(outer+n+12, asm.R2, asm.Half)

	family := int64(encapV4)
	if v6 {
		family = encapV6
	}
	c.room(n+14, family|encapUDP|encapEth|encapL2|fixedGSO, "next") // the segments are small enough already
	c.push(12, outer-2, 2+n+14)
	c.count(m.counters, scratch, length, segments, countSent)
	c.plain()
	// The kernel resolves next hop and neighbour, and may queue the frame until it has.
	c.add(asm.LoadMem(asm.R1, asm.R9, valueIf, asm.Word), asm.Mov.Imm(asm.R2, 0), asm.Mov.Imm(asm.R3, 0),
		asm.Mov.Imm(asm.R4, 0), asm.FnRedirectNeigh.Call(), asm.Return())
	return c.end()
}

// receiving is the program at an underlay interface's ingress, the reverse of sending: it redirects frames to the host
// port's ingress.
//
// The entry says that the inner addresses are at exactly this host and that peer (MT-6). The program checks all that
// the UDP socket and vnicd would check, or leaves the datagram to them: outer IP checksum, lengths, fragments, a UDP
// checksum, reserved bits, and congestion marks to be carried over (RFC 6040). A sender may mix datagrams with a
// checksum, or marked ones, with others: then the entry is suspended, because datagrams that pass through vnicd would
// be overtaken.
func receiving(m *maps, cfg *tableConfig) asm.Instructions {
	const (
		scratch, length, segments, ecn = -4, -8, -12, -16
		key                            = -48
		frame                          = -128 // headers of the tenant's frame
		outer                          = -184 // the outer IP header; in front of it the Ethernet header
	)
	v6 := cfg.local.Is6()
	n := outerLen(v6)
	udp := outer + n - 16
	local := cfg.local.AsSlice()
	c := &code{}
	c.add(asm.Mov.Reg(asm.R6, asm.R1))
	typ := be(etherIPv4)
	if v6 {
		typ = be(etherIPv6)
	}
	c.skb(asm.R2, skbProto)
	c.add(asm.JNE.Imm(asm.R2, typ, "next"))
	for _, field := range []int16{skbVLAN, skbPktType} { // PACKET_HOST
		c.skb(asm.R2, field)
		c.add(asm.JNE.Imm(asm.R2, 0, "next"))
	}
	c.pull(0, outer-14, 14+n)
	c.is(udp+2, asm.Half, be(cfg.port))
	if v6 {
		c.is(outer+6, asm.Byte, protoUDP)
		for i := int16(0); i < 16; i += 4 {
			c.is(outer+24+i, asm.Word, word(local[i:]))
		}
	} else {
		c.is(outer, asm.Byte, 0x45)
		c.is(outer+9, asm.Byte, protoUDP)
		c.is(outer+16, asm.Word, word(local))
		c.clear(outer+6, asm.Half, be(fragments))
	}
	c.is(udp+8, asm.Word, word([]byte{8, 0, 0, 0})) // VXLAN: the I flag
	c.is(udp+15, asm.Byte, 0)                       // and nothing else
	c.load(asm.R2, udp+6, asm.Half)
	c.add(asm.JNE.Imm(asm.R2, 0, "summed"))
	c.skb(asm.R1, skbLen)
	c.add(asm.Sub.Imm(asm.R1, 14), asm.Mov.Reg(asm.R3, asm.R1), asm.Sub.Imm(asm.R3, int32(n-16)))
	c.load16(asm.R2, udp+4)
	c.add(asm.JNE.Reg(asm.R2, asm.R3, "next"))
	if v6 {
		c.load16(asm.R2, outer+4)
		c.add(asm.JNE.Reg(asm.R2, asm.R3, "next"))
		c.load(asm.R8, outer+1, asm.Byte)
		c.add(asm.RSh.Imm(asm.R8, 4))
	} else {
		c.load16(asm.R2, outer+2)
		c.add(asm.JNE.Reg(asm.R2, asm.R1, "next"))
		c.sum(outer)
		c.add(asm.JNE.Imm(asm.R1, 0xffff, "next"))
		c.load(asm.R8, outer+1, asm.Byte)
	}
	c.add(asm.And.Imm(asm.R8, ecnMask))
	c.store(ecn, asm.R8, asm.Word)

	c.tcp(14+n, frame, true)
	find := func() {
		c.load(asm.R2, udp+12, asm.Word) // VNI
		c.store(key, asm.R2, asm.Word)
		if v6 {
			c.copy(key+4, outer+8, 16)
		} else {
			c.copy(key+4, outer+12, 4)
			for i := int16(4); i < 16; i += 4 {
				c.add(asm.StoreImm(asm.RFP, key+4+i, 0, asm.Word))
			}
		}
		c.copy(key+20, frame, 12)
		c.find(m.receive, key, "next")
		c.add(asm.Mov.Reg(asm.R9, asm.R0))
		c.load16(asm.R2, udp)
		c.add(asm.LoadMem(asm.R1, asm.R9, valuePort, asm.Word), asm.JGT.Reg(asm.R2, asm.R1, "next"))
	}
	find()
	c.load(asm.R2, ecn, asm.Word)
	c.add(asm.JEq.Imm(asm.R2, 0, "unmarked"), asm.JNE.Reg(asm.R2, asm.R8, "suspend"))
	c.at("unmarked")
	c.fits(14+n, length, segments)
	c.valid(m.generations, scratch)

	// A superframe is either TCP segments that the sender's kernel left whole or datagrams that this host's kernel
	// coalesced. The latter must be split at the outer UDP's boundaries, and may contain frames of several tenants.
	// Without fixedGSO the kernel removes room for the former only, so the program removes 4 bytes and adds them again;
	// their values do not matter.
	c.skb(asm.R2, skbGSOSize)
	c.add(asm.JEq.Imm(asm.R2, 0, "tcp alone"))
	c.room(-4, 0, "next")
	c.room(4, 0, "drop")
	c.at("tcp alone")
	c.room(-(n + 14), fixedGSO, "drop")
	c.push(0, frame, 14)
	c.count(m.counters, scratch, length, segments, countReceived)
	c.plain()
	c.add(asm.LoadMem(asm.R1, asm.R9, valueIf, asm.Word), asm.Mov.Imm(asm.R2, 1 /* BPF_F_INGRESS */),
		asm.FnRedirect.Call(), asm.Return())

	c.at("summed")
	c.pull(14+n, frame, 14)
	find()
	c.at("suspend")
	c.suspend()
	return c.end()
}
