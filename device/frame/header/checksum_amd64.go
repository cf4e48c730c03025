package header

import "golang.org/x/sys/cpu"

var hasAVX2 = cpu.X86.HasAVX2

// sumAVX2 adds up n bytes as little-endian words of 32 bits; n is a multiple of 32.
//
//go:noescape
func sumAVX2(p *byte, n int) uint64

// sumLong adds up the front part of b, of at least longSum bytes, as little-endian words, as far as several can be
// added at a time, and returns the rest.
func sumLong(b []byte) (sum uint64, rest []byte) {
	n := len(b) &^ 31
	if !hasAVX2 {
		return 0, b
	}
	return sumAVX2(&b[0], n), b[n:]
}
