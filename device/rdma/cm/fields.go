package cm

import (
	"encoding/binary"
	"fmt"
)

// Room for private data, and for the additional information of a REJ, in bytes.
const (
	PrivateREQ     = 92
	PrivateREP     = 196
	PrivateREJ     = 148
	PrivateMRA     = 222
	PrivateRTU     = 224
	PrivateDREQ    = 220
	PrivateDREP    = 224
	PrivateSIDRReq = 216
	PrivateSIDRRep = 136
	InfoREJ        = 72
)

// private is where the private data of each kind begins and how long it is (IBTA 12.6, 12.11). LAP and APR messages are
// only watched, so their private data is not decoded.
var private = map[Kind]struct{ off, len int }{
	REQ: {140, PrivateREQ}, REP: {36, PrivateREP}, REJ: {84, PrivateREJ}, MRA: {10, PrivateMRA}, RTU: {8, PrivateRTU},
	DREQ: {12, PrivateDREQ}, DREP: {8, PrivateDREP}, SIDRReq: {16, PrivateSIDRReq}, SIDRRep: {96, PrivateSIDRRep},
}

// Answered says which message a MRA or REJ answers (IBTA 12.6.6, 12.6.7).
type Answered uint8

// The values of Answered.
const (
	AnswersREQ   Answered = 0
	AnswersREP   Answered = 1
	AnswersOther Answered = 2
)

// SIDRStatus says whether a SIDR_REP names a queue pair (IBTA 12.11.2).
type SIDRStatus uint8

// The values of SIDRStatus.
const (
	SIDRValid SIDRStatus = iota
	SIDRUnsupported
	SIDRRejected
	SIDRNoQP
	SIDRRedirected
	SIDRVersion
)

// Fields are the contents of a message that sets up or ends a connection, or that resolves a service ID to a datagram
// queue pair (SIDR). Encode ignores fields that the kind does not
// have, and Decode leaves them zero. Numbers are cut to the width of their fields.
type Fields struct {
	Kind              Kind
	Transaction       uint64
	LocalID, RemoteID uint32 // RemoteID: all but REQ; of SIDR messages LocalID is the ID of the request
	QPN               uint32 // the sender's in REQ and REP, the receiver's in DREQ, the service's in SIDR_REP; 24 bits

	// REQ and REP.
	PSN                uint32 // at which the receiver shall begin to send; 24 bits
	GUID               uint64 // of the sender's channel adapter
	ResponderResources uint8  // READs and atomics of the receiver that the sender executes at once
	InitiatorDepth     uint8  // READs and atomics that the sender has outstanding
	RNRRetry           uint8  // for the receiver's queue pair; 7: without limit
	FlowControl        bool   // end to end
	SRQ                bool

	// REQ and SIDR messages.
	Service uint64

	// SIDR_REP.
	Status SIDRStatus
	QKey   uint32

	// REQ; PKey of SIDR_REQ, too.
	RemoteTimeout   uint8 // the receiver answers the REQ within 4.096 us * 2^RemoteTimeout; 5 bits
	LocalTimeout    uint8 // the sender answers a REP within 4.096 us * 2^LocalTimeout; 5 bits
	MaxRetries      uint8 // of messages; 4 bits
	Transport       uint8 // 0: RC
	RetryCount      uint8 // for the receiver's queue pair; 3 bits
	PKey            uint16
	PathMTU         uint8 // code: 1 (256 bytes) to 5 (4096 bytes)
	LocalLID        uint16
	RemoteLID       uint16
	Local, Remote   [16]byte // GIDs of the primary path
	FlowLabel       uint32   // 20 bits
	PacketRate      uint8    // 6 bits
	TrafficClass    uint8
	HopLimit        uint8
	SL              uint8 // 4 bits
	SubnetLocal     bool
	LocalACKTimeout uint8 // for the receiver's queue pair: 4.096 us * 2^LocalACKTimeout; 5 bits

	// REP.
	TargetACKDelay uint8 // 5 bits
	Failover       uint8 // 2 bits

	// REJ and MRA.
	Answers        Answered
	Reason         uint16 // REJ
	Info           []byte // REJ: additional information about the reason, at most InfoREJ bytes
	ServiceTimeout uint8  // MRA: the answer follows within 4.096 us * 2^ServiceTimeout; 5 bits

	// Private is the private data; zero bytes follow it in the message. Decode returns all of the room for it.
	Private []byte
}

// hasRemoteID reports whether messages of that kind name the receiver's communication ID.
func (k Kind) hasRemoteID() bool { return k != REQ && k != SIDRReq && k != SIDRRep }

// Encode returns the datagram. It fails if the kind is none that Fields describes, or if data is longer than its room.
func (x *Fields) Encode() ([]byte, error) {
	room, ok := private[x.Kind]
	switch {
	case !ok:
		return nil, fmt.Errorf("cm: %v has no encoding", x.Kind)
	case len(x.Private) > room.len:
		return nil, fmt.Errorf("cm: %d bytes of private data in a %v, at most %d", len(x.Private), x.Kind, room.len)
	case len(x.Info) > InfoREJ:
		return nil, fmt.Errorf("cm: %d bytes of information in a REJ, at most %d", len(x.Info), InfoREJ)
	}
	b := make([]byte, MADLen)
	be := binary.BigEndian
	b[0], b[1], b[2], b[3] = madBase, madClass, madVersion, methodSend
	be.PutUint64(b[8:], x.Transaction)
	be.PutUint16(b[16:], uint16(x.Kind))
	d := b[data:]
	be.PutUint32(d, x.LocalID)
	if x.Kind.hasRemoteID() {
		be.PutUint32(d[4:], x.RemoteID)
	}
	switch x.Kind {
	case REQ:
		x.encodeREQ(d)
	case SIDRReq:
		be.PutUint16(d[4:], x.PKey)
		be.PutUint64(d[8:], x.Service)
	case SIDRRep:
		d[4] = uint8(x.Status)
		be.PutUint32(d[8:], x.QPN<<8)
		be.PutUint64(d[12:], x.Service)
		be.PutUint32(d[20:], x.QKey)
	case REP:
		be.PutUint32(d[12:], x.QPN<<8)
		be.PutUint32(d[20:], x.PSN<<8)
		d[24], d[25] = x.ResponderResources, x.InitiatorDepth
		d[26] = x.TargetACKDelay<<3 | x.Failover&3<<1 | bit(x.FlowControl)
		d[27] = x.RNRRetry<<5 | bit(x.SRQ)<<4
		be.PutUint64(d[28:], x.GUID)
	case REJ:
		d[8], d[9] = uint8(x.Answers)<<6, uint8(len(x.Info))<<1
		be.PutUint16(d[10:], x.Reason)
		copy(d[12:], x.Info)
	case MRA:
		d[8], d[9] = uint8(x.Answers)<<6, x.ServiceTimeout<<3
	case DREQ:
		be.PutUint32(d[8:], x.QPN<<8)
	}
	copy(d[room.off:], x.Private)
	return b, nil
}

// encodeREQ writes the fields of IBTA table 106.
func (x *Fields) encodeREQ(d []byte) {
	be := binary.BigEndian
	be.PutUint64(d[8:], x.Service)
	be.PutUint64(d[16:], x.GUID)
	be.PutUint32(d[32:], x.QPN<<8|uint32(x.ResponderResources))
	d[39] = x.InitiatorDepth
	d[43] = x.RemoteTimeout<<3 | x.Transport&3<<1 | bit(x.FlowControl)
	be.PutUint32(d[44:], x.PSN<<8)
	d[47] = x.LocalTimeout<<3 | x.RetryCount&7
	be.PutUint16(d[48:], x.PKey)
	d[50] = x.PathMTU<<4 | x.RNRRetry&7
	d[51] = x.MaxRetries<<4 | bit(x.SRQ)<<3
	be.PutUint16(d[52:], x.LocalLID)
	be.PutUint16(d[54:], x.RemoteLID)
	copy(d[56:], x.Local[:])
	copy(d[72:], x.Remote[:])
	be.PutUint32(d[88:], x.FlowLabel<<12|uint32(x.PacketRate&0x3f))
	d[92], d[93] = x.TrafficClass, x.HopLimit
	d[94] = x.SL<<4 | bit(x.SubnetLocal)<<3
	d[95] = x.LocalACKTimeout << 3
}

// Decode returns the fields. Info and Private are parts of m. ok is false for messages that Fields does not describe:
// those of alternate paths.
func (m Message) Decode() (x Fields, ok bool) {
	room, ok := private[m.Kind()]
	if !ok {
		return x, false
	}
	x = Fields{Kind: m.Kind(), Transaction: m.Transaction(), LocalID: m.LocalID(),
		Private: m[data+room.off:][:room.len:room.len]}
	if x.Kind.hasRemoteID() {
		x.RemoteID = m.RemoteID()
	}
	switch x.Kind {
	case REQ:
		m.decodeREQ(&x)
	case SIDRReq:
		x.PKey, x.Service = m.u16(4), m.ServiceID()
	case SIDRRep:
		x.Status, x.QPN, x.Service, x.QKey = SIDRStatus(m.Status()), m.QPN(), m.ServiceID(), m.QKey()
	case REP:
		x.QPN, x.PSN, x.RNRRetry = m.QPN(), m.PSN(), m.RNRRetry()
		x.ResponderResources, x.InitiatorDepth = m.u8(24), m.u8(25)
		x.TargetACKDelay, x.Failover, x.FlowControl = m.u8(26)>>3, m.u8(26)>>1&3, m.u8(26)&1 != 0
		x.SRQ, x.GUID = m.u8(27)>>4&1 != 0, m.u64(28)
	case REJ:
		x.Answers, x.Reason = Answered(m.u8(8)>>6), m.Reason()
		n := min(int(m.u8(9)>>1), InfoREJ)
		x.Info = m[data+12:][:n:n]
	case MRA:
		x.Answers, x.ServiceTimeout = Answered(m.u8(8)>>6), m.ServiceTimeout()
	case DREQ:
		x.QPN = m.QPN()
	}
	return x, true
}

func (m Message) decodeREQ(x *Fields) {
	x.Service, x.GUID, x.QPN, x.PSN = m.ServiceID(), m.u64(16), m.QPN(), m.PSN()
	x.ResponderResources, x.InitiatorDepth = m.u8(35), m.u8(39)
	x.RemoteTimeout, x.Transport, x.FlowControl = m.u8(43)>>3, m.Transport(), m.u8(43)&1 != 0
	x.LocalTimeout, x.RetryCount = m.u8(47)>>3, m.u8(47)&7
	x.PKey, x.PathMTU, x.RNRRetry = m.PKey(), m.PathMTU(), m.RNRRetry()
	x.MaxRetries, x.SRQ = m.u8(51)>>4, m.u8(51)>>3&1 != 0
	x.LocalLID, x.RemoteLID = m.u16(52), m.u16(54)
	x.Local, x.Remote = m.GIDs()
	x.FlowLabel, x.PacketRate = m.u32(88)>>12, m.u8(91)&0x3f
	x.TrafficClass, x.HopLimit = m.u8(92), m.u8(93)
	x.SL, x.SubnetLocal = m.u8(94)>>4, m.u8(94)>>3&1 != 0
	x.LocalACKTimeout = m.u8(95) >> 3
}

func bit(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}
