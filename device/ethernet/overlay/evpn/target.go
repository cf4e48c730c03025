package evpn

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// RouteTarget is a route target in wire format (RFC 4360 section 4).
type RouteTarget [8]byte

// Types of extended communities that may be route targets, and their sub-type.
const (
	twoOctetAS  = 0x00
	fourOctetAS = 0x02
	ipv4Address = 0x01
	subTarget   = 0x02
)

// vxlanService marks a VNI in an automatically derived target (RFC 8365 section 5.1.2.1): A = 0, type 1 (VXLAN), domain
// 0. FRR omits it by default, and so does vnicd.
const vxlanService = 1 << 28

// ErrRouteTarget: the text is no route target.
var ErrRouteTarget = errors.New(`a route target is AS:NUMBER or IPV4:NUMBER such as 65000:100`)

// ParseRouteTarget reads AS:NUMBER or IPV4:NUMBER.
func ParseRouteTarget(text string) (rt RouteTarget, err error) {
	ec, err := bgp.ParseRouteTarget(text)
	if err != nil {
		return rt, fmt.Errorf("%w; found %q", ErrRouteTarget, text)
	}
	b, err := ec.Serialize()
	if err != nil || len(b) != len(rt) {
		return rt, fmt.Errorf("%w; found %q", ErrRouteTarget, text)
	}
	return RouteTarget(b), nil
}

// derived returns the target of a network without configured ones: the AS (its lower 16 bits, if it has more) and the
// VNI.
func derived(as, vni uint32) (rt RouteTarget) {
	rt[0], rt[1] = twoOctetAS, subTarget
	binary.BigEndian.PutUint16(rt[2:], uint16(as))
	binary.BigEndian.PutUint32(rt[4:], vni)
	return rt
}

// derivedVNI returns the VNI of a target that may be derived, with any AS.
func (rt RouteTarget) derivedVNI() (vni uint32, ok bool) {
	if rt[0] != twoOctetAS || rt[1] != subTarget {
		return 0, false
	}
	v := binary.BigEndian.Uint32(rt[4:])
	return v &^ vxlanService, v&^vxlanService < 1<<24
}

// String is the inverse of ParseRouteTarget.
func (rt RouteTarget) String() string {
	switch rt[0] {
	case twoOctetAS:
		return fmt.Sprintf("%d:%d", binary.BigEndian.Uint16(rt[2:]), binary.BigEndian.Uint32(rt[4:]))
	case fourOctetAS:
		return fmt.Sprintf("%d:%d", binary.BigEndian.Uint32(rt[2:]), binary.BigEndian.Uint16(rt[6:]))
	case ipv4Address:
		return fmt.Sprintf("%d.%d.%d.%d:%d", rt[2], rt[3], rt[4], rt[5], binary.BigEndian.Uint16(rt[6:]))
	}
	return fmt.Sprintf("%x", rt[:])
}

// MarshalText makes a target a string in JSON.
func (rt RouteTarget) MarshalText() ([]byte, error) { return []byte(rt.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (rt *RouteTarget) UnmarshalText(b []byte) (err error) {
	*rt, err = ParseRouteTarget(string(b))
	return err
}

// community converts the target for gobgp.
func (rt RouteTarget) community() bgp.ExtendedCommunityInterface {
	ec, err := bgp.ParseExtended(rt[:])
	if err != nil {
		panic(err) // cannot fail: it was made by Serialize or derived
	}
	return ec
}
