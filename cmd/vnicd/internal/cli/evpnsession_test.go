package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// secured returns a neighbour whose session is signed (RFC 2385) and must come from one hop away (RFC 5082).
func secured(address, more string) string {
	return fmt.Sprintf("{address: %q, password: %s, ttl-security: 1%s}", address, bgpPassword, more)
}

// meet waits until the endpoints of the two vnicds reach each other.
func (f *fabric) meet() (a, b *endpoint) {
	f.t.Helper()
	a, b = f.endpoint(11, f.hosts["one"]), f.endpoint(12, f.hosts["two"])
	f.eventually("the endpoints reach each other", func() bool {
		_, err := a.ns.Exec("ping", "-c1", "-W1", b.addr)
		return err == nil
	})
	return a, b
}

func (h *fabricHost) session(state string) func() bool {
	return func() bool { return strings.Contains(h.cli("evpn"), " "+state) }
}

// Two vnicds in different ASs, neighbours of each other. Sessions and VTEPs are IPv6; each session is signed and its
// TTL is checked.
func TestEVPNOverIPv6(t *testing.T) {
	t.Parallel() // it mostly waits
	f := newWire(t, "2001:db8::%d/64", "one", "two")
	one, two := f.hosts["one"], f.hosts["two"]
	config := func(as, other int, at, password string) string {
		return fmt.Sprintf("as: %d, router-id: 10.9.9.%d, hold-time: 6s, restart-time: 0s, neighbours: [%s]", as, as-65000,
			strings.Replace(secured(at, fmt.Sprintf(", as: %d", other)), bgpPassword, password, 1))
	}
	one.vnicdWith(config(65001, 65002, two.addr, bgpPassword))
	p := two.vnicdWith(config(65002, 65001, one.addr, bgpPassword))
	a, b := f.meet()
	r, ok := one.route(b.mac, two.addr)
	if !ok || !r.Active || r.Neighbour.String() != two.addr {
		t.Errorf("route %+v %v", r, ok)
	}
	t.Logf("vnicd evpn on host one:\n%s%s", one.cli("evpn"), one.cli("evpn", "routes", "blue"))

	// From further away, which the hosts can tell only by the TTL.
	two.ns.MustExec("nft",
		`table ip6 far { chain out { type filter hook output priority 0; tcp dport 179 ip6 hoplimit set 254; tcp sport 179 ip6 hoplimit set 254; }; }`)
	f.eventually("the session from further away ends", func() bool { return !one.session("established")() })
	f.eventually("its routes go", func() bool { _, ok := one.route(b.mac, two.addr); return !ok })
	two.ns.MustExec("nft", "delete", "table", "ip6", "far")
	f.eventually("the session is up again", one.session("established"))
	f.eventually("the endpoints reach each other again",
		func() bool { _, err := a.ns.Exec("ping", "-c1", "-W1", b.addr); return err == nil })

	// With another password no session comes up: the kernel refuses the segments.
	p.kill(syscall.SIGTERM)
	f.eventually("the session ends", func() bool { return !one.session("established")() })
	refused := func() string { return one.try("nstat", "-asz", "TcpExtTCPMD5Failure") }
	before := refused()
	p = two.vnicdWith(config(65002, 65001, one.addr, "somebody-else"))
	f.eventually("segments with a wrong signature are refused", func() bool { return refused() != before })
	if s := one.cli("evpn"); strings.Contains(s, "established") {
		t.Errorf("a session with the wrong password:\n%s", s)
	}
	p.kill(syscall.SIGTERM)
	two.vnicdWith(config(65002, 65001, one.addr, bgpPassword))
	f.eventually("the session is up with the right one", one.session("established"))
}

// Each vnicd in its own AS, with an FRR spine between them, over IPv6 sessions: the spine leaves next hops unchanged,
// and route targets derived from different ASs match.
func TestEVPNOverSpine(t *testing.T) {
	t.Parallel() // it mostly waits
	f := newWire(t, "192.0.2.%d/24", "one", "two", "rr")
	one, two, spine := f.hosts["one"], f.hosts["two"], f.hosts["rr"]
	at := map[*fabricHost]string{}
	for i, h := range []*fabricHost{one, two, spine} {
		at[h] = fmt.Sprintf("2001:db8::%d", i+1)
		h.ns.Addr("under", at[h]+"/64")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "router bgp 65100\n bgp router-id %s\n no bgp default ipv4-unicast\n no bgp ebgp-requires-policy\n",
		spine.addr)
	for i, h := range []*fabricHost{one, two} {
		fmt.Fprintf(&b,
			" neighbor %[1]s remote-as %[2]d\n neighbor %[1]s password %[3]s\n neighbor %[1]s ttl-security hops 1\n neighbor %[1]s timers 3 %[4]d\n neighbor %[1]s timers connect 2\n",
			at[h], 65001+i, bgpPassword, bgpHold)
	}
	b.WriteString(" address-family l2vpn evpn\n")
	for _, h := range []*fabricHost{one, two} {
		fmt.Fprintf(&b, "  neighbor %[1]s activate\n  neighbor %[1]s attribute-unchanged next-hop\n", at[h])
	}
	b.WriteString(" exit-address-family\n")
	nstest.Run(t, "chown", "frr:frr", spine.dir)
	if err := os.WriteFile(filepath.Join(spine.dir, "bgpd.conf"), []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	spine.bgpd()
	for i, h := range []*fabricHost{one, two} {
		h.vnicdWith(fmt.Sprintf("as: %d, listen: [%q], hold-time: %ds, neighbours: [%s]", 65001+i, at[h], bgpHold,
			secured(at[spine], ", as: 65100")))
	}
	_, e := f.meet()
	r, ok := one.route(e.mac, two.addr)
	if !ok || !r.Active || r.Neighbour.String() != at[spine] {
		t.Errorf("route %+v %v", r, ok)
	}
	if s := spine.vtysh("show bgp l2vpn evpn"); !regexp.MustCompile(regexp.QuoteMeta("[2]:[0]:[48]:["+e.mac.String()+"]") +
		`[^*]*` + regexp.QuoteMeta(two.addr)).MatchString(s) {
		t.Errorf("the spine shows:\n%s", s)
	}
	t.Logf("vnicd evpn on host one:\n%s%s", one.cli("evpn"), one.cli("evpn", "routes", "blue"))
}
