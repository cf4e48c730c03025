package header

import "testing"

// TestChecksumPlain is for processors without AVX2.
func TestChecksumPlain(t *testing.T) {
	defer func(was bool) { hasAVX2 = was }(hasAVX2)
	hasAVX2 = false
	t.Run("values", TestChecksum)
	t.Run("model", TestChecksumModel)
}
