package gso

import (
	"bytes"
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
)

const maxTrain = 64 // packets

// Of RoCE a train needs to know only this (IBTA 9.2): a packet has at least BTH and ICRC, and the highest three
// bits of its opcode name the transport.
const (
	minRoCE     = 12 + 4
	transportRC = 0
	transportUC = 1
)

// Train couples RoCE v2 packets of one queue pair that follow each other: the first as it is, and of the others what is
// behind the UDP header, for all in front of that is the same, lengths included. So they pass the switch as one frame
// (packet.NeedTrain). Nothing is computed; whoever cuts a train has every packet again byte by byte, and each still has
// its ICRC.
//
// As in a Merger the first packet stays where it is until a second one fits.
type Train struct {
	b     *frame.Buf // nil while there is one packet only
	first []byte
	t     transport
	bth   int // where BTH begins
	n     int // packets; 0 = empty
}

// Start begins with a frame; the Train must be empty. False: it can be no part of a train. roce tells whether it is
// RoCE v2 at least.
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

// Packets is how many there are; 0 = empty.
func (t *Train) Packets() int { return t.n }

// First is the first packet.
func (t *Train) First() []byte { return t.first }

// Continues tells whether a packet is of the train's connection, and Add takes it if there is room.
func (t *Train) Continues(f []byte) bool {
	// With headers that are equal the packet is as long as the first. More is padding.
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

// Take empties the Train. It returns it and a reference to it; or, when there was one packet only, nil: that one is
// whole as it is.
func (t *Train) Take() *frame.Buf {
	b := t.b
	if b != nil {
		b.Offload = frame.Offload{Need: frame.NeedTrain, GSOSize: uint16(len(t.first) - t.bth), Payload: uint16(t.bth)}
		b.SetLayout(&t.t.at)
	}
	t.b, t.n, t.first = nil, 0, nil
	return b
}
