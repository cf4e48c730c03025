package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

const (
	// incastRate is the rate of the receiver's link, in bits of Ethernet frames per second. Two cores can fill it.
	incastRate = 500e6
	// incastBuffer is what the switch holds for that link, in bytes; it drops what exceeds it.
	incastBuffer = 256 << 10
)

// star joins n hosts by a switch, a kernel bridge in a namespace of its own. Host 0's link has the rate and the buffer
// of the constants above, towards the host.
func (b *Bench) star(ctx context.Context, n int) (hosts []*lab.Host, sw *harness.Namespace, err error) {
	if hosts, err = b.hosts(n); err != nil {
		return
	}
	if sw, err = harness.NewNamespace("vnicd-switch"); err != nil {
		return
	}
	b.Add(func() { _ = sw.Close() })
	if _, err = sw.Shell(ctx, "ip link add sw type bridge && ip link set sw up"); err != nil {
		return
	}
	for i, h := range hosts {
		port := fmt.Sprintf("p%d", i)
		if err = harness.AddVeth(h.NS, "ul", sw, port, 1500); err != nil {
			return
		}
		if err = h.NS.AddAddress("ul", netip.PrefixFrom(underlayAddr(i), 24)); err != nil {
			return
		}
		if _, err = sw.Run(ctx, "ip", "link", "set", port, "master", "sw"); err != nil {
			return
		}
		var peers strings.Builder
		for _, p := range starPeers(i, n) {
			fmt.Fprintf(&peers, " && bridge fdb append 00:00:00:00:00:00 dev kvx dst %s", p)
		}
		// Port 4789 belongs to vnicd.
		if _, err = h.NS.Shell(ctx, fmt.Sprintf("ip link add kvx type vxlan id 4242 dev ul local %s dstport 4790 && "+
			"ip addr add %s/24 dev kvx && ip link set kvx up%s", underlayAddr(i), kernelAddr(i), peers.String())); err != nil {
			return
		}
	}
	if _, err = sw.Shell(ctx, fmt.Sprintf("tc qdisc add dev p0 root tbf rate %.0fbit burst 16k limit %d", incastRate,
		incastBuffer)); err != nil {
		return
	}
	return hosts, sw, withoutOffloads(ctx, hosts)
}

// starPeers returns the underlay addresses of host i's peers: all others for host 0, host 0 for all others. With every
// other host as a peer 33 hosts would exceed the kernel's neighbour table, which namespaces share.
func starPeers(i, n int) (peers []string) {
	if i > 0 {
		return []string{underlayAddr(0).String()}
	}
	for j := 1; j < n; j++ {
		peers = append(peers, underlayAddr(j).String())
	}
	return peers
}

// incast measures senders that stream to one receiver at the same time: the part of the receiver's link that carries
// data that arrives, and the smallest share of a sender.
func incast(senders int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		const size, window = 16 << 10, 32
		hosts, sw, err := b.star(ctx, senders+1)
		if err != nil {
			return m, err
		}
		var nodes []*node
		var streams []*checkedStream
		var flows []tcpFlow
		for i, h := range hosts {
			if err := b.daemon(ctx, h, i, 1, fmt.Sprintf("vtep: {local: %s}\nnetworks: [{name: blue, vni: 100, peers: [%s]}]\n",
				underlayAddr(i), strings.Join(starPeers(i, len(hosts)), ", "))); err != nil {
				return m, err
			}
			n, err := b.open(h, i, 32<<20)
			if err != nil {
				return m, err
			}
			nodes = append(nodes, n)
			if i == 0 {
				continue
			}
			s, err := newCheckedStream(n, nodes[0], size, window, 1)
			if err != nil {
				return m, err
			}
			streams, flows = append(streams, s), append(flows, tcpFlow{h, hosts[0], kernelAddr(0)})
		}
		tcp, err := b.tcpContest(flows)
		if err != nil {
			return m, err
		}
		figures := func(who string) func([]float64, time.Duration) Sample {
			return func(served []float64, d time.Duration) Sample {
				smallest, largest, sum := shares(served)
				return Sample{Value: sum * 8 / d.Seconds() / incastRate, Extra: map[string]float64{
					who + fmt.Sprintf("smallest share, of 1/%d", senders): smallest, who + "largest": largest}}
			}
		}
		// Without drops the switch is not the bottleneck.
		dropping := func(c *contest, who string) func(context.Context, time.Duration) (Sample, error) {
			f := c.sample(figures(who))
			return func(ctx context.Context, d time.Duration) (Sample, error) {
				before, err := queued(ctx, sw)
				if err != nil {
					return Sample{}, err
				}
				s, err := f(ctx, d)
				if err != nil {
					return s, err
				}
				after, err := queued(ctx, sw)
				s.Extra[who+"dropped, %"] = after.dropped(before)
				return s, err
			}
		}
		return Meter{Ours: dropping(rdmaContest(streams), ""), Anchor: dropping(tcp, "anchor, ")}, nil
	}
}

// queue is what the switch's queue for the receiver has passed on and dropped.
type queue struct{ Packets, Drops float64 }

func queued(ctx context.Context, sw *harness.Namespace) (q queue, err error) {
	out, err := sw.Run(ctx, "tc", "-s", "-j", "qdisc", "show", "dev", "p0")
	if err != nil {
		return q, err
	}
	return parseQueue(out)
}

// parseQueue reads tc's statistics of one queueing discipline.
func parseQueue(out string) (q queue, err error) {
	var all []queue
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return q, fmt.Errorf("tc's statistics: %w", err)
	}
	if len(all) != 1 {
		return q, fmt.Errorf("%d queueing disciplines, expected was one: %q", len(all), out)
	}
	return all[0], nil
}

// dropped returns the share of the frames since before that were dropped, in percent.
func (q queue) dropped(before queue) float64 {
	drops := q.Drops - before.Drops
	return 100 * drops / max(drops+q.Packets-before.Packets, 1)
}

// fairTenants runs two tenants on two hosts, one with one QP and one with 16, each of which alone could use the whole
// path. The anchor's tenants have a kernel VXLAN each and as many TCP connections.
func fairTenants(ctx context.Context, b *Bench) (m Meter, err error) {
	const size, window, many = 64 << 10, 16, 16
	hosts, err := b.hosts(2)
	if err != nil {
		return m, err
	}
	if err := harness.AddVeth(hosts[0].NS, "ul", hosts[1].NS, "ul", 1500); err != nil {
		return m, err
	}
	networks := []string{"blue", "red"}
	addr := func(network, host int) string { return fmt.Sprintf("10.%d.0.%d", 100+network, host+1) }
	var nodes [2][2]*node // by network and host
	for i, h := range hosts {
		if err := h.NS.AddAddress("ul", netip.PrefixFrom(underlayAddr(i), 24)); err != nil {
			return m, err
		}
		config := fmt.Sprintf("vtep: {local: %s}\nnetworks:\n", underlayAddr(i))
		vms := "vms:\n"
		for k, name := range networks {
			config += fmt.Sprintf("  - {name: %s, vni: %d, peers: [%s]}\n", name, 100+k, underlayAddr(1-i))
			vms += fmt.Sprintf("  - {name: %s, network: %s, mac: %q}\n", vmName(2*k+i), name, vmMAC(2*k+i))
			// Port 4789 belongs to vnicd.
			if _, err := h.NS.Shell(ctx, fmt.Sprintf("ip link add kvx%d type vxlan id %d dev ul local %s remote %s dstport 4790 && "+
				"ip addr add %s/24 dev kvx%d && ip link set kvx%d up", k, 4242+k, underlayAddr(i), underlayAddr(1-i), addr(k, i),
				k, k)); err != nil {
				return m, err
			}
		}
		if err := b.start(ctx, h, config+vms); err != nil {
			return m, err
		}
		for k := range networks {
			if nodes[k][i], err = b.open(h, 2*k+i, 64<<20); err != nil {
				return m, err
			}
		}
	}
	var streams []*checkedStream
	var flows []tcpFlow
	for i := range 1 + many { // the first is blue's
		k := min(i, 1)
		s, err := newCheckedStream(nodes[k][0], nodes[k][1], size, window, 1)
		if err != nil {
			return m, err
		}
		streams, flows = append(streams, s), append(flows, tcpFlow{hosts[0], hosts[1], addr(k, 1)})
	}
	tcp, err := b.tcpContest(flows)
	if err != nil {
		return m, err
	}
	figures := func(who string) func([]float64, time.Duration) Sample {
		return func(served []float64, d time.Duration) Sample {
			_, _, reds := shares(served[1:])
			smallest, _, sum := shares([]float64{served[0], reds})
			return Sample{Value: smallest, Extra: map[string]float64{who + "Gbit/s": sum * 8 / giga / d.Seconds(),
				who + "one QP's, of 1/2": served[0] / sum * 2}}
		}
	}
	return Meter{Ours: rdmaContest(streams).sample(figures("")), Anchor: tcp.sample(figures("anchor, "))}, nil
}
