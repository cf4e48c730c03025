package rdmacm

import (
	"context"
	"fmt"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// Queue pair 1: receive buffers of one message each, send slots, and a bounded queue of messages that wait for a slot;
// others wait for the path to their peer (path.go). What does not fit is dropped, as a network might drop it: messages
// are repeated.

const (
	gsiQPN  = 1
	gsiQKey = 0x80010000

	numRecv  = 256
	numSend  = 128
	maxQueue = 4096 // datagrams that wait for a slot
	recvLen  = 512  // of a receive buffer, so that none crosses a page
	sendLen  = cm.MADLen
	sendID   = 1 << 32 // marks the IDs of send requests
)

type gsi struct {
	qp       *guestdrv.QP
	cq       *guestdrv.CQ
	pd       *guestdrv.PD
	in, out  *guestdrv.Buffer
	imr, omr *guestdrv.MR
	wcs      [64]guestdrv.Completion // of the service

	free  []int        // send slots
	using [numSend]*ah // by slot
	queue []datagram   // resolved, wait for a slot
	paths paths
}

// idle reports whether no message waits to be sent.
func (g *gsi) idle() bool { return len(g.free) == numSend && len(g.queue) == 0 }

// openGSI makes queue pair 1 ready.
func (m *Manager) openGSI(ctx context.Context, pd *guestdrv.PD) (err error) {
	g := &m.gsi
	g.pd = pd
	g.paths.init()
	const write = guestdrv.AccessLocalWrite | guestdrv.AccessRemoteWrite // remote: see warm
	if g.in, g.imr, err = m.buffer(ctx, numRecv*recvLen, write); err != nil {
		return err
	}
	if g.out, g.omr, err = m.buffer(ctx, numSend*sendLen, 0); err != nil {
		return err
	}
	if g.cq, err = m.dev.CreateCQ(ctx, numRecv+numSend, guestdrv.CQOptions{}); err != nil {
		return err
	}
	m.made = append(m.made, g.cq)
	if err := m.warm(ctx); err != nil {
		return err
	}
	if g.qp, err = pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeGSI, SendCQ: g.cq, RecvCQ: g.cq,
		MaxSendWR: numSend, MaxRecvWR: numRecv}); err != nil {
		return err
	}
	m.made = append(m.made, g.qp)
	for i := range numRecv {
		if err := g.receive(i); err != nil {
			return err
		}
	}
	for i := range numSend {
		g.free = append(g.free, numSend-1-i)
	}
	return g.qp.StartUD(ctx, gsiQKey)
}

// buffer makes registered memory that closeMade releases.
func (m *Manager) buffer(ctx context.Context, n int, access guestdrv.Access) (*guestdrv.Buffer, *guestdrv.MR, error) {
	b, err := m.dev.Alloc(n)
	if err != nil {
		return nil, nil, err
	}
	m.made = append(m.made, b)
	mr, err := m.gsi.pd.Register(ctx, b, access)
	if err != nil {
		return nil, nil, err
	}
	m.made = append(m.made, mr)
	return b, mr, nil
}

// warm makes the receive buffers resident in the device: it drops datagrams for pages that are not (PF-11), and the
// peer repeats its message only after seconds. A queue pair that is connected to itself writes to each page.
func (m *Manager) warm(ctx context.Context) (err error) {
	g := &m.gsi
	qp, err := g.pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: g.cq, RecvCQ: g.cq})
	if err != nil {
		return err
	}
	defer func() {
		if e := qp.Close(); err == nil {
			err = e
		}
	}()
	self := guestdrv.Path{GID: m.gid, MAC: m.dev.MAC(), SGIDIndex: m.cfg.GIDIndex, VLAN: m.cfg.GID.VLAN}
	if err := qp.Connect(ctx, guestdrv.Peer{QPN: qp.Number(), Path: self},
		guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite}); err != nil {
		return err
	}
	const page = 4096
	for off := 0; off < g.in.Len(); off += page {
		wr := guestdrv.NewWrite(0, g.imr.Remote(off), g.omr.SGE(0, 8)).With(guestdrv.SendSignaled)
		if err := qp.PostSend(wr); err != nil {
			return err
		}
		if _, err := g.cq.PollWait(ctx, g.wcs[:1]); err != nil {
			return err
		}
		if err := g.wcs[0].Err(); err != nil {
			return err
		}
	}
	return nil
}

// receive posts receive buffer i.
func (g *gsi) receive(i int) error {
	return g.qp.PostRecv(guestdrv.NewRecv(uint64(i), g.imr.SGE(i*recvLen, guestdrv.GRHLen+cm.MADLen)))
}

// complete handles completions.
func (m *Manager) complete(wcs []guestdrv.Completion) error {
	if len(wcs) == 0 {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	g, now := &m.gsi, time.Now()
	for i := range wcs {
		wc := &wcs[i]
		if wc.ID&sendID != 0 {
			if err := wc.Err(); err != nil {
				return fmt.Errorf("queue pair 1: %w", err)
			}
			slot := int(wc.ID & (sendID - 1))
			g.paths.release(g.using[slot])
			g.using[slot] = nil
			g.free = append(g.free, slot)
			continue
		}
		if wc.Status == guestdrv.WCSuccess {
			m.arrived(now, wc)
		} else if wc.Status == guestdrv.WCWRFlushErr {
			return fmt.Errorf("queue pair 1: %w", wc.Err())
		}
		if err := g.receive(int(wc.ID)); err != nil {
			return err
		}
	}
	m.flush()
	return nil
}

// arrived handles the message in a receive buffer.
func (m *Manager) arrived(now time.Time, wc *guestdrv.Completion) {
	b := m.gsi.in.Bytes()[int(wc.ID)*recvLen:][:guestdrv.GRHLen+cm.MADLen]
	from, to, ok := wc.Addresses(b)
	if !ok || to != m.gid || wc.SrcQPN != gsiQPN || wc.ByteLen < guestdrv.GRHLen+cm.MADLen {
		m.machine.counters.Received++
		m.machine.counters.Malformed++
		return
	}
	m.machine.receive(now, from, b[guestdrv.GRHLen:])
}

// flush sends the machine's messages. The caller holds m.mu.
func (m *Manager) flush() {
	g, now := &m.gsi, time.Now()
	out := m.machine.out
	m.machine.out = nil
	if m.err != nil {
		g.queue = nil
		return
	}
	for _, d := range out {
		switch {
		case g.paths.get(now, d.to) == nil:
			if !g.paths.await(d) {
				m.machine.counters.Unsent++
				continue
			}
		case len(g.queue) == maxQueue:
			m.machine.counters.Unsent++
			continue
		default:
			g.queue = append(g.queue, d)
		}
		m.resolve(now, d.to)
	}
	for len(g.queue) > 0 && len(g.free) > 0 {
		d := g.queue[0]
		g.queue[0] = datagram{}
		if g.queue = g.queue[1:]; len(g.queue) == 0 {
			g.queue = nil
		}
		if !g.post(now, d) {
			m.machine.counters.Unsent++
		}
	}
}

// post sends a message. There is a free slot.
func (g *gsi) post(now time.Time, d datagram) bool {
	a := g.paths.get(now, d.to)
	if a == nil {
		return false // the path has been dropped meanwhile
	}
	slot := g.free[len(g.free)-1]
	copy(g.out.Bytes()[slot*sendLen:][:sendLen], d.mad)
	wr := guestdrv.NewDatagram(sendID|uint64(slot), guestdrv.Datagram{AH: a.handle, QPN: gsiQPN, QKey: gsiQKey},
		g.omr.SGE(slot*sendLen, sendLen)).With(guestdrv.SendSignaled)
	if g.qp.PostSend(wr) != nil {
		return false
	}
	g.free = g.free[:len(g.free)-1]
	g.using[slot] = a
	a.using++
	return true
}
