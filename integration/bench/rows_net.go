package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/integration/harness"
	"github.com/vnicd/vnicd/integration/lab"
)

// Two hosts are joined by a veth pair. Each has a vnicd network with a TAP and, beside it, a kernel bridge with a vxlan
// device. Programs on one host reach the other over either.

func tapAddr(i int) string { return fmt.Sprintf("10.98.0.%d", i+1) }

// tenants returns two hosts with a TAP and with the kernel's bridge and vxlan, over the same underlay. short enables
// the short path (the default) and, over IPv6, its prerequisites.
func (b *Bench) tenants(ctx context.Context, v6, short bool) (hosts []*lab.Host, err error) {
	addr := func(i int) netip.Addr {
		if v6 {
			return netip.MustParseAddr(fmt.Sprintf("fd01::%d", i+1))
		}
		return underlayAddr(i)
	}
	bits, way := 24, ""
	if v6 {
		bits = 64
	}
	if !short {
		way = "short-path: false\n"
	}
	if hosts, err = b.hosts(2); err != nil {
		return
	}
	if err = harness.AddVeth(hosts[0].NS, "ul", hosts[1].NS, "ul", 1500); err != nil {
		return
	}
	for i, h := range hosts {
		if err = h.NS.AddAddress("ul", netip.PrefixFrom(addr(i), bits)); err != nil {
			return
		}
		if _, err = h.NS.Shell(ctx,
			fmt.Sprintf("ip link add kbr type bridge && ip link add kvx type vxlan id 4242 dev ul local %s remote %s dstport 4790 && "+
				"ip link set kvx master kbr && ip link set kvx up && ip addr add %s/24 dev kbr && ip link set kbr up", addr(i),
				addr(1-i), kernelAddr(i))); err != nil {
			return
		}
		if err = b.start(ctx, h,
			fmt.Sprintf("%svtep: {local: %q, zero-checksum6: %v}\nnetworks: [{name: blue, vni: 100, peers: [%q], tap: {name: blue0, addresses: [%s/24]}}]\n",
				way, addr(i), short, addr(1-i), tapAddr(i))); err != nil {
			return
		}
	}
	return hosts, b.iperfServer(hosts[1])
}

// transfer is the result of one run of iperf3.
type transfer struct {
	value    float64       // the row's figure
	units    float64       // packets or KiB received
	programs time.Duration // processor time of iperf3, both ends
	extra    map[string]float64
}

// both measures the same transfer over our addresses and over the kernel's. Beside the rates it shows the processor
// time per received packet (or other unit): of our daemons only, and of the whole path, which is iperf3 at both ends
// with the kernel work charged to it and, for ours, the daemons. Unlike rates, these figures hardly depend on the
// machine's other load.
func both(hosts []*lab.Host, unit string, f func(ctx context.Context, addr string, d time.Duration) (transfer,
	error)) Meter {
	measure := func(ctx context.Context, who, addr string, d time.Duration) (Sample, error) {
		before, err := ran(hosts)
		if err != nil {
			return Sample{}, err
		}
		var t transfer
		s, err := working(unit, func() (_ Sample, _ float64, err error) {
			t, err = f(ctx, addr, d)
			return Sample{}, t.units, err
		})
		if err != nil {
			return Sample{}, err
		}
		after, err := ran(hosts)
		if t.units == 0 {
			return Sample{}, fmt.Errorf("nothing arrived at %s", addr)
		}
		s.Value = t.value
		s.Extra = map[string]float64{who + ", all ns/" + unit: float64(after-before+t.programs) / t.units}
		if who == "ours" {
			s.Extra["daemons, ns/"+unit] = float64(after-before) / t.units
		}
		for k, v := range t.extra {
			s.Extra[who+", "+k] = v
		}
		return s, err
	}
	return Meter{
		Ours: func(ctx context.Context, d time.Duration) (Sample, error) { return measure(ctx, "ours", tapAddr(1), d) },
		Anchor: func(ctx context.Context, d time.Duration) (Sample, error) {
			return measure(ctx, "kernel", kernelAddr(1), d)
		},
	}
}

// hostTCP measures one iperf3 connection.
func hostTCP(v6, short bool) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (Meter, error) {
		hosts, err := b.tenants(ctx, v6, short)
		return both(hosts, "KiB", func(ctx context.Context, addr string, d time.Duration) (transfer, error) {
			r, err := iperf(ctx, hosts[0], addr, d)
			return transfer{value: r.End.Received.BitsPerSecond / giga, units: r.End.Received.Bytes / 1024,
				programs: r.ran(r.End.Sent.Seconds)}, err
		}), err
	}
}

// hostUDP measures iperf3 sending datagrams at full speed. The figure counts datagrams that reach the receiving host's
// UDP, that is, the path from interface to interface. How many iperf3 reads from its socket in time depends on
// scheduling and is shown beside it: a TAP does not slow the sender down, while the kernel's path runs on the sender's
// own time.
func hostUDP(size int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (Meter, error) {
		hosts, err := b.tenants(ctx, false, true)
		return both(hosts, "packet", func(ctx context.Context, addr string, d time.Duration) (transfer, error) {
			before, err := unread(hosts[1].NS)
			if err != nil {
				return transfer{}, err
			}
			r, err := iperf(ctx, hosts[0], addr, d, "-u", "-b", "0", "-l", strconv.Itoa(size))
			if err != nil {
				return transfer{}, err
			}
			after, err := unread(hosts[1].NS)
			u := r.End.Sum
			read := u.Packets - u.Lost
			n := read + after - before
			return transfer{value: n / u.Seconds, units: n, programs: r.ran(u.Seconds),
				extra: map[string]float64{"read/s": read / u.Seconds}}, err
		}), err
	}
}

// unread returns the number of datagrams that the kernel dropped in a namespace for full sockets, without VTEP sockets.
func unread(ns *harness.Namespace) (n float64, err error) {
	var snmp, sockets []byte
	if err := ns.Do(func() (err error) {
		// These files belong to the calling thread's namespace.
		if snmp, err = os.ReadFile("/proc/thread-self/net/snmp"); err != nil {
			return err
		}
		sockets, err = os.ReadFile("/proc/thread-self/net/udp")
		return err
	}); err != nil {
		return 0, err
	}
	return parseUnread(string(snmp), string(sockets))
}

// parseUnread subtracts the drops of sockets on port 4789 from all RcvbufErrors.
func parseUnread(snmp, sockets string) (n float64, err error) {
	var names []string
	for l := range strings.Lines(snmp) {
		f := strings.Fields(l)
		switch i := slices.Index(names, "RcvbufErrors"); {
		case f[0] != "Udp:":
		case names == nil:
			names = f
		case i < 0 || i >= len(f):
			return 0, fmt.Errorf("no RcvbufErrors in %q", snmp)
		default:
			if n, err = strconv.ParseFloat(f[i], 64); err != nil {
				return 0, err
			}
		}
	}
	for l := range strings.Lines(sockets) {
		f := strings.Fields(l)
		if len(f) < 3 || !strings.HasSuffix(f[1], fmt.Sprintf(":%04X", 4789)) {
			continue
		}
		drops, err := strconv.ParseFloat(f[len(f)-1], 64)
		if err != nil {
			return 0, err
		}
		n -= drops
	}
	return n, nil
}
