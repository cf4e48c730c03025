package roce

import "github.com/vnicd/vnicd/translate"

// Mask selects fields of an Attr, numbered as enum ib_qp_attr_mask.
type Mask uint32

// Attribute mask bits.
const (
	MaskState           Mask = 1 << 0
	MaskCurState        Mask = 1 << 1
	MaskSQDNotify       Mask = 1 << 2
	MaskAccess          Mask = 1 << 3
	MaskPKeyIndex       Mask = 1 << 4
	MaskPort            Mask = 1 << 5
	MaskQKey            Mask = 1 << 6
	MaskAV              Mask = 1 << 7
	MaskPathMTU         Mask = 1 << 8
	MaskTimeout         Mask = 1 << 9
	MaskRetryCnt        Mask = 1 << 10
	MaskRNRRetry        Mask = 1 << 11
	MaskRQPSN           Mask = 1 << 12
	MaskMaxRdAtomic     Mask = 1 << 13
	MaskAltPath         Mask = 1 << 14
	MaskMinRNRTimer     Mask = 1 << 15
	MaskSQPSN           Mask = 1 << 16
	MaskMaxDestRdAtomic Mask = 1 << 17
	MaskPathMigState    Mask = 1 << 18
	MaskCap             Mask = 1 << 19
	MaskDestQPN         Mask = 1 << 20
	MaskRateLimit       Mask = 1 << 25
)

// Attr are the modifiable attributes of a QP (IBTA 11.2.5.2), numbered and scaled
// as in struct ib_qp_attr.
type Attr struct {
	State           State
	CurState        State
	PathMTU         uint8 // enum ib_mtu: 1 = 256 .. 5 = 4096
	Timeout         uint8 // 4.096 us * 2^Timeout, 0..31; 0: never
	RetryCnt        uint8 // 0..7
	RNRRetry        uint8 // 0..7, 7: unlimited
	MinRNRTimer     uint8 // 0..31, IBTA table 46
	MaxRdAtomic     uint8 // READs and atomics this side may have in flight
	MaxDestRdAtomic uint8 // ... and that it accepts as responder
	SQDNotify       bool
	SQDraining      bool // Query only
	PKeyIndex       uint16
	Port            uint16
	Access          translate.Access // RemoteWrite, RemoteRead, RemoteAtomic
	QKey            uint32
	DestQPN         uint32 // 24 bits
	RQPSN, SQPSN    uint32 // 24 bits
	AV              AddressVector
}

// Config is fixed for a QP's life.
type Config struct {
	QPN        uint32
	Type       Type
	MaxSendSGE int // capacity of WQE.SGEs
	MaxRecvSGE int // capacity of RecvWQE.SGEs
	MaxInline  int // capacity of WQE.InlineData, bytes
	HasSRQ     bool

	MaxOutstanding  int    // send WQEs in flight, 0: 64
	Window          int    // request packets in flight, 0: 256; at most 128 to peers other than vnicd
	ECN             bool   // congestion control by marks and CNPs; else by loss alone
	SelectiveRepeat bool   // between two vnicds, send only lost packets again; else go back N
	MTU             int    // port MTU in bytes, 256..4096: bounds path_mtu and UD messages; 0: 4096
	Stats           *Stats // counters to use, nil: the QP's own
	MaxRdAtomic     int    // bound of Attr.MaxRdAtomic and MaxDestRdAtomic, 0: 16
}
