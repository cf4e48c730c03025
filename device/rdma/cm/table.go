package cm

import (
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// State is the state of a connection as the observed messages show it. An observed message may still be lost in the
// guest, and a guest may end a connection without a message.
//
//	REQ out  req-sent -- REP in --> rep-received -- RTU out --> established
//	REQ in   req-received -- REP out --> rep-sent -- RTU in --> established
//	established -- DREQ out/in --> dreq-sent/dreq-received -- DREP --> closed
//	any but closed -- REJ --> rejected        SIDR_REQ out/in: sidr-sent/sidr-received -- SIDR_REP --> resolved
//
// rejected and closed are terminal: the entry is shown for a while, then removed.
type State uint8

// The states.
const (
	ReqSent State = iota + 1
	ReqReceived
	RepSent
	RepReceived
	Established
	DreqSent
	DreqReceived
	Closed
	Rejected
	SIDRSent
	SIDRReceived
	Resolved
)

var stateNames = [...]string{ReqSent: "req-sent", ReqReceived: "req-received", RepSent: "rep-sent",
	RepReceived: "rep-received", Established: "established", DreqSent: "dreq-sent", DreqReceived: "dreq-received",
	Closed: "closed", Rejected: "rejected", SIDRSent: "sidr-sent", SIDRReceived: "sidr-received", Resolved: "resolved"}

// String returns the name that status output uses.
func (s State) String() string { return stateNames[s] }

// Bound reports whether the connection belongs to a local queue pair (Bind).
func (c *Conn) Bound() bool { return c.bound }

// PeerPatience tells whether the peer's queue pair retries RNR NAKs for ever. The VM's own message says so: an RNR
// retry count is what its sender asks of the receiver. But there are programs that use their own count for their own
// queue pair, so both messages must name 7.
func (c *Conn) PeerPatience() wire.Patience {
	if c.localForever && c.remoteForever {
		return wire.PatienceForever
	}
	return wire.PatienceEnds
}

func (s State) over() bool { return s == Closed || s == Rejected }

// Conn is one connection. The Table owns it: callers change nothing but Path.
type Conn struct {
	State   State
	Active  bool // the VM requested it
	Service uint64
	// Transport is as in the REQ: 0 RC, 1 UC; 3 for SIDR.
	Transport uint8
	PathMTU   uint8 // code of the REQ

	LocalID, RemoteID   uint32
	LocalQPN, RemoteQPN uint32 // 0: not known yet
	Local, Remote       [16]byte
	RemoteMAC           [6]byte
	VLAN                uint16 // 0: untagged
	Reject              uint16 // reason of the rejection
	Began               int64  // ns, by the clock given to Watch

	// Path is the overlay tuple of the connection; the caller sets it.
	Path vswitch.Path

	// Whether the REQ or REP of the VM, and of the peer, names an RNR retry count without limit.
	localForever, remoteForever bool

	haveLocal, haveRemote bool // the IDs are known
	sidr, bound           bool
	expires               int64 // 0: never
	prev, next            *Conn // in its list
	list                  *list
}

// Bounds.
const (
	DefaultMax = 4096

	// HalfOpen is how long a connection that is being set up or closed is remembered without a message. The longest
	// response timeout that Linux uses is about 8 s, with 15 retries.
	HalfOpen = 150 * time.Second
	// Over is how long an ended connection is shown.
	Over = 10 * time.Second

	rnrForever = 7                // RNR retry count without limit
	maxService = 10 * time.Minute // longest delay that an MRA may request

	// maxLoose bounds the connections without a queue pair, which any host in the network can begin.
	maxLoose = DefaultMax
)

// Reason tells how an arriving datagram contradicts the table.
type Reason uint8

// The reasons. Pass means no contradiction.
const (
	Pass         Reason = iota
	Malformed           // a class 7 datagram that chapter 12 does not define
	SourceQP            // not from queue pair 1
	WrongGID            // a REQ whose path is not between the addresses of its packet
	WrongPeer           // for a connection with another peer: GID, MAC or VLAN
	WrongQP             // names another queue pair than the connection's
	WrongMessage        // not allowed in the connection's state, or with other IDs
	NumReasons
)

var reasonNames = [NumReasons]string{"", "cm-malformed", "cm-source-qp", "cm-gid", "cm-peer", "cm-qp-number",
	"cm-message"}

// String returns the name that status output uses.
func (r Reason) String() string { return reasonNames[r] }

// Datagram is a management datagram on its way through queue pair 1, with the addresses of its packet.
type Datagram struct {
	Out           bool // the VM sends it
	Local, Remote [16]byte
	RemoteMAC     [6]byte
	VLAN          uint16 // 0: untagged
	RemoteQPN     uint32 // the other end's queue pair
	MAD           []byte
}

// Table holds the connections of one VM. It is not safe for concurrent use. The zero value is not usable.
type Table struct {
	max     int
	byLocal map[idKey]*Conn
	// Peers choose the remote IDs; a peer is identified by its GID.
	byRemote map[peerKey]*Conn
	byQP     map[uint32]*Conn  // by local QPN, if bound
	byPeerQP map[peerKey]*Conn // remote QPN
	open     list              // bound: live as long as their queue pair
	half     list              // not bound: expire
	past     list

	// Untracked counts connections for which the table had no room, Strays messages about unknown connections.
	Untracked, Strays uint64
}

type idKey struct {
	id   uint32
	sidr bool
}

type peerKey struct {
	gid [16]byte
	idKey
}

// NewTable returns a table of at most max connections; 0: DefaultMax.
func NewTable(max int) *Table {
	if max <= 0 {
		max = DefaultMax
	}
	t := &Table{max: max}
	t.Clear()
	return t
}

// Clear removes all connections and keeps the counters.
func (t *Table) Clear() {
	t.byLocal, t.byRemote = map[idKey]*Conn{}, map[peerKey]*Conn{}
	t.byQP, t.byPeerQP = map[uint32]*Conn{}, map[peerKey]*Conn{}
	t.open, t.half, t.past = list{}, list{}, list{}
}

// Len returns the number of connections.
func (t *Table) Len() int { return t.open.n + t.half.n + t.past.n }

// Each calls f for every connection that has not expired at now, those with a queue pair first.
func (t *Table) Each(now int64, f func(*Conn)) {
	t.age(now)
	for _, l := range [...]*list{&t.open, &t.half, &t.past} {
		for c := l.first; c != nil; c = c.next {
			f(c)
		}
	}
}

// ByQP returns the connection of a local queue pair, nil if there is none.
func (t *Table) ByQP(qpn uint32) *Conn { return t.byQP[qpn] }

// Bind finds the connection for which a local queue pair is made ready, by its peer, and binds it to the queue pair: it
// lives until Release. Nil: the queue pair's peer was not set up by CM.
func (t *Table) Bind(qpn uint32, remote [16]byte, remoteQPN uint32) *Conn {
	c := t.byPeerQP[peerKey{remote, idKey{id: remoteQPN}}]
	if c == nil || qpn == 0 || c.State.over() || c.LocalQPN != qpn && (c.LocalQPN != 0 || c.Active) {
		return nil
	}
	if old := t.byQP[qpn]; old != nil && old != c {
		t.end(old, Closed)
	}
	c.LocalQPN, c.bound, c.expires = qpn, true, 0
	t.byQP[qpn] = c
	t.move(c, &t.open)
	return c
}

// Release ends the connection of a queue pair that is destroyed or reset.
func (t *Table) Release(now int64, qpn uint32) {
	c := t.byQP[qpn]
	if c == nil {
		return
	}
	delete(t.byQP, qpn)
	c.bound = false
	if !c.State.over() {
		c.State = Closed
	}
	t.settle(now, c)
}

// Watch records a datagram. c is its connection, nil if none is known. If why is not Pass nothing was changed, and an
// arriving datagram should be dropped.
func (t *Table) Watch(now int64, d *Datagram) (c *Conn, why Reason) {
	t.age(now)
	m, err := Parse(d.MAD)
	switch {
	case err == ErrOther:
		return nil, Pass
	case err != nil:
		return nil, Malformed
	case d.RemoteQPN != 1:
		return nil, SourceQP // redirection (IBTA 13.5.2) is not in use with RoCE
	}
	k := m.Kind()
	if k == REQ || k == SIDRReq {
		return t.request(now, d, m)
	}
	if c = t.find(d, m); c == nil {
		t.Strays++
		return nil, Pass
	}
	if why = c.check(d, m); why != Pass {
		return nil, why
	}
	t.apply(now, c, d.Out, m)
	return c, Pass
}

// request begins a connection, or handles a repeated request.
func (t *Table) request(now int64, d *Datagram, m Message) (*Conn, Reason) {
	sidr := m.Kind() == SIDRReq
	if !sidr {
		local, remote := m.GIDs()
		if d.Out {
			local, remote = remote, local
		}
		if local != d.Remote || remote != d.Local {
			return nil, WrongGID
		}
	}
	id := idKey{m.LocalID(), sidr}
	fresh := &Conn{Active: d.Out, Service: m.ServiceID(), Local: d.Local, Remote: d.Remote, RemoteMAC: d.RemoteMAC,
		VLAN: d.VLAN, sidr: sidr, Began: now, State: ReqReceived, Transport: 3}
	var old *Conn
	if d.Out {
		old = t.byLocal[id]
		fresh.State, fresh.LocalID, fresh.haveLocal = ReqSent, id.id, true
	} else {
		old = t.byRemote[peerKey{d.Remote, id}]
		fresh.RemoteID, fresh.haveRemote = id.id, true
	}
	switch {
	case sidr:
		fresh.State += SIDRSent - ReqSent
	case d.Out:
		fresh.LocalQPN = m.QPN()
	default:
		fresh.RemoteQPN = m.QPN()
	}
	if !sidr {
		fresh.Transport, fresh.PathMTU = m.Transport(), m.PathMTU()
		*fresh.forever(d.Out) = m.RNRRetry() == rnrForever
	}
	if old != nil && !old.State.over() {
		if old.repeats(fresh) {
			if !old.bound {
				t.settle(now, old)
			}
			return old, Pass
		}
		if !d.Out && (old.State == Established || old.RemoteMAC != fresh.RemoteMAC || old.VLAN != fresh.VLAN) {
			return nil, WrongPeer // its owner has not ended it
		}
	}
	if old != nil {
		t.remove(old)
	}
	if !t.room() {
		t.Untracked++
		return nil, Pass
	}
	if d.Out {
		t.byLocal[id] = fresh
	} else {
		t.byRemote[peerKey{d.Remote, id}] = fresh
		if !sidr {
			t.byPeerQP[peerKey{d.Remote, idKey{id: fresh.RemoteQPN}}] = fresh
		}
	}
	t.settle(now, fresh)
	return fresh, Pass
}

// repeats reports whether x is a repetition of the request that began c.
func (c *Conn) repeats(x *Conn) bool {
	qpn := c.LocalQPN == x.LocalQPN
	if !c.Active {
		qpn = c.RemoteQPN == x.RemoteQPN // ours may be known meanwhile
	}
	return c.Active == x.Active && qpn && c.Service == x.Service && c.Remote == x.Remote && c.Local == x.Local &&
		c.RemoteMAC == x.RemoteMAC && c.VLAN == x.VLAN
}

// find returns the connection of a message that is not a request.
func (t *Table) find(d *Datagram, m Message) *Conn {
	local, remote := m.LocalID(), m.RemoteID()
	if !d.Out {
		local, remote = remote, local
	}
	if m.Kind() == SIDRRep { // the ID is the requester's
		if d.Out {
			return t.byRemote[peerKey{d.Remote, idKey{m.LocalID(), true}}]
		}
		return t.byLocal[idKey{m.LocalID(), true}]
	}
	if c := t.byLocal[idKey{id: local}]; c != nil {
		return c
	}
	return t.byRemote[peerKey{d.Remote, idKey{id: remote}}]
}

// check compares a message with the state of its connection.
func (c *Conn) check(d *Datagram, m Message) Reason {
	if c.Remote != d.Remote || c.Local != d.Local || c.VLAN != d.VLAN || c.RemoteMAC != d.RemoteMAC {
		return WrongPeer
	}
	k := m.Kind()
	if k == SIDRRep {
		if c.Active == d.Out || m.ServiceID() != c.Service && m.Status() == 0 {
			return WrongMessage
		}
		return Pass
	}
	local, remote := m.LocalID(), m.RemoteID()
	if !d.Out {
		local, remote = remote, local
	}
	// In a REJ either side may have no ID yet.
	if c.haveLocal && local != c.LocalID && (k != REJ || local != 0) || c.haveRemote && remote != c.RemoteID &&
		(k != REJ || remote != 0) {
		return WrongMessage
	}
	switch k {
	case REP:
		if d.Out == c.Active {
			return WrongMessage
		}
		if known := *c.qpn(d.Out); known != 0 && known != m.QPN() {
			return WrongQP
		}
	case RTU:
		if d.Out != c.Active || !c.haveLocal || !c.haveRemote {
			return WrongMessage
		}
	case DREQ, LAP:
		if known := *c.qpn(!d.Out); known != 0 && known != m.QPN() {
			return WrongQP
		}
	}
	return Pass
}

// qpn returns the queue pair at one end.
func (c *Conn) qpn(local bool) *uint32 {
	if local {
		return &c.LocalQPN
	}
	return &c.RemoteQPN
}

// forever returns the flag of the messages of one end.
func (c *Conn) forever(local bool) *bool {
	if local {
		return &c.localForever
	}
	return &c.remoteForever
}

// apply updates the connection by a valid message.
func (t *Table) apply(now int64, c *Conn, out bool, m Message) {
	k := m.Kind()
	if !c.sidr {
		t.learnIDs(c, out, m)
	}
	wait := time.Duration(0)
	switch k {
	case REP:
		if !out { // the one before may have named queue pair 0
			t.forgetPeerQP(c)
		}
		*c.qpn(out) = m.QPN()
		*c.forever(out) = m.RNRRetry() == rnrForever
		if !out {
			t.byPeerQP[peerKey{c.Remote, idKey{id: c.RemoteQPN}}] = c
		}
		if c.State == ReqSent || c.State == ReqReceived {
			c.State = RepReceived
			if out {
				c.State = RepSent
			}
		}
	case RTU:
		if c.State == RepSent || c.State == RepReceived {
			c.State = Established
		}
	case MRA:
		wait = min(time.Duration(4096)<<m.ServiceTimeout(), maxService)
	case REJ:
		if c.State < DreqSent {
			c.State, c.Reject = Rejected, m.Reason()
		}
	case DREQ:
		if !c.State.over() {
			c.State = DreqReceived
			if out {
				c.State = DreqSent
			}
		}
	case DREP:
		if !c.State.over() {
			c.State = Closed
		}
	case SIDRRep:
		if c.State = Rejected; m.Status() == 0 {
			c.State = Resolved
			*c.qpn(out) = m.QPN()
		} else {
			c.Reject = uint16(m.Status())
		}
	}
	t.settle(now+int64(wait), c)
}

// learnIDs records the communication ID that a message's sender gave the connection. A REJ may have none.
func (t *Table) learnIDs(c *Conn, out bool, m Message) {
	if m.Kind() == REJ {
		return
	}
	id := m.LocalID()
	switch {
	case out && !c.haveLocal:
		c.LocalID, c.haveLocal = id, true
		if old := t.byLocal[idKey{id: id}]; old != nil {
			t.remove(old) // a guest that reuses an ID has forgotten the first connection
		}
		t.byLocal[idKey{id: id}] = c
	case !out && !c.haveRemote:
		c.RemoteID, c.haveRemote = id, true
		k := peerKey{c.Remote, idKey{id: id}}
		if t.byRemote[k] == nil {
			t.byRemote[k] = c
		}
	}
}

// settle appends a connection to the list of its state and sets when it expires.
func (t *Table) settle(now int64, c *Conn) {
	switch {
	case c.bound:
		c.expires = 0
		t.move(c, &t.open)
	case c.State.over():
		c.expires = now + int64(Over)
		t.move(c, &t.past)
	default:
		c.expires = now + int64(HalfOpen)
		t.move(c, &t.half)
	}
}

func (t *Table) end(c *Conn, s State) {
	delete(t.byQP, c.LocalQPN)
	c.bound, c.State = false, s
	t.move(c, &t.past)
	c.expires = 1 // at the next look-up
}

// age removes expired connections. Lists are ordered by the last message; expiry times differ a little within one, so
// an entry may stay as long as one before it.
func (t *Table) age(now int64) {
	for _, l := range [...]*list{&t.half, &t.past} {
		for l.first != nil && l.first.expires <= now {
			t.remove(l.first)
		}
	}
}

// room makes room for one connection by removing ended or half-open ones. It returns false if all are bound.
func (t *Table) room() bool {
	if t.Len() < t.max && t.half.n+t.past.n < maxLoose {
		return true
	}
	for _, l := range [...]*list{&t.past, &t.half} {
		if l.first != nil {
			t.remove(l.first)
			return true
		}
	}
	return false
}

func (t *Table) remove(c *Conn) {
	if k := (idKey{c.LocalID, c.sidr}); t.byLocal[k] == c {
		delete(t.byLocal, k)
	}
	if t.byQP[c.LocalQPN] == c {
		delete(t.byQP, c.LocalQPN)
	}
	if k := (peerKey{c.Remote, idKey{c.RemoteID, c.sidr}}); t.byRemote[k] == c {
		delete(t.byRemote, k)
	}
	t.forgetPeerQP(c)
	t.move(c, nil)
}

// forgetPeerQP removes a connection from the index by the peer's queue pair, unless another connection has taken its
// place there.
func (t *Table) forgetPeerQP(c *Conn) {
	if k := (peerKey{c.Remote, idKey{id: c.RemoteQPN}}); t.byPeerQP[k] == c {
		delete(t.byPeerQP, k)
	}
}

// list is a queue of connections.
type list struct {
	first, last *Conn
	n           int
}

// move removes a connection from its list and appends it to another; nil: to none.
func (t *Table) move(c *Conn, to *list) {
	if l := c.list; l != nil {
		if c.prev == nil {
			l.first = c.next
		} else {
			c.prev.next = c.next
		}
		if c.next == nil {
			l.last = c.prev
		} else {
			c.next.prev = c.prev
		}
		l.n--
	}
	c.prev, c.next, c.list = nil, nil, to
	if to == nil {
		return
	}
	if c.prev = to.last; c.prev == nil {
		to.first = c
	} else {
		c.prev.next = c
	}
	to.last = c
	to.n++
}
