package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// Two hosts are joined by a veth pair. Each has a vnicd network with a TAP and, beside it, a kernel bridge with a vxlan
// device. Programs on one host reach the other over either.

func tapAddr(i int) string { return fmt.Sprintf("10.98.0.%d", i+1) }

// tenants returns two hosts with a TAP and with the kernel's bridge and vxlan, over the same underlay; the first has
// that many VMs, too. short enables the short path (the default) and, over IPv6, its prerequisites.
func (b *Bench) tenants(ctx context.Context, v6, short bool, vms int) (hosts []*lab.Host, err error) {
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
				way, addr(i), short, addr(1-i), tapAddr(i))+vmList(0, vms)); err != nil {
			return
		}
		vms = 0
	}
	return hosts, b.iperfServer(hosts[1])
}

// transfer is the result of one measurement of a path.
type transfer struct {
	value    float64       // the row's figure
	units    float64       // packets or KiB received
	work     work          // of the transfer alone; if not set, all of it is measured
	programs time.Duration // processor time of sender and receiver
	extra    map[string]float64
}

// both measures the same transfer over our addresses and over the kernel's. Beside the rates it shows the processor
// time per received packet (or other unit): of our daemons only, and of the whole path, which is the programs at both
// ends with the kernel work charged to them and, for ours, the daemons. Unlike rates, these figures hardly depend on
// the machine's other load.
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
			return Sample{Work: t.work}, t.units, err
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

// hostTCP measures one iperf3 connection. Afterwards another one over the same path compares its data.
func hostTCP(v6, short bool) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (Meter, error) {
		hosts, err := b.tenants(ctx, v6, short, 0)
		return both(hosts, "KiB", func(ctx context.Context, addr string, d time.Duration) (transfer, error) {
			var r iperfResult
			s, err := working("KiB", func() (_ Sample, _ float64, err error) {
				r, err = iperf(ctx, hosts[0], addr, d)
				return Sample{}, r.End.Received.Bytes / 1024, err
			})
			if err == nil {
				err = proveTCP(ctx, hosts[0].NS, hosts[1].NS, netip.MustParseAddr(addr))
			}
			return transfer{value: r.End.Received.BitsPerSecond / giga, units: s.Work.units, work: s.Work,
				programs: r.ran(r.End.Sent.Seconds)}, err
		}), err
	}
}

// hostUDP searches for the highest rate of datagrams with at most 0.1 % lost, as the receiving program reads them. The
// same programs use both paths. A search offers many rates; the processor time per packet is that of all of them.
func hostUDP(size int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		hosts, err := b.tenants(ctx, false, true, 0)
		if err != nil {
			return m, err
		}
		paths := map[string]*datagramPath{}
		found := map[string]float64{}
		for _, addr := range []string{tapAddr(1), kernelAddr(1)} {
			p, err := newDatagramPath(hosts[0].NS, hosts[1].NS, netip.MustParseAddr(addr), size, socketBuffer)
			if err != nil {
				return m, err
			}
			b.Add(p.close)
			if err := p.reach(ctx); err != nil {
				return m, err
			}
			paths[addr], found[addr] = p, 100e3
		}
		return both(hosts, "packet", func(ctx context.Context, addr string, d time.Duration) (t transfer, err error) {
			probes := 0.0
			t.value, err = highestRate(found[addr], func(rate float64) (probe, error) {
				r, programs, err := paths[addr].try(ctx, rate, probeTime(rate, d/4))
				t.programs += programs
				t.units += float64(r.read)
				probes++
				return r, err
			})
			found[addr] = t.value
			t.extra = map[string]float64{"probes": probes}
			return t, err
		}), nil
	}
}
