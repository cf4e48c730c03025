package rdmacm

import (
	"context"
	"math/rand/v2"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// None in Params.ResponderResources or InitiatorDepth permits no READs and atomics.
const None = 0xff

// Params are the parameters of one end of a connection. The zero value is usable: the peer can send messages to a queue
// pair for one request in each direction.
type Params struct {
	// PD is the protection domain of the queue pair; nil: Manager.PD.
	PD *guestdrv.PD
	// QP describes the queue pair, which is of type RC. If it names no CQ, the connection has one of its own for both
	// directions, with room for all requests.
	QP guestdrv.QPConfig
	// Access are the peer's rights, within those of each region. With none it can only send messages.
	Access guestdrv.Access
	// Prepare is called with the queue pair in INIT, before the peer can send: post receive requests. If it fails, so
	// does the connection.
	Prepare func(*Conn) error
	// PrivateData goes to the peer's program: at most MaxPrivateREQ bytes from Dial, MaxPrivateREP from Accept. The peer
	// cannot tell how long it is: zero bytes follow.
	PrivateData []byte

	// READs and atomics at once: of the peer, executed by this end, and of this end. Both ends use the lower number of
	// the two. 0 means the device's limit, at most 16.
	ResponderResources uint8
	InitiatorDepth     uint8

	// For the peer's queue pair, as IBTA 12.7 has it: how often it repeats a request that is not acknowledged (Dial
	// only), and one that meets no receive request. 1..7 or guestdrv.NoRetry; 0 means 7, of RNRRetry without limit.
	RetryCount uint8
	RNRRetry   uint8
	// ACKTimeout is the code of the time after which both ends repeat: 4.096 us * 2^ACKTimeout, 1..31; 0 means 14 (67
	// ms). Dial only.
	ACKTimeout uint8
	// MinRNRTimer is for this end's queue pair; 0 means 12 (0.64 ms).
	MinRNRTimer uint8
	// MTU is that of the path, Dial only; 0 means the port's.
	MTU guestdrv.MTU
}

func (p Params) withDefaults(m *Manager, room int) (Params, error) {
	a := m.dev.Attr()
	depth := func(n uint8, limit uint32) uint8 {
		switch {
		case n == None:
			return 0
		case n == 0:
			n = 16
		}
		return uint8(min(uint32(n), limit))
	}
	p.ResponderResources = depth(p.ResponderResources, a.MaxQPRdAtom)
	p.InitiatorDepth = depth(p.InitiatorDepth, a.MaxQPInitRdAtom)
	if p.PD == nil {
		p.PD = m.pd
	}
	for _, n := range []*uint8{&p.RetryCount, &p.RNRRetry} {
		switch {
		case *n == 0:
			*n = 7
		case *n == guestdrv.NoRetry:
			*n = 0
		case *n > 7:
			return p, invalid("%d retries, expected 1..7 or NoRetry", *n)
		}
	}
	if p.ACKTimeout == 0 {
		p.ACKTimeout = 14
	}
	if p.MinRNRTimer == 0 {
		p.MinRNRTimer = 12
	}
	if p.MTU == 0 {
		p.MTU = guestdrv.MTU(m.machine.maxMTU)
	}
	p.QP.Type = guestdrv.QPTypeRC
	switch {
	case p.ACKTimeout > 31 || p.MinRNRTimer > 31:
		return p, invalid("ACK timeout %d, RNR timer %d: expected 1..31", p.ACKTimeout, p.MinRNRTimer)
	case p.MTU.Bytes() == 0 || uint8(p.MTU) > m.machine.maxMTU:
		return p, invalid("path MTU %v, expected at most %v", p.MTU, guestdrv.MTU(m.machine.maxMTU))
	case len(p.PrivateData) > room:
		return p, invalid("%d bytes of private data, at most %d", len(p.PrivateData), room)
	}
	return p, nil
}

// ends is what a connected queue pair needs.
type ends struct {
	path                guestdrv.Path
	peerQPN             uint32
	rqPSN, sqPSN        uint32
	mtu                 guestdrv.MTU
	responder, depth    uint8
	timeout             uint8
	retries, rnrRetries uint8
}

// newQP makes the queue pair of c in INIT, and lets the program prepare it.
func (c *Conn) newQP(ctx context.Context) error {
	p := &c.params
	if p.QP.SendCQ == nil || p.QP.RecvCQ == nil {
		n := max(p.QP.MaxSendWR, 1)
		if p.QP.SRQ == nil {
			n += max(p.QP.MaxRecvWR, 1)
		}
		// The rings of a queue pair are larger than requested, to the next power of two at most.
		cq, err := c.m.dev.CreateCQ(ctx, min(2*n, int(c.m.dev.Attr().MaxCQE)), guestdrv.CQOptions{})
		if err != nil {
			return err
		}
		c.made = append(c.made, cq)
		if p.QP.SendCQ == nil {
			p.QP.SendCQ = cq
		}
		if p.QP.RecvCQ == nil {
			p.QP.RecvCQ = cq
		}
	}
	qp, err := p.PD.CreateQP(ctx, p.QP)
	if err != nil {
		return err
	}
	c.qp = qp
	c.made = append(c.made, qp)
	c.psn = rand.Uint32() & 0xffffff
	if err := qp.ToInit(ctx, p.Access, 0); err != nil {
		return err
	}
	if p.Prepare == nil {
		return nil
	}
	return p.Prepare(c)
}

// connectQP moves the queue pair to RTS.
func (c *Conn) connectQP(ctx context.Context, e ends) error {
	c.depth, c.responder = e.depth, e.responder
	if err := c.qp.Modify(ctx, guestdrv.QPAttr{
		State: guestdrv.QPRTR, PathMTU: e.mtu, DestQPN: e.peerQPN, RQPSN: e.rqPSN, MaxDestRdAtomic: e.responder,
		MinRNRTimer: c.params.MinRNRTimer, Path: e.path,
	}, guestdrv.QPAttrState|guestdrv.QPAttrAV|guestdrv.QPAttrPathMTU|guestdrv.QPAttrDestQPN|guestdrv.QPAttrRQPSN|
		guestdrv.QPAttrMaxDestRdAtomic|guestdrv.QPAttrMinRNRTimer); err != nil {
		return err
	}
	return c.qp.Modify(ctx, guestdrv.QPAttr{
		State: guestdrv.QPRTS, SQPSN: e.sqPSN, Timeout: e.timeout, RetryCnt: e.retries, RNRRetry: e.rnrRetries,
		MaxRdAtomic: e.depth,
	}, guestdrv.QPAttrState|guestdrv.QPAttrSQPSN|guestdrv.QPAttrTimeout|guestdrv.QPAttrRetryCnt|
		guestdrv.QPAttrRNRRetry|guestdrv.QPAttrMaxQPRdAtomic)
}

// release destroys what the connection has made, last first. It may be repeated after an error.
func (c *Conn) release() error {
	for len(c.made) > 0 {
		i := len(c.made) - 1
		if err := c.made[i].Close(); err != nil {
			if c.m.dev.Err() != nil {
				return nil // the device has destroyed everything
			}
			return err
		}
		c.made = c.made[:i]
	}
	return nil
}

// request returns the REQ of Dial.
func (c *Conn) request(h ipHeader) cm.Fields {
	p := &c.params
	return cm.Fields{QPN: c.qp.Number(), PSN: c.psn, Service: serviceID(c.remote.Port()), PKey: 0xffff,
		ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth, RetryCount: p.RetryCount,
		RNRRetry: p.RNRRetry, SRQ: p.QP.SRQ != nil, PathMTU: uint8(p.MTU), HopLimit: 64, LocalACKTimeout: p.ACKTimeout,
		Private: h.encode()}
}

// An ACK timeout that a peer names is used within these bounds: 0 would be never, 22 is 17 s.
const minACKTimeout, maxACKTimeout = 10, 22

// fromREP returns the ends of an active connection.
func (c *Conn) fromREP(path guestdrv.Path, f *cm.Fields) ends {
	p := &c.params
	return ends{path: path, peerQPN: f.QPN, rqPSN: c.psn, sqPSN: f.PSN, mtu: p.MTU,
		responder: min(p.ResponderResources, f.InitiatorDepth), depth: min(p.InitiatorDepth, f.ResponderResources),
		timeout: p.ACKTimeout, retries: p.RetryCount, rnrRetries: f.RNRRetry}
}

// fromREQ returns the ends of a passive connection.
func (c *Conn) fromREQ(path guestdrv.Path, f *cm.Fields) ends {
	p := &c.params
	return ends{path: path, peerQPN: f.QPN, rqPSN: c.psn, sqPSN: f.PSN, mtu: guestdrv.MTU(f.PathMTU),
		responder: min(p.ResponderResources, f.InitiatorDepth), depth: min(p.InitiatorDepth, f.ResponderResources),
		timeout: min(max(f.LocalACKTimeout, minACKTimeout), maxACKTimeout), retries: f.RetryCount, rnrRetries: f.RNRRetry}
}

// replyTo returns the REP of Accept.
func (c *Conn) replyTo() cm.Fields {
	return cm.Fields{QPN: c.qp.Number(), PSN: c.psn, ResponderResources: c.responder, InitiatorDepth: c.depth,
		RNRRetry: c.params.RNRRetry, SRQ: c.params.QP.SRQ != nil, Private: c.params.PrivateData}
}
