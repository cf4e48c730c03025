package evpn

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// The messages between a Speaker (remote.go) and the process that runs its BGP (process.go). The first byte is the
// type. Integers are big-endian; an address is its length (0, 4 or 16) and its bytes; neighbours are indices into
// Config.Neighbours. What that process sends is decoded as hostile input.
const (
	// To the process.
	msgConfig    = 'C' // wireConfig, as JSON; the first message
	msgAdvertise = 'A' // adverts
	msgWithdraw  = 'W' // owns
	msgReplay    = 'R' // send every best path once more
	msgList      = 'L' // send every best path as msgListed; u32: number of the request
	msgLevel     = 'V' // u8: level of the log
	// From the process.
	msgOpened   = 'O' // listens and has its neighbours
	msgFailed   = 'F' // cannot; u32: errno or 0, text
	msgPaths    = 'P' // changes of best paths
	msgEnded    = 'E' // u16: a neighbour has sent all its routes
	msgRefused  = 'X' // adverts that BGP refuses
	msgSessions = 'S' // state of all sessions
	msgListed   = 'D' // u32: number of the request, u8: 1 if it is the last, paths
)

// maxWire bounds the messages in both directions but msgConfig, batch the length at which a sender ends one of several
// records.
const (
	maxWire   = 128 << 10
	maxConfig = 16 << 20
	batch     = 30 << 10
)

// maxText bounds texts from the process.
const maxText = 256

// errWire: the other side has sent what is no message.
var errWire = errors.New("evpn: malformed message")

// wireConfig is what the process needs of Config.
type wireConfig struct {
	AS                          uint32
	RouterID, VTEP              netip.Addr
	Listen                      []netip.Addr
	Port                        uint16
	HoldTime, RestartTime, Idle time.Duration
	Neighbours                  []Neighbour
	LogLevel                    int32
}

func encodeConfig(c *Config) ([]byte, error) {
	b, err := json.Marshal(wireConfig{AS: c.AS, RouterID: c.RouterID, VTEP: c.VTEP, Listen: c.Listen, Port: c.Port,
		HoldTime: c.HoldTime, RestartTime: c.RestartTime, Idle: c.LimitIdle, Neighbours: c.Neighbours,
		LogLevel: int32(c.Log.GetLevel())})
	return append([]byte{msgConfig}, b...), err
}

func decodeConfig(b []byte) (c wireConfig, err error) {
	if len(b) == 0 || b[0] != msgConfig {
		return c, errWire
	}
	if err := json.Unmarshal(b[1:], &c); err != nil {
		return c, fmt.Errorf("%w: %w", errWire, err)
	}
	return c, nil
}

// reader takes values off a message. After a mistake bad is set, and values are zero.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) bytes(n int) []byte {
	if n > len(r.b) {
		r.bad, r.b = true, nil
		return make([]byte, n) // n is small: 16 or the length of a text
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) u8() uint8   { return r.bytes(1)[0] }
func (r *reader) u16() uint16 { return binary.BigEndian.Uint16(r.bytes(2)) }
func (r *reader) u32() uint32 { return binary.BigEndian.Uint32(r.bytes(4)) }
func (r *reader) u64() uint64 { return binary.BigEndian.Uint64(r.bytes(8)) }

func (r *reader) addr() netip.Addr {
	switch n := r.u8(); n {
	case 0:
		return netip.Addr{}
	case 4, 16:
		a, _ := netip.AddrFromSlice(r.bytes(int(n)))
		return a.Unmap()
	}
	r.bad = true
	return netip.Addr{}
}

// text returns a text without control characters.
func (r *reader) text() string {
	n := int(r.u16())
	if n > maxText {
		r.bad = true
		return ""
	}
	return strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) {
			return '?'
		}
		return c
	}, string(r.bytes(n)))
}

func (r *reader) targets() (out []RouteTarget) {
	n := int(r.u16())
	if n > maxTargets {
		r.bad = true
		return nil
	}
	for range n {
		rt := RouteTarget(r.bytes(len(RouteTarget{})))
		if t := rt[0]; rt[1] != subTarget || t != twoOctetAS && t != ipv4Address && t != fourOctetAS {
			r.bad = true
		}
		if r.bad {
			return nil
		}
		out = append(out, rt)
	}
	return out
}

// end reports whether the message was read to its end without a mistake.
func (r *reader) end() error {
	if r.bad || len(r.b) > 0 {
		return errWire
	}
	return nil
}

func putAddr(b []byte, a netip.Addr) []byte {
	if !a.IsValid() {
		return append(b, 0)
	}
	s := a.WithZone("").AsSlice()
	return append(append(b, byte(len(s))), s...)
}

func putText(b []byte, s string) []byte {
	s = s[:min(len(s), maxText)]
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

func putTargets(b []byte, rts []RouteTarget) []byte {
	rts = rts[:min(len(rts), maxTargets)]
	b = binary.BigEndian.AppendUint16(b, uint16(len(rts)))
	for _, rt := range rts {
		b = append(b, rt[:]...)
	}
	return b
}

// Flags of a path, in the order of putPath.
const (
	flagUsed = 1 << iota
	flagWithdrawn
	flagOwn
	flagSticky
	flagLabelled
	flagForeign
	flagOddMAC
	flagHasIP
	flagReplicates
	flagsEnd
)

// noNeighbour is the index of no neighbour.
const noNeighbour = 0xffff

// indexOf returns the index of a neighbour.
func (c *Config) indexOf(a netip.Addr) uint16 {
	if i := slices.IndexFunc(c.Neighbours, func(n Neighbour) bool { return n.Address == a }); i >= 0 {
		return uint16(i)
	}
	return noNeighbour
}

// neighbour is the inverse of indexOf.
func (r *reader) neighbour(c *Config) netip.Addr {
	i := int(r.u16())
	if i >= len(c.Neighbours) {
		r.bad = true
		return netip.Addr{}
	}
	return c.Neighbours[i].Address
}

func putNLRI(b []byte, k *nlri) []byte {
	b = append(append(b, k.kind), k.rd[:]...)
	b = append(binary.BigEndian.AppendUint32(b, k.etag), k.mac[:]...)
	return putAddr(b, k.ip)
}

func (r *reader) nlri() (k nlri) {
	k.kind = r.u8()
	copy(k.rd[:], r.bytes(8))
	k.etag = r.u32()
	k.mac = vswitch.MAC(r.bytes(6))
	k.ip = r.addr()
	return k
}

// putPath appends a path, unless it comes from an address that is not a configured neighbour.
func putPath(b []byte, c *Config, p *path) []byte {
	var flags uint16
	for i, is := range [...]bool{p.used, p.withdrawn, !p.from.IsValid(), p.sticky, p.labelled, p.foreign, p.oddMAC,
		p.hasIP, p.replicates} {
		if is {
			flags |= 1 << i
		}
	}
	bare := p.withdrawn || !p.from.IsValid() || !p.used
	from := uint16(noNeighbour)
	if !bare {
		if from = c.indexOf(p.from); from == noNeighbour {
			return b
		}
	}
	b = putNLRI(binary.BigEndian.AppendUint16(b, flags), &p.nlri)
	if bare {
		return b
	}
	b = putAddr(binary.BigEndian.AppendUint16(b, from), p.nextHop)
	b = binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, p.seq), p.vni)
	return putTargets(putAddr(b, p.tunnel), p.targets)
}

func (r *reader) path(c *Config) (p path) {
	flags := r.u16()
	is := func(f uint16) bool { return flags&f != 0 }
	p.nlri = r.nlri()
	p.used, p.withdrawn = is(flagUsed), is(flagWithdrawn)
	if flags >= flagsEnd || p.used != (p.kind == bgp.EVPN_ROUTE_TYPE_MAC_IP_ADVERTISEMENT ||
		p.kind == bgp.EVPN_INCLUSIVE_MULTICAST_ETHERNET_TAG) {
		r.bad = true
	}
	if p.withdrawn || is(flagOwn) || !p.used {
		if !p.used && !p.withdrawn && !is(flagOwn) && len(c.Neighbours) > 0 {
			p.from = c.Neighbours[0].Address // an unused route counts, from whomever
		}
		return p
	}
	p.sticky, p.labelled, p.foreign, p.oddMAC = is(flagSticky), is(flagLabelled), is(flagForeign), is(flagOddMAC)
	p.hasIP, p.replicates = is(flagHasIP), is(flagReplicates)
	p.from = r.neighbour(c)
	p.nextHop, p.seq, p.vni, p.tunnel = r.addr(), r.u32(), r.u32(), r.addr()
	p.targets = r.targets()
	if p.kind == bgp.EVPN_ROUTE_TYPE_MAC_IP_ADVERTISEMENT && p.ip.IsValid() && !p.hasIP {
		r.bad = true // it would not be judged
	}
	return p
}

func putOwn(b []byte, o *own) []byte {
	b = binary.BigEndian.AppendUint32(append(b, o.rd[:]...), o.vni)
	return putAddr(append(b, o.mac[:]...), o.ip)
}

func (r *reader) own() (o own) {
	copy(o.rd[:], r.bytes(8))
	o.vni = r.u32()
	o.mac = vswitch.MAC(r.bytes(6))
	o.ip = r.addr()
	return o
}

func putAdvert(b []byte, a *advert) []byte {
	b = binary.BigEndian.AppendUint32(putOwn(b, &a.own), a.seq)
	sticky := byte(0)
	if a.sticky {
		sticky = 1
	}
	return putTargets(append(b, sticky), a.targets)
}

func (r *reader) advert() (a advert) {
	a.own = r.own()
	a.seq = r.u32()
	a.sticky = r.u8() == 1
	a.targets = r.targets()
	return a
}

// states are those of RFC 4271 section 8.2.2, as SessionStatus names them.
var states = []string{"unspecified", "unknown", "idle", "connect", "active", "opensent", "openconfirm", "established"}

func encodeSessions(c *Config, list []SessionStatus) []byte {
	b := []byte{msgSessions}
	for i := range list {
		s := &list[i]
		from := c.indexOf(s.Neighbour)
		if from == noNeighbour {
			continue
		}
		since := int64(0)
		if !s.Since.IsZero() {
			since = s.Since.UnixNano()
		}
		b = append(binary.BigEndian.AppendUint16(b, from), byte(max(slices.Index(states, s.State), 0)))
		b = binary.BigEndian.AppendUint64(b, uint64(since))
		b = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(b, s.Received), s.Updates)
		b = putText(binary.BigEndian.AppendUint32(b, s.Flaps), s.Why)
	}
	return b
}

// decodeSessions reads the body of msgSessions. Neighbours' AS and limits are the configuration's.
func decodeSessions(c *Config, body []byte) ([]SessionStatus, error) {
	r := reader{b: body}
	out := []SessionStatus{}
	for len(r.b) > 0 && !r.bad {
		var s SessionStatus
		s.Neighbour = r.neighbour(c)
		state := int(r.u8())
		since := int64(r.u64())
		s.Received, s.Updates, s.Flaps, s.Why = r.u64(), r.u64(), r.u32(), r.text()
		if state >= len(states) || len(out) >= len(c.Neighbours) {
			r.bad = true
			break
		}
		s.State = states[state]
		if since != 0 {
			s.Since = time.Unix(0, since)
		}
		if i := slices.IndexFunc(c.Neighbours, func(n Neighbour) bool { return n.Address == s.Neighbour }); i >= 0 {
			s.AS, s.MaxRoutes = c.Neighbours[i].AS, c.Neighbours[i].limit()
		}
		out = append(out, s)
	}
	return out, r.end()
}

func encodeFailure(err error) []byte {
	var errno syscall.Errno
	_ = errors.As(err, &errno)
	return append(binary.BigEndian.AppendUint32([]byte{msgFailed}, uint32(errno)), err.Error()...)
}

// failure is an error of the process, with its errno.
type failure struct {
	text  string
	errno syscall.Errno
}

func (f *failure) Error() string { return f.text }

func (f *failure) Unwrap() error {
	if f.errno == 0 {
		return nil
	}
	return f.errno
}

func decodeFailure(body []byte) error {
	r := reader{b: body}
	f := &failure{errno: syscall.Errno(r.u32())}
	r.b = r.b[:min(len(r.b), maxText)]
	t := reader{b: putText(nil, string(r.b))}
	f.text = t.text()
	return f
}
