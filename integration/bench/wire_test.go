package main

import (
	"strings"
	"testing"
)

func TestData(t *testing.T) {
	b := make([]byte, 4096)
	fill(b, 1)
	if err := compareData(b, 1); err != nil {
		t.Error(err)
	}
	if err := compareData(b, 2); err == nil {
		t.Error("the data of another sample is taken for this one's")
	}
	copy(b[512:], b[:8])
	if err := compareData(b, 1); err == nil || !strings.Contains(err.Error(), "at 512") {
		t.Errorf("data at another place: %v", err)
	}
	fill(b, 1)
	b[4095] ^= 1
	if err := compareData(b, 1); err == nil || !strings.Contains(err.Error(), "at 4088") {
		t.Errorf("a changed bit: %v", err)
	}
	clear(b)
	if err := compareData(b, 1); err == nil {
		t.Error("nothing arrived and that is no error")
	}
}

func TestFrames(t *testing.T) {
	const dev = "Inter-|   Receive  |  Transmit\n face |bytes packets\n    lo: 1 1 0 0 0 0 0 0 2 2 0 0 0 0 0 0\n" +
		"    ul: 10 9 0 0 0 0 0 0 15140 10 0 0 0 0 0 0\n"
	s, err := parseSent(dev, "ul")
	if err != nil || s != (sent{15140, 10}) {
		t.Error(s, err)
	}
	for _, bad := range []string{"", "ul: 1 2 3", "ul: 10 9 0 0 0 0 0 0 x 10 0 0 0 0 0 0"} {
		if s, err := parseSent(bad, "ul"); err == nil {
			t.Error(bad, s)
		}
	}
	if n, err := s.meanFrame(sent{}, 1500); n != 1514 || err != nil {
		t.Error(n, err)
	}
	if n, err := s.meanFrame(sent{0, 1}, 1500); err == nil {
		t.Error("frames larger than the MTU", n)
	}
	if n, err := s.meanFrame(s, 1500); err == nil {
		t.Error("no frames", n)
	}
}

// TestParseInner: figures of a row that was measured in a VM, and results without them.
func TestParseInner(t *testing.T) {
	const good = `{"kernel":"6.12"}` + "\n" +
		`{"row":"r","ours":1.5,"anchor":3,"per":"KiB","cpu_ns":700,"anchor_cpu_ns":200,"extra":{"x":1}}` + "\n"
	r, err := parseInner(good, "r")
	if err != nil || r.ours.Value != 1.5 || r.anchor.Value != 3 || r.ours.Work.perUnit() != 700 ||
		r.anchor.Work.perUnit() != 200 || r.ours.Work.unit != "KiB" || r.ours.Extra["x"] != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	for _, bad := range []string{"", "x", `{"row":"q","ours":1.5,"anchor":3}`, `{"row":"r","error":"no daemon"}`,
		`{"row":"r","ours":1.5}`} {
		if r, err := parseInner(bad, "r"); err == nil {
			t.Errorf("%q: %+v", bad, r)
		}
	}
}
