package evpn

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// remote is the BGP of a Speaker in another process (process.go): gobgp, the sessions, and all decoding of BGP. That
// process may end at any time, and what it sends is hostile input: it can do no more than the neighbours could. Each
// message and each route is bounded and checked again here, and routes are judged by the Speaker.
//
// When it ends, its sessions have ended. As after the loss of a session, with graceful restart the routes stay until
// their neighbour has sent all of them to the next process, or for the restart time (RFC 4724 section 4.2); without,
// they are removed at once. The next process gets the configuration and all of this host's routes.
type remote struct {
	s    *Speaker
	stop func()

	opened chan error // capacity 1: the result of the first process
	wake   chan struct{}

	mu    sync.Mutex // after Speaker.mu
	said  map[own]advert
	dirty map[own]bool // added to said or removed since the process was told
	order []own        // keys of dirty, by time
	again bool         // the Speaker wants all paths
	state []SessionStatus
	list  *listing // nil: no request
	lists uint32
	up    bool // a process has its configuration

	asking sync.Mutex // one list at a time; before mu
}

// listing is a request for all best paths.
type listing struct {
	id    uint32
	asked bool
	paths []path
	done  chan error // capacity 1
}

// Bounds of waiting for the process.
const (
	openTime = 30 * time.Second
	listTime = 20 * time.Second
)

// mostPerSecond bounds the routes that are taken from the process, so that one that was taken over cannot keep the
// Speaker from its other work. A full table from a fast neighbour arrives at a tenth of it.
const mostPerSecond = 200_000

// levelEvery is how often a change of the log's level is passed on.
const levelEvery = time.Second

func newRemote(s *Speaker) *remote {
	r := &remote{s: s, opened: make(chan error, 1), wake: make(chan struct{}, 1), said: map[own]advert{},
		dirty: map[own]bool{}}
	r.downLocked()
	return r
}

// open starts the process and waits until it listens.
func (r *remote) open() error {
	r.stop = r.s.cfg.Process(r.serve)
	select {
	case err := <-r.opened:
		if err != nil {
			r.close()
		}
		return err
	case <-time.After(openTime):
		r.close()
		return fmt.Errorf("evpn: the process for BGP has not started within %v", openTime)
	}
}

func (r *remote) close() { r.stop() }

// downLocked resets what is known of the process.
func (r *remote) downLocked() {
	r.up = false
	r.state = []SessionStatus{}
	for i := range r.s.cfg.Neighbours {
		n := &r.s.cfg.Neighbours[i]
		r.state = append(r.state, SessionStatus{Neighbour: n.Address, AS: n.AS, State: "idle", MaxRoutes: n.limit(),
			Why: "the process for BGP is being started"})
	}
	slices.SortFunc(r.state, func(a, b SessionStatus) int { return a.Neighbour.Compare(b.Neighbour) })
	if r.list != nil {
		r.list.done <- errors.New("evpn: the process for BGP has ended")
		r.list = nil
	}
}

func (r *remote) sessions() []SessionStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.state)
}

func (r *remote) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *remote) advertise(a advert) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said[a.own] = a
	r.changeLocked(a.own)
	return nil
}

func (r *remote) withdraw(o own) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.said, o)
	r.changeLocked(o)
	return nil
}

func (r *remote) changeLocked(o own) {
	if !r.up {
		return // the next process is told everything
	}
	if !r.dirty[o] {
		r.dirty[o] = true
		r.order = append(r.order, o)
	}
	r.poke()
}

func (r *remote) replay(func(*path)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.again = r.up // otherwise all paths are to come
	r.poke()
	return nil
}

func (r *remote) each(f func(*path)) error {
	r.asking.Lock()
	defer r.asking.Unlock()
	r.mu.Lock()
	if !r.up {
		r.mu.Unlock()
		return errors.New("evpn: the process for BGP is being started")
	}
	r.lists++
	l := &listing{id: r.lists, done: make(chan error, 1)}
	r.list = l
	r.poke()
	r.mu.Unlock()
	var err error
	select {
	case err = <-l.done:
	case <-time.After(listTime):
		err = fmt.Errorf("evpn: the process for BGP has not listed its routes within %v", listTime)
	}
	r.mu.Lock()
	if r.list == l {
		r.list = nil
	}
	paths := l.paths
	r.mu.Unlock()
	for i := range paths {
		f(&paths[i])
	}
	return err
}

// serve talks with one process until it ends, misbehaves, or ctx ends.
func (r *remote) serve(ctx context.Context, c Conn) (err error) {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	if err := r.start(c); err != nil {
		if ctx.Err() == nil {
			select {
			case r.opened <- err:
			default: // not the first
			}
		}
		return err
	}
	r.mu.Lock()
	r.up, r.again = true, false
	clear(r.dirty)
	r.order = r.order[:0]
	for o := range r.said {
		r.changeLocked(o)
	}
	r.mu.Unlock()
	select {
	case r.opened <- nil:
	default:
	}
	inner, end := context.WithCancel(ctx)
	var writer sync.WaitGroup
	writer.Go(func() {
		if r.write(inner, c) != nil {
			_ = c.Close()
		}
	})
	err = r.read(c)
	end()
	_ = c.Close()
	writer.Wait()
	r.mu.Lock()
	r.downLocked()
	r.mu.Unlock()
	r.lost()
	return err
}

// start configures a process and waits until it listens.
func (r *remote) start(c Conn) error {
	b, err := encodeConfig(&r.s.cfg)
	if err != nil {
		return err
	}
	if err := c.Send(b); err != nil {
		return err
	}
	_ = c.SetReadDeadline(time.Now().Add(openTime))
	if b, err = c.Receive(maxWire); err != nil {
		return fmt.Errorf("evpn: start of the process for BGP: %w", err)
	}
	_ = c.SetReadDeadline(time.Time{})
	switch {
	case len(b) == 1 && b[0] == msgOpened:
		return nil
	case len(b) > 5 && b[0] == msgFailed:
		return decodeFailure(b[1:])
	}
	return errWire
}

// write tells the process what changes.
func (r *remote) write(ctx context.Context, c Conn) error {
	tick := time.NewTicker(levelEvery)
	defer tick.Stop()
	level := r.s.log.GetLevel()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		case <-tick.C:
			if l := r.s.log.GetLevel(); l != level {
				level = l
				if err := c.Send([]byte{msgLevel, byte(l)}); err != nil {
					return err
				}
			}
			continue
		}
		for {
			b := r.next()
			if b == nil {
				break
			}
			if err := c.Send(b); err != nil {
				return err
			}
		}
	}
}

// next returns the next message to the process, or nil. A message has changes of one kind.
func (r *remote) next() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b []byte
	n := 0
	for ; n < len(r.order) && len(b) < batch; n++ {
		o := r.order[n]
		a, is := r.said[o]
		kind := byte(msgWithdraw)
		if is {
			kind = msgAdvertise
		}
		if b == nil {
			b = []byte{kind}
		} else if b[0] != kind {
			break
		}
		delete(r.dirty, o)
		if is {
			b = putAdvert(b, &a)
		} else {
			b = putOwn(b, &o)
		}
	}
	if r.order = r.order[n:]; len(r.order) == 0 {
		r.order = nil
	}
	switch {
	case b != nil:
	case r.again:
		r.again = false
		b = []byte{msgReplay}
	case r.list != nil && !r.list.asked:
		r.list.asked = true
		b = binary.BigEndian.AppendUint32([]byte{msgList}, r.list.id)
	}
	return b
}

// read takes what the process sends.
func (r *remote) read(c Conn) error {
	second, taken := time.Now(), 0
	for {
		b, err := c.Receive(maxWire)
		if err != nil {
			return err
		}
		n, err := r.take(b)
		if err != nil {
			return err
		}
		taken += n + 1 // messages without routes count, too
		if taken < mostPerSecond {
			continue
		}
		time.Sleep(time.Until(second.Add(time.Second)))
		second, taken = time.Now(), 0
	}
}

// take handles a message, and returns the number of its routes.
func (r *remote) take(b []byte) (n int, err error) {
	if len(b) == 0 {
		return 0, errWire
	}
	s, in := r.s, reader{b: b[1:]}
	switch b[0] {
	case msgPaths:
		var paths []path
		for len(in.b) > 0 && !in.bad {
			paths = append(paths, in.path(&s.cfg))
		}
		if err := in.end(); err != nil {
			return 0, err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for i := range paths {
			s.takeLocked(&paths[i])
		}
		return len(paths), nil
	case msgEnded:
		a := in.neighbour(&s.cfg)
		if err := in.end(); err != nil {
			return 0, err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.sweepLocked(a, s.epoch)
		return 0, nil
	case msgRefused:
		for len(in.b) > 0 && !in.bad {
			if a := in.advert(); !in.bad {
				s.refused(&a)
				n++
			}
		}
		return n, in.end()
	case msgSessions:
		list, err := decodeSessions(&s.cfg, b[1:])
		if err != nil {
			return 0, err
		}
		slices.SortFunc(list, func(a, b SessionStatus) int { return a.Neighbour.Compare(b.Neighbour) })
		r.mu.Lock()
		defer r.mu.Unlock()
		r.state = list
		return 0, nil
	case msgListed:
		id, last := in.u32(), in.u8()
		var paths []path
		for len(in.b) > 0 && !in.bad {
			paths = append(paths, in.path(&s.cfg))
		}
		if err := in.end(); err != nil {
			return 0, err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		l := r.list
		if l == nil || l.id != id || !l.asked {
			return len(paths), nil // too late
		}
		if len(l.paths)+len(paths) > MaxListed {
			return 0, fmt.Errorf("%w: a list of more than %d routes", errWire, MaxListed)
		}
		l.paths = append(l.paths, paths...)
		if last == 1 {
			l.done <- nil
			r.list = nil
		}
		return len(paths), nil
	}
	return 0, errWire
}

// lost is called when a process has ended.
func (r *remote) lost() {
	s := r.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.epoch++
	epoch, keep := s.epoch, s.cfg.RestartTime
	s.log.Warn("BGP sessions lost: their process has ended", "routes-kept", keep)
	if keep == 0 {
		s.sweepLocked(netip.Addr{}, epoch)
		return
	}
	// Those of earlier processes keep their time. Processes start too seldom for many timers.
	time.AfterFunc(keep, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.closed {
			s.sweepLocked(netip.Addr{}, epoch)
		}
	})
}

// sweepLocked removes the routes from before an epoch: of a neighbour, or of all if it is invalid.
func (s *Speaker) sweepLocked(from netip.Addr, epoch uint64) {
	if from.IsValid() {
		if s.swept[from] == epoch {
			return // a neighbour may say any number of times that it has sent all
		}
		s.swept[from] = epoch
	}
	for k, x := range s.routes {
		if x.epoch < epoch && (x.from == from || !from.IsValid()) {
			s.dropLocked(k)
		}
	}
}

// refused is called if BGP does not accept one of this host's routes: others have the MAC with a higher number.
func (s *Speaker) refused(a *advert) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.networks[a.vni]
	if n == nil || n.rd != a.rd {
		return
	}
	m := n.macs[a.mac]
	if was, ok := n.said[a.claim]; m == nil || !m.here.here || !ok || was != a.mobility {
		return // it has changed meanwhile
	}
	delete(n.said, a.claim)
	m.here.seq = max(m.here.seq, m.next())
	s.poke()
}
