package roce

// streamBlocks copies n bytes, 80 at least, with stores that do not go through the caches. They are visible to others
// before anything that is stored afterwards.
//
//go:noescape
func streamBlocks(dst, src *byte, n int)

// stream is copy for more bytes than caches should be troubled with: the destination's old content is not read, and
// neither evicts what others have there.
func stream(dst, src []byte) int {
	n := min(len(dst), len(src))
	if n < streamLeast {
		return copy(dst, src)
	}
	streamBlocks(&dst[0], &src[0], n)
	return n
}
