package abi

// Sizes of the encoded structures in bytes.
const (
	SizeConfig       = 128
	SizeReq          = 8
	SizeResp         = 8
	SizeRing         = 24
	SizeDeviceAttr   = 120
	SizePortAttr     = 24
	SizeSetGID       = 32
	SizeClearGID     = 8
	SizeSetDoorbells = 32
	SizeAH           = 64
	SizeSetAHTable   = 8
	SizeHandle       = 8
	SizeStats        = 176
	SizeCountQP      = 8
	SizeCEQE         = 8
	SizeEvent        = 64
)

// Config is the device's configuration space, read-only for the driver
// (struct vnicd_config).
type Config struct {
	Magic      uint32   `c:"magic"`
	ABIVersion uint32   `c:"abi_version"`
	MAC        [6]byte  `c:"mac"`
	NumCEQs    uint16   `c:"num_ceqs"`
	NumEngines uint16   `c:"num_engines"`
	LinkUp     uint16   `c:"link_up"`
	PortMTU    uint32   `c:"port_mtu"`    // largest RoCE path MTU in bytes, 256..4096
	Generation uint32   `c:"generation"`  // changes whenever the device lost its state
	DeviceName [32]byte `c:"device_name"` // NUL-terminated
	FWVersion  [24]byte `c:"fw_version"`  // NUL-terminated
}

func (x *Config) fields(c *codec) {
	c.u32(&x.Magic)
	c.u32(&x.ABIVersion)
	c.bytes(x.MAC[:])
	c.u16(&x.NumCEQs)
	c.u16(&x.NumEngines)
	c.u16(&x.LinkUp)
	c.u32(&x.PortMTU)
	c.u32(&x.Generation)
	c.bytes(x.DeviceName[:])
	c.bytes(x.FWVersion[:])
	c.zero(44)
}

// Encode writes SizeConfig bytes to b; it panics if b is shorter.
func (x *Config) Encode(b []byte) {
	c := encoder("vnicd_config", b, SizeConfig)
	x.fields(&c)
}

// Decode reads SizeConfig bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Config) Decode(b []byte) error {
	c, ok := decoder(b, SizeConfig)
	if !ok {
		return short("vnicd_config", b, SizeConfig)
	}
	x.fields(&c)
	return c.end("vnicd_config")
}

// Req is the header of a request
// (struct vnicd_req).
type Req struct {
	Opcode Opcode `c:"opcode"`
	Length uint32 `c:"length"` // of the payload that follows, in bytes
}

func (x *Req) fields(c *codec) {
	c.u16((*uint16)(&x.Opcode))
	c.zero(2)
	c.u32(&x.Length)
}

// Encode writes SizeReq bytes to b; it panics if b is shorter.
func (x *Req) Encode(b []byte) {
	c := encoder("vnicd_req", b, SizeReq)
	x.fields(&c)
}

// Decode reads SizeReq bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Req) Decode(b []byte) error {
	c, ok := decoder(b, SizeReq)
	if !ok {
		return short("vnicd_req", b, SizeReq)
	}
	x.fields(&c)
	return c.end("vnicd_req")
}

// Resp is the header of a response
// (struct vnicd_resp).
type Resp struct {
	Status Status `c:"status"`
	Length uint32 `c:"length"` // of the payload that follows, in bytes; 0 on error
}

func (x *Resp) fields(c *codec) {
	c.u32((*uint32)(&x.Status))
	c.u32(&x.Length)
}

// Encode writes SizeResp bytes to b; it panics if b is shorter.
func (x *Resp) Encode(b []byte) {
	c := encoder("vnicd_resp", b, SizeResp)
	x.fields(&c)
}

// Decode reads SizeResp bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Resp) Decode(b []byte) error {
	c, ok := decoder(b, SizeResp)
	if !ok {
		return short("vnicd_resp", b, SizeResp)
	}
	x.fields(&c)
	return c.end("vnicd_resp")
}

// Ring describes a ring's geometry; its page list follows the command (struct vnicd_ring).
type Ring struct {
	Length       uint64 `c:"length"`         // bytes, header included
	NPages       uint32 `c:"npages"`         // 0: no ring
	PageShift    uint8  `c:"page_shift"`     // 12..30
	Log2ElemSize uint8  `c:"log2_elem_size"` // 6..16
	NumElems     uint32 `c:"num_elems"`      // power of two; one element stays empty
}

func (x *Ring) fields(c *codec) {
	c.u64(&x.Length)
	c.u32(&x.NPages)
	c.u8(&x.PageShift)
	c.u8(&x.Log2ElemSize)
	c.zero(2)
	c.u32(&x.NumElems)
	c.zero(4)
}

// Encode writes SizeRing bytes to b; it panics if b is shorter.
func (x *Ring) Encode(b []byte) {
	c := encoder("vnicd_ring", b, SizeRing)
	x.fields(&c)
}

// Decode reads SizeRing bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Ring) Decode(b []byte) error {
	c, ok := decoder(b, SizeRing)
	if !ok {
		return short("vnicd_ring", b, SizeRing)
	}
	x.fields(&c)
	return c.end("vnicd_ring")
}

// DeviceAttr is the reply to QUERY_DEVICE: limits of this VM
// (struct vnicd_device_attr).
type DeviceAttr struct {
	NodeGUID         [8]byte `c:"node_guid"` // network order
	MaxMRSize        uint64  `c:"max_mr_size"`
	MaxQP            uint32  `c:"max_qp"`
	MaxQPWR          uint32  `c:"max_qp_wr"`
	MaxSGE           uint32  `c:"max_sge"`
	MaxInline        uint32  `c:"max_inline"` // bytes
	MaxCQ            uint32  `c:"max_cq"`
	MaxCQE           uint32  `c:"max_cqe"`
	MaxMR            uint32  `c:"max_mr"`
	MaxMW            uint32  `c:"max_mw"`
	MaxPD            uint32  `c:"max_pd"`
	MaxSRQ           uint32  `c:"max_srq"`
	MaxSRQWR         uint32  `c:"max_srq_wr"`
	MaxSRQSGE        uint32  `c:"max_srq_sge"`
	MaxAH            uint32  `c:"max_ah"`
	MaxGID           uint32  `c:"max_gid"`        // 1..256
	MaxQPRdAtom      uint32  `c:"max_qp_rd_atom"` // as responder
	MaxQPInitRdAtom  uint32  `c:"max_qp_init_rd_atom"`
	MaxMcastGrp      uint32  `c:"max_mcast_grp"`
	MaxMcastQPAttach uint32  `c:"max_mcast_qp_attach"`
	MaxMTT           uint64  `c:"max_mtt"` // pages over all MRs
	Caps             uint64  `c:"caps"`    // Cap bits
	ODPRC            uint32  `c:"odp_rc"`
	ODPUC            uint32  `c:"odp_uc"`
	ODPUD            uint32  `c:"odp_ud"`
	MaxFastReg       uint32  `c:"max_fast_reg"` // pages
}

func (x *DeviceAttr) fields(c *codec) {
	c.bytes(x.NodeGUID[:])
	c.u64(&x.MaxMRSize)
	c.u32(&x.MaxQP)
	c.u32(&x.MaxQPWR)
	c.u32(&x.MaxSGE)
	c.u32(&x.MaxInline)
	c.u32(&x.MaxCQ)
	c.u32(&x.MaxCQE)
	c.u32(&x.MaxMR)
	c.u32(&x.MaxMW)
	c.u32(&x.MaxPD)
	c.u32(&x.MaxSRQ)
	c.u32(&x.MaxSRQWR)
	c.u32(&x.MaxSRQSGE)
	c.u32(&x.MaxAH)
	c.u32(&x.MaxGID)
	c.u32(&x.MaxQPRdAtom)
	c.u32(&x.MaxQPInitRdAtom)
	c.u32(&x.MaxMcastGrp)
	c.u32(&x.MaxMcastQPAttach)
	c.u64(&x.MaxMTT)
	c.u64(&x.Caps)
	c.u32(&x.ODPRC)
	c.u32(&x.ODPUC)
	c.u32(&x.ODPUD)
	c.u32(&x.MaxFastReg)
}

// Encode writes SizeDeviceAttr bytes to b; it panics if b is shorter.
func (x *DeviceAttr) Encode(b []byte) {
	c := encoder("vnicd_device_attr", b, SizeDeviceAttr)
	x.fields(&c)
}

// Decode reads SizeDeviceAttr bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *DeviceAttr) Decode(b []byte) error {
	c, ok := decoder(b, SizeDeviceAttr)
	if !ok {
		return short("vnicd_device_attr", b, SizeDeviceAttr)
	}
	x.fields(&c)
	return c.end("vnicd_device_attr")
}

// PortAttr is the reply to QUERY_PORT
// (struct vnicd_port_attr).
type PortAttr struct {
	State       uint32 `c:"state"`        // PortDown or PortActive
	MaxMTU      uint32 `c:"max_mtu"`      // bytes
	ActiveMTU   uint32 `c:"active_mtu"`   // bytes
	ActiveSpeed uint32 `c:"active_speed"` // Speed bit
	ActiveWidth uint32 `c:"active_width"` // Width bit
}

func (x *PortAttr) fields(c *codec) {
	c.u32(&x.State)
	c.u32(&x.MaxMTU)
	c.u32(&x.ActiveMTU)
	c.u32(&x.ActiveSpeed)
	c.u32(&x.ActiveWidth)
	c.zero(4)
}

// Encode writes SizePortAttr bytes to b; it panics if b is shorter.
func (x *PortAttr) Encode(b []byte) {
	c := encoder("vnicd_port_attr", b, SizePortAttr)
	x.fields(&c)
}

// Decode reads SizePortAttr bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *PortAttr) Decode(b []byte) error {
	c, ok := decoder(b, SizePortAttr)
	if !ok {
		return short("vnicd_port_attr", b, SizePortAttr)
	}
	x.fields(&c)
	return c.end("vnicd_port_attr")
}

// SetGID is the request of SET_GID
// (struct vnicd_set_gid).
type SetGID struct {
	Index  uint16   `c:"index"`
	Type   uint8    `c:"type"`    // GIDRoCEv1 or GIDRoCEv2
	VLANID uint16   `c:"vlan_id"` // NoVLAN: untagged
	SMAC   [6]byte  `c:"smac"`    // must be the device's
	GID    [16]byte `c:"gid"`     // network order
}

func (x *SetGID) fields(c *codec) {
	c.u16(&x.Index)
	c.u8(&x.Type)
	c.zero(1)
	c.u16(&x.VLANID)
	c.bytes(x.SMAC[:])
	c.zero(4)
	c.bytes(x.GID[:])
}

// Encode writes SizeSetGID bytes to b; it panics if b is shorter.
func (x *SetGID) Encode(b []byte) {
	c := encoder("vnicd_set_gid", b, SizeSetGID)
	x.fields(&c)
}

// Decode reads SizeSetGID bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *SetGID) Decode(b []byte) error {
	c, ok := decoder(b, SizeSetGID)
	if !ok {
		return short("vnicd_set_gid", b, SizeSetGID)
	}
	x.fields(&c)
	return c.end("vnicd_set_gid")
}

// ClearGID is the request of CLEAR_GID
// (struct vnicd_clear_gid).
type ClearGID struct {
	Index uint16 `c:"index"`
}

func (x *ClearGID) fields(c *codec) {
	c.u16(&x.Index)
	c.zero(6)
}

// Encode writes SizeClearGID bytes to b; it panics if b is shorter.
func (x *ClearGID) Encode(b []byte) {
	c := encoder("vnicd_clear_gid", b, SizeClearGID)
	x.fields(&c)
}

// Decode reads SizeClearGID bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *ClearGID) Decode(b []byte) error {
	c, ok := decoder(b, SizeClearGID)
	if !ok {
		return short("vnicd_clear_gid", b, SizeClearGID)
	}
	x.fields(&c)
	return c.end("vnicd_clear_gid")
}

// SetDoorbells is the request of SET_DOORBELLS
// (struct vnicd_set_doorbells).
type SetDoorbells struct {
	Engine uint32                `c:"engine"`
	NPages uint32                `c:"npages"` // 4 KiB pages: DoorbellPages
	PA     [DoorbellPages]uint64 `c:"pa"`
}

func (x *SetDoorbells) fields(c *codec) {
	c.u32(&x.Engine)
	c.u32(&x.NPages)
	for i := range x.PA {
		c.u64(&x.PA[i])
	}
}

// Encode writes SizeSetDoorbells bytes to b; it panics if b is shorter.
func (x *SetDoorbells) Encode(b []byte) {
	c := encoder("vnicd_set_doorbells", b, SizeSetDoorbells)
	x.fields(&c)
}

// Decode reads SizeSetDoorbells bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *SetDoorbells) Decode(b []byte) error {
	c, ok := decoder(b, SizeSetDoorbells)
	if !ok {
		return short("vnicd_set_doorbells", b, SizeSetDoorbells)
	}
	x.fields(&c)
	return c.end("vnicd_set_doorbells")
}

// AH is an entry of the address handle table in guest memory
// (struct vnicd_ah).
type AH struct {
	Valid        uint32   `c:"valid"` // 1: in use; written last, cleared first
	PDN          uint32   `c:"pdn"`
	DGID         [16]byte `c:"dgid"` // network order
	DMAC         [6]byte  `c:"dmac"`
	SGIDIndex    uint16   `c:"sgid_index"`
	VLANID       uint16   `c:"vlan_id"` // NoVLAN: untagged; must equal the GID's
	TrafficClass uint8    `c:"traffic_class"`
	HopLimit     uint8    `c:"hop_limit"`
	FlowLabel    uint32   `c:"flow_label"` // 20 bits
	SL           uint8    `c:"sl"`
}

func (x *AH) fields(c *codec) {
	c.u32(&x.Valid)
	c.u32(&x.PDN)
	c.bytes(x.DGID[:])
	c.bytes(x.DMAC[:])
	c.u16(&x.SGIDIndex)
	c.u16(&x.VLANID)
	c.u8(&x.TrafficClass)
	c.u8(&x.HopLimit)
	c.u32(&x.FlowLabel)
	c.u8(&x.SL)
	c.zero(7)
	c.zero(16)
}

// Encode writes SizeAH bytes to b; it panics if b is shorter.
func (x *AH) Encode(b []byte) {
	c := encoder("vnicd_ah", b, SizeAH)
	x.fields(&c)
}

// Decode reads SizeAH bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *AH) Decode(b []byte) error {
	c, ok := decoder(b, SizeAH)
	if !ok {
		return short("vnicd_ah", b, SizeAH)
	}
	x.fields(&c)
	return c.end("vnicd_ah")
}

// SetAHTable is the request of SET_AH_TABLE; NPages PAs follow
// (struct vnicd_set_ah_table).
type SetAHTable struct {
	NumEntries uint32 `c:"num_entries"`
	NPages     uint32 `c:"npages"`
}

func (x *SetAHTable) fields(c *codec) {
	c.u32(&x.NumEntries)
	c.u32(&x.NPages)
}

// Encode writes SizeSetAHTable bytes to b; it panics if b is shorter.
func (x *SetAHTable) Encode(b []byte) {
	c := encoder("vnicd_set_ah_table", b, SizeSetAHTable)
	x.fields(&c)
}

// Decode reads SizeSetAHTable bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *SetAHTable) Decode(b []byte) error {
	c, ok := decoder(b, SizeSetAHTable)
	if !ok {
		return short("vnicd_set_ah_table", b, SizeSetAHTable)
	}
	x.fields(&c)
	return c.end("vnicd_set_ah_table")
}

// Handle is the reply of several creations and the request of destructions and queries
// (struct vnicd_handle).
type Handle struct {
	Handle uint32 `c:"handle"`
}

func (x *Handle) fields(c *codec) {
	c.u32(&x.Handle)
	c.zero(4)
}

// Encode writes SizeHandle bytes to b; it panics if b is shorter.
func (x *Handle) Encode(b []byte) {
	c := encoder("vnicd_handle", b, SizeHandle)
	x.fields(&c)
}

// Decode reads SizeHandle bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Handle) Decode(b []byte) error {
	c, ok := decoder(b, SizeHandle)
	if !ok {
		return short("vnicd_handle", b, SizeHandle)
	}
	x.fields(&c)
	return c.end("vnicd_handle")
}

// CountApart makes a QP count apart from the device (COUNT_QP).
const CountApart = 1 << 0

// CountQP is the request of COUNT_QP (struct vnicd_count_qp). The reply is a Stats: what the QP has counted apart since
// the last one.
type CountQP struct {
	QPN   uint32 `c:"qpn"`
	Flags uint32 `c:"flags"` // CountApart
}

func (x *CountQP) fields(c *codec) {
	c.u32(&x.QPN)
	c.u32(&x.Flags)
}

// Encode writes SizeCountQP bytes to b; it panics if b is shorter.
func (x *CountQP) Encode(b []byte) {
	c := encoder("vnicd_count_qp", b, SizeCountQP)
	x.fields(&c)
}

// Decode reads SizeCountQP bytes from b. It fails with a *DecodeError if b is
// shorter.
func (x *CountQP) Decode(b []byte) error {
	c, ok := decoder(b, SizeCountQP)
	if !ok {
		return short("vnicd_count_qp", b, SizeCountQP)
	}
	x.fields(&c)
	return c.end("vnicd_count_qp")
}

// Stats is the reply to QUERY_STATS and COUNT_QP
// (struct vnicd_stats).
type Stats struct {
	Value [NumStats]uint64 `c:"value"` // indexed by Stat
}

func (x *Stats) fields(c *codec) {
	for i := range x.Value {
		c.u64(&x.Value[i])
	}
	c.zero(8)
}

// Encode writes SizeStats bytes to b; it panics if b is shorter.
func (x *Stats) Encode(b []byte) {
	c := encoder("vnicd_stats", b, SizeStats)
	x.fields(&c)
}

// Decode reads SizeStats bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Stats) Decode(b []byte) error {
	c, ok := decoder(b, SizeStats)
	if !ok {
		return short("vnicd_stats", b, SizeStats)
	}
	x.fields(&c)
	return c.end("vnicd_stats")
}

// CEQE is an element of a completion event queue
// (struct vnicd_ceqe).
type CEQE struct {
	CQN uint32 `c:"cqn"`
}

func (x *CEQE) fields(c *codec) {
	c.u32(&x.CQN)
	c.zero(4)
}

// Encode writes SizeCEQE bytes to b; it panics if b is shorter.
func (x *CEQE) Encode(b []byte) {
	c := encoder("vnicd_ceqe", b, SizeCEQE)
	x.fields(&c)
}

// Decode reads SizeCEQE bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *CEQE) Decode(b []byte) error {
	c, ok := decoder(b, SizeCEQE)
	if !ok {
		return short("vnicd_ceqe", b, SizeCEQE)
	}
	x.fields(&c)
	return c.end("vnicd_ceqe")
}

// Event is an element of the asynchronous event queue
// (struct vnicd_event).
type Event struct {
	Type   EventType `c:"type"`
	Handle uint32    `c:"handle"`
	VA     uint64    `c:"va"` // page fault: first byte
	Length uint64    `c:"length"`
	Key    uint32    `c:"key"`
	Access uint32    `c:"access"`
	Token  uint32    `c:"token"`
}

func (x *Event) fields(c *codec) {
	c.u32((*uint32)(&x.Type))
	c.u32(&x.Handle)
	c.u64(&x.VA)
	c.u64(&x.Length)
	c.u32(&x.Key)
	c.u32(&x.Access)
	c.u32(&x.Token)
	c.zero(4)
	c.zero(24)
}

// Encode writes SizeEvent bytes to b; it panics if b is shorter.
func (x *Event) Encode(b []byte) {
	c := encoder("vnicd_event", b, SizeEvent)
	x.fields(&c)
}

// Decode reads SizeEvent bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Event) Decode(b []byte) error {
	c, ok := decoder(b, SizeEvent)
	if !ok {
		return short("vnicd_event", b, SizeEvent)
	}
	x.fields(&c)
	return c.end("vnicd_event")
}
