// Rping is a host application (PF-4, MT-10) that speaks the protocol of rping, the program of rdmacm-utils: its peer is
// an unmodified rping in a VM, or another instance. It shows package rdmacm.
//
//	host:   rping -socket /run/vnicd/app.hca -address 10.0.0.5            # serves one client
//	guest:  rping -c -a 10.0.0.5 -C 10 -V
//
// With an argument it is the client of the rping -s that listens there. In each round the server READs the client's
// text and WRITEs it into another buffer of the client, which compares the two.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

type options struct {
	socket, address, peer string
	port, size, n         int
	timeout               time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.socket, "socket", "", "the application's socket [that of a container]")
	flag.StringVar(&o.address, "address", "", "IP address of this end in the tenant's network")
	flag.IntVar(&o.port, "port", 7174, "port of the server")
	flag.IntVar(&o.size, "size", 64, "bytes of a client's text; the most that a server accepts")
	flag.IntVar(&o.n, "n", 10, "rounds of a client")
	flag.DurationVar(&o.timeout, "timeout", time.Minute, "limit for the whole run")
	flag.Parse()
	o.peer = flag.Arg(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "rping:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	addr, err := netip.ParseAddr(o.address)
	if err != nil {
		return fmt.Errorf("-address: %w", err)
	}
	if o.size < 32 || o.size > 1<<20 || o.n < 1 || o.port < 1 || o.port > 65535 {
		return fmt.Errorf("-size %d, -n %d, -port %d: expected 32 bytes to 1 MiB, rounds, and a port", o.size, o.n, o.port)
	}
	dev, err := guestdrv.Open(ctx, o.socket, guestdrv.Config{})
	if err != nil {
		return err
	}
	defer dev.Close() // releases everything else, too
	m, err := rdmacm.New(ctx, dev, rdmacm.Config{Address: addr})
	if err != nil {
		return err
	}
	defer m.Close()
	p, err := newPinger(ctx, m, o.size)
	if err != nil {
		return err
	}
	if o.peer != "" {
		if p.conn, err = m.Dial(ctx, net.JoinHostPort(o.peer, strconv.Itoa(o.port)), p.params()); err != nil {
			return err
		}
		defer p.conn.Close()
		return p.client(ctx, o.n)
	}
	l, err := m.Listen(uint16(o.port), rdmacm.ListenConfig{})
	if err != nil {
		return err
	}
	fmt.Println("waiting for a client on", l.Addr())
	req, err := l.Accept(ctx)
	if err != nil {
		return err
	}
	if p.conn, err = req.Accept(ctx, p.params()); err != nil {
		return err
	}
	defer p.conn.Close()
	return p.server(ctx)
}
