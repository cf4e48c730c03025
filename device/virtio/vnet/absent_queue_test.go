package vnet

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/testutil"
)

// PF-17: a buffer on an absent host page delays its queue alone, however long the page is absent. The other queues of
// the same device, in both directions, and those of other VMs carry every frame meanwhile, on the same loop and on
// another. The delayed queue then continues in order, without loss.
func TestAbsentBufferDelaysOneQueue(t *testing.T) {
	for _, loops := range []int{1, 2} {
		t.Run(fmt.Sprint(loops, " loops"), func(t *testing.T) { bothRings(t, loops, absentBufferDelaysOneQueue) })
	}
}

func absentBufferDelaysOneQueue(t *testing.T, h *host) {
	const (
		rounds     = 5
		rx0, tx0   = 0, 1 // queues
		rx1, tx1   = 2, 3
		txPages    = 8  // page of the first buffer of tx0; tx1's are 8 further on
		rxPages    = 24 // likewise of rx0 and rx1
		frameBytes = 200
	)
	a := h.vm(1, 2)
	b, c := h.vm(2, 1).boot(0, 12000, 16), h.vm(3, 1).boot(0, 12000, 16)
	g := newRawGuest(t, 1, h.rings)
	for q := range 4 {
		g.start(a.dev, q)
		defer a.dev.StopQueue(q)
	}
	for i := range uint16(rawSize) {
		g.offer(rx0, i, rxPages+int(i), page, true)
		g.offer(rx1, i, rxPages+8+int(i), page, true)
	}
	sent := [2]uint16{}
	send := func(pair int, f []byte) { // by a
		i := sent[pair]
		n := txPages + 8*pair + int(i)
		copy(g.buf(n), append(make([]byte, headerLen), f...))
		g.offer(tx0+2*pair, i, n, uint32(headerLen+len(f)), false)
		sent[pair]++
		for _, l := range h.loops {
			l.Wake()
		}
	}
	expect := func(v *vm, want []byte) {
		t.Helper()
		if got := v.recv(0); !bytes.Equal(got, want) {
			t.Fatalf("got %x, want %x", got[:20], want[:20])
		}
	}
	// By its sender's address, a frame to a goes to one of a's pairs.
	pairOf := func(v *vm) int {
		f := buildFrame(a.mac, v.mac, frameBytes, 0)
		return int(flowHash(f, header.Locate(f)) % 2)
	}
	if pairOf(b) == pairOf(c) {
		t.Fatal("both senders' frames go to one pair")
	}
	arrived := [2]uint16{}
	expectAt := func(pair int, want []byte) { // at a
		t.Helper()
		i := arrived[pair]
		testutil.Eventually(t, "the frame", func() bool { return g.used(rx0+2*pair) > i })
		if got := g.buf(rxPages + 8*pair + int(i))[headerLen:][:frameBytes]; !bytes.Equal(got, want) {
			t.Fatalf("pair %d, buffer %d: got %x, want %x", pair, i, got[:20], want[:20])
		}
		arrived[pair]++
	}
	next := byte(0)
	fr := func(dst, src *vm) []byte { next++; return buildFrame(dst.mac, src.mac, frameBytes, next) }
	waiting := func() uint64 { return g.space.Faults().Stats().Waiting }

	// Transmit: the second buffer of tx0 is absent; the third waits for it, since a queue stays in order.
	g.withdraw(txPages + 1)
	queued := [][]byte{fr(b, a), fr(b, a), fr(b, a)}
	send(0, queued[0])
	expect(b, queued[0])
	send(0, queued[1])
	send(0, queued[2])
	testutil.Eventually(t, "the fault", func() bool { return waiting() == 1 })
	for round := range rounds {
		f := fr(b, a)
		send(1, f)
		expect(b, f)
		for _, v := range []*vm{b, c} {
			f = fr(a, v)
			v.send(0, f)
			expectAt(pairOf(v), f)
		}
		f = fr(c, b)
		b.send(0, f)
		expect(c, f)
		if n := g.used(tx0); n != 1 || waiting() != 1 {
			t.Fatalf("round %d: the queue returned %d chains, %d faults wait", round, n, waiting())
		}
	}
	g.serve(txPages+1, false, nil)
	expect(b, queued[1])
	expect(b, queued[2])
	testutil.Eventually(t, "the chains", func() bool { return g.used(tx0) == 3 })

	// Receive: the next buffer of one pair is absent.
	slow := pairOf(b)
	absent := rxPages + 8*slow + int(arrived[slow])
	g.withdraw(absent)
	held := [][]byte{fr(a, b), fr(a, b), fr(a, b)}
	for _, f := range held {
		b.send(0, f)
	}
	testutil.Eventually(t, "the fault", func() bool { return waiting() == 1 })
	for range 3 {
		f := fr(a, c)
		c.send(0, f)
		expectAt(1-slow, f)
		for pair := range 2 {
			f = fr(c, a)
			send(pair, f)
			expect(c, f)
		}
		f = fr(c, b)
		b.send(0, f)
		expect(c, f)
		if n := g.used(rx0 + 2*slow); n != arrived[slow] || waiting() != 1 {
			t.Fatalf("the queue returned %d buffers, %d faults wait", n, waiting())
		}
	}
	g.serve(absent, true, nil)
	for _, f := range held {
		expectAt(slow, f)
	}
	for _, v := range []*vm{a, b, c} {
		if d := v.port.Attachment().Counters.Totals().Drops; len(d) != 0 {
			t.Errorf("frames were dropped: %v", d)
		}
	}
}
