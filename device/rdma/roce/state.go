package roce

import (
	"errors"
	"fmt"
)

// The QP's states (IBTA 10.3.1). Every state can also go to RESET and to ERROR.
//
//	RESET --> INIT --> RTR --> RTS <--> SQD
//	            |_|             |_|      |_|
//	                             ^
//	         UC, UD only: send   |
//	         completion error -> SQE        ERROR --> RESET
//
//	RESET  nothing is processed
//	INIT   receives may be posted
//	RTR    responder runs
//	RTS    responder and requester run
//	SQD    responder runs; the requester finishes what it began
//	SQE    responder runs; the requester flushes
//	ERROR  both flush

// ErrModify is the class of every refusal by Modify; errors.Is finds it.
var ErrModify = errors.New("modify QP refused")

// ModifyError says why Modify refused. Nothing was changed.
type ModifyError struct {
	QPN      uint32
	Type     Type
	From, To State
	Reason   string
}

func (e *ModifyError) Error() string {
	return fmt.Sprintf("modify %v QP %#x, %v to %v: %s", e.Type, e.QPN, e.From, e.To, e.Reason)
}

// Unwrap makes errors.Is(err, ErrModify) true.
func (e *ModifyError) Unwrap() error { return ErrModify }

var stateNames = [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERROR"}

func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

func (t Type) String() string {
	switch t {
	case GSI:
		return "GSI"
	case RC:
		return "RC"
	case UC:
		return "UC"
	case UD:
		return "UD"
	}
	return fmt.Sprintf("Type(%d)", uint8(t))
}

// transition is one row of IBTA 10.3.1's table: attributes that must and may be
// given, per service class. MaskState always may.
type transition struct {
	allowed  bool
	req, opt [3]Mask // index: class
}

const (
	classUD = iota // UD
	classUC
	classRC
)

const (
	initMask = MaskPKeyIndex | MaskPort
	avMask   = MaskAV | MaskPathMTU | MaskDestQPN | MaskRQPSN
	rtsUD    = MaskCurState | MaskQKey
	rtsUC    = MaskCurState | MaskAccess | MaskAltPath | MaskPathMigState
	rtsRC    = rtsUC | MaskMinRNRTimer
)

var transitions = [Err + 1][Err + 1]transition{
	Reset: {
		Reset: {allowed: true},
		Init: {allowed: true,
			req: [3]Mask{initMask | MaskQKey, initMask | MaskAccess, initMask | MaskAccess}},
		Err: {allowed: true},
	},
	Init: {
		Reset: {allowed: true},
		Err:   {allowed: true},
		Init: {allowed: true,
			opt: [3]Mask{initMask | MaskQKey, initMask | MaskAccess, initMask | MaskAccess}},
		RTR: {allowed: true,
			req: [3]Mask{0, avMask, avMask | MaskMaxDestRdAtomic | MaskMinRNRTimer},
			opt: [3]Mask{
				MaskPKeyIndex | MaskQKey,
				MaskAltPath | MaskAccess | MaskPKeyIndex,
				MaskAltPath | MaskAccess | MaskPKeyIndex}},
	},
	RTR: {
		Reset: {allowed: true},
		Err:   {allowed: true},
		RTS: {allowed: true,
			req: [3]Mask{MaskSQPSN, MaskSQPSN, MaskSQPSN | MaskTimeout | MaskRetryCnt | MaskRNRRetry | MaskMaxRdAtomic},
			opt: [3]Mask{rtsUD, rtsUC, rtsRC}},
	},
	RTS: {
		Reset: {allowed: true},
		Err:   {allowed: true},
		RTS:   {allowed: true, opt: [3]Mask{rtsUD, rtsUC, rtsRC}},
		SQD:   {allowed: true, opt: [3]Mask{MaskSQDNotify, MaskSQDNotify, MaskSQDNotify}},
	},
	SQD: {
		Reset: {allowed: true},
		Err:   {allowed: true},
		RTS:   {allowed: true, opt: [3]Mask{rtsUD, rtsUC, rtsRC}},
		SQD: {allowed: true, opt: [3]Mask{
			MaskPKeyIndex | MaskQKey,
			MaskAV | MaskAltPath | MaskAccess | MaskPKeyIndex | MaskPathMigState,
			MaskPort | MaskAV | MaskTimeout | MaskRetryCnt | MaskRNRRetry | MaskMaxRdAtomic | MaskMaxDestRdAtomic |
				MaskAltPath | MaskAccess | MaskPKeyIndex | MaskMinRNRTimer | MaskPathMigState}},
	},
	SQE: {
		Reset: {allowed: true},
		Err:   {allowed: true},
		RTS:   {allowed: true, opt: [3]Mask{rtsUD, MaskCurState | MaskAccess, 0}},
	},
	Err: {
		Reset: {allowed: true},
		Err:   {allowed: true},
	},
}

var maskNames = []struct {
	m    Mask
	name string
}{
	{MaskState, "qp_state"}, {MaskCurState, "cur_qp_state"}, {MaskSQDNotify, "en_sqd_async_notify"},
	{MaskAccess, "qp_access_flags"}, {MaskPKeyIndex, "pkey_index"}, {MaskPort, "port_num"}, {MaskQKey, "qkey"},
	{MaskAV, "ah_attr"}, {MaskPathMTU, "path_mtu"}, {MaskTimeout, "timeout"}, {MaskRetryCnt, "retry_cnt"},
	{MaskRNRRetry, "rnr_retry"}, {MaskRQPSN, "rq_psn"}, {MaskMaxRdAtomic, "max_rd_atomic"}, {MaskAltPath, "alt_ah_attr"},
	{MaskMinRNRTimer, "min_rnr_timer"}, {MaskSQPSN, "sq_psn"}, {MaskMaxDestRdAtomic, "max_dest_rd_atomic"},
	{MaskPathMigState, "path_mig_state"}, {MaskCap, "cap"}, {MaskDestQPN, "dest_qp_num"}, {MaskRateLimit, "rate_limit"},
}

// String lists the attributes' names, separated by commas.
func (m Mask) String() string {
	s := ""
	for _, n := range maskNames {
		if m&n.m != 0 {
			if s != "" {
				s += ","
			}
			s += n.name
			m &^= n.m
		}
	}
	if m != 0 {
		s += fmt.Sprintf("|%#x", uint32(m))
	}
	return s
}

func (t Type) class() int {
	switch t {
	case RC:
		return classRC
	case UC:
		return classUC
	}
	return classUD
}

// checkTransition returns the reason to refuse from -> to with the attributes in mask, or "". The GSI QP is a UD QP
// without a port attribute.
func checkTransition(t Type, from, to State, mask Mask) string {
	if to > Err || from > Err {
		return fmt.Sprintf("no such state %d", uint8(to))
	}
	tr := &transitions[from][to]
	if !tr.allowed || (to == SQE || from == SQE) && t == RC && to != Reset && to != Err {
		return "no such transition"
	}
	c := t.class()
	req, opt := tr.req[c], tr.opt[c]|MaskState|MaskCurState
	if t == GSI {
		opt |= req & MaskPort
		req &^= MaskPort
	}
	if to == Reset || to == Err {
		// No other attribute is required or applied: libraries leave stale bits here.
		return ""
	}
	if m := req &^ mask; m != 0 {
		return fmt.Sprintf("attributes missing: %v", m)
	}
	if m := mask &^ (req | opt); m != 0 {
		return fmt.Sprintf("attributes not permitted: %v", m)
	}
	return ""
}

// checkValues returns the reason to refuse a value in a, or "".
func (c *Config) checkValues(a *Attr, mask Mask) string {
	bad := func(m Mask, ok bool, name string, v any, want string) string {
		if mask&m == 0 || ok {
			return ""
		}
		return fmt.Sprintf("%s is %v, want %s", name, v, want)
	}
	for _, s := range [...]string{
		bad(MaskPathMTU, a.PathMTU >= 1 && a.PathMTU <= 5 && mtuBytes(a.PathMTU) <= c.MTU, "path_mtu", a.PathMTU,
			fmt.Sprintf("1 (256) to 5 (4096) within the port's %d bytes", c.MTU)),
		bad(MaskTimeout, a.Timeout <= 31, "timeout", a.Timeout, "0..31"),
		bad(MaskRetryCnt, a.RetryCnt <= 7, "retry_cnt", a.RetryCnt, "0..7"),
		bad(MaskRNRRetry, a.RNRRetry <= 7, "rnr_retry", a.RNRRetry, "0..7"),
		bad(MaskMinRNRTimer, a.MinRNRTimer <= 31, "min_rnr_timer", a.MinRNRTimer, "0..31"),
		bad(MaskMaxRdAtomic, int(a.MaxRdAtomic) <= c.MaxRdAtomic, "max_rd_atomic", a.MaxRdAtomic,
			fmt.Sprintf("0..%d", c.MaxRdAtomic)),
		bad(MaskMaxDestRdAtomic, int(a.MaxDestRdAtomic) <= c.MaxRdAtomic, "max_dest_rd_atomic", a.MaxDestRdAtomic,
			fmt.Sprintf("0..%d", c.MaxRdAtomic)),
		bad(MaskDestQPN, a.DestQPN <= psnMask, "dest_qp_num", a.DestQPN, "24 bits"),
		bad(MaskPKeyIndex, a.PKeyIndex == 0, "pkey_index", a.PKeyIndex, "0: the partition table has one entry"),
		bad(MaskPort, a.Port == 1, "port_num", a.Port, "1"),
		bad(MaskAltPath, false, "alt_ah_attr", "given", "none: no automatic path migration"),
		bad(MaskAV, a.AV.VLAN == NoVLAN || a.AV.VLAN < 4095, "vlan_id", a.AV.VLAN, "0..4094 or 0xffff"),
	} {
		if s != "" {
			return s
		}
	}
	return ""
}

func mtuBytes(e uint8) int { return 128 << e }
