package main

import (
	"context"
	"encoding/binary"
	"math"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// simulatedPath carries a known rate and loses a part of what it carries. Its queue hides an overload until it is full.
type simulatedPath struct {
	capacity, queue, loss, sender float64
	fail                          func(n int) bool // the n-th probe, whatever its rate
	probes                        int
}

func (s *simulatedPath) try(rate float64) (probe, error) {
	s.probes++
	sending := probeTime(rate, time.Second/4).Seconds()
	n := math.Floor(rate * sending)
	if s.sender > 0 && rate > s.sender {
		sending = n / s.sender
	}
	read := min(n, s.capacity*sending+s.queue) * (1 - s.loss)
	if s.fail != nil && s.fail(s.probes) {
		read *= 0.99
	}
	elapsed := max(sending, read/s.capacity)
	return probe{sent: int(n), read: int(math.Round(read)), elapsed: time.Duration(elapsed * float64(time.Second))}, nil
}

func TestHighestRate(t *testing.T) {
	for _, tc := range []struct {
		name string
		path simulatedPath
		want float64
	}{
		{"exact", simulatedPath{capacity: 133e3}, 133e3},
		{"far below the guess", simulatedPath{capacity: 5e3}, 5e3},
		{"far above the guess", simulatedPath{capacity: 7e6}, 7e6},
		{"a queue", simulatedPath{capacity: 133e3, queue: 1000}, 133e3},
		{"a deep queue", simulatedPath{capacity: 133e3, queue: 1e6}, 133e3},
		{"tolerable loss", simulatedPath{capacity: 64e3, loss: 0.0009}, 64e3},
		{"a slow sender", simulatedPath{capacity: 1e9, sender: 90e3}, 90e3},
		{"single probes fail", simulatedPath{capacity: 133e3, fail: func(n int) bool { return n%5 == 0 }}, 133e3},
	} {
		got, err := highestRate(100e3, tc.path.try)
		if err != nil || math.Abs(got/tc.want-1) > 0.05 {
			t.Errorf("%s: %.0f/s with %d probes (%v), want %.0f", tc.name, got, tc.path.probes, err, tc.want)
		}
	}
	// Losses that do not depend on the rate are noticed however low it is.
	path := simulatedPath{capacity: 133e3, loss: 0.0015}
	if got, err := highestRate(100e3, path.try); err == nil {
		t.Errorf("%.0f/s with 0.15 %% lost", got)
	}
}

func loopbackPath(t *testing.T, buffer int) *datagramPath {
	t.Helper()
	p, err := newDatagramPath(nil, nil, netip.MustParseAddr("127.0.0.1"), 64, buffer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

// A receiver that reads late loses what its socket has no room for. The kernel counts these datagrams as delivered to
// UDP; the tally does not.
func TestLateReceiver(t *testing.T) {
	const n = 4000
	for _, tc := range []struct {
		buffer int
		all    bool
	}{{socketBuffer, true}, {8 << 10, false}} {
		p := loopbackPath(t, tc.buffer)
		sent, err := p.send(context.Background(), 20e3, n)
		if err != nil || sent < n/10 {
			t.Fatalf("%d of %d sent: %v", sent, n, err)
		}
		var count atomic.Int64
		count.Store(int64(sent))
		tally := &tally{path: p, seen: make([]uint64, n/64+1)}
		if err := p.receive(tally, &count); err != nil || tally.wrong != 0 {
			t.Fatal(err, tally.wrong)
		}
		if all := tally.read == sent; all != tc.all || tally.read == 0 {
			t.Errorf("buffer of %d bytes: %d of %d read", tc.buffer, tally.read, sent)
		}
		r := probe{sent: sent, read: tally.read, elapsed: time.Second}
		if r.carries(float64(sent)) != tc.all {
			t.Errorf("%+v carries the rate: %v", r, !tc.all)
		}
	}
}

// Each datagram counts once, and only if it is what was sent in this probe.
func TestTally(t *testing.T) {
	p := loopbackPath(t, socketBuffer)
	tl := &tally{path: p, probe: 7, seen: make([]uint64, 2)}
	datagram := func(probe, number uint64) []byte {
		d := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, probe), number)
		return append(d, p.payload(number)...)
	}
	flipped := datagram(7, 3)
	flipped[63] ^= 1
	renumbered := datagram(7, 4)
	renumbered[8] = 5
	for _, tc := range []struct {
		what  string
		d     []byte
		read  int
		wrong int
	}{
		{"first", datagram(7, 0), 1, 0},
		{"again", datagram(7, 0), 1, 0},
		{"after a gap", datagram(7, 127), 2, 0},
		{"of an earlier probe", datagram(6, 1), 2, 0},
		{"of no probe", datagram(8, 1), 2, 1},
		{"beyond the last", datagram(7, 128), 2, 2},
		{"bit flipped", flipped, 2, 3},
		{"number changed", renumbered, 2, 4},
		{"too long", append(datagram(7, 2), 0), 2, 5},
		{"too short", datagram(7, 2)[:63], 2, 6},
		{"good", datagram(7, 2), 3, 6},
	} {
		if tl.take(tc.d); tl.read != tc.read || tl.wrong != tc.wrong {
			t.Errorf("%s: %d read, %d wrong, want %d and %d", tc.what, tl.read, tl.wrong, tc.read, tc.wrong)
		}
	}
}

// A relay between sender and receiver that loses or corrupts on purpose is noticed.
func TestRelay(t *testing.T) {
	const every = 100
	for _, tc := range []struct {
		what string
		do   func(d []byte) []byte // to each hundredth datagram
	}{
		{"carries all", func(d []byte) []byte { return d }},
		{"loses", func([]byte) []byte { return nil }},
		{"corrupts", func(d []byte) []byte { d[40] ^= 0x10; return d }},
	} {
		p := loopbackPath(t, socketBuffer)
		out, err := unix.Getsockname(p.to)
		if err != nil {
			t.Fatal(err)
		}
		relay := loopbackPath(t, socketBuffer) // its receiving socket is the relay's
		in, err := unix.Getsockname(relay.to)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Connect(p.from, in); err != nil {
			t.Fatal(err)
		}
		var stop atomic.Bool
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			buf := make([]byte, 2048)
			for n := 1; !stop.Load(); {
				k, _, err := unix.Recvfrom(relay.to, buf, 0)
				if err != nil {
					continue // nothing arrived for a while
				}
				d := buf[:k]
				if n%every == 0 {
					d = tc.do(d)
				}
				n++
				if d != nil {
					_ = unix.Sendto(relay.to, d, 0, out) // a loss shows
				}
			}
		}()
		if err := p.patience(time.Second); err != nil { // a busy machine may not run the relay for long
			t.Fatal(err)
		}
		r, _, err := p.try(context.Background(), 10e3, 200*time.Millisecond)
		stop.Store(true)
		<-ended
		switch tc.what {
		case "carries all":
			if err != nil || r.read != r.sent {
				t.Errorf("%s: %+v, %v", tc.what, r, err)
			}
		case "loses":
			if err != nil || r.read > r.sent-r.sent/every || r.read == 0 || r.carries(10e3) {
				t.Errorf("%s: %+v, %v", tc.what, r, err)
			}
		case "corrupts":
			if err == nil || !strings.Contains(err.Error(), "differ from what was sent") {
				t.Errorf("%s: %+v, %v", tc.what, r, err)
			}
		}
	}
}
