package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/guestdrv/rstream"
	"github.com/vnicd/vnicd/lab"
)

// streamBuffer is that of TCP after a second on such a path.
const streamBuffer = 4 << 20

// stream compares connections of guestdrv/rstream with TCP: the same program writes and reads net.Conns.
func stream(ctx context.Context, b *Bench) (m Meter, err error) {
	// The applications of the hosts, whose addresses vnicd makes known.
	address := func(i int) string { return fmt.Sprintf("10.0.9.%d", i+1) }
	hosts, _, err := b.remoteWith(ctx, 1500, 4<<20, func(_ *lab.Host, i int) (string, error) {
		return peered(i) + fmt.Sprintf("applications: [{name: app, network: blue, mac: \"02:00:00:00:09:%02x\", ips: [%s]}]\n",
			i+1, address(i)), nil
	})
	if err != nil {
		return m, err
	}
	cfg := rstream.Config{SendBuffer: streamBuffer, ReceiveBuffer: streamBuffer}
	var managers [2]*rdmacm.Manager
	for i, h := range hosts {
		dev, err := guestdrv.Open(ctx, h.Dir+"/app.hca", guestdrv.Config{Memory: 32 << 20})
		if err != nil {
			return m, err
		}
		b.Add(func() { _ = dev.Close() })
		if managers[i], err = rdmacm.New(ctx, dev, rdmacm.Config{Address: netip.MustParseAddr(address(i))}); err != nil {
			return m, err
		}
		b.Add(func() { _ = managers[i].Close() })
	}
	l, err := rstream.Listen(managers[1], 7471, cfg)
	if err != nil {
		return m, err
	}
	b.Add(func() { _ = l.Close() })
	from, to, err := connected(l, func() (net.Conn, error) {
		return rstream.Dial(ctx, managers[0], l.Addr().String(), cfg)
	})
	if err != nil {
		return m, err
	}
	b.Add(func() { _, _ = from.Close(), to.Close() })

	var tcp net.Listener
	if err := hosts[1].NS.Do(func() (err error) {
		tcp, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.MustParseAddrPort(kernelAddr(1)+":0")))
		return err
	}); err != nil {
		return m, err
	}
	b.Add(func() { _ = tcp.Close() })
	kernelFrom, kernelTo, err := connected(tcp, func() (c net.Conn, err error) {
		err = hosts[0].NS.Do(func() error { c, err = net.DialTCP("tcp4", nil, tcp.Addr().(*net.TCPAddr)); return err })
		return c, err
	})
	if err != nil {
		return m, err
	}
	b.Add(func() { _, _ = kernelFrom.Close(), kernelTo.Close() })
	return Meter{
		Ours: func(_ context.Context, d time.Duration) (Sample, error) {
			return costing(hosts, "KiB", func() (Sample, float64, error) { return carried(from, to, d) })
		},
		Anchor: func(_ context.Context, d time.Duration) (Sample, error) {
			return working("KiB", func() (Sample, float64, error) { return carried(kernelFrom, kernelTo, d) })
		},
	}, nil
}

// connected returns both ends of a new connection.
func connected(l net.Listener, dial func() (net.Conn, error)) (from, to net.Conn, err error) {
	accepted := make(chan error, 1)
	go func() {
		var err error
		to, err = l.Accept()
		accepted <- err
	}()
	if from, err = dial(); err != nil {
		_ = l.Close()
	}
	return from, to, errors.Join(err, <-accepted)
}

// carried writes 64 KiB at a time to a connection for d, and reads and compares all of it at the other end. The rate,
// in Gbit/s, is that until the last byte has been read; it also returns how many KiB there were.
func carried(from, to net.Conn, d time.Duration) (Sample, float64, error) {
	const size = 64 << 10
	deadline := time.Now().Add(d + time.Minute)
	if err := errors.Join(from.SetDeadline(deadline), to.SetDeadline(deadline)); err != nil {
		return Sample{}, 0, err
	}
	// Each block begins with its number, of which the last one's highest bit is set.
	const last = 1 << 63
	begin := time.Now()
	wrote := make(chan error, 1)
	go func() {
		block := randomBytes(size)
		for n := uint64(0); ; n++ {
			over := time.Since(begin) >= d
			if over {
				n |= last
			}
			binary.BigEndian.PutUint64(block, n)
			if _, err := from.Write(block); err != nil || over {
				wrote <- err
				return
			}
		}
	}()
	want, block := randomBytes(size), make([]byte, size)
	for n := uint64(0); ; n++ {
		if _, err := io.ReadFull(to, block); err != nil {
			return Sample{}, 0, errors.Join(err, <-wrote)
		}
		got := binary.BigEndian.Uint64(block)
		if got&^last != n || !bytes.Equal(block[8:], want[8:]) {
			return Sample{}, 0, fmt.Errorf("block %d differs from what was written", n)
		}
		if got&last != 0 {
			bits := float64(n+1) * size * 8
			return Sample{Value: bits / giga / time.Since(begin).Seconds()}, bits / 8 / 1024, <-wrote
		}
	}
}
