package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

// party is an innocent VM, driven without a guest.
type party struct {
	name string
	host *lab.Host
	ip   netip.Addr
	dev  *guestdrv.Device
	pd   *guestdrv.PD
	path guestdrv.Path
}

// open connects the party's driver.
func (p *party) open(ctx context.Context) (err error) {
	socket := filepath.Join(p.host.Dir, p.name+".hca")
	dev, err := guestdrv.Open(ctx, socket, guestdrv.Config{Memory: 64 << 20})
	if err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	p.dev = dev
	p.path = guestdrv.Path{GID: guestdrv.IPGID(p.ip), MAC: p.dev.MAC()}
	if err = p.dev.SetGID(ctx, 0, p.path.GID, guestdrv.GIDOptions{}); err == nil {
		p.pd, err = p.dev.AllocPD(ctx)
	}
	if err != nil {
		_ = p.dev.Close()
		return fmt.Errorf("%s: %w", p.name, err)
	}
	return nil
}

// An operation of innocents may take this long. Attackers may slow them down by their share of the processor, not stop
// them.
const patience = 30 * time.Second

const (
	slot    = 64 << 10      // the part of the target that WRITEs go to
	counter = slot          // offset of the word that FETCH_ADD counts in
	inbox   = slot + 4096   // offset of the receive buffer
	area    = slot + 2*4096 // the whole target
)

// end is one end of an innocent pair: a queue pair, a completion queue and memory of its own.
type end struct {
	*party
	cut context.Context // ends waits for completions
	qp  *guestdrv.QP
	cq  *guestdrv.CQ
	buf *guestdrv.Buffer
	mr  *guestdrv.MR
	wcs [8]guestdrv.Completion
}

// close destroys what the end has.
func (e *end) close() error {
	return errors.Join(e.qp.Close(), e.cq.Close(), e.mr.Close(), e.buf.Close())
}

// pair is an RC connection whose owner checks every byte at both ends. It belongs to the goroutine of run; during an
// outage, once that is parked, to the restart.
type pair struct {
	x, y   *party
	a, b   *end
	adds   uint64          // FETCH_ADDs so far
	rounds int             // of all phases
	times  []time.Duration // of the WRITEs of a phase
	cut    context.CancelFunc

	known atomic.Pointer[identity]

	mu      sync.Mutex
	running bool    // guarded by mu
	outage  *outage // nil: no error is expected; guarded by mu
}

// identity is what attackers know of a pair: queue pair numbers, the key and the place of the target.
type identity struct {
	a, b uint32
	addr uint64
	rkey uint32
	path guestdrv.Path // of b
}

func (p *pair) name() string { return p.x.name + "-" + p.y.name }

// connect makes the connection, with new objects at both ends.
func (p *pair) connect(ctx context.Context) error {
	cut, cancel := context.WithCancel(context.Background())
	p.cut, p.adds = cancel, 0
	p.a, p.b = &end{party: p.x, cut: cut}, &end{party: p.y, cut: cut}
	for _, e := range []*end{p.a, p.b} {
		var err error
		if e.buf, err = e.dev.Alloc(area); err != nil {
			return err
		}
		if e.mr, err = e.pd.Register(ctx, e.buf, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite|
			guestdrv.AccessRemoteRead|guestdrv.AccessRemoteAtomic); err != nil {
			return err
		}
		if e.cq, err = e.dev.CreateCQ(ctx, 64, guestdrv.CQOptions{}); err != nil {
			return err
		}
		if e.qp, err = e.pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: e.cq, RecvCQ: e.cq,
			MaxSendWR: streamWindow, MaxRecvWR: 16}); err != nil {
			return err
		}
	}
	o := guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead |
		guestdrv.AccessRemoteAtomic}
	for _, c := range [][2]*end{{p.a, p.b}, {p.b, p.a}} {
		if err := c[0].qp.Connect(ctx, guestdrv.Peer{QPN: c[1].qp.Number(), Path: c[1].path}, o); err != nil {
			return err
		}
	}
	p.known.Store(&identity{a: p.a.qp.Number(), b: p.b.qp.Number(), addr: p.b.mr.Addr(), rkey: p.b.mr.RKey(),
		path: p.b.path})
	return nil
}

func newPair(ctx context.Context, x, y *party) (*pair, error) {
	p := &pair{x: x, y: y}
	return p, p.connect(ctx)
}

// run repeats rounds until ctx ends. An error is an event, except for the end of the connection in an outage.
func (p *pair) run(ctx context.Context, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, uint64(len(p.name()))))
	p.enter()
	defer p.leave()
	for ctx.Err() == nil {
		err := p.round(rng)
		o := p.expected()
		if err != nil && (o == nil || !lost(err)) {
			return fmt.Errorf("%s, round %d: %w", p.name(), p.rounds, err)
		}
		if o != nil && (err != nil || p.a.cut.Err() != nil) {
			o.park(ctx)
			continue
		}
		p.rounds++
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(rng.IntN(int(5 * time.Millisecond)))):
		}
	}
	return nil
}

// round is a WRITE, a READ of the same bytes, a FETCH_ADD and a SEND, all checked. The whole target is compared: bytes
// that the WRITE did not concern must be as the owner left them.
func (p *pair) round(rng *rand.Rand) error {
	src, dst := p.a.buf.Bytes(), p.b.buf.Bytes()
	n := 1 + rng.IntN(slot)
	off := rng.IntN(slot - n + 1)
	fill(src[:slot], rng)
	fill(dst[:slot], rng)
	before := slices.Clone(dst[:slot])
	want := slices.Clone(before)
	copy(want[off:], src[off:off+n])

	begin := time.Now()
	if err := p.a.do(guestdrv.NewWrite(1, p.b.mr.Remote(off), p.a.mr.SGE(off, n))); err != nil {
		if i := torn(dst[:slot], before, want); i >= 0 {
			return fmt.Errorf("after an interrupted WRITE of %d bytes to offset %d the target is wrong at %d", n, off, i)
		}
		return fmt.Errorf("WRITE of %d bytes: %w", n, err)
	}
	p.times = append(p.times, time.Since(begin))
	if !bytes.Equal(dst[:slot], want) {
		return fmt.Errorf("after a WRITE of %d bytes to offset %d the target differs at %d", n, off, differs(dst, want))
	}
	clear(src[:slot])
	if err := p.a.do(guestdrv.NewRead(2, p.b.mr.Remote(off), p.a.mr.SGE(off, n))); err != nil {
		if i := torn(src[off:off+n], make([]byte, n), want[off:off+n]); i >= 0 {
			return fmt.Errorf("an interrupted READ of %d bytes from offset %d returned other bytes, at %d", n, off, i)
		}
		return fmt.Errorf("READ of %d bytes: %w", n, err)
	}
	if !bytes.Equal(src[off:off+n], want[off:off+n]) {
		return fmt.Errorf("a READ of %d bytes from offset %d returned other bytes, from %d on", n, off,
			differs(src[off:off+n], want[off:off+n]))
	}
	if err := p.a.do(guestdrv.NewFetchAdd(3, p.b.mr.Remote(counter), 1, p.a.mr.SGE(counter, 8))); err != nil {
		if now := p.b.buf.Load64(counter); now != p.adds && now != p.adds+1 {
			return fmt.Errorf("an interrupted FETCH_ADD %d left %d", p.adds+1, now)
		}
		return fmt.Errorf("FETCH_ADD: %w", err)
	}
	if old, now := p.a.buf.Load64(counter), p.b.buf.Load64(counter); old != p.adds || now != p.adds+1 {
		return fmt.Errorf("FETCH_ADD %d found %d and left %d", p.adds+1, old, now)
	}
	p.adds++

	binary.LittleEndian.PutUint64(src[inbox:], p.adds)
	if err := p.b.qp.PostRecv(guestdrv.NewRecv(4, p.b.mr.SGE(inbox, 8))); err != nil {
		return fmt.Errorf("posting a receive request: %w", err)
	}
	if err := p.a.do(guestdrv.NewSend(5, p.a.mr.SGE(inbox, 8))); err != nil {
		return fmt.Errorf("SEND: %w", err)
	}
	if err := p.b.await(4); err != nil {
		return fmt.Errorf("receiving: %w", err)
	}
	if got := p.b.buf.Load64(inbox); got != p.adds {
		return fmt.Errorf("received %d, sent was %d", got, p.adds)
	}
	return nil
}

func (e *end) do(wr *guestdrv.SendWR) error {
	if err := e.qp.PostSend(wr.With(guestdrv.SendSignaled)); err != nil {
		return err
	}
	return e.await(wr.ID)
}

// await waits for one completion, which must be that of request id.
func (e *end) await(id uint64) error {
	ctx, cancel := context.WithTimeout(e.cut, patience)
	defer cancel()
	n, err := e.cq.PollWait(ctx, e.wcs[:])
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no completion within %s", patience)
	case err != nil:
		return err
	case n != 1 || e.wcs[0].ID != id:
		return fmt.Errorf("%d completions, the first of request %d; want one, of request %d", n, e.wcs[0].ID, id)
	}
	return e.wcs[0].Err()
}

func fill(b []byte, rng *rand.Rand) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
}

// torn returns the first index at which got is neither as before nor as after an operation, or -1.
func torn(got, before, after []byte) int {
	for i, b := range got {
		if b != before[i] && b != after[i] {
			return i
		}
	}
	return -1
}

// differs returns the first index at which a differs from b, which is not longer.
func differs(a, b []byte) int {
	for i := range b {
		if a[i] != b[i] {
			return i
		}
	}
	return len(b)
}

// phase returns the number, the median and the 99.9th percentile of the WRITEs since the last call, and begins anew.
func (p *pair) phase() (n int, median, p999 time.Duration) {
	t := p.times
	p.times = nil
	if len(t) == 0 {
		return 0, 0, 0
	}
	slices.Sort(t)
	return len(t), t[len(t)/2], t[(len(t)-1)*999/1000]
}
