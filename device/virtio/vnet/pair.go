package vnet

import (
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

const (
	mailboxSize = 512 // frames from other loops
	txBudget    = 64  // frames per pair and iteration
	// segmentsPerFrame is how many segments count as one frame against txBudget.
	segmentsPerFrame = 8
	// descsPerFrame is how many descriptors count as one frame.
	descsPerFrame = 16
	pollPeriod    = int64(time.Millisecond)
)

// pair is a receive and a transmit queue on one loop.
type pair struct {
	d    *Device
	i    int
	loop *loop.Loop
	mail *loop.Mailbox[*frame.Buf]
	hook *loop.Hook
	// wakeups passes answers to faults from the host driver to the loop.
	wakeups *loop.Mailbox[served]

	// Read by other goroutines.
	receiving, sending atomic.Bool

	// The fields below belong to the loop.
	rx, tx           *virtq.Queue
	mergeable        bool
	rxTakes, txTakes frame.Need // work that may be left undone: in frames to the guest, and in frames from it
	rxDirty, txDirty bool       // pushed, not yet signalled
	rxInside         bool       // in the epoch of rx, from an iteration's first frame until flush
	rxEpoch          translate.Token
	rxWalked         int // descriptors of rx read in this iteration
	rxc              [maxMerge]virtq.Chain
	header           [headerLen]byte // of the frame being received
	txc              virtq.Chain
	txHeader         [headerLen]byte // of the frame being sent
	rxWait, txWait   waiter
	held             []*frame.Buf // frames for rx while it waits, oldest first
	heldBytes        int
	txSkip           bool       // the next chain's page cannot be restored
	txOpen           bool       // txc is popped and not pushed
	txSent           bool       // txc is to be pushed: see txFault
	txCost           int        // of the frame being sent, counted in frames
	cur              *frame.Buf // buffer of the frame that Poll sends, or of the next one
	watch            *loop.Watch
	timer            *loop.Timer // replaces watch if the driver never kicks
}

func newPair(d *Device, i int, l *loop.Loop) *pair {
	p := &pair{d: d, i: i, loop: l}
	fault, meter := loop.OnFault(d.ownFault), loop.Metered(&d.meter)
	p.mail = loop.NewMailbox(l, mailboxSize, p.receive, (*frame.Buf).Free, loop.Name("vnet mailbox"), fault, meter)
	p.held = make([]*frame.Buf, 0, heldFrames)
	p.rxWait.init(p, p.resumeRx)
	p.txWait.init(p, p.resumeTx)
	p.wakeups = loop.NewMailbox(l, 8, p.wakeup, nil, loop.Name("vnet faults"), fault, meter)
	p.hook = l.NewHook(p.flush, loop.Name("vnet flush"), fault, meter)
	return p
}

func (p *pair) close() {
	p.mail.Close()
	p.wakeups.Close()
	p.hook.Close()
}

// ownFault is fault for the device's own handlers, which are also called for faults in other VMs' memory; those VMs
// have been notified already.
func (d *Device) ownFault(f loop.Fault) {
	if !f.Foreign {
		d.fault(f)
	}
}

// visit runs f, which may access guest memory, on the pair's loop. If the memory is gone, the pair's queues are broken.
func (p *pair) visit(f func()) {
	if err := p.loop.DoFor(&p.d.meter, f); err != nil {
		p.d.fail("control", p.i, err)
		p.failAll(err)
	}
}

func (p *pair) startRx(q *virtq.Queue, features uint64) {
	p.visit(func() {
		p.rx, p.mergeable, p.rxTakes = q, features&FeatureMrgRxbuf != 0, guestTakes(features)
		p.receiving.Store(true)
		// Buffers are popped when a frame needs one; kicks are not needed.
		p.inEpoch(q, func() error { return q.SetNotify(false) })
	})
}

func (p *pair) stopRx() {
	p.visit(func() {
		q := p.rx
		p.rx = nil
		p.receiving.Store(false)
		p.dropHeld()
		if q != nil {
			p.leaveRx(q)
		}
	})
}

func (p *pair) startTx(q *virtq.Queue, features uint64) error {
	q.OnlyReads()
	if fd := q.KickFD(); fd >= 0 {
		// The poller does the work; the kick only wakes the loop.
		w, err := p.loop.Watch(fd, func() { eventfd.Take(fd) }, loop.Name("vnet kick"),
			loop.Metered(&p.d.meter))
		if err != nil {
			return err
		}
		p.watch = w
	} else {
		// The driver asks to be polled (SET_VRING_KICK without a descriptor). Once a millisecond is a compromise with
		// the processor time of an idle host.
		p.timer = p.loop.NewTimer(func(now int64) { p.timer.Arm(now + pollPeriod) }, loop.Name("vnet poll timer"),
			loop.Metered(&p.d.meter))
	}
	p.visit(func() {
		p.tx, p.txTakes = q, hostTakes(features)
		p.sending.Store(true)
		if p.timer != nil {
			p.timer.Arm(p.loop.Now() + pollPeriod)
		}
	})
	p.loop.AddPoller(p, loop.Name("vnet transmit"), loop.OnFault(p.txFault), loop.Metered(&p.d.meter))
	p.loop.Wake() // chains already in the ring were not announced
	return nil
}

func (p *pair) stopTx() {
	p.loop.RemovePoller(p)
	if p.watch != nil {
		p.watch.Close()
		p.watch = nil
	}
	p.visit(func() {
		if p.timer != nil {
			p.timer.Stop()
			p.timer = nil
		}
		q := p.tx
		p.tx = nil
		p.sending.Store(false)
		p.txWait.waiting, p.txSkip = false, false
		p.publishTx(q)
	})
}

// publishTx returns sent chains to the driver, outside Poll.
func (p *pair) publishTx(q *virtq.Queue) {
	if !p.txDirty && !p.txSent {
		return
	}
	p.txDirty = false // also if this faults
	p.inEpoch(q, func() error {
		p.returnSent(q)
		p.txDirty = false
		return q.Signal()
	})
}

// inEpoch runs one operation on a ring outside the data path.
func (p *pair) inEpoch(q *virtq.Queue, f func() error) {
	ep := q.Space().Epochs()
	t := ep.Enter(p.loop.Guarded())
	defer ep.Leave(p.loop.ID(), t)
	if err := f(); err != nil {
		p.broke(q, err)
	}
}

// broke handles an error of a ring. An error that the host can repair is left to the next attempt.
func (p *pair) broke(q *virtq.Queue, err error) {
	if virtq.IsRepairable(err) {
		return
	}
	what := "transmit"
	if q.Index()%2 == 0 {
		what = "receive"
	}
	if q.Broken() == nil {
		q.Fail(err)
	}
	p.d.fail(what, p.i, q.Broken())
}

// failAll stops the data path of the pair. Any loop may call it.
func (p *pair) failAll(err error) {
	mark := func() {
		for _, q := range []*virtq.Queue{p.rx, p.tx} {
			if q != nil {
				p.broke(q, err)
			}
		}
	}
	if p.loop.OnLoop() {
		mark()
	} else {
		p.loop.Post(mark)
	}
}

// enterRx enters the epoch of the receive queue's memory for the rest of the iteration: once per frame would cost as
// much as writing the frame.
func (p *pair) enterRx(q *virtq.Queue) {
	if !p.rxInside {
		p.rxEpoch, p.rxInside = q.Space().Epochs().Enter(p.loop.Guarded()), true
		p.hook.Arm()
	}
}

// leaveRx publishes the received frames, and leaves the epoch.
func (p *pair) leaveRx(q *virtq.Queue) {
	if !p.rxInside {
		return
	}
	defer func() {
		p.rxInside = false
		q.Space().Epochs().Leave(p.loop.ID(), p.rxEpoch)
	}()
	if p.rxDirty {
		p.rxDirty = false
		if err := q.Signal(); err != nil {
			p.broke(q, err)
		}
	}
}

// flush ends an iteration with one publication and at most one interrupt per queue.
func (p *pair) flush() {
	p.rxWalked = 0
	if p.rxInside {
		p.leaveRx(p.rx)
	}
	p.publishTx(p.tx)
}
