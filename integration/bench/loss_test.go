package main

import (
	"testing"

	"github.com/cilium/ebpf"
)

// TestLoss runs the program on frames, without a wire.
func TestLoss(t *testing.T) {
	l, err := newLoss()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	frame := make([]byte, 64)
	run := func(share float64, kind byte, times uint32) (uint32, lossCount) {
		t.Helper()
		if err := l.set(share); err != nil {
			t.Fatal(err)
		}
		frame[12], frame[13] = 8, kind
		v, err := l.program.Run(&ebpf.RunOptions{Data: frame, Repeat: times})
		if err != nil {
			t.Fatal(err)
		}
		c, err := l.counted()
		if err != nil {
			t.Fatal(err)
		}
		return v, c
	}
	const ipv4, arp, next = 0, 6, ^uint32(0)
	if v, c := run(0, ipv4, 1000); v != next || c.Dropped != 0 || c.Frames < 1000 || c.check(0) != nil {
		t.Errorf("no loss: %#x, %+v", v, c)
	}
	if v, c := run(1, ipv4, 1000); v != tcxDrop || c.Dropped != c.Frames || c.percent() != 100 || c.check(1) != nil {
		t.Errorf("all lost: %#x, %+v", v, c)
	}
	if v, c := run(1, arp, 1000); v != next || c.Frames != 0 || c.check(1) == nil {
		t.Errorf("ARP: %#x, %+v", v, c)
	}
	for _, share := range []float64{0.001, 0.01} {
		if _, c := run(share, ipv4, 200_000); c.check(share) != nil {
			t.Errorf("%v: %v", share, c.check(share))
		} else if c.check(share/2) == nil || c.check(2*share) == nil || c.check(0) == nil {
			t.Errorf("%v: another share is taken for this one: %+v", share, c)
		}
	}
}
