// Rhttp is a host application (PF-4, MT-10) that serves the files of a directory by HTTP over RDMA. Its clients are
// unmodified programs in VMs, with the library of librdmacm that redirects their sockets, or another instance. It
// shows package rstream.
//
//	host:   rhttp -socket /run/vnicd/app.hca -address 10.0.0.5 -dir /srv
//	guest:  LD_PRELOAD=/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so PROGRAM http://10.0.0.5:8080/file
//
// Package rstream says which programs the library can serve.
//
// With URLs as arguments it gets them, and writes what they have to its standard output.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/guestdrv/rstream"
)

type options struct {
	socket, address, dir string
	port                 int
	urls                 []string
}

func main() {
	var o options
	flag.StringVar(&o.socket, "socket", "", "the application's socket [that of a container]")
	flag.StringVar(&o.address, "address", "", "IP address of this end in the tenant's network")
	flag.StringVar(&o.dir, "dir", ".", "directory that is served")
	flag.IntVar(&o.port, "port", 8080, "port of the server")
	flag.Parse()
	o.urls = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "rhttp:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) error {
	addr, err := netip.ParseAddr(o.address)
	if err != nil {
		return fmt.Errorf("-address: %w", err)
	}
	if o.port < 1 || o.port > 65535 {
		return fmt.Errorf("-port %d: expected 1..65535", o.port)
	}
	dev, err := guestdrv.Open(ctx, o.socket, guestdrv.Config{Memory: 256 << 20})
	if err != nil {
		return err
	}
	defer dev.Close() // releases everything else, too
	m, err := rdmacm.New(ctx, dev, rdmacm.Config{Address: addr})
	if err != nil {
		return err
	}
	defer m.Close()
	if len(o.urls) > 0 {
		return get(ctx, m, o.urls, out)
	}
	return serve(ctx, m, o, out)
}

// serve serves the directory until the context ends.
func serve(ctx context.Context, m *rdmacm.Manager, o options, out io.Writer) error {
	l, err := rstream.Listen(m, uint16(o.port), rstream.Config{})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "serving %s on http://%v\n", o.dir, l.Addr())
	s := &http.Server{Handler: http.FileServer(http.Dir(o.dir)), ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout: time.Minute}
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// get writes the contents of URLs.
func get(ctx context.Context, m *rdmacm.Manager, urls []string, out io.Writer) error {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
		return rstream.Dial(ctx, m, address, rstream.Config{})
	}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	for _, url := range urls {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			_ = resp.Body.Close()
			return fmt.Errorf("%s: %s", url, resp.Status)
		}
		if _, err := io.Copy(out, resp.Body); err != nil {
			return err
		}
		_ = resp.Body.Close()
	}
	return nil
}
