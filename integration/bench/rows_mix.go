package main

import (
	"context"
	"errors"
	"sync"
	"time"
)

// mixedWork measures the latency between two VMs while everything else is going on in the same daemon at once: two
// other VMs stream WRITEs of 1 MiB, QPs of two more meet guest faults, and a TCP connection runs from a host port to
// another host through vnicd. The anchor is the latency while nothing else is going on.
func mixedWork(ctx context.Context, b *Bench) (m Meter, err error) {
	const size, memory = 1 << 20, 64 << 20
	hosts, err := b.tenants(ctx, false, false, 6)
	if err != nil {
		return m, err
	}
	nodes, err := b.attach(hosts[0], 0, 6, memory+32<<20)
	if err != nil {
		return m, err
	}
	x, y, err := connect(nodes[0], nodes[1])
	if err != nil {
		return m, err
	}
	load, err := newDemand(nodes[2], nodes[3], size, memory, 8)
	if err != nil {
		return m, err
	}
	faults, err := newStorm(hosts[0], nodes[4], nodes[5], 4)
	if err != nil {
		return m, err
	}
	busy, err := pingPong(nodes, x, y, load.feed)
	if err != nil {
		return m, err
	}
	quiet, err := pingPong(nodes, x, y, nothing)
	if err != nil {
		return m, err
	}
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		load.proof.prepare()
		before, start := load.done, time.Now()
		stop := faults.keepBlowing(ctx, true)
		var transfer sync.WaitGroup
		var tcp iperfResult
		var tcpErr error
		transfer.Go(func() { tcp, tcpErr = iperf(ctx, hosts[0], tapAddr(1), d) })
		s, err := busy(ctx, d)
		waves, stormErr := stop()
		transfer.Wait()
		if err = errors.Join(err, stormErr, tcpErr); err != nil {
			return s, err
		}
		took := time.Since(start).Seconds()
		s.Extra["WRITE 1 MiB, GB/s"] = float64(load.done-before) * size / giga / took
		s.Extra["faults/s"] = float64(waves*len(faults.ends)) / took
		s.Extra["TCP, Gbit/s"] = tcp.End.Received.BitsPerSecond / giga
		if err := load.drain(ctx); err != nil {
			return s, err
		}
		return s, load.proof.verify(load.done - before)
	}
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		s, err := quiet(ctx, d)
		s.Extra = map[string]float64{"anchor, p99": s.Extra["p99"], "anchor, p99.9": s.Extra["p99.9"]}
		return s, err
	}
	return m, nil
}
