package vswitch

import (
	"cmp"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/frame/header"
)

// The table of multicast groups (RFC 4541). Loops read it without locks: maps and slices in it are immutable and are
// replaced, times in it are atomic. What loops learn from messages they put into a queue, and a goroutine that runs
// while the queue is not empty updates the table, so that no loop waits or copies maps.
//
// Whatever cannot be recorded, because a limit is reached or the queue is full, makes its port take all multicast
// frames for a membership interval: a full table costs traffic, never a member its frames.

// Bounds of a network's table.
const (
	MaxMembers       = 8192           // memberships: a port, or a peer of a tunnel, in a group
	maxTunnelMembers = MaxMembers / 2 // those of tunnels together
	maxPortMembers   = 256            // of a port with MACs of its own
	maxPlaceMembers  = 1024           // of another port, or of a peer
	maxZones         = 64             // VLANs, for each IP version, that have a querier or router
	maxRouters       = 16             // of a zone
	maxEvents        = 1024           // that wait for the goroutine
	groupShards      = 64
)

// Limits of records of membership messages, for each port or peer.
const (
	recordRate  = 500 // per second
	recordBurst = 1024
)

// Bounds of the timers that queries may set. Queries beyond them do not make their sender the querier: hosts would
// answer so late, or be asked so seldom, that memberships could end before.
const (
	maxResponse  = 30 * time.Second
	maxInterval  = 600 * time.Second
	maxHold      = 3600 * time.Second
	leastMembers = header.DefaultRobustness*header.DefaultQueryInterval + header.DefaultQueryResponse
)

// spot is where members or routers are: a port, for tunnels also a peer.
type spot struct {
	att    *Attachment
	remote Remote
}

// member is a spot in a group, or with a router, until some second.
type member struct {
	spot
	until atomic.Uint32
}

func (m *member) alive(now uint32) bool { return int32(m.until.Load()-now) > 0 }

// extend moves the end of a membership; never to an earlier second.
func (m *member) extend(until uint32) {
	if int32(until-m.until.Load()) > 0 {
		m.until.Store(until)
	}
}

func (m *member) destination() Destination {
	if m.att.cfg.Kind == KindVTEP {
		return Destination{Remote: m.remote}
	}
	return Destination{Flood: true}
}

type groupKey struct {
	addr ip
	vlan uint16
}

type groupMap map[groupKey][]*member

// zone is a VLAN and IP version: queriers, and so the use of the table, are particular to it.
type zone struct {
	// state holds two seconds: from the upper one on the hosts have answered the querier, and the table is used; from
	// the lower one on the querier is gone.
	state    atomic.Uint64
	lifetime atomic.Uint32 // of memberships, seconds
	routers  atomic.Pointer[[]*member]

	querier ip // guarded by snooper.mu, as are the fields below
	at      spot
	heard   uint32 // until when it counts as present
}

type zoneKey struct {
	vlan uint16
	v6   bool
}

func newZone() *zone {
	z := &zone{}
	z.lifetime.Store(seconds(leastMembers))
	z.routers.Store(&[]*member{})
	return z
}

// seconds rounds up.
func seconds(d time.Duration) uint32 { return uint32((d + time.Second - 1) / time.Second) }

// asked reports whether a querier is present.
func (z *zone) asked(now uint32) bool {
	s := z.state.Load()
	return s != 0 && int32(uint32(s)-now) > 0
}

// active reports whether the hosts have answered a querier that is present.
func (z *zone) active(now uint32) bool {
	return z.asked(now) && int32(now-uint32(z.state.Load()>>32)) >= 0
}

// stateTries bounds the retries while other loops receive queries, too.
const stateTries = 16

// timers are what a query sets, in seconds.
type timers struct {
	response uint32 // until all hosts have answered
	present  uint32 // until the querier counts as gone (RFC 3376, 8.5)
	lifetime uint32 // of memberships (RFC 3376, 8.4), not less than with the protocol's defaults
}

func timersOf(m *header.Membership) timers {
	period := time.Duration(m.Robustness) * m.Interval
	return timers{response: seconds(m.Response) + 1, present: seconds(period + m.Response/2),
		lifetime: seconds(max(leastMembers, period+m.Response))}
}

// query records a general query that all hosts receive.
func (z *zone) query(now uint32, t *timers) {
	z.lifetime.Store(t.lifetime)
	for range stateTries {
		old := z.state.Load()
		from := uint32(old >> 32)
		if old == 0 || int32(uint32(old)-now) <= 0 {
			from = now + t.response
		}
		if z.state.CompareAndSwap(old, uint64(from)<<32|uint64(now+t.present)) {
			return
		}
	}
}

type eventKind uint8

const (
	eventJoin eventKind = iota
	eventLeave
	eventQuery
	eventRouter
)

// event is what a loop has learnt.
type event struct {
	kind  eventKind
	spot  spot
	zone  zoneKey
	addr  ip     // the group; of a query its source
	now   uint32 // second
	until uint32 // of queriers and routers
	elect bool   // the query is a general one within the bounds; timers are its
	timers
}

// snooper is a network's table of groups.
type snooper struct {
	net     *Network
	seed    maphash.Seed
	shards  [groupShards]atomic.Pointer[groupMap]
	zones   atomic.Pointer[map[zoneKey]*zone]
	refused atomic.Uint64 // memberships and routers that could not be recorded
	all     atomic.Uint32 // second until which a port may take all frames

	busy    atomic.Bool // guards events, for some nanoseconds
	events  []event
	running atomic.Bool

	mu     sync.Mutex // the fields below, and the writers of shards and zones
	spare  []event
	held   map[spot]int
	count  int
	tunnel int    // memberships of tunnels
	swept  uint32 // second of the last sweep
}

func newSnooper(n *Network) *snooper {
	s := &snooper{net: n, seed: maphash.MakeSeed(), held: map[spot]int{},
		events: make([]event, 0, maxEvents), spare: make([]event, 0, maxEvents)}
	for i := range s.shards {
		s.shards[i].Store(&groupMap{})
	}
	// These two always exist, so that no other VLANs can take their places.
	s.zones.Store(&map[zoneKey]*zone{{}: newZone(), {v6: true}: newZone()})
	return s
}

// SetSnooping turns multicast snooping on or off. Turning it off forgets all groups.
func (n *Network) SetSnooping(on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case !on:
		n.snooping.Store(nil)
	case n.snooping.Load() == nil:
		n.snooping.Store(newSnooper(n))
	}
}

func (s *snooper) shard(k *groupKey) *atomic.Pointer[groupMap] {
	return &s.shards[maphash.Comparable(s.seed, *k)%groupShards]
}

func (s *snooper) zone(k zoneKey) *zone { return (*s.zones.Load())[k] }

// members returns the members of a group, ended memberships included.
func (s *snooper) members(k *groupKey) []*member { return (*s.shard(k).Load())[*k] }

// lifetime returns how long a port whose memberships are not known takes all frames: the longest of all zones, because
// within it the port's hosts have been asked at least once.
func (s *snooper) lifetime() (t uint32) {
	t = seconds(leastMembers)
	for _, z := range *s.zones.Load() {
		t = max(t, z.lifetime.Load())
	}
	return t
}

// takeAll lets a port take all multicast frames for a membership interval.
func (s *snooper) takeAll(a *Attachment, now uint32) {
	until := now + s.lifetime()
	raise(&s.all, until) // first: a loop that sees the port's time sees this one
	raise(&a.allUntil, until)
}

// refuse is takeAll for something that could not be recorded.
func (s *snooper) refuse(a *Attachment, now uint32, n int) {
	s.refused.Add(uint64(n))
	s.takeAll(a, now)
}

// raise moves a time to a later second, unless other loops do so all the time.
func raise(t *atomic.Uint32, until uint32) {
	for range stateTries {
		old := t.Load()
		if old != 0 && int32(until-old) <= 0 || t.CompareAndSwap(old, until) {
			return
		}
	}
}

func (a *Attachment) takesAll(now uint32) bool {
	u := a.allUntil.Load()
	return u != 0 && int32(u-now) > 0
}

// lockTries bounds a loop's attempts to get the queue.
const lockTries = 64

// put queues an event. It does not wait: an event for which there is no room makes its port take all frames.
func (s *snooper) put(e event) {
	for range lockTries {
		if !s.busy.CompareAndSwap(false, true) {
			continue
		}
		room := len(s.events) < maxEvents
		if room {
			s.events = append(s.events, e)
		}
		s.busy.Store(false)
		if !room {
			break
		}
		return
	}
	s.refuse(e.spot.att, e.now, 1)
}

// wake starts the goroutine, unless it runs.
func (s *snooper) wake() {
	if s.running.CompareAndSwap(false, true) {
		go s.run()
	}
}

func (s *snooper) run() {
	for {
		s.settle()
		s.running.Store(false)
		if !s.pending() || !s.running.CompareAndSwap(false, true) {
			return
		}
	}
}

// lockQueue is for the control plane.
func (s *snooper) lockQueue() {
	for !s.busy.CompareAndSwap(false, true) {
		time.Sleep(time.Microsecond)
	}
}

func (s *snooper) pending() bool {
	s.lockQueue()
	defer s.busy.Store(false)
	return len(s.events) > 0
}

// settle applies all events queued before.
func (s *snooper) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleLocked()
}

func (s *snooper) settleLocked() {
	s.lockQueue()
	todo := s.events
	s.events = s.spare[:0]
	s.busy.Store(false)
	for i := range todo {
		s.apply(&todo[i])
	}
	clear(todo) // no pointers to ports
	s.spare = todo[:0]
}

func (s *snooper) apply(e *event) {
	if e.spot.att.closed.Load() {
		return
	}
	switch e.kind {
	case eventJoin:
		s.join(e)
	case eventLeave:
		// A port with MACs of its own is one host, which alone knows of its members. Elsewhere others may be left; those
		// memberships end when nobody reports them.
		if k := (groupKey{e.addr, e.zone.vlan}); e.spot.att.keys != nil {
			s.replace(&k, func(m *member) bool { return m.spot == e.spot })
		}
	case eventQuery, eventRouter:
		s.router(e)
	}
}

func (s *snooper) join(e *event) {
	k := groupKey{e.addr, e.zone.vlan}
	until := e.now + seconds(leastMembers)
	if z := s.zone(e.zone); z != nil {
		until = e.now + z.lifetime.Load()
	}
	for _, m := range s.members(&k) {
		if m.spot == e.spot {
			m.extend(until)
			return
		}
	}
	if !s.room(e.spot) && (!s.sweep(e.now) || !s.room(e.spot)) {
		s.refuse(e.spot.att, e.now, 1)
		return
	}
	m := &member{spot: e.spot}
	m.until.Store(until)
	p := s.shard(&k)
	next := maps.Clone(*p.Load())
	next[k] = append(slices.Clone(next[k]), m)
	p.Store(&next)
	s.account(e.spot, 1)
}

func (s *snooper) room(p spot) bool {
	limit, tunnel := maxPlaceMembers, p.att.cfg.Kind == KindVTEP
	if p.att.keys != nil {
		limit = maxPortMembers
	}
	return s.count < MaxMembers && s.held[p] < limit && (!tunnel || s.tunnel < maxTunnelMembers)
}

func (s *snooper) account(p spot, n int) {
	s.count += n
	if p.att.cfg.Kind == KindVTEP {
		s.tunnel += n
	}
	if s.held[p] += n; s.held[p] == 0 {
		delete(s.held, p)
	}
}

// replace removes the matching members of a group.
func (s *snooper) replace(k *groupKey, gone func(*member) bool) {
	p := s.shard(k)
	old := (*p.Load())[*k]
	if !slices.ContainsFunc(old, gone) {
		return
	}
	next := maps.Clone(*p.Load())
	s.keep(next, *k, gone)
	p.Store(&next)
}

// keep removes the matching members of a group from a map that is not published yet.
func (s *snooper) keep(in groupMap, k groupKey, gone func(*member) bool) {
	left := slices.DeleteFunc(slices.Clone(in[k]), func(m *member) bool {
		if !gone(m) {
			return false
		}
		s.account(m.spot, -1)
		return true
	})
	if len(left) == 0 {
		delete(in, k)
		return
	}
	in[k] = left
}

// remove removes all matching members and routers.
func (s *snooper) remove(gone func(*member) bool) {
	for i := range s.shards {
		next := maps.Clone(*s.shards[i].Load())
		for k := range next {
			s.keep(next, k, gone)
		}
		s.shards[i].Store(&next)
	}
	for _, z := range *s.zones.Load() {
		left := slices.DeleteFunc(slices.Clone(*z.routers.Load()), gone)
		z.routers.Store(&left)
	}
}

// sweep removes ended memberships, at most once per second. It returns false if it has not looked.
func (s *snooper) sweep(now uint32) bool {
	if s.swept == now {
		return false
	}
	s.swept = now
	s.remove(func(m *member) bool { return !m.alive(now) })
	return true
}

// router records the port of a query or a PIM hello.
func (s *snooper) router(e *event) {
	z := s.openZone(e.zone, e.now)
	if z == nil {
		s.refuse(e.spot.att, e.now, 1)
		return
	}
	if e.elect && !z.asked(e.now) { // a zone that the query has opened
		z.query(e.now, &e.timers)
	}
	if e.elect && (int32(z.heard-e.now) <= 0 || lowerQuerier(&e.addr, &z.querier)) {
		z.querier, z.at, z.heard = e.addr, e.spot, e.until
	}
	rs := *z.routers.Load()
	for _, m := range rs {
		if m.spot == e.spot {
			m.extend(e.until)
			return
		}
	}
	if int32(e.until-e.now) <= 0 { // a goodbye
		return
	}
	rs = slices.DeleteFunc(slices.Clone(rs), func(m *member) bool { return !m.alive(e.now) })
	if len(rs) >= maxRouters {
		s.refuse(e.spot.att, e.now, 1)
		return
	}
	m := &member{spot: e.spot}
	m.until.Store(e.until)
	rs = append(rs, m)
	z.routers.Store(&rs)
}

// lowerQuerier reports whether a query from a is from the querier, if one from b was: the lowest address wins, and
// 0.0.0.0 takes no part (RFC 4541, 2.1.1).
func lowerQuerier(a, b *ip) bool {
	none := header.Mapped4([4]byte{})
	switch {
	case *a == none:
		return *b == none
	case *b == none:
		return true
	}
	return slices.Compare(a[:], b[:]) <= 0
}

// openZone returns a zone, made if there is room, or nil.
func (s *snooper) openZone(k zoneKey, now uint32) *zone {
	old := *s.zones.Load()
	if z := old[k]; z != nil {
		return z
	}
	next := maps.Clone(old)
	if len(next) >= maxZones {
		maps.DeleteFunc(next, func(k zoneKey, z *zone) bool {
			return k.vlan != 0 && !z.asked(now) &&
				!slices.ContainsFunc(*z.routers.Load(), func(m *member) bool { return m.alive(now) })
		})
	}
	if len(next) >= maxZones {
		return nil
	}
	z := newZone()
	next[k] = z
	s.zones.Store(&next)
	return z
}

// attached prepares the table for a new port: its hosts may be members since before, as those of a VM that has come
// from another host, and are asked only with the next query.
func (n *Network) attached(a *Attachment) {
	if s := n.snooping.Load(); s != nil {
		s.takeAll(a, n.seconds())
	}
}

// relocated is called when a known address has moved to a port: its host's memberships are not known there yet.
func (n *Network) relocated(a *Attachment, now uint32) {
	if s := n.snooping.Load(); s != nil {
		s.takeAll(a, now)
	}
}

// forgetPort removes a closed port from the table. If it is not a tunnel, its host may go on behind one.
func (n *Network) forgetPort(a *Attachment) {
	s := n.snooping.Load()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleLocked()
	s.remove(func(m *member) bool { return m.att == a })
	s.forgetQueriers(func(p spot) bool { return p.att == a })
	if a.cfg.Kind == KindVTEP {
		return
	}
	for _, x := range n.table.Load().flood {
		if x.cfg.Kind == KindVTEP {
			s.takeAll(x, n.seconds())
		}
	}
}

// forgetPeer removes a tunnel's peer from the table. Its hosts may go on behind another.
func (n *Network) forgetPeer(a *Attachment, r Remote) {
	s := n.snooping.Load()
	if s == nil {
		return
	}
	p := spot{a, r}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleLocked()
	s.remove(func(m *member) bool { return m.spot == p })
	s.forgetQueriers(func(x spot) bool { return x == p })
	s.takeAll(a, n.seconds())
}

// forgetQueriers drops the references to places that are gone; the queriers' times go on.
func (s *snooper) forgetQueriers(gone func(spot) bool) {
	for _, z := range *s.zones.Load() {
		if z.at.att != nil && gone(z.at) {
			z.at, z.heard = spot{}, 0
		}
	}
}

// MulticastStatus is a snapshot of a network's multicast snooping.
type MulticastStatus struct {
	Groups  int `json:"groups"`
	Members int `json:"members"` // of all groups
	// Refused counts joins and routers beyond a limit: their ports take all multicast frames for a while.
	Refused  uint64          `json:"refused"`
	Queriers []QuerierStatus `json:"queriers"`
	List     []GroupStatus   `json:"list"`
}

// QuerierStatus is the querier of a VLAN and IP version.
type QuerierStatus struct {
	VLAN    uint16     `json:"vlan,omitempty"`
	Family  string     `json:"family"` // igmp or mld
	Address netip.Addr `json:"address"`
	Place
	// Active is false until the hosts have had the time to answer, and everything is flooded until then.
	Active  bool    `json:"active"`
	Routers []Place `json:"routers,omitempty"`
}

// Place is a port, and for tunnels a peer.
type Place struct {
	Port   string `json:"port"`
	Remote Remote `json:"remote,omitempty"`
}

// GroupStatus is one group.
type GroupStatus struct {
	Group   netip.Addr `json:"group"`
	VLAN    uint16     `json:"vlan,omitempty"`
	Members []Place    `json:"members"`
}

func (p spot) place() Place {
	if p.att == nil {
		return Place{}
	}
	return Place{Port: p.att.cfg.Name, Remote: p.remote}
}

func places(ms []*member, now uint32) (out []Place) {
	for _, m := range ms {
		if m.alive(now) {
			out = append(out, m.place())
		}
	}
	slices.SortFunc(out, func(a, b Place) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Remote, b.Remote))
	})
	return out
}

// Multicast returns a snapshot of the multicast groups, nil without snooping.
func (n *Network) Multicast() *MulticastStatus {
	s := n.snooping.Load()
	if s == nil {
		return nil
	}
	now := n.seconds()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleLocked()
	out := &MulticastStatus{Refused: s.refused.Load()}
	for k, z := range *s.zones.Load() {
		q := QuerierStatus{VLAN: k.vlan, Family: "igmp", Active: z.active(now), Routers: places(*z.routers.Load(), now)}
		if k.v6 {
			q.Family = "mld"
		}
		if int32(z.heard-now) > 0 {
			q.Address, q.Place = netip.AddrFrom16(z.querier).Unmap(), z.at.place()
		}
		if z.asked(now) || len(q.Routers) > 0 {
			out.Queriers = append(out.Queriers, q)
		}
	}
	slices.SortFunc(out.Queriers, func(a, b QuerierStatus) int {
		return cmp.Or(cmp.Compare(a.VLAN, b.VLAN), cmp.Compare(a.Family, b.Family))
	})
	for i := range s.shards {
		for k, ms := range *s.shards[i].Load() {
			if list := places(ms, now); len(list) > 0 {
				out.Members += len(list)
				out.List = append(out.List, GroupStatus{Group: netip.AddrFrom16(k.addr).Unmap(), VLAN: k.vlan, Members: list})
			}
		}
	}
	out.Groups = len(out.List)
	slices.SortFunc(out.List, func(a, b GroupStatus) int {
		return cmp.Or(cmp.Compare(a.VLAN, b.VLAN), a.Group.Compare(b.Group))
	})
	return out
}
