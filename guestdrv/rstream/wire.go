package rstream

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/vnicd/vnicd/guestdrv"
)

// What goes over the wire, as librdmacm's rsockets define it (rdma-core, librdmacm/docs/rsocket).

// sge is an rs_sge: a buffer of a peer, or an SGL of it, whose length is then a number of entries.
type sge struct {
	addr   uint64
	key    uint32 // R_Key
	length uint32
}

const sgeLen = 16

// encode writes the 16 bytes of an entry in a byte order.
func (s sge) encode(b []byte, o binary.ByteOrder) {
	o.PutUint64(b, s.addr)
	o.PutUint32(b[8:], s.key)
	o.PutUint32(b[12:], s.length)
}

// decodeSGE reads the 16 bytes of an entry.
func decodeSGE(b []byte, o binary.ByteOrder) sge {
	return sge{addr: o.Uint64(b), key: o.Uint32(b[8:]), length: o.Uint32(b[12:])}
}

// holds reports whether n bytes from the address on are within the address space.
func (s sge) holds(n uint64) bool { return n == 0 || s.addr <= math.MaxUint64-(n-1) }

// connData is an rs_conn_data: what both ends say in the private data of the connection manager's messages.
type connData struct {
	bigEndian bool   // RS_CONN_FLAG_NET: the sender's SGL has entries in big-endian order
	credits   uint16 // data messages that the sender can receive at first
	sgl       sge    // the sender's target SGL; its length is a number of entries
	buffer    sge    // the first entry of the receiver's target SGL
	iomaps    int    // entries of the sender's table of iomaps, behind its target SGL; no more than maxIOMaps are used
}

const (
	connDataLen   = 40
	version       = 1
	flagBigEndian = 1 << 0
	flagIOMaps    = 1 << 1
)

// encode returns the private data of a REQ or REP. Without iomaps their flag (RS_CONN_FLAG_IOMAP) is not set, and
// riomap fails at the peer.
func (c *connData) encode() []byte {
	b := make([]byte, connDataLen)
	b[0] = version
	if c.bigEndian {
		b[1] = flagBigEndian
	}
	if c.iomaps > 0 {
		b[1] |= flagIOMaps
		b[7] = uint8(c.iomaps)
	}
	binary.BigEndian.PutUint16(b[2:], c.credits)
	c.sgl.encode(b[8:], binary.BigEndian)
	c.buffer.encode(b[24:], binary.BigEndian)
	return b
}

// decodeConnData decodes and checks a peer's private data. Bytes that follow are ignored: the field has a fixed
// length.
func decodeConnData(b []byte) (c connData, err error) {
	if len(b) < connDataLen {
		return c, violation("private data of %d bytes, expected %d", len(b), connDataLen)
	}
	if b[0] != version {
		return c, violation("version %d, expected %d", b[0], version)
	}
	c = connData{bigEndian: b[1]&flagBigEndian != 0, credits: binary.BigEndian.Uint16(b[2:]),
		sgl: decodeSGE(b[8:], binary.BigEndian), buffer: decodeSGE(b[24:], binary.BigEndian)}
	if b[1]&flagIOMaps != 0 {
		c.iomaps = min(ofScale(b[7]), maxIOMaps)
	}
	switch {
	case c.credits == 0:
		return c, violation("0 credits, expected at least 1")
	case c.sgl.length < sglEntries: // the first update goes to entry 1
		return c, violation("target SGL of %d entries, expected at least %d", c.sgl.length, sglEntries)
	case !c.sgl.holds(uint64(c.sgl.length)*sgeLen + uint64(c.iomaps)*iomapLen):
		return c, violation("target SGL of %d entries and %d iomaps at %#x exceed the address space", c.sgl.length,
			c.iomaps, c.sgl.addr)
	case !c.buffer.holds(uint64(c.buffer.length)):
		return c, violation("buffer of %d bytes at %#x exceeds the address space", c.buffer.length, c.buffer.addr)
	}
	return c, nil
}

// ofScale returns the number that a byte of the private data stands for (rs_scale_to_value): above 128 in steps of 256.
func ofScale(b uint8) int {
	if b <= 1<<7 {
		return int(b)
	}
	return int(b&^(1<<7)) << 8
}

// order returns the byte order of the entries in the sender's SGL.
func (c *connData) order() binary.ByteOrder {
	if c.bigEndian {
		return binary.BigEndian
	}
	return binary.LittleEndian
}

// message is the immediate data of a WRITE: an operation in bits 31:29 and its data in bits 28:0.
type message uint32

// operation is what a message tells.
type operation uint8

const (
	opData    operation = 0 // data has been written; data: its length in bytes
	opSGL     operation = 4 // credits, and maybe an entry of the target SGL; data: the number of the last data message
	opIOMap   operation = 6 // an iomap entry has been written
	opControl operation = 7 // data: a control code
)

// Control codes.
const (
	controlDisconnect = 0 // the sender neither sends nor receives any more
	controlKeepalive  = 1
	controlShutdown   = 2 // the sender sends no more data
)

const messageData = 1<<29 - 1 // mask of a message's data

func newMessage(op operation, data uint32) message { return message(uint32(op)<<29 | data&messageData) }

func (m message) op() operation { return operation(m >> 29) }
func (m message) data() uint32  { return uint32(m) & messageData }

// imm returns the message as immediate data, in network order.
func (m message) imm() (b [4]byte) {
	binary.BigEndian.PutUint32(b[:], uint32(m))
	return b
}

// messageOf is the inverse of imm.
func messageOf(imm [4]byte) message { return message(binary.BigEndian.Uint32(imm[:])) }

// remote returns the place that is off bytes behind the entry's beginning.
func (s sge) remote(off uint64) guestdrv.Remote {
	return guestdrv.Remote{Addr: s.addr + off, RKey: s.key}
}

func (o operation) String() string {
	switch o {
	case opData:
		return "data"
	case opSGL:
		return "credit update"
	case opIOMap:
		return "iomap update"
	case opControl:
		return "control"
	}
	return fmt.Sprintf("reserved operation %d", uint8(o))
}
