package evpn

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/config/oc"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"

	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// session is the speaker's BGP: gobgp, with only the EVPN address family.
type session struct {
	srv  *server.BgpServer
	cfg  Config
	away absent
	// stirred: routes or states have changed since the neighbours were last checked.
	stirred atomic.Bool
	// told and met: the same, since the state of the sessions was last reported; a session has begun or ended.
	told atomic.Bool
	met  chan struct{} // capacity 1
	ctx  context.Context
	stop context.CancelFunc
	done sync.WaitGroup
}

// Timers of gobgp without a configuration key, in seconds: how long it waits before it reconnects. A restarted
// reflector tells others that this host's routes are gone until this host reconnects (RFC 4724 would have it wait; FRR
// does not).
const (
	connectRetry = 2
	idleHold     = 1
)

var family = &api.Family{Afi: api.Family_AFI_L2VPN, Safi: api.Family_SAFI_EVPN}

func newSession(c Config) *session {
	return &session{cfg: c, met: make(chan struct{}, 1), away: absent{until: map[netip.Addr]time.Time{}}}
}

// listen starts BGP without neighbours. take is called with changes of best paths, in order; ended, if not nil, after a
// neighbour has sent all its routes (RFC 4724 section 2). They may wait.
func (b *session) listen(ctx context.Context, take func([]path), ended func(neighbour netip.Addr)) error {
	ctx, b.stop = context.WithCancel(ctx)
	b.ctx = ctx
	b.srv = server.NewBgpServer(server.LoggerOption(slog.New(&logHandler{loggers: newLoggers(b.cfg.Log.Named("bgp"))}),
		nil))
	b.done.Go(b.srv.Serve)
	g := &api.Global{Asn: b.cfg.AS, RouterId: b.cfg.RouterID.String(), ListenPort: -1,
		Families: []uint32{uint32(oc.AFI_SAFI_TYPE_L2VPN_EVPN.ToInt())}}
	if b.cfg.Port != 0 {
		g.ListenPort = int32(b.cfg.Port)
		for _, a := range b.cfg.Listen {
			g.ListenAddresses = append(g.ListenAddresses, a.String())
		}
	}
	if err := b.srv.StartBgp(ctx, &api.StartBgpRequest{Global: g}); err != nil {
		return fmt.Errorf("evpn: %w", err)
	}
	if b.cfg.Port != 0 {
		if err := sendFar(b.cfg.Port); err != nil {
			return fmt.Errorf("evpn: set TTL of answers on port %d: %w", b.cfg.Port, err)
		}
	}
	if err := b.setPolicy(ctx); err != nil {
		return err
	}
	callbacks := server.WatchEventMessageCallbacks{OnPeerUpdate: b.peerChanged,
		OnBestPath: func(paths []*apiutil.Path, _ time.Time) {
			b.stir()
			out := make([]path, len(paths))
			for i, p := range paths {
				out[i] = readPath(p)
			}
			take(out)
		}}
	watch := []server.WatchOption{server.WatchBestPath(false), server.WatchPeer()}
	if ended != nil {
		callbacks.OnPathEor = func(p *apiutil.Path, _ time.Time) { ended(unmap(p.PeerAddress)) }
		watch = append(watch, server.WatchEor(false))
	}
	if err := b.srv.WatchEvent(ctx, callbacks, watch...); err != nil {
		return fmt.Errorf("evpn: %w", err)
	}
	return nil
}

// greet adds the neighbours.
func (b *session) greet() error {
	for i := range b.cfg.Neighbours {
		if err := b.add(b.ctx, &b.cfg.Neighbours[i]); err != nil {
			return fmt.Errorf("evpn: neighbour %v: %w", b.cfg.Neighbours[i].Address, err)
		}
	}
	b.done.Go(func() { b.watchNeighbours(b.ctx) })
	return nil
}

// setPolicy: this host is no router and advertises only its own routes; and no neighbour's preference replaces this
// host's route by another with the same key.
func (b *session) setPolicy(ctx context.Context) error {
	own := &api.Policy{Name: "own", Statements: []*api.Statement{{
		Name: "own", Conditions: &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL},
		Actions: &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_ACCEPT},
	}}}
	equal := &api.Policy{Name: "equal", Statements: []*api.Statement{{
		Name: "equal", Conditions: &api.Conditions{}, Actions: &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_ACCEPT,
			LocalPref: &api.LocalPrefAction{Value: 100}},
	}}}
	for _, x := range []struct {
		policy    *api.Policy
		direction api.PolicyDirection
	}{{own, api.PolicyDirection_POLICY_DIRECTION_EXPORT}, {equal, api.PolicyDirection_POLICY_DIRECTION_IMPORT}} {
		err := b.srv.AddPolicy(ctx, &api.AddPolicyRequest{Policy: x.policy})
		if err == nil {
			err = b.srv.AddPolicyAssignment(ctx, &api.AddPolicyAssignmentRequest{Assignment: &api.PolicyAssignment{
				Name: "global", Direction: x.direction, Policies: []*api.Policy{x.policy},
				DefaultAction: api.RouteAction_ROUTE_ACTION_REJECT,
			}})
		}
		if err != nil {
			return fmt.Errorf("evpn: policy %q: %w", x.policy.Name, err)
		}
	}
	return nil
}

func (b *session) close() {
	if b.srv == nil {
		return
	}
	b.stop()
	b.srv.Stop()
	b.done.Wait()
}

// peer returns gobgp's configuration of a neighbour.
func (c *Config) peer(n *Neighbour) *api.Peer {
	graceful := c.RestartTime > 0
	p := &api.Peer{
		Conf: &api.PeerConf{NeighborAddress: n.Address.String(), PeerAsn: n.AS, AuthPassword: n.Password},
		Timers: &api.Timers{Config: &api.TimersConfig{
			HoldTime: uint64(c.HoldTime / time.Second), KeepaliveInterval: uint64(c.HoldTime / time.Second / 3),
			ConnectRetry: connectRetry, IdleHoldTimeAfterReset: idleHold,
		}},
		Transport: &api.Transport{PassiveMode: n.Passive, RemotePort: uint32(n.Port)},
		AfiSafis: []*api.AfiSafi{{
			Config:            &api.AfiSafiConfig{Family: family, Enabled: true},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: graceful}},
		}},
		GracefulRestart: &api.GracefulRestart{Enabled: graceful, RestartTime: uint32(c.RestartTime / time.Second),
			DeferralTime: 1},
	}
	if n.Local.IsValid() {
		p.Transport.LocalAddress = n.Local.String()
	}
	switch {
	case n.Hops > 0:
		p.TtlSecurity = &api.TtlSecurity{Enabled: true, TtlMin: 256 - uint32(n.Hops)}
	case n.AS != c.AS: // loopback addresses in another AS are more than one hop away
		p.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: 255}
	}
	return p
}

// attrs returns the attributes of one of this host's routes.
func (b *session) attrs(a *advert) (out []bgp.PathAttributeInterface, err error) {
	communities := []bgp.ExtendedCommunityInterface{bgp.NewEncapExtended(bgp.TUNNEL_TYPE_VXLAN)}
	for _, rt := range a.targets {
		communities = append(communities, rt.community())
	}
	if a.mobility != (mobility{}) {
		communities = append(communities, bgp.NewMacMobilityExtended(a.seq, a.sticky))
	}
	out = []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP),
		bgp.NewPathAttributeExtendedCommunities(communities)}
	if a.claim == (claim{}) {
		id, err := bgp.NewIngressReplTunnelID(b.cfg.VTEP)
		if err != nil {
			return nil, err
		}
		out = append(out, bgp.NewPathAttributePmsiTunnel(bgp.PMSI_TUNNEL_TYPE_INGRESS_REPL, false, a.vni, id))
	}
	return out, nil
}

// nlri returns the NLRI of one of this host's routes.
func (b *session) nlri(o *own) (bgp.NLRI, error) {
	rd := bgp.GetRouteDistinguisher(o.rd[:])
	if o.claim == (claim{}) {
		return bgp.NewEVPNMulticastEthernetTagRoute(rd, 0, b.cfg.VTEP)
	}
	return bgp.NewEVPNMacIPAdvertisementRoute(rd, bgp.EthernetSegmentIdentifier{Type: bgp.ESI_ARBITRARY,
		Value: make([]byte, 9)}, 0, o.mac.String(), o.ip, []uint32{o.vni})
}

func (b *session) advertise(a advert) error {
	key, err := b.nlri(&a.own)
	if err != nil {
		return err
	}
	attrs, err := b.attrs(&a)
	if err != nil {
		return err
	}
	reach, err := bgp.NewPathAttributeMpReachNLRI(bgp.RF_EVPN, []bgp.PathNLRI{{NLRI: key}}, b.cfg.VTEP)
	if err != nil {
		return err
	}
	_, err = b.srv.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{{Family: bgp.RF_EVPN, Nlri: key,
		Attrs: append(attrs, reach), Age: b.cfg.Clock().Unix()}}})
	return err
}

func (b *session) withdraw(o own) error {
	key, err := b.nlri(&o)
	if err != nil {
		return err
	}
	return b.srv.DeletePath(apiutil.DeletePathRequest{Paths: []*apiutil.Path{{Family: bgp.RF_EVPN, Nlri: key,
		Withdrawal: true}}})
}

func (b *session) replay(take func(*path)) error { return b.each(take) }

func (b *session) each(f func(*path)) error {
	return b.srv.ListPath(apiutil.ListPathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: bgp.RF_EVPN},
		func(_ bgp.NLRI, paths []*apiutil.Path) {
			for _, p := range paths {
				if p.Best {
					out := readPath(p)
					f(&out)
				}
			}
		})
}

// stir records that routes or states have changed.
func (b *session) stir() {
	b.stirred.Store(true)
	b.told.Store(true)
}

// peerChanged logs the start and end of sessions.
func (b *session) peerChanged(e *apiutil.WatchEventMessage_PeerEvent, _ time.Time) {
	b.stir()
	select {
	case b.met <- struct{}{}:
	default:
	}
	if e.Type != apiutil.PEER_EVENT_STATE {
		return
	}
	p := &e.Peer
	switch {
	case p.State.SessionState == bgp.BGP_FSM_ESTABLISHED:
		b.cfg.Log.Info("BGP session up", "neighbour", p.State.NeighborAddress, "as", p.State.PeerASN)
	case p.State.SessionState == bgp.BGP_FSM_IDLE &&
		p.State.DisconnectReason != api.PeerState_DISCONNECT_REASON_UNSPECIFIED:
		b.cfg.Log.Warn("BGP session down", "neighbour", p.State.NeighborAddress, "why", p.State.DisconnectMessage)
	}
}

// logHandler passes gobgp's log to the daemon's. gobgp's information level becomes debug here.
type logHandler struct {
	*loggers
	args []any
}

// loggers are a limited logger for each neighbour, so that one neighbour's lines do not suppress those about another,
// and one for everything else.
type loggers struct {
	log hclog.Logger

	mu sync.Mutex
	of map[string]hclog.Logger // by gobgp's "Key", the neighbour's address
}

func newLoggers(l hclog.Logger) *loggers { return &loggers{log: l, of: map[string]hclog.Logger{}} }

// about returns the logger for lines about a neighbour; "": none.
func (l *loggers) about(neighbour string) hclog.Logger {
	if neighbour == "" {
		return l.log
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[neighbour] == nil {
		if len(l.of) >= MaxNeighbours { // gobgp names configured ones only
			return l.log
		}
		l.of[neighbour] = loglimit.Another(l.log)
	}
	return l.of[neighbour]
}

// Enabled implements slog.Handler.
func (h *logHandler) Enabled(_ context.Context, l slog.Level) bool {
	switch {
	case l < slog.LevelInfo:
		return h.log.IsTrace()
	case l < slog.LevelWarn:
		return h.log.IsDebug()
	}
	return h.log.IsWarn()
}

// Handle implements slog.Handler.
func (h *logHandler) Handle(_ context.Context, r slog.Record) error {
	args := append([]any{}, h.args...)
	r.Attrs(func(a slog.Attr) bool {
		args = append(args, strings.ToLower(a.Key), a.Value.String())
		return true
	})
	neighbour := ""
	for i := 0; i+1 < len(args); i += 2 {
		if args[i] == "key" {
			neighbour, _ = args[i+1].(string)
		}
	}
	log := h.about(neighbour)
	switch {
	case r.Level < slog.LevelInfo:
		log.Trace(r.Message, args...)
	case r.Level < slog.LevelWarn:
		log.Debug(r.Message, args...)
	default:
		log.Warn(r.Message, args...)
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	n := &logHandler{loggers: h.loggers, args: append([]any{}, h.args...)}
	for _, a := range attrs {
		n.args = append(n.args, strings.ToLower(a.Key), a.Value.String())
	}
	return n
}

// WithGroup implements slog.Handler.
func (h *logHandler) WithGroup(string) slog.Handler { return h }
