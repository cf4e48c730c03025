package wire

// Opcode is BTH's OpCode: three bits of transport, five of operation (IBTA 9.2.1).
type Opcode uint8

// Transport is the upper part of an opcode.
type Transport uint8

// Transports.
const (
	RC Transport = 0
	UC Transport = 1
	UD Transport = 3
	CN Transport = 4 // congestion notification (A10, A17)
)

// Operations of RC; UC has those without an acknowledge, 0x20 higher.
const (
	OpRCSendFirst         Opcode = 0x00
	OpRCSendMiddle        Opcode = 0x01
	OpRCSendLast          Opcode = 0x02
	OpRCSendLastImm       Opcode = 0x03
	OpRCSendOnly          Opcode = 0x04
	OpRCSendOnlyImm       Opcode = 0x05
	OpRCWriteFirst        Opcode = 0x06
	OpRCWriteMiddle       Opcode = 0x07
	OpRCWriteLast         Opcode = 0x08
	OpRCWriteLastImm      Opcode = 0x09
	OpRCWriteOnly         Opcode = 0x0a
	OpRCWriteOnlyImm      Opcode = 0x0b
	OpRCReadRequest       Opcode = 0x0c
	OpRCReadResponseFirst Opcode = 0x0d
	OpRCReadResponseMid   Opcode = 0x0e
	OpRCReadResponseLast  Opcode = 0x0f
	OpRCReadResponseOnly  Opcode = 0x10
	OpRCAck               Opcode = 0x11
	OpRCAtomicAck         Opcode = 0x12
	OpRCCompareSwap       Opcode = 0x13
	OpRCFetchAdd          Opcode = 0x14
	OpRCSendLastInv       Opcode = 0x16
	OpRCSendOnlyInv       Opcode = 0x17
	OpRCFlush             Opcode = 0x1c // annex A19
	OpRCAtomicWrite       Opcode = 0x1d // annex A19

	OpUCSendFirst    Opcode = 0x20
	OpUCSendMiddle   Opcode = 0x21
	OpUCSendLast     Opcode = 0x22
	OpUCSendLastImm  Opcode = 0x23
	OpUCSendOnly     Opcode = 0x24
	OpUCSendOnlyImm  Opcode = 0x25
	OpUCWriteFirst   Opcode = 0x26
	OpUCWriteMiddle  Opcode = 0x27
	OpUCWriteLast    Opcode = 0x28
	OpUCWriteLastImm Opcode = 0x29
	OpUCWriteOnly    Opcode = 0x2a
	OpUCWriteOnlyImm Opcode = 0x2b

	OpUDSendOnly    Opcode = 0x64
	OpUDSendOnlyImm Opcode = 0x65

	OpCNP Opcode = 0x81 // RoCE v2 (A17.9.3)

	// OpRCSelectiveAck is vnicd's, in the manufacturers' range (IBTA 9.2.1): a NAK for a sequence error that also lists
	// the packets that have arrived behind the gap. It is sent only to peers that support it (BTH.Selective).
	OpRCSelectiveAck Opcode = 0xd1
)

// Operation is the operation of an opcode, independent of the packet's place in the message.
type Operation uint8

// Operations.
const (
	Send Operation = iota + 1
	Write
	ReadRequest
	ReadResponse
	Ack
	AtomicAck
	CompareSwap
	FetchAdd
	Flush
	AtomicWrite
	CNP
	SelectiveAck
)

// OpFlags tell which extension headers follow the BTH and where in a message the packet stands.
type OpFlags uint16

// Flags. An only-packet has First and Last.
const (
	First     OpFlags = 1 << iota
	Last              // last or only
	HasDETH           // extension headers, in the order in which they stand
	HasFETH           //
	HasRETH           //
	HasAtomic         // AtomicETH
	HasAETH           //
	HasAtomicAck
	HasImm
	HasIETH
	HasArrivals
	HasReserved // as long as CNPLen
	HasPayload  // data may follow; without it the payload is empty
	Response    // travels from responder to requester
)

// OpInfo describes one opcode.
type OpInfo struct {
	Op        Operation // 0: not in the allow-list
	Transport Transport
	ExtLen    uint8 // bytes of extension headers
	Flags     OpFlags
	Name      string
}

// Is reports whether all of f is set.
func (o *OpInfo) Is(f OpFlags) bool { return o.Flags&f == f }

// Valid reports whether this device supports the opcode.
func (o *OpInfo) Valid() bool { return o.Op != 0 }

// Info returns the description of o; not Valid if o is unknown.
func (o Opcode) Info() *OpInfo { return &opcodes[o] }

// String names the opcode as the specification does.
func (o Opcode) String() string {
	if n := opcodes[o].Name; n != "" {
		return n
	}
	return "opcode " + hex8(uint8(o))
}

func hex8(b uint8) string {
	const digits = "0123456789abcdef"
	return string([]byte{'0', 'x', digits[b>>4], digits[b&0xf]})
}

// opcodes is the allow-list (IBTA 9.2.1): other opcodes are refused.
var opcodes = makeOpcodes()

func makeOpcodes() (t [256]OpInfo) {
	const only = First | Last
	add := func(o Opcode, name string, op Operation, f OpFlags) {
		i := OpInfo{Op: op, Transport: Transport(o >> 5), Flags: f, Name: name}
		for _, e := range [...]struct {
			f OpFlags
			n int
		}{{HasDETH, DETHLen}, {HasFETH, FETHLen}, {HasRETH, RETHLen}, {HasAtomic, AtomicLen}, {HasAETH, AETHLen},
			{HasAtomicAck, AtomicAckLen}, {HasImm, ImmLen}, {HasIETH, IETHLen}, {HasReserved, CNPLen},
			{HasArrivals, ArrivalsLen}} {
			if f&e.f != 0 {
				i.ExtLen += uint8(e.n)
			}
		}
		t[o] = i
	}
	for _, tr := range [...]struct {
		base Opcode
		name string
	}{{0x00, "RC "}, {0x20, "UC "}} {
		add(tr.base+0x00, tr.name+"SEND First", Send, First|HasPayload)
		add(tr.base+0x01, tr.name+"SEND Middle", Send, HasPayload)
		add(tr.base+0x02, tr.name+"SEND Last", Send, Last|HasPayload)
		add(tr.base+0x03, tr.name+"SEND Last with Immediate", Send, Last|HasPayload|HasImm)
		add(tr.base+0x04, tr.name+"SEND Only", Send, only|HasPayload)
		add(tr.base+0x05, tr.name+"SEND Only with Immediate", Send, only|HasPayload|HasImm)
		add(tr.base+0x06, tr.name+"RDMA WRITE First", Write, First|HasPayload|HasRETH)
		add(tr.base+0x07, tr.name+"RDMA WRITE Middle", Write, HasPayload)
		add(tr.base+0x08, tr.name+"RDMA WRITE Last", Write, Last|HasPayload)
		add(tr.base+0x09, tr.name+"RDMA WRITE Last with Immediate", Write, Last|HasPayload|HasImm)
		add(tr.base+0x0a, tr.name+"RDMA WRITE Only", Write, only|HasPayload|HasRETH)
		add(tr.base+0x0b, tr.name+"RDMA WRITE Only with Immediate", Write, only|HasPayload|HasRETH|HasImm)
	}
	add(OpRCReadRequest, "RC RDMA READ Request", ReadRequest, only|HasRETH)
	add(OpRCReadResponseFirst, "RC RDMA READ response First", ReadResponse, First|HasPayload|HasAETH|Response)
	add(OpRCReadResponseMid, "RC RDMA READ response Middle", ReadResponse, HasPayload|Response)
	add(OpRCReadResponseLast, "RC RDMA READ response Last", ReadResponse, Last|HasPayload|HasAETH|Response)
	add(OpRCReadResponseOnly, "RC RDMA READ response Only", ReadResponse, only|HasPayload|HasAETH|Response)
	add(OpRCAck, "RC Acknowledge", Ack, only|HasAETH|Response)
	add(OpRCAtomicAck, "RC ATOMIC Acknowledge", AtomicAck, only|HasAETH|HasAtomicAck|Response)
	add(OpRCCompareSwap, "RC CmpSwap", CompareSwap, only|HasAtomic)
	add(OpRCFetchAdd, "RC FetchAdd", FetchAdd, only|HasAtomic)
	add(OpRCSendLastInv, "RC SEND Last with Invalidate", Send, Last|HasPayload|HasIETH)
	add(OpRCSendOnlyInv, "RC SEND Only with Invalidate", Send, only|HasPayload|HasIETH)
	add(OpRCFlush, "RC FLUSH", Flush, only|HasFETH|HasRETH)
	add(OpRCAtomicWrite, "RC ATOMIC WRITE", AtomicWrite, only|HasRETH|HasPayload)
	add(OpUDSendOnly, "UD SEND Only", Send, only|HasPayload|HasDETH)
	add(OpUDSendOnlyImm, "UD SEND Only with Immediate", Send, only|HasPayload|HasDETH|HasImm)
	add(OpCNP, "CNP", CNP, only|HasReserved)
	add(OpRCSelectiveAck, "RC selective Acknowledge (vnicd)", SelectiveAck, only|HasAETH|HasArrivals|Response)
	t[OpRCSelectiveAck].Transport = RC
	return t
}
