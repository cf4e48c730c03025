package evpn

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// Conn is a connection between a Speaker and the process that runs its BGP: messages, in order.
type Conn interface {
	// Send may be called by several goroutines. It fails if the other side does not read.
	Send(b []byte) error
	// Receive waits for a message of at most most bytes. It fails once the other side has closed.
	Receive(most int) ([]byte, error)
	SetReadDeadline(t time.Time) error
	Close() error
}

// process runs BGP for a Speaker in another process.
type process struct {
	conn Conn
	log  hclog.Logger
	cfg  Config
	bgp  *session
	done sync.WaitGroup

	// mu orders changes of best paths and answers to msgReplay. It is taken before gobgp's locks.
	mu      sync.Mutex
	changed map[nlri]path // not sent yet; at most one for each NLRI, however slow the Speaker is
	order   []nlri        // keys of changed, by time
	ended   []uint16      // neighbours that have sent all their routes
	wake    chan struct{} // capacity 1
}

// How often the state of the sessions is sent: soon after an event, and every reportQuiet without one.
const (
	reportEvery = time.Second
	reportQuiet = 5 * time.Second
)

// Open is the first half of the process: it takes the configuration and listens. run is the second: it keeps the
// sessions until c ends. Open needs what listening needs, and takes nothing from neighbours; run needs TCP connections
// only.
func Open(c Conn, log hclog.Logger) (run func() error, err error) {
	b, err := c.Receive(maxConfig)
	if err != nil {
		return nil, err
	}
	w, err := decodeConfig(b)
	if err != nil {
		return nil, err
	}
	p := &process{conn: c, log: log, changed: map[nlri]path{}, wake: make(chan struct{}, 1),
		cfg: Config{AS: w.AS, RouterID: w.RouterID, VTEP: w.VTEP, Listen: w.Listen, Port: w.Port, HoldTime: w.HoldTime,
			RestartTime: w.RestartTime, LimitIdle: w.Idle, Neighbours: w.Neighbours, Clock: time.Now, Log: loglimit.New(log)}}
	log.SetLevel(hclog.Level(w.LogLevel))
	p.bgp = newSession(p.cfg)
	if err := p.bgp.listen(context.Background(), p.take, p.allSent); err != nil {
		p.bgp.close()
		_ = c.Send(encodeFailure(err))
		return nil, err
	}
	return p.run, nil
}

func (p *process) run() error {
	ctx, stop := context.WithCancel(context.Background())
	defer p.done.Wait()
	defer p.bgp.close()
	defer stop()
	if err := p.bgp.greet(); err != nil {
		_ = p.conn.Send(encodeFailure(err))
		return err
	}
	if err := p.conn.Send([]byte{msgOpened}); err != nil {
		return err
	}
	p.done.Go(func() { p.send(ctx) })
	p.done.Go(func() { p.report(ctx) })
	for {
		b, err := p.conn.Receive(maxWire)
		if err != nil {
			return nil // the Speaker has ended
		}
		if err := p.handle(b); err != nil {
			return err
		}
	}
}

// handle does what the Speaker asks for.
func (p *process) handle(b []byte) error {
	if len(b) == 0 {
		return errWire
	}
	r := reader{b: b[1:]}
	switch b[0] {
	case msgAdvertise:
		refused := []byte{msgRefused}
		for len(r.b) > 0 {
			a := r.advert()
			if r.bad {
				return errWire
			}
			if err := p.bgp.advertise(a); err != nil {
				p.log.Debug("not advertised", "mac", a.mac, "ip", a.ip, "error", err)
				refused = putAdvert(refused, &a)
			}
		}
		if len(refused) > 1 {
			return p.conn.Send(refused)
		}
		return nil
	case msgWithdraw:
		for len(r.b) > 0 {
			o := r.own()
			if r.bad {
				return errWire
			}
			if err := p.bgp.withdraw(o); err != nil {
				p.log.Warn("not withdrawn", "mac", o.mac, "ip", o.ip, "error", err)
			}
		}
		return nil
	case msgReplay:
		p.mu.Lock()
		defer p.mu.Unlock()
		defer p.poke()
		return p.bgp.each(p.changedLocked)
	case msgList:
		id := r.u32()
		if err := r.end(); err != nil {
			return err
		}
		return p.list(id)
	case msgLevel:
		level := r.u8()
		p.log.SetLevel(hclog.Level(level))
		return r.end()
	}
	return errWire
}

func (p *process) take(paths []path) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range paths {
		p.changedLocked(&paths[i])
	}
	p.poke()
}

func (p *process) changedLocked(x *path) {
	k := x.nlri
	if _, ok := p.changed[k]; !ok {
		p.order = append(p.order, k)
	}
	p.changed[k] = *x
}

// allSent is called after the neighbour's last path was given to take.
func (p *process) allSent(neighbour netip.Addr) {
	i := p.cfg.indexOf(neighbour)
	if i == noNeighbour {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.ended, i) { // a neighbour may send it any number of times
		p.ended = append(p.ended, i)
	}
	p.poke()
}

func (p *process) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// send sends changes until ctx ends.
func (p *process) send(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		}
		for {
			b := p.next()
			if b == nil {
				break
			}
			if p.conn.Send(b) != nil {
				_ = p.conn.Close() // which ends the process
				return
			}
		}
	}
}

// next returns the next message about routes, or nil.
func (p *process) next() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := []byte{msgPaths}
	n := 0
	for ; n < len(p.order) && len(b) < batch; n++ {
		k := p.order[n]
		x := p.changed[k]
		delete(p.changed, k)
		b = putPath(b, &p.cfg, &x)
	}
	if p.order = p.order[n:]; len(p.order) == 0 {
		p.order = nil // and the array behind it
	}
	switch {
	case n > 0:
		return b
	case len(p.ended) > 0: // after all paths
		b = binary.BigEndian.AppendUint16([]byte{msgEnded}, p.ended[0])
		p.ended = p.ended[1:]
		return b
	}
	return nil
}

// report sends the state of the sessions until ctx ends.
func (p *process) report(ctx context.Context) {
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	var before []byte
	for quiet := reportQuiet; ; {
		if quiet += reportEvery; p.bgp.told.Swap(false) || p.bgp.away.any() || quiet >= reportQuiet {
			quiet = 0
			b := encodeSessions(&p.cfg, p.bgp.sessions())
			if !bytes.Equal(b, before) && p.conn.Send(b) != nil {
				return // send and run notice it, too
			}
			before = b
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.bgp.met:
		}
	}
}

// list answers msgList.
func (p *process) list(id uint32) error {
	head := append(binary.BigEndian.AppendUint32([]byte{msgListed}, id), 0)
	b, sent := bytes.Clone(head), 0
	var failed error
	err := p.bgp.each(func(x *path) {
		if failed != nil || sent >= MaxListed || !x.used || !x.from.IsValid() {
			return
		}
		sent++
		if b = putPath(b, &p.cfg, x); len(b) >= batch {
			failed = p.conn.Send(b)
			b = bytes.Clone(head)
		}
	})
	if err != nil {
		return fmt.Errorf("list of routes: %w", err)
	}
	if failed != nil {
		return failed
	}
	b[5] = 1
	return p.conn.Send(b)
}
