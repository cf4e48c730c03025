package main

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/vnicd/vnicd/integration/harness"
	"github.com/vnicd/vnicd/integration/lab"
)

// Two hosts joined by a veth pair; on each a network of vnicd's with a TAP, and beside it the kernel's own: a bridge with a vxlan
// device in it. Programs on one host talk to the other by either.

func tapAddr(i int) string { return fmt.Sprintf("10.98.0.%d", i+1) }

func (b *Bench) tenants(ctx context.Context, v6 bool) (hosts [2]*lab.Host, err error) {
	addr := func(i int) netip.Addr {
		if v6 {
			return netip.MustParseAddr(fmt.Sprintf("fd01::%d", i+1))
		}
		return netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
	}
	bits := 24
	if v6 {
		bits = 64
	}
	for i := range hosts {
		if hosts[i], err = b.host(); err != nil {
			return
		}
	}
	if err = harness.AddVeth(hosts[0].NS, "ul", hosts[1].NS, "ul", 1500); err != nil {
		return
	}
	for i, h := range hosts {
		if err = h.NS.AddAddress("ul", netip.PrefixFrom(addr(i), bits)); err != nil {
			return
		}
		if _, err = h.NS.Shell(ctx, fmt.Sprintf("ip link add kbr type bridge && ip link add kvx type vxlan id 4242 dev ul local %s remote %s dstport 4790 && "+
			"ip link set kvx master kbr && ip link set kvx up && ip addr add %s/24 dev kbr && ip link set kbr up", addr(i), addr(1-i), kernelAddr(i))); err != nil {
			return
		}
		if err = h.Run(ctx, fmt.Sprintf("vtep: {local: %q}\nnetworks: [{name: blue, vni: 100, peers: [%q], tap: {name: blue0, addresses: [%s/24]}}]\n", addr(i), addr(1-i), tapAddr(i))); err != nil {
			return
		}
	}
	return hosts, b.iperfServer(hosts[1])
}

// both measures the same by our addresses and by the kernel's. f also returns how many packets (or whatever the unit is) came through, for the
// time that both daemons ran for each.
func both(hosts [2]*lab.Host, unit string, f func(ctx context.Context, addr string, d time.Duration) (Sample, float64, error)) Meter {
	return Meter{
		Ours: func(ctx context.Context, d time.Duration) (Sample, error) {
			return costing(hosts[:], unit, func() (Sample, float64, error) { return f(ctx, tapAddr(1), d) })
		},
		Anchor: func(ctx context.Context, d time.Duration) (Sample, error) {
			s, _, err := f(ctx, kernelAddr(1), d)
			return s, err
		},
	}
}

// costing adds to a sample what the hosts' daemons have run for each of so many units. Unlike the rate it hardly depends on who else uses
// the machine.
func costing(hosts []*lab.Host, unit string, f func() (Sample, float64, error)) (Sample, error) {
	ran := func() (sum time.Duration, err error) {
		for _, h := range hosts {
			t, err := cpuTime(h.Proc)
			if err != nil {
				return 0, err
			}
			sum += t
		}
		return sum, nil
	}
	before, err := ran()
	if err != nil {
		return Sample{}, err
	}
	s, n, err := f()
	if err != nil {
		return s, err
	}
	after, err := ran()
	if s.Extra == nil {
		s.Extra = map[string]float64{}
	}
	s.Extra["daemons, ns/"+unit] = float64(after-before) / n
	return s, err
}

// hostTCP is one connection of iperf3.
func hostTCP(v6 bool) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (Meter, error) {
		hosts, err := b.tenants(ctx, v6)
		return both(hosts, "KiB", func(ctx context.Context, addr string, d time.Duration) (Sample, float64, error) {
			r, err := iperf(ctx, hosts[0], addr, d)
			return Sample{Value: r.End.Received.BitsPerSecond / giga}, r.End.Received.Bytes / 1024, err
		}), err
	}
}

// hostUDP is iperf3 sending datagrams as fast as it can; what arrives counts. The sender is not held up by a TAP, as it is by the
// kernel's path, which it walks itself: what it sends too much costs it, and us, the processor.
func hostUDP(size int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (Meter, error) {
		hosts, err := b.tenants(ctx, false)
		return both(hosts, "packet", func(ctx context.Context, addr string, d time.Duration) (Sample, float64, error) {
			r, err := iperf(ctx, hosts[0], addr, d, "-u", "-b", "0", "-l", strconv.Itoa(size))
			n := r.End.Sum.Packets - r.End.Sum.Lost
			return Sample{
				Value: n / r.End.Sum.Seconds,
				Extra: map[string]float64{"lost, %": 100 * r.End.Sum.Lost / r.End.Sum.Packets},
			}, n, err
		}), err
	}
}
