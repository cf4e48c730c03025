package main

import (
	"bytes"
	"context"
	"net/netip"
	"strings"
	"testing"
)

// Each kind of damage to the receiver's memory is noticed.
func TestProof(t *testing.T) {
	const size, n = 1 << 10, 8
	src, dst := make([]byte, n*size), make([]byte, n*size)
	p := proofOf(slots(src, dst, size)...)
	for _, tc := range []struct {
		what     string
		messages int
		damage   func()
		err      string
	}{
		{"all arrived", 100, func() { copy(dst, src) }, ""},
		{"the first three", 3, func() { copy(dst, src[:3*size]) }, ""},
		{"one is missing", 4, func() { copy(dst, src[:3*size]) }, "3 of 8 message buffers"},
		{"nothing arrived", 0, func() {}, "0 of 8"},
		{"half of one", 4, func() { copy(dst, src[:3*size+size/2]) }, "message buffer 3"},
		{"the last byte", 100, func() { copy(dst, src[:n*size-1]) }, "message buffer 7"},
		{"a bit flipped", 100, func() { copy(dst, src); dst[5*size+17] ^= 4 }, "message buffer 5"},
		{"two exchanged", 100, func() {
			copy(dst, src)
			copy(dst[size:], src[2*size:3*size])
			copy(dst[2*size:], src[size:2*size])
		}, "message buffer 1"},
	} {
		p.prepare()
		tc.damage()
		err := p.verify(tc.messages)
		if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
	// Data of an earlier measurement is not the new one's.
	p.prepare()
	old := bytes.Clone(src)
	p.prepare()
	copy(dst, old)
	if err := p.verify(100); err == nil {
		t.Error("data of an earlier measurement passed")
	}
	// Several pieces from one source.
	p = proofOf(piece{src[:8], dst[:8]}, piece{src[:8], dst[512:520]})
	p.prepare()
	copy(dst, src[:8])
	if err := p.verify(1); err != nil {
		t.Error(err)
	}
	if err := p.verify(2); err == nil {
		t.Error("a missing copy passed")
	}
}

// damaged flips a bit of a stream.
type damaged struct{ at, read int }

func (d *damaged) Read(b []byte) (int, error) {
	n := copy(b, noise()[d.read%len(noise()):])
	if at := d.at - d.read; at >= 0 && at < n {
		b[at] ^= 0x80
	}
	d.read += n
	return n, nil
}

func TestProveTCP(t *testing.T) {
	if err := proveTCP(context.Background(), nil, nil, netip.MustParseAddr("127.0.0.1")); err != nil {
		t.Error(err)
	}
	for _, at := range []int{0, 1_048_573, streamProof - 1} {
		if err := sameStream(&damaged{at: at}, streamProof); err == nil || !strings.Contains(err.Error(), "differs") {
			t.Errorf("byte %d damaged: %v", at, err)
		}
	}
	if err := sameStream(&damaged{at: streamProof}, streamProof); err != nil {
		t.Error(err)
	}
	if err := sameStream(bytes.NewReader(noise()), streamProof); err == nil {
		t.Error("a stream that ends early passed")
	}
}
