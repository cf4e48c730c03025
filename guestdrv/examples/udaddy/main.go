// Udaddy is a host application (PF-4, MT-10) that speaks the protocol of udaddy, librdmacm's example for datagrams: its
// peer is an unmodified udaddy in a VM, or another instance. It shows how package rdmacm finds UD queue pairs by
// address and port.
//
//	host:   udaddy -socket /run/vnicd/app.hca -address 10.0.0.5     # serves one client
//	guest:  udaddy -s 10.0.0.5
//
// With an argument it is the client of the udaddy that serves there. The client sends n messages, and the server, once
// it has them, as many back. Each carries its sender's queue pair number as immediate data. Another instance of this
// program compares their contents; librdmacm's sends whatever its buffer has.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
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
	compare               bool
	timeout               time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.socket, "socket", "", "the application's socket [that of a container]")
	flag.StringVar(&o.address, "address", "", "IP address of this end in the tenant's network")
	flag.IntVar(&o.port, "port", 7174, "port of the server")
	flag.IntVar(&o.size, "size", 100, "bytes of a message, as both ends have it")
	flag.IntVar(&o.n, "n", 10, "messages in each direction, as both ends have it")
	flag.BoolVar(&o.compare, "compare", false, "compare the messages: the peer is this program, too")
	flag.DurationVar(&o.timeout, "timeout", time.Minute, "limit for the whole run")
	flag.Parse()
	o.peer = flag.Arg(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "udaddy:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) error {
	addr, err := netip.ParseAddr(o.address)
	if err != nil {
		return fmt.Errorf("-address: %w", err)
	}
	if o.n < 1 || o.n > 1000 || o.port < 1 || o.port > 65535 {
		return fmt.Errorf("-n %d, -port %d: expected 1 to 1000 messages, and a port", o.n, o.port)
	}
	dev, err := guestdrv.Open(ctx, o.socket, guestdrv.Config{})
	if err != nil {
		return err
	}
	defer dev.Close() // releases everything else, too
	if mtu := int(dev.Info().PortMTU); o.size < 1 || o.size > mtu {
		return fmt.Errorf("-size %d: expected 1 to %d bytes", o.size, mtu)
	}
	m, err := rdmacm.New(ctx, dev, rdmacm.Config{Address: addr})
	if err != nil {
		return err
	}
	defer m.Close()
	x := &exchange{options: o, out: out, dev: dev, pd: m.PD()}
	if err := x.open(ctx); err != nil {
		return err
	}
	if o.peer != "" {
		peer, err := m.Resolve(ctx, net.JoinHostPort(o.peer, strconv.Itoa(o.port)), nil)
		if err != nil {
			return err
		}
		if err := x.send(ctx, peer); err != nil {
			return err
		}
		_, err = x.receive(ctx)
		return err
	}
	s, err := m.ServeDatagrams(uint16(o.port), rdmacm.Service{QPN: x.qp.Number()})
	if err != nil {
		return err
	}
	defer s.Close()
	fmt.Fprintln(out, "waiting for a client on", s.Addr())
	from, err := x.receive(ctx)
	if err != nil {
		return err
	}
	return x.send(ctx, from)
}

// exchange is one end: a queue pair, and memory for the message to send, and for those that arrive, with their GRHs.
type exchange struct {
	options
	out io.Writer
	dev *guestdrv.Device
	pd  *guestdrv.PD
	qp  *guestdrv.QP
	scq *guestdrv.CQ
	rcq *guestdrv.CQ
	buf *guestdrv.Buffer
	mr  *guestdrv.MR
}

// at is where the message of receive request i arrives.
func (x *exchange) at(i int) int { return (i + 1) * (guestdrv.GRHLen + x.size) }

func (x *exchange) open(ctx context.Context) (err error) {
	for _, cq := range []**guestdrv.CQ{&x.scq, &x.rcq} {
		if *cq, err = x.dev.CreateCQ(ctx, x.n, guestdrv.CQOptions{}); err != nil {
			return err
		}
	}
	if x.buf, err = x.dev.Alloc(x.at(x.n)); err != nil {
		return err
	}
	if x.mr, err = x.pd.Register(ctx, x.buf, guestdrv.AccessLocalWrite); err != nil {
		return err
	}
	if x.qp, err = x.pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeUD, SendCQ: x.scq, RecvCQ: x.rcq,
		MaxSendWR: x.n, MaxRecvWR: x.n}); err != nil {
		return err
	}
	for i := range x.n {
		r := guestdrv.NewRecv(uint64(i), x.mr.SGE(x.at(i), guestdrv.GRHLen+x.size))
		if err := x.qp.PostRecv(r); err != nil {
			return err
		}
	}
	return x.qp.StartUD(ctx, rdmacm.UDPQKey)
}

// text is the content of all messages of a queue pair.
func text(qpn uint32, size int) []byte {
	return bytes.Repeat(binary.BigEndian.AppendUint32(nil, qpn), size/4+1)[:size]
}

// send sends all messages to a peer.
func (x *exchange) send(ctx context.Context, peer *rdmacm.DatagramPeer) error {
	ah, err := x.pd.CreateAH(peer.Path)
	if err != nil {
		return err
	}
	defer ah.Close()
	to := guestdrv.Datagram{AH: ah, QPN: peer.QPN, QKey: peer.QKey}
	copy(x.buf.Bytes(), text(x.qp.Number(), x.size))
	imm := [4]byte(binary.BigEndian.AppendUint32(nil, x.qp.Number()))
	for range x.n {
		wr := guestdrv.NewDatagramImm(0, to, imm, x.mr.SGE(0, x.size)).With(guestdrv.SendSignaled)
		if err := x.qp.PostSend(wr); err != nil {
			return err
		}
	}
	for range x.n {
		if _, err := await(ctx, x.scq); err != nil {
			return err
		}
	}
	fmt.Fprintln(x.out, x.n, "messages sent to queue pair", peer.QPN)
	return nil
}

// receive receives all messages and returns their sender.
func (x *exchange) receive(ctx context.Context) (*rdmacm.DatagramPeer, error) {
	var from guestdrv.GID
	var qpn uint32
	for i := range x.n {
		wc, err := await(ctx, x.rcq)
		if err != nil {
			return nil, err
		}
		buf := x.buf.Bytes()[x.at(int(wc.ID)):][:guestdrv.GRHLen+x.size]
		gid, _, ok := wc.Addresses(buf)
		imm := binary.BigEndian.Uint32(wc.Imm[:])
		switch {
		case !ok || wc.Flags&guestdrv.WCFlagWithImm == 0 || int(wc.ByteLen) != len(buf):
			return nil, fmt.Errorf("a message of %d bytes, flags %#x, expected %d and immediate data", wc.ByteLen, wc.Flags,
				len(buf))
		case imm != wc.SrcQPN:
			return nil, fmt.Errorf("a message of queue pair %d says that it is of %d", wc.SrcQPN, imm)
		case i > 0 && (gid != from || imm != qpn):
			return nil, fmt.Errorf("a message of %v, queue pair %d, among those of %v, %d", gid, imm, from, qpn)
		case x.compare && !bytes.Equal(buf[guestdrv.GRHLen:], text(imm, x.size)):
			return nil, errors.New("a message that was not sent")
		}
		from, qpn = gid, imm
	}
	fmt.Fprintln(x.out, x.n, "messages received from queue pair", qpn)
	path, err := x.dev.Resolve(ctx, from, 0)
	if err != nil {
		return nil, err
	}
	return &rdmacm.DatagramPeer{Path: path, QPN: qpn, QKey: rdmacm.UDPQKey}, nil
}

// await returns the next completion of a CQ.
func await(ctx context.Context, cq *guestdrv.CQ) (guestdrv.Completion, error) {
	var wc [1]guestdrv.Completion
	if _, err := cq.PollWait(ctx, wc[:]); err != nil {
		return wc[0], err
	}
	return wc[0], wc[0].Err()
}
