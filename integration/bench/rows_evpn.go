package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"

	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/lab"
)

// A data centre as its route reflector announces it: each host is a VTEP of one network and has a number of MACs, each
// with an IP address.
const (
	evpnHosts    = 1000
	evpnPerHost  = 100
	evpnNetworks = 10
	evpnMoves    = 10000
	evpnAS       = 65001
	evpnFirstVNI = 100
)

// reflector is the peer of a BGP session. Its messages are encoded in advance.
type reflector struct {
	conn net.Conn
	done chan struct{}
}

func vni(host int) uint32 { return evpnFirstVNI + uint32(host%evpnNetworks) }

func evpnVTEP(host int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 1, byte(host >> 8), byte(host)})
}

// evpnUpdate encodes one UPDATE: MACs first..first+n-1 at a host or, without MACs, that the host serves its network.
// gone withdraws them.
func evpnUpdate(host, first, n int, seq uint32, gone bool) ([]byte, error) {
	at := evpnVTEP(host)
	rd, err := bgp.ParseRouteDistinguisher(fmt.Sprintf("%v:%d", at, vni(host)))
	if err != nil {
		return nil, err
	}
	var nlris []bgp.PathNLRI
	add := func(x bgp.NLRI, err error) error {
		nlris = append(nlris, bgp.PathNLRI{NLRI: x})
		return err
	}
	for i := first; i < first+n && err == nil; i++ {
		mac := fmt.Sprintf("02:00:00:%02x:%02x:%02x", i>>16, i>>8&0xff, i&0xff)
		esi := bgp.EthernetSegmentIdentifier{Type: bgp.ESI_ARBITRARY, Value: make([]byte, 9)}
		err = add(bgp.NewEVPNMacIPAdvertisementRoute(rd, esi, 0, mac,
			netip.AddrFrom4([4]byte{10, byte(2 + i>>16), byte(i >> 8), byte(i)}), []uint32{vni(host)}))
	}
	if n == 0 {
		err = add(bgp.NewEVPNMulticastEthernetTagRoute(rd, 0, at))
	}
	if err != nil {
		return nil, err
	}
	if gone {
		attr, err := bgp.NewPathAttributeMpUnreachNLRI(bgp.RF_EVPN, nlris)
		if err != nil {
			return nil, err
		}
		return bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{attr}, nil).Serialize()
	}
	rt, err := bgp.ParseRouteTarget(fmt.Sprintf("%d:%d", evpnAS, vni(host)))
	if err != nil {
		return nil, err
	}
	communities := []bgp.ExtendedCommunityInterface{bgp.NewEncapExtended(bgp.TUNNEL_TYPE_VXLAN), rt}
	if seq > 0 {
		communities = append(communities, bgp.NewMacMobilityExtended(seq, false))
	}
	reach, err := bgp.NewPathAttributeMpReachNLRI(bgp.RF_EVPN, nlris, at)
	if err != nil {
		return nil, err
	}
	attrs := []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP), bgp.NewPathAttributeAsPath(nil),
		bgp.NewPathAttributeLocalPref(100), reach, bgp.NewPathAttributeExtendedCommunities(communities),
	}
	if n == 0 {
		id, err := bgp.NewIngressReplTunnelID(at)
		if err != nil {
			return nil, err
		}
		attrs = append(attrs, bgp.NewPathAttributePmsiTunnel(bgp.PMSI_TUNNEL_TYPE_INGRESS_REPL, false, vni(host), id))
	}
	return bgp.NewBGPUpdateMessage(nil, attrs, nil).Serialize()
}

// evpnScript holds the UPDATEs that the reflector sends in each round, and their withdrawal.
type evpnScript struct{ full, moves, gone []byte }

func newEVPNScript() (*evpnScript, error) {
	s := &evpnScript{}
	var err error
	say := func(to *[]byte, host, first, n int, seq uint32, gone bool) {
		b, e := evpnUpdate(host, first, n, seq, gone)
		*to, err = append(*to, b...), errors.Join(err, e)
	}
	for h := range evpnHosts {
		say(&s.full, h, 0, 0, 0, false)
		say(&s.full, h, h*evpnPerHost, evpnPerHost, 0, false)
		say(&s.gone, h, h*evpnPerHost, evpnPerHost, 0, true)
		say(&s.gone, h, 0, 0, 0, true)
	}
	// MACs move one by one: another host of the network announces the MAC with the next sequence number, and the old
	// route is withdrawn.
	for i := range evpnMoves {
		mac := i * evpnHosts * evpnPerHost / evpnMoves
		old := mac / evpnPerHost
		to := (old + evpnNetworks) % evpnHosts
		say(&s.moves, to, mac, 1, 1, false)
		say(&s.moves, old, mac, 1, 0, true)
		say(&s.gone, to, mac, 1, 0, true)
	}
	// This UPDATE comes last: once it is in effect, so are all before it.
	say(&s.moves, 0, evpnHosts*evpnPerHost, 1, 0, false)
	say(&s.gone, 0, evpnHosts*evpnPerHost, 1, 0, true)
	return s, err
}

// dialReflector opens a session as a reflector of the same AS.
func dialReflector(ctx context.Context, dial func() (net.Conn, error)) (*reflector, error) {
	for {
		r, err := tryReflector(dial)
		if err == nil {
			return r, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func tryReflector(dial func() (net.Conn, error)) (*reflector, error) {
	conn, err := dial()
	if err != nil {
		return nil, err
	}
	caps := bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{bgp.NewCapMultiProtocol(bgp.RF_EVPN),
		bgp.NewCapFourOctetASNumber(evpnAS)})
	// no hold timer
	open, err := bgp.NewBGPOpenMessage(evpnAS, 0, netip.AddrFrom4([4]byte{9, 9, 9, 9}),
		[]bgp.OptionParameterInterface{caps})
	if err == nil {
		for _, m := range []*bgp.BGPMessage{open, bgp.NewBGPKeepAliveMessage()} {
			var b []byte
			if b, err = m.Serialize(); err == nil {
				_, err = conn.Write(b)
			}
		}
	}
	h := make([]byte, bgp.BGP_HEADER_LENGTH)
	for _, want := range []byte{bgp.BGP_MSG_OPEN, bgp.BGP_MSG_KEEPALIVE} {
		if err == nil {
			if _, err = io.ReadFull(conn, h); err == nil {
				_, err = io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint16(h[16:]))-int64(len(h)))
			}
		}
		if err == nil && h[18] != want {
			err = fmt.Errorf("BGP message of type %d; want %d", h[18], want)
		}
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	r := &reflector{conn: conn, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		_, _ = io.Copy(io.Discard, conn)
	}()
	return r, nil
}

func (r *reflector) close() {
	_ = r.conn.Close()
	<-r.done
}

// until polls until count returns want.
func until(ctx context.Context, want int, count func() (int, error)) error {
	for {
		n, err := count()
		if err != nil || n == want {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d routes, want %d: %w", n, want, ctx.Err())
		case <-time.After(100 * time.Millisecond): // polling costs the measured daemon time
		}
	}
}

// evpnScale measures the time from the first byte of all routes until the switch's tables hold all of them. The anchor
// is gobgp alone, which only stores them.
func evpnScale(ctx context.Context, b *Bench) (m Meter, err error) {
	script, err := newEVPNScript()
	if err != nil {
		return m, err
	}
	h, err := b.evpnHost(ctx)
	if err != nil {
		return m, err
	}
	ours, err := dialReflector(ctx, func() (c net.Conn, err error) {
		err = h.NS.Do(func() error {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9)}, Timeout: time.Second}
			c, err = d.Dial("tcp", "192.0.2.1:179")
			return err
		})
		return c, err
	})
	if err != nil {
		return m, err
	}
	b.Add(ours.close)
	control := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn,
		error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(h.Dir, "vnicd.sock"))
	}}}
	b.Add(control.CloseIdleConnections)
	inForce := func() (int, error) {
		out, err := control.Get("http://vnicd/v1/evpn")
		if err != nil {
			return 0, err
		}
		defer out.Body.Close()
		var s evpn.Status
		if err := json.NewDecoder(out.Body).Decode(&s); err != nil {
			return 0, err
		}
		n := 0
		for _, x := range s.Networks {
			n += min(x.MACs, x.IPs)
			if x.MACs+x.IPs == 0 {
				n += x.VTEPs // nothing is left only when these are gone, too
			}
		}
		return n, nil
	}
	empty, err := privateMemory(h.Proc)
	if err != nil {
		return m, err
	}
	const all = evpnHosts * evpnPerHost
	m.Ours = func(ctx context.Context, _ time.Duration) (s Sample, err error) {
		step := func(text []byte, want int) (took, cpu time.Duration, err error) {
			cpu0, err := cpuTime(h.Proc)
			if err != nil {
				return 0, 0, err
			}
			start := time.Now()
			if _, err = ours.conn.Write(text); err == nil {
				err = until(ctx, want, inForce)
			}
			took = time.Since(start)
			cpu1, e := cpuTime(h.Proc)
			return took, cpu1 - cpu0, errors.Join(err, e)
		}
		p, err := begin()
		if err != nil {
			return s, err
		}
		took, cpu, err := step(script.full, all)
		if err != nil {
			return s, err
		}
		w, err := p.end("route", all)
		if err != nil {
			return s, err
		}
		full, err := privateMemory(h.Proc)
		if err != nil {
			return s, err
		}
		moved, _, err := step(script.moves, all+1)
		if err != nil {
			return s, err
		}
		gone, _, err := step(script.gone, 0)
		return Sample{Value: took.Seconds(), Extra: map[string]float64{
			"cpu_us_per_route": cpu.Seconds() * 1e6 / all, "bytes_per_route": (full - empty) / all,
			"us_per_move": moved.Seconds() * 1e6 / evpnMoves, "withdrawal_s": gone.Seconds(),
		}, Work: w}, err
	}
	m.Anchor, err = b.gobgpAlone(ctx, script)
	return m, err
}

// evpnHost starts a daemon that waits for a reflector.
func (b *Bench) evpnHost(ctx context.Context) (*lab.Host, error) {
	h, err := b.host()
	if err != nil {
		return nil, err
	}
	if _, err := h.NS.Shell(ctx,
		"ip link add under type bridge && ip link set under up && ip addr add 192.0.2.1/24 dev under && ip addr add 192.0.2.9/24 dev under && ip route add 10.0.0.0/8 dev under"); err != nil {
		return nil, err
	}
	text := fmt.Sprintf("vtep: {local: 192.0.2.1}\nevpn: {as: %d, neighbours: [{address: 192.0.2.9, passive: true}]}\nnetworks:\n", evpnAS)
	for i := range evpnNetworks {
		text += fmt.Sprintf("  - {name: net%d, vni: %d}\n", i, evpnFirstVNI+i)
	}
	return h, h.Run(ctx, text)
}

// gobgpAlone starts a gobgp that only stores routes.
func (b *Bench) gobgpAlone(ctx context.Context, script *evpnScript) (func(context.Context, time.Duration) (Sample,
	error), error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		return nil, err
	}
	srv := server.NewBgpServer(server.LoggerOption(slog.New(slog.DiscardHandler), nil))
	go srv.Serve()
	b.Add(srv.Stop)
	if err := srv.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
		Asn: evpnAS, RouterId: "192.0.2.2", ListenPort: int32(port), ListenAddresses: []string{"127.0.0.1"},
		Families: []uint32{9},
	}}); err != nil {
		return nil, err
	}
	if err := srv.AddPeer(ctx, &api.AddPeerRequest{Peer: &api.Peer{
		Conf: &api.PeerConf{NeighborAddress: "127.0.0.9", PeerAsn: evpnAS}, Transport: &api.Transport{PassiveMode: true},
		AfiSafis: []*api.AfiSafi{{Config: &api.AfiSafiConfig{Family: &api.Family{Afi: api.Family_AFI_L2VPN,
			Safi: api.Family_SAFI_EVPN}, Enabled: true}}},
	}}); err != nil {
		return nil, err
	}
	alone, err := dialReflector(ctx, func() (net.Conn, error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}, Timeout: time.Second}
		return d.Dial("tcp", fmt.Sprint("127.0.0.1:", port))
	})
	if err != nil {
		return nil, err
	}
	b.Add(alone.close)
	count := func() (n int, err error) {
		t, err := srv.GetTable(ctx, &api.GetTableRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL,
			Family: &api.Family{Afi: api.Family_AFI_L2VPN, Safi: api.Family_SAFI_EVPN}})
		if err != nil {
			return 0, err
		}
		return int(t.NumPath), nil
	}
	return func(ctx context.Context, _ time.Duration) (s Sample, err error) {
		s, err = working("route", func() (Sample, float64, error) {
			start := time.Now()
			_, err := alone.conn.Write(script.full)
			if err == nil {
				err = until(ctx, evpnHosts*(evpnPerHost+1), count)
			}
			return Sample{Value: time.Since(start).Seconds()}, evpnHosts * evpnPerHost, err
		})
		if err == nil {
			_, err = alone.conn.Write(script.gone)
		}
		if err == nil {
			err = until(ctx, 0, count)
		}
		return s, err
	}, nil
}
