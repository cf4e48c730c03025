// Pingpong is a host application (PF-4): a program of the host that exchanges messages with a VM through vnicd's RDMA.
// The peer is ibv_rc_pingpong of ibverbs-utils, or another pingpong.
//
//	host:   pingpong -socket /run/vnicd/app.hca -address 10.0.0.5            # waits, as a server does
//	guest:  ibv_rc_pingpong -d vnic0 -g INDEX 10.0.0.254                     # the host's address in the tenant's network
//
// With an argument it is the client. The ends exchange their identities over TCP, as ibv_rc_pingpong does; the RDMA
// address (-address) need not be the TCP one. Each end sends every message back, and the sender compares it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/signal"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

type options struct {
	socket, address, peer string
	port, size, n, mtu    int
	onDemand              bool
	timeout               time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.socket, "socket", "", "the application's socket [that of a container]")
	flag.StringVar(&o.address, "address", "", "IP address of this end in the tenant's network")
	flag.IntVar(&o.port, "port", 18515, "TCP port of the server")
	flag.IntVar(&o.size, "size", 4096, "bytes of a message")
	flag.IntVar(&o.n, "n", 1000, "messages each way")
	flag.IntVar(&o.mtu, "mtu", 1024, "path MTU, the same at both ends")
	flag.BoolVar(&o.onDemand, "on-demand", false, "register memory without pages; page faults provide them")
	flag.DurationVar(&o.timeout, "timeout", time.Minute, "limit for the whole run")
	flag.Parse()
	o.peer = flag.Arg(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "pingpong:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	addr, err := netip.ParseAddr(o.address)
	if err != nil {
		return fmt.Errorf("-address: %w", err)
	}
	if o.size < 1 || o.size > 1<<30 || o.n < 1 {
		return errors.New("-size and -n must be positive")
	}
	e, err := newEnd(ctx, o, guestdrv.IPGID(addr))
	if err != nil {
		return err
	}
	defer e.dev.Close() // destroys all other objects, too
	mine := identity{qpn: e.qp.Number(), psn: rand.Uint32() & 0xffffff, gid: e.gid}
	fmt.Println("local:  ", mine)
	conn, theirs, err := exchange(ctx, o, mine)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	fmt.Println("remote: ", theirs)
	// The GID is an IP address, from which the network finds the MAC.
	path, err := e.dev.Resolve(ctx, theirs.gid, 0)
	if err != nil {
		return err
	}
	peer := guestdrv.Peer{QPN: theirs.qpn, PSN: theirs.psn, Path: path}
	if err := e.qp.Connect(ctx, peer, guestdrv.ConnectOptions{PSN: mine.psn,
		MTU: guestdrv.MTUFromBytes(o.mtu)}); err != nil {
		return err
	}
	if err := ready(conn, o, mine); err != nil {
		return err
	}
	start := time.Now()
	if err := e.play(ctx, o); err != nil {
		return err
	}
	d := time.Since(start)
	total := 2 * float64(o.n) * float64(o.size)
	fmt.Printf("%.0f bytes in %.2f seconds = %.2f Mbit/sec\n", total, d.Seconds(), total*8/1e6/d.Seconds())
	fmt.Printf("%d iters in %.2f seconds = %.2f usec/iter\n", o.n, d.Seconds(), float64(d.Microseconds())/float64(o.n))
	return leave(conn)
}

// end is this program's end of the connection: a buffer to send from and one to receive into.
type end struct {
	dev      *guestdrv.Device
	gid      guestdrv.GID
	cq       *guestdrv.CQ
	qp       *guestdrv.QP
	out, in  *guestdrv.Buffer
	from, to guestdrv.SGE
	wcs      [2]guestdrv.Completion
	done     [recvID + 1]int // completions not awaited yet, by ID
}

func newEnd(ctx context.Context, o options, gid guestdrv.GID) (_ *end, err error) {
	e := &end{gid: gid}
	if e.dev, err = guestdrv.Open(ctx, o.socket, guestdrv.Config{Memory: uint64(2*o.size) + 16<<20}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = e.dev.Close()
		}
	}()
	if err = e.dev.SetGID(ctx, 0, gid, guestdrv.GIDOptions{}); err != nil {
		return nil, err
	}
	pd, err := e.dev.AllocPD(ctx)
	if err != nil {
		return nil, err
	}
	if e.out, e.from, err = memory(ctx, e.dev, pd, o); err != nil {
		return nil, err
	}
	if e.in, e.to, err = memory(ctx, e.dev, pd, o); err != nil {
		return nil, err
	}
	if e.cq, err = e.dev.CreateCQ(ctx, 16, guestdrv.CQOptions{}); err != nil {
		return nil, err
	}
	e.qp, err = pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: 1,
		MaxRecvWR: 1})
	return e, err
}

// memory makes a buffer and registers it, at once or page by page on page faults.
func memory(ctx context.Context, dev *guestdrv.Device, pd *guestdrv.PD, o options) (*guestdrv.Buffer, guestdrv.SGE,
	error) {
	buf, err := dev.Alloc(o.size)
	if err != nil {
		return nil, guestdrv.SGE{}, err
	}
	if !o.onDemand {
		mr, err := pd.Register(ctx, buf, guestdrv.AccessLocalWrite)
		if err != nil {
			return nil, guestdrv.SGE{}, err
		}
		return buf, mr.SGE(0, o.size), nil
	}
	mr, err := pd.RegisterOnDemand(ctx, buf.Addr(), uint64(o.size), guestdrv.AccessLocalWrite,
		guestdrv.PagerFunc(func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
			for i := range pas {
				pas[i] = buf.PA() + f.VA - buf.Addr() + uint64(i)*4096
			}
			return nil
		}))
	if err != nil {
		return nil, guestdrv.SGE{}, err
	}
	return buf, mr.SGEAt(buf.Addr(), o.size), nil
}

// play sends and receives in turns, and checks that every message comes back.
func (e *end) play(ctx context.Context, o options) error {
	client := o.peer != ""
	if err := e.receive(); err != nil {
		return err
	}
	for i := range o.n {
		if !client {
			if err := e.await(ctx, recvID); err != nil {
				return fmt.Errorf("message %d: %w", i, err)
			}
			// ibv_rc_pingpong returns its latest message; a pingpong is one ahead. The first message of the former is
			// arbitrary.
			if i > 0 && !is(e.in.Bytes(), i-1) && !is(e.in.Bytes(), i) {
				return fmt.Errorf("message %d differs from the one sent", i)
			}
			if err := e.receive(); err != nil {
				return err
			}
		}
		fill(e.out.Bytes(), i)
		wr := guestdrv.NewSend(sendID, e.from).With(guestdrv.SendSignaled)
		if err := e.qp.PostSend(wr); err != nil {
			return err
		}
		if err := e.await(ctx, sendID); err != nil {
			return fmt.Errorf("message %d: %w", i, err)
		}
		if client {
			if err := e.await(ctx, recvID); err != nil {
				return fmt.Errorf("answer %d: %w", i, err)
			}
			if !is(e.in.Bytes(), i) {
				return fmt.Errorf("answer %d differs from the message sent", i)
			}
			if err := e.receive(); err != nil {
				return err
			}
		}
	}
	return nil
}

const sendID, recvID = 1, 2

func (e *end) receive() error {
	return e.qp.PostRecv(guestdrv.NewRecv(recvID, e.to))
}

// await waits for a completion; sends and receives complete in any order.
func (e *end) await(ctx context.Context, id uint64) error {
	for e.done[id] == 0 {
		n, err := e.cq.PollWait(ctx, e.wcs[:])
		if err != nil {
			return err
		}
		for _, wc := range e.wcs[:n] {
			if err := wc.Err(); err != nil {
				return err
			}
			e.done[wc.ID]++
		}
	}
	e.done[id]--
	return nil
}

// pattern is byte at of message i: messages and their parts differ.
func pattern(i, at int) byte { return byte(at*7 + at>>8 + i) }

func fill(b []byte, i int) {
	for at := range b {
		b[at] = pattern(i, at)
	}
}

func is(b []byte, i int) bool {
	for at := range b {
		if b[at] != pattern(i, at) {
			return false
		}
	}
	return true
}
