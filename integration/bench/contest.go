package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/lab"
)

// contest is a set of flows that send at the same time and as fast as they can.
type contest struct {
	sent []*atomic.Uint64 // bytes of each flow that have reached the peer
	// send keeps flow i busy until stop is set.
	send func(ctx context.Context, i int, stop *atomic.Bool) error
	// after runs when all flows have stopped; may be nil.
	after func() error
}

// run lets the flows find their rates for a quarter of d and returns the bytes of each during the following d.
func (c *contest) run(ctx context.Context, d time.Duration) (served []float64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var stop atomic.Bool
	var flows sync.WaitGroup
	errs := make([]error, len(c.sent))
	for i := range c.sent {
		flows.Go(func() {
			if errs[i] = c.send(ctx, i, &stop); errs[i] != nil {
				cancel() // the others need not go on
			}
		})
	}
	pause := func(d time.Duration) {
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
	}
	pause(d / 4)
	start := time.Now()
	for _, n := range c.sent {
		served = append(served, -float64(n.Load()))
	}
	pause(d)
	took := time.Since(start)
	for i, n := range c.sent {
		served[i] = (served[i] + float64(n.Load())) * d.Seconds() / took.Seconds()
	}
	stop.Store(true)
	flows.Wait()
	if err = errors.Join(errs...); err == nil && c.after != nil {
		err = c.after()
	}
	return served, err
}

// shares returns the smallest and the largest share relative to a fair one, and the sum.
func shares(served []float64) (smallest, largest, sum float64) {
	smallest, largest = served[0], served[0]
	for _, n := range served {
		smallest, largest, sum = min(smallest, n), max(largest, n), sum+n
	}
	fair := sum / float64(len(served))
	return smallest / fair, largest / fair, sum
}

// rdmaContest is a contest of streams, whose data is compared after each run.
func rdmaContest(streams []*checkedStream) *contest {
	c := &contest{}
	for range streams {
		c.sent = append(c.sent, new(atomic.Uint64))
	}
	c.send = func(ctx context.Context, i int, stop *atomic.Bool) error {
		return streams[i].until(ctx, stop, c.sent[i])
	}
	c.after = func() (err error) {
		for _, s := range streams {
			err = errors.Join(err, s.compare())
		}
		return err
	}
	return c
}

// tcpFlow is a connection from one host to another.
type tcpFlow struct {
	from, to *lab.Host
	addr     string // of to
}

// tcpContest connects the flows. What a connection has sent is what the peer's program has read.
func (b *Bench) tcpContest(flows []tcpFlow) (*contest, error) {
	c := &contest{}
	conns := make([]*net.TCPConn, len(flows))
	for i, f := range flows {
		n := new(atomic.Uint64)
		c.sent = append(c.sent, n)
		addr := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(f.addr), uint16(7100+i)))
		var l *net.TCPListener
		if err := f.to.NS.Do(func() (err error) { l, err = net.ListenTCP("tcp4", addr); return err }); err != nil {
			return nil, err
		}
		b.Add(func() { _ = l.Close() })
		dial := func() (err error) { conns[i], err = net.DialTCP("tcp4", nil, addr); return err }
		if err := f.from.NS.Do(dial); err != nil {
			return nil, fmt.Errorf("%s to %s: %w", f.from.Name, f.to.Name, err)
		}
		b.Add(func() { _ = conns[i].Close() })
		peer, err := l.Accept()
		if err != nil {
			return nil, err
		}
		var reading sync.WaitGroup
		reading.Go(func() {
			buf := make([]byte, 128<<10)
			for {
				k, err := peer.Read(buf)
				n.Add(uint64(k))
				if err != nil {
					return // closed
				}
			}
		})
		b.Add(func() { _ = peer.Close(); reading.Wait() })
	}
	data := make([]byte, 64<<10)
	c.send = func(ctx context.Context, i int, stop *atomic.Bool) error {
		for !stop.Load() && ctx.Err() == nil {
			if _, err := conns[i].Write(data); err != nil {
				return err
			}
		}
		return ctx.Err()
	}
	return c, nil
}

// total returns the KiB of all flows so far.
func (c *contest) total() (kib float64) {
	for _, n := range c.sent {
		kib += float64(n.Load()) / 1024
	}
	return kib
}

// sample is a sample of a contest; f makes it of the bytes that each flow sent within d.
func (c *contest) sample(f func(served []float64, d time.Duration) Sample) func(context.Context, time.Duration) (Sample,
	error) {
	return func(ctx context.Context, d time.Duration) (Sample, error) {
		return working("KiB", func() (Sample, float64, error) {
			before := c.total()
			served, err := c.run(ctx, d)
			if err != nil {
				return Sample{}, 0, err
			}
			return f(served, d), c.total() - before, nil
		})
	}
}
