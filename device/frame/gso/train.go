package gso

import (
	"bytes"
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
)

const maxTrain = 64 // packets

// The properties of RoCE that a train relies on (IBTA 9.2): a packet has at least BTH and ICRC, and the highest three
// bits of its opcode name the transport.
const (
	minRoCE     = 12 + 4
	transportRC = 0
	transportUC = 1
)

// Train couples consecutive RoCE v2 packets of one queue pair: the first is whole, and of the others only the part
// after the UDP header is kept, because their headers up to UDP are equal, lengths included. So they pass the switch as
// one frame (frame.NeedTrain). Nothing is computed; splitting a train restores every packet byte by byte, with its
// ICRC.
//
// As in a Merger, the first packet is not copied before a second one fits.
type Train struct {
	b     *frame.Buf // nil while there is only one packet
	first []byte
	t     transport
	bth   int // offset of BTH
	n     int // packets; 0 = empty
}

// Start sets the first packet; the Train must be empty. ok is false if the frame cannot be part of a train. roce
// reports whether it is RoCE v2.
func (t *Train) Start(f []byte, at *header.Layout) (ok, roce bool) {
	p, ok := locate(f, at)
	if !ok || p.tcp || !at.Is(header.IsRoCE) {
		return false, false
	}
	f = p.unpadded(f)
	bth, whole := p.payload(f)
	if !whole || !p.v6 && f[p.l3] != typeOfIPv4 || int(binary.BigEndian.Uint16(f[p.l4+4:])) != len(f)-p.l4 ||
		len(f)-bth < minRoCE {
		return false, true
	}
	if k := f[bth] >> 5; k != transportRC && k != transportUC {
		return false, true
	}
	*t = Train{first: f, t: p, bth: bth, n: 1}
	return true, true
}

// Packets returns the number of packets; 0 = empty.
func (t *Train) Packets() int { return t.n }

// First returns the first packet.
func (t *Train) First() []byte { return t.first }

// Continues reports whether a packet belongs to the train, so that Add accepts it if there is room.
func (t *Train) Continues(f []byte) bool {
	// With equal headers the packet is as long as the first. Further bytes are padding.
	return len(f) >= len(t.first) && bytes.Equal(f[:t.bth], t.first[:t.bth]) &&
		f[t.bth]>>5 == t.first[t.bth]>>5 && u32(f[t.bth+4:])<<8 == u32(t.first[t.bth+4:])<<8
}

// Add appends a packet that continues the train; false: there is no room.
func (t *Train) Add(pool *frame.Pool, f []byte) bool {
	f = f[:len(t.first)]
	length := t.bth + (t.n+1)*(len(f)-t.bth)
	if t.n == maxTrain || length > maxIP {
		return false
	}
	if t.b == nil {
		if t.b = pool.GetFor(frame.BigCapacity); t.b == nil {
			return false
		}
		t.b.Append(t.first)
	}
	t.n++
	return t.b.Append(f[t.bth:])
}

// Take empties the Train. It returns the train with a reference; or nil if there was only one packet, which is still
// complete.
func (t *Train) Take() *frame.Buf {
	b := t.b
	if b != nil {
		b.Offload = frame.Offload{Need: frame.NeedTrain, GSOSize: uint16(len(t.first) - t.bth), Payload: uint16(t.bth)}
		b.SetLayout(&t.t.at)
	}
	t.b, t.n, t.first = nil, 0, nil
	return b
}
