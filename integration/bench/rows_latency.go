package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

// The latency between two hosts: 8 bytes that contain a number bounce between two programs. The anchors are sockets of
// the same two hosts over kernel VXLAN.

// messenger is one of two programs that exchange numbers. Only one number is under way at a time, and none is sent
// twice in a row.
type messenger interface {
	send(n uint64) error
	// receive waits for the next number.
	receive(ctx context.Context) (uint64, error)
}

// endOfSample is the number that no program answers.
const endOfSample = 0

// bouncer exchanges numbers between two programs.
type bouncer struct {
	a, b  messenger
	sleep bool // the programs sleep until a number arrives, each in a thread of its own; else one thread polls for both
	last  uint64
	times latencies
}

func newBouncer(a, b messenger, sleep bool) *bouncer {
	return &bouncer{a: a, b: b, sleep: sleep, times: make(latencies, 0, 1<<21)}
}

// sample bounces numbers for d, at least once, and compares each with the answer. It returns the sorted times of one
// way in us, half of a round trip, which are valid until the next call.
func (p *bouncer) sample(ctx context.Context, d time.Duration) (latencies, work, error) {
	// This process's garbage collector would stop both programs.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	echo := func() error { return p.answer(ctx) }
	finish := func() error { return nil }
	if p.sleep {
		echo = func() error { return nil }
		ended := make(chan error, 1)
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			for {
				err := p.answer(ctx)
				if err != nil {
					cancel() // nobody answers any more
					if errors.Is(err, errEnd) {
						err = nil
					}
					ended <- err
					return
				}
			}
		}()
		finish = func() error { return errors.Join(p.a.send(endOfSample), <-ended) }
	}
	ph, err := begin()
	if err != nil {
		return nil, work{}, err
	}
	p.times = p.times[:0]
	start := time.Now()
	for stop := start.Add(d); err == nil && len(p.times) < cap(p.times); {
		if len(p.times) > 0 && !start.Before(stop) {
			break
		}
		if err = p.trip(ctx, echo); err == nil {
			now := time.Now()
			p.times = append(p.times, float64(now.Sub(start))/2e3)
			start = now
		}
	}
	w, werr := ph.end("message", 2*float64(len(p.times)))
	if err != nil {
		cancel()
	}
	if err = errors.Join(err, werr, finish()); err != nil {
		return nil, w, err
	}
	return p.times.sorted(), w, nil
}

// trip sends a number and compares the answer.
func (p *bouncer) trip(ctx context.Context, echo func() error) error {
	p.last++
	if err := p.a.send(p.last); err != nil {
		return err
	}
	if err := echo(); err != nil {
		return err
	}
	got, err := p.a.receive(ctx)
	if err == nil && got != p.last {
		err = fmt.Errorf("%d was answered by %d", p.last, got)
	}
	return err
}

var errEnd = errors.New("the sample has ended")

// answer returns one number.
func (p *bouncer) answer(ctx context.Context) error {
	n, err := p.b.receive(ctx)
	if err == nil && n == endOfSample {
		err = errEnd
	}
	if err == nil {
		err = p.b.send(n)
	}
	return err
}

// writer sends numbers by RDMA WRITE. It polls the memory to which the peer writes, or, if its end uses events, sleeps
// on the completion events of WRITEs with immediate data.
type writer struct {
	*end
	wr   *guestdrv.SendWR
	from *guestdrv.Buffer // the peer writes here
	seen uint64
}

var noReceiver = guestdrv.NewRecv(0) // for immediate data only

// newWriters connects two programs.
func newWriters(x, y *node, sleep bool) (w [2]*writer, err error) {
	a, b, err := connect(x, y)
	if err != nil {
		return w, err
	}
	for i, e := range []*end{a, b} {
		w[i] = &writer{end: e}
		e.events = sleep
	}
	for i, e := range w {
		buf, mr, err := e.region(pageSize)
		if err != nil {
			return w, err
		}
		e.from = buf
		if sleep {
			w[1-i].wr = guestdrv.NewWriteImm(0, mr.Remote(0), [4]byte{})
			for range depth / 2 {
				if err := e.qp.PostRecv(noReceiver); err != nil {
					return w, err
				}
			}
		} else {
			w[1-i].wr = guestdrv.NewWrite(0, mr.Remote(0))
		}
		w[1-i].wr.Inline = make([]byte, 8)
	}
	return w, nil
}

func (w *writer) send(n uint64) error {
	binary.LittleEndian.PutUint64(w.wr.Inline, n)
	return w.qp.PostSend(w.wr)
}

func (w *writer) receive(ctx context.Context) (uint64, error) {
	if w.events {
		n, err := w.next(ctx)
		if err != nil {
			return 0, err
		}
		if n != 1 {
			return 0, fmt.Errorf("%d completions for one number", n)
		}
		return w.from.Load64(0), w.qp.PostRecv(noReceiver)
	}
	for spins := 1; w.from.Load64(0) == w.seen; spins++ {
		if spins%65536 == 0 && ctx.Err() != nil {
			return 0, errStuck
		}
	}
	w.seen = w.from.Load64(0)
	return w.seen, nil
}

// socket sends numbers through a connected socket, which polls or blocks.
type socket struct {
	fd   int
	poll bool
	out  [8]byte
	in   [8]byte
}

func (s *socket) send(n uint64) error {
	binary.LittleEndian.PutUint64(s.out[:], n)
	_, err := unix.Write(s.fd, s.out[:]) // 8 bytes fit at any time
	return err
}

func (s *socket) receive(ctx context.Context) (uint64, error) {
	for got, tries := 0, 1; got < len(s.in); tries++ {
		n, err := unix.Read(s.fd, s.in[got:])
		switch {
		case err == unix.EAGAIN || err == unix.EINTR: // a blocking socket waits for patience each time
			if (!s.poll || tries%4096 == 0) && ctx.Err() != nil {
				return 0, errStuck
			}
		case err != nil:
			return 0, err
		case n == 0:
			return 0, errors.New("the peer has closed the connection")
		default:
			got += n
		}
	}
	return binary.LittleEndian.Uint64(s.in[:]), nil
}

// kernelSockets connects a program of one host with one of another over kernel VXLAN; kind is unix.SOCK_DGRAM or
// SOCK_STREAM.
func (b *Bench) kernelSockets(hosts []*lab.Host, kind int, sleep bool) (s [2]*socket, err error) {
	addr := func(i int) *unix.SockaddrInet4 {
		return &unix.SockaddrInet4{Port: 7000, Addr: netip.MustParseAddr(kernelAddr(i)).As4()}
	}
	var fds [2]int
	for i, h := range hosts[:2] {
		if err = h.NS.Do(func() (err error) {
			if fds[i], err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			b.Add(func() { _ = unix.Close(fds[i]) })
			return unix.Bind(fds[i], addr(i))
		}); err != nil {
			return s, fmt.Errorf("socket on %s: %w", h.Name, err)
		}
	}
	connected := fds
	if kind == unix.SOCK_STREAM {
		if err = unix.Listen(fds[1], 1); err != nil {
			return s, err
		}
	}
	if err = unix.Connect(fds[0], addr(1)); err != nil {
		return s, err
	}
	if kind == unix.SOCK_STREAM {
		if connected[1], _, err = unix.Accept4(fds[1], unix.SOCK_CLOEXEC); err != nil {
			return s, err
		}
		b.Add(func() { _ = unix.Close(connected[1]) })
	} else if err = unix.Connect(fds[1], addr(0)); err != nil {
		return s, err
	}
	for i, fd := range connected {
		s[i] = &socket{fd: fd, poll: !sleep}
		if kind == unix.SOCK_STREAM {
			err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		}
		patience := unix.NsecToTimeval(int64(time.Second))
		if err = errors.Join(err, unix.SetNonblock(fd, !sleep),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience)); err != nil {
			return s, err
		}
	}
	return s, nil
}

// remoteLatency measures 8 bytes between two hosts. The anchor is UDP over kernel VXLAN on the same wire, with programs
// that wait in the same way.
func remoteLatency(sleep bool) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		hosts, nodes, err := b.remote(ctx, 1500, 16<<20)
		if err != nil {
			return m, err
		}
		w, err := newWriters(nodes[0], nodes[1], sleep)
		if err != nil {
			return m, err
		}
		s, err := b.kernelSockets(hosts, unix.SOCK_DGRAM, sleep)
		if err != nil {
			return m, err
		}
		sample := func(p *bouncer, who string) func(context.Context, time.Duration) (Sample, error) {
			return func(ctx context.Context, d time.Duration) (Sample, error) {
				t, w, err := p.sample(ctx, d)
				if err != nil {
					return Sample{}, err
				}
				return Sample{Value: t.at(0.5), Extra: t.percentiles(who), Work: w}, nil
			}
		}
		return Meter{
			Ours:   sample(newBouncer(w[0], w[1], sleep), ""),
			Anchor: sample(newBouncer(s[0], s[1], sleep), "anchor, "),
		}, nil
	}
}
