package wire

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// TestCRC compares all lengths up to a jumbo frame's, at any offset, with hash/crc32, using the implementation chosen
// for this processor.
func TestCRC(t *testing.T) {
	t.Logf("uses VPCLMULQDQ: %t", hasCRC512)
	rng := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 16<<10)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	var head [icrcHead]byte
	for n := 0; n <= 9600; n += icrcStep {
		for range 8 {
			at, from, crc := rng.IntN(icrcStep), rng.IntN(len(data)-len(head)), rng.Uint32()
			copy(head[:], data[from:])
			b := data[at : at+n]
			want := crc32.Update(crc32.Update(crc, crc32.IEEETable, head[:]), crc32.IEEETable, b)
			if got := updateCRC(crc, &head, b); got != want {
				t.Fatalf("%d bytes at %d: %#x, want %#x", n, at, got, want)
			}
		}
	}
}

// TestICRCPlain checks the implementation for processors without AVX-512.
func TestICRCPlain(t *testing.T) {
	defer func(was bool) { hasCRC512 = was }(hasCRC512)
	hasCRC512 = false
	t.Run("lengths", TestBuildParseICRC)
	t.Run("foreign", TestForeignICRC)
}
