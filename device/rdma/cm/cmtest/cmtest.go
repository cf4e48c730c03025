// Package cmtest encodes messages of communication management for tests.
package cmtest

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/rdma/cm"
)

// Message holds the fields that cm.Message's methods return; fields that its kind does not have are ignored.
type Message struct {
	Kind              cm.Kind
	Transaction       uint64
	LocalID, RemoteID uint32
	Service           uint64
	QPN, PSN          uint32
	Transport         uint8
	PathMTU           uint8
	RNRRetry          uint8 // of REQ and REP
	PKey              uint16
	Local, Remote     [16]byte // GIDs
	Reason            uint16
	Status            uint8
	QKey              uint32
	ServiceTimeout    uint8
}

// Of decodes a message.
func Of(m cm.Message) Message {
	x := Message{Kind: m.Kind(), Transaction: m.Transaction(), LocalID: m.LocalID()}
	if x.Kind != cm.REQ && x.Kind != cm.SIDRReq && x.Kind != cm.SIDRRep {
		x.RemoteID = m.RemoteID()
	}
	switch x.Kind {
	case cm.REQ:
		x.Service, x.QPN, x.PSN, x.Transport, x.PathMTU, x.PKey = m.ServiceID(), m.QPN(), m.PSN(), m.Transport(), m.PathMTU(),
			m.PKey()
		x.Local, x.Remote = m.GIDs()
		x.RNRRetry = m.RNRRetry()
	case cm.REP:
		x.QPN, x.PSN, x.RNRRetry = m.QPN(), m.PSN(), m.RNRRetry()
	case cm.DREQ, cm.LAP:
		x.QPN = m.QPN()
	case cm.REJ:
		x.Reason = m.Reason()
	case cm.MRA:
		x.ServiceTimeout = m.ServiceTimeout()
	case cm.SIDRReq:
		x.Service = m.ServiceID()
	case cm.SIDRRep:
		x.Status, x.QPN, x.Service, x.QKey = m.Status(), m.QPN(), m.ServiceID(), m.QKey()
	}
	return x
}

// Bytes returns the whole management datagram.
func (x *Message) Bytes() []byte {
	f := cm.Fields{Kind: x.Kind, Transaction: x.Transaction, LocalID: x.LocalID, RemoteID: x.RemoteID,
		Service: x.Service, QPN: x.QPN, PSN: x.PSN, Transport: x.Transport, PathMTU: x.PathMTU, RNRRetry: x.RNRRetry,
		PKey: x.PKey, Local: x.Local, Remote: x.Remote, Reason: x.Reason, ServiceTimeout: x.ServiceTimeout,
		Status: cm.SIDRStatus(x.Status), QKey: x.QKey}
	if b, err := f.Encode(); err == nil {
		return b
	}
	return x.other()
}

// other encodes the messages that cm.Fields does not describe: those of alternate paths, and kinds that do not exist.
func (x *Message) other() []byte {
	b := make([]byte, cm.MADLen)
	b[0], b[1], b[2], b[3] = 1, 7, 2, 3
	be := binary.BigEndian
	be.PutUint64(b[8:], x.Transaction)
	be.PutUint16(b[16:], uint16(x.Kind))
	d := b[24:]
	be.PutUint32(d, x.LocalID)
	be.PutUint32(d[4:], x.RemoteID)
	if x.Kind == cm.LAP {
		be.PutUint32(d[12:], x.QPN<<8)
	}
	return b
}
