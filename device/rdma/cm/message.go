// Package cm watches communication management (IBTA volume 1, chapter 12) between a VM and its peers: the datagrams
// over queue pair 1 that set up and end connections. It keeps a bounded table of the VM's connections, by the
// communication IDs of both sides, and reports arriving datagrams that contradict it (MT-3, MT-4). It only observes: it
// answers, sends and changes nothing, and uses no I/O, clock or lock.
package cm

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// MADLen is the length of a management datagram (IBTA 13.4.2).
const MADLen = 256

const (
	madBase    = 1 // base version
	madClass   = 7 // communication management, IBTA 13.4.4
	madVersion = 2
	methodSend = 3

	data = 24 // where the message begins, behind the MAD header
)

// Kind is the type of a message: its attribute ID (IBTA 12.6, table 105).
type Kind uint16

// The messages.
const (
	REQ     Kind = 0x10 // request for communication
	MRA     Kind = 0x11 // message receipt acknowledgement: the answer will take longer
	REJ     Kind = 0x12 // reject
	REP     Kind = 0x13 // reply
	RTU     Kind = 0x14 // ready to use
	DREQ    Kind = 0x15 // disconnection request
	DREP    Kind = 0x16 // disconnection reply
	SIDRReq Kind = 0x17 // service ID resolution, for datagrams
	SIDRRep Kind = 0x18
	LAP     Kind = 0x19 // load alternate path
	APR     Kind = 0x1a // alternate path response
)

var kindNames = map[Kind]string{REQ: "REQ", MRA: "MRA", REJ: "REJ", REP: "REP", RTU: "RTU", DREQ: "DREQ", DREP: "DREP",
	SIDRReq: "SIDR_REQ", SIDRRep: "SIDR_REP", LAP: "LAP", APR: "APR"}

// String returns the name in IBTA.
func (k Kind) String() string {
	if s := kindNames[k]; s != "" {
		return s
	}
	return fmt.Sprintf("attribute %#x", uint16(k))
}

// Errors of Parse.
var (
	// ErrOther: a management datagram of another class.
	ErrOther = errors.New("cm: not communication management")
	// ErrMalformed: not a management datagram, or a message that chapter 12 does not define.
	ErrMalformed = errors.New("cm: malformed message")
)

// Message is a view of a whole management datagram that Parse has accepted; its methods never fail. A field that the
// kind does not have returns the bytes at its place.
type Message []byte

// Parse checks that b begins with a message.
func Parse(b []byte) (Message, error) {
	switch {
	case len(b) < 2 || b[1] != madClass:
		return nil, ErrOther
	case len(b) < MADLen || b[0] != madBase || b[2] != madVersion || b[3] != methodSend:
		return nil, ErrMalformed
	}
	m := Message(b[:MADLen:MADLen])
	if _, ok := kindNames[m.Kind()]; !ok {
		return nil, ErrMalformed
	}
	return m, nil
}

func (m Message) u8(off int) uint8   { return m[data+off] }
func (m Message) u16(off int) uint16 { return binary.BigEndian.Uint16(m[data+off:]) }
func (m Message) u24(off int) uint32 { return binary.BigEndian.Uint32(m[data+off:]) >> 8 }
func (m Message) u32(off int) uint32 { return binary.BigEndian.Uint32(m[data+off:]) }
func (m Message) u64(off int) uint64 { return binary.BigEndian.Uint64(m[data+off:]) }

// Kind returns the type of the message.
func (m Message) Kind() Kind { return Kind(binary.BigEndian.Uint16(m[16:])) }

// Transaction returns the transaction ID, which repetitions and the answer share.
func (m Message) Transaction() uint64 { return binary.BigEndian.Uint64(m[8:]) }

// LocalID returns the sender's communication ID; of SIDR messages the request ID, which is the requester's in both
// directions.
func (m Message) LocalID() uint32 { return m.u32(0) }

// RemoteID returns the receiver's communication ID; REQ and SIDR messages have none. 0 in a REJ: unknown.
func (m Message) RemoteID() uint32 { return m.u32(4) }

// ServiceID returns the requested service of REQ, SIDR_REQ and SIDR_REP.
func (m Message) ServiceID() uint64 {
	if m.Kind() == SIDRRep {
		return m.u64(12)
	}
	return m.u64(8)
}

// QPN returns the sender's queue pair in REQ, REP and SIDR_REP, the receiver's in DREQ and LAP; 24 bits.
func (m Message) QPN() uint32 {
	switch m.Kind() {
	case REQ:
		return m.u24(32)
	case REP, LAP:
		return m.u24(12)
	}
	return m.u24(8) // DREQ, SIDR_REP
}

// PSN returns the starting packet number of REQ and REP, at which the receiver shall begin to send; 24 bits.
func (m Message) PSN() uint32 {
	if m.Kind() == REQ {
		return m.u24(44)
	}
	return m.u24(20)
}

// Transport returns the service type of a REQ: 0 RC, 1 UC, 2 RD, 3 other (IBTA 12.7.9).
func (m Message) Transport() uint8 { return m.u8(43) >> 1 & 3 }

// PathMTU returns the MTU code of a REQ: 1 (256 bytes) to 5 (4096 bytes), others are reserved.
func (m Message) PathMTU() uint8 { return m.u8(50) >> 4 }

// RNRRetry returns the RNR retry count of REQ and REP, 7 for no limit. It is the count that the sender asks the
// receiver's queue pair to use (IBTA 12.7; Linux obeys).
func (m Message) RNRRetry() uint8 {
	if m.Kind() == REQ {
		return m.u8(50) & 7
	}
	return m.u8(27) >> 5
}

// PKey returns the partition of a REQ.
func (m Message) PKey() uint16 { return m.u16(48) }

// GIDs returns the ends of a REQ's primary path: the sender's and the receiver's.
func (m Message) GIDs() (local, remote [16]byte) {
	return [16]byte(m[data+56:]), [16]byte(m[data+72:])
}

// Reason returns the reason of a REJ (IBTA 12.6.7.2).
func (m Message) Reason() uint16 { return m.u16(10) }

// Status returns the status of a SIDR_REP: 0 is success (IBTA 12.6.7, table 121).
func (m Message) Status() uint8 { return m.u8(4) }

// QKey returns the key of a SIDR_REP.
func (m Message) QKey() uint32 { return m.u32(20) }

// ServiceTimeout returns the time code of an MRA: the time is 4.096 us * 2^code.
func (m Message) ServiceTimeout() uint8 { return m.u8(9) >> 3 }
