package main

import (
	"math/rand/v2"
	"strings"
	"testing"
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
