package rdmacm

import (
	"bytes"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// Messages of peers are hostile input: a message about a session must come from its peer's address and have the right
// IDs, otherwise it is dropped and changes nothing. Where Linux answers messages about unknown connections (DREQ), or
// IBTA 12.9.8.3.1 asks for it (REP), the answer is no longer than the message.

// receive handles a datagram that arrived at queue pair 1 from queue pair 1 of the host with the GID from.
func (m *machine) receive(now time.Time, from guestdrv.GID, mad []byte) {
	m.counters.Received++
	msg, err := cm.Parse(mad)
	if err != nil {
		m.counters.Malformed++
		return
	}
	f, ok := msg.Decode()
	if !ok { // alternate paths are not supported
		m.counters.Malformed++
		return
	}
	switch f.Kind {
	case cm.REQ:
		m.receiveREQ(now, from, &f)
		return
	case cm.SIDRReq:
		m.receiveSIDRReq(from, &f)
		return
	case cm.SIDRRep:
		m.receiveSIDRRep(from, &f)
		return
	}
	s, known := m.find(from, &f)
	switch {
	case !known:
		m.counters.Unknown++
		m.answerUnknown(from, &f)
		return
	case s == nil:
		m.counters.Refused++
		return
	}
	switch f.Kind {
	case cm.REP:
		m.receiveREP(now, s, &f)
	case cm.RTU:
		if s.state == repSent {
			m.become(s, established)
		}
	case cm.REJ:
		m.receiveREJ(now, s, &f)
	case cm.MRA:
		m.receiveMRA(now, s, &f)
	case cm.DREQ:
		m.receiveDREQ(now, s, &f)
	case cm.DREP:
		if s.state == dreqSent {
			m.enterTimeWait(now, s, s.err)
		}
	}
}

// find returns the session that a message is about: nil if the message contradicts it.
func (m *machine) find(from guestdrv.GID, f *cm.Fields) (s *session, known bool) {
	if s = m.byLocal[f.RemoteID]; s == nil && f.Kind == cm.REJ {
		// A sender that gives up before it has an ID of this end names only its own.
		s = m.byRemote[remoteKey{from, f.LocalID}]
		if s != nil && f.RemoteID != 0 {
			return nil, true
		}
	}
	if s == nil {
		return nil, false
	}
	if s.peer != from || s.state == sidrSent {
		return nil, true
	}
	if s.haveRemote {
		if s.remoteID != f.LocalID {
			return nil, true
		}
		return s, true
	}
	// Only the answers to a REQ come before the peer's ID is known. A REJ need not have one.
	if f.Kind != cm.REP && f.Kind != cm.REJ && f.Kind != cm.MRA {
		return nil, true
	}
	return s, true
}

// answerUnknown answers a message about a connection that does not exist: its sender need not wait.
func (m *machine) answerUnknown(from guestdrv.GID, f *cm.Fields) {
	x := cm.Fields{Transaction: f.Transaction, LocalID: f.RemoteID, RemoteID: f.LocalID}
	switch f.Kind {
	case cm.DREQ:
		x.Kind = cm.DREP
	case cm.REP:
		x.Kind, x.Answers, x.Reason = cm.REJ, cm.AnswersREP, uint16(RejectCommID)
	default:
		return
	}
	m.sendFields(from, &x)
}

// sendFields sends a message without data.
func (m *machine) sendFields(to guestdrv.GID, f *cm.Fields) {
	if b, err := f.Encode(); err == nil {
		m.send(to, b)
	}
}

// refuse answers a REQ for which there is no session.
func (m *machine) refuse(from guestdrv.GID, f *cm.Fields, r Reason) {
	m.sendFields(from, &cm.Fields{Kind: cm.REJ, Transaction: f.Transaction, RemoteID: f.LocalID, Answers: cm.AnswersREQ,
		Reason: uint16(r)})
}

func (m *machine) receiveREQ(now time.Time, from guestdrv.GID, f *cm.Fields) {
	if s := m.byRemote[remoteKey{from, f.LocalID}]; s != nil {
		m.repeatedREQ(now, s, f)
		return
	}
	if s := m.byPeerQP[remoteKey{from, f.QPN}]; s != nil {
		// The peer has forgotten a connection of this queue pair (IBTA 12.9.8.3.1).
		m.refuse(from, f, RejectStale)
		m.stale(now, s)
		return
	}
	number, ok := portOf(f.Service)
	p := m.ports[number]
	h, err := decodeHeader(f.Private)
	switch {
	case !ok || p == nil:
		m.refuse(from, f, RejectServiceID)
		return
	case f.Transport != 0:
		m.refuse(from, f, RejectTransport)
		return
	case f.QPN < 2:
		m.refuse(from, f, RejectNoQP)
		return
	case f.Local != from || f.Remote != m.gid:
		m.refuse(from, f, RejectGID)
		return
	case err != nil || !h.between(from, m.gid):
		m.refuse(from, f, RejectConsumer) // as Linux does
		return
	case f.PathMTU < 1 || f.PathMTU > m.maxMTU:
		m.refuse(from, f, RejectMTU)
		return
	case len(p.backlog) >= p.most && !m.makeRoom(now, p, from):
		m.refuse(from, f, RejectNoResources)
		return
	}
	s := m.newSession()
	if s == nil {
		m.refuse(from, f, RejectNoResources)
		return
	}
	h.rest, f.Private = bytes.Clone(h.rest), nil // they are parts of the receive buffer
	s.header = h
	s.state, s.peer, s.remoteID, s.haveRemote, s.peerQPN = reqReceived, from, f.LocalID, true, f.QPN
	s.transaction, s.request, s.port = f.Transaction, *f, p
	m.byRemote[remoteKey{from, s.remoteID}], m.byPeerQP[remoteKey{from, s.peerQPN}] = s, s
	m.timers.set(s, now.Add(s.untilPeerGivesUp()))
	p.backlog = append(p.backlog, s)
	if p.changed != nil {
		p.changed()
	}
}

// makeRoom rejects the newest request in a full backlog of the peer that has most there, if that leaves it no fewer
// than peer has with one more: a peer that fills backlogs shuts nobody out.
func (m *machine) makeRoom(now time.Time, p *port, peer guestdrv.GID) bool {
	counts := make(map[guestdrv.GID]int, len(p.backlog))
	var newest *session
	for _, s := range p.backlog {
		if counts[s.peer]++; newest == nil || counts[s.peer] >= counts[newest.peer] {
			newest = s
		}
	}
	if newest == nil || counts[newest.peer]-1 < counts[peer]+1 {
		return false
	}
	return m.reject(now, newest, RejectNoResources, nil) == nil
}

// peerWait is the time after which the sender of a REQ repeats it, untilPeerGivesUp that for which it repeats it.
func (s *session) peerWait() time.Duration {
	return min(max(interval(s.request.RemoteTimeout), minWait), maxWait)
}

func (s *session) untilPeerGivesUp() time.Duration {
	return s.peerWait() * time.Duration(1+s.request.MaxRetries)
}

// repeatedREQ handles a REQ with the communication ID of a session.
func (m *machine) repeatedREQ(now time.Time, s *session, f *cm.Fields) {
	if s.active || f.QPN != s.peerQPN || f.Service != s.request.Service {
		// The peer has forgotten the session and uses its ID again.
		m.refuse(s.peer, f, RejectStale)
		m.stale(now, s)
		return
	}
	switch s.state {
	case reqReceived: // the program needs time
		m.counters.Duplicate++
		s.delayed = true
		m.send(s.peer, m.encode(s, cm.Fields{Kind: cm.MRA, Answers: cm.AnswersREQ, ServiceTimeout: mraCode}))
		m.timers.set(s, now.Add(interval(mraCode)+s.untilPeerGivesUp()))
	case repSent:
		m.counters.Duplicate++
		m.send(s.peer, s.message)
	case timeWait:
		if s.answer == nil { // it was connected
			m.refuse(s.peer, f, RejectStale)
			return
		}
		m.counters.Duplicate++
		m.send(s.peer, s.answer)
	}
}

// stale ends a session that its peer has forgotten.
func (m *machine) stale(now time.Time, s *session) {
	switch s.state {
	case established:
		m.disconnect(now, s, RejectStale)
	case reqReceived, repReceived, repSent, reqSent:
		m.end(s, RejectStale)
	}
}

func (m *machine) receiveREP(now time.Time, s *session, f *cm.Fields) {
	switch {
	case !s.active:
		m.counters.Refused++
	case s.state == reqSent:
		m.firstREP(now, s, f)
	case f.QPN != s.peerQPN:
		m.counters.Refused++
	case s.state == repReceived: // the program needs time
		m.counters.Duplicate++
		m.send(s.peer, m.encode(s, cm.Fields{Kind: cm.MRA, Answers: cm.AnswersREP, ServiceTimeout: mraCode}))
	case s.state == established:
		m.counters.Duplicate++
		m.send(s.peer, s.answer)
	}
}

// firstREP handles the answer to a REQ.
func (m *machine) firstREP(now time.Time, s *session, f *cm.Fields) {
	key, qpKey := remoteKey{s.peer, f.LocalID}, remoteKey{s.peer, f.QPN}
	reason := Reason(0)
	old := m.byRemote[key]
	if old != nil {
		reason = RejectDuplicateID
	} else if old = m.byPeerQP[qpKey]; old != nil {
		reason = RejectStale
	} else if f.QPN < 2 {
		reason = RejectNoQP
	}
	if reason != 0 {
		x := cm.Fields{Kind: cm.REJ, Transaction: f.Transaction, LocalID: s.localID, RemoteID: f.LocalID,
			Answers: cm.AnswersREP, Reason: uint16(reason)}
		m.sendFields(s.peer, &x)
		if reason == RejectStale {
			m.stale(now, old)
		}
		m.end(s, &RejectError{Reason: reason})
		return
	}
	f.Private = bytes.Clone(f.Private)
	s.reply, s.remoteID, s.haveRemote, s.peerQPN = *f, f.LocalID, true, f.QPN
	m.byRemote[key], m.byPeerQP[qpKey] = s, s
	s.message = nil
	m.timers.stop(s) // the program continues: ready, reject or abandon
	m.become(s, repReceived)
}

func (m *machine) receiveREJ(now time.Time, s *session, f *cm.Fields) {
	why := &RejectError{Reason: Reason(f.Reason), PrivateData: bytes.Clone(f.Private)}
	switch s.state {
	case reqSent, repReceived, repSent:
		m.end(s, why)
	case reqReceived:
		m.end(s, why)
	case established:
		m.enterTimeWait(now, s, why)
	case dreqSent:
		m.enterTimeWait(now, s, s.err)
	}
}

func (m *machine) receiveMRA(now time.Time, s *session, f *cm.Fields) {
	if s.state != reqSent && s.state != repSent || (f.Answers == cm.AnswersREQ) != (s.state == reqSent) ||
		f.Answers > cm.AnswersREP || s.patience == 0 {
		m.counters.Refused++
		return
	}
	s.patience--
	m.timers.set(s, now.Add(min(interval(f.ServiceTimeout), maxService)+s.wait))
}

func (m *machine) receiveDREQ(now time.Time, s *session, f *cm.Fields) {
	if f.QPN != s.qpn {
		m.counters.Refused++
		return
	}
	drep := cm.Fields{Kind: cm.DREP, Transaction: f.Transaction, LocalID: s.localID, RemoteID: s.remoteID}
	switch s.state {
	case established, repSent: // in repSent the RTU was lost
		s.up = true
		m.sendFields(s.peer, &drep)
		m.enterTimeWait(now, s, ErrPeerDisconnected)
	case dreqSent:
		m.sendFields(s.peer, &drep)
		m.enterTimeWait(now, s, s.err)
	case timeWait:
		m.counters.Duplicate++
		m.sendFields(s.peer, &drep)
	default:
		m.counters.Refused++
	}
}
