package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/lab/harness"
)

// datagramPath sends UDP datagrams from one namespace to another at a given rate and counts those that the receiver has
// read. Each datagram names its probe and its number and carries known data: the receiver compares it, and counts each
// datagram once.
type datagramPath struct {
	from, to int // sockets
	size     int
	data     []byte // of all datagrams, each from its own offset
	probe    uint64 // number of the last probe

	sender, receiver []mmsghdr // one batch each
	heads            [][headSize]byte
	pieces           []unix.Iovec
	arrivals         [][]byte
}

const (
	headSize  = 16 // probe and number, little endian
	batchSize = 64 // datagrams of one system call

	// Buffer space of the receiver's socket. Linux's default holds 270 small datagrams, which is less than arrives
	// while the receiver waits for a processor.
	socketBuffer = 4 << 20

	tick    = 100 * time.Microsecond // the sender sleeps until then when it is not late
	longest = 2 * time.Millisecond   // what a late sender sends at once at most
	silence = 50 * time.Millisecond  // after which what has not been read is lost
)

// newDatagramPath opens the sockets. Datagrams have size bytes of payload and go to addr, which belongs to the
// namespace to.
func newDatagramPath(from, to *harness.Namespace, addr netip.Addr, size, buffer int) (p *datagramPath, err error) {
	if size < headSize {
		return nil, fmt.Errorf("datagrams of %d bytes: want at least %d", size, headSize)
	}
	p = &datagramPath{from: -1, to: -1, size: size, data: randomBytes(1<<16 + size)}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	at := unix.SockaddrInet4{Addr: addr.As4()}
	if err = to.Do(func() (err error) {
		if p.to, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := errors.Join(unix.SetsockoptInt(p.to, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer),
			p.patience(silence), unix.Bind(p.to, &at)); err != nil {
			return err
		}
		name, err := unix.Getsockname(p.to)
		if err == nil {
			at.Port = name.(*unix.SockaddrInet4).Port
		}
		return err
	}); err != nil {
		return nil, fmt.Errorf("receiver's socket: %w", err)
	}
	if err = from.Do(func() (err error) {
		if p.from, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Connect(p.from, &at)
	}); err != nil {
		return nil, fmt.Errorf("sender's socket: %w", err)
	}
	p.sender, p.receiver = make([]mmsghdr, batchSize), make([]mmsghdr, batchSize)
	p.heads, p.pieces = make([][headSize]byte, batchSize), make([]unix.Iovec, 3*batchSize)
	for i := range batchSize {
		out, in := p.pieces[3*i:][:2], p.pieces[3*i+2:][:1]
		out[0] = iovec(p.heads[i][:])
		p.sender[i].point(out)
		p.arrivals = append(p.arrivals, make([]byte, size+1)) // a datagram that is too long shows
		in[0] = iovec(p.arrivals[i])
		p.receiver[i].point(in)
	}
	return p, nil
}

// patience sets how long the receiver waits for another datagram.
func (p *datagramPath) patience(d time.Duration) error {
	t := unix.NsecToTimeval(d.Nanoseconds())
	return unix.SetsockoptTimeval(p.to, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &t)
}

func (p *datagramPath) close() {
	for _, fd := range []int{p.from, p.to} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// randomBytes returns n bytes, the same ones for each call.
func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b) // never fails
	return b
}

// payload returns the data of a datagram behind its head.
func (p *datagramPath) payload(number uint64) []byte {
	return p.data[number*31%(1<<16):][:p.size-headSize]
}

// tally is the receiver's account of a probe.
type tally struct {
	path   *datagramPath
	probe  uint64
	seen   []uint64 // bitmap of numbers
	read   int
	wrong  int // datagrams that differ from what was sent
	last   time.Time
	thread time.Duration // processor time of the receiver's thread
}

// take accounts for a datagram and returns whether it is new.
func (t *tally) take(d []byte) bool {
	if len(d) != t.path.size {
		t.wrong++
		return false
	}
	if probe := binary.LittleEndian.Uint64(d); probe != t.probe {
		if probe > t.probe {
			t.wrong++
		}
		return false // a straggler of an earlier probe
	}
	number := binary.LittleEndian.Uint64(d[8:])
	if number/64 >= uint64(len(t.seen)) || !bytes.Equal(d[headSize:], t.path.payload(number)) {
		t.wrong++
		return false
	}
	word, bit := &t.seen[number/64], uint64(1)<<(number%64)
	if *word&bit != 0 {
		return false
	}
	*word |= bit
	t.read++
	return true
}

// receive reads datagrams until all are read that the sender has sent, or no more arrive. sent is negative until the
// sender has ended.
func (p *datagramPath) receive(t *tally, sent *atomic.Int64) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := threadTime()
	defer func() { t.thread = threadTime() - start }()
	for {
		ended := sent.Load()
		if ended >= 0 && int64(t.read) >= ended {
			return nil
		}
		n, err := recvmmsg(p.to, p.receiver, 0)
		if errors.Is(err, unix.EAGAIN) {
			if ended >= 0 {
				return nil // silence since the sender ended
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("receiving: %w", err)
		}
		fresh := false
		for i := range n {
			d := p.arrivals[i][:p.receiver[i].n]
			fresh = t.take(d) || fresh
		}
		if fresh {
			t.last = time.Now()
		}
	}
}

// send offers n datagrams evenly at that rate and returns how many it sent: fewer if it takes half as long again.
func (p *datagramPath) send(ctx context.Context, rate float64, n int) (sent int, err error) {
	begin := time.Now()
	planned := time.Duration(float64(n) / rate * float64(time.Second))
	schedule := begin
	for sent < n {
		now := time.Now()
		if now.Sub(begin) > planned+planned/2 || ctx.Err() != nil {
			break
		}
		late := now.Sub(schedule) - time.Duration(float64(sent)/rate*float64(time.Second))
		if late > longest { // no burst longer than this
			schedule = schedule.Add(late - longest)
		}
		due := min(int(rate*now.Sub(schedule).Seconds()), n)
		if due <= sent {
			sleepUntil(now.Add(tick))
			continue
		}
		batch := min(due-sent, batchSize)
		for i := range batch {
			number := uint64(sent + i)
			binary.LittleEndian.PutUint64(p.heads[i][:], p.probe)
			binary.LittleEndian.PutUint64(p.heads[i][8:], number)
			p.pieces[3*i+1] = iovec(p.payload(number))
		}
		for at := 0; at < batch; {
			k, err := sendmmsg(p.from, p.sender[at:batch])
			if err != nil {
				return sent, fmt.Errorf("sending: %w", err)
			}
			at += k
			sent += k
		}
	}
	return sent, ctx.Err()
}

// try offers a rate for d. The second result is the processor time of sender and receiver, with the kernel's work on
// their behalf.
func (p *datagramPath) try(ctx context.Context, rate float64, d time.Duration) (probe, time.Duration, error) {
	p.probe++
	n := max(int(rate*d.Seconds()), 1)
	t := &tally{path: p, probe: p.probe, seen: make([]uint64, n/64+1)}
	var sent atomic.Int64
	sent.Store(-1)
	var wg sync.WaitGroup
	var receiving, sending error
	wg.Go(func() { receiving = p.receive(t, &sent) })
	var start time.Time
	var used time.Duration
	wg.Go(func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its timer slack
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
		before := threadTime()
		start = time.Now()
		var count int
		count, sending = p.send(ctx, rate, n)
		used = threadTime() - before
		sent.Store(int64(count))
	})
	wg.Wait()
	err := errors.Join(sending, receiving)
	if t.wrong > 0 {
		err = errors.Join(err, fmt.Errorf("%d datagrams differ from what was sent", t.wrong))
	}
	return probe{sent: int(sent.Load()), read: t.read, elapsed: t.last.Sub(start)}, used + t.thread, err
}

// reach waits until the path carries a datagram, which needs ARP.
func (p *datagramPath) reach(ctx context.Context) error {
	for {
		if r, _, err := p.try(ctx, 1000, time.Millisecond); err != nil || r.read > 0 {
			return err
		}
	}
}

func sleepUntil(t time.Time) {
	d := unix.NsecToTimespec(time.Until(t).Nanoseconds())
	_ = unix.Nanosleep(&d, nil) // at worst too short
}

// threadTime returns the processor time of the calling thread.
func threadTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &u) // cannot fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
