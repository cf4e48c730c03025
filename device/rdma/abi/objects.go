package abi

// Sizes of the encoded structures in bytes.
const (
	SizeCreateCQ     = 40
	SizeResizeCQ     = 32
	SizeModifyCQ     = 8
	SizeCreateSRQ    = 40
	SizeModifySRQ    = 40
	SizeSRQAttr      = 8
	SizeCreateQP     = 88
	SizeCreateQPResp = 16
	SizeAV           = 40
	SizeQPAttr       = 88
	SizeCreateMR     = 48
	SizeCreateMRResp = 16
	SizeSetMTT       = 16
	SizeClearMTT     = 24
	SizeResumeFault  = 8
	SizeMcast        = 24
	SizeRegWR        = 48
	SizeCreateMW     = 8
	SizeResolve      = 24
	SizeResolveResp  = 8
)

// CreateCQ is the request of CREATE_CQ; Ring.NPages PAs follow; the reply is a Handle
// (struct vnicd_create_cq).
type CreateCQ struct {
	Ring  Ring   `c:"ring"`
	ArmPA uint64 `c:"arm_pa"` // of a 32-bit word, 4-byte aligned
	CEQ   uint32 `c:"ceq"`
}

func (x *CreateCQ) fields(c *codec) {
	x.Ring.fields(c)
	c.u64(&x.ArmPA)
	c.u32(&x.CEQ)
	c.zero(4)
}

// Encode writes SizeCreateCQ bytes to b; it panics if b is shorter.
func (x *CreateCQ) Encode(b []byte) {
	c := encoder("vnicd_create_cq", b, SizeCreateCQ)
	x.fields(&c)
}

// Decode reads SizeCreateCQ bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *CreateCQ) Decode(b []byte) error {
	c, ok := decoder(b, SizeCreateCQ)
	if !ok {
		return short("vnicd_create_cq", b, SizeCreateCQ)
	}
	x.fields(&c)
	return c.end("vnicd_create_cq")
}

// ResizeCQ is the request of RESIZE_CQ; Ring.NPages PAs follow
// (struct vnicd_resize_cq).
type ResizeCQ struct {
	CQN  uint32 `c:"cqn"`
	Ring Ring   `c:"ring"`
}

func (x *ResizeCQ) fields(c *codec) {
	c.u32(&x.CQN)
	c.zero(4)
	x.Ring.fields(c)
}

// Encode writes SizeResizeCQ bytes to b; it panics if b is shorter.
func (x *ResizeCQ) Encode(b []byte) {
	c := encoder("vnicd_resize_cq", b, SizeResizeCQ)
	x.fields(&c)
}

// Decode reads SizeResizeCQ bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *ResizeCQ) Decode(b []byte) error {
	c, ok := decoder(b, SizeResizeCQ)
	if !ok {
		return short("vnicd_resize_cq", b, SizeResizeCQ)
	}
	x.fields(&c)
	return c.end("vnicd_resize_cq")
}

// ModifyCQ is the request of MODIFY_CQ (struct vnicd_modify_cq). A completion event that is due is posted with Count
// completions, or Period microseconds after the first of them; at once if Count is 0 or 1, or Period 0.
type ModifyCQ struct {
	CQN    uint32 `c:"cqn"`
	Count  uint16 `c:"count"`
	Period uint16 `c:"period"`
}

func (x *ModifyCQ) fields(c *codec) {
	c.u32(&x.CQN)
	c.u16(&x.Count)
	c.u16(&x.Period)
}

// Encode writes SizeModifyCQ bytes to b; it panics if b is shorter.
func (x *ModifyCQ) Encode(b []byte) {
	c := encoder("vnicd_modify_cq", b, SizeModifyCQ)
	x.fields(&c)
}

// Decode reads SizeModifyCQ bytes from b. It fails with a *DecodeError if b is
// shorter.
func (x *ModifyCQ) Decode(b []byte) error {
	c, ok := decoder(b, SizeModifyCQ)
	if !ok {
		return short("vnicd_modify_cq", b, SizeModifyCQ)
	}
	x.fields(&c)
	return c.end("vnicd_modify_cq")
}

// CreateSRQ is the request of CREATE_SRQ; Ring.NPages PAs follow; the reply is a Handle
// (struct vnicd_create_srq).
type CreateSRQ struct {
	PDN    uint32 `c:"pdn"`
	MaxSGE uint32 `c:"max_sge"`
	Limit  uint32 `c:"limit"`
	Ring   Ring   `c:"ring"`
}

func (x *CreateSRQ) fields(c *codec) {
	c.u32(&x.PDN)
	c.u32(&x.MaxSGE)
	c.u32(&x.Limit)
	c.zero(4)
	x.Ring.fields(c)
}

// Encode writes SizeCreateSRQ bytes to b; it panics if b is shorter.
func (x *CreateSRQ) Encode(b []byte) {
	c := encoder("vnicd_create_srq", b, SizeCreateSRQ)
	x.fields(&c)
}

// Decode reads SizeCreateSRQ bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *CreateSRQ) Decode(b []byte) error {
	c, ok := decoder(b, SizeCreateSRQ)
	if !ok {
		return short("vnicd_create_srq", b, SizeCreateSRQ)
	}
	x.fields(&c)
	return c.end("vnicd_create_srq")
}

// ModifySRQ is the request of MODIFY_SRQ; Ring.NPages PAs follow
// (struct vnicd_modify_srq).
type ModifySRQ struct {
	SRQN  uint32 `c:"srqn"`
	Flags uint32 `c:"flags"` // SRQLimit, SRQResize
	Limit uint32 `c:"limit"`
	Ring  Ring   `c:"ring"`
}

func (x *ModifySRQ) fields(c *codec) {
	c.u32(&x.SRQN)
	c.u32(&x.Flags)
	c.u32(&x.Limit)
	c.zero(4)
	x.Ring.fields(c)
}

// Encode writes SizeModifySRQ bytes to b; it panics if b is shorter.
func (x *ModifySRQ) Encode(b []byte) {
	c := encoder("vnicd_modify_srq", b, SizeModifySRQ)
	x.fields(&c)
}

// Decode reads SizeModifySRQ bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *ModifySRQ) Decode(b []byte) error {
	c, ok := decoder(b, SizeModifySRQ)
	if !ok {
		return short("vnicd_modify_srq", b, SizeModifySRQ)
	}
	x.fields(&c)
	return c.end("vnicd_modify_srq")
}

// SRQAttr is the reply to QUERY_SRQ
// (struct vnicd_srq_attr).
type SRQAttr struct {
	Limit uint32 `c:"limit"`
}

func (x *SRQAttr) fields(c *codec) {
	c.u32(&x.Limit)
	c.zero(4)
}

// Encode writes SizeSRQAttr bytes to b; it panics if b is shorter.
func (x *SRQAttr) Encode(b []byte) {
	c := encoder("vnicd_srq_attr", b, SizeSRQAttr)
	x.fields(&c)
}

// Decode reads SizeSRQAttr bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *SRQAttr) Decode(b []byte) error {
	c, ok := decoder(b, SizeSRQAttr)
	if !ok {
		return short("vnicd_srq_attr", b, SizeSRQAttr)
	}
	x.fields(&c)
	return c.end("vnicd_srq_attr")
}

// CreateQP is the request of CREATE_QP; SQ.NPages, then RQ.NPages PAs follow
// (struct vnicd_create_qp).
type CreateQP struct {
	Type       uint32 `c:"type"`  // QPType...
	Flags      uint32 `c:"flags"` // QPSigAll, QPPrivileged, QPHasSRQ
	PDN        uint32 `c:"pdn"`
	SendCQN    uint32 `c:"send_cqn"`
	RecvCQN    uint32 `c:"recv_cqn"`
	SRQN       uint32 `c:"srqn"` // if QPHasSRQ
	MaxSendSGE uint32 `c:"max_send_sge"`
	MaxRecvSGE uint32 `c:"max_recv_sge"`
	MaxInline  uint32 `c:"max_inline"` // bytes
	SQ         Ring   `c:"sq"`
	RQ         Ring   `c:"rq"` // NPages 0 with an SRQ
}

func (x *CreateQP) fields(c *codec) {
	c.u32(&x.Type)
	c.u32(&x.Flags)
	c.u32(&x.PDN)
	c.u32(&x.SendCQN)
	c.u32(&x.RecvCQN)
	c.u32(&x.SRQN)
	c.u32(&x.MaxSendSGE)
	c.u32(&x.MaxRecvSGE)
	c.u32(&x.MaxInline)
	c.zero(4)
	x.SQ.fields(c)
	x.RQ.fields(c)
}

// Encode writes SizeCreateQP bytes to b; it panics if b is shorter.
func (x *CreateQP) Encode(b []byte) {
	c := encoder("vnicd_create_qp", b, SizeCreateQP)
	x.fields(&c)
}

// Decode reads SizeCreateQP bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *CreateQP) Decode(b []byte) error {
	c, ok := decoder(b, SizeCreateQP)
	if !ok {
		return short("vnicd_create_qp", b, SizeCreateQP)
	}
	x.fields(&c)
	return c.end("vnicd_create_qp")
}

// CreateQPResp is the reply to CREATE_QP
// (struct vnicd_create_qp_resp).
type CreateQPResp struct {
	QPN    uint32 `c:"qpn"`     // 24 bits; 1 for the GSI QP
	Engine uint32 `c:"engine"`  // number of the doorbell area
	DBSlot uint32 `c:"db_slot"` // bit of the doorbell area
}

func (x *CreateQPResp) fields(c *codec) {
	c.u32(&x.QPN)
	c.u32(&x.Engine)
	c.u32(&x.DBSlot)
	c.zero(4)
}

// Encode writes SizeCreateQPResp bytes to b; it panics if b is shorter.
func (x *CreateQPResp) Encode(b []byte) {
	c := encoder("vnicd_create_qp_resp", b, SizeCreateQPResp)
	x.fields(&c)
}

// Decode reads SizeCreateQPResp bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *CreateQPResp) Decode(b []byte) error {
	c, ok := decoder(b, SizeCreateQPResp)
	if !ok {
		return short("vnicd_create_qp_resp", b, SizeCreateQPResp)
	}
	x.fields(&c)
	return c.end("vnicd_create_qp_resp")
}

// AV is a path
// (struct vnicd_av).
type AV struct {
	DGID         [16]byte `c:"dgid"` // network order
	DMAC         [6]byte  `c:"dmac"`
	SGIDIndex    uint16   `c:"sgid_index"`
	VLANID       uint16   `c:"vlan_id"` // NoVLAN: untagged
	TrafficClass uint8    `c:"traffic_class"`
	HopLimit     uint8    `c:"hop_limit"`
	FlowLabel    uint32   `c:"flow_label"`
	SL           uint8    `c:"sl"`
}

func (x *AV) fields(c *codec) {
	c.bytes(x.DGID[:])
	c.bytes(x.DMAC[:])
	c.u16(&x.SGIDIndex)
	c.u16(&x.VLANID)
	c.u8(&x.TrafficClass)
	c.u8(&x.HopLimit)
	c.u32(&x.FlowLabel)
	c.u8(&x.SL)
	c.zero(7)
}

// Encode writes SizeAV bytes to b; it panics if b is shorter.
func (x *AV) Encode(b []byte) {
	c := encoder("vnicd_av", b, SizeAV)
	x.fields(&c)
}

// Decode reads SizeAV bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *AV) Decode(b []byte) error {
	c, ok := decoder(b, SizeAV)
	if !ok {
		return short("vnicd_av", b, SizeAV)
	}
	x.fields(&c)
	return c.end("vnicd_av")
}

// QPAttr is the request of MODIFY_QP and the reply to QUERY_QP
// (struct vnicd_qp_attr).
type QPAttr struct {
	QPN              uint32 `c:"qpn"`
	AttrMask         uint32 `c:"attr_mask"` // QPAttr... bits
	QPState          uint8  `c:"qp_state"`
	CurQPState       uint8  `c:"cur_qp_state"`
	PathMTU          uint8  `c:"path_mtu"`      // MTU256..MTU4096
	Timeout          uint8  `c:"timeout"`       // 4.096 us * 2^Timeout; 0: never
	RetryCnt         uint8  `c:"retry_cnt"`     // 0..7
	RNRRetry         uint8  `c:"rnr_retry"`     // 0..7, 7: for ever
	MinRNRTimer      uint8  `c:"min_rnr_timer"` // 0..31
	MaxRdAtomic      uint8  `c:"max_rd_atomic"`
	MaxDestRdAtomic  uint8  `c:"max_dest_rd_atomic"`
	EnSQDAsyncNotify uint8  `c:"en_sqd_async_notify"`
	SQDraining       uint8  `c:"sq_draining"` // QUERY_QP only
	PKeyIndex        uint16 `c:"pkey_index"`
	PortNum          uint16 `c:"port_num"`
	AccessFlags      uint32 `c:"access_flags"` // Access... bits
	QKey             uint32 `c:"qkey"`
	DestQPN          uint32 `c:"dest_qpn"`
	RQPSN            uint32 `c:"rq_psn"`
	SQPSN            uint32 `c:"sq_psn"`
	AV               AV     `c:"av"`
}

func (x *QPAttr) fields(c *codec) {
	c.u32(&x.QPN)
	c.u32(&x.AttrMask)
	c.u8(&x.QPState)
	c.u8(&x.CurQPState)
	c.u8(&x.PathMTU)
	c.u8(&x.Timeout)
	c.u8(&x.RetryCnt)
	c.u8(&x.RNRRetry)
	c.u8(&x.MinRNRTimer)
	c.u8(&x.MaxRdAtomic)
	c.u8(&x.MaxDestRdAtomic)
	c.u8(&x.EnSQDAsyncNotify)
	c.u8(&x.SQDraining)
	c.zero(1)
	c.u16(&x.PKeyIndex)
	c.u16(&x.PortNum)
	c.u32(&x.AccessFlags)
	c.u32(&x.QKey)
	c.u32(&x.DestQPN)
	c.u32(&x.RQPSN)
	c.u32(&x.SQPSN)
	c.zero(4)
	x.AV.fields(c)
}

// Encode writes SizeQPAttr bytes to b; it panics if b is shorter.
func (x *QPAttr) Encode(b []byte) {
	c := encoder("vnicd_qp_attr", b, SizeQPAttr)
	x.fields(&c)
}

// Decode reads SizeQPAttr bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *QPAttr) Decode(b []byte) error {
	c, ok := decoder(b, SizeQPAttr)
	if !ok {
		return short("vnicd_qp_attr", b, SizeQPAttr)
	}
	x.fields(&c)
	return c.end("vnicd_qp_attr")
}

// CreateMR is the request of CREATE_MR
// (struct vnicd_create_mr).
type CreateMR struct {
	PDN       uint32 `c:"pdn"`
	Access    uint32 `c:"access"`     // Access... bits
	Flags     uint32 `c:"flags"`      // MRPhys, MROnDemand, MRImplicit
	PageShift uint8  `c:"page_shift"` // 12..30
	IOVA      uint64 `c:"iova"`       // first VA as used with the keys
	Length    uint64 `c:"length"`     // bytes, > 0
	Offset    uint64 `c:"offset"`     // of the first byte in the first page
	NPages    uint64 `c:"npages"`     // MTT entries; covers Offset + Length
}

func (x *CreateMR) fields(c *codec) {
	c.u32(&x.PDN)
	c.u32(&x.Access)
	c.u32(&x.Flags)
	c.u8(&x.PageShift)
	c.zero(3)
	c.u64(&x.IOVA)
	c.u64(&x.Length)
	c.u64(&x.Offset)
	c.u64(&x.NPages)
}

// Encode writes SizeCreateMR bytes to b; it panics if b is shorter.
func (x *CreateMR) Encode(b []byte) {
	c := encoder("vnicd_create_mr", b, SizeCreateMR)
	x.fields(&c)
}

// Decode reads SizeCreateMR bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *CreateMR) Decode(b []byte) error {
	c, ok := decoder(b, SizeCreateMR)
	if !ok {
		return short("vnicd_create_mr", b, SizeCreateMR)
	}
	x.fields(&c)
	return c.end("vnicd_create_mr")
}

// CreateMRResp is the reply to CREATE_MR
// (struct vnicd_create_mr_resp).
type CreateMRResp struct {
	LKey   uint32 `c:"lkey"`
	RKey   uint32 `c:"rkey"`
	Handle uint32 `c:"handle"`
}

func (x *CreateMRResp) fields(c *codec) {
	c.u32(&x.LKey)
	c.u32(&x.RKey)
	c.u32(&x.Handle)
	c.zero(4)
}

// Encode writes SizeCreateMRResp bytes to b; it panics if b is shorter.
func (x *CreateMRResp) Encode(b []byte) {
	c := encoder("vnicd_create_mr_resp", b, SizeCreateMRResp)
	x.fields(&c)
}

// Decode reads SizeCreateMRResp bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *CreateMRResp) Decode(b []byte) error {
	c, ok := decoder(b, SizeCreateMRResp)
	if !ok {
		return short("vnicd_create_mr_resp", b, SizeCreateMRResp)
	}
	x.fields(&c)
	return c.end("vnicd_create_mr_resp")
}

// SetMTT is the request of SET_MTT; Count PAs follow, MTTAbsent or MTTReadOnly in their low bits, and with SetMTTResume
// the token of a page fault event, as a word of 64 bits
// (struct vnicd_set_mtt).
type SetMTT struct {
	Handle uint32 `c:"handle"`
	Count  uint16 `c:"count"`
	Flags  uint16 `c:"flags"` // SetMTTResume
	First  uint64 `c:"first"` // index of the first entry
}

func (x *SetMTT) fields(c *codec) {
	c.u32(&x.Handle)
	c.u16(&x.Count)
	c.u16(&x.Flags)
	c.u64(&x.First)
}

// Encode writes SizeSetMTT bytes to b; it panics if b is shorter.
func (x *SetMTT) Encode(b []byte) {
	c := encoder("vnicd_set_mtt", b, SizeSetMTT)
	x.fields(&c)
}

// Decode reads SizeSetMTT bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *SetMTT) Decode(b []byte) error {
	c, ok := decoder(b, SizeSetMTT)
	if !ok {
		return short("vnicd_set_mtt", b, SizeSetMTT)
	}
	x.fields(&c)
	return c.end("vnicd_set_mtt")
}

// ClearMTT is the request of CLEAR_MTT
// (struct vnicd_clear_mtt).
type ClearMTT struct {
	Handle uint32 `c:"handle"`
	First  uint64 `c:"first"` // index of the first entry
	Count  uint64 `c:"count"`
}

func (x *ClearMTT) fields(c *codec) {
	c.u32(&x.Handle)
	c.zero(4)
	c.u64(&x.First)
	c.u64(&x.Count)
}

// Encode writes SizeClearMTT bytes to b; it panics if b is shorter.
func (x *ClearMTT) Encode(b []byte) {
	c := encoder("vnicd_clear_mtt", b, SizeClearMTT)
	x.fields(&c)
}

// Decode reads SizeClearMTT bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *ClearMTT) Decode(b []byte) error {
	c, ok := decoder(b, SizeClearMTT)
	if !ok {
		return short("vnicd_clear_mtt", b, SizeClearMTT)
	}
	x.fields(&c)
	return c.end("vnicd_clear_mtt")
}

// ResumeFault is the request of RESUME_FAULT
// (struct vnicd_resume_fault).
type ResumeFault struct {
	Token  uint32 `c:"token"`  // of the event
	Status Status `c:"status"` // StatusOK: try again; others: the address is not valid
}

func (x *ResumeFault) fields(c *codec) {
	c.u32(&x.Token)
	c.u32((*uint32)(&x.Status))
}

// Encode writes SizeResumeFault bytes to b; it panics if b is shorter.
func (x *ResumeFault) Encode(b []byte) {
	c := encoder("vnicd_resume_fault", b, SizeResumeFault)
	x.fields(&c)
}

// Decode reads SizeResumeFault bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *ResumeFault) Decode(b []byte) error {
	c, ok := decoder(b, SizeResumeFault)
	if !ok {
		return short("vnicd_resume_fault", b, SizeResumeFault)
	}
	x.fields(&c)
	return c.end("vnicd_resume_fault")
}

// Mcast is the request of ATTACH_MCAST and DETACH_MCAST
// (struct vnicd_mcast).
type Mcast struct {
	QPN uint32   `c:"qpn"`
	GID [16]byte `c:"gid"` // network order
}

func (x *Mcast) fields(c *codec) {
	c.u32(&x.QPN)
	c.zero(4)
	c.bytes(x.GID[:])
}

// Encode writes SizeMcast bytes to b; it panics if b is shorter.
func (x *Mcast) Encode(b []byte) {
	c := encoder("vnicd_mcast", b, SizeMcast)
	x.fields(&c)
}

// Decode reads SizeMcast bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Mcast) Decode(b []byte) error {
	c, ok := decoder(b, SizeMcast)
	if !ok {
		return short("vnicd_mcast", b, SizeMcast)
	}
	x.fields(&c)
	return c.end("vnicd_mcast")
}

// RegWR holds the operands of a REG_MR request, at SendWQERegOff of its element (struct vnicd_reg_wr).
type RegWR struct {
	IOVA      uint64 `c:"iova"`
	Length    uint64 `c:"length"`
	PageList  uint64 `c:"page_list"` // PA of NPages PAs, 8-byte aligned, in one 4 KiB page
	NPages    uint32 `c:"npages"`
	Offset    uint32 `c:"offset"` // of the first byte in the first page
	RKey      uint32 `c:"rkey"`   // new key
	Access    uint32 `c:"access"` // Access bits
	PageShift uint8  `c:"page_shift"`
}

func (x *RegWR) fields(c *codec) {
	c.u64(&x.IOVA)
	c.u64(&x.Length)
	c.u64(&x.PageList)
	c.u32(&x.NPages)
	c.u32(&x.Offset)
	c.u32(&x.RKey)
	c.u32(&x.Access)
	c.u8(&x.PageShift)
	c.zero(7)
}

// Encode writes SizeRegWR bytes to b; it panics if b is shorter.
func (x *RegWR) Encode(b []byte) {
	c := encoder("vnicd_reg_wr", b, SizeRegWR)
	x.fields(&c)
}

// Decode reads SizeRegWR bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *RegWR) Decode(b []byte) error {
	c, ok := decoder(b, SizeRegWR)
	if !ok {
		return short("vnicd_reg_wr", b, SizeRegWR)
	}
	x.fields(&c)
	return c.end("vnicd_reg_wr")
}

// CreateMW is the request of CREATE_MW; the reply is a Handle, the window's first R_Key
// (struct vnicd_create_mw).
type CreateMW struct {
	PDN  uint32 `c:"pdn"`
	Type uint32 `c:"type"` // 1 or 2
}

func (x *CreateMW) fields(c *codec) {
	c.u32(&x.PDN)
	c.u32(&x.Type)
}

// Encode writes SizeCreateMW bytes to b; it panics if b is shorter.
func (x *CreateMW) Encode(b []byte) {
	c := encoder("vnicd_create_mw", b, SizeCreateMW)
	x.fields(&c)
}

// Decode reads SizeCreateMW bytes from b. It fails with a *DecodeError if b is
// shorter.
func (x *CreateMW) Decode(b []byte) error {
	c, ok := decoder(b, SizeCreateMW)
	if !ok {
		return short("vnicd_create_mw", b, SizeCreateMW)
	}
	x.fields(&c)
	return c.end("vnicd_create_mw")
}

// Resolve is the request of RESOLVE
// (struct vnicd_resolve).
type Resolve struct {
	DGID      [16]byte `c:"dgid"` // network order
	SGIDIndex uint16   `c:"sgid_index"`
}

func (x *Resolve) fields(c *codec) {
	c.bytes(x.DGID[:])
	c.u16(&x.SGIDIndex)
	c.zero(6)
}

// Encode writes SizeResolve bytes to b; it panics if b is shorter.
func (x *Resolve) Encode(b []byte) {
	c := encoder("vnicd_resolve", b, SizeResolve)
	x.fields(&c)
}

// Decode reads SizeResolve bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *Resolve) Decode(b []byte) error {
	c, ok := decoder(b, SizeResolve)
	if !ok {
		return short("vnicd_resolve", b, SizeResolve)
	}
	x.fields(&c)
	return c.end("vnicd_resolve")
}

// ResolveResp is the reply to RESOLVE
// (struct vnicd_resolve_resp).
type ResolveResp struct {
	MAC [6]byte `c:"mac"` // zero: not known yet
}

func (x *ResolveResp) fields(c *codec) {
	c.bytes(x.MAC[:])
	c.zero(2)
}

// Encode writes SizeResolveResp bytes to b; it panics if b is shorter.
func (x *ResolveResp) Encode(b []byte) {
	c := encoder("vnicd_resolve_resp", b, SizeResolveResp)
	x.fields(&c)
}

// Decode reads SizeResolveResp bytes from b. It fails with a *DecodeError if b is
// shorter or a reserved field is not zero.
func (x *ResolveResp) Decode(b []byte) error {
	c, ok := decoder(b, SizeResolveResp)
	if !ok {
		return short("vnicd_resolve_resp", b, SizeResolveResp)
	}
	x.fields(&c)
	return c.end("vnicd_resolve_resp")
}
