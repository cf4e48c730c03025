package evpn

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vnicd/vnicd/device/testutil"
)

// raw is a neighbour that sends raw bytes, after a valid OPEN and KEEPALIVE.
type raw struct {
	t    *testing.T
	f    *fabric
	n    int
	conn net.Conn
}

// firstRaw is the number of the first of them; they connect to host 1.
const firstRaw = 100

func (f *fabric) rawNeighbour(n int) Neighbour {
	return Neighbour{Address: f.bgpAddr(n), AS: testAS, Port: f.port, Local: f.bgpAddr(1), Passive: true, MaxRoutes: 100}
}

// call opens a session with host 1, and retries until it is accepted.
func (f *fabric) call(t *testing.T, n int) *raw {
	t.Helper()
	x := &raw{t: t, f: f, n: n}
	testutil.Eventually(t, "the session is up", func() bool {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: f.bgpAddr(n).AsSlice()}, Timeout: time.Second}
		var err error
		if x.conn, err = d.Dial("tcp", netip.AddrPortFrom(f.bgpAddr(1), f.port).String()); err != nil {
			return false
		}
		caps := []bgp.ParameterCapabilityInterface{bgp.NewCapMultiProtocol(bgp.RF_EVPN), bgp.NewCapFourOctetASNumber(testAS)}
		open, err := bgp.NewBGPOpenMessage(testAS, 90, netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}),
			[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability(caps)})
		if err != nil {
			t.Fatal(err)
		}
		x.message(open)
		x.message(bgp.NewBGPKeepAliveMessage())
		for range 2 { // the host's OPEN and KEEPALIVE
			if typ, _, err := x.read(5 * time.Second); err != nil || typ == bgp.BGP_MSG_NOTIFICATION {
				x.conn.Close()
				return false
			}
		}
		return true
	})
	t.Cleanup(func() { x.conn.Close() })
	return x
}

func (x *raw) message(m *bgp.BGPMessage) {
	b, err := m.Serialize()
	if err != nil {
		x.t.Error(err)
	}
	x.send(b)
}

func (x *raw) send(b []byte) { _, _ = x.conn.Write(b) } // read detects that the host has closed the connection

// read returns the next message.
func (x *raw) read(wait time.Duration) (typ uint8, body []byte, err error) {
	_ = x.conn.SetReadDeadline(time.Now().Add(wait))
	h := make([]byte, bgp.BGP_HEADER_LENGTH)
	if _, err = io.ReadFull(x.conn, h); err != nil {
		return 0, nil, err
	}
	body = make([]byte, int(binary.BigEndian.Uint16(h[16:]))-len(h))
	_, err = io.ReadFull(x.conn, body)
	return h[18], body, err
}

// ended waits for the end of the session and returns the code and sub-code of the notification before it.
func (x *raw) ended() (code [2]byte) {
	x.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		typ, body, err := x.read(patience)
		switch {
		case err != nil:
			return code
		case typ == bgp.BGP_MSG_NOTIFICATION && len(body) >= 2:
			code = [2]byte(body)
		}
	}
	x.t.Fatal("the session has not ended")
	return code
}

// attribute returns a path attribute with a length of two bytes.
func attribute(flags, typ byte, value ...byte) []byte {
	return append([]byte{flags | 0x10, typ, byte(len(value) >> 8), byte(len(value))}, value...)
}

func message(typ byte, body ...byte) []byte {
	b := bytes.Repeat([]byte{0xff}, 16)
	b = binary.BigEndian.AppendUint16(b, uint16(19+len(body)))
	return append(append(b, typ), body...)
}

func update(attributes ...[]byte) []byte {
	all := bytes.Join(attributes, nil)
	return message(bgp.BGP_MSG_UPDATE, append([]byte{0, 0, byte(len(all) >> 8), byte(len(all))}, all...)...)
}

// The parts of a valid UPDATE.
var (
	rawOrigin = attribute(0x40, 1, 0)
	rawASPath = attribute(0x40, 2)
	rawPref   = attribute(0x40, 5, 0, 0, 0, 100)
	rawTarget = attribute(0xc0, 16, 0, 2, 0xfd, 0xe9, 0, 0, 0, 100, 3, 0x0c, 0, 0, 0, 0, 0, 8) // 65001:100, VXLAN
)

// rawMAC returns neighbour x's type 2 NLRI for MAC n.
func (x *raw) rawMAC(n int) []byte {
	m := hwaddr(n)
	b := append([]byte{2, 33, 0, 1, 10, 0, 0, byte(x.n), 0, 100}, make([]byte, 10+4)...)
	b = append(append(append(b, 48), m[:]...), 0)
	return append(b, 0, 0, 100)
}

func rawReach(nlri ...byte) []byte {
	v := vtepAddr(9).As4()
	return attribute(0x80, 14, append(append([]byte{0, 25, 70, 4}, append(v[:], 0)...), nlri...)...)
}

// truth returns a valid UPDATE for a MAC at VTEP 9.
func (x *raw) truth(n int) []byte {
	return update(rawOrigin, rawASPath, rawPref, rawReach(x.rawMAC(n)...), rawTarget)
}

// with returns a copy of b with some bytes replaced.
func with(b []byte, at int, v ...byte) []byte {
	b = bytes.Clone(b)
	copy(b[at:], v)
	return b
}

// A malformed message ends at most the session of the neighbour that sent it, as RFC 7606 (treat-as-withdraw) and RFC
// 4271 section 6 (NOTIFICATION) specify; another neighbour's session and routes are not affected, and the log has the
// reason.
func TestMalformed(t *testing.T) {
	var none [2]byte
	header, updateError := func(sub byte) [2]byte { return [2]byte{1, sub} },
		func(sub byte) [2]byte { return [2]byte{3, sub} }
	cases := []struct {
		name      string
		bytes     func(x *raw, right []byte, mac int) []byte
		ends      [2]byte // the notification; none: the session stays up
		withdrawn bool    // the MAC's earlier route is withdrawn
		unlogged  bool    // it is no error, so not logged
	}{
		{"undefined origin", func(x *raw, _ []byte, m int) []byte {
			return update(attribute(0x40, 1, 9), rawASPath, rawPref, rawReach(x.rawMAC(m)...), rawTarget)
		}, none, true, false},
		{"origin of two bytes", func(x *raw, _ []byte, m int) []byte {
			return update(attribute(0x40, 1, 0, 0), rawASPath, rawPref, rawReach(x.rawMAC(m)...), rawTarget)
		}, none, true, false},
		{"no origin", func(x *raw, _ []byte, m int) []byte {
			return update(rawASPath, rawPref, rawReach(x.rawMAC(m)...), rawTarget)
		}, none, true, false},
		{"truncated AS path", func(x *raw, _ []byte, m int) []byte {
			return update(rawOrigin, attribute(0x40, 2, 2, 7, 0, 0), rawPref, rawReach(x.rawMAC(m)...), rawTarget)
		}, none, true, false},
		{"communities of eleven bytes", func(x *raw, _ []byte, m int) []byte {
			return update(rawOrigin, rawASPath, rawPref, rawReach(x.rawMAC(m)...), rawTarget[:len(rawTarget)-5])
		}, none, true, false},
		// RFC 7606 section 5.4 would ignore it.
		{"route type that gobgp does not know", func(x *raw, _ []byte, m int) []byte {
			return update(rawOrigin, rawASPath, rawPref, rawReach(append([]byte{6, 3, 1, 2, 3}, x.rawMAC(m)...)...), rawTarget)
		}, updateError(10), true, false},
		{"NLRI shorter than its fields", func(x *raw, _ []byte, m int) []byte {
			return update(rawOrigin, rawASPath, rawPref, rawReach(with(x.rawMAC(m)[:12], 1, 10)...), rawTarget)
		}, updateError(10), true, false},
		{"NLRI longer than its attribute", func(x *raw, _ []byte, m int) []byte {
			return update(rawOrigin, rawASPath, rawPref, rawReach(with(x.rawMAC(m), 1, 200)...), rawTarget)
		}, updateError(10), true, false},
		{"IP address of 33 bits", func(x *raw, _ []byte, m int) []byte {
			return update(rawOrigin, rawASPath, rawPref, rawReach(with(x.rawMAC(m), 31, 33)...), rawTarget)
		}, updateError(10), true, false},
		{"next hop of five bytes", func(x *raw, _ []byte, m int) []byte {
			return update(rawOrigin, rawASPath, rawPref, attribute(0x80, 14,
				append([]byte{0, 25, 70, 5, 1, 2, 3, 4, 5, 0}, x.rawMAC(m)...)...), rawTarget)
		}, updateError(5), true, false},
		{"attributes longer than the message", func(x *raw, right []byte, _ int) []byte {
			return with(right, 21, 0xff, 0xff)
		}, updateError(1), true, false},
		{"message of 18 bytes", func(x *raw, right []byte, _ int) []byte { return with(right, 16, 0, 18) }, header(2), true,
			false},
		{"message of 65535 bytes", func(x *raw, right []byte, _ int) []byte { return with(right, 16, 0xff, 0xff) }, header(2),
			true, false},
		{"message of unknown type", func(x *raw, right []byte, _ int) []byte { return with(right, 18, 77) }, header(3), true,
			false},
		{"second OPEN", func(x *raw, right []byte, _ int) []byte {
			return message(bgp.BGP_MSG_OPEN, 4, 0xfd, 0xe9, 0, 90, 10, 0, 0, 1, 0)
		}, none, false, true},
		{"truncated message", func(x *raw, right []byte, _ int) []byte { return right[:len(right)/2] }, none, true, true},
	}
	f := newFabric(t)
	c := f.config(1, 2)
	for i := range cases {
		c.Neighbours = append(c.Neighbours, f.rawNeighbour(firstRaw+i))
	}
	one, two := f.host(1, c), f.host(2, f.config(2, 1))
	a, b := one.tenant(100, NetworkConfig{}), two.tenant(100, NetworkConfig{})
	b.attach("vm2", hwaddr(2))
	testutil.Eventually(t, "another neighbour's route", func() bool { return a.behind(hwaddr(2)) == vtepAddr(2) })
	session := func(n int) (s SessionStatus) {
		for _, s = range one.s.Status().Sessions {
			if s.Neighbour == f.bgpAddr(n) {
				break
			}
		}
		return s
	}
	before := session(2)
	serve := f.call(t, firstRaw+len(cases)-1) // the last case ends its session itself
	reach := vtepAddr(9).As4()
	type3 := append([]byte{3, 17, 0, 1, 10, 0, 0, 1, 0, 100, 0, 0, 0, 0, 32}, reach[:]...)
	serve.send(update(rawOrigin, rawASPath, rawPref, rawReach(type3...), rawTarget,
		attribute(0xc0, 22, append([]byte{0, 6, 0, 0, 100}, reach[:]...)...)))
	testutil.Eventually(t, "VTEP 9", func() bool { return len(a.peers()) == 2 })
	t.Run("cases", func(t *testing.T) {
		for i, tc := range cases {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				x := serve
				if i < len(cases)-1 {
					x = f.call(t, firstRaw+i)
				}
				mac := 1000 + i
				x.send(x.truth(mac))
				testutil.Eventually(t, "valid routes are installed", func() bool {
					_, ok := a.route(hwaddr(mac), vtepAddr(9))
					return ok
				})
				x.send(tc.bytes(x, x.truth(mac), mac))
				if i == len(cases)-1 {
					x.conn.Close()
				}
				if tc.ends != none || i == len(cases)-1 {
					if got := x.ended(); got != tc.ends {
						t.Errorf("ended with notification %v, want %v", got, tc.ends)
					}
				} else {
					x.send(x.truth(2000 + i))
					testutil.Eventually(t, "the session stays up", func() bool {
						_, ok := a.route(hwaddr(2000+i), vtepAddr(9))
						return ok
					})
				}
				if tc.withdrawn {
					testutil.Eventually(t, "the route is withdrawn", func() bool {
						_, ok := a.route(hwaddr(mac), vtepAddr(9))
						return !ok
					})
				} else if _, ok := a.route(hwaddr(mac), vtepAddr(9)); !ok {
					t.Error("the route was withdrawn")
				}
				if said := strings.Contains(one.log.String(), fmt.Sprintf("key=%v ", f.bgpAddr(x.n))); !said && !tc.unlogged {
					t.Error("no log line for it")
				}
			})
		}
	})
	if after := session(2); after.Since != before.Since || after.Flaps != before.Flaps ||
		a.behind(hwaddr(2)) != vtepAddr(2) {
		t.Errorf("another neighbour is affected: %+v, was %+v", after, before)
	}
	for line := range strings.Lines(one.log.String()) {
		if strings.Contains(line, "[WARN]") {
			t.Log(strings.TrimSpace(line))
		}
	}
}

// UPDATEs with random wrong bytes: whatever becomes of the sessions, the speaker and its other neighbour continue.
func TestMangled(t *testing.T) {
	const callers, each = 16, 400
	f := newFabric(t)
	c := f.config(1, 2)
	for i := range callers {
		c.Neighbours = append(c.Neighbours, f.rawNeighbour(firstRaw+i))
	}
	one, two := f.host(1, c), f.host(2, f.config(2, 1))
	a, b := one.tenant(100, NetworkConfig{MaxEntries: 50}), two.tenant(100, NetworkConfig{})
	b.attach("vm2", hwaddr(2))
	testutil.Eventually(t, "another neighbour's route", func() bool { return a.behind(hwaddr(2)) == vtepAddr(2) })
	t.Run("callers", func(t *testing.T) {
		for i := range callers {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				rng := rand.New(rand.NewSource(int64(i)))
				x := f.call(t, firstRaw+i)
				// Most change fields of fixed length, which do not end the session; the last ones change anything after
				// the header.
				for n := range each {
					u := x.truth(1000*i + n)
					fields := u[bytes.Index(u, x.rawMAC(1000*i+n))+2:]
					if n >= each-20 {
						fields = u[19:]
					}
					for range 1 + rng.Intn(4) {
						at := rng.Intn(len(fields))
						// not the lengths of MAC and IP, nor the header of the communities
						if n >= each-20 || at != 22 && at != 29 && (at < 33 || at >= 37) {
							fields[at] = byte(rng.Uint32())
						}
					}
					x.send(u)
				}
				x.conn.(*net.TCPConn).CloseWrite()
				x.ended()
			})
		}
	})
	if s := one.s.Status().Sessions[0]; s.Neighbour != f.bgpAddr(2) || s.State != "established" || s.Flaps != 0 ||
		a.behind(hwaddr(2)) != vtepAddr(2) {
		t.Errorf("another neighbour is affected: %+v", s)
	}
	b.attach("vm3", hwaddr(3))
	testutil.Eventually(t, "its next route", func() bool { return a.behind(hwaddr(3)) == vtepAddr(2) })
	if st := one.s.Status().Networks[0]; st.MACs > 50 || st.IPs > 50 {
		t.Errorf("beyond the limit: %+v", st)
	}
}
