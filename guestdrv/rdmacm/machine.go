package rdmacm

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// state is the state of a session (IBTA 12.9.5 and 12.9.6, without the states that differ only in an MRA).
//
//	active   connect -> reqSent -- REP --> repReceived -- ready: RTU --> established
//	passive  REQ -> reqReceived -- accept: REP --> repSent -- RTU --> established
//
//	reqSent, repReceived, reqReceived, repSent -- REJ, abandon, no answer --> gone
//	repReceived -- reject: REJ --> gone                    reqReceived -- reject: REJ --> timeWait
//	established -- disconnect: DREQ --> dreqSent -- DREP, DREQ, REJ, no answer --> timeWait -- timer --> gone
//	established, repSent -- DREQ: DREP --> timeWait        established -- REJ --> timeWait
//	datagrams: resolve -> sidrSent -- SIDR_REP, abandon, no answer --> gone
//
// In timeWait the IDs are still known, so that repeated messages get the same answer as before. gone is terminal, and
// such a session is in no table.
type state uint8

const (
	sidrSent state = iota + 1
	reqSent
	repReceived
	reqReceived
	repSent
	established
	dreqSent
	timeWait
	gone
)

var stateNames = [...]string{sidrSent: "sidr-sent", reqSent: "req-sent", repReceived: "rep-received",
	reqReceived: "req-received", repSent: "rep-sent", established: "established", dreqSent: "dreq-sent",
	timeWait: "time-wait", gone: "gone"}

func (s state) String() string { return stateNames[s] }

// over reports whether a connection in this state has ended, or is about to.
func (s state) over() bool { return s >= dreqSent }

// session is a connection as the state machine knows it. The machine owns it.
type session struct {
	state  state
	active bool  // this end sent the REQ
	up     bool  // has been established at both ends
	err    error // why it ended

	localID, remoteID uint32
	haveRemote        bool // remoteID is known
	qpn, peerQPN      uint32
	peer              guestdrv.GID
	transaction       uint64
	request           cm.Fields // passive: the REQ
	header            ipHeader  // passive: of the REQ
	delayed           bool      // passive: the peer has got an MRA
	reply             cm.Fields // active: the REP, or the SIDR_REP
	port              *port     // reqReceived: the listener in whose backlog it is; or nil

	message  []byte        // REQ, REP, DREQ or SIDR_REQ that is repeated until it is answered
	answer   []byte        // RTU, for repeated REPs; REJ, for repeated REQs
	wait     time.Duration // for an answer to message
	retries  int           // of message that are left
	patience int           // MRAs that are still obeyed

	deadline time.Time
	timer    int // place in timers, from 1; 0: none

	changed func() // called when state has changed; must not block; or nil
}

// port is a port on which a program listens.
type port struct {
	number  uint16
	most    int        // sessions in backlog
	backlog []*session // oldest first, all in reqReceived
	changed func()     // called when backlog has grown; must not block; or nil
}

// remoteKey finds a session by what its peer has chosen: a communication ID or a QP number.
type remoteKey struct {
	gid guestdrv.GID
	n   uint32
}

// datagram is a message on its way to a peer.
type datagram struct {
	to  guestdrv.GID
	mad []byte
}

// settings are the parameters of a machine.
type settings struct {
	gid      guestdrv.GID // of this end
	guid     uint64       // of this end's channel adapter; peers distinguish hosts by it
	maxMTU   uint8        // code
	most     int          // sessions
	response uint8        // code of the time that both ends have for an answer
	retries  uint8        // of messages, 0..15
	timeWait time.Duration
	random   func() uint32
}

// Bounds of what peers may ask for.
const (
	minWait    = 10 * time.Millisecond // for the answer to a REP
	maxWait    = 10 * time.Second
	maxService = 2 * time.Minute // that an MRA may ask for; Linux asks for 69 s
	maxMRAs    = 8
	mraCode    = 22 // of the MRAs that this end sends: 17 s
)

// Counters of a Manager.
type Counters struct {
	Received  uint64 // messages, those that were dropped included
	Malformed uint64 // dropped: no message, or one of a kind that is not supported
	Unknown   uint64 // about connections that do not exist, or no longer
	Refused   uint64 // dropped: contradict their connection (another peer, other IDs, another queue pair)
	Duplicate uint64 // answered again
	Repeated  uint64 // messages sent again because there was no answer
	Unsent    uint64 // messages that were not sent: no path to the peer, or too many at once
}

// machine is the connection manager without I/O, clock, lock and goroutine: calls carry the time, messages to send are
// in out, and sessions call changed. It is not safe for concurrent use.
type machine struct {
	settings
	byLocal  map[uint32]*session
	byRemote map[remoteKey]*session // by the peer's communication ID
	byPeerQP map[remoteKey]*session // by the peer's QP number; until timeWait
	ports    map[uint16]*port
	services map[uint16]*service // ports of RDMA_PS_UDP
	timers   timers
	waiting  []*session // in timeWait or gone since, oldest first
	out      []datagram
	counters Counters
}

func newMachine(s settings) *machine {
	return &machine{settings: s, byLocal: map[uint32]*session{}, byRemote: map[remoteKey]*session{},
		byPeerQP: map[remoteKey]*session{}, ports: map[uint16]*port{}, services: map[uint16]*service{}}
}

// next returns the time of the next call of tick; ok is false if none is needed.
func (m *machine) next() (t time.Time, ok bool) {
	if len(m.timers) == 0 {
		return t, false
	}
	return m.timers[0].deadline, true
}

// tick handles the timers that are due.
func (m *machine) tick(now time.Time) {
	for len(m.timers) > 0 && !m.timers[0].deadline.After(now) {
		m.expire(now, m.timers[0])
	}
}

// expire handles the timer of s.
func (m *machine) expire(now time.Time, s *session) {
	switch s.state {
	case sidrSent, reqSent, repSent, dreqSent:
		if s.retries > 0 {
			s.retries--
			m.counters.Repeated++
			m.send(s.peer, s.message)
			m.timers.set(s, now.Add(s.wait))
			return
		}
		if s.state == dreqSent {
			m.enterTimeWait(now, s, s.err)
			return
		}
		if s.state != sidrSent {
			m.sendReject(s, RejectTimeout, m.identity(), nil)
		}
		m.end(s, ErrTimeout)
	case reqReceived: // the peer no longer repeats its REQ
		m.end(s, ErrTimeout)
	default:
		m.end(s, s.err)
	}
}

// identity is the information of a REJ for RejectTimeout, by which Linux finds the connection (IBTA 12.6.7.2).
func (m *machine) identity() []byte { return binary.BigEndian.AppendUint64(nil, m.guid) }

// newSession makes room for a session and gives it a communication ID.
func (m *machine) newSession() *session {
	for len(m.byLocal) >= m.most {
		if len(m.waiting) == 0 {
			return nil
		}
		s := m.waiting[0]
		m.waiting = m.waiting[1:]
		if s.state == timeWait {
			m.end(s, s.err)
		}
	}
	s := &session{patience: maxMRAs, transaction: uint64(m.random())<<32 | uint64(m.random())}
	for s.localID == 0 || m.byLocal[s.localID] != nil {
		s.localID = m.random()
	}
	m.byLocal[s.localID] = s
	return s
}

// connect sends a REQ. f has its QPN, PSN, Service, private data and parameters of the queue pair.
func (m *machine) connect(now time.Time, peer guestdrv.GID, f cm.Fields, changed func()) (*session, error) {
	s := m.newSession()
	if s == nil {
		return nil, ErrTooMany
	}
	s.state, s.active, s.peer, s.qpn = reqSent, true, peer, f.QPN
	s.wait, s.retries = interval(m.response), int(m.retries)
	f.Kind, f.Transaction, f.LocalID, f.GUID, f.Local, f.Remote = cm.REQ, s.transaction, s.localID, m.guid, m.gid, peer
	f.RemoteTimeout, f.LocalTimeout, f.MaxRetries = m.response, m.response, m.retries
	// RoCE has no LIDs; this is what Linux sends with a hop limit above 1.
	f.LocalLID, f.RemoteLID = 0xffff, 0xffff
	var err error
	if s.message, err = f.Encode(); err != nil {
		m.end(s, err)
		return nil, err
	}
	s.changed = changed
	m.send(peer, s.message)
	m.timers.set(s, now.Add(s.wait))
	return s, nil
}

// ready completes an active connection whose queue pair is ready.
func (m *machine) ready(s *session) error {
	if s.state != repReceived {
		return s.why()
	}
	s.answer = m.encode(s, cm.Fields{Kind: cm.RTU})
	m.send(s.peer, s.answer)
	m.become(s, established)
	return nil
}

// accept answers a REQ. f has QPN, PSN, private data and parameters of the queue pair.
func (m *machine) accept(now time.Time, s *session, f cm.Fields) error {
	if s.state != reqReceived {
		return s.why()
	}
	f.Kind, f.Transaction, f.LocalID, f.RemoteID, f.GUID = cm.REP, s.transaction, s.localID, s.remoteID, m.guid
	b, err := f.Encode()
	if err != nil {
		return err
	}
	s.message, s.qpn = b, f.QPN
	s.wait = min(max(interval(s.request.LocalTimeout), minWait), maxWait)
	s.retries = int(s.request.MaxRetries)
	m.send(s.peer, b)
	m.timers.set(s, now.Add(s.wait))
	m.become(s, repSent)
	return nil
}

// reject refuses a REQ or REP. It remembers the REJ of a REQ: if that is lost, the REQ comes again.
func (m *machine) reject(now time.Time, s *session, r Reason, private []byte) error {
	switch s.state {
	case reqReceived:
		s.answer = m.sendReject(s, r, nil, private)
		m.enterTimeWait(now, s, r)
		wait := m.timeWait + 2*s.peerWait()
		if s.delayed {
			wait += interval(mraCode)
		}
		m.timers.set(s, now.Add(wait))
	case repReceived:
		m.sendReject(s, r, nil, private)
		m.end(s, r)
	default:
		return s.why()
	}
	return nil
}

// abandon ends a session in any state. The peer is told, and if the connection exists, it is disconnected.
func (m *machine) abandon(now time.Time, s *session) {
	switch s.state {
	case sidrSent:
		m.end(s, ErrClosed)
	case reqSent:
		m.sendReject(s, RejectTimeout, m.identity(), nil)
		m.end(s, ErrClosed)
	case repReceived, reqReceived, repSent:
		m.sendReject(s, RejectConsumer, nil, nil)
		m.end(s, ErrClosed)
	case established:
		m.disconnect(now, s, ErrClosed)
	}
}

// disconnect sends a DREQ, if s is established. why is the reason that the program learns.
func (m *machine) disconnect(now time.Time, s *session, why error) {
	if s.state != established {
		return
	}
	s.err = why
	s.message = m.encode(s, cm.Fields{Kind: cm.DREQ, QPN: s.peerQPN})
	s.wait, s.retries = interval(m.response), int(m.retries)
	m.send(s.peer, s.message)
	m.timers.set(s, now.Add(s.wait))
	m.become(s, dreqSent)
}

// listen opens a port. Its backlog holds at most most requests.
func (m *machine) listen(number uint16, most int, changed func()) (*port, error) {
	if m.ports[number] != nil {
		return nil, ErrInUse
	}
	p := &port{number: number, most: most, changed: changed}
	m.ports[number] = p
	return p, nil
}

// take removes the oldest request from a backlog, nil if there is none.
func (m *machine) take(p *port) *session {
	if len(p.backlog) == 0 {
		return nil
	}
	s := p.backlog[0]
	p.leave(s)
	return s
}

// unlisten closes a port and rejects the requests in its backlog.
func (m *machine) unlisten(now time.Time, p *port) {
	if m.ports[p.number] == p {
		delete(m.ports, p.number)
	}
	for len(p.backlog) > 0 {
		_ = m.reject(now, p.backlog[0], RejectServiceID, nil) // in reqReceived
	}
}

// leave removes s from the backlog.
func (p *port) leave(s *session) {
	for i, x := range p.backlog {
		if x == s {
			p.backlog = append(p.backlog[:i], p.backlog[i+1:]...)
			break
		}
	}
	s.port = nil
}

// why is the error of an operation that the state does not allow.
func (s *session) why() error {
	if s.err != nil {
		return s.err
	}
	return ErrClosed
}

func (m *machine) become(s *session, to state) {
	s.state = to
	if to == established {
		m.timers.stop(s)
		s.up, s.message = true, nil
	}
	if s.changed != nil {
		s.changed()
	}
}

// enterTimeWait ends a connection, but keeps its IDs for a while.
func (m *machine) enterTimeWait(now time.Time, s *session, why error) {
	s.err, s.message = why, nil
	m.forgetQP(s)
	if s.port != nil {
		s.port.leave(s)
	}
	m.timers.set(s, now.Add(m.timeWait))
	m.waiting = append(m.waiting, s)
	m.become(s, timeWait)
}

// end removes a session from all tables.
func (m *machine) end(s *session, why error) {
	s.err, s.message, s.answer = why, nil, nil
	m.timers.stop(s)
	delete(m.byLocal, s.localID)
	if k := (remoteKey{s.peer, s.remoteID}); s.haveRemote && m.byRemote[k] == s {
		delete(m.byRemote, k)
	}
	m.forgetQP(s)
	if s.port != nil {
		s.port.leave(s)
	}
	m.become(s, gone)
	// They do not end in order: one whose REJ is remembered waits for longer than others that follow.
	if len(m.waiting) > 2*len(m.byLocal)+16 {
		m.waiting = slices.DeleteFunc(m.waiting, func(x *session) bool { return x.state == gone })
	}
}

func (m *machine) forgetQP(s *session) {
	if k := (remoteKey{s.peer, s.peerQPN}); m.byPeerQP[k] == s {
		delete(m.byPeerQP, k)
	}
}

// encode returns a message about s; f has no private data.
func (m *machine) encode(s *session, f cm.Fields) []byte {
	f.Transaction, f.LocalID, f.RemoteID = s.transaction, s.localID, s.remoteID
	b, err := f.Encode()
	if err != nil {
		panic(err) // the kinds are constants, and there is no data
	}
	return b
}

func (m *machine) send(to guestdrv.GID, mad []byte) { m.out = append(m.out, datagram{to, mad}) }

// sendReject sends a REJ about s, and returns it. private is no longer than MaxPrivateREJ.
func (m *machine) sendReject(s *session, r Reason, info, private []byte) []byte {
	f := cm.Fields{Kind: cm.REJ, Transaction: s.transaction, LocalID: s.localID, RemoteID: s.remoteID,
		Reason: uint16(r), Info: info, Private: private, Answers: cm.AnswersOther}
	switch s.state {
	case reqReceived:
		f.Answers = cm.AnswersREQ
	case repReceived:
		f.Answers = cm.AnswersREP
	}
	b, err := f.Encode()
	if err != nil {
		return nil
	}
	m.send(s.peer, b)
	return b
}
