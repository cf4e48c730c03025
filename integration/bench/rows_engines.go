package main

import (
	"context"
	"fmt"
	"time"
)

// manyEngines measures the rate of WRITEs of 4 KiB between four pairs of VMs by a daemon with n engines. The anchor is
// a daemon with one engine. One thread posts for all, so that the engines have the other processors.
func manyEngines(n int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		const pairs, message, memory = 4, 4 << 10, 1 << 20
		open := func(engines int) (func(context.Context, time.Duration) (Sample, error), error) {
			h, err := b.host()
			if err != nil {
				return nil, err
			}
			config := fmt.Sprintf("engines: %d\nnetworks: [{name: blue, vni: 100}]\n", engines)
			if err := b.daemon(ctx, h, 0, 2*pairs, config); err != nil {
				return nil, err
			}
			nodes, err := b.attach(h, 0, 2*pairs, 32<<20)
			if err != nil {
				return nil, err
			}
			var all []*demand
			for i := range pairs {
				d, err := newDemand(nodes[2*i], nodes[2*i+1], message, memory, 64)
				if err != nil {
					return nil, err
				}
				all = append(all, d)
			}
			return func(ctx context.Context, d time.Duration) (Sample, error) {
				_, w, err := feedAll(ctx, all, d, nothing)
				return Sample{Value: w.units / d.Seconds(), Work: w}, err
			}, nil
		}
		if m.Ours, err = open(n); err == nil {
			m.Anchor, err = open(1)
		}
		return m, err
	}
}
