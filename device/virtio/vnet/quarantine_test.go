package vnet

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/translate"
)

// The card of a restricted VM works on: frames to it are dropped and counted, and so are its own frames if it is
// blocked; their buffers return to the driver, no queue breaks, and after the release frames flow again (PF-3).
func TestQuarantine(t *testing.T) { bothRings(t, 1, quarantine) }

func quarantine(t *testing.T, h *host) {
	a, b := h.vm(1, 1), h.vm(2, 1)
	ga, gb := newRawGuest(t, 1, h.rings), newRawGuest(t, 2, h.rings)
	ga.start(a.dev, 1)
	gb.start(b.dev, 0)
	defer a.dev.StopQueue(1)
	defer b.dev.StopQueue(0)
	var sender, receiver translate.Attribute
	sender.Bind(ga.space)
	receiver.Bind(gb.space)
	set := func(a *translate.Attribute, u translate.Uplink) {
		t.Helper()
		drains, err := a.Set(u)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range drains {
			if err := d.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	idx := uint16(0)
	send := func() {
		f := buildFrame(b.mac, a.mac, 200, byte(idx))
		copy(ga.buf(int(idx)), append(make([]byte, headerLen), f...))
		ga.offer(1, idx, int(idx), uint32(headerLen+len(f)), false)
		h.loops[0].Wake()
		idx++
		testutil.Eventually(t, "the transmit buffer returns", func() bool { return ga.used(1) == idx })
	}
	received := uint16(0)
	arrives := func() {
		t.Helper()
		sent := byte(idx)
		send()
		testutil.Eventually(t, "the frame", func() bool { return gb.used(0) == received+1 })
		if got := gb.buf(int(received))[headerLen:][:200]; !bytes.Equal(got, buildFrame(b.mac, a.mac, 200, sent)) {
			t.Errorf("frame %d: %x", sent, got[:20])
		}
		received++
	}
	for i := range uint16(5) {
		gb.offer(0, i, int(i), page, true)
	}
	arrives()
	for i, u := range []translate.Uplink{translate.UplinkReadOnly, translate.UplinkBlocked} {
		set(&receiver, u)
		send()
		testutil.Eventually(t, "the drop", func() bool { return b.dropped(vswitch.Forbidden) == uint64(i+1) })
		if gb.used(0) != received || !allZeroBytes(gb.buf(int(received))) {
			t.Errorf("%v: the frame was received", u)
		}
	}
	set(&receiver, translate.UplinkReadWrite)
	set(&sender, translate.UplinkReadOnly) // it sends: that reads
	arrives()
	set(&sender, translate.UplinkBlocked)
	send()
	if n := a.dropped(vswitch.Forbidden); n != 1 || gb.used(0) != received {
		t.Errorf("blocked: %d frames dropped, expected 1; %d received", n, gb.used(0)-received)
	}
	// A frame that waits for a page when the attribute changes is dropped.
	set(&sender, translate.UplinkReadWrite)
	gb.withdraw(int(received))
	send()
	testutil.Eventually(t, "the fault", func() bool { return gb.space.Faults().Stats().Waiting == 1 })
	set(&receiver, translate.UplinkReadOnly)
	gb.serve(int(received), true, nil)
	testutil.Eventually(t, "the drop", func() bool { return b.dropped(vswitch.Forbidden) == 3 })
	set(&receiver, translate.UplinkReadWrite)
	arrives()
	for _, v := range []*vm{a, b} {
		if s := v.dev.Describe(); s.Broken != "" {
			t.Error(s.Broken)
		}
	}
	if r := receiver.Refused(); r.Writes != 3 || r.Reads != 0 {
		t.Errorf("the receiver's refused accesses: %+v", r)
	}
	if r := sender.Refused(); r.Reads != 1 || r.Writes != 0 {
		t.Errorf("the sender's refused accesses: %+v", r)
	}
}

func allZeroBytes(b []byte) bool { return bytes.Count(b, []byte{0}) == len(b) }
