package evpn

import (
	"cmp"
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/osrg/gobgp/v4/api"
)

// Neighbours are looked at once in watchEvery, for what gobgp leaves to its user:
//   - one that sends more routes than its limit is taken out, its routes with it, and let in again after
//     Config.LimitIdle (RFC 4486). gobgp's own limit counts all routes for each UPDATE, keeps the neighbour down for
//     ever, and with graceful restart its routes for the restart time;
//   - of two that connect to each other at the same moment, each may keep the connection that the other gives up (RFC
//     4271 section 6.8), and no timer ends that. A session whose OPEN or KEEPALIVE has not come after handshakeTime
//     begins anew;
//   - it tells a neighbour all, and only then begins to tell it of changes: what becomes a route in between would be
//     kept from it. Each session is told all once more when it is up.
//
// Looking counts all routes. While nothing is heard of any it is done once in watchQuiet: routes that cannot be
// anybody's best, such as those that have been through this AS, are kept and count, but are not heard of.
const (
	watchEvery    = time.Second
	watchQuiet    = 3 * time.Second
	handshakeTime = 10 * time.Second
)

// absent are the neighbours that are kept away, and until when.
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
	greeting := map[netip.Addr]time.Time{} // since when a session is between its connection and its first KEEPALIVE
	told := map[netip.Addr]time.Time{}     // the beginning of the session that all was told again
	for quiet := time.Duration(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if quiet += watchEvery; !b.stirred.Swap(false) && len(greeting) == 0 && !b.away.any() && quiet < watchQuiet {
			continue
		}
		quiet = 0
		now := b.s.clock()
		peers := map[netip.Addr]*api.Peer{}
		_ = b.srv.ListPeer(ctx, &api.ListPeerRequest{}, func(p *api.Peer) {
			if a, err := netip.ParseAddr(p.GetState().GetNeighborAddress()); err == nil {
				peers[a] = p
			}
		})
		for i := range b.s.cfg.Neighbours {
			n := &b.s.cfg.Neighbours[i]
			p := peers[n.Address]
			state, begun := p.GetState().GetSessionState(), p.GetTimers().GetState().GetUptime().AsTime()
			since, greets := greeting[n.Address]
			delete(greeting, n.Address)
			switch until, away := b.away.get(n.Address); {
			case away && now.Before(until):
			case away:
				b.away.set(n.Address, time.Time{})
				b.again(ctx, n, "BGP neighbour may come back")
			case p == nil:
			case received(p) > uint64(n.limit()):
				b.s.log.Error("BGP session ended: neighbour exceeds its route limit", "neighbour", n.Address, "limit", n.limit(),
					"stays-away", b.s.cfg.LimitIdle)
				b.away.set(n.Address, now.Add(b.s.cfg.LimitIdle))
				b.remove(ctx, n)
			case state == api.PeerState_SESSION_STATE_ESTABLISHED && told[n.Address] != begun:
				told[n.Address] = begun
				// it is there
				_ = b.srv.ResetPeer(ctx, &api.ResetPeerRequest{Address: n.Address.String(), Soft: true,
					Direction: api.ResetPeerRequest_DIRECTION_OUT})
			case state != api.PeerState_SESSION_STATE_OPENSENT && state != api.PeerState_SESSION_STATE_OPENCONFIRM:
			case !greets:
				greeting[n.Address] = now
			case now.Sub(since) < handshakeTime:
				greeting[n.Address] = since
			default:
				b.remove(ctx, n)
				b.again(ctx, n, "BGP session begins anew: it was not up in time after its connection")
			}
		}
	}
}

func (b *session) add(ctx context.Context, n *Neighbour) error {
	return b.srv.AddPeer(ctx, &api.AddPeerRequest{Peer: b.s.peer(n)})
}

func (b *session) again(ctx context.Context, n *Neighbour, why string) {
	if err := b.add(ctx, n); err != nil {
		b.s.log.Error("BGP session cannot be restarted", "neighbour", n.Address, "error", err)
		return
	}
	b.s.log.Info(why, "neighbour", n.Address)
}

// remove takes a neighbour out, and all that it has told.
func (b *session) remove(ctx context.Context, n *Neighbour) {
	_ = b.srv.DeletePeer(ctx, &api.DeletePeerRequest{Address: n.Address.String()}) // it is there
}

func (n *Neighbour) limit() int { return cmp.Or(n.MaxRoutes, DefaultMaxRoutes) }

// received is how many routes of a neighbour gobgp keeps.
func received(p *api.Peer) (n uint64) {
	for _, f := range p.GetAfiSafis() {
		n += f.GetState().GetReceived()
	}
	return n
}
