package capture

import (
	"encoding/binary"
	"fmt"
	"io"
)

// The file format is pcapng (draft-ietf-opsawg-pcapng), written in little endian: one section, interfaces, enhanced
// packet blocks with direction, interface statistics at the end. gopacket's NgWriter writes the same
// (WritePacketWithOptions has the direction), but allocates several times per packet, and the daemon would depend on
// gopacket, which only tests use, for these four block types.
const (
	blockSection   = 0x0a0d0d0a
	blockInterface = 1
	blockStats     = 5
	blockPacket    = 6

	byteOrderMagic = 0x1a2b3c4d

	optEnd        = 0
	optUserAppl   = 4 // section
	optName       = 2 // interface
	optResolution = 9 // interface
	optFlags      = 2 // packet
	optReceived   = 4 // statistics
	optDropped    = 5 // statistics
)

// Link types (the registry of tcpdump.org).
const (
	LinkEthernet = 1
	LinkRaw      = 101 // begins with an IP header
)

// Writer writes one section. Not for concurrent use.
type Writer struct {
	w   io.Writer
	buf []byte
	err error
}

// NewWriter begins a section.
func NewWriter(w io.Writer, program string) *Writer {
	p := &Writer{w: w}
	p.begin(blockSection)
	p.u32(byteOrderMagic)
	p.u32(1)         // version 1.0
	p.u64(1<<64 - 1) // the section's length is not known
	p.option(optUserAppl, []byte(program))
	p.u32(optEnd)
	p.end()
	return p
}

// Interface adds an interface; the first one is number 0. Times are in nanoseconds.
func (p *Writer) Interface(link uint16, snapLen uint32, name string) {
	p.begin(blockInterface)
	p.u32(uint32(link))
	p.u32(snapLen)
	p.option(optName, []byte(name))
	p.option(optResolution, []byte{9})
	p.u32(optEnd)
	p.end()
}

// Packet adds a packet of original length n, seen at t nanoseconds since 1970; data is the part that was kept.
func (p *Writer) Packet(iface uint32, t int64, out bool, n int, data ...[]byte) {
	kept := 0
	for _, d := range data {
		kept += len(d)
	}
	p.begin(blockPacket)
	p.u32(iface)
	p.time(t)
	p.u32(uint32(kept))
	p.u32(uint32(n))
	for _, d := range data {
		p.buf = append(p.buf, d...)
	}
	p.pad(kept)
	direction := uint32(1) // inbound
	if out {
		direction = 2
	}
	p.option(optFlags, binary.LittleEndian.AppendUint32(nil, direction))
	p.u32(optEnd)
	p.end()
}

// Stats adds an interface's statistics, taken at t nanoseconds since 1970.
func (p *Writer) Stats(iface uint32, t int64, received, dropped uint64) {
	p.begin(blockStats)
	p.u32(iface)
	p.time(t)
	p.option(optReceived, binary.LittleEndian.AppendUint64(nil, received))
	p.option(optDropped, binary.LittleEndian.AppendUint64(nil, dropped))
	p.u32(optEnd)
	p.end()
}

// Err returns the first error of the underlying writer.
func (p *Writer) Err() error { return p.err }

func (p *Writer) begin(block uint32) {
	p.buf = p.buf[:0]
	p.u32(block)
	p.u32(0) // the length, see end
}

func (p *Writer) end() {
	n := uint32(len(p.buf) + 4)
	p.u32(n)
	binary.LittleEndian.PutUint32(p.buf[4:], n)
	if p.err != nil {
		return
	}
	if _, err := p.w.Write(p.buf); err != nil {
		p.err = fmt.Errorf("capture: %w", err)
	}
}

func (p *Writer) u32(v uint32) { p.buf = binary.LittleEndian.AppendUint32(p.buf, v) }
func (p *Writer) u64(v uint64) { p.buf = binary.LittleEndian.AppendUint64(p.buf, v) }

// time appends a timestamp, high half first.
func (p *Writer) time(t int64) {
	p.u32(uint32(uint64(t) >> 32))
	p.u32(uint32(t))
}

func (p *Writer) option(code uint16, v []byte) {
	p.u32(uint32(code) | uint32(len(v))<<16)
	p.buf = append(p.buf, v...)
	p.pad(len(v))
}

// pad appends zeros after n bytes, to a multiple of four.
func (p *Writer) pad(n int) {
	for ; n%4 != 0; n++ {
		p.buf = append(p.buf, 0)
	}
}
