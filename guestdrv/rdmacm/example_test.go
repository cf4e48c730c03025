package rdmacm_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/netip"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

// A server receives a message from a client.
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

	l, err := server.Listen(7471, rdmacm.ListenConfig{})
	if err != nil {
		log.Fatal(err)
	}
	received := make(chan error)
	go func() { received <- receive(ctx, l) }()

	conn, err := client.Dial(ctx, l.Addr().String(), rdmacm.Params{QP: guestdrv.QPConfig{MaxInline: 64},
		PrivateData: []byte("example")})
	if err != nil {
		log.Fatal(err)
	}
	wr := guestdrv.NewSend(1).With(guestdrv.SendSignaled)
	wr.Inline = []byte("hello")
	if err := conn.QP().PostSend(wr); err != nil {
		log.Fatal(err)
	}
	// The completion says that the message has arrived.
	wcs := make([]guestdrv.Completion, 1)
	if _, err := conn.SendCQ().PollWait(ctx, wcs); err != nil {
		log.Fatal(err)
	}
	if err := wcs[0].Err(); err != nil {
		log.Fatal(err)
	}
	if err := conn.Disconnect(ctx); err != nil {
		log.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		log.Fatal(err)
	}
	if err := <-received; err != nil {
		log.Fatal(err)
	}
	if err := l.Close(); err != nil {
		log.Fatal(err)
	}
	if _, err := client.Dial(ctx, "10.0.0.1:7471", rdmacm.Params{}); errors.Is(err, rdmacm.RejectServiceID) {
		fmt.Println(err)
	}
	// Output:
	// request from 10.0.0.2 with "example"
	// received "hello"
	// the peer has disconnected
	// connection rejected: nobody listens on the port
}

// receive accepts a connection and receives one message.
func receive(ctx context.Context, l *rdmacm.Listener) error {
	req, err := l.Accept(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("request from %v with %q\n", req.RemoteAddr().Addr(), req.PrivateData()[:len("example")])
	var buf *guestdrv.Buffer
	conn, err := req.Accept(ctx, rdmacm.Params{Prepare: func(c *rdmacm.Conn) (err error) {
		m := c.Manager()
		if buf, err = m.Device().Alloc(4096); err != nil {
			return err
		}
		mr, err := m.PD().Register(ctx, buf, guestdrv.AccessLocalWrite)
		if err != nil {
			return err
		}
		return c.QP().PostRecv(guestdrv.NewRecv(1, mr.SGE(0, 64)))
	}})
	if err != nil {
		return err
	}
	wcs := make([]guestdrv.Completion, 1)
	if _, err := conn.RecvCQ().PollWait(ctx, wcs); err != nil {
		return err
	}
	if err := wcs[0].Err(); err != nil {
		return err
	}
	fmt.Printf("received %q\n", buf.Bytes()[:wcs[0].ByteLen])
	<-conn.Done()
	fmt.Println(conn.Err())
	return conn.Close()
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
