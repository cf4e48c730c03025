package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// TestRareRequests has two VMs exchange a message every few milliseconds, beside two that never stop. The loop does not
// look at the queues of the former in between (device/loop, "Resting"): each request and each buffer has to wake it.
func TestRareRequests(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 4, loops: 1})
	busy, far := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	_, bmr := busy.h.region(t, 4096, 0)
	fdst, fmr := far.h.region(t, 4096, allAccess)
	ctx, cancel := context.WithCancel(bg)
	var passes atomic.Int64
	ended := make(chan error, 1)
	go func() {
		out := make([]guestdrv.Completion, 16)
		for {
			for range 16 {
				if err := postSend(busy.qp, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
					SGL: []guestdrv.SGE{bmr.SGE(0, 4096)}, RemoteAddr: fdst.Addr(), RKey: fmr.RKey()}); err != nil {
					ended <- err
					return
				}
			}
			for n := 0; n < 16; {
				k, err := busy.scq.PollWait(ctx, out[n:])
				if err != nil {
					ended <- err
					return
				}
				n += k
			}
			passes.Add(1)
		}
	}()

	a, b := connect(t, r.hosts[2], r.hosts[3], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 4096, allAccess)
	dst, dmr := b.h.region(t, 4096, allAccess)
	const rounds = 60
	for i := range uint64(rounds) {
		time.Sleep(2*time.Millisecond + time.Duration(i%7)*300*time.Microsecond) // longer than a loop looks without work
		fill(src.Bytes(), i)
		wr := &request{ID: i, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{smr.SGE(0, 4096)}}
		switch i % 3 {
		case 0:
			wr.Opcode, wr.RemoteAddr, wr.RKey = guestdrv.WRRDMAWrite, dst.Addr(), dmr.RKey()
			a.post(t, wr)
			expect(t, a.scq, i, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		case 1:
			fill(dst.Bytes(), i+rounds)
			wr.Opcode, wr.RemoteAddr, wr.RKey = guestdrv.WRRDMARead, dst.Addr(), dmr.RKey()
			a.post(t, wr)
			expect(t, a.scq, i, guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
		default:
			wr.Opcode = guestdrv.WRSend
			if i%2 == 0 { // the peer's buffer comes first, or after an RNR NAK
				b.recv(t, i, dmr.SGE(0, 4096))
				time.Sleep(2 * time.Millisecond)
				a.post(t, wr)
			} else {
				a.post(t, wr)
				time.Sleep(2 * time.Millisecond)
				b.recv(t, i, dmr.SGE(0, 4096))
			}
			expect(t, b.rcq, i, guestdrv.WCSuccess, guestdrv.WCOpRecv)
			expect(t, a.scq, i, guestdrv.WCSuccess, guestdrv.WCOpSend)
		}
		if !bytes.Equal(src.Bytes(), dst.Bytes()) {
			t.Fatalf("round %d: data differ", i)
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if passes.Load() < rounds {
		t.Errorf("the busy VMs had %d passes", passes.Load())
	}
}
