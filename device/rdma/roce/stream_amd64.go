package roce

// streamBlocks copies n bytes, at least 80, with non-temporal stores. They are visible to others before any later
// store.
//
//go:noescape
func streamBlocks(dst, src *byte, n int)

// stream is copy for more bytes than should enter the caches: the destination's old content is not read, and neither
// source nor destination evicts other data.
func stream(dst, src []byte) int {
	n := min(len(dst), len(src))
	if n < streamLeast {
		return copy(dst, src)
	}
	streamBlocks(&dst[0], &src[0], n)
	return n
}
