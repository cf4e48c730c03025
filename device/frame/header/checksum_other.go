//go:build !amd64

package wire

func sumLong(b []byte) (sum uint64, rest []byte) { return 0, b }
