//go:build !amd64

package header

func sumLong(b []byte) (sum uint64, rest []byte) { return 0, b }
