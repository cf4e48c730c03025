package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

func TestGrown(t *testing.T) {
	before := resources{descriptors: 80, mappings: 40, threads: 10, goroutines: 50, rssKiB: 30 << 10}
	if err := grown(before, before); err != nil {
		t.Error("no growth:", err)
	}
	for _, c := range []struct {
		want  string
		after resources
	}{
		{"descriptors", resources{descriptors: 97}},
		{"mappings", resources{mappings: 61}},
		{"threads", resources{threads: 27}},
		{"goroutines", resources{goroutines: 67}},
		{"RSS", resources{rssKiB: 2 << 20}},
	} {
		if err := grown(before, c.after); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want an error that names %s", c.after, err, c.want)
		}
	}
}

func TestDefects(t *testing.T) {
	for _, line := range []string{"panic: runtime error: index out of range", "fatal error: concurrent map writes",
		"goroutine 17 [running]:", "WARNING: DATA RACE", "[ERROR] vnicd: bug in a control goroutine"} {
		if !defect.MatchString(line) {
			t.Errorf("%q is no defect", line)
		}
	}
	for _, line := range []string{"[WARN]  vnicd: request refused", "[DEBUG] vnicd.hca: debugging"} {
		if defect.MatchString(line) {
			t.Errorf("%q is a defect", line)
		}
	}
}

func TestChoose(t *testing.T) {
	if cs, err := choose(""); err != nil || len(cs) != len(campaigns) {
		t.Errorf("without names: %d campaigns, %v; want all", len(cs), err)
	}
	if cs, err := choose("guest doors"); err != nil || len(cs) != 2 || cs[0].name != "guest" {
		t.Errorf("two names: %v, %v", names(cs), err)
	}
	if _, err := choose("gest"); err == nil || !strings.Contains(err.Error(), "guest") {
		t.Errorf("unknown name: %v, want an error that lists the names", err)
	}
}

// The buffers of split are those of the whole, in order.
func TestSplit(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		n, k := 1+rng.IntN(3000), 1+rng.IntN(300)
		bufs := split(rng, 4096, n, k)
		if len(bufs) > k {
			t.Fatalf("%d bytes in %d buffers, want at most %d", n, len(bufs), k)
		}
		at := 4096
		for _, b := range bufs {
			if int(b.PA) != at || b.Len == 0 {
				t.Fatalf("buffer at %d, %d bytes; want it at %d", b.PA, b.Len, at)
			}
			at += int(b.Len)
		}
		if at != 4096+n {
			t.Fatalf("%d bytes in all, want %d", at-4096, n)
		}
	}
}

// An interrupted operation has changed some bytes to what it was to write, and no byte to anything else.
func TestTorn(t *testing.T) {
	before, after := []byte{1, 2, 3, 4}, []byte{1, 9, 8, 4}
	for _, good := range [][]byte{{1, 2, 3, 4}, {1, 9, 3, 4}, {1, 2, 8, 4}, {1, 9, 8, 4}} {
		if i := torn(good, before, after); i >= 0 {
			t.Errorf("%v is wrong at %d", good, i)
		}
	}
	for _, c := range []struct {
		got []byte
		at  int
	}{{[]byte{0, 2, 3, 4}, 0}, {[]byte{1, 8, 3, 4}, 1}, {[]byte{1, 9, 8, 5}, 3}} {
		if i := torn(c.got, before, after); i != c.at {
			t.Errorf("%v: wrong at %d, want %d", c.got, i, c.at)
		}
	}
}

// In an outage a pair may lose its connection and meet no other error.
func TestLost(t *testing.T) {
	for _, err := range []error{guestdrv.ErrDisconnected, guestdrv.WCWRFlushErr, guestdrv.WCRetryExcErr,
		context.Canceled} {
		if !lost(fmt.Errorf("WRITE of 8 bytes: %w", err)) {
			t.Errorf("%v is an event", err)
		}
	}
	for _, err := range []error{guestdrv.WCRemAccessErr, guestdrv.WCLocProtErr, guestdrv.ErrTimeout,
		errors.New("the target differs at 7")} {
		if lost(err) {
			t.Errorf("%v is no event", err)
		}
	}
}

// A pair that runs parks when it is interrupted, one that does not run is parked already, and both go on afterwards.
func TestOutage(t *testing.T) {
	p := &pair{cut: func() {}}
	p.expect()
	p.interrupt() // returns: nothing runs
	p.restored()
	if p.expected() != nil {
		t.Error("the outage is not over")
	}

	p.enter()
	p.expect()
	o := p.expected()
	select {
	case <-o.parked:
		t.Error("a running pair is parked")
	default:
	}
	done := make(chan struct{})
	go func() { o.park(context.Background()); p.leave(); close(done) }()
	p.interrupt()
	p.restored()
	<-done

	p.enter()
	p.expect()
	p.leave() // its phase is over
	p.interrupt()
	p.restored()
}

func TestSummary(t *testing.T) {
	var count atomic.Int64
	count.Store(17)
	got := summary([]*lab.Host{{Name: "s1"}}, [2]resources{{descriptors: 80, rssKiB: 30 << 10}},
		[2]resources{{descriptors: 81, threads: 9, rssKiB: 40 << 10}}, []campaign{{name: "guest", count: &count}})
	for _, want := range []string{"s1 before           80         0        0           0       30\n",
		"s1 after           81         0        9           0       40\n", "guest           17\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}
