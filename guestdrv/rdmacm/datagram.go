package rdmacm

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// Datagrams have no connections. The connection manager only finds the queue pair behind an address and a port, by the
// service ID resolution of IBTA 12.11 with the IP addressing of annex A11: librdmacm's RDMA_PS_UDP. The service has no
// state: each SIDR_REQ has its answer.

// UDPQKey is the Q_Key of librdmacm's datagram queue pairs (RDMA_UDP_QKEY): those of programs in VMs have no other.
const UDPQKey = 0x01234567

// Service is what peers are told of a port for datagrams.
type Service struct {
	QPN  uint32 // of a UD queue pair of this device
	QKey uint32 // of that queue pair, see guestdrv.QP.StartUD; 0: UDPQKey
	// PrivateData is for the peers, at most MaxPrivateService bytes.
	PrivateData []byte
}

// DatagramService is an open port for datagrams.
type DatagramService struct {
	m      *Manager
	number uint16
	s      *service
}

// service is a port as the state machine knows it.
type service struct{ answer cm.Fields }

// ServeDatagrams opens a port for datagrams: peers that resolve it are told of the queue pair. The program posts its
// receive requests before. The ports are not those of Listen. It fails with ErrInUse if the port is open.
func (m *Manager) ServeDatagrams(number uint16, s Service) (*DatagramService, error) {
	if s.QKey == 0 {
		s.QKey = UDPQKey
	}
	switch {
	case number == 0:
		return nil, invalid("port 0")
	case s.QPN < 2 || s.QPN >= 1<<24:
		return nil, invalid("queue pair %d, expected 2 to %d", s.QPN, 1<<24-1)
	case len(s.PrivateData) > MaxPrivateService:
		return nil, invalid("%d bytes of private data, at most %d", len(s.PrivateData), MaxPrivateService)
	}
	d := &DatagramService{m: m, number: number, s: &service{cm.Fields{Kind: cm.SIDRRep, Service: datagramID(number),
		QPN: s.QPN, QKey: s.QKey, Private: bytes.Clone(s.PrivateData)}}}
	if err := m.act(func(_ time.Time, x *machine) error {
		if x.services[number] != nil {
			return ErrInUse
		}
		x.services[number] = d.s
		return nil
	}); err != nil {
		return nil, err
	}
	return d, nil
}

// Addr returns the address and port.
func (d *DatagramService) Addr() netip.AddrPort { return netip.AddrPortFrom(d.m.cfg.Address, d.number) }

// Close closes the port. The queue pair stays, and peers that know it may still send to it. It always returns nil.
func (d *DatagramService) Close() error {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if x := d.m.machine; x.services[d.number] == d.s {
		delete(x.services, d.number)
	}
	return nil
}

// DatagramPeer is the queue pair of a peer's port for datagrams. A send request needs an address handle for Path
// (guestdrv.PD.CreateAH) in its guestdrv.Datagram.
type DatagramPeer struct {
	Path guestdrv.Path
	QPN  uint32
	QKey uint32
	// PrivateData is what the peer said, MaxPrivateService bytes: zero bytes follow its data.
	PrivateData []byte
}

// Resolve finds the queue pair of a port for datagrams such as "10.0.0.1:7174". private is for the peer, at most
// MaxPrivateResolve bytes. It fails with a *ResolveError if the peer has none, with ErrTimeout if it does not answer,
// and with the context's error if that ends first.
func (m *Manager) Resolve(ctx context.Context, address string, private []byte) (_ *DatagramPeer, err error) {
	to, err := m.peerOf(address)
	if err != nil {
		return nil, err
	}
	if len(private) > MaxPrivateResolve {
		return nil, invalid("%d bytes of private data, at most %d", len(private), MaxPrivateResolve)
	}
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	defer func() { err = m.reason(err) }()
	peer := guestdrv.IPGID(to.Addr())
	path, err := m.path(ctx, peer)
	if err != nil {
		return nil, err
	}
	h := ipHeader{src: m.anyPort(), dst: to.Addr(), rest: private}
	var s *session
	answered := make(chan struct{}, 1)
	if err := m.act(func(now time.Time, x *machine) (err error) {
		s, err = x.resolve(now, peer, datagramID(to.Port()), h.encode(), func() { answered <- struct{}{} })
		return err
	}); err != nil {
		return nil, err
	}
	select {
	case <-answered:
	case <-ctx.Done():
		m.mu.Lock()
		defer m.mu.Unlock()
		m.machine.abandon(time.Now(), s)
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch f := &s.reply; {
	case s.err != nil:
		return nil, s.err
	case f.Status != cm.SIDRValid:
		return nil, &ResolveError{Status: uint8(f.Status), PrivateData: f.Private}
	default:
		return &DatagramPeer{Path: path, QPN: f.QPN, QKey: f.QKey, PrivateData: f.Private}, nil
	}
}

// ResolveError reports that a peer names no queue pair for a port.
type ResolveError struct {
	Status uint8 // IBTA 12.11.2; 1: nobody serves the port, 2: its program refuses
	// PrivateData is what the peer's program said, MaxPrivateService bytes.
	PrivateData []byte
}

var statusNames = map[cm.SIDRStatus]string{cm.SIDRUnsupported: "nobody serves the port",
	cm.SIDRRejected: "refused by the peer's program", cm.SIDRNoQP: "no queue pair", cm.SIDRRedirected: "redirected",
	cm.SIDRVersion: "version not supported"}

func (e *ResolveError) Error() string {
	if s := statusNames[cm.SIDRStatus(e.Status)]; s != "" {
		return "no datagram service: " + s
	}
	return fmt.Sprintf("no datagram service: status %d", e.Status)
}

// peerOf parses the address of Dial or Resolve.
func (m *Manager) peerOf(address string) (netip.AddrPort, error) {
	to, err := parsePeer(address)
	if err == nil && to.Addr().Is4() != m.cfg.Address.Is4() {
		err = invalid("address %v, but this end's is %v", to.Addr(), m.cfg.Address)
	}
	return to, err
}

// anyPort returns this end's address with a port that is for information; nobody connects to it.
func (m *Manager) anyPort() netip.AddrPort {
	return netip.AddrPortFrom(m.cfg.Address, uint16(49152+rand.IntN(65536-49152)))
}

// resolve sends a SIDR_REQ. changed is called when the session has ended: without err it has the reply.
func (m *machine) resolve(now time.Time, peer guestdrv.GID, id uint64, private []byte, changed func()) (*session,
	error) {
	s := m.newSession()
	if s == nil {
		return nil, ErrTooMany
	}
	s.state, s.active, s.peer = sidrSent, true, peer
	s.wait, s.retries = interval(m.response), int(m.retries)
	s.request = cm.Fields{Kind: cm.SIDRReq, Transaction: s.transaction, LocalID: s.localID, PKey: 0xffff, Service: id,
		Private: private}
	var err error
	if s.message, err = s.request.Encode(); err != nil {
		m.end(s, err)
		return nil, err
	}
	s.changed = changed
	m.send(peer, s.message)
	m.timers.set(s, now.Add(s.wait))
	return s, nil
}

// receiveSIDRReq answers the question for a service. The answer is no longer than the question.
func (m *machine) receiveSIDRReq(from guestdrv.GID, f *cm.Fields) {
	x := cm.Fields{Kind: cm.SIDRRep, Service: f.Service, Status: cm.SIDRUnsupported}
	number, ok := datagramPort(f.Service)
	h, err := decodeHeader(f.Private)
	switch s := m.services[number]; {
	case !ok || s == nil:
	case err != nil || !h.between(from, m.gid):
		x.Status = cm.SIDRRejected
	default:
		x = s.answer
	}
	x.Transaction, x.LocalID = f.Transaction, f.LocalID
	m.sendFields(from, &x)
}

// receiveSIDRRep ends the session that has asked.
func (m *machine) receiveSIDRRep(from guestdrv.GID, f *cm.Fields) {
	s := m.byLocal[f.LocalID]
	switch {
	case s == nil || s.state != sidrSent:
		m.counters.Unknown++
	case s.peer != from || f.Transaction != s.transaction || f.Service != s.request.Service ||
		f.Status == cm.SIDRValid && f.QPN < 2:
		m.counters.Refused++
	default:
		f.Private = bytes.Clone(f.Private)
		s.reply = *f
		m.end(s, nil)
	}
}
