package header

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
)

// unhex turns spaced hexadecimal digits into bytes.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// VXLAN receivers ignore reserved bits and other flags (RFC 7348, 5).
func TestVXLANReserved(t *testing.T) {
	var h VXLAN
	if _, err := h.Decode(unhex(t, "ffffffff abcdefff")); err != nil || h.VNI != 0xabcdef {
		t.Error(h, err)
	}
}

func TestNeighborGolden(t *testing.T) {
	src, dst := [16]byte{0xfe, 0x80, 15: 1}, [16]byte{0xfe, 0x80, 15: 2}
	for name, c := range map[string]struct {
		n     Neighbor
		bytes string
	}{
		"solicitation": {Neighbor{Target: dst, Link: MAC{2, 0, 0, 0, 0, 1}, HasLink: true},
			"8700 7a1b 00000000 fe800000000000000000000000000002 0101 020000000001"},
		"advertisement": {Neighbor{Advert: true, Router: true, Solicited: true, Override: true, Target: dst,
			Link: MAC{2, 0, 0, 0, 0, 2}, HasLink: true},
			"8800 9819 e0000000 fe800000000000000000000000000002 0201 020000000002"},
		"without option": {Neighbor{Advert: true, Solicited: true, Target: dst},
			"8800 3c25 40000000 fe800000000000000000000000000002"},
	} {
		b := make([]byte, c.n.Len())
		c.n.Encode(b, src, dst)
		if want := unhex(t, c.bytes); !bytes.Equal(b, want) {
			t.Errorf("%s: %x, expected %x", name, b, want)
		}
		var got Neighbor
		if err := got.Decode(b, src, dst); err != nil || got != c.n {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if err := got.Decode(b, src, src); !errors.Is(err, ErrChecksum) {
			t.Errorf("%s: wrong address: %v", name, err)
		}
		for short := range len(b) {
			if got.Decode(b[:short], src, dst) == nil {
				t.Errorf("%s: %d bytes accepted", name, short)
			}
		}
	}
	seal := func(b []byte) []byte {
		b[2], b[3] = 0, 0
		sum := Checksum(b, PseudoSum6(src, dst, ProtoICMPv6, uint32(len(b))))
		b[2], b[3] = byte(sum>>8), byte(sum)
		return b
	}
	fixed := "8700 0000 00000000 fe800000000000000000000000000002"
	for name, c := range map[string]struct {
		bytes string
		want  error
	}{
		"option of length 0":  {fixed + "0100 020000000001", ErrLength},
		"option too long":     {fixed + "0102 020000000001", ErrLength},
		"half an option":      {fixed + "01", ErrLength},
		"too many options":    {fixed + strings.Repeat("0e01 000000000000", 20), ErrLength},
		"router solicitation": {"85" + fixed[2:], ErrType},
		"code 1":              {"8701" + fixed[4:], ErrType},
	} {
		var got Neighbor
		if err := got.Decode(seal(unhex(t, c.bytes)), src, dst); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var got Neighbor
	if err := got.Decode(seal(unhex(t, fixed+"0e01 000000000000 0101 020000000009")), src, dst); err != nil ||
		got.Link != (MAC{2, 0, 0, 0, 0, 9}) {
		t.Error("unknown options are skipped:", err)
	}
}

func TestChecksum(t *testing.T) {
	slow := func(b []byte, sum uint32) uint16 { // RFC 1071, 4.1
		s := uint64(sum)
		for i, x := range b {
			s += uint64(x) << (8 * (1 - i&1))
		}
		for s>>16 != 0 {
			s = s&0xffff + s>>16
		}
		return ^uint16(s)
	}
	for n := range 200 {
		for _, fill := range []byte{0, 1, 0x80, 0xff} {
			b := bytes.Repeat([]byte{fill}, n)
			for i := range b {
				b[i] ^= byte(i*i) & (fill + 1)
			}
			for _, init := range []uint32{0, 1, 0xffff, 0x1fffe, 0xffffffff} {
				if got, want := Checksum(b, init), slow(b, init); got != want {
					t.Fatalf("%d bytes of %#x, %#x: %#x, expected %#x", n, fill, init, got, want)
				}
			}
		}
	}
	if got := Checksum(unhex(t, "0001 f203 f4f5 f6f7"), 0); got != ^uint16(0xddf2) { // RFC 1071, 3
		t.Errorf("%#x", got)
	}
}

// TestChecksumModel compares with the definition, 16 bits at a time, for every
// length and alignment of the fast paths.
func TestChecksumModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	data := make([]byte, 600)
	for range 2000 {
		for i := range data {
			data[i] = byte(rng.Uint32())
			if rng.IntN(4) == 0 {
				data[i] = 0xff
			}
		}
		b, initial := data[rng.IntN(8):rng.IntN(len(data)-8)+8], rng.Uint32()
		sum := uint64(initial)
		for i, c := range b {
			sum += uint64(c) << (8 * (1 - i%2))
		}
		for sum>>16 != 0 {
			sum = sum>>16 + sum&0xffff
		}
		if got := Checksum(b, initial); got != ^uint16(sum) {
			t.Fatalf("%d bytes, initial %#x: %#x, want %#x", len(b), initial, got, ^uint16(sum))
		}
	}
}
