package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vnicd/vnicd/lab"
)

const bgpAS = 65001

// bgpEpisode is a BGP session by Eve, a configured neighbour: an OPEN, then UPDATEs with EVPN routes, most of them
// spoilt. The routes' MACs are nobody's: a neighbour may attract traffic (SECURITY.md), which the innocents would miss.
func bgpEpisode(ctx context.Context, s *stage, rng *rand.Rand) error {
	conn, err := dialFrom(s.eve, addEve, netip.AddrPortFrom(addr1, 179))
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("BGP: %w", err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	up := make(chan bool, 1)
	go func() { up <- established(conn); _, _ = io.Copy(io.Discard, conn) }() // ends with the connection
	open, err := bgp.NewBGPOpenMessage(bgpAS, 90, addEve, []bgp.OptionParameterInterface{
		bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
			bgp.NewCapMultiProtocol(bgp.RF_EVPN), bgp.NewCapFourOctetASNumber(bgpAS)})})
	if err != nil {
		return err
	}
	if !sendBGP(conn, rng, open, 50) || !sendBGP(conn, rng, bgp.NewBGPKeepAliveMessage(), 50) {
		return nil
	}
	if !<-up { // after a broken session the neighbour is idle for a while
		time.Sleep(time.Second)
		return nil
	}
	for range 100 + rng.IntN(1000) {
		if ctx.Err() != nil {
			return nil
		}
		m, err := evpnUpdate(rng)
		if err != nil {
			return err
		}
		if !sendBGP(conn, rng, m, 200) {
			return nil
		}
	}
	return nil
}

// established reads until the other side's KEEPALIVE, which ends the handshake (RFC 4271, 8.2.2).
func established(conn net.Conn) bool {
	const headerLen, keepAlive = 19, 4
	b := make([]byte, 4096)
	for {
		if _, err := io.ReadFull(conn, b[:headerLen]); err != nil {
			return false
		}
		n := int(binary.BigEndian.Uint16(b[16:]))
		if b[18] == keepAlive {
			return true
		}
		if n < headerLen || n > len(b) {
			return false
		}
		if _, err := io.ReadFull(conn, b[headerLen:n]); err != nil {
			return false
		}
	}
}

// dialFrom connects from an address of a host.
func dialFrom(h *lab.Host, local netip.Addr, to netip.AddrPort) (conn net.Conn, err error) {
	err = h.NS.Do(func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0)), Timeout: patience}
		conn, err = d.Dial("tcp", to.String())
		return err
	})
	return conn, err
}

// sendBGP sends a message; one in spoil has some wrong bytes, not those of the marker.
func sendBGP(conn net.Conn, rng *rand.Rand, m *bgp.BGPMessage, spoil int) bool {
	b, err := m.Serialize()
	if err != nil {
		return !errors.Is(err, io.EOF) // gobgp refuses to encode it; another is next
	}
	const marker = 16
	if rng.IntN(spoil) == 0 {
		for range 1 + rng.IntN(4) {
			b[marker+rng.IntN(len(b)-marker)] ^= byte(1 << rng.IntN(8))
		}
	}
	if rng.IntN(100) == 0 {
		b = b[:rng.IntN(len(b))]
	}
	_, err = conn.Write(b)
	return err == nil
}

// evpnUpdate is an UPDATE with a MAC/IP advertisement or an inclusive multicast route (RFC 7432, 7.2 and 7.3).
func evpnUpdate(rng *rand.Rand) (*bgp.BGPMessage, error) {
	rd, err := bgp.ParseRouteDistinguisher(fmt.Sprintf("198.51.100.9:%d", 1+rng.IntN(300)))
	if err != nil {
		return nil, err
	}
	target, err := bgp.ParseRouteTarget(fmt.Sprintf("%d:%d", bgpAS, []int{100, 200, rng.IntN(1 << 16)}[rng.IntN(3)]))
	if err != nil {
		return nil, err
	}
	vni := []uint32{100, 200, rng.Uint32() & 0xffffff}[rng.IntN(3)]
	attrs := []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(uint8(rng.IntN(3))),
		bgp.NewPathAttributeLocalPref(100), bgp.NewPathAttributeAsPath(nil)}
	var key bgp.NLRI
	if rng.IntN(4) == 0 {
		if key, err = bgp.NewEVPNMulticastEthernetTagRoute(rd, rng.Uint32()>>rng.IntN(32), addEve); err != nil {
			return nil, err
		}
		id, err := bgp.NewIngressReplTunnelID(addEve)
		if err != nil {
			return nil, err
		}
		attrs = append(attrs, bgp.NewPathAttributePmsiTunnel(bgp.PMSI_TUNNEL_TYPE_INGRESS_REPL, false, vni, id))
	} else {
		mac := net.HardwareAddr{0x02, 0xee, byte(rng.Uint32()), byte(rng.Uint32()), 0, byte(rng.Uint32())}
		ip := netip.Addr{}
		if rng.IntN(2) == 0 {
			ip = netip.AddrFrom4([4]byte{10, 9, byte(rng.Uint32()), byte(rng.Uint32())})
		}
		if key, err = bgp.NewEVPNMacIPAdvertisementRoute(rd, bgp.EthernetSegmentIdentifier{Value: make([]byte, 9)},
			rng.Uint32()>>rng.IntN(32), mac.String(), ip, []uint32{vni}); err != nil {
			return nil, err
		}
	}
	reach, err := bgp.NewPathAttributeMpReachNLRI(bgp.RF_EVPN, []bgp.PathNLRI{{NLRI: key}}, addEve)
	if err != nil {
		return nil, err
	}
	attrs = append(attrs, reach, bgp.NewPathAttributeExtendedCommunities([]bgp.ExtendedCommunityInterface{
		bgp.NewEncapExtended(bgp.TUNNEL_TYPE_VXLAN), target,
		bgp.NewMacMobilityExtended(rng.Uint32()>>rng.IntN(32), rng.IntN(4) == 0)}))
	rng.Shuffle(len(attrs), func(i, j int) { attrs[i], attrs[j] = attrs[j], attrs[i] })
	return bgp.NewBGPUpdateMessage(nil, attrs, nil), nil
}
