//go:build !amd64

package wire

func updateCRC(crc uint32, head *[icrcHead]byte, rest []byte) uint32 {
	return updateCRCPlain(crc, head, rest)
}
