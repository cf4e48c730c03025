package fastpath

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Offsets in struct __sk_buff (linux/bpf.h).
const (
	skbLen     = 0
	skbPktType = 4
	skbMark    = 8
	skbProto   = 16
	skbVLAN    = 20
	skbPrio    = 32
	skbIfindex = 40
	skbGSOSegs = 164
	skbGSOSize = 176
)

// Return values of a tcx program.
const (
	verdictNext = -1 // TCX_NEXT: continue as if the program were not attached
	verdictDrop = 2  // TCX_DROP
)

// Arguments of bpf_skb_adjust_room.
const (
	roomMAC  = 1 // between the layer 2 and layer 3 headers
	fixedGSO = 1 << 0
	encapV4  = 1 << 1
	encapV6  = 1 << 2
	encapUDP = 1 << 4
	encapEth = 1 << 6
	encapL2  = 14 << 56 // length of the inner Ethernet header
)

const (
	protoTCP  = 6
	protoUDP  = 17
	tcpOpens  = 0x07 // FIN, SYN, RST: the first and last segments of a connection go through the switch
	fragments = 0x3fff
	ecnMask   = 3
)

const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
)

// code builds a program. Register R6 holds the skb throughout, R9 the entry once it is found, R7 the length of the
// frame's headers, and R8 the ECN field of the inner IP header; R0 to R5 are scratch. Label "next" leaves the frame to
// vnicd.
type code struct {
	asm.Instructions
	label string // of the next instruction
}

func (c *code) add(in ...asm.Instruction) {
	if c.label != "" && len(in) > 0 {
		in[0] = in[0].WithSymbol(c.label)
		c.label = ""
	}
	c.Instructions = append(c.Instructions, in...)
}

// at sets the label of the next instruction.
func (c *code) at(label string) {
	if c.label != "" {
		c.add(asm.Mov.Reg(asm.R0, asm.R0)) // an instruction can have only one label
	}
	c.label = label
}

// be returns a big-endian 16-bit value as a native load yields it.
func be(v uint16) int32 {
	return int32(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v)))
}

func word(b []byte) int32 { return int32(binary.NativeEndian.Uint32(b)) }

// skb loads a field of the skb.
func (c *code) skb(r asm.Register, field int16) { c.add(asm.LoadMem(r, asm.R6, field, asm.Word)) }

// load loads from the stack, store stores to it.
func (c *code) load(r asm.Register, at int16, size asm.Size) {
	c.add(asm.LoadMem(r, asm.RFP, at, size))
}
func (c *code) store(at int16, r asm.Register, size asm.Size) {
	c.add(asm.StoreMem(asm.RFP, at, r, size))
}

// load16 loads a big-endian 16-bit value from the stack.
func (c *code) load16(r asm.Register, at int16) {
	c.load(r, at, asm.Half)
	c.add(asm.HostTo(asm.BE, r, asm.Half))
}

// is leaves the frame to vnicd unless the value on the stack equals want.
func (c *code) is(at int16, size asm.Size, want int32) {
	c.load(asm.R2, at, size)
	c.add(asm.JNE.Imm32(asm.R2, want, "next"))
}

// clear leaves the frame to vnicd if one of the bits is set in the value on the stack.
func (c *code) clear(at int16, size asm.Size, bits int32) {
	c.load(asm.R2, at, size)
	c.add(asm.And.Imm(asm.R2, bits), asm.JNE.Imm(asm.R2, 0, "next"))
}

// copy copies within the stack, in words.
func (c *code) copy(to, from, n int16) {
	for i := int16(0); i < n; i += 4 {
		c.load(asm.R2, from+i, asm.Word)
		c.store(to+i, asm.R2, asm.Word)
	}
}

// pull copies bytes of the frame to the stack, and leaves a shorter frame to vnicd.
func (c *code) pull(from, at, n int16) {
	c.add(asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, int32(from)), asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, int32(at)), asm.Mov.Imm(asm.R4, int32(n)), asm.FnSkbLoadBytes.Call(),
		asm.JNE.Imm(asm.R0, 0, "next"))
}

// push copies bytes of the stack into the frame. It drops a shorter frame: it is too late to leave it to vnicd.
func (c *code) push(to, at, n int16) {
	c.add(asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, int32(to)), asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, int32(at)), asm.Mov.Imm(asm.R4, int32(n)), asm.Mov.Imm(asm.R5, 0), asm.FnSkbStoreBytes.Call(),
		asm.JNE.Imm(asm.R0, 0, "drop"))
}

// room adds or removes bytes after the Ethernet header.
func (c *code) room(n int16, flags int64, otherwise string) {
	c.add(asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, int32(n)), asm.Mov.Imm(asm.R3, roomMAC),
		asm.LoadImm(asm.R4, flags, asm.DWord), asm.FnSkbAdjustRoom.Call(), asm.JNE.Imm(asm.R0, 0, otherwise))
}

// find looks up the key on the stack in a map; R0 points to the value.
func (c *code) find(m *ebpf.Map, key int16, otherwise string) {
	c.add(asm.LoadMapPtr(asm.R1, m.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, int32(key)),
		asm.FnMapLookupElem.Call(), asm.JEq.Imm(asm.R0, 0, otherwise))
}

// sum sets R1 to the folded one's complement sum of an IPv4 header on the stack (RFC 1071).
func (c *code) sum(at int16) {
	c.add(asm.Mov.Imm(asm.R1, 0))
	for i := int16(0); i < 20; i += 2 {
		c.load(asm.R2, at+i, asm.Half)
		c.add(asm.Add.Reg(asm.R1, asm.R2))
	}
	for range 2 {
		c.add(asm.Mov.Reg(asm.R2, asm.R1), asm.RSh.Imm(asm.R2, 16), asm.And.Imm(asm.R1, 0xffff), asm.Add.Reg(asm.R1, asm.R2))
	}
}

// tcp parses a tenant's frame that begins at offset from of the skb, and leaves it to vnicd unless it is TCP within an
// established connection, without fragmentation and IP options. It copies the headers to the stack (80 bytes at at),
// and sets R7 to their length and R8 to the ECN field. If whole, the IP packet must end where the skb does.
func (c *code) tcp(from, at int16, whole bool) {
	transport := func(hdr int16) {
		c.clear(at+hdr+13, asm.Byte, tcpOpens)
		c.load(asm.R7, at+hdr+12, asm.Byte)
		c.add(asm.RSh.Imm(asm.R7, 4), asm.LSh.Imm(asm.R7, 2), asm.Add.Imm(asm.R7, int32(hdr)))
	}
	length := func(field, less int16) {
		if !whole {
			return
		}
		c.skb(asm.R1, skbLen)
		c.add(asm.Sub.Imm(asm.R1, int32(from+less)))
		c.load16(asm.R2, field)
		c.add(asm.JNE.Reg(asm.R2, asm.R1, "next"))
	}
	c.pull(from, at, 14+20+20)
	c.load(asm.R2, at+12, asm.Half)
	c.add(asm.JEq.Imm(asm.R2, be(etherIPv4), "ipv4"), asm.JNE.Imm(asm.R2, be(etherIPv6), "next"))

	c.pull(from, at, 14+40+20)
	ip := at + 14
	c.load(asm.R2, ip, asm.Byte)
	c.add(asm.RSh.Imm(asm.R2, 4), asm.JNE.Imm(asm.R2, 6, "next"))
	c.is(ip+6, asm.Byte, protoTCP)
	length(ip+4, 14+40)
	c.load(asm.R8, ip+1, asm.Byte)
	c.add(asm.RSh.Imm(asm.R8, 4))
	transport(14 + 40)
	c.add(asm.Ja.Label("is tcp"))

	c.at("ipv4")
	c.is(ip, asm.Byte, 0x45)
	c.clear(ip+6, asm.Half, be(fragments))
	c.is(ip+9, asm.Byte, protoTCP)
	length(ip+2, 14)
	c.load(asm.R8, ip+1, asm.Byte)
	transport(14 + 20)

	c.at("is tcp")
	c.add(asm.And.Imm(asm.R8, ecnMask))
}

// fits leaves the frame to vnicd if it, or one of its segments, is larger than the entry allows. The first less bytes
// of the skb do not count. It stores the frame's length and number of segments on the stack for count.
func (c *code) fits(less, length, segments int16) {
	c.skb(asm.R1, skbLen)
	c.add(asm.Sub.Imm(asm.R1, int32(less)))
	c.store(length, asm.R1, asm.Word)
	c.skb(asm.R3, skbGSOSegs)
	c.skb(asm.R2, skbGSOSize)
	c.add(asm.JEq.Imm(asm.R2, 0, "uncut"), asm.JNE.Imm(asm.R3, 0, "counted segments"))
	// gso_segs is not set in a frame of a guest, or one that a program like this has redirected.
	c.add(asm.Mov.Reg(asm.R3, asm.R1), asm.Add.Reg(asm.R3, asm.R2), asm.Sub.Reg(asm.R3, asm.R7), asm.Sub.Imm(asm.R3, 1),
		asm.And.Imm(asm.R3, 0xfffff), asm.Div.Reg(asm.R3, asm.R2))
	c.at("counted segments")
	c.add(asm.Add.Reg(asm.R2, asm.R7), asm.Mov.Reg(asm.R1, asm.R2))
	c.at("uncut")
	c.store(segments, asm.R3, asm.Word)
	c.add(asm.LoadMem(asm.R2, asm.R9, valueMax, asm.Word), asm.JGT.Reg(asm.R1, asm.R2, "next"))
}

// valid leaves the frame to vnicd if the entry is suspended, or void because the network has changed since it was made.
// Otherwise it notes that the entry is in use.
func (c *code) valid(generations *ebpf.Map, scratch int16) {
	c.add(asm.LoadMem(asm.R1, asm.R9, valueNet, asm.Word))
	c.store(scratch, asm.R1, asm.Word)
	c.find(generations, scratch, "next")
	c.add(asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord), asm.LoadMem(asm.R2, asm.R9, valueGen, asm.DWord),
		asm.JNE.Reg(asm.R1, asm.R2, "next"))
	c.moment()
	c.add(asm.LoadMem(asm.R1, asm.R9, valueSuspended, asm.Word), asm.Mov.Reg(asm.R2, asm.R0),
		asm.Sub.Reg32(asm.R2, asm.R1), asm.JLT.Imm32(asm.R2, suspendMoments, "next"))
	c.use()
}

// suspend ends the program for a datagram of the entry that passes through vnicd, and suspends the entry so that none
// overtakes it.
func (c *code) suspend() {
	c.moment()
	c.mark(valueSuspended)
	c.use()
	c.add(asm.Ja.Label("next"))
}

// moment sets R0 to the time in moments.
func (c *code) moment() { c.add(asm.FnKtimeGetCoarseNs.Call(), asm.RSh.Imm(asm.R0, momentShift)) }

// use records the current tick as that of the entry's last use; R0 holds the moment.
func (c *code) use() {
	c.add(asm.RSh.Imm(asm.R0, tickShift-momentShift))
	c.mark(valueUsed)
}

// mark stores R0 in a field of the entry unless it has that value already, so that processors do not contend for the
// cache line.
func (c *code) mark(field int16) {
	noted := fmt.Sprintf("noted %d", len(c.Instructions))
	c.add(asm.LoadMem(asm.R1, asm.R9, field, asm.Word), asm.JEq.Reg32(asm.R0, asm.R1, noted),
		asm.StoreMem(asm.R9, field, asm.R0, asm.Word))
	c.at(noted)
}

// plain clears the skb's mark and priority: they have a meaning only in the network that the frame leaves.
func (c *code) plain() {
	c.add(asm.Mov.Imm(asm.R1, 0), asm.StoreMem(asm.R6, skbMark, asm.R1, asm.Word),
		asm.StoreMem(asm.R6, skbPrio, asm.R1, asm.Word))
}

// count counts a frame as its segments, each with its headers.
func (c *code) count(counters *ebpf.Map, scratch, length, segments, at int16) {
	c.add(asm.LoadMem(asm.R1, asm.R9, valueHost, asm.Word))
	c.store(scratch, asm.R1, asm.Word)
	c.find(counters, scratch, "counted")
	c.load(asm.R1, segments, asm.Word)
	c.add(asm.JNE.Imm(asm.R1, 0, "several"), asm.Mov.Imm(asm.R1, 1))
	c.at("several")
	c.add(asm.LoadMem(asm.R2, asm.R0, at, asm.DWord), asm.Add.Reg(asm.R2, asm.R1),
		asm.StoreMem(asm.R0, at, asm.R2, asm.DWord), asm.Sub.Imm(asm.R1, 1), asm.Mul.Reg(asm.R1, asm.R7))
	c.load(asm.R2, length, asm.Word)
	c.add(asm.Add.Reg(asm.R1, asm.R2),
		asm.LoadMem(asm.R2, asm.R0, at+8, asm.DWord), asm.Add.Reg(asm.R2, asm.R1),
		asm.StoreMem(asm.R0, at+8, asm.R2, asm.DWord))
	c.at("counted")
}

// end adds the targets of "next" and "drop".
func (c *code) end() asm.Instructions {
	c.at("drop")
	c.add(asm.Mov.Imm(asm.R0, verdictDrop), asm.Return())
	c.at("next")
	c.add(asm.Mov.Imm(asm.R0, verdictNext), asm.Return())
	return c.Instructions
}
