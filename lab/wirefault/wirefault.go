// Package wirefault is a wire with faults: it relays Ethernet frames between two interfaces, delays them, and loses,
// reorders, duplicates or marks a share of them. Many kernels, as those of virtual machines that build software, have
// neither netem nor a marking qdisc; here the faults are also repeatable, by seed.
package wirefault

import (
	"encoding/binary"
	"fmt"
	"math/rand"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Policy sets the share of UDP frames that suffer each fault, in parts per thousand. Other frames (ARP, ND) pass
// untouched, so that the hosts resolve each other's addresses.
type Policy struct {
	Drop, Reorder, Duplicate int
	// Congest is the share that is treated as by a router's queue (RFC 3168): ECN-capable frames are marked, others
	// dropped.
	Congest int
	// Distance is the number of frames that overtake a reordered one (default 3).
	Distance int
	Seed     int64
	// Delay is the time that all frames take. At most maxDelayed are on their way in one direction, others are dropped.
	Delay time.Duration
	// OneWay limits faults and delay to frames from a to b.
	OneWay bool
}

// maxDelayed bounds the frames that are delayed in one direction. With an MTU of 1500 it is 140 MB/s at 100 ms.
const maxDelayed = 10_000

// lateTime is how long a reordered frame waits for those that overtake it.
const lateTime = 5 * time.Millisecond

// Counters count both directions of one relay.
type Counters struct{ Frames, Dropped, Reordered, Duplicated, Marked atomic.Uint64 }

// Wire is a running relay.
type Wire struct {
	Counters
	policy atomic.Pointer[Policy]
	fds    [2]int
	stop   int
	wg     sync.WaitGroup
	once   sync.Once
}

// Start relays between interfaces a and b of the named network namespace. Both must be up. Close stops the relay.
func Start(ns, a, b string, p Policy) (*Wire, error) {
	w := &Wire{fds: [2]int{-1, -1}, stop: -1}
	w.SetPolicy(p)
	if err := inNamespace(ns, func() error {
		for i, name := range []string{a, b} {
			fd, err := packetSocket(name)
			if err != nil {
				return err
			}
			w.fds[i] = fd
		}
		return nil
	}); err != nil {
		w.closeFDs()
		return nil, fmt.Errorf("wirefault: %s-%s in %s: %w", a, b, ns, err)
	}
	var err error
	if w.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		w.closeFDs()
		return nil, fmt.Errorf("wirefault: eventfd: %w", err)
	}
	for i := range w.fds {
		w.wg.Add(1)
		go func() {
			defer w.wg.Done()
			w.relay(w.fds[i], w.fds[1-i], int64(i))
		}()
	}
	return w, nil
}

// SetPolicy changes the faults while the relay runs.
func (w *Wire) SetPolicy(p Policy) {
	if p.Distance == 0 {
		p.Distance = 3
	}
	w.policy.Store(&p)
}

// Close stops the relay and waits for it. Idempotent.
func (w *Wire) Close() error {
	w.once.Do(func() {
		_, _ = unix.Write(w.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		w.wg.Wait()
		w.closeFDs()
	})
	return nil
}

func (w *Wire) closeFDs() {
	for _, fd := range []int{w.fds[0], w.fds[1], w.stop} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// inNamespace runs f on a thread of that namespace, which ends with f.
func inNamespace(ns string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		h, err := netns.GetFromName(ns)
		if err != nil {
			done <- fmt.Errorf("namespace %s: %w", ns, err)
			return
		}
		defer h.Close()
		if err := netns.Set(h); err != nil {
			done <- fmt.Errorf("enter namespace %s: %w", ns, err)
			return
		}
		done <- f()
	}()
	return <-done
}

func packetSocket(name string) (int, error) {
	ifi, err := net.InterfaceByName(name)
	if err != nil {
		return -1, err
	}
	const ethPAll = 0x0300 // ETH_P_ALL in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, ethPAll)
	if err != nil {
		return -1, fmt.Errorf("packet socket: %w", err)
	}
	fail := func(what string, err error) (int, error) {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("%s on %s: %w", what, name, err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: ethPAll, Ifindex: ifi.Index}); err != nil {
		return fail("bind", err)
	}
	if err := unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP,
		&unix.PacketMreq{Ifindex: int32(ifi.Index), Type: unix.PACKET_MR_PROMISC}); err != nil {
		return fail("promiscuous mode", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1); err != nil {
		return fail("PACKET_IGNORE_OUTGOING", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
	return fd, nil
}

// held is a frame delayed until later ones have overtaken it.
type held struct {
	frame []byte
	left  int
}

// delayed is a frame on its way.
type delayed struct {
	frame []byte
	due   time.Time
}

// transmit sends a frame, as soon as the interface accepts it.
func transmit(to int, f []byte) {
	for {
		err := unix.Send(to, f, 0)
		if err != unix.EAGAIN && err != unix.ENOBUFS {
			return
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(to), Events: unix.POLLOUT}}, 10)
	}
}

// timeout returns how long a relay may sleep, at most; nil: until a frame comes.
func timeout(late []held, way []delayed) *unix.Timespec {
	var d time.Duration
	switch {
	case len(way) > 0:
		d = max(time.Until(way[0].due), 0)
		if len(late) > 0 {
			d = min(d, lateTime)
		}
	case len(late) > 0:
		d = lateTime
	default:
		return nil
	}
	ts := unix.NsecToTimespec(int64(d))
	return &ts
}

func (w *Wire) relay(from, to int, dir int64) {
	rnd := rand.New(rand.NewSource(w.policy.Load().Seed*2 + dir))
	buf := make([]byte, 65536+64)
	var late []held
	var way []delayed // in the order of their times
	faulty := func(p *Policy) bool { return dir == 0 || !p.OneWay }
	send := func(f []byte) {
		p := w.policy.Load()
		switch {
		case len(way) == 0 && (p.Delay <= 0 || !faulty(p)):
			transmit(to, f)
		case len(way) < maxDelayed:
			way = append(way, delayed{slices.Clone(f), time.Now().Add(p.Delay)})
		default:
			w.Dropped.Add(1)
		}
	}
	last := time.Now() // of the frames received
	for {
		fds := []unix.PollFd{{Fd: int32(from), Events: unix.POLLIN}, {Fd: int32(w.stop), Events: unix.POLLIN}}
		n, err := unix.Ppoll(fds, timeout(late, way), nil)
		if err != nil && err != unix.EINTR {
			return
		}
		if fds[1].Revents != 0 {
			return
		}
		now := time.Now()
		for len(way) > 0 && !way[0].due.After(now) {
			transmit(to, way[0].frame)
			way = way[1:]
		}
		if n <= 0 {
			// Held frames are sent after a while even if none follow.
			if now.Sub(last) >= lateTime {
				for _, h := range late {
					send(h.frame)
				}
				late = late[:0]
			}
			continue
		}
		k, _, err := unix.Recvfrom(from, buf, 0)
		if err != nil {
			continue
		}
		last = now
		w.Frames.Add(1)
		frame, p := buf[:k], w.policy.Load()
		if isUDP(frame) && faulty(p) {
			if rnd.Intn(1000) < p.Drop {
				w.Dropped.Add(1)
				continue
			}
			if rnd.Intn(1000) < p.Congest {
				if !mark(frame) {
					w.Dropped.Add(1)
					continue
				}
				w.Marked.Add(1)
			}
			if rnd.Intn(1000) < p.Reorder {
				w.Reordered.Add(1)
				late = append(late, held{append([]byte(nil), frame...), p.Distance})
				continue
			}
			if rnd.Intn(1000) < p.Duplicate {
				w.Duplicated.Add(1)
				send(frame)
			}
		}
		send(frame)
		keep := late[:0]
		for _, h := range late {
			if h.left--; h.left <= 0 {
				send(h.frame)
			} else {
				keep = append(keep, h)
			}
		}
		late = keep
	}
}

// isUDP reports whether an IPv4 or IPv6 frame carries UDP (the tunnels).
func isUDP(f []byte) bool {
	switch {
	case len(f) >= 34 && f[12] == 0x08 && f[13] == 0x00:
		return f[23] == unix.IPPROTO_UDP
	case len(f) >= 54 && f[12] == 0x86 && f[13] == 0xdd:
		return f[20] == unix.IPPROTO_UDP
	}
	return false
}

// mark sets congestion experienced in the frame's outer IP header, or returns false if the frame is not ECN-capable.
func mark(f []byte) bool {
	if f[12] == 0x86 { // IPv6: the ECN bits are in the middle of a byte
		if f[15]&0x30 == 0 {
			return false
		}
		f[15] |= 0x30
		return true
	}
	tos := f[15]
	if tos&3 == 0 {
		return false
	}
	f[15] |= 3
	// RFC 1624: update the checksum by the difference.
	sum := uint32(^binary.BigEndian.Uint16(f[24:])) + uint32(f[15]-tos)
	binary.BigEndian.PutUint16(f[24:], ^uint16(sum+sum>>16))
	return true
}
