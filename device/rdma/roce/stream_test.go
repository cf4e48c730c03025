package roce

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// TestStream checks that exactly the given bytes are copied, at all offsets and lengths.
func TestStream(t *testing.T) {
	const room = 4*streamLeast + 256
	src, dst, want := make([]byte, room), make([]byte, room), make([]byte, room)
	for i := range src {
		src[i] = byte(i*7 + i>>8)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range 20_000 {
		from, to := rng.IntN(80), rng.IntN(80)
		a, b := rng.IntN(4*streamLeast), rng.IntN(4*streamLeast)
		if i%3 == 0 {
			a = streamLeast - 8 + rng.IntN(16)
		}
		for i := range dst {
			dst[i] = 0xa5
		}
		copy(want, dst)
		n := copy(want[to:to+b], src[from:from+a])
		if got := stream(dst[to:to+b], src[from:from+a]); got != n {
			t.Fatalf("%d to %d bytes: %d copied", a, b, got)
		}
		if !bytes.Equal(dst, want) {
			t.Fatalf("%d bytes from %d to %d differ", n, from, to)
		}
	}
}

// BenchmarkStream copies slices all over more memory than caches hold.
func BenchmarkStream(b *testing.B) {
	const memory, slice = 64 << 20, 64 << 10
	dst, src := make([]byte, memory), make([]byte, memory)
	for i := range src {
		src[i], dst[i] = byte(i), 1
	}
	for _, how := range []struct {
		name string
		copy func(dst, src []byte) int
	}{
		{"copy", func(dst, src []byte) int { return copy(dst, src) }},
		{"stream", stream},
	} {
		b.Run(how.name, func(b *testing.B) {
			b.SetBytes(slice)
			at := 0
			for range b.N {
				how.copy(dst[at:][:slice], src[at:][:slice])
				at = (at + slice) % memory
			}
		})
	}
}
