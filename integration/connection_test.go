package integration

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// TestConnections: two tenants with equal addresses run rdma_cm connections between two hosts at the same time; `vnicd
// connection` shows them. The remote VMs become reachable through another VTEP while the connections are open, and the
// connections continue. Packets forged on the underlay are dropped and counted, and nothing is learnt from them (MT-3
// to MT-6, MT-9).
func TestConnections(t *testing.T) {
	l, ctx := newLab(t)
	h1, h2 := must[*lab.Host](t)(l.Host("h1")), must[*lab.Host](t)(l.Host("h2"))
	check(t, l.Underlay(h1, netip.MustParsePrefix("192.0.2.1/24"), h2, netip.MustParsePrefix("192.0.2.2/24"), 1500))
	check(t, h2.NS.AddAddress("ul", netip.MustParsePrefix("192.0.2.12/24")))
	tenants := []string{"blue", "red"}
	config := func(n int, local, peers, mac string) string {
		return fmt.Sprintf(`vtep: {local: %s}
networks:
  - {name: blue, vni: 100, peers: [%s]}
  - {name: red, vni: 200, peers: [%s]}
vms:
  - {name: blue%d, network: blue, mac: %q}
  - {name: red%d, network: red, mac: %q}
`, local, peers, peers, n, mac, n, mac)
	}
	check(t, h1.Run(ctx, config(1, "192.0.2.1", "192.0.2.2, 192.0.2.12", vmA.MAC)))
	check(t, h2.Run(ctx, config(2, "192.0.2.2", "192.0.2.1, 192.0.2.3", vmB.MAC)))
	var ms []*qemu.Machine // of h1, then of h2
	dumpOnFailure(t, []*lab.Host{h1, h2}, &ms)
	var cfgs []qemu.Config
	for i, h := range []*lab.Host{h1, h2} {
		for _, name := range tenants {
			v := []lab.VM{vmA, vmB}[i]
			v.Name, v.MemoryMiB = fmt.Sprint(name, i+1), 512
			cfgs = append(cfgs, must[qemu.Config](t)(h.Config(ctx, v)))
		}
	}
	var err error
	ms, err = l.Boot(ctx, cfgs...)
	check(t, err)
	for _, m := range ms {
		check(t, lab.LoadModule(ctx, m))
	}

	// From here on both tenants exchange data all the time.
	pings := func(i int) int {
		n, _ := strconv.Atoi(strings.TrimSpace(run(ctx, t, ms[i], "grep -c 'ping data' /tmp/rping.log || true")))
		return n
	}
	for i := range tenants {
		must[*qemu.Process](t)(lab.Listen(ctx, ms[2+i], "rping -s -a 0.0.0.0 -P", 0))
		must[*qemu.Process](t)(ms[i].StartShell(ctx, "exec rping -c -a 10.0.0.2 -v -C 1000000 > /tmp/rping.log 2>&1"))
	}
	progress := func(what string) {
		t.Helper()
		for i, name := range tenants {
			n := pings(i)
			more := fmt.Sprintf("%s: %s continues to ping (%d so far)", what, name, n)
			eventually(ctx, t, more, func() bool { return pings(i) > n+20 })
		}
	}
	progress("at first")

	established := func(h *lab.Host) map[string]vmConnection { // by tenant
		m := map[string]vmConnection{}
		for _, c := range connections(ctx, t, h) {
			if c.State == "established" {
				m[strings.TrimRight(c.VM, "12")] = c
			}
		}
		return m
	}
	near, far := established(h1), established(h2)
	for i, name := range tenants {
		a, b := near[name], far[name]
		if a.Role != "active" || b.Role != "passive" || a.Service != "tcp 7174" || b.Service != "tcp 7174" ||
			a.LocalID == 0 || a.LocalID != b.RemoteID || b.LocalID != a.RemoteID ||
			a.LocalQPN != b.RemoteQPN || b.LocalQPN != a.RemoteQPN || a.LocalGID != "10.0.0.1" || b.LocalGID != "10.0.0.2" ||
			a.RemoteMAC != vmB.MAC || a.QPState != "RTS" || b.QPState != "RTS" {
			t.Fatalf("%s:\n%+v\n%+v", name, a, b)
		}
		for _, x := range []struct {
			c            vmConnection
			local, other string
		}{{a, "192.0.2.1", "192.0.2.2"}, {b, "192.0.2.2", "192.0.2.1"}} {
			u := x.c.Tuple
			if u == nil || u.VNI != uint32(100*(i+1)) || u.VTEP.String() != x.other || u.Source.String() != x.local ||
				u.UDPPort != 4789 || u.DSCP != 26 || u.Moves != 0 {
				t.Errorf("%s: tuple %+v", name, u)
			}
		}
	}
	t.Logf("on h1:\n%s", must[string](t)(h1.CLI(ctx, "connection")))

	t.Run("forged", func(t *testing.T) { forged(ctx, t, h1, h2, far["blue"]) })
	progress("after the forged packets")

	// against runs a server beside the existing listeners, and its client.
	against := func(t *testing.T, i int, server, client string) {
		t.Helper()
		listeners := func() string {
			return run(ctx, t, ms[2+i], "rdma resource show cm_id | grep -c 'state LISTEN' || true")
		}
		before := listeners()
		srv := must[*qemu.Process](t)(ms[2+i].StartShell(ctx, "exec timeout 240 "+server))
		eventually(ctx, t, server+" listens", func() bool { return listeners() != before })
		if out := run(ctx, t, ms[i], "timeout 240 "+client); !strings.Contains(out, "data transfers complete") {
			t.Errorf("%s printed:\n%s", client, out)
		}
		if r := must[qemu.Result](t)(srv.Wait(ctx)); r.ExitCode != 0 {
			t.Errorf("%s: status %d: %s%s", server, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
	t.Run("ucmatose", func(t *testing.T) {
		against(t, 0, "ucmatose -c 8 -C 20 -p 7999", "ucmatose -s 10.0.0.2 -c 8 -C 20 -p 7999")
	})
	t.Run("udaddy", func(t *testing.T) { // the service ID is resolved to a datagram queue pair
		against(t, 1, "udaddy", "udaddy -s 10.0.0.2")
		for _, h := range []*lab.Host{h1, h2} {
			if !slices.ContainsFunc(connections(ctx, t, h), func(c vmConnection) bool {
				return c.Type == "UD" && c.State == "resolved" && c.Service == "udp 7174" && strings.HasPrefix(c.VM, "red") &&
					c.Tuple != nil && c.Tuple.VNI == 200
			}) {
				t.Errorf("%s shows no resolved service:\n%s", h.Name, must[string](t)(h.CLI(ctx, "connection")))
			}
		}
	})

	// Rewrite h2's address to its other one in both directions: h1 sees another VTEP.
	must[string](t)(h2.NS.Run(ctx, "nft", `table ip moved {
		chain in { type filter hook prerouting priority -300; ip daddr 192.0.2.12 udp dport 4789 ip daddr set 192.0.2.2; }
		chain out { type filter hook postrouting priority 300; ip saddr 192.0.2.2 udp dport 4789 ip saddr set 192.0.2.12; }
	}`))
	for _, n := range []string{"blue", "red"} {
		must[string](t)(h1.CLI(ctx, "fdb", "add", vmB.MAC, "network", n, "vtep", "192.0.2.12"))
	}
	progress("after the move")
	for name, c := range established(h1) {
		if was := near[name]; c.LocalID != was.LocalID || c.RemoteID != was.RemoteID || c.LocalQPN != was.LocalQPN {
			t.Errorf("%s: not the same connection: %+v, was %+v", name, c, was)
		}
		if c.Tuple == nil || c.Tuple.VTEP.String() != "192.0.2.12" || c.Tuple.Moves != 1 {
			t.Errorf("%s: after the move: %+v", name, c.Tuple)
		}
	}
	t.Logf("after the move, on h1:\n%s", must[string](t)(h1.CLI(ctx, "connection")))

	// Closed connections disappear from the table.
	for i := range tenants {
		run(ctx, t, ms[i], "pkill -INT rping; while pgrep rping; do sleep 0.1; done")
	}
	for _, h := range []*lab.Host{h1, h2} {
		eventually(ctx, t, "no connections on "+h.Name, func() bool { return len(established(h)) == 0 })
	}
	quietKernels(ctx, t, ms...)
}

// vmConnection is an element of `vnicd connection -j`.
type vmConnection struct {
	VM string `json:"vm"`
	hca.Connection
}

func connections(ctx context.Context, t *testing.T, h *lab.Host) (list []vmConnection) {
	t.Helper()
	check(t, json.Unmarshal([]byte(must[string](t)(h.CLI(ctx, "connection", "-j"))), &list))
	return list
}

// forged sends packets with one forged field from h1's underlay to h2, where c is a connection of the blue VM.
func forged(ctx context.Context, t *testing.T, h1, h2 *lab.Host, c vmConnection) {
	counts := func() map[string]uint64 {
		var s struct {
			VTEP     struct{ Drops map[string]uint64 }
			Networks []struct{ Drops map[string]uint64 }
			VMs      []struct {
				HCA struct{ Drops map[string]uint64 }
			}
		}
		check(t, json.Unmarshal([]byte(must[string](t)(h2.CLI(ctx, "status", "-j"))), &s))
		sum := map[string]uint64{}
		add := func(m map[string]uint64) {
			for k, n := range m {
				sum[k] += n
			}
		}
		add(s.VTEP.Drops)
		for _, n := range s.Networks {
			add(n.Drops)
		}
		for _, v := range s.VMs {
			add(v.HCA.Drops)
		}
		sum["psn"] = sum["sequence"] + sum["duplicate"]
		return sum
	}
	known := func() string {
		var where []string
		var fdb []struct{ Network, MAC, Port, VTEP string }
		check(t, json.Unmarshal([]byte(must[string](t)(h2.CLI(ctx, "fdb", "-j"))), &fdb))
		for _, e := range fdb {
			where = append(where, fmt.Sprint(e))
		}
		for _, x := range connections(ctx, t, h2) {
			where = append(where, fmt.Sprintln(x.VM, x.State, x.LocalQPN, x.RemoteQPN, x.LocalID, x.RemoteID, x.RemoteGID,
				x.RemoteMAC))
		}
		return strings.Join(where, "\n")
	}
	mac := func(s string) (m header.MAC) {
		check(t, func() error {
			_, err := fmt.Sscanf(strings.ReplaceAll(s, ":", " "), "%x %x %x %x %x %x", &m[0], &m[1], &m[2], &m[3], &m[4], &m[5])
			return err
		}())
		return m
	}
	gid := func(s string) [16]byte { return netip.MustParseAddr(s).As16() }
	var strange = header.MAC{2, 0, 0, 0, 9, 9}
	write := func() *cmtest.Packet {
		p := &cmtest.Packet{VNI: 100, Path: wire.Path{SMAC: mac(c.RemoteMAC), DMAC: mac(c.LocalMAC), VLAN: header.NoVLAN,
			SrcIP: gid(c.RemoteGID), DstIP: gid(c.LocalGID), SrcPort: 0xc001}}
		p.Write(c.LocalQPN, 0x123456, 0x777, 0x7000, bytes.Repeat([]byte{0xee}, 64))
		return p
	}
	request := func(x cmtest.Message) *cmtest.Packet {
		if x.Kind == cm.REQ {
			x.Local, x.Remote = gid(c.RemoteGID), gid(c.LocalGID)
		}
		p := write()
		p.Datagram(1, 0x80010000, 1, x.Bytes())
		return p
	}
	with := func(p *cmtest.Packet, mod func(*cmtest.Packet)) *cmtest.Packet { mod(p); return p }
	req := cmtest.Message{Kind: cm.REQ, LocalID: 0x66666666, Service: 0x01061c06, QPN: 0x99, PKey: 0xffff}
	before := known()
	for _, tc := range []struct {
		name, from, reason string
		p                  *cmtest.Packet
	}{
		{"VTEP, unknown", "192.0.2.99", "unknown-peer", write()},
		{"VTEP, another peer's", "192.0.2.3", "misplaced-roce", write()},
		{"VNI, unknown", "192.0.2.1", "unknown-vni", with(write(), func(p *cmtest.Packet) { p.VNI = 300 })},
		{"VNI, the other tenant's", "192.0.2.1", "qp-number",
			with(write(), func(p *cmtest.Packet) { p.VNI, p.BTH.DestQP = 200, p.BTH.DestQP^0x330000 })},
		{"inner MAC", "192.0.2.1", "unwanted-roce", with(write(), func(p *cmtest.Packet) { p.Path.SMAC = strange })},
		{"inner IP", "192.0.2.1", "peer-address", with(write(), func(p *cmtest.Packet) { p.Path.SrcIP = gid("10.0.0.9") })},
		{"QP number", "192.0.2.1", "qp-number", with(write(), func(p *cmtest.Packet) { p.BTH.DestQP ^= 0x330000 })},
		{"PSN and R_Key", "192.0.2.1", "psn", write()},
		{"Q_Key", "192.0.2.1", "q-key", with(request(req), func(p *cmtest.Packet) { p.Datagram(1, 5, 1, req.Bytes()) })},
		{"REQ, VTEP, unknown", "192.0.2.99", "unknown-peer", request(req)},
		{"REQ, VTEP, another peer's", "192.0.2.3", "misplaced-roce", request(req)},
		{"REQ, VNI", "192.0.2.1", "unknown-vni", with(request(req), func(p *cmtest.Packet) { p.VNI = 300 })},
		{"REQ, inner MAC", "192.0.2.1", "unwanted-roce",
			with(request(req), func(p *cmtest.Packet) { p.Path.SMAC = strange })},
		{"REQ, inner IP", "192.0.2.1", "cm-gid", with(request(req),
			func(p *cmtest.Packet) { p.Path.SrcIP = gid("10.0.0.9") })},
		{"DREQ, QP number", "192.0.2.1", "cm-qp-number",
			request(cmtest.Message{Kind: cm.DREQ, LocalID: c.RemoteID, RemoteID: c.LocalID, QPN: c.LocalQPN ^ 1})},
		{"RTU, communication ID", "192.0.2.1", "cm-message",
			request(cmtest.Message{Kind: cm.RTU, LocalID: c.RemoteID ^ 1, RemoteID: c.LocalID})},
	} {
		start := counts()[tc.reason]
		check(t, inject(h1, netip.MustParseAddr(tc.from), netip.MustParseAddr("192.0.2.2"), tc.p))
		eventually(ctx, t, fmt.Sprintf("%s counted as %s", tc.name, tc.reason),
			func() bool { return counts()[tc.reason] > start })
		if after := known(); after != before {
			t.Errorf("%s: something was learnt:\n%s\nbefore:\n%s", tc.name, after, before)
		}
	}
}

// inject sends a packet with any source address on a host's underlay through a raw socket, as root can.
func inject(h *lab.Host, from, to netip.Addr, p *cmtest.Packet) error {
	inner, err := p.Bytes()
	if err != nil {
		return err
	}
	b := make([]byte, header.IPv4Len+header.UDPLen, 1500)
	ip := header.IPv4{TotalLen: uint16(len(b) + len(inner)), TTL: 64, Protocol: header.ProtoUDP, Src: from.As4(),
		Dst: to.As4()}
	ip.Encode(b)
	udp := b[header.IPv4Len:]
	binary.BigEndian.PutUint16(udp, 500) // reserved, as the peer's own
	binary.BigEndian.PutUint16(udp[2:], 4789)
	binary.BigEndian.PutUint16(udp[4:], uint16(header.UDPLen+len(inner)))
	b = append(b, inner...)
	return h.NS.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: to.As4()})
	})
}
