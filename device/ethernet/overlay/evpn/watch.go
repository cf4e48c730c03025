package evpn

import (
	"cmp"
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/osrg/gobgp/v4/api"
)

// The neighbours are checked every watchEvery, for what gobgp leaves to its user:
//   - a neighbour that sends more routes than its limit is removed with its routes, and added again after
//     Config.LimitIdle (RFC 4486). gobgp's own limit counts all routes for each UPDATE, keeps the neighbour down for
//     ever, and with graceful restart keeps its routes for the restart time;
//   - if two speakers connect to each other at the same moment, each may keep the connection that the other closes
//     (RFC 4271 section 6.8), and no timer ends that. A session whose OPEN or KEEPALIVE has not arrived after
//     handshakeTime is restarted;
//   - gobgp first sends a neighbour all routes, and only then starts to send changes: changes in between would be
//     lost. So each new session gets all routes once more;
//   - what ends the goroutine that sends for a session may be left in its queue, and then ends that of the next
//     session: nothing is sent in it, until the neighbour's hold time ends it (gobgp 4.8). So a session in which none
//     of these routes is sent within muteTime is restarted, with a new queue.
//
// A check counts all routes. Without events it is done only every watchQuiet: routes that can never be best, such as
// those whose path has this AS, are kept and count, but cause no event.
const (
	watchEvery    = time.Second
	watchQuiet    = 3 * time.Second
	handshakeTime = 10 * time.Second
	muteTime      = 5 * time.Second
)

// doubt is a session that was told all routes, of which nothing has been seen to be sent yet.
type doubt struct {
	since time.Time
	sent  uint64 // messages before
}

// judge reports whether the session is not in doubt any more, and whether it is mute. Without routes to send none is.
func (d doubt) judge(now time.Time, sent, advertised uint64) (over, mute bool) {
	switch {
	case sent > d.sent:
		return true, false
	case now.Sub(d.since) < muteTime:
		return false, false
	}
	return true, advertised > 0
}

// due reports whether a doubt is old enough to be judged, for which what is advertised must be counted.
func due(doubts map[netip.Addr]doubt, now time.Time) bool {
	for _, d := range doubts {
		if now.Sub(d.since) >= muteTime {
			return true
		}
	}
	return false
}

// absent has the neighbours that are kept away, with the end of that time.
type absent struct {
	mu    sync.Mutex
	until map[netip.Addr]time.Time
}

func (x *absent) get(a netip.Addr) (until time.Time, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	until, ok = x.until[a]
	return until, ok
}

func (x *absent) set(a netip.Addr, until time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if until.IsZero() {
		delete(x.until, a)
		return
	}
	x.until[a] = until
}

func (x *absent) any() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.until) > 0
}

// watchNeighbours runs until ctx ends.
func (b *session) watchNeighbours(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	greeting := map[netip.Addr]time.Time{} // start of sessions that are connected, but without a KEEPALIVE yet
	told := map[netip.Addr]time.Time{}     // start of the session that got all routes once more
	doubts := map[netip.Addr]doubt{}
	fresh := map[netip.Addr]bool{} // their queue has no past: if nothing is sent, it is the neighbour that does not read
	for quiet := time.Duration(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if quiet += watchEvery; !b.stirred.Swap(false) && len(greeting)+len(doubts) == 0 && !b.away.any() &&
			quiet < watchQuiet {
			continue
		}
		quiet = 0
		now := b.cfg.Clock()
		peers := map[netip.Addr]*api.Peer{}
		_ = b.srv.ListPeer(ctx, &api.ListPeerRequest{EnableAdvertised: due(doubts, now)}, func(p *api.Peer) {
			if a, err := netip.ParseAddr(p.GetState().GetNeighborAddress()); err == nil {
				peers[a] = p
			}
		})
		for i := range b.cfg.Neighbours {
			n := &b.cfg.Neighbours[i]
			p := peers[n.Address]
			state, begun := p.GetState().GetSessionState(), p.GetTimers().GetState().GetUptime().AsTime()
			since, greets := greeting[n.Address]
			delete(greeting, n.Address)
			doubted, doubtful := doubts[n.Address]
			delete(doubts, n.Address)
			switch until, away := b.away.get(n.Address); {
			case away && now.Before(until):
			case away:
				b.away.set(n.Address, time.Time{})
				b.again(ctx, n, "BGP neighbour accepted again")
			case p == nil:
			case received(p) > uint64(n.limit()):
				b.cfg.Log.Error("BGP session ended: neighbour exceeds its route limit", "neighbour", n.Address, "limit", n.limit(),
					"stays-away", b.cfg.LimitIdle)
				b.away.set(n.Address, now.Add(b.cfg.LimitIdle))
				b.remove(ctx, n)
			case state == api.PeerState_SESSION_STATE_ESTABLISHED && told[n.Address] != begun:
				told[n.Address] = begun
				if !fresh[n.Address] {
					doubts[n.Address] = doubt{now, sent(p)}
				}
				delete(fresh, n.Address)
				// It cannot fail: the neighbour is configured.
				_ = b.srv.ResetPeer(ctx, &api.ResetPeerRequest{Address: n.Address.String(), Soft: true,
					Direction: api.ResetPeerRequest_DIRECTION_OUT})
			case state == api.PeerState_SESSION_STATE_ESTABLISHED && doubtful:
				switch over, mute := doubted.judge(now, sent(p), advertised(p)); {
				case !over:
					doubts[n.Address] = doubted
				case mute:
					b.remove(ctx, n)
					b.again(ctx, n, "BGP session restarted: nothing was sent in it")
					fresh[n.Address] = true
				}
			case state != api.PeerState_SESSION_STATE_OPENSENT && state != api.PeerState_SESSION_STATE_OPENCONFIRM:
			case !greets:
				greeting[n.Address] = now
			case now.Sub(since) < handshakeTime:
				greeting[n.Address] = since
			default:
				b.remove(ctx, n)
				b.again(ctx, n, "BGP session restarted: not established in time after connecting")
			}
		}
	}
}

func (b *session) add(ctx context.Context, n *Neighbour) error {
	return b.srv.AddPeer(ctx, &api.AddPeerRequest{Peer: b.cfg.peer(n)})
}

func (b *session) again(ctx context.Context, n *Neighbour, why string) {
	if err := b.add(ctx, n); err != nil {
		b.cfg.Log.Error("BGP session cannot be restarted", "neighbour", n.Address, "error", err)
		return
	}
	b.cfg.Log.Info(why, "neighbour", n.Address)
}

// remove removes a neighbour and its routes.
func (b *session) remove(ctx context.Context, n *Neighbour) {
	_ = b.srv.DeletePeer(ctx, &api.DeletePeerRequest{Address: n.Address.String()}) // cannot fail: it is configured
}

func (n *Neighbour) limit() int { return cmp.Or(n.MaxRoutes, DefaultMaxRoutes) }

// sent returns the number of messages that a neighbour was sent, in all sessions.
func sent(p *api.Peer) uint64 { return p.GetState().GetMessages().GetSent().GetTotal() }

// advertised returns the number of routes that a neighbour should have, if ListPeer was asked for it.
func advertised(p *api.Peer) (n uint64) {
	for _, f := range p.GetAfiSafis() {
		n += f.GetState().GetAdvertised()
	}
	return n
}

// received returns the number of a neighbour's routes that gobgp keeps.
func received(p *api.Peer) (n uint64) {
	for _, f := range p.GetAfiSafis() {
		n += f.GetState().GetReceived()
	}
	return n
}
