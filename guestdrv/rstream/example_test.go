package rstream_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/guestdrv/rstream"
)

// A web server and its client, over RDMA.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	// Programs have fixed paths: "/run/vnicd/app1.hca" for the application named app1 in vnicd.yaml.
	sockets, stop := rig.Applications(2)
	defer stop()
	server, err := openManager(ctx, sockets[0], "10.0.0.1")
	if err != nil {
		log.Fatal(err)
	}
	defer server.Device().Close()
	defer server.Close()
	client, err := openManager(ctx, sockets[1], "10.0.0.2")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Device().Close()
	defer client.Close()

	l, err := rstream.Listen(server, 80, rstream.Config{})
	if err != nil {
		log.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s over RDMA", r.URL.Path)
	})}
	served := make(chan error)
	go func() { served <- s.Serve(l) }()

	transport := &http.Transport{DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
		return rstream.Dial(ctx, client, address, rstream.Config{})
	}}
	resp, err := (&http.Client{Transport: transport}).Get("http://10.0.0.1:80/hello")
	if err != nil {
		log.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		log.Fatal(err)
	}
	_ = resp.Body.Close()
	fmt.Printf("%s: %s\n", resp.Status, body)

	transport.CloseIdleConnections()
	if err := s.Shutdown(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(<-served)
	// Output:
	// 200 OK: /hello over RDMA
	// http: Server closed
}

// openManager opens an application's device and a connection manager on it.
func openManager(ctx context.Context, socket, address string) (*rdmacm.Manager, error) {
	dev, err := guestdrv.Open(ctx, socket, guestdrv.Config{})
	if err != nil {
		return nil, err
	}
	m, err := rdmacm.New(ctx, dev, rdmacm.Config{Address: netip.MustParseAddr(address)})
	if err != nil {
		_ = dev.Close()
		return nil, err
	}
	return m, nil
}
